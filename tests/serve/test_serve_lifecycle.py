"""Starting, health, draining, dying, stopping; and what it takes to listen."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from paceline.engine.supervisor import EngineState
from paceline.errors import ConfigError, CorruptModel, ModelNotFound, UnsupportedModel
from paceline.serve.context import ServerContext
from paceline.serve.early import bind
from paceline.serve.settings import ServeSettings
from paceline.text.tokenizer import Tokenizer
from tests.serve.fake_engine import FakeEngine
from tests.serve.live import Live, events_of, live_server

USER = [{"role": "user", "content": "hi"}]


def start_stream(live: Live, results: dict[str, Any], **fields: Any) -> threading.Thread:
    """A streamed request in the background; its status and events land in `results`."""

    def run() -> None:
        with live.client.stream(
            "POST", "/v1/chat/completions", json={"messages": USER, "stream": True, **fields}
        ) as response:
            results["status"] = response.status_code
            results["headers"] = response.headers
            parts = []
            for part in response.iter_text():
                parts.append(part)
                results["began"] = True
            results["text"] = "".join(parts)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_not_ready_until_the_engine_answers(default_tokenizer: Tokenizer) -> None:
    with live_server(default_tokenizer, wait_ready=False) as live:
        pass  # stopped while it starts, or soon after
    assert live.exit_code == 0


def test_starting_engine(default_tokenizer: Tokenizer) -> None:
    with live_server(default_tokenizer) as live:
        live.call(lambda: setattr(live.engine, "state", EngineState.STARTING))
        for path in ("/health", "/ready"):
            response = live.get(path)
            assert response.status_code == 503
            assert response.json() == {"status": "starting"}
        for response in (live.chat(), live.chat(stream=True), live.get("/v1/models")):
            assert response.status_code == 503
            assert response.headers["retry-after"]
            assert response.json()["error"]["code"] == "engine_not_ready"
        assert live.get("/metrics").status_code == 200
        live.call(lambda: setattr(live.engine, "state", EngineState.READY))
        assert live.get("/health").status_code == 200


def test_hung_engine(default_tokenizer: Tokenizer) -> None:
    with live_server(default_tokenizer, ServeSettings(hung_after_s=10)) as live:
        live.engine.last_seen_s = 11.0
        assert live.get("/health").json() == {"status": "hung"}
        assert live.get("/ready").status_code == 503


def test_engine_that_cannot_start_ends_the_server(default_tokenizer: Tokenizer) -> None:
    live = Live(ServeSettings(), default_tokenizer, {})
    live.start_error = CorruptModel("model.gguf is truncated")
    live.start(wait_ready=False)
    live.join()
    live.client.close()
    assert live.error is live.start_error


def test_tokenizer_that_does_not_fit_ends_the_server(default_tokenizer: Tokenizer) -> None:
    live = Live(ServeSettings(), default_tokenizer, {"vocab": 49_000})
    live.start(wait_ready=False)
    live.join()
    live.client.close()
    assert isinstance(live.error, UnsupportedModel)
    assert "49152" in str(live.error)


def test_an_expected_tokenizer_is_read_before_the_engine_names_it_and_serves_one_life(
    default_tokenizer_dir: Path, tmp_path: Path
) -> None:
    async def check() -> None:
        engine = FakeEngine(vocab=49_152)
        context = ServerContext(engine, ServeSettings())
        file = tmp_path / "tokenizer.json"
        file.write_bytes((default_tokenizer_dir / "tokenizer.json").read_bytes())
        context.expect_tokenizer(tmp_path)
        assert context._expected is not None
        await asyncio.wait([context._expected[1]])
        file.unlink()
        await engine.start()
        engine._info = msgspec.structs.replace(engine._info, tokenizer_dir=str(tmp_path))
        assert (await context.model()).tokenizer.vocab_size == 49_152
        engine._info = msgspec.structs.replace(engine._info)  # another life, which may have found another file
        with pytest.raises(ModelNotFound):
            await context.model()

    asyncio.run(check())


def test_another_tokenizer_than_was_expected_is_the_one_that_the_engine_names(
    default_tokenizer_dir: Path, tmp_path: Path
) -> None:
    async def check() -> None:
        engine = FakeEngine(vocab=49_152)
        context = ServerContext(engine, ServeSettings())
        (tmp_path / "tokenizer.json").write_text("{}")
        context.expect_tokenizer(tmp_path)
        await engine.start()
        engine._info = msgspec.structs.replace(engine._info, tokenizer_dir=str(default_tokenizer_dir))
        assert (await context.model()).tokenizer.vocab_size == 49_152

    asyncio.run(check())


def test_dead_engine_ends_every_request_and_the_server(default_tokenizer: Tokenizer) -> None:
    with live_server(default_tokenizer) as live:
        live.says(" word" * 200)
        live.engine.step_s = 0.01
        streamed: dict[str, Any] = {}
        thread = start_stream(live, streamed)
        whole: dict[str, Any] = {}

        def ask() -> None:
            whole["response"] = live.chat()

        other = threading.Thread(target=ask)
        other.start()
        live.until(lambda: streamed.get("began", False) and live.call(lambda: live.engine.live) == 2)
        live.call(live.engine.die)
        thread.join(10)
        other.join(10)
        # The one that had begun ends with an error event, without [DONE]; the other is a plain 503.
        assert streamed["status"] == 200
        last = events_of(streamed["text"])[-1]
        assert last["error"]["code"] == "engine_dead"
        assert "SIGKILL" in last["error"]["message"]
        assert whole["response"].status_code == 503
        assert whole["response"].json()["error"]["code"] == "engine_dead"
        assert live.join() == 1
        labels = {"model_name": "tiny-test", "finished_reason": "error"}
        registry = live.server.context.metrics.registry
        assert registry.get_sample_value("paceline:request_success_total", labels) == 2
        assert registry.get_sample_value("paceline:requests_aborted_total", {"model_name": "tiny-test"}) is None


def test_stream_that_has_not_begun_gets_a_status(default_tokenizer: Tokenizer) -> None:
    with live_server(default_tokenizer) as live:
        live.engine.paused = True
        results: dict[str, Any] = {}
        thread = start_stream(live, results)
        live.until(lambda: live.call(lambda: live.engine.live) == 1)
        live.call(live.engine.die)
        thread.join(10)
        assert results["status"] == 503
        assert json.loads(results["text"])["error"]["code"] == "engine_dead"


def test_failing_step_is_an_error_of_its_requests_alone(default_tokenizer: Tokenizer) -> None:
    from paceline.engine.loop import RecoverableError

    with live_server(default_tokenizer) as live:
        live.says(" one two three")
        failing = True

        def fail(plan: Any) -> None:
            if failing:
                raise RecoverableError("this batch did not fit")

        live.engine.backend.fail = fail
        response = live.chat()
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_error"
        assert "did not fit" in response.json()["error"]["message"]
        failing = False
        assert live.chat().status_code == 200
        assert live.metric("paceline:request_success_total", finished_reason="error") == 1
        assert live.metric("paceline:request_errors_total", status="500") == 1


def test_draining_finishes_what_runs_and_takes_nothing_new(default_tokenizer: Tokenizer) -> None:
    with live_server(default_tokenizer, ServeSettings(drain_s=20)) as live:
        live.says(" word" * 20)
        live.engine.step_s = 0.02
        results: dict[str, Any] = {}
        thread = start_stream(live, results)
        live.until(lambda: results.get("began", False))
        live.call(live.server.stop)
        live.until(lambda: live.get("/ready").status_code == 503)
        assert live.get("/health").status_code == 200
        assert live.get("/ready").json() == {"status": "draining"}
        for response in (live.chat(), live.chat(stream=True)):
            assert response.status_code == 503
            assert response.headers["retry-after"]
        thread.join(20)
        assert events_of(results["text"])[-1] == "[DONE]"
        assert live.join() == 0


def test_second_signal_ends_what_runs(default_tokenizer: Tokenizer) -> None:
    with live_server(default_tokenizer, ServeSettings(drain_s=600)) as live:
        live.says(" word" * 500)
        live.engine.step_s = 0.02
        results: dict[str, Any] = {}
        thread = start_stream(live, results)
        live.until(lambda: results.get("began", False))
        live.call(live.server.stop)
        live.call(live.server.stop)
        thread.join(10)
        assert "error" in events_of(results["text"])[-1]
        assert live.join() == 0


def test_drain_ends_after_its_time(default_tokenizer: Tokenizer) -> None:
    with live_server(default_tokenizer, ServeSettings(drain_s=0.2)) as live:
        live.says(" word" * 500)
        live.engine.step_s = 0.02
        results: dict[str, Any] = {}
        thread = start_stream(live, results)
        live.until(lambda: results.get("began", False))
        live.call(live.server.stop)
        thread.join(10)
        assert "error" in events_of(results["text"])[-1]
        assert live.join() == 0


def test_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use") as caught:
            bind("127.0.0.1", port)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind("no-such-host.invalid", 0)


def test_tls(default_tokenizer: Tokenizer, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    try:
        subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no openssl command to make a certificate with")
    settings = ServeSettings(tls_certfile=str(cert), tls_keyfile=str(key))
    with live_server(default_tokenizer, settings, wait_ready=False) as live:
        assert live.url.startswith("https://")
        live.client.close()
        live.client = httpx.Client(base_url=live.url, verify=ssl.create_default_context(cafile=str(cert)))
        live.until(lambda: live.get("/ready").status_code == 200)
        assert live.chat().status_code == 200
        live.client.close()


def test_unusable_certificate_is_a_config_error(default_tokenizer: Tokenizer, tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("nothing")
    live = Live(ServeSettings(tls_certfile=str(bad), tls_keyfile=str(bad)), default_tokenizer, {})
    live._thread.start()
    live.join()
    assert isinstance(live.error, ConfigError)
    assert "bad.pem" in str(live.error)
