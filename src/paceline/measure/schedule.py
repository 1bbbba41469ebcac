"""One precomputed arrival list on an absolute axis. One seed gives one list, however many workers share it.

Spacing and rate profile are independent: a unit-rate point process (constant, Poisson or gamma gaps) is drawn first and
then mapped through the inverse of the cumulative rate, which may ramp and burst. What an arrival asks for is drawn
from a generator of its own index, so lengths do not move when the load does.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from paceline.errors import ConfigError
from paceline.measure.plan import MAX_REQUESTS, Arrivals, BenchPlan, Length, Load, Trace, check
from paceline.measure.traces import TraceRow, load_trace

CHARS_PER_TOKEN = 4.0  # only for output lengths of reference answers, whose tokens nobody told us
CLOSED_ROUNDS = 50  # a closed loop bounded by time: this many requests a slot are drawn, then lengths repeat


class Arrival(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, or one conversation of several turns (parallel tuples, one entry a turn)."""

    index: int
    at_s: float | None = None  # None: closed loop
    inputs: tuple[int | None, ...]  # tokens wanted; turn 0: of the whole prompt, later: new ones; None: as the text is
    outputs: tuple[int, ...]
    thinks_s: tuple[float, ...] = ()  # before turn i + 1
    prefix: str = ""  # name of the shared prefix
    prefix_tokens: int = 0
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    texts: tuple[str, ...] = ()
    messages: str = ""
    tenant: str = ""
    traffic_class: str = ""

    @property
    def turns(self) -> int:
        return len(self.outputs)


def seeded(name: str) -> random.Random:
    """A generator of its own for each named purpose, so that drawing more of one thing moves no other."""
    return random.Random(name)  # noqa: S311  reproducible load, no secrets


def build_schedule(plan: BenchPlan, classes: Collection[str] | None = None) -> list[Arrival]:
    """The arrivals of a plan in order of time. Raises ConfigError for a plan that cannot be run.

    A trace may name those of `classes`; None: any.
    """
    check(plan)
    rows = _rows(plan, classes)
    times = _times(plan, rows)
    if not times:
        raise ConfigError("the schedule is empty: no arrival falls into the duration")
    return [_arrival(plan, i, at, rows[i % len(rows)] if rows else None) for i, at in enumerate(times)]


def _rows(plan: BenchPlan, classes: Collection[str] | None) -> list[TraceRow]:
    if plan.trace is not None:
        return load_trace(plan.trace, classes)
    if plan.prompts.file is not None:
        return load_prompts(Path(plan.prompts.file), classes)
    return []


def load_prompts(path: Path, classes: Collection[str] | None = None) -> list[TraceRow]:
    """One prompt a line, or JSON lines with "prompt" or "messages"."""
    if path.suffix in (".jsonl", ".json"):
        form = "sharegpt" if path.suffix == ".json" else "jsonl"
        return load_trace(Trace(path=str(path), format=form), classes)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the prompts {path}: {reason}") from None
    rows = [TraceRow(texts=(line,)) for line in lines if line.strip()]
    if not rows:
        raise ConfigError(f"the prompt file {path} is empty")
    return rows


# Times


def _times(plan: BenchPlan, rows: list[TraceRow]) -> list[float | None]:
    load = plan.load
    if load.arrivals is Arrivals.CLOSED:
        return [None] * _closed_count(load, rows)
    if load.arrivals is Arrivals.TRACE:
        if rows and rows[0].at_s is None:
            raise ConfigError("the trace has no times; give a rate or a concurrency to use its prompts")
        stop = math.inf if load.duration_s is None else load.duration_s
        timed = [row.at_s for row in rows if row.at_s is not None and row.at_s < stop]
        return list(timed[: load.requests])
    return list(_open_times(load, plan.seed, len(rows)))


def _closed_count(load: Load, rows: list[TraceRow]) -> int:
    if load.requests is not None:
        return load.requests
    if load.duration_s is None:
        return len(rows)
    return max(1000, len(rows), CLOSED_ROUNDS * (load.concurrency or 1))


def _open_times(load: Load, seed: int, rows: int) -> Iterator[float]:
    count = load.requests
    if count is None:
        count = MAX_REQUESTS if load.duration_s is not None else rows
    stop = math.inf if load.duration_s is None else load.duration_s
    units = unit_process(load, seeded(f"{seed}:arrivals"))
    emitted = 0
    for at in warp(units, rate_segments(load)):
        if at >= stop or emitted == count:
            return
        emitted += 1
        yield at
    if load.duration_s is not None and emitted == MAX_REQUESTS:
        raise ConfigError(f"impossible rate: more than {MAX_REQUESTS} requests in the duration")


def unit_process(load: Load, rng: random.Random) -> Iterator[float]:
    """Cumulative positions of a point process of rate 1. Constant spacing starts at 0, the others after a gap."""
    if load.arrivals is Arrivals.CONSTANT:
        position = 0
        while True:
            yield float(position)
            position += 1
    shape = load.burstiness if load.arrivals is Arrivals.GAMMA else 1.0
    total = 0.0
    while True:
        total += rng.expovariate(1.0) if shape == 1.0 else rng.gammavariate(shape, 1.0 / shape)
        yield total


