"""The command line: light to start, right exit codes, answers on stdout and everything else on stderr."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.app.processes import environment, run, running

from paceline.app.cli import EXIT_CODES, exit_code
from paceline.app.commands.chat import Conversation, Messages
from paceline.app.llm import LLM
from paceline.errors import BadRequest, ConfigError, CorruptModel, EngineDead, ModelNotFound, PacelineError
from paceline.version import __version__

SMALL = ("--kv-gib", "0.05", "--max-model-len", "512", "--threads", "1")
GREEDY = ("--temperature", "0", "--max-tokens", "12")
HEAVY = ("torch", "transformers", "numpy", "tokenizers", "starlette", "uvicorn", "huggingface_hub", "httpx", "zmq")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["serve", "--help"], ["bench", "--help"], ["models"]])
def test_what_only_informs_loads_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from paceline.app import cli\n"
        f"sys.argv = ['paceline', *{arguments!r}]\n"
        "try:\n"
        "    cli.main()\n"
        "finally:\n"
        f"    print('LOADED', [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment(), timeout=60)
    assert done.returncode == 0
    assert "LOADED []" in done.stderr


def test_a_server_starts_its_engine_before_it_imports_what_the_engine_does_not_wait_for(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    later = ("paceline.serve.server", "starlette", "uvicorn", "tokenizers", "numpy", "torch", "paceline.app.simulating")
    script = (
        "import os, sys\n"
        "def hook(event, details):\n"
        "    if event == 'subprocess.Popen' and 'paceline.engine.child' in details[1]:\n"
        f"        print('LOADED', [name for name in {later!r} if name in sys.modules], flush=True)\n"
        "        os._exit(0)\n"
        "sys.addaudithook(hook)\n"
        "from paceline.app import cli\n"
        "sys.argv = ['paceline', 'serve', 'model.gguf', '--port', '0']\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(), timeout=60, cwd=tmp_path
    )
    assert done.stdout == "LOADED []\n", done.stderr


def test_the_installed_command_is_this_one() -> None:
    command = Path(sys.executable).parent / "paceline"
    done = subprocess.run([command, "--version"], capture_output=True, text=True, env=environment(), timeout=60)
    assert (done.returncode, done.stdout) == (0, f"paceline {__version__}\n")


def test_every_error_has_an_exit_code() -> None:
    wanted = [(ConfigError, 64), (BadRequest, 65), (ModelNotFound, 66), (CorruptModel, 65), (EngineDead, 70)]
    assert [exit_code(kind("x")) for kind, _ in wanted] == [code for _, code in wanted]
    assert exit_code(PacelineError("x")) == 1
    assert all(0 < code < 126 for _, code in EXIT_CODES)


def test_models_and_pull_agree(model_file: str) -> None:
    listed = json.loads(run("models", "--json").stdout)
    assert [(one["name"], one["path"]) for one in listed] == [("smollm2-135m", model_file)]
    pulled = run("pull", "SmolLM2-135M-Instruct")
    assert (pulled.returncode, pulled.stdout) == (0, f"{model_file}\n")
    assert "SmolLM2-135M-Instruct: verify" in pulled.stderr
    missing = run("pull", "mystery")
    assert missing.returncode == 66
    assert missing.stderr.startswith("paceline: nothing to pull by the name 'mystery'; known names: smollm2-135m")


def test_config_says_what_resolved_and_from_where(tmp_path: Path) -> None:
    (tmp_path / "paceline.toml").write_text(
        "[serve]\nport = 81\n[scheduler.classes.interactive]\nttft_ms = 500\n[scheduler.classes.night]\npriority = 9\n"
    )
    env = {"PACELINE_KV_GIB": "2", "PACELINE_API_KEY": "s3cret"}
    done = run("config", "--json", "--block-size", "32", cwd=tmp_path, env=env)
    found = {key: (one["value"], one["from"]) for key, one in json.loads(done.stdout).items()}
    assert found["kv.block_size"] == (32, "--block-size")
    assert found["serve.port"] == (81, f"{tmp_path}/paceline.toml: serve.port")
    assert found["kv.kv_gib"] == (2.0, "PACELINE_KV_GIB")
    assert found["auth.api_key"] == ("(set)", "PACELINE_API_KEY")
    assert found["log.log_level"] == ("info", "default")
    classes = found["scheduler.classes"][0]
    assert (classes["interactive"]["ttft_ms"], classes["interactive"]["itl_ms"]) == (500, 100)
    assert classes["night"]["priority"] == 9
    assert "s3cret" not in done.stdout + run("config", cwd=tmp_path, env=env).stdout


def test_config_file_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("[serve]\nport = 82\n")
    done = run("config", "--json", env={"PACELINE_CONFIG": str(tmp_path / "other.toml"), "PACELINE_PROT": "1"})
    assert json.loads(done.stdout)["serve.port"]["value"] == 82
    assert done.stderr == "warning: PACELINE_PROT is set and is no setting; did you mean PACELINE_PORT?\n"


def test_generate_streams_one_answer_to_stdout(model_file: str, llm: LLM) -> None:
    done = run("generate", "--model", model_file, *SMALL, *GREEDY, given="1, 2, 3, 4,")
    assert done.returncode == 0, done.stderr
    assert done.stdout == llm.generate("1, 2, 3, 4,", temperature=0, max_tokens=12)[0].text + "\n"
    assert "warm up" in done.stderr


def test_generate_answers_a_file_as_json_lines(model_file: str, llm: LLM, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Say hello."}]
    jobs = [{"prompt": "1, 2, 3, 4,", "id": "count"}, {"messages": chat, "custom_id": "hello"}, {"prompt": "a, b,"}]
    (tmp_path / "jobs.jsonl").write_text("\n".join(json.dumps(job) for job in jobs) + "\n\n")
    file = str(tmp_path / "jobs.jsonl")
    done = run("generate", "--model", model_file, "--file", file, "--json", "--logprobs", "1", *SMALL, *GREEDY)
    assert done.returncode == 0, done.stderr
    answers = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda one: one["index"])
    assert [one.get("id") for one in answers] == ["count", "hello", None]
    assert answers[0]["text"] == llm.generate("1, 2, 3, 4,", temperature=0, max_tokens=12)[0].text
    assert (answers[1]["messages"], answers[1]["text"]) == (chat, llm.chat(chat, temperature=0, max_tokens=12).text)
    assert len(answers[0]["logprobs"]) == len(answers[0]["tokens"])
    assert answers[2]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["typer", "paceline.errors", "paceline.app.commands.simulate"])
def test_ctrl_c_while_modules_are_read_leaves_no_traceback(name: str) -> None:
    script = (
        "import sys\n"
        "class Impatient:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {name!r}:\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Impatient())\n"
        "sys.argv = ['paceline', 'simulate', '--help']\n"
        "from paceline.app.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment(), timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_keeps_what_is_there(model_file: str, tmp_path: Path) -> None:
    """What has ended is whole, what runs is cut, and it all ends at once with 130."""
    short, endless = {"messages": [{"role": "user", "content": "Say hello."}]}, {"prompt": "1, 2, 3,"}
    (tmp_path / "jobs.jsonl").write_text(f"{json.dumps(short)}\n{json.dumps(endless)}\n")
    arguments = ("--file", str(tmp_path / "jobs.jsonl"), "--temperature", "0", "--max-tokens", "480", "--json")
    with running("generate", "--model", model_file, *SMALL, *arguments) as generating:
        generating.wait_for('"index": 0')
        generating.process.send_signal(signal.SIGINT)
        assert generating.wait() == 130
    answers = [json.loads(line) for line in generating.lines["out"]]
    assert [(one["index"], one["finish_reason"]) for one in answers] == [(0, "stop"), (1, "abort")]
    assert answers[1]["text"].startswith(" 4, 5, 6,")
    assert generating.lines["err"][-1] == "paceline: interrupted; 1 of 2 answers are whole"
    assert "Traceback" not in generating.err


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        (["prompt", "--file", "jobs.jsonl"], "", "give a prompt or --file, not both"),
        ([], "", "no prompt in what was given"),
        (["--file", "jobs.jsonl"], "", "no prompt in jobs.jsonl"),
        (["--file", "absent.txt"], "", "cannot read absent.txt: No such file or directory"),
        (["--file", "jobs.jsonl"], '{"prompt": "x"}\n{', "jobs.jsonl, line 2: not JSON"),
        (["--file", "jobs.jsonl"], '{"prompt": "x", "messages": []}', "line 1: needs an object with 'prompt' or"),
        (["--file", "jobs.jsonl"], '{"prompt": ""}', "line 1: prompt must be text, and not empty"),
        (["--file", "jobs.jsonl"], '{"messages": "x"}', "line 1: messages must be a list, and not empty"),
        (["x", "--temperature", "3"], "", "temperature is 3.0; it must be from 0 to 2"),
    ],
)
def test_generate_refuses_bad_input_before_loading(
    tmp_path: Path, arguments: list[str], content: str, message: str
) -> None:
    (tmp_path / "jobs.jsonl").write_text(content)
    done = run("generate", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (65, 1)
    assert message in done.stderr


def test_chat_in_this_process(model_file: str, llm: LLM) -> None:
    done = run("chat", model_file, *SMALL, "--temperature", "0", "--max-tokens", "20", given="Say hello.\n")
    assert done.returncode == 0, done.stderr
    message = [{"role": "user", "content": "Say hello."}]
    assert done.stdout == llm.chat(message, temperature=0, max_tokens=20).text + "\n"


def test_chat_with_nobody_there() -> None:
    done = run("chat", "--url", "http://127.0.0.1:9")
    assert done.returncode == 70
    assert done.stderr.startswith("paceline: cannot reach http://127.0.0.1:9")


class Script:
    """What a person types: lines, and where they press Ctrl-C."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines = list(lines)

    def __call__(self, prompt: str = "") -> str:
        line = self._lines.pop(0) if self._lines else EOFError
        if isinstance(line, str):
            return line
        raise line


