"""`paceline serve` as a process over the real model: start, call, drain, die; and every way not to start."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tests.app.processes import Running, run, running

from paceline.app.config import resolve
from paceline.app.serving import read_keys, serve_settings
from paceline.app.settings import AuthSettings
from paceline.errors import ConfigError
from paceline.serve.keys import hash_key
from paceline.serve.settings import ServeSettings

SMALL = ("--kv-gib", "0.2", "--max-model-len", "2048", "--threads", "1")
ASK = {"messages": [{"role": "user", "content": "Say hello."}], "temperature": 0, "max_tokens": 8}


def address(server: Running) -> str:
    return server.wait_for("Serving on").removeprefix("Serving on ").removesuffix(". Try:")


def curl(server: Running, env: dict[str, str] | None = None) -> dict[str, object]:
    """Run the printed command as it stands; the answer's body."""
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    server.wait_for("  -d ")
    command = server.out[server.out.index("curl ") :]
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})}
    )
    assert done.returncode == 0, done.stderr
    body: dict[str, object] = json.loads(done.stdout)
    return body


@pytest.fixture(scope="module")
def server(model_file: str) -> Iterator[Running]:
    """One server for what only looks; tests that end a server start their own."""
    with running("serve", model_file, "--port", "0", *SMALL, "--served-names", "tiny,alias") as one:
        address(one)
        yield one


def test_the_printed_curl_line_works(server: Running) -> None:
    body = curl(server)
    assert body["model"] == "tiny"
    assert body["choices"][0]["message"]["content"]  # type: ignore[index]


def test_the_cold_start_is_shown_in_stages_with_times(server: Running) -> None:
    stages = re.findall(r"^  (import|read|cache|tokenizer|warm up) +[\d.]+ s$", server.err, re.MULTILINE)
    assert stages == ["import", "read", "cache", "tokenizer", "warm up"]
    assert re.search(
        r"ready in [\d.]+ s: LlamaForCausalLM \(native\), float32 on cpu by \w+ kernels, context 2048 tokens",
        server.err,
    )


def test_served_names_and_settings_reach_the_server(server: Running) -> None:
    url = address(server)
    names = [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]]
    assert names == ["tiny", "alias"]
    assert httpx.get(f"{url}/ready").status_code == 200
    long = httpx.post(f"{url}/v1/completions", json={"model": "alias", "prompt": [1] * 2048, "max_tokens": 1})
    assert (long.status_code, "2048" in long.text) == (400, True)


def test_chat_talks_to_a_server(server: Running) -> None:
    done = run(
        *("chat", "--url", address(server), "--temperature", "0", "--max-tokens", "8", "--system", "Be brief."),
        given="/help\n/nonsense\nSay hello.\n\n/reset\nSay hello.\n",
    )
    assert (done.returncode, done.stderr.splitlines()[0]) == (0, f"talking to tiny at {address(server)}")
    assert "/system TEXT" in done.stderr
    assert "no command /nonsense" in done.stderr
    first, second = done.stdout.splitlines()
    assert first == second != ""  # greedy, and nothing of the first turn is left


def test_a_port_in_use_is_one_clear_line_and_nothing_is_loaded(server: Running) -> None:
    port = address(server).rpartition(":")[2]
    began = time.monotonic()
    done = run("serve", "--port", port)
    assert (done.returncode, done.stderr) == (
        64,
        f"paceline: port {port} on 127.0.0.1 is in use; choose another with --port\n",
    )
    assert time.monotonic() - began < 30  # no engine was started


