"""Real engine processes and sockets: requests, cancellation, slow readers, and every way to die."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from paceline.core.step import FinishReason
from paceline.engine.child import watch_lifeline
from paceline.engine.client import EngineClient, EngineLaunch, EngineState, RestartPolicy, Stream
from paceline.engine.messages import EngineStats, Stage
from paceline.engine.process import EngineProcess, _code_of_dying, wait_for_death
from paceline.errors import (
    BadRequest,
    ConfigError,
    CorruptModel,
    EngineDead,
    EngineNotReady,
    Overloaded,
    PacelineError,
)
from tests.engine.fakes import expected_output, launch, spec

SOON_S = 20.0  # far more than anything here takes, so that a busy machine fails no test


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test()

    asyncio.run(bounded())


@asynccontextmanager
async def engine(what: EngineLaunch, **options: object) -> AsyncIterator[EngineClient]:
    client = EngineClient(what, **options)  # type: ignore[arg-type]
    try:
        await client.start()
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110  # of states that no event announces
            await asyncio.sleep(0.005)


# Requests ------------------------------------------------------------------------------------------------------------


def test_streams_deliver_what_the_backend_made() -> None:
    async def test() -> None:
        stages: list[Stage] = []
        async with engine(launch(), on_stage=stages.append) as client:
            assert client.state == "ready"
            assert client.info.model == "chain"
            assert [stage.name for stage in client.info.stages] == ["import", "read", "warm up"]
            assert {stage.name for stage in stages if stage.seconds is None} == {"import", "read", "warm up"}
            assert client.last_seen_s < SOON_S
            prompts = {f"r{index}": tuple(range(1, 2 + index * 37)) for index in range(20)}

            async def read(request_id: str, prompt: tuple[int, ...]) -> None:
                stream = await client.submit(spec(request_id, prompt, 30, logprobs=0))
                assert stream.request_id == request_id
                updates = [update async for update in stream]
                assert [update.finish is not None for update in updates] == [False] * (len(updates) - 1) + [True]
                tokens = tuple(token for update in updates for token in update.tokens)
                assert tokens == expected_output(prompt, 30)
                scored = [logprob.token for update in updates for logprob in update.logprobs]
                assert tuple(scored) == tokens

            await asyncio.gather(*(read(*item) for item in prompts.items()))
            assert client.live_requests == 0
            assert client.stats.scheduler.generation_tokens == 20 * 30
        assert client.state is EngineState.DEAD
        assert await client.wait_dead() is None

    run(test)


def test_stats_come_with_every_step_and_heartbeat() -> None:
    async def test() -> None:
        seen: list[EngineStats] = []
        async with engine(launch()) as client:
            client.add_stats_listener(seen.append)
            await (await client.submit(spec("a", (1, 2, 3), 10))).collect()
            await until(lambda: any(stats.last_step is None for stats in seen))
        samples = [stats.last_step for stats in seen if stats.last_step is not None]
        assert [sample.step for sample in samples] == list(range(10))
        assert [sample.tokens for sample in samples] == [3] + [1] * 9
        assert seen[-1].steps == 10
        assert seen[-1].step_tokens == 12

    run(test)


def test_a_rejected_request_is_told_so() -> None:
    async def test() -> None:
        async with engine(launch(delay_s=0.05, scheduler={"max_num_seqs": 1, "max_waiting": 1})) as client:
            running = await client.submit(spec("a", max_tokens=1000))
            await anext(running)
            waiting = await client.submit(spec("b"))
            with pytest.raises(Overloaded, match="waiting") as full:
                await client.submit(spec("c"))
            assert full.value.retry_after_s > 0
            assert full.value.status == 429
            with pytest.raises(BadRequest, match="context holds"):
                await client.submit(spec("d", tuple(range(5000))))
            with pytest.raises(BadRequest, match="in use"):
                await client.submit(spec("a"))
            await running.aclose()
            assert (await waiting.collect()).tokens == expected_output((1, 2, 3), 8)

    run(test)


def test_cancelling_ends_the_stream_with_the_reason_given() -> None:
    async def test() -> None:
        async with engine(launch(delay_s=0.002)) as client:
            stream = await client.submit(spec("a", max_tokens=4000))
            head = await anext(stream)
            client.cancel("a", FinishReason.STOP)
            client.cancel("a", FinishReason.ABORT)  # too late: the first one counts
            client.cancel("never seen")
            rest = await stream.collect()
            assert rest.finish is not None
            assert rest.finish.reason is FinishReason.STOP
            tokens = head.tokens + rest.tokens
            assert tokens == expected_output((1, 2, 3), len(tokens))
            stream.cancel()
            assert [update async for update in stream] == []
            assert client.stats.errors == 0

    run(test)


@pytest.mark.parametrize("way", ["aclose", "context", "garbage", "task", "submit"])
def test_an_abandoned_stream_frees_its_blocks(way: str) -> None:
    async def test() -> None:
        async with engine(launch(delay_s=0.01)) as client:
            keeper = await client.submit(spec("keeper", max_tokens=1000))

            async def reader() -> None:
                async for _ in await client.submit(spec("task", max_tokens=3000)):
                    pass

            if way == "submit":
                task = asyncio.create_task(reader())
                await asyncio.sleep(0)  # the command is sent, the answer is not here
                assert client.live_requests == 2
                task.cancel()
            elif way == "task":
                task = asyncio.create_task(reader())
                await until(lambda: client.stats.scheduler.num_running == 2)
                task.cancel()
            else:
                stream = await client.submit(spec("task", max_tokens=3000))
                await anext(stream)
                if way == "aclose":
                    await stream.aclose()
                    assert [update async for update in stream] == []
                elif way == "context":
                    async with stream:
                        pass
                else:
                    del stream
                    gc.collect()
            await until(lambda: client.live_requests == 1)
            await until(lambda: client.stats.scheduler.num_running == 1)
            assert client.stats.scheduler.kv_blocks_used < 64
            await anext(keeper)  # and it did not notice

    run(test)


def test_slow_readers_hold_up_nobody() -> None:
    async def test() -> None:
        async with engine(launch(scheduler={"num_blocks": 20_000})) as client:
            slow = [await client.submit(spec(f"slow{index}", (index + 1,), 300)) for index in range(100)]
            fast = await client.submit(spec("fast", (7,), 300))
            assert (await fast.collect()).tokens == expected_output((7,), 300)
            await until(lambda: client.live_requests == 0)
            for index, stream in enumerate(slow):  # what nobody read is all there, in one piece
                updates = [update async for update in stream]
                assert len(updates) == 1
                assert updates[0].tokens == expected_output((index + 1,), 300)

    run(test)


def test_requests_may_come_in_any_number_while_a_step_runs() -> None:
    async def test() -> None:
        async with engine(launch(delay_s=0.2)) as client:
            first = await client.submit(spec("first", max_tokens=3))
            streams = await asyncio.gather(*(client.submit(spec(f"r{index}", max_tokens=2)) for index in range(50)))
            await asyncio.gather(*(stream.collect() for stream in (first, *streams)))
            # Taken together before one plan, they share its step: far fewer steps than requests.
            assert client.stats.steps < 10

    run(test)


def test_one_reader_at_a_time() -> None:
    async def test() -> None:
        async with engine(launch(delay_s=0.2)) as client:
            stream = await client.submit(spec("a", max_tokens=3))
            reading = asyncio.create_task(stream.collect())
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="being read"):
                await anext(stream)
            assert len((await reading).tokens) == 3

    run(test)


# Death ---------------------------------------------------------------------------------------------------------------


async def drain_into_death(stream: Stream) -> float:
    """Read until EngineDead; when that was."""
    with pytest.raises(EngineDead, match="killed by SIGKILL"):
        async for _ in stream:
            pass
    return time.monotonic()


def test_kill_under_load_ends_every_stream_at_once() -> None:
    async def test() -> None:
        async with engine(launch(delay_s=0.01)) as client:
            streams = [await client.submit(spec(f"r{index}", (index + 1,), 4000)) for index in range(64)]
            readers = [asyncio.create_task(drain_into_death(stream)) for stream in streams]
            await until(lambda: client.stats.scheduler.num_running == 64)
            assert client.pid is not None
            killed = time.monotonic()
            os.kill(client.pid, signal.SIGKILL)
            deaths = await asyncio.gather(*readers)
            assert max(deaths) - killed < 5.0
            assert client.state is EngineState.DEAD
            with pytest.raises(EngineDead, match="SIGKILL"):
                await client.submit(spec("late"))
            assert isinstance(await client.wait_dead(), EngineDead)
            assert client.live_requests == 0

    run(test)


def test_a_submit_in_flight_ends_with_the_engine() -> None:
    async def test() -> None:
        async with engine(launch(what="hang")) as client:
            hung = await client.submit(spec("hung"))
            unanswered = asyncio.create_task(client.submit(spec("unanswered")))
            await asyncio.sleep(0.1)
            assert not unanswered.done()
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            with pytest.raises(EngineDead):
                await unanswered
            with pytest.raises(EngineDead):
                await hung.collect()

    run(test)


def test_a_hung_engine_is_seen_by_its_silence() -> None:
    async def test() -> None:
        async with engine(launch(what="hang")) as client:
            stream = await client.submit(spec("a"))
            await until(lambda: client.last_seen_s > 1.5)  # beyond the heartbeat
            assert client.state is EngineState.READY
            await client.close(timeout_s=0.2)  # it does not listen: it is killed
            with pytest.raises(EngineDead, match=r"killed: it did not stop within 0.2 s"):
                await stream.collect()

    run(test)


def test_an_exit_without_a_word_is_told_with_its_code() -> None:
    async def test() -> None:
        async with engine(launch(what="exit", at_step=3)) as client:
            with pytest.raises(EngineDead, match="exited with code 3"):
                await (await client.submit(spec("a"))).collect()

    run(test)


def test_a_backend_that_raises_ends_the_requests_with_its_error_and_then_the_engine() -> None:
    async def test() -> None:
        async with engine(launch(what="raise", at_step=3, delay_s=0.2)) as client:
            streams = await asyncio.gather(*(client.submit(spec(f"r{index}", max_tokens=100)) for index in range(5)))
            for update in await asyncio.gather(*(stream.collect() for stream in streams)):
                assert update.finish is not None
                assert update.finish.reason is FinishReason.ERROR
                assert update.finish.message == "ValueError: the matrix is singular"
            death = await client.wait_dead()
            assert isinstance(death, EngineDead)
            assert str(death) == "the engine process failed: ValueError: the matrix is singular"
            assert client.stats.errors == 5

    run(test)


def test_a_recoverable_error_leaves_the_engine_alive() -> None:
    async def test() -> None:
        async with engine(launch(what="recoverable", at_step=3)) as client:
            finish = (await (await client.submit(spec("a"))).collect()).finish
            assert finish is not None
            assert finish.reason is FinishReason.ERROR
            assert (await (await client.submit(spec("b"))).collect()).tokens == expected_output((1, 2, 3), 8)

    run(test)


def test_it_works_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def test() -> None:
        async with engine(launch(delay_s=0.005), restart=True) as client:
            streams = await asyncio.gather(*(client.submit(spec(f"r{i}", (i + 1,), 40)) for i in range(32)))
            for index, update in enumerate(await asyncio.gather(*(stream.collect() for stream in streams))):
                assert update.tokens == expected_output((index + 1,), 40)
            stream = await client.submit(spec("a", max_tokens=4000))
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            await drain_into_death(stream)
            await until(lambda: client.state is EngineState.READY)
            assert (await (await client.submit(spec("b"))).collect()).tokens == expected_output((1, 2, 3), 8)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())


def test_a_stalled_scheduler_is_an_error_not_silence() -> None:
    async def test() -> None:
        async with engine(launch("make_stalled")) as client:
            finish = (await (await client.submit(spec("a"))).collect()).finish
            assert finish is not None
            assert "planned nothing" in finish.message
            assert "planned nothing" in str(await client.wait_dead())

    run(test)


def test_stop_signals_are_the_parents_business() -> None:
    async def test() -> None:
        async with engine(launch(delay_s=0.005)) as client:
            stream = await client.submit(spec("a", max_tokens=50))
            assert client.pid is not None
            os.kill(client.pid, signal.SIGINT)
            os.kill(client.pid, signal.SIGTERM)
            assert (await stream.collect()).tokens == expected_output((1, 2, 3), 50)

    run(test)


# Start-up ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        (launch("make_corrupt"), CorruptModel, r"^model.gguf is truncated: 12 of 40 bytes$"),
        (launch("make_bug"), EngineDead, "KeyError: 'hidden_size'"),
        (launch("make_suicide", signal=int(signal.SIGKILL)), EngineDead, "killed by SIGKILL"),
        (launch("make_suicide", signal=int(signal.SIGSEGV)), EngineDead, "killed by SIGSEGV"),
        (launch("make_nothing"), ConfigError, "cannot be imported"),
        (EngineLaunch("no.such.module:f"), ConfigError, "No module named 'no'"),
        (EngineLaunch("nonsense"), ConfigError, "nonsense"),
        (launch(unencodable=object()), ConfigError, "cannot be sent"),
        (EngineLaunch("tests.engine.fakes:make_engine", {}, Path("/nonexistent")), ConfigError, "/nonexistent"),
    ],
    ids=lambda value: value.factory if isinstance(value, EngineLaunch) else None,
)
def test_a_failed_start_says_why(what: EngineLaunch, error: type[PacelineError], message: str) -> None:
    async def test() -> None:
        client = EngineClient(what, restart=True)  # a first start is not repeated
        with pytest.raises(error, match=message):
            await client.start()
        assert client.state is EngineState.DEAD
        assert client.restarts == 0
        with pytest.raises(EngineNotReady):
            _ = client.info
        await client.close()

    run(test)


def test_nothing_is_taken_before_it_is_ready() -> None:
    async def test() -> None:
        client = EngineClient(launch(load_s=0.3))
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0.05)
        assert client.state == "starting"
        with pytest.raises(EngineNotReady, match="starting"):
            await client.submit(spec("a"))
        await starting
        await (await client.submit(spec("a"))).collect()
        await client.close()

    run(test)


@pytest.mark.parametrize("way", ["close", "cancel"])
def test_a_start_can_be_given_up(way: str) -> None:
    async def test() -> None:
        client = EngineClient(launch(load_s=3600))
        starting = asyncio.create_task(client.start())
        await until(lambda: client.pid is not None)
        if way == "close":
            await client.close()
            with pytest.raises(EngineNotReady, match="stopped while it was starting"):
                await starting
        else:
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            await client.close()
        assert client.state is EngineState.DEAD
        assert await client.wait_dead() is None

    run(test)


# Ends ----------------------------------------------------------------------------------------------------------------


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    async def test() -> None:
        async with engine(launch(delay_s=0.01)) as client:
            streams = [await client.submit(spec(f"r{index}", (index + 1,), 50)) for index in range(8)]
            draining = asyncio.create_task(client.drain())
            await asyncio.sleep(0)
            assert client.state == "draining"
            with pytest.raises(EngineNotReady, match="draining"):
                await client.submit(spec("late"))
            await draining  # nobody has read anything yet
            assert client.state is EngineState.DEAD
            for index, stream in enumerate(streams):
                assert (await stream.collect()).tokens == expected_output((index + 1,), 50)
            with pytest.raises(EngineDead, match="stopped"):
                await client.submit(spec("later"))

    run(test)


@pytest.mark.parametrize("way", ["close", "drain"])
def test_stopping_ends_live_requests_with_abort(way: str) -> None:
    async def test() -> None:
        async with engine(launch(delay_s=0.01)) as client:
            stream = await client.submit(spec("a", max_tokens=4000))
            await (client.close() if way == "close" else client.drain(timeout_s=0.1))
            finish = (await stream.collect()).finish
            assert finish is not None
            assert finish.reason is FinishReason.ABORT
            await client.close()  # idempotent

    run(test)


def test_an_event_loop_that_ends_without_close_takes_the_engine_with_it() -> None:
    watch = -1

    async def test() -> None:
        nonlocal watch
        client = EngineClient(launch())
        await client.start()
        assert client.pid is not None
        watch = os.pidfd_open(client.pid)

    run(test)
    assert_gone(watch)


# Restart -------------------------------------------------------------------------------------------------------------


def test_a_supervised_engine_is_ready_again() -> None:
    async def test() -> None:
        states: list[EngineState] = []
        async with engine(launch(delay_s=0.01), restart=True) as client:
            client.add_state_listener(states.append)
            for life in range(2):
                stream = await client.submit(spec("a", max_tokens=4000))  # the same id again: the old one is gone
                await anext(stream)
                pid = client.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(EngineDead):
                    await stream.collect()
                with pytest.raises(EngineNotReady, match=r"anew after this: .*SIGKILL"):
                    await client.submit(spec("b"))
                await until(lambda: client.state is EngineState.READY)
                assert client.restarts == life + 1
                assert client.pid != pid
            assert (await (await client.submit(spec("b"))).collect()).tokens == expected_output((1, 2, 3), 8)
        assert states == [EngineState.STARTING, EngineState.READY] * 2 + [EngineState.DRAINING, EngineState.DEAD]

    run(test)


def test_quick_deaths_in_a_row_are_not_repeated_for_ever(tmp_path: Path) -> None:
    async def test() -> None:
        lives = tmp_path / "lives"
        lives.write_bytes(b".")
        policy = RestartPolicy(most_quick_deaths=2, backoff_s=0.01)
        async with engine(launch("make_once", lives=str(lives)), restart=policy) as client:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            async with asyncio.timeout(SOON_S):
                death = await client.wait_dead()
            assert isinstance(death, EngineDead)
            assert str(death) == "somebody overwrote the model; given up after 3 quick deaths in a row"
            assert client.restarts == 2
            with pytest.raises(EngineDead, match="overwrote"):
                await client.submit(spec("a"))

    run(test)


def test_backoff_doubles_up_to_its_limit() -> None:
    policy = RestartPolicy(backoff_s=0.5, most_backoff_s=3.0)
    assert [policy.delay_s(deaths) for deaths in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


def test_closing_ends_a_backoff() -> None:
    async def test() -> None:
        async with engine(launch(), restart=RestartPolicy(backoff_s=3600, most_backoff_s=3600)) as client:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: client.state is EngineState.STARTING)
            async with asyncio.timeout(SOON_S):
                await client.close()
            assert client.state is EngineState.DEAD

    run(test)


# Processes and files -------------------------------------------------------------------------------------------------


def assert_gone(pidfd: int) -> None:
    """The process ends soon, whether or not anybody reaps it."""
    try:
        readable, _, _ = select.select([pidfd], [], [], SOON_S)
        assert readable, "the engine process outlived its parent"
    finally:
        os.close(pidfd)


PARENT = """
import asyncio, sys, time
from paceline.engine.client import EngineClient
from tests.engine.fakes import launch

