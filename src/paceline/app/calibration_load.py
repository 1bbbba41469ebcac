"""The traffic of `paceline calibrate`: real HTTP requests whose steps cover what a server can be asked to compute.

Some streams go on in the background, more from stage to stage; beside them prompts are asked for one after another.
A prompt whose beginning is cached is a chunk at that position, one beside k streams makes a mixed step with k decodes,
several at once a burst. What each step held is not planned here: the server's call log tells.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from paceline.measure.alarm import Alarm, clock
from paceline.measure.bodies import request_body, resolve
from paceline.measure.client import Client, ClientSettings, Job
from paceline.measure.plan import BenchPlan
from paceline.measure.probe import Found
from paceline.measure.prompts import PromptMaker
from paceline.measure.records import Phase, RequestRecord
from paceline.measure.schedule import Arrival

LEVELS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # streams in the background
ALONE_SHARE, BURST_SHARE = 0.25, 0.15  # of all the time; the levels share the rest
FILL_SHARE = 0.25  # of a level's time may go into the prompts of its new streams
LEAST_LEVEL_S = 6.0  # a shorter stretch of time would hold its new streams' prompts and little else
LONGEST_STEP_SHARE = 0.06  # of all the time: no single prompt is longer than what fills this
FEWEST_TOKENS, OWN_TOKENS = 8, 192  # of a background stream's own prompt
STREAM_OUTPUT = (24, 240)
# Half of the streams go on behind a beginning that is cached, so that long contexts are not computed again. Each has
# another beginning, as far as these go: what several streams share is read from memory once, and a step is shorter.
BEGINNINGS, SHORTEST_BEGINNING = 12, 48
BEGINNINGS_SHARE = 0.06  # of all the time, at most, goes into computing these
BEGINNINGS_MOST = 2  # longest prompts that they are as long as together, at most
PROBE_OUTPUT = 3
BURSTS = ((2, 64), (4, 32), (8, 16), (8, 96), (16, 8), (16, 48), (32, 24), (64, 12))  # prompts at once, tokens of each


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server takes."""

    max_model_len: int  # tokens
    budget: int  # tokens in one step
    max_num_seqs: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Probe:
    """`together` prompts at once: `new` tokens to compute behind `cached` ones."""

    new: int
    cached: int = 0
    together: int = 1


@dataclass(frozen=True, slots=True)
class Stage:
    """One stretch of time: streams in the background, probes beside them, round and round."""

    name: str
    streams: int
    seconds: float
    probes: tuple[Probe, ...]


@dataclass(slots=True)
class Told:
    """How far the traffic is, for a progress bar."""

    stage: str = ""
    elapsed_s: float = 0.0
    requests: int = 0


@dataclass(slots=True)
class Traffic:
    """What came of it. `t0_s` is the zero of the records on the machine's monotonic clock."""

    t0_s: float
    records: list[RequestRecord] = field(default_factory=list)
    stages: list[tuple[str, float]] = field(default_factory=list)  # name and end on the records' axis


def sizes(longest: int) -> tuple[int, ...]:
    """Prompt lengths from 2 to `longest`, two to an octave, the longest itself among them."""
    found = {2, longest}
    size = 3.0
    while size < longest:
        found.add(round(size))
        size *= 2**0.5
    return tuple(sorted(found))


def spread(levels: Sequence[int], count: int) -> list[int]:
    """`count` of the levels (two at least), evenly over all, the first and the last among them."""
    count = max(2, count)
    if count >= len(levels):
        return list(levels)
    return sorted({levels[round(place * (len(levels) - 1) / (count - 1))] for place in range(count)})