def test_sigterm_drains(model_file: str) -> None:
    with running("serve", model_file, "--port", "0", *SMALL) as server:
        url = address(server)
        lines: list[str] = []
        begun = threading.Event()

        def stream() -> None:
            body = {**ASK, "stream": True, "max_tokens": 80, "ignore_eos": True}
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
                for line in response.iter_lines():
                    if line:
                        lines.append(line)
                        begun.set()

        reader = threading.Thread(target=stream)
        reader.start()
        assert begun.wait(60)
        server.signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while httpx.get(f"{url}/ready").status_code != 503:
            assert time.monotonic() < deadline
        assert httpx.post(f"{url}/v1/chat/completions", json=ASK).status_code == 503
        assert len(lines) < 80  # the stream still ran all the while
        reader.join()
        assert lines[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in lines[-2]
        assert server.wait() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_json_logs_keys_and_the_end_of_an_engine(model_file: str, tmp_path: Path) -> None:
    made = run("key", "new", "search", "--tenant", "web", "--requests-per-minute", "100")
    secret = made.stderr.removeprefix("key (shown this once): ").strip()
    (tmp_path / "keys.toml").write_text(made.stdout)
    (tmp_path / "paceline.toml").write_text('[auth]\napi_key_file = "keys.toml"\n[log]\nlog_format = "json"\n')
    config = str(tmp_path / "paceline.toml")
    with running("serve", model_file, "--port", "0", "--config", config, *SMALL) as server:
        url = json.loads(server.wait_for('"message": "ready"'))["url"]
        assert httpx.post(f"{url}/v1/chat/completions", json=ASK).status_code == 401
        bearer = {"Authorization": f"Bearer {secret}"}
        assert httpx.post(f"{url}/v1/chat/completions", json=ASK, headers=bearer, timeout=60).status_code == 200
        [engine] = children(server.process.pid)
        os.kill(engine, signal.SIGKILL)
        assert server.wait() == 1
    assert server.out == ""
    entries = [json.loads(line) for line in server.lines["err"]]
    assert [one["stage"] for one in entries if one["message"] == "stage"][-1] == "warm up"
    assert any(one.get("request_id") for one in entries)
    assert any("SIGKILL" in one["message"] for one in entries)
    assert "Say hello" not in server.err
    assert secret not in server.err


def children(pid: int) -> list[int]:
    """Processes started by this one."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    if not listed.exists():
        pytest.skip("needs Linux's /proc")
    return [int(child) for child in listed.read_text().split()]


@pytest.mark.slow
def test_restart_brings_a_killed_engine_back(model_file: str) -> None:
    with running("serve", model_file, "--port", "0", "--restart", *SMALL) as server:
        url = address(server)
        [engine] = children(server.process.pid)
        os.kill(engine, signal.SIGKILL)
        deadline = time.monotonic() + 120
        while children(server.process.pid) in ([], [engine]) or httpx.get(f"{url}/health").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert httpx.post(f"{url}/v1/chat/completions", json=ASK, timeout=60).status_code == 200
        server.signal(signal.SIGINT)
        assert server.wait() == 0


@pytest.mark.slow
def test_tls_and_a_key_from_the_environment(model_file: str, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*made.split(), "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    tls = ("--tls-cert", str(cert), "--tls-key", str(key))
    with running("serve", model_file, "--port", "0", *tls, *SMALL, env={"PACELINE_API_KEY": "s3cret"}) as server:
        assert address(server).startswith("https://")
        assert curl(server, {"PACELINE_API_KEY": "s3cret"})["object"] == "chat.completion"
        assert "error" in curl(server, {"PACELINE_API_KEY": "other"})
        assert "s3cret" not in server.out + server.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--model", "./absent"), 66, "no such file or folder: ./absent"),
        (("mystery",), 66, "unknown model 'mystery'; Known names: smollm2-135m"),
        (("mystery", "--model", "other"), 64, "the model is given twice: mystery and --model other"),
        (("--port", "http"), 64, "--port: 'http' is not accepted; expected a whole number from 0 to 65535"),
        (("--config", "absent.toml"), 64, "cannot read the configuration file"),
        (("--api-key-file", "absent.toml"), 64, "cannot read the key file absent.toml: No such file or directory"),
        (("--model", "a" * 5000), 66, "unknown model 'aaa"),
        (("--model", "~no such user/x.gguf"), 66, "no such file or folder: ~no such user/x.gguf"),
        (("--api-key-file", "~no such user/k"), 64, "cannot read the key file ~no such user/k: Could not"),
        (("--host", "a" * 70), 64, "not a valid host name"),
        (("--host", "a..b"), 64, "cannot listen on 'a..b': not a valid host name"),
        (("--max-body-mib", "1e308"), 64, "--max-body-mib: 1e308 is too large"),
        (("--host", "203.0.113.1"), 64, "cannot listen on 203.0.113.1 port 8000"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = run("serve", *arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("paceline: ")
    assert message in done.stderr


def test_a_truncated_model_says_why_in_its_last_line(model_file: str, tmp_path: Path) -> None:
    with open(model_file, "rb") as whole:
        (tmp_path / "cut.gguf").write_bytes(whole.read(1 << 20))
    done = run("serve", str(tmp_path / "cut.gguf"), "--port", "0", *SMALL)
    assert done.returncode == 65, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"paceline: {tmp_path}/cut.gguf")
    assert "Traceback" not in done.stderr


def test_every_setting_reaches_the_http_room(tmp_path: Path) -> None:
    settings = resolve({"max_body_mib": "0.5", "max_choices": "3", "drain_s": "7", "cors_origins": "http://a"}).settings
    made = serve_settings(settings)
    assert made.max_body_bytes == 1 << 19
    assert (made.max_choices, made.drain_s, made.cors_origins) == (3, 7.0, ("http://a",))
    made = serve_settings(resolve({}).settings)
    assert replace(made, batch=replace(made.batch, folder=None)) == ServeSettings()  # the two sets of defaults agree


def test_keys_come_from_the_file_and_the_environment(tmp_path: Path) -> None:
    assert read_keys(AuthSettings()) == ()
    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nname = "a"\nsha256 = "{hash_key("one")}"\n')
    keys = read_keys(AuthSettings(api_key_file=str(file), api_key="two"))
    assert [(key.name, key.sha256) for key in keys] == [("a", hash_key("one")), ("environment", hash_key("two"))]
    file.write_text("")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys(AuthSettings(api_key_file=str(file)))
    file.write_text('[[key]]\nname = "a"\n')
    with pytest.raises(ConfigError, match=r"keys\.toml, key 1 needs 'sha256'"):
        read_keys(AuthSettings(api_key_file=str(file)))


def test_ports_are_not_left_open() -> None:
    """The check for a port in use must not itself occupy it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = run("serve", "mystery", "--port", str(port))
    assert done.returncode == 66
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
