"""Ctrl-C at every stage, and whatever keeps a result from being written: one line, the right code, no leftovers."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.errors import ConfigError
from paceline.measure.claims import await_writers, claimed
from paceline.measure.cli import app
from paceline.measure.folder import RowWriter, RunFolder, make_folder, refuse_taken, remove_run, write_atomically
from paceline.measure.mockapi import MockConfig, MockProcess
from paceline.measure.schedule import digest

FAST = ["--warmup", "1", "--input", "20", "--output", "3", "--no-report", "--rate", "20"]


@contextmanager
def silent_server() -> Iterator[str]:
    """It takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    """A bench in a process of its own, with Ctrl-C as a terminal has it."""
    return subprocess.Popen(
        [sys.executable, "-m", "paceline.measure.cli", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )


def until_said(process: subprocess.Popen[str], word: str) -> list[str]:
    """Read its progress up to the line with a word."""
    lines: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if word in line:
            return lines
    raise AssertionError(f"never said {word}: {lines}")


def interrupted(process: subprocess.Popen[str], word: str) -> tuple[int, str]:
    """(exit code, rest of what it said) after Ctrl-C at a stage; it ends within seconds."""
    until_said(process, word)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, said = process.communicate(timeout=30)
    assert time.monotonic() - began < 10.0
    return process.returncode, said


def test_ctrl_c_while_the_server_says_nothing(tmp_path: Path) -> None:
    with silent_server() as url:
        code, said = interrupted(start(tmp_path, url, "-n", "5", "--out", "r", *FAST), "probing")
    assert (code, said) == (3, "paceline bench: stopped before the load began; nothing was measured\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stage", [pytest.param("self-check", marks=pytest.mark.slow), "warming up"])
def test_ctrl_c_before_the_load(tmp_path: Path, stage: str) -> None:
    with MockProcess(MockConfig(ttft_ms=5 if stage == "self-check" else 300, itl_ms=1)) as mock:
        more = [] if stage == "self-check" else ["--no-self-check"]
        code, said = interrupted(start(tmp_path, mock.url, "-n", "5", "--out", "r", *FAST, *more), stage)
    assert (code, said) == (3, "paceline bench: stopped before the load began; nothing was measured\n")
    assert not list(tmp_path.iterdir())


def test_two_runs_into_one_folder(tmp_path: Path) -> None:
    """The second is refused, whenever it comes, and the first one's files are as it wrote them."""
    with MockProcess(MockConfig(ttft_ms=5, itl_ms=1)) as mock:
        args = [mock.url, "-n", "12", "--no-self-check", "--out", "r", *FAST]
        both = [start(tmp_path, *args, "--seed", seed) for seed in ("1", "2")]
        said = [process.communicate(timeout=60) for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes[1] == 3 or codes == [3, 3], said
    refused = [err for (_, err), process in zip(said, both, strict=True) if "paceline bench:" in err]
    assert len(refused) == 1, said
    assert "already holds a run" in refused[0] or "another run" in refused[0]
    folder = RunFolder(tmp_path / "r")
    assert folder.manifest.complete
    assert len(folder.records()) == 12
    assert digest(folder.schedule_path.read_bytes()) == folder.manifest.schedule_sha256


def test_a_running_run_cannot_be_resumed(tmp_path: Path) -> None:
    with MockProcess(MockConfig(ttft_ms=5, itl_ms=1)) as mock:
        process = start(tmp_path, mock.url, "-n", "60", "--no-self-check", "--out", "r", *FAST)
        until_said(process, "running")
        done = bench("resume", str(tmp_path / "r"), "-q")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert done.exit_code == 3
    assert "another run" in done.stderr
    assert len(RunFolder(tmp_path / "r").manifest.segments) == 1


def bench(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), prog_name="bench")


def test_claims(tmp_path: Path) -> None:
    with claimed(tmp_path), pytest.raises(ConfigError, match="another run"), claimed(tmp_path):
        pass
    with claimed(tmp_path):
        pass  # given back
    writer = RowWriter(tmp_path / "records.w0.jsonl")
    with pytest.raises(ConfigError, match="another process"):
        RowWriter(tmp_path / "records.w0.jsonl")
    threading.Timer(0.2, writer.close).start()
    await_writers([tmp_path / "records.w0.jsonl"])  # returns when the writer has ended
    with (tmp_path / "records.w0.jsonl").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_run_that_never_began_takes_only_its_own_away(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text("mine")
    deep = tmp_path / "a" / "b"
    made = make_folder(deep)
    assert made == [deep, tmp_path / "a"]
    for name in ("manifest.json", "schedule.jsonl", "records.w0.jsonl", "health.w3.jsonl", "warmup.jsonl"):
        (deep / name).write_text("")
        (tmp_path / name).write_text("")
    remove_run(deep, made)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == []
    remove_run(tmp_path, make_folder(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["notes.jsonl"]


def test_where_no_result_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="is a file"):
            refuse_taken(place)
    with silent_server() as url:  # found out before the server is asked anything
        done = bench(url, "-n", "1", "--out", str(tmp_path / "file"), *FAST)
    assert (done.exit_code, done.stderr.count("\n")) == (3, 1)
    with pytest.raises(ConfigError, match="cannot make the folder"):
        make_folder(Path("/proc/nothing-can-be-made-here"))


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
from paceline.measure.cli import main
main()
"""


@pytest.mark.parametrize("limit", [100, 2000])
def test_no_room_for_the_first_files(tmp_path: Path, limit: int) -> None:
    """Files may grow to so many bytes and no further; a full disk looks the same."""
    with MockProcess(MockConfig(ttft_ms=5, itl_ms=1)) as mock:
        command = [sys.executable, "-c", FULL, str(limit), mock.url, "-n", "30", "--no-self-check", "-q", *FAST]
        done = subprocess.run(
            [*command, "--out", "r"], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
        )
    assert done.returncode == 3, done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_reader_that_leaves_is_no_verdict() -> None:
    """`bench ... | head -1`: exit code 1 would say that a gate failed."""
    command = [sys.executable, "-u", "-m", "paceline.measure.cli", "conformance", "--list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as listing:
        assert listing.stdout is not None
        listing.stdout.close()
        assert listing.stderr is not None
        said = listing.stderr.read()
        assert listing.wait(30) == 3, said
    assert said == "paceline bench: nobody reads the output any more\n"


def test_a_write_that_fails_leaves_the_old_file_and_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "manifest.json"
    write_atomically(path, b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
    assert path.read_bytes() == b"old"