def cached_lengths(longest: int, block: int = 16) -> tuple[int, ...]:
    """Positions at which chunks begin: nothing, a little, much. Whole blocks, since only these are cached."""
    return tuple(sorted({0, longest // 4 // block * block, longest // block * block}))


def beginnings(tokens: int, longest: int, block: int = 16) -> tuple[int, ...]:
    """Lengths of the streams' beginnings, in equal ratios and whole blocks, of so many tokens in all at most."""
    ratio = max(1.0, longest / SHORTEST_BEGINNING) ** (1.0 / (BEGINNINGS - 1))
    found: list[int] = []
    for place in range(BEGINNINGS):
        length = int(SHORTEST_BEGINNING * ratio**place) // block * block
        if sum(found) + length <= tokens and length <= longest:
            found.append(length)
    return tuple(found)


def stages(seconds: float, longest: int, limits: Limits) -> list[Stage]:
    """The whole design for a time, given the longest prompt that fits it."""
    lengths, positions = sizes(longest), cached_lengths(longest)
    alone = tuple(Probe(new, cached) for cached in positions for new in lengths)
    mixed = tuple(Probe(new, cached) for new in lengths if new <= longest // 2 for cached in positions[:2])
    room = limits.kv_tokens - (2 + BEGINNINGS_MOST) * longest - cached_lengths(longest)[-1]
    usual = (FEWEST_TOKENS + OWN_TOKENS + sum(STREAM_OUTPUT)) // 2  # tokens that a stream has to itself
    most = min(limits.max_num_seqs - 1, room // usual)
    levels = spread([level for level in LEVELS if level <= max(1, most)], int(seconds / LEAST_LEVEL_S))
    each = seconds * (1.0 - ALONE_SHARE - BURST_SHARE) / len(levels)
    bursts = tuple(Probe(size, together=count) for count, size in BURSTS if count * size <= 2 * longest)
    bursts = bursts or (Probe(longest, together=2),)  # of a machine too slow for any of those
    return [
        Stage("alone", 0, ALONE_SHARE * seconds, alone),
        Stage("bursts", 0, BURST_SHARE * seconds, bursts),
        *(Stage(f"{level} streams", level, each, mixed) for level in levels),
    ]


class Driver:
    """Sends the traffic. One event loop; records of all requests are kept, also of those cut off at the end."""

    def __init__(self, client: Client, plan: BenchPlan, found: Found, limits: Limits, traffic: Traffic) -> None:
        self.traffic = traffic
        self._client, self._plan, self._found, self._limits = client, plan, found, limits
        self._maker = PromptMaker(plan.seed, "calibrate", found.fit, found.words)
        self._rng = random.Random(plan.seed)  # noqa: S311  reproducible load, no secrets
        self._count = 0
        self._streams = 0
        self._wanted = 0  # streams
        self._opened = 0  # streams so far
        self._own = FEWEST_TOKENS  # tokens of a background stream's own prompt, at most
        self._beginnings: tuple[int, ...] = ()  # what may be cached before it, each once

    async def run(self, seconds: float, told: Callable[[Told], None]) -> None:
        """About `seconds` of traffic. Raises nothing for requests that fail: their records say so."""
        began = self._now()
        per_token_s = await self._speed()
        longest = int(LONGEST_STEP_SHARE * seconds / per_token_s)
        longest = max(16, min(longest, self._limits.budget, self._limits.max_model_len // 2))
        affordable = int(BEGINNINGS_SHARE * seconds / per_token_s)
        self._beginnings = beginnings(min(affordable, BEGINNINGS_MOST * longest), longest)
        for cached in cached_lengths(longest)[1:]:
            await self._ask(1, 1, cached)
        for number, cached in enumerate(self._beginnings):
            await self._ask(1, 1, cached, str(number))
        left = max(0.5 * seconds, seconds - (self._now() - began))
        for stage in stages(left, longest, self._limits):
            self._background(stage, per_token_s)
            end = self._now() + stage.seconds
            for probe in self._endless(stage.probes):
                if self._now() >= end:
                    break
                told(Told(stage.name, self._now() - began, len(self.traffic.records)))
                await self._probe(probe, end)
            self.traffic.stages.append((stage.name, self._now()))
        self.end_streams()

    def end_streams(self) -> None:
        """Begin no new ones; those that run end when the client is closed."""
        self._wanted = 0

    async def _speed(self) -> float:
        """Seconds a prompt token takes, roughly: two prompts that differ by 128 tokens."""
        short, long = [await self._time(size) for size in (16, 144)]
        return max((long - short) / 128, long / 1000, 1e-6)

    async def _time(self, size: int) -> float:
        taken = []
        for _ in range(3):
            began = self._now()
            await self._ask(size, 1)
            taken.append(self._now() - began)
        return min(taken)

    def _endless(self, probes: Sequence[Probe]) -> Iterator[Probe]:
        """All of them in ever new order; the long ones, which take most of the time, less often."""
        longest = max(probe.new * probe.together for probe in probes)
        turn = 0
        while True:
            shuffled = self._rng.sample(probes, len(probes))
            yield from (p for p in shuffled if turn % 3 == 0 or 4 * p.new * p.together <= longest)
            turn += 1

    async def _probe(self, probe: Probe, end: float) -> None:
        """Ask and wait for the answers, but not far beyond the stage's end: the server may be slower than thought."""
        asked = [self._ask(probe.new, PROBE_OUTPUT, probe.cached) for _ in range(probe.together)]
        await asyncio.wait(asked, timeout=max(2.0, 2.0 * (end - self._now())))

    def _background(self, stage: Stage, per_token_s: float) -> None:
        more = stage.streams - self._streams
        self._wanted = stage.streams
        if more > 0:
            own = int(FILL_SHARE * stage.seconds / (more * per_token_s))
            self._own = max(FEWEST_TOKENS, min(own, OWN_TOKENS))
        for _ in range(more):
            self._open_stream()

    def _open_stream(self) -> None:
        """In turns without a beginning and with the next one."""
        self._streams += 1
        self._opened += 1
        turn, without = divmod(self._opened, 2)
        cached, whose = 0, ""
        if self._beginnings and not without:
            number = turn % len(self._beginnings)
            cached, whose = self._beginnings[number], str(number)
        new = self._rng.randint(min(FEWEST_TOKENS, self._own), self._own)
        self._ask(new, self._rng.randint(*STREAM_OUTPUT), cached, whose).add_done_callback(self._stream_ended)

    def _stream_ended(self, _: asyncio.Future[RequestRecord]) -> None:
        self._streams -= 1
        if self._streams < self._wanted:
            self._open_stream()

    def _ask(self, new: int, outputs: int, cached: int = 0, whose: str = "") -> asyncio.Future[RequestRecord]:
        """One request of `cached` + `new` prompt tokens; the first so many are those of every request like it."""
        index, self._count = self._count, self._count + 1
        tokens = cached + new
        prefix = f"cached-{cached}-{whose}" if cached else ""
        arrival = Arrival(index=index, inputs=(tokens,), outputs=(outputs,), prefix=prefix, prefix_tokens=cached)
        body = request_body(self._plan.target, self._found.features, self._maker.text(arrival), outputs)
        ended: asyncio.Future[RequestRecord] = asyncio.get_running_loop().create_future()

        def done(record: RequestRecord) -> None:
            self.traffic.records.append(record)
            if not ended.done():
                ended.set_result(record)

        labels = {
            "id": f"c{index}",
            "index": index,
            "phase": Phase.MEASURE,
            "prompt_tokens_wanted": tokens,
            "output_tokens_wanted": outputs,
        }
        self._client.submit(Job(self._now(), body, labels), done)
        return ended

    def _now(self) -> float:
        return clock() - self._client.t0


async def drive(
    plan: BenchPlan, found: Found, limits: Limits, seconds: float, traffic: Traffic, told: Callable[[Told], None]
) -> None:
    """About `seconds` of traffic against the plan's target, into `traffic`: what is there stays if this is cut off."""
    alarm = Alarm(asyncio.get_running_loop())
    settings = ClientSettings(timeout_s=plan.client.timeout_s, keep_text=False)
    client = Client(resolve(plan.target, ""), settings, alarm, t0=clock())
    traffic.t0_s = client.t0
    driver = Driver(client, plan, found, limits, traffic)
    try:
        await driver.run(seconds, told)
    finally:
        driver.end_streams()
        await client.close()
        alarm.close()
