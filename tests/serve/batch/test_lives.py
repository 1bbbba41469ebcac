"""What ends a server or an engine in the middle of a batch, and what is there afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from paceline.core.step import RequestSpec, StepPlan
from paceline.engine.supervisor import EngineState
from paceline.serve.batch.crew import Crew, Run
from paceline.serve.batch.ledger import Ledger
from paceline.serve.batch.lines import LineFile
from paceline.serve.batch.runner import ENDPOINTS, Runner
from paceline.serve.batch.settings import BatchSettings
from paceline.serve.context import ServerContext
from paceline.serve.keys import ANONYMOUS
from paceline.serve.settings import ServeSettings
from paceline.text.tokenizer import Tokenizer
from tests.serve import live as live_module
from tests.serve.batch.conftest import CHAT, KEYS, Client, jsonl, line, records, serving
from tests.serve.fake_engine import FakeEngine
from tests.serve.live import Live, live_server

ROOT = Path(__file__).parents[3]
POISON = "poison"


def slow(live: Live, step_s: float) -> None:
    live.call(lambda: setattr(live.engine, "step_s", step_s))


def done_count(client: Client, batch_id: str) -> int:
    counts = client.api.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


@contextmanager
def server_process(folder: Path, tokenizer_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.serve.batch.scripted_server", str(folder), str(tokenizer_dir)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))},
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


def test_kill_9_again_and_again(default_tokenizer_dir: Path, tmp_path: Path) -> None:
    """Whenever the server dies, in the end each request is answered once, by the answer to its own question."""
    folder, count = tmp_path / "batches", 150
    chance = random.Random(7)
    batch_id = ""
    for life in range(6):
        with server_process(folder, default_tokenizer_dir) as (process, url):
            if not batch_id:
                lines = [line(f"r{i}", f"say {i}", url="/v1/completions", max_tokens=9) for i in range(count)]
                file = httpx.post(
                    f"{url}/v1/files", files={"file": ("in.jsonl", jsonl(lines))}, data={"purpose": "batch"}
                ).json()
                body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
                batch_id = httpx.post(f"{url}/v1/batches", json=body).json()["id"]
            if life < 5:
                before = counts_of(url, batch_id)["completed"]
                wait_for(lambda: counts_of(url, batch_id)["completed"] >= before + 5)  # noqa: B023
                time.sleep(chance.uniform(0, 0.1))
                process.send_signal(signal.SIGKILL)
                continue
            wait_for(lambda: counts_of(url, batch_id)["completed"] == count)  # noqa: B023
            wait_for(lambda: httpx.get(f"{url}/v1/batches/{batch_id}").json()["status"] == "completed")  # noqa: B023
            batch = httpx.get(f"{url}/v1/batches/{batch_id}").json()
            output = records(httpx.get(f"{url}/v1/files/{batch['output_file_id']}/content").content)
            assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}
            assert set(output) == {f"r{i}" for i in range(count)}
            for i in range(count):
                assert output[f"r{i}"]["response"]["body"]["choices"][0]["text"].endswith(str(i))
            files = httpx.get(f"{url}/v1/files").json()["data"]
            assert sorted(one["purpose"] for one in files) == ["batch", "batch_output"]
    assert sorted(path.name for path in (folder / "batches" / batch_id).iterdir()) == ["batch.json"]


def counts_of(url: str, batch_id: str) -> dict[str, int]:
    counts: dict[str, int] = httpx.get(f"{url}/v1/batches/{batch_id}").json()["request_counts"]
    return counts


def wait_for(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def test_stopping_does_not_wait_for_batches(default_tokenizer: Tokenizer, tmp_path: Path) -> None:
    with serving(default_tokenizer, tmp_path) as live:
        client = Client(live)
        slow(live, 0.02)
        with client.api:
            batch = client.start([line(str(i), max_tokens=400, ignore_eos=True) for i in range(6)])
            live.until(lambda: live.engine.live == 6)
            live.call(live.server.stop)
            assert live.join() == 0  # though each request would take 8 s
    with serving(default_tokenizer, tmp_path) as live:
        client = Client(live)
        with client.api:
            assert len(client.output(client.when(batch.id, "completed"))) == 6


@pytest.mark.parametrize("end", ["validating", "in_progress", "cancelling", "finalizing"])
def test_taken_up_in_every_status(default_tokenizer: Tokenizer, tmp_path: Path, end: str) -> None:
    """The record on disk says where a batch stood; here it is set back by hand, its work still there."""
    with serving(default_tokenizer, tmp_path) as live:
        client = Client(live)
        slow(live, 0.01)
        with client.api:
            batch = client.start([line(str(i), max_tokens=3 if i < 2 else 300, ignore_eos=True) for i in range(6)])
            live.until(lambda: done_count(client, batch.id) == 2)
    path = tmp_path / "batches" / batch.id / "batch.json"
    record = json.loads(path.read_text())
    assert record["status"] == "in_progress"
    path.write_text(json.dumps({**record, "status": end}))
    with serving(default_tokenizer, tmp_path) as live:
        client = Client(live)
        with client.api:
            wanted, answered = {"cancelling": ("cancelled", 2), "finalizing": ("completed", 2)}.get(
                end, ("completed", 6)
            )
            done = client.when(batch.id, wanted)
            assert len(client.output(done)) == answered


def test_expired_batches_keep_what_is_answered(default_tokenizer: Tokenizer, tmp_path: Path) -> None:
    with serving(default_tokenizer, tmp_path) as live:
        client = Client(live)
        slow(live, 0.01)
        with client.api:
            short = [line(str(i), max_tokens=3) for i in range(4)]
            batch = client.start(
                [*short, *(line(f"long{i}", max_tokens=1000, ignore_eos=True) for i in range(5))], window="1h"
            )
            assert batch.expires_at == batch.created_at + 3600
            live.until(lambda: done_count(client, batch.id) == 4)
            batches = live.server._batches
            batches._now = lambda: time.time() + 3601
            done = client.when(batch.id, "expired")
            assert done.expired_at is not None
            assert done.request_counts is not None
            assert done.request_counts.model_dump() == {"total": 9, "completed": 4, "failed": 5}
            assert set(client.output(done)) == {"0", "1", "2", "3"}
            errors = client.errors(done)
            assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"}
            assert all(one["response"] is None for one in errors.values())
            assert len(errors) == 5
            live.until_idle()


def test_files_and_ended_batches_go_when_their_time_is_over(default_tokenizer: Tokenizer, tmp_path: Path) -> None:
    with serving(default_tokenizer, tmp_path, keep_s=86_400.0) as live:
        client = Client(live)
        with client.api:
            done = client.when(
                client.start([line("a")], output_expires_after={"anchor": "created_at", "seconds": 3600}).id,
                "completed",
            )
            kept = client.upload(b"{}", expires_after={"anchor": "created_at", "seconds": 2_592_000})
            batches = live.server._batches
            batches._now = lambda: time.time() + 3601
            live.until(lambda: done.output_file_id not in [file.id for file in client.api.files.list()])
            assert client.api.batches.retrieve(done.id).status == "completed"
            batches._now = lambda: time.time() + 86_401
            live.until(lambda: [file.id for file in client.api.files.list()] == [kept])
            live.until(lambda: not client.api.batches.list().data)
            left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
            assert left == [f"{kept}.data", f"{kept}.json", "lock"]


def test_limits(default_tokenizer: Tokenizer, tmp_path: Path) -> None:
    limits: dict[str, Any] = {"max_file_bytes": 2000, "max_tenant_bytes": 5000, "max_tenant_files": 4}
    with serving(default_tokenizer, tmp_path, keys=KEYS, max_tenant_batches=2, **limits) as live:
        client, other = Client(live, "pk-ann"), Client(live, "pk-bob")
        with client.api, other.api:
            for size in (2001, 200_000, 3_000_000):  # by what arrives, by what the headers say
                with pytest.raises(openai.APIStatusError) as caught:
                    client.upload(b"x" * size)
                assert (caught.value.status_code, caught.value.code) == (413, "file_too_large")
            files = [client.upload(b"x" * 2000) for _ in range(2)]
            with pytest.raises(openai.APIStatusError) as caught:
                client.upload(b"x" * 1001)
            assert caught.value.status_code == 413
            client.upload(b"x" * 1000)
            with pytest.raises(openai.APIStatusError) as caught:
                client.upload(b"x")
            assert caught.value.code == "storage_full"
            other.upload(b"x" * 2000)  # another tenant has room of its own
            client.api.files.delete(files[0])
            client.upload(jsonl([line("a")]))
            files.append(client.upload(b"{}"))
            with pytest.raises(openai.APIStatusError) as caught:
                client.upload(b"x")
            assert caught.value.code == "too_many_files"

            live.call(lambda: setattr(live.engine, "paused", True))
            good = other.upload(jsonl([line("a")]))
            for _ in range(2):
                other.api.batches.create(input_file_id=good, endpoint=CHAT, completion_window="24h")
            with pytest.raises(openai.RateLimitError) as limited:
                other.api.batches.create(input_file_id=good, endpoint=CHAT, completion_window="24h")
            assert limited.value.code == "too_many_batches"
            live.call(lambda: setattr(live.engine, "paused", False))


def test_an_interactive_request_goes_first(default_tokenizer: Tokenizer, tmp_path: Path) -> None:
    scheduler = {"policy": "slo", "max_num_seqs": 4}
    with serving(default_tokenizer, tmp_path, scheduler=scheduler, concurrency=16) as live:
        client = Client(live)
        with client.api:
            live.call(lambda: setattr(live.engine, "step_s", 0.002))
            batch = client.start([line(str(i), max_tokens=12, ignore_eos=True) for i in range(80)])
            live.until(lambda: done_count(client, batch.id) >= 8)
            admitted = live.call(lambda: len(live.engine.backend.seen))
            assert live.chat("now", service_tier="priority").status_code == 200
            seen = live.call(lambda: list(live.engine.backend.seen))
            place = next(i for i, spec in enumerate(seen) if spec.traffic_class == "interactive")
            # As many as were running may have ended, and been replaced, before it came.
            assert place - admitted <= 8
            assert {spec.traffic_class for spec in seen} == {"batch", "interactive"}
            assert done_count(client, batch.id) < 80
            client.when(batch.id, "completed")


def test_a_batch_never_fills_the_queue(default_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """With a queue of six, a batch of eighty leaves room for others."""
    scheduler = {"policy": "decode_first", "max_num_seqs": 2, "max_waiting": 12}
    with serving(default_tokenizer, tmp_path, scheduler=scheduler, concurrency=32, most_waiting=3) as live:
        client = Client(live)
        with client.api:
            live.call(lambda: setattr(live.engine, "step_s", 0.002))
            batch = client.start([line(str(i), max_tokens=8, ignore_eos=True) for i in range(60)])
            live.until(lambda: done_count(client, batch.id) >= 2)
            for _ in range(10):
                assert live.chat("now").status_code == 200
                assert live.call(lambda: live.engine.scheduler.stats().num_waiting) <= 8
            assert len(client.output(client.when(batch.id, "completed"))) == 60


def test_tenants_take_turns(default_tokenizer: Tokenizer, tmp_path: Path) -> None:
    with serving(default_tokenizer, tmp_path, keys=KEYS, concurrency=2) as live:
        ann, bob = Client(live, "pk-ann"), Client(live, "pk-bob")
        with ann.api, bob.api:
            live.call(lambda: setattr(live.engine, "step_s", 0.004))
            large = ann.start([line(str(i)) for i in range(60)])
            live.until(lambda: done_count(ann, large.id) >= 4)
            small = bob.start([line(str(i)) for i in range(8)])
            bob.when(small.id, "completed")
            assert done_count(ann, large.id) < 50
            ann.when(large.id, "completed")
            tenants = [spec.tenant for spec in live.engine.backend.seen]
            first = tenants.index("bob")
            assert tenants[first : first + 15].count("bob") in (7, 8)


def test_a_second_server_leaves_the_folder_alone(
    default_tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(default_tokenizer, tmp_path) as first, serving(default_tokenizer, tmp_path) as second:
        client = Client(first)
        with client.api:
            file = client.upload(b"{}")
            # It found no folder to hold when it started, or one that is held: either way it says so.
            answer = second.client.post("/v1/files", files={"file": ("a", b"{}")}, data={"purpose": "batch"})
            assert answer.status_code == 503
            assert "another server uses the folder" in answer.json()["error"]["message"]
            assert second.chat().status_code == 200
            assert client.api.files.retrieve(file).id == file


def test_a_folder_that_cannot_be_used_leaves_serving_alone(default_tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with serving(default_tokenizer, tmp_path / "file") as live:
        assert live.chat().status_code == 200
        answer = live.get("/v1/batches")
        assert answer.status_code == 503
        assert "cannot be used" in answer.json()["error"]["message"]


def test_nothing_appears_before_the_first_file(default_tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "batches"
    with serving(default_tokenizer, folder) as live:
        assert live.get("/v1/batches").json()["data"] == []
        assert not folder.exists()
        with Client(live).api as api:
            api.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        assert folder.stat().st_mode & 0o777 == 0o700


def test_another_model_does_not_go_on_with_it(
    default_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(default_tokenizer, tmp_path) as live:
        client = Client(live)
        slow(live, 0.02)
        with client.api:
            batch = client.start([line("a", max_tokens=400, ignore_eos=True)])
            live.until(lambda: live.engine.live == 1)

    class Another(FakeEngine):
        def __init__(self, **scheduler: Any) -> None:
            super().__init__(**scheduler)
            self._info = type(self._info)(
                **{n: getattr(self._info, n) for n in self._info.__struct_fields__} | {"namespace": "f" * 16}
            )

    with monkeypatch.context() as patch:
        patch.setattr(live_module, "FakeEngine", Another)
        with serving(default_tokenizer, tmp_path) as live:
            client = Client(live)
            with client.api:
                other = client.when(client.start([line("b")]).id, "completed")
                assert len(client.output(other)) == 1
                assert client.api.batches.retrieve(batch.id).status == "in_progress"
                assert [spec.sampling.max_tokens for spec in live.engine.backend.seen] != [400]
    with serving(default_tokenizer, tmp_path) as live:
        client = Client(live)
        with client.api:
            assert len(client.output(client.when(batch.id, "completed"))) == 1


def test_damage_is_told_and_ends_the_batch(default_tokenizer: Tokenizer, tmp_path: Path) -> None:
    with serving(default_tokenizer, tmp_path) as live:
        client = Client(live)
        slow(live, 0.02)
        with client.api:
            batch = client.start([line("a", max_tokens=400, ignore_eos=True)])
            live.until(lambda: live.engine.live == 1)
    (tmp_path / "batches" / batch.id / "input.jsonl").unlink()
    (tmp_path / "batches" / "batch_broken").mkdir()
    (tmp_path / "batches" / "batch_broken" / "batch.json").write_text("{")
    (tmp_path / "files" / "file-orphan.data").write_text("{")
    with serving(default_tokenizer, tmp_path) as live:
        client = Client(live)
        with client.api:
            failed = client.when(batch.id, "failed")
            assert failed.errors is not None
            assert failed.errors.data is not None
            assert failed.errors.data[0].message == "its input is gone from the disk"
            assert [one.id for one in client.api.batches.list()] == [batch.id]
    assert not (tmp_path / "files" / "file-orphan.data").exists()
    assert (tmp_path / "batches" / "batch_broken" / "batch.json").read_text() == "{"


# Engines that die ----------------------------------------------------------------------------------------------------


def poisoned(tokenizer: Tokenizer, engine: FakeEngine) -> Callable[[StepPlan], None]:
    """A backend that dies of any request that holds the word."""

    def fail(plan: StepPlan) -> None:
        if any(POISON in tokenizer.decode(engine.backend.specs[name].prompt) for name in plan.ids):
            raise RuntimeError("segmentation fault")

    return fail


class PhoenixEngine(FakeEngine):
    """Dies as the other, and is ready again a moment later, as under --restart."""

    deaths = 0

    def die(self, message: str = "the engine process was killed by SIGKILL") -> None:
        self.deaths += 1
        script, fail, specs = self.backend.script, self.backend.fail, self.backend.seen
        for mailbox in self._mailboxes.values():
            mailbox.fail(message)
        for request_id in list(self._mailboxes):
            self.loop.cancel(request_id)
        self._mailboxes.clear()
        self.state = EngineState.STARTING
        fresh = FakeEngine(max_num_seqs=8)
        self.backend, self.scheduler, self.loop = fresh.backend, fresh.scheduler, fresh.loop
        self.backend.script, self.backend.fail, self.backend.seen = script, fail, specs
        asyncio.get_running_loop().call_later(0.02, self._rise)

    def _rise(self) -> None:
        self.state = EngineState.READY
        self._task = asyncio.create_task(self._turn())


def test_a_line_that_kills_the_engine_does_not_take_the_others_along(
    default_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    asked = [line(f"r{i}", POISON if i == 17 else f"question {i}") for i in range(40)]
    (tmp_path / "in.jsonl").write_bytes(jsonl(asked))

    async def work() -> PhoenixEngine:
        engine = PhoenixEngine(max_num_seqs=8)
        await engine.start()
        ids = tuple(default_tokenizer.encode(" fine"))
        engine.backend.script = lambda spec: ids
        engine.backend.fail = poisoned(default_tokenizer, engine)
        context = ServerContext(engine, ServeSettings(), default_tokenizer)
        lines = LineFile(tmp_path / "in.jsonl", ENDPOINTS)
        assert lines.scan(max_line_bytes=1 << 20) == []
        ledger = Ledger(lines, tmp_path / "out.jsonl", tmp_path / "err.jsonl")
        ledger.open()
        async with Crew(Runner(context), 8) as crew:
            await asyncio.wait_for(crew.work_off(Run(lines, ledger, ANONYMOUS)), 60)
        ledger.close()
        lines.close()
        await engine.close()
        return engine

    engine = asyncio.run(work())
    assert engine.deaths == 3
    output, errors = records((tmp_path / "out.jsonl").read_bytes()), records((tmp_path / "err.jsonl").read_bytes())
    assert set(errors) == {"r17"}
    assert len(output) == 39
    assert "segmentation fault" in errors["r17"]["response"]["body"]["error"]["message"]


def test_a_line_that_ends_the_server_does_so_three_times_at_most(
    default_tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --restart the server ends with its engine; whoever starts it anew must not meet that line for ever."""

    class Poisoned(FakeEngine):
        def __init__(self, **scheduler: Any) -> None:
            super().__init__(**scheduler)
            self.backend.fail = poisoned(default_tokenizer, self)

    monkeypatch.setattr(live_module, "FakeEngine", Poisoned)
    batch_id = ""
    for life in range(5):
        settings = ServeSettings(batch=BatchSettings(folder=tmp_path, sweep_s=0.05, concurrency=4))
        live = Live(settings, default_tokenizer, {})
        live.start(wait_ready=life == 0)  # later ones may meet the line before anybody looks
        try:
            if not batch_id:
                client = Client(live)
                with client.api:
                    batch_id = client.start([line(f"r{i}", POISON if i == 2 else "hi") for i in range(9)]).id
            if life < 3:
                assert live.join() == 1
                continue
            client = Client(live)
            with client.api:
                done = client.when(batch_id, "completed")
                assert set(client.errors(done)) == {"r2"}
                assert len(client.output(done)) == 8
            break
        finally:
            live.stop()


