"""Answers on disk: whatever cuts them off, nothing is lost and nothing doubled."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import BadRequest, ConfigError
from paceline.serve.batch.ledger import Ledger
from paceline.serve.batch.lines import LineFile
from paceline.serve.batch.runner import ENDPOINTS
from tests.serve.batch.conftest import jsonl, line, records

BODY = {"usage": {"prompt_tokens": 3, "completion_tokens": 2}, "system_fingerprint": "fp_1", "text": "a\nb\u2028é"}


class Desk:
    """A folder with an input and what answers it."""

    def __init__(self, folder: Path, count: int = 6) -> None:
        self.input, self.output, self.errors = (folder / name for name in ("in.jsonl", "out.jsonl", "err.jsonl"))
        self.input.write_bytes(jsonl([line(f"r{i}", f"question {i}") for i in range(count)]))

    def open(self, salt: str = "") -> Ledger:
        self.lines = LineFile(self.input, ENDPOINTS, salt=salt)
        assert self.lines.scan(max_line_bytes=1 << 20) == []
        self.ledger = Ledger(self.lines, self.output, self.errors)
        try:
            self.ledger.open()
        except BaseException:
            self.close()
            raise
        return self.ledger

    def close(self) -> None:
        self.ledger.close()
        self.lines.close()

    def answer(self, *positions: int, status: int = 200) -> None:
        for position in positions:
            self.ledger.answer(position, self.lines.read(position), status, f"req-{position}", BODY)

    def work(self) -> None:
        """One whole run."""
        for position in self.open().undone():
            self.answer(position, status=400 if position % 3 == 2 else 200)
        self.close()


def test_a_second_run_finds_all_done(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.work()
    before = desk.output.read_bytes(), desk.errors.read_bytes()
    ledger = desk.open()
    assert list(ledger.undone()) == []
    assert (ledger.completed, ledger.failed, ledger.total) == (4, 2, 6)
    assert (ledger.prompt_tokens, ledger.completion_tokens, ledger.fingerprints) == (18, 12, {"fp_1"})
    desk.close()
    assert (desk.output.read_bytes(), desk.errors.read_bytes()) == before


def test_no_errors_no_file_for_them(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.open()
    desk.answer(0)
    desk.close()
    assert not desk.errors.exists()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cut_off_anywhere_the_rest_is_done_again(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A crash leaves a prefix of each file; after a power cut zeros may stand where the last record was to be."""
    desk = Desk(tmp_path_factory.mktemp("cut"))
    desk.work()
    for path in (desk.output, desk.errors):
        whole = path.read_bytes()
        kept = whole[: data.draw(st.integers(0, len(whole)))]
        if kept.endswith(b"\n") or not kept:
            kept += b"\0" * data.draw(st.integers(0, 9))
        path.write_bytes(kept)
    desk.work()
    output, errors = records(desk.output.read_bytes()), records(desk.errors.read_bytes())
    assert set(output) == {"r0", "r1", "r3", "r4"}
    assert set(errors) == {"r2", "r5"}
    assert all(one["response"]["body"] == BODY for one in (*output.values(), *errors.values()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"my diary", "is no output of a batch"),
        (b"my diary\n", "line 1: not an answer of a batch"),
        (b'{"id":"batch_req_1","custom_id":"elsewhere"}\n', "does not have: another batch's output"),
        (b'{"id":"batch_req_1","custom_id":"r0"}\n', "as it was before line 1"),
        (b'{"id": 5, "custom_id": "r0"}\n', "line 1: not an answer"),
        (b"\0\0\n", "line 1: not an answer"),
    ],
)
def test_what_is_not_ours_is_refused_and_left_alone(tmp_path: Path, content: bytes, message: str) -> None:
    for name in ("output", "errors"):
        desk = Desk(tmp_path)
        for path in (desk.output, desk.errors):
            path.unlink(missing_ok=True)
        getattr(desk, name).write_bytes(content)
        with pytest.raises(BadRequest, match=message):
            desk.open()
        assert getattr(desk, name).read_bytes() == content


def test_nothing_is_cut_before_all_is_known_to_be_ours(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.work()
    torn = desk.output.read_bytes()[:-5]
    desk.output.write_bytes(torn)
    desk.errors.write_bytes(b"my diary\n")
    with pytest.raises(BadRequest):
        desk.open()
    assert desk.output.read_bytes() == torn


def test_an_input_that_changed_is_noticed_by_line(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.work()
    changed = [line(f"r{i}", "other" if i == 4 else f"question {i}") for i in range(6)]
    desk.input.write_bytes(jsonl(changed))
    with pytest.raises(BadRequest, match=r"out.jsonl, line 4: answers custom_id 'r4' as it was before line 5 of"):
        desk.open()
    desk.input.write_bytes(jsonl([line(f"r{i}", f"question {i}") for i in (5, 4, 3, 2, 1, 0, 7)]))  # but more may come
    assert list(desk.open().undone()) == [6]
    desk.close()


def test_another_batch_of_the_same_input_has_other_ids(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.work()
    with pytest.raises(BadRequest, match="as it was before"):
        desk.open(salt="batch_2")


def test_doubled_records_are_refused(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.work()
    desk.output.write_bytes(desk.output.read_bytes() * 2)
    with pytest.raises(BadRequest, match="answers custom_id 'r0' a second time"):
        desk.open()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    desk, other = Desk(tmp_path), Desk(tmp_path)
    desk.open()
    with pytest.raises(ConfigError, match=r"another process is writing .*out\.jsonl"):
        other.open()
    desk.close()
    other.open()
    other.close()


def test_a_full_disk_leaves_whole_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path)
    desk.open()
    desk.answer(0)
    write, room = os.write, [100]

    def short(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        some = bytes(data[: room[0]])
        room[0] -= len(some)
        return write(fd, some)

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(OSError, match="No space"):
        desk.answer(1)
    room[0] = 1 << 20
    desk.answer(2)
    desk.close()
    assert set(records(desk.output.read_bytes())) == {"r0", "r2"}
    assert list(desk.open().undone()) == [1, 3, 4, 5]
    desk.close()


def test_the_longest_line_is_a_limit_while_reading(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [line("a"), line("b", "x" * 5000), line("c")]
    path.write_bytes(b"\xef\xbb\xbf" + jsonl(lines).replace(b"\n", b"\r\n").rstrip())
    file = LineFile(path, ENDPOINTS)
    [bad] = file.scan(max_line_bytes=1000)
    assert (bad.number, bad.code) == (2, "line_too_long")
    assert [file.read(position).custom_id for position in range(len(file))] == ["a", "c"]
    file.close()


@given(st.lists(st.one_of(st.binary(max_size=40), st.just(json.dumps(line("same")).encode())), max_size=8))
@settings(max_examples=80, deadline=None)
def test_no_bytes_make_scanning_fail(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("scan") / "in.jsonl"
    path.write_bytes(b"\n".join(parts))
    file = LineFile(path, ENDPOINTS)
    bad = file.scan(max_line_bytes=200)
    assert bad or len(file) == 1
    assert all(str(one) for one in bad)
    file.close()
