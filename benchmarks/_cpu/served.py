"""Through HTTP: total output by streams, and the gaps of steady streams while long prompts arrive.

`paceline bench`'s own client in front of every server, at work on the same cores. transformers computes static batches
in process, which favours it: nothing is spent on HTTP, and nobody waits for anybody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
from _interference.judge import streams_row
from _interference.loads import UNTIL_STOPPED_S, NotComplete, plan_of, play, play_beside, streams, with_trace

from _cpu.bench import Bench, Failed, prompts
from _cpu.inprocess import part_of
from _cpu.models import DEFAULT, Shape
from _cpu.systems import LARGE_SERVED, MIXED, PROBE, SERVED, SYSTEMS, Mixed, Room, System
from paceline.errors import PacelineError
from paceline.measure.plan import Arrivals, Length, Load, Prompts

WAVES = {1: 3, 2: 2, 4: 2, 8: 2}  # requests of each stream; with more streams one each
STEADY_IN, STEADY_OUT, NEW_OUT = 32, 200, 16  # tokens, of the mixed load


def measure_served(bench: Bench, shape: Shape = DEFAULT) -> None:
    """Every number of streams, in turns: A B C at 1 stream, A B C at 4, ..."""
    size = bench.size
    names, counts = (SERVED, size.served) if shape is DEFAULT else (LARGE_SERVED, size.large_served)
    new = size.served_out if shape is DEFAULT else size.large_out
    room = Room(max(counts), max(PROBE, size.served_in + new + 16))
    part = part_of("served", shape)
    with contextlib.ExitStack() as stack:
        urls: dict[str, str] = {}

        def http(system: System, count: int, key: str) -> dict[str, Any]:
            if system.name not in urls:
                urls[system.name], _ = stack.enter_context(bench.serving(system, shape, room))
            # A model without meaning may write half a character at a time: lengths are forced, texts do not matter.
            load = Load(arrivals=Arrivals.CLOSED, concurrency=count, requests=count * WAVES.get(count, 1))
            lengths = Prompts(input=Length(value=size.served_in), output=Length(value=new), salt=key)
            plan = msgspec.structs.replace(plan_of(urls[system.name], load, key), prompts=lengths)
            busy = bench.quiet()
            with _told():
                records = play(plan, bench.state.scratch(key)).records
            if not all(record.ok for record in records):
                raise Failed(f"a request failed: {next(r.error for r in records if not r.ok)}")
            seconds = max(r.closed_s or 0.0 for r in records) - min(r.scheduled_s for r in records)
            return {"tokens_per_s": len(records) * new / seconds, "busy": busy}

        def static(system: System, count: int, key: str) -> dict[str, Any]:
            worker = bench.worker(system, shape, room)
            worker.run(prompts("warm", 1, size.served_in), 2)
            busy = bench.quiet()
            times = worker.run(prompts(key, count, size.served_in), new)["times"]
            return {"tokens_per_s": count * new / times[0][-1], "busy": busy}

        for repeat in range(bench.repeats):
            for count in counts:
                for system in bench.chosen(names):
                    key = f"{part} {count} {system.name} {repeat}"
                    how: Callable[..., Any] = static if system.peer == "transformers" else http
                    bench.measured(key, partial(how, system, count, key), system.name)


def measure_mixed(bench: Bench) -> None:
    """Eight steady streams, and a prompt of 2,000 tokens every 10 seconds; a server for each turn."""
    size = bench.size
    room = Room(size.streams + 2, max(PROBE, size.newcomer_in + NEW_OUT, STEADY_IN + STEADY_OUT) + 64)

    def work(mixed: Mixed, key: str) -> dict[str, Any]:
        row = {"input_tokens": size.newcomer_in, "output_tokens": NEW_OUT}
        rows = [{"at_s": size.period_s * number, **row} for number in range(size.newcomers)]
        with bench.serving(SYSTEMS[mixed.system], DEFAULT, room, mixed.extra) as (url, _):
            steady = streams(
                url,
                f"{key}:streams",
                tokens_in=STEADY_IN,
                tokens_out=STEADY_OUT,
                count=size.streams,
                duration_s=UNTIL_STOPPED_S,
            )
            plan = plan_of(url, Load(arrivals=Arrivals.TRACE), f"{key}:newcomers")
            plan = msgspec.structs.replace(plan, client=msgspec.structs.replace(plan.client, warmup_requests=0))
            plan = with_trace(plan, bench.state.folder / "newcomers.jsonl", rows)
            busy = bench.quiet()
            scratch = bench.state.scratch(key), bench.state.scratch(f"{key} streams")
            with _told():
                came, streamed = play_beside(plan, scratch[0], steady, scratch[1])
        found = streams_row(streamed.records, came.records, size.period_s, came.zero_s - streamed.zero_s)
        return {**found, "busy": busy}

    for repeat in range(bench.repeats):
        for mixed in MIXED:
            if bench.chosen([mixed.system]):
                key = f"mixed {mixed.name} {repeat}"
                bench.measured(key, partial(work, mixed, key), mixed.system)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What the client refuses or does not finish, as a failure of the system."""
    try:
        yield
    except (NotComplete, PacelineError) as error:
        raise Failed(str(error)) from error


def tell_served(bench: Bench, shape: Shape = DEFAULT) -> None:
    """Output tokens a second, all streams together."""
    names, counts = (SERVED, bench.size.served) if shape is DEFAULT else (LARGE_SERVED, bench.size.large_served)
    for count in counts:
        for name in names:
            rates = served_rates(bench, shape, name, count)
            if rates:
                bench.report.add(f"{part_of('served', shape)}: {name}, {count} streams", rates, "tokens/s")


def served_rates(bench: Bench, shape: Shape, name: str, count: int) -> list[float]:
    """Of each repeat."""
    return [found["tokens_per_s"] for found in bench.values(f"{part_of('served', shape)} {count}", name)]


def tell_mixed(bench: Bench) -> None:
    """Gaps of the streams, first tokens of the newcomers."""
    for mixed in MIXED:
        rows = bench.values("mixed", mixed.name)
        if rows:
            bench.report.add(f"mixed: {mixed.name}, ITL p50", [1e3 * row["itl_p50_s"] for row in rows], "ms")
            bench.report.add(f"mixed: {mixed.name}, ITL p99", [1e3 * row["itl_p99_s"] for row in rows], "ms")
            bench.report.add(f"mixed: {mixed.name}, newcomers' TTFT p50", [row["ttft_p50_s"] for row in rows], "s")
            if any(row["grows"] for row in rows):
                bench.report.note(f"mixed: {mixed.name}", "the queue of newcomers grows without end")
