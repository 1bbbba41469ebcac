"""`--quick`: the first part in small, in this process: slo and one preset on the engine's own loop, no server.

The same rows are made as a client over HTTP would write: a token's time is when it would be shown (at the end of the
step that made it, or as late as the policy's pace holds it back), its zero is when the request was due. So gaps and
times to first token are what they are everywhere else.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _common import Report

from _interference.judge import at, first_tokens, steady_gaps, streams_row
from _interference.scenario import STREAM_IN, STREAMS, Scenario
from _interference.variants import BY_NAME, SLO, Variant
from paceline.app.build import make_engine, plan_from_arguments
from paceline.core.pace import Pacer
from paceline.core.sampling import SamplingParams
from paceline.core.step import Accepted, RequestSpec, StepEvents
from paceline.engine.loop import EngineLoop
from paceline.measure.records import ErrorClass, RequestRecord, Usage
from paceline.measure.schedule import seeded

LONG_IN, LONG_OUT, STREAM_OUT = 500, 8, 100
MOST_S, LEAST, MOST = 10.0, 3, 8  # newcomers of a run: as many as arrive within 10 s, but 3 to 8
PRESET = BY_NAME["vllm"]


@dataclass
class _Asked:
    """One request on its way. Times are on the clock of `time.monotonic`."""

    label: str
    due_s: float
    prompt: int
    new: int
    token_s: list[float] = field(default_factory=list)
    sent_s: float = 0.0
    pacer: Pacer | None = None
    refused: bool = False
    cut_off: bool = False  # by the end of the run

    def take(self, now_s: float, count: int, *, end: bool) -> None:
        """`count` tokens were made; those that are shown by now get their times."""
        self.token_s += [now_s] * count if self.pacer is None else self.pacer.show(now_s, count, end=end)

    def record(self, zero_s: float) -> RequestRecord:
        """As the load generator writes it."""
        read_s = tuple(moment - zero_s for moment in self.token_s)
        error = None if len(read_s) == self.new else ErrorClass.REJECTED if self.refused else ErrorClass.SHORT
        return RequestRecord(
            id=f"{self.label}-{self.due_s:.6f}",
            index=0,
            scheduled_s=self.due_s - zero_s,
            dispatched_s=self.sent_s - zero_s,
            written_s=self.sent_s - zero_s,
            closed_s=read_s[-1] if read_s else self.sent_s - zero_s,
            error=ErrorClass.CANCELLED if self.cut_off else error,
            usage=Usage(prompt_tokens=self.prompt, completion_tokens=len(read_s)),
            read_s=read_s,
            read_bytes=(1,) * len(read_s),
            kinds="x" * len(read_s),
            row_reads=tuple(range(len(read_s))),
            row_chars=(1,) * len(read_s),
            row_tokens=(1,) * len(read_s),
        )


class Driver:
    """Submits what is due between the steps of a loop, and notes when each token came."""

    def __init__(self, loop: EngineLoop, vocab_size: int, name: str) -> None:
        self._loop, self._vocab_size, self._rng = loop, vocab_size, seeded(name)
        self._ids = itertools.count()
        self._live: dict[str, _Asked] = {}

    def play(self, newcomers: list[_Asked], make_stream: Iterator[_Asked], slots: int) -> list[_Asked]:
        """Newcomers at their times beside `slots` streams at all times, until the last newcomer has ended.

        Without newcomers: until the first streams have ended. Returns the streams; those that still run are cut off.
        """
        streams = [next(make_stream) for _ in range(slots)]
        for stream in streams:
            self._submit(stream)
        waiting, ended = list(newcomers), 0
        while waiting or any(not _over(one) for one in newcomers) or (not newcomers and ended < slots):
            while waiting and waiting[0].due_s <= time.monotonic():
                self._submit(waiting.pop(0))
            events = self._loop.step()
            if events is None:
                # Asleep no longer than to the next arrival, or to when the policy wants to be asked again.
                rests = [self._loop.rest_s or 0.001, *(one.due_s - time.monotonic() for one in waiting[:1])]
                time.sleep(max(0.0, min(rests)))
                continue
            for stream in self._take(events):
                ended += 1
                if newcomers and stream in streams:
                    streams.append(next(make_stream))
                    self._submit(streams[-1])
        for request_id, stream in self._live.items():
            self._loop.cancel(request_id)
            stream.cut_off = True
        self._live.clear()
        return streams

    def _submit(self, asked: _Asked) -> None:
        request_id = f"r{next(self._ids)}"
        asked.sent_s = time.monotonic()
        spec = RequestSpec(
            request_id,
            tuple(self._rng.randrange(self._vocab_size) for _ in range(asked.prompt)),
            SamplingParams(temperature=0.0, max_tokens=asked.new),
            sent_s=asked.due_s,
        )
        answer = self._loop.submit(spec)
        if isinstance(answer, Accepted):
            self._live[request_id] = asked
            asked.pacer = None if answer.pace is None else Pacer(answer.pace)
        else:
            asked.refused = True

    def _take(self, events: StepEvents) -> list[_Asked]:
        """Note the tokens of a step; who ended with it."""
        now_s = time.monotonic()
        ended = {finish.request_id for finish in events.finished}
        for request_id, tokens in zip(events.ids, events.tokens, strict=True):
            self._live[request_id].take(now_s, len(tokens), end=request_id in ended)
        return [self._live.pop(request_id) for request_id in sorted(ended)]


def _over(asked: _Asked) -> bool:
    return asked.refused or len(asked.token_s) >= asked.new


def quick(model: Path, report: Report) -> None:
    """The whole of it: what the machine gives, slo, one preset, their ratio."""
    scenario = _scenario(model, report)
    rows: dict[str, dict[str, Any]] = {}
    for variant in (SLO, PRESET):
        row = rows[variant.name] = _disturbed(_driver(model, variant, scenario.classes), scenario)
        report.add(f"{variant.name}: p99 ITL of the streams / target", [row["itl_p99_s"] / scenario.itl_s], "x")
        report.add(f"{variant.name}: p95 TTFT / prefill alone", [row["ttft_p95_s"] / scenario.prefill_s], "x")
        if row["grows"]:
            invalid = "INVALID: " if variant is SLO else ""
            report.note(variant.name, f"{invalid}the queue of newcomers grows without end")
    slo, preset = rows[SLO.name], rows[PRESET.name]
    report.note("slo holds p99 ITL", "yes" if slo["itl_p99_s"] <= scenario.itl_s else "NO")
    report.add(f"{PRESET.name}'s p99 ITL / slo's", [preset["itl_p99_s"] / slo["itl_p99_s"]], "x")


def _scenario(model: Path, report: Report) -> Scenario:
    driver = _driver(model, PRESET, {})
    firsts: list[float] = []
    for _ in range(3):
        zero_s = time.monotonic()
        one = _Asked("alone", zero_s, LONG_IN, 2)
        driver.play([one], iter(()), 0)
        firsts += first_tokens([one.record(zero_s)])
    zero_s = time.monotonic()
    calm = [one.record(zero_s) for one in driver.play([], _streams(STREAM_OUT // 2), STREAMS)]
    scenario = Scenario(at(firsts[1:], 50), at(steady_gaps(calm, 0.0, time.monotonic()), 50), LONG_IN)
    report.note(f"a prompt of {LONG_IN} tokens alone", f"{scenario.prefill_s:.3g} s")
    report.note("gap of eight undisturbed streams", f"{1000 * scenario.gap_s:.3g} ms")
    return scenario


def _disturbed(driver: Driver, scenario: Scenario) -> dict[str, Any]:
    count = max(LEAST, min(MOST, int(MOST_S / scenario.period_s)))
    zero_s = time.monotonic()
    newcomers = [
        _Asked("newcomer", zero_s + 0.5 + scenario.period_s * number, LONG_IN, LONG_OUT) for number in range(count)
    ]
    streams = driver.play(newcomers, _streams(STREAM_OUT), STREAMS)
    return streams_row(
        [one.record(zero_s) for one in streams], [one.record(zero_s) for one in newcomers], scenario.period_s
    )


def _streams(new: int) -> Iterator[_Asked]:
    while True:
        yield _Asked("stream", time.monotonic(), STREAM_IN, new)


def _driver(model: Path, variant: Variant, classes: dict[str, dict[str, float]]) -> Driver:
    arguments: dict[str, Any] = {"policy": variant.policy, "policy_options": variant.options, "classes": classes}
    if variant.budget is not None:
        arguments["max_num_batched_tokens"] = variant.budget
    spec = plan_from_arguments("interference", str(model), {"dtype": "float32", "kv_gib": 0.5, **arguments})
    parts = make_engine(spec, lambda *_: None)
    return Driver(EngineLoop(parts.scheduler, parts.backend), parts.info.vocab_size, variant.name)