async def main():
    client = EngineClient(launch({options}))
    asyncio.get_running_loop().create_task(client.start())
    while client.pid is None or ({ready} and client.state != "ready"):
        await asyncio.sleep(0.01)
    print(client.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open (Linux)")
@pytest.mark.parametrize("ready", [True, False], ids=["serving", "loading"])
def test_the_engine_dies_with_its_parent(ready: bool, tmp_path: Path) -> None:
    code = textwrap.dedent(PARENT).format(options="" if ready else "load_s=3600", ready=ready)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        watch = os.pidfd_open(int(parent.stdout.readline()))
        if not ready:
            time.sleep(0.5)
        parent.kill()
    assert_gone(watch)
    deadline = time.monotonic() + SOON_S
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


def test_the_sockets_folder_is_private_and_gone_once_connected(tmp_path: Path) -> None:
    async def test() -> None:
        what = EngineLaunch("tests.engine.fakes:make_engine", {}, tmp_path)
        hello = asyncio.Event()
        process = EngineProcess(what, lambda report: hello.set())
        assert process.folder.parent == tmp_path
        assert stat.S_IMODE(process.folder.stat().st_mode) == 0o700
        await hello.wait()
        assert os.listdir(tmp_path) == []
        process.kill("enough")
        assert await process.ended == -signal.SIGKILL

    run(test)


def test_a_report_that_cannot_be_handled_ends_the_process() -> None:
    """Skipping it would leave some request waiting for ever."""

    async def test() -> None:
        def choke(report: object) -> None:
            raise LookupError("what is this?")

        process = EngineProcess(launch(), choke)
        assert await process.ended == -signal.SIGKILL
        assert str(process.death()) == "the engine process was killed: one of its reports could not be handled"

    run(test)


def test_the_lifeline_tells_of_the_parents_end_without_the_kernels_help() -> None:
    read_end, write_end = os.pipe()
    parted = threading.Event()
    thread = watch_lifeline(read_end, parted.set)
    assert not parted.wait(0.1)
    os.close(write_end)
    assert parted.wait(SOON_S)
    thread.join(SOON_S)
    os.close(read_end)


@pytest.mark.parametrize("value", ["/some/where", None])
def test_the_engines_own_children_see_the_environment_as_it_was(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with engine(launch("make_spy")) as client:
            assert client.info.model == repr(value)

    if value is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", value)
    run(test)


def test_a_folder_too_deep_for_a_socket_is_one_clear_line(tmp_path: Path) -> None:
    async def test() -> None:
        deep = tmp_path / ("d" * 100)
        deep.mkdir()
        with pytest.raises(ConfigError, match="too long a path for a socket"):
            EngineProcess(EngineLaunch("tests.engine.fakes:make_engine", {}, deep), lambda report: None)
        assert list(deep.iterdir()) == []

    run(test)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")
def test_an_idle_engine_does_not_spin() -> None:
    async def test() -> None:
        async with engine(launch()) as client:
            await (await client.submit(spec("a"))).collect()

            def cpu_ticks() -> int:
                fields = Path(f"/proc/{client.pid}/stat").read_text().rsplit(")", 1)[1].split()
                return int(fields[11]) + int(fields[12])

            before = cpu_ticks()
            await asyncio.sleep(1.5)
            assert cpu_ticks() - before <= 0.1 * os.sysconf("SC_CLK_TCK")  # a spinning loop takes 15 times that

    run(test)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_is_dying_slowly_is_told_from_one_that_runs() -> None:
    code = (
        "import mmap, sys; m = mmap.mmap(-1, 1 << 30); m.write(b'x' * (1 << 30)); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert _code_of_dying(child.pid) is None
        child.kill()
        assert wait_for_death(child) == -signal.SIGKILL


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_an_exit_code_is_passed_on(monkeypatch: pytest.MonkeyPatch, has_pidfd: bool) -> None:
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], stdin=subprocess.PIPE) as child:
        assert wait_for_death(child) == 3