def test_an_overloaded_engine_is_asked_again(default_tokenizer: Tokenizer, tmp_path: Path) -> None:
    scheduler = {"max_waiting": 1, "max_num_seqs": 1}
    with serving(default_tokenizer, tmp_path, scheduler=scheduler, most_waiting=8, concurrency=3) as live:
        client = Client(live)
        with client.api:
            batch = client.start([line(str(i)) for i in range(6)])
            assert len(client.output(client.when(batch.id, "completed"))) == 6


def test_one_request_that_fails_in_the_engine_fails_alone(default_tokenizer: Tokenizer, tmp_path: Path) -> None:
    def say(spec: RequestSpec) -> tuple[int, ...]:
        return tuple(default_tokenizer.encode(" fine"))

    with live_server(
        default_tokenizer, replace(ServeSettings(), batch=BatchSettings(folder=tmp_path, sweep_s=0.05))
    ) as live:
        live.engine.backend.script = say
        execute = live.engine.backend.execute

        def failing(plan: StepPlan) -> Any:
            result = execute(plan)
            bad = [row for row, name in enumerate(plan.ids) if live.engine.backend.specs[name].sampling.seed == 13]
            tokens = tuple(() if row in bad else said for row, said in enumerate(result.tokens))
            return replace(result, tokens=tokens, failures=tuple((row, "not a number") for row in bad))

        live.call(lambda: setattr(live.engine.backend, "execute", failing))
        client = Client(live)
        with client.api:
            done = client.when(client.start([line(str(i), seed=i) for i in range(10, 16)]).id, "completed")
            assert set(client.errors(done)) == {"13"}
            assert client.errors(done)["13"]["response"]["status_code"] == 500
            assert len(client.output(done)) == 5