def test_a_conversation_remembers_resets_and_survives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[Messages] = []
    closed: list[bool] = []

    def talk(messages: Messages):  # type: ignore[no-untyped-def]
        heard.append([dict(one) for one in messages])
        try:
            yield "an "
            if messages[-1]["content"] == "interrupt me":
                raise KeyboardInterrupt
            if messages[-1]["content"] == "too long":
                raise BadRequest("the prompt has 9 tokens")
            yield "answer"
        finally:
            closed.append(True)

    script = Script(
        "one", KeyboardInterrupt, "interrupt me", "too long", "two", "/system Be kind.", "three", "/reset", "4"
    )
    monkeypatch.setattr("builtins.input", script)
    Conversation(talk, None).run()

    def said(*texts: str) -> Messages:
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]

    kind: Messages = [{"role": "system", "content": "Be kind."}]
    assert heard == [
        said("one"),
        said("one", "an answer", "interrupt me"),
        said("one", "an answer", "interrupt me", "an ", "too long"),
        said("one", "an answer", "interrupt me", "an ", "two"),
        kind + said("three"),
        kind + said("4"),
    ]
    assert len(closed) == len(heard)
    output = capsys.readouterr()
    assert "an  [stopped]" in output.out
    assert "Ctrl-D leaves" in output.err
    assert "the prompt has 9 tokens (/reset starts anew)" in output.err