Piece = tuple[float, float, float, float]  # start, end, rate at start, rate at end


def rate_segments(load: Load) -> Iterator[Piece]:
    """The rate over time as pieces on which it is linear, without a gap, endless unless it ramps."""
    rate = load.rate
    assert rate is not None
    end = math.inf if load.ramp_to is None else (load.duration_s or math.inf)

    def at(t: float) -> float:
        return rate if load.ramp_to is None else rate + (load.ramp_to - rate) * t / end

    if load.burst_rate is None:
        yield (0.0, end, rate, at(end) if load.ramp_to is not None else rate)
        return
    start, period = 0.0, 1
    while start < end:
        calm = min(end, period * load.burst_every_s)
        yield (start, calm, at(start), at(calm))
        burst = min(end, calm + load.burst_for_s)
        if burst > calm:
            yield (calm, burst, load.burst_rate, load.burst_rate)
        start, period = burst, period + 1


def warp(units: Iterator[float], pieces: Iterator[Piece]) -> Iterator[float]:
    """Times at which the cumulative rate reaches each unit position; ends with the last piece."""
    unit = next(units)
    before = 0.0  # cumulative rate at the start of the piece
    for start, end, first, last in pieces:
        length = end - start
        mass = math.inf if math.isinf(length) else (first + last) / 2 * length
        while unit - before < mass:
            need = unit - before
            if first == last:
                yield start + need / first
            else:  # first x + slope x^2 / 2 = need, solved without cancellation
                slope = (last - first) / length
                yield start + 2 * need / (first + math.sqrt(max(0.0, first * first + 2 * slope * need)))
            unit = next(units)
        before += mass


# Shapes


def _arrival(plan: BenchPlan, index: int, at: float | None, row: TraceRow | None) -> Arrival:
    rng = seeded(f"{plan.seed}:shape:{index}")
    prompts = plan.prompts
    first_in, first_out = draw(prompts.input, rng), draw(prompts.output, rng)
    prefixed = prompts.prefix_tokens > 0 and rng.random() < prompts.prefix_share
    group = f"prefix-{rng.randrange(prompts.prefix_groups)}" if prefixed else ""
    turns = max(1, draw(prompts.turns, rng))
    if row is not None:
        return _from_row(plan, index, at, row, first_out, group)
    later = prompts.turn_input or prompts.input
    inputs: list[int | None] = [first_in]
    outputs, thinks = [first_out], []
    for _ in range(turns - 1):
        inputs.append(draw(later, rng))
        outputs.append(draw(prompts.output, rng))
        thinks.append(draw(prompts.think, rng) / 1e3)
    return Arrival(
        index=index,
        at_s=at,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        thinks_s=tuple(thinks),
        prefix=group,
        prefix_tokens=min(prompts.prefix_tokens, first_in) if group else 0,
    )


def _from_row(plan: BenchPlan, index: int, at: float | None, row: TraceRow, output: int, group: str) -> Arrival:
    """A trace gives what it knows; the plan's output length fills in where it knows none."""
    turns = max(1, len(row.texts))
    outputs = [output if row.output_tokens is None else max(1, row.output_tokens)] * turns
    for turn, answer in enumerate(row.answers[:turns]):
        outputs[turn] = max(1, round(len(answer) / CHARS_PER_TOKEN))
    rng = seeded(f"{plan.seed}:think:{index}")
    texts = bool(row.texts or row.messages)
    return Arrival(
        index=index,
        at_s=at,
        inputs=(None,) * turns if texts else (max(1, row.input_tokens or 1),),
        outputs=tuple(outputs),
        thinks_s=tuple(draw(plan.prompts.think, rng) / 1e3 for _ in range(turns - 1)),
        prefix=row.group or group,
        prefix_tokens=plan.prompts.prefix_tokens if (row.group or group) else 0,
        blocks=row.blocks,
        block_tokens=row.block_tokens if row.blocks else 0,
        texts=row.texts,
        messages=row.messages,
        tenant=row.tenant,
        traffic_class=row.traffic_class,
    )


def draw(length: Length, rng: random.Random) -> int:
    """One length. A fixed one uses no randomness."""
    if length.kind == "fixed":
        return round(length.value)
    if length.kind == "uniform":
        return rng.randint(length.low, length.high)
    drawn = round(rng.lognormvariate(math.log(max(length.value, 1e-9)), length.sigma))
    return min(max(drawn, length.low), length.high)


# On disk


def encode(arrivals: list[Arrival]) -> bytes:
    """JSON lines, as schedule.jsonl holds them."""
    return msgspec.json.Encoder().encode_lines(arrivals)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_schedule(path: Path) -> list[Arrival]:
    """The arrivals of a run folder. Raises ConfigError when they are not there or torn."""
    try:
        return msgspec.json.Decoder(Arrival).decode_lines(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read the schedule {path}: {error}") from None
