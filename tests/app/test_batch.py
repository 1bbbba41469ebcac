"""`paceline batch` and batches of `paceline serve`, over the real model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.app.processes import Running, run, running
from tests.serve.fake_engine import FakeEngine
from tests.text.conftest import default_tokenizer, default_tokenizer_dir

from paceline.app.batching import BatchFiles, opened, work_off
from paceline.app.llm import LLM
from paceline.app.serving import batch_folder
from paceline.app.settings import BatchSettings
from paceline.errors import BadRequest
from paceline.serve.settings import ServeSettings
from paceline.text.tokenizer import Tokenizer

__all__ = ["default_tokenizer", "default_tokenizer_dir"]
SMALL = ("--kv-gib", "0.05", "--max-model-len", "512", "--threads", "1", "--max-num-seqs", "4")


def request(number: int, *, max_tokens: int = 12, **body: Any) -> dict[str, Any]:
    prompt = f"{number}, {number + 1}, {number + 2},"
    body = {"model": "smollm2-135m", "prompt": prompt, "temperature": 0, "max_tokens": max_tokens, **body}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, entries: Sequence[Any]) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in entries))
    return path


def answers(path: Path) -> dict[str, Any]:
    found = [json.loads(one) for one in path.read_text().splitlines()]
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found), "something was answered twice"
    return by_id


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["response"]["body"]["choices"][0]["text"]
    return text


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(path: Path, count: int, process: Running) -> None:
    deadline = time.monotonic() + 120
    while lines_in(path) < count:
        assert time.monotonic() < deadline
        assert process.process.poll() is None, process.err
        time.sleep(0.01)


def test_killed_interrupted_and_gone_on_with(model_file: str, llm: LLM, tmp_path: Path) -> None:
    """kill -9, then Ctrl-C, then to the end: every request answered once, as the model answers it alone."""
    count = 16
    entries: list[Any] = [request(i, max_tokens=20) for i in range(count)]
    entries[7]["body"]["top_p"] = 5
    source = write(tmp_path / "in.jsonl", entries)
    output, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    command = ("batch", str(source), str(output), "--model", model_file, "--served-names", "smollm2-135m", *SMALL)
    with running(*command) as first:
        wait_for_lines(output, 2, first)
        os.kill(first.process.pid, signal.SIGKILL)
        first.wait()
    killed_at = lines_in(output)
    assert killed_at < count - 1
    with running(*command) as second:
        wait_for_lines(output, killed_at + 2, second)
        second.signal(signal.SIGINT)
        assert second.wait() == 130
        assert "interrupted; the same command goes on from here" in second.err
        assert "Traceback" not in second.err
    interrupted_at = lines_in(output) + lines_in(errors)
    assert interrupted_at < count
    third = run(*command)
    assert third.returncode == 1, third.stderr
    assert f"{interrupted_at} of {count} answered already" in third.stderr
    assert f"1 of {count} failed: {errors}" in third.stderr
    found, failed = answers(output), answers(errors)
    assert set(found) == {f"r{i}" for i in range(count)} - {"r7"}
    assert set(failed) == {"r7"}
    assert failed["r7"]["response"]["body"]["error"]["param"] == "top_p"
    for i in (0, 5, 15):
        alone = llm.generate(entries[i]["body"]["prompt"], temperature=0, max_tokens=20)[0].text
        assert text_of(found[f"r{i}"]) == alone
    before = output.read_bytes()
    again = run(*command)  # nothing is left to do, and no model is loaded for it
    assert again.returncode == 1
    assert "loading" not in again.stderr
    assert output.read_bytes() == before


def test_bad_lines_are_named_and_nothing_is_run(model_file: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request(1), "{", "", request(1), {**request(2), "url": "/v1/images"}])
    done = run("batch", str(source), str(tmp_path / "out.jsonl"), "--model", model_file)
    assert done.returncode == 65
    said = done.stderr.splitlines()
    assert said[0].startswith(f"paceline: {source}, line 2: not valid JSON")
    assert said[1] == f"paceline: {source}, line 4: custom_id 'r1' is that of line 1 too"
    assert said[2].startswith(f"paceline: {source}, line 5: url must be")
    assert said[3] == f"paceline: {source} is no batch as it is; nothing was run"
    assert not (tmp_path / "out.jsonl").exists()


def test_a_model_that_is_not_served_is_told_before_it_is_loaded(model_file: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [request(1), request(2, model="gpt-4o")])
    done = run(
        "batch", str(source), str(tmp_path / "out.jsonl"), "--model", model_file, "--served-names", "smollm2-135m"
    )
    assert done.returncode == 65
    assert "line 2: the model 'gpt-4o' is not served here; 'smollm2-135m' is" in done.stderr
    assert "loading" not in done.stderr


@pytest.mark.parametrize(
    ("source", "output", "code", "message"),
    [
        ("absent.jsonl", "out.jsonl", 65, "cannot use absent.jsonl: No such file or directory"),
        ("in.jsonl", "in.jsonl", 64, "must be three files"),
        ("in.jsonl", "no/where.jsonl", 64, "there is no folder no"),
        ("in.jsonl", "diary.txt", 65, "is no output of a batch"),
        (".", "out.jsonl", 65, "Is a directory"),
        ("empty.jsonl", "out.jsonl", 65, "the file holds no requests"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, source: str, output: str, code: int, message: str) -> None:
    write(tmp_path / "in.jsonl", [request(1)])
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "diary.txt").write_text("dear diary")
    done = run("batch", source, output, cwd=tmp_path)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "diary.txt").read_text() == "dear diary"


def test_answers_of_another_model_are_not_mixed(default_tokenizer: Tokenizer, tmp_path: Path) -> None:
    files = BatchFiles(
        write(tmp_path / "in.jsonl", [request(1), request(2)]), tmp_path / "out.jsonl", tmp_path / "err.jsonl"
    )
    settings = ServeSettings(served_names=("smollm2-135m",))

    async def work(*, resume: bool = True) -> None:
        engine = FakeEngine()
        await engine.start()
        with opened(files, settings, resume=resume) as (lines, ledger):
            await work_off(engine, settings, lines, ledger, concurrency=2, tokenizer=default_tokenizer)
        await engine.close()

    asyncio.run(work())
    assert len(answers(files.output)) == 2
    whole = files.output.read_text()
    mixed = whole.splitlines()[0].replace("fp_0123456789ab", "fp_ba9876543210")
    files.output.write_text(mixed + "\n")
    with pytest.raises(BadRequest, match="made by another model"):
        asyncio.run(work())
    assert files.output.read_text() == mixed + "\n"
    asyncio.run(work(resume=False))
    assert set(answers(files.output)) == {"r1", "r2"}
    assert mixed not in files.output.read_text()


def test_where_batches_lie() -> None:
    assert batch_folder(BatchSettings(), {"XDG_DATA_HOME": "/data"}) == Path("/data/paceline/batches")
    assert batch_folder(BatchSettings(), {"XDG_DATA_HOME": "data"}) == Path.home() / ".local/share/paceline/batches"
    assert batch_folder(BatchSettings(batch_dir="/elsewhere"), {}) == Path("/elsewhere")


@pytest.fixture
def server(model_file: str, tmp_path: Path) -> Iterator[Running]:
    small = ("--kv-gib", "0.05", "--max-model-len", "512", "--threads", "1")
    with running("serve", model_file, "--port", "0", "--batch-dir", str(tmp_path / "batches"), *small) as one:
        yield one


def test_the_openai_client_runs_a_batch_on_the_real_server(server: Running, tmp_path: Path) -> None:
    url = server.wait_for("Serving on").removeprefix("Serving on ").removesuffix(". Try:")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        model = client.models.list().data[0].id
        source = write(tmp_path / "in.jsonl", [request(i, model=model) for i in range(6)])
        with source.open("rb") as content:
            file = client.files.create(file=content, purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"of": "a test"}
        )
        deadline = time.monotonic() + 120
        while (batch := client.batches.retrieve(batch.id)).status in ("validating", "in_progress", "finalizing"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert batch.status == "completed"
        assert batch.output_file_id is not None
        (tmp_path / "out.jsonl").write_bytes(client.files.content(batch.output_file_id).read())
        found = answers(tmp_path / "out.jsonl")
        assert set(found) == {f"r{i}" for i in range(6)}
        direct = client.completions.create(model=model, prompt="3, 4, 5,", temperature=0, max_tokens=12)
        assert text_of(found["r3"]) == direct.choices[0].text
        assert found["r3"]["response"]["body"]["usage"]["completion_tokens"] == 12
