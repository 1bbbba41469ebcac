"""One process of load: takes arrivals i modulo W from the shared schedule and appends a record for each.

Started by the runner as `python -m paceline.measure.worker`. It reads a `WorkerJob` as the first line of its standard
input (keys come this way, so they touch no command line and no file), prepares everything that can be prepared, says
that it is ready, waits for `go T0` and then only sends, stamps and records. It answers on standard output, one JSON
line each. `stop`, or the end of its input, ends it with what is running recorded as cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import ConfigError
from paceline.measure.alarm import Alarm, clock
from paceline.measure.bodies import BodyStore, Message, flat_text, request_body, resolve
from paceline.measure.client import Client, ClientSettings, Job
from paceline.measure.folder import RowWriter
from paceline.measure.jobs import Said, WorkerJob, connections_for, share
from paceline.measure.plan import Arrivals
from paceline.measure.prompts import PromptMaker
from paceline.measure.protocol import classify
from paceline.measure.records import ErrorClass, Phase, RequestRecord, WorkerSample
from paceline.measure.schedule import Arrival, read_schedule
from paceline.measure.talk import Talk, intended_end_s

SAMPLE_S = 0.25
TICK_S = 0.01  # of the loop-lag watch
FAILED_PAUSE_S = 0.01  # a closed-loop slot whose request never reached the server waits this long before it asks again


class Worker:
    """The load of one process. `say` receives what the runner should know."""

    def __init__(self, job: WorkerJob, say: Callable[[Said], None]) -> None:
        self.job = job
        self._say = say
        self._plan = job.plan
        self._maker = PromptMaker(job.plan.seed, job.plan.prompts.salt, job.fit, job.words)
        self._bodies = BodyStore()
        self._over = asyncio.Event()
        self._stopped = False
        self._next = 0
        self._fresh_from = 0  # this worker's first place after its list, for closed loops that outlast it
        self._thinking = 0  # conversations between two turns
        self._slots = 0
        self._ttft: list[float] = []
        self._gaps: list[float] = []
        self._lags: list[float] = []
        self._closed = job.plan.load.arrivals is Arrivals.CLOSED
        self._arrivals: list[Arrival] = []
        self._client: Client
        self._alarm: Alarm
        self._records: RowWriter
        self._health: RowWriter

    async def prepare(self) -> None:
        """Read the schedule, build the bodies, open the connections. Raises ConfigError, OSError or ssl.SSLError."""
        job, plan = self.job, self._plan
        folder = Path(job.folder)
        skip = set(job.skip)
        mine = read_schedule(folder / "schedule.jsonl")[job.worker :: job.workers]
        self._arrivals = [arrival for arrival in mine if arrival.index not in skip]
        beyond = max((index // job.workers for index in skip if index % job.workers == job.worker), default=-1) + 1
        self._fresh_from = max(len(mine), beyond)
        for arrival in self._arrivals:
            self._bodies.add(self._body(arrival, self._opening(arrival)))
        self._bodies.seal()
        self._alarm = Alarm(asyncio.get_running_loop())
        self._client = Client(resolve(plan.target, job.keys), self._settings(), self._alarm)
        await self._client.open(share(connections_for(plan), job.worker, job.workers))
        self._records = RowWriter(folder / f"records.w{job.worker}.jsonl")
        self._health = RowWriter(folder / f"health.w{job.worker}.jsonl")
        gc.collect()
        gc.freeze()
        gc.disable()

    def _settings(self) -> ClientSettings:
        client, load = self._plan.client, self._plan.load
        cap = load.max_concurrency
        return ClientSettings(
            timeout_s=client.timeout_s,
            max_concurrency=None if cap is None else share(cap, self.job.worker, self.job.workers),
            retries=client.retries,
            retry_cap_s=client.retry_cap_s,
            keep_text=client.keep_text or any(arrival.turns > 1 for arrival in self._arrivals),
        )

    def _opening(self, arrival: Arrival) -> str | list[Message]:
        chat = self._plan.target.endpoint == "chat"
        if arrival.messages:
            messages: list[Message] = msgspec.json.decode(arrival.messages)
            return messages if chat else flat_text(messages)
        text = self._maker.text(arrival)
        return [{"role": "user", "content": text}] if chat else text

    def _body(self, arrival: Arrival, content: str | list[Message], turn: int = 0) -> bytes:
        target, output = self._plan.target, arrival.outputs[turn]
        return request_body(target, self.job.features, content, output, arrival.traffic_class)

    async def run(self, t0: float) -> None:
        """Carry the load from t0 on and return when all of it has ended."""
        self._client.t0 = t0
        self._alarm.at(t0 + SAMPLE_S, self._sample_later)
        self._tick(t0)
        if self._closed:
            self._start_slots(t0)
        else:
            self._pump()
        self._check_over()
        await self._over.wait()
        await self._client.close()
        self._sample()
        self._alarm.close()
        self._records.close()
        self._health.close()
        self._bodies.close()
        gc.enable()
        gc.unfreeze()

    @property
    def connections(self) -> int:
        return self._client.opened

    def stop(self) -> None:
        """End now: what runs is recorded as cancelled, what is not due is left for a resumed run."""
        self._stopped = True
        self._next = len(self._arrivals)
        self._client.stop()
        self._over.set()

    # Open loop

    def _pump(self) -> None:
        """Submit what is due, then sleep until the next arrival."""
        if self._stopped:
            return
        t0 = self._client.t0
        while self._next < len(self._arrivals):
            due = self._arrivals[self._next].at_s
            assert due is not None
            if t0 + due > clock():
                self._alarm.at(t0 + due, self._pump)
                return
            place, self._next = self._next, self._next + 1
            self._submit(self._arrivals[place], place, due, self._ended)

    def _ended(self, arrival: Arrival, record: RequestRecord) -> None:
        self._check_over()

    # Closed loop

    def _start_slots(self, t0: float) -> None:
        load, job = self._plan.load, self.job
        assert load.concurrency is not None
        slots = range(job.worker, load.concurrency, job.workers)
        self._slots = len(slots)
        for slot in slots:
            self._alarm.at(t0 + job.first_s + load.stagger_s * slot / load.concurrency, lambda: self._ask(first=True))

    def _ask(self, first: bool = False) -> None:
        """A slot asks for its next request now; it rests for good when there is none."""
        now = clock() - self._client.t0
        load = self._plan.load
        out_of_time = load.duration_s is not None and now >= load.duration_s
        bounded = load.requests is not None or load.duration_s is None
        out_of_work = self._next >= len(self._arrivals) and (bounded or not self._arrivals)
        if self._stopped or out_of_time or out_of_work:
            self._slots -= 1
            self._check_over()
            return
        place, self._next = self._next, self._next + 1
        arrival = self._arrivals[place % len(self._arrivals)]
        if place >= len(self._arrivals):  # bounded by time alone and faster than foreseen: lengths again, new texts
            fresh = self._fresh_from + place - len(self._arrivals)
            arrival = msgspec.structs.replace(arrival, index=self.job.worker + self.job.workers * fresh)
        self._submit(arrival, place, now, self._slot_ended, first)

    def _slot_ended(self, arrival: Arrival, record: RequestRecord) -> None:
        if record.error in (ErrorClass.CONNECT, ErrorClass.TLS, ErrorClass.CLIENT_FD, ErrorClass.CLIENT_PORT):
            self._alarm.at(clock() + FAILED_PAUSE_S, self._ask)
        else:
            self._ask()

    # One request

    def _submit(
        self,
        arrival: Arrival,
        place: int,
        due: float,
        then: Callable[[Arrival, RequestRecord], None],
        first_wave: bool = False,
    ) -> None:
        if place < len(self._bodies):
            body: bytes | memoryview = self._bodies.get(place)
        else:
            body = self._body(arrival, self._opening(arrival))
        talk = Talk(self._opening(arrival)) if arrival.turns > 1 else None

        def done(record: RequestRecord) -> None:
            self._keep(record)
            turn = record.turn + 1
            if talk is None or turn >= arrival.turns or not record.ok or self._stopped:
                then(arrival, record)
                return
            talk.answer(record)
            talk.ask(self._maker.text(arrival, turn))
            next_due = intended_end_s(record) + arrival.thinks_s[turn - 1]
            self._thinking += 1
            self._alarm.at(self._client.t0 + next_due, lambda: go_on(turn, next_due, talk))

        def go_on(turn: int, next_due: float, talk: Talk) -> None:
            self._thinking -= 1
            following = self._body(arrival, talk.content, turn)
            self._client.submit(self._make_job(arrival, turn, next_due, following), done)

        self._client.submit(self._make_job(arrival, 0, due, body, first_wave), done)

    def _make_job(
        self, arrival: Arrival, turn: int, due: float, body: bytes | memoryview, first_wave: bool = False
    ) -> Job:
        forced = arrival.outputs[turn] if self.job.features.ignore_eos else None
        labels = {
            "id": f"r{arrival.index}" if arrival.turns == 1 else f"r{arrival.index}.{turn}",
            "index": arrival.index,
            "phase": Phase.MEASURE,
            "segment": self.job.segment,
            "worker": self.job.worker,
            "turn": turn,
            "turns": arrival.turns,
            "tenant": arrival.tenant,
            "traffic_class": arrival.traffic_class,
            "prefix_group": arrival.prefix,
            "first_wave": first_wave,
            "prompt_tokens_wanted": arrival.inputs[turn] if turn == 0 else None,
            "output_tokens_wanted": arrival.outputs[turn],
            "length_forced": forced is not None,
            "prompt_chars": len(body),
        }
        target = self._plan.target
        return Job(due, body, labels, target.stream, target.choices, forced)

    def _keep(self, record: RequestRecord) -> None:
        self._records.write(record)
        rows = record.token_rows()
        if rows and record.ok:
            first, last = record.row_s(rows[0]), record.row_s(rows[-1])
            self._ttft.append(round(first - record.scheduled_s, 6))
            if len(rows) > 1:
                self._gaps.append(round((last - first) / (len(rows) - 1), 6))

    def _check_over(self) -> None:
        """All sent, all ended, nobody thinking: the run is over."""
        client = self._client
        waiting = self._slots if self._closed else len(self._arrivals) - self._next
        if waiting <= 0 and not client.in_flight and not client.waiting and not self._thinking:
            self._over.set()

    # Health

    def _tick(self, due: float) -> None:
        """Watch how late the loop wakes."""

        def woke() -> None:
            now = clock()
            self._lags.append(round(now - due, 6))
            if not self._over.is_set():
                self._tick(max(due + TICK_S, now))

        self._alarm.at(due, woke)

    def _sample_later(self) -> None:
        self._sample()
        if not self._over.is_set():
            self._alarm.at(clock() + SAMPLE_S, self._sample_later)

    def _sample(self) -> None:
        client = self._client
        lags, self._lags = self._lags, []
        sample = WorkerSample(
            segment=self.job.segment,
            worker=self.job.worker,
            t_s=round(clock() - client.t0, 6),
            in_flight=client.in_flight,
            waiting=client.waiting,
            sent=client.sent,
            done=client.done,
            failed=client.failed,
            tokens=client.tokens,
            lags_s=tuple(lags),
            late_s=tuple([round(late, 6) for late in client.take_late()]),
            cpu_s=round(time.process_time(), 3),
        )
        ttft, self._ttft = self._ttft, []
        gaps, self._gaps = self._gaps, []
        self._health.write(sample)
        self._health.flush()
        self._records.flush()
        shown = msgspec.structs.replace(sample, late_s=())
        self._say(Said(kind="progress", worker=self.job.worker, sample=shown, ttft_s=tuple(ttft), gap_s=tuple(gaps)))


def describe(error: BaseException) -> tuple[ErrorClass | None, str]:
    """What to tell the runner about a start that failed."""
    if isinstance(error, ConfigError):
        return None, str(error)
    return classify(error)


# The process


def _read_lines(loop: asyncio.AbstractEventLoop, heard: Callable[[str], None]) -> None:
    """Hand each input line to the loop; the end of the input means stop."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has ended by itself
        for line in sys.stdin:
            loop.call_soon_threadsafe(heard, line.strip())
        loop.call_soon_threadsafe(heard, "stop")


