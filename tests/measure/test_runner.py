"""Whole runs with real worker processes against the mock in its own process."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.errors import ConfigError
from paceline.measure.folder import RowWriter, RunFolder, read_rows
from paceline.measure.mockapi import MockConfig, MockProcess
from paceline.measure.plan import Arrivals, BenchPlan, ClientPlan, Length, Load, Prompts, Target
from paceline.measure.progress import Progress
from paceline.measure.records import ErrorClass, Manifest, Phase, RequestRecord
from paceline.measure.resuming import done_indexes, resume_point
from paceline.measure.runner import rerun, resume, run
from paceline.measure.schedule import build_schedule, encode


def plan(url: str, load: Load, *, prompts: Prompts | None = None, **client: Any) -> BenchPlan:
    client = {"self_check": False, "warmup_requests": 2, **client}
    prompts = prompts or Prompts(input=Length(value=40), output=Length(value=5))
    return BenchPlan(target=Target(url=url), load=load, prompts=prompts, client=ClientPlan(**client))


def test_an_open_loop_over_two_workers(tmp_path: Path) -> None:
    stages: list[str] = []

    def watch(progress: Progress) -> None:
        if not stages or stages[-1] != progress.stage:
            stages.append(progress.stage)

    with MockProcess(MockConfig(ttft_ms=20, itl_ms=5)) as mock:
        stated = plan(mock.url, Load(rate=40, requests=40), workers=2)
        folder = run(stated, tmp_path / "r", watch)
    records = folder.records()
    assert [r.id for r in records] == [f"r{i}" for i in range(40)]
    assert all(r.ok for r in records)
    assert {r.worker for r in records} == {0, 1}
    assert all(r.worker == r.index % 2 for r in records)
    planned = [a.at_s for a in build_schedule(stated)]
    assert [r.scheduled_s for r in records] == pytest.approx(planned, abs=1e-6)
    assert all(r.usage and r.usage.prompt_tokens == 40 for r in records)
    manifest = folder.manifest
    assert manifest.complete
    assert manifest.requests_planned == 40
    assert manifest.token_fit is not None
    assert (manifest.token_fit.checked, manifest.token_fit.mismatched) == (40, 0)
    assert BenchPlan.from_dict(manifest.plan) == stated
    assert manifest.target["model"] == "mock"
    assert manifest.client["cpus"]
    scrapes = folder.scrapes()
    assert scrapes[-1].values["generation_tokens"] - scrapes[0].values["generation_tokens"] == 200
    assert len(folder.records(Phase.WARMUP)) == 2
    assert {s.worker for s in folder.samples()} == {0, 1}
    assert stages == ["probing", "warming up", "preparing", "running", "done"]


def test_a_closed_loop_keeps_its_concurrency_and_talks_in_turns(tmp_path: Path) -> None:
    prompts = Prompts(
        input=Length(value=30),
        output=Length(value=4),
        turns=Length(value=3),
        think=Length(value=30, low=0),
        turn_input=Length(value=10),
    )
    with MockProcess(MockConfig(ttft_ms=20, itl_ms=5)) as mock:
        load = Load(arrivals=Arrivals.CLOSED, concurrency=4, requests=12)
        folder = run(plan(mock.url, load, prompts=prompts), tmp_path / "r")
    records = folder.records()
    assert len(records) == 36
    assert sum(r.first_wave for r in records) == 4
    talks: dict[int, list[RequestRecord]] = {}
    for record in records:
        talks.setdefault(record.index, []).append(record)
    for turns in talks.values():
        turns.sort(key=lambda r: r.turn)
        assert [r.turn for r in turns] == [0, 1, 2]
        sizes = [r.usage.prompt_tokens for r in turns if r.usage]
        # Each turn carries what was said before: the answer's four tokens and ten new ones.
        assert sizes == [30, 44, 58]
        for before, after in itertools.pairwise(turns):
            assert before.closed_s is not None
            assert before.dispatched_s is not None
            expected = before.scheduled_s + (before.closed_s - before.dispatched_s) + 0.03
            assert after.scheduled_s == pytest.approx(expected, abs=1e-5)
    starts = sorted((r.dispatched_s or 0) for r in records if r.first_wave)
    assert starts[-1] - starts[0] < 0.1  # all in flight together


def test_a_closed_loop_bounded_by_time_goes_on_past_its_drawn_list(tmp_path: Path) -> None:
    prompts = Prompts(input=Length(value=20), output=Length(value=1))
    with MockProcess(MockConfig(ttft_ms=0, itl_ms=0)) as mock:
        load = Load(arrivals=Arrivals.CLOSED, concurrency=2, duration_s=1.0)
        stated = plan(mock.url, load, prompts=prompts, warmup_requests=0)
        folder = run(stated, tmp_path / "r")
    records = folder.records()
    assert len({r.id for r in records}) == len(records) > 20
    assert max(r.scheduled_s for r in records) < 1.0
    assert folder.manifest.requests_planned == 0


def test_rerun_repeats_the_schedule_and_fresh_prompts_change_only_texts(tmp_path: Path) -> None:
    with MockProcess(MockConfig(ttft_ms=5, itl_ms=1)) as mock:
        first = run(plan(mock.url, Load(rate=50, requests=10)), tmp_path / "a")
        second = rerun(first.path, tmp_path / "b")
        third = rerun(first.path, tmp_path / "c", fresh_prompts=True)
    assert second.manifest.schedule_sha256 == first.manifest.schedule_sha256 == third.manifest.schedule_sha256
    assert second.manifest.parent == first.manifest.run_id
    assert second.manifest.plan == first.manifest.plan
    assert third.manifest.plan["prompts"]["salt"]


SCRIPT = """
import sys, msgspec
from pathlib import Path
from paceline.measure.plan import BenchPlan
from paceline.measure.runner import run
folder = run(msgspec.json.decode(sys.argv[1], type=BenchPlan), Path(sys.argv[2]), lambda p: print(p.stage, flush=True))
print("ended", folder.manifest.segments[-1].ended, flush=True)
"""


def start(stated: BenchPlan, path: Path) -> subprocess.Popen[str]:
    """A run in a process of its own, returned once its load runs and something was recorded."""
    command = [sys.executable, "-c", SCRIPT, msgspec.json.encode(stated).decode(), str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        records = path / "records.w0.jsonl"
        if records.exists() and records.stat().st_size > 0:
            return process
        time.sleep(0.05)
    process.kill()
    raise AssertionError("the run did not begin")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_and_a_killed_run_are_readable_and_resume(tmp_path: Path, how: signal.Signals) -> None:
    path = tmp_path / "r"
    with MockProcess(MockConfig(ttft_ms=100, itl_ms=20)) as mock:
        stated = plan(mock.url, Load(arrivals=Arrivals.CONSTANT, rate=30, requests=30), workers=2)
        process = start(stated, path)
        process.send_signal(how)
        out, _ = process.communicate(timeout=30)
        if how is signal.SIGINT:
            assert process.returncode == 0
            assert "ended interrupted" in out
        cut = RunFolder(path)
        cut.settle()  # workers end by themselves when the runner is gone; their last lines may be on the way
        before = cut.records()
        assert not cut.manifest.complete
        assert 0 < len(before) < 30
        finished = {r.id for r in before if r.error is not ErrorClass.CANCELLED}
        with (path / "records.w0.jsonl").open("ab") as file:
            file.write(b'{"id":"r5","ind')  # as a crash in the middle of a write leaves it
        folder = resume(path)
    records = folder.records()
    assert {r.id for r in records} == {f"r{i}" for i in range(30)}
    assert all(r.ok for r in records)
    assert folder.manifest.complete
    assert len(folder.manifest.segments) == 2
    assert {r.id for r in records if r.segment == 0} == finished
    schedule = [i / 30 for i in range(30)]
    assert [r.scheduled_s for r in records] == pytest.approx(schedule, abs=1e-6)
    late = [(r.dispatched_s or 0) - r.scheduled_s for r in records]
    assert max(late) < 1.0  # the second segment stands on the same axis
    with pytest.raises(ConfigError, match="complete"):
        resume(path)


def test_nothing_is_written_for_a_target_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot reach"):
        run(plan("http://127.0.0.1:9", Load(rate=1, requests=1)), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_folder_that_holds_a_run_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="already holds"):
        run(plan("http://127.0.0.1:9", Load(rate=1, requests=1)), tmp_path)


def test_the_key_is_in_no_file_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_KEY", "sk-0123456789abcdef")
    with MockProcess(MockConfig(ttft_ms=5, itl_ms=1, api_key="sk-0123456789abcdef")) as mock:
        stated = plan(mock.url, Load(rate=50, requests=5))
        stated = msgspec.structs.replace(stated, target=msgspec.structs.replace(stated.target, api_key_env="BENCH_KEY"))
        folder = run(stated, tmp_path / "r")
    assert all(r.ok for r in folder.records())
    for file in folder.path.iterdir():
        assert b"0123456789abcdef" not in file.read_bytes(), file.name


def record(index: int, **more: Any) -> RequestRecord:
    return RequestRecord(id=f"r{index}", index=index, scheduled_s=float(index), **more)


def test_what_is_done_and_where_to_go_on() -> None:
    open_plan = plan("http://h", Load(arrivals=Arrivals.CONSTANT, rate=1, requests=6))
    arrivals = build_schedule(open_plan)
    records = [
        record(0),
        record(1, error=ErrorClass.TIMEOUT),  # it failed by itself: that is its result
        record(2, error=ErrorClass.CANCELLED),
        record(3, turn=0, turns=2),  # the second turn never came: the conversation runs again
        record(4, turn=1, turns=2),
    ]
    done = done_indexes(records)
    assert done == {0, 1, 4}
    manifest = Manifest(run_id="x", created="", plan={}, seed=0)
    assert resume_point(open_plan, arrivals, done, manifest, 4.5) == 2.0
    assert resume_point(open_plan, arrivals, set(range(6)), manifest, 9.0) is None
    timed = plan("http://h", Load(arrivals=Arrivals.CLOSED, concurrency=1, duration_s=10))
    slots = build_schedule(timed)
    assert resume_point(timed, slots, done, manifest, 4.5) == 4.5
    assert resume_point(timed, slots, done, manifest, 10.5) is None
    counted = plan("http://h", Load(arrivals=Arrivals.CLOSED, concurrency=1, requests=6))
    assert resume_point(counted, build_schedule(counted), done, manifest, 4.5) == 4.5


def test_a_worker_that_cannot_write_ends_the_run_instead_of_hanging_it(tmp_path: Path) -> None:
    """Files may grow to 64 KiB and no further; a full disk looks the same."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n" + SCRIPT
    prompts = Prompts(input=Length(value=10), output=Length(value=60))
    with MockProcess(MockConfig(ttft_ms=5, itl_ms=1)) as mock:
        stated = plan(mock.url, Load(arrivals=Arrivals.CONSTANT, rate=50, requests=150), prompts=prompts)
        command = [sys.executable, "-c", limited, msgspec.json.encode(stated).decode(), str(tmp_path / "r")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "ended failed: worker 0 broke" in done.stdout, done.stdout + done.stderr
    folder = RunFolder(tmp_path / "r")
    assert "File too large" in folder.manifest.segments[-1].ended
    assert 10 < len(folder.records()) < 150


def test_rows_survive_torn_lines_and_name_broken_ones(tmp_path: Path) -> None:
    path = tmp_path / "records.w0.jsonl"
    row = RequestRecord(id="r0", index=0, scheduled_s=1.0)
    writer = RowWriter(path)
    writer.write(row)
    writer.close()
    with path.open("ab") as file:
        file.write(b'{"id":"r1"')
    assert list(read_rows(path, RequestRecord)) == [row]
    writer = RowWriter(path)
    writer.write(row)
    writer.close()
    assert list(read_rows(path, RequestRecord)) == [row, row]
    path.write_bytes(b"nonsense\n" + path.read_bytes())
    with pytest.raises(ConfigError, match=":1:"):
        list(read_rows(path, RequestRecord))


def test_the_schedule_file_is_the_schedule(tmp_path: Path) -> None:
    with MockProcess(MockConfig(ttft_ms=1, itl_ms=1)) as mock:
        stated = plan(mock.url, Load(rate=50, requests=3))
        folder = run(stated, tmp_path / "r")
    assert folder.schedule_path.read_bytes() == encode(build_schedule(stated))