async def serve(job: WorkerJob) -> None:
    """The process's life after its job came in."""

    def say(said: Said) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
        sys.stdout.buffer.flush()

    loop = asyncio.get_running_loop()
    start: asyncio.Future[float | None] = loop.create_future()
    worker = Worker(job, say)

    def heard(line: str) -> None:
        if line.startswith("go ") and not start.done():
            start.set_result(float(line[3:]))
        elif line == "stop":
            if not start.done():
                start.set_result(None)
            elif start.result() is not None:
                worker.stop()

    def broke(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: a load with a hole in it must end, loudly, not hang."""
        error = context.get("exception")
        said = f"{type(error).__name__}: {error}" if error is not None else str(context.get("message"))
        traceback.print_exception(error)
        say(Said(kind="error", worker=job.worker, message=f"worker {job.worker} broke: {said}"))
        if start.done():
            worker.stop()

    loop.set_exception_handler(broke)
    threading.Thread(target=_read_lines, args=(loop, heard), daemon=True).start()
    try:
        await worker.prepare()
    except (ConfigError, OSError, ValueError) as error:
        kind, message = describe(error)
        say(Said(kind="error", worker=job.worker, error=kind, message=message))
        return
    say(Said(kind="ready", worker=job.worker, connections=worker.connections))
    t0 = await start
    if t0 is not None:
        await worker.run(t0)
    say(Said(kind="end", worker=job.worker))


def runner_for(choice: str) -> Callable[..., Any]:
    """How to run a coroutine on the chosen event loop; `auto` takes uvloop where it is installed."""
    if choice != "asyncio":
        try:
            import uvloop

            run: Callable[..., Any] = uvloop.run
            return run
        except ImportError:
            if choice == "uvloop":
                raise ConfigError("uvloop is not installed") from None
    return asyncio.run


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the runner's; it says stop
    job = msgspec.json.decode(sys.stdin.readline(), type=WorkerJob)
    runner_for(job.plan.client.loop)(serve(job))


if __name__ == "__main__":
    main()
