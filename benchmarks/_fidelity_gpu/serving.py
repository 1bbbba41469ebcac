"""Published servings (AIConfigurator's sample of `serving_points.csv`), simulated as they were measured: closed loops.

Prompt, answer and concurrency are constant in a row. What a row's engine is like follows from its name and version:
its policy, 2,048 tokens a step (prompts go whole in TensorRT-LLM), its host time, keys and values in 8 bits where
its weights are (the rows of 128 requests would not have fit otherwise). A loop begins with a burst, and requests pass
the API one after the other. Equal requests that were computed in one step end in one step, so bursts dissolve slowly:
of three waves the middle one is counted, and the first, for a tenth of the time to the first token, as in a run of ten
waves; how long the runs were is not stated. Two things are known of groups of rows, not of single ones:

- SGLang 0.5.1 and 0.5.8 were sent one wave of requests (time to first token grows in proportion to concurrency times
  prompt, which no closed loop does), the others a closed loop;
- DeepSeek-R1 under TensorRT-LLM 1.1 with expert parallelism ran with one token drafted by the model's own head: it
  takes 0.6 of the time of the same rows without. The draft is accepted 85 times in 100 (DeepSeek-V3's report).
"""

from __future__ import annotations

import csv
import random
import statistics
from bisect import insort
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from paceline.core.config import SchedulerConfig
from paceline.core.protocols import CostModel, Estimate
from paceline.core.sampling import SamplingParams
from paceline.core.shape import StepShape
from paceline.core.step import RequestSpec
from paceline.cost.analytic import AnalyticCost
from paceline.cost.catalogue import find_chip, find_model
from paceline.cost.deployment import Deployment
from paceline.cost.host import HOSTS
from paceline.measure.records import RequestRecord
from paceline.simulate.drive import Limits, drive
from paceline.simulate.replica import Replica
from paceline.simulate.traffic import Arrival

from .data import DATA

PATH = DATA / "serving_points.csv"
STEP_TOKENS = 2048
CHUNK_TOKENS = 8192  # SGLang's
BLOCK_TOKENS = 16
WAVES = 3
BURST_SHARE = 0.1  # of the requests of a run were in its first wave
CLIENT_S = 0.001  # mean time that a client takes to send the next request, exponential
API_S = 0.004  # of a request's time at the API, what no other request's overlaps with
ONE_WAVE = {("sglang", "0.5.1.post1"), ("sglang", "0.5.8.post1")}
DRAFTED = {("trtllm", "1.1.0rc2.post2")}
ACCEPTED = 0.85
FOREVER = Limits(timeout_s=1e6, overload_s=1e6)


@dataclass(frozen=True)
class Point:
    """One row."""

    name: str
    backend: str
    version: str
    model: str
    chip: str
    weights: str
    prompt: int
    output: int
    concurrency: int
    tp: int
    dp: int
    ep: int
    ttft_s: float
    tpot_s: float

    @property
    def group(self) -> str:
        """Rows that differ in lengths and concurrency alone."""
        weights = self.weights if self.weights != "auto" else "bf16"
        split = f"tp{self.tp}" + (f" dp{self.dp}" if self.dp > 1 else "") + (f" ep{self.ep}" if self.ep > 1 else "")
        return f"{self.model.split('/')[-1]} {self.chip} {self.backend} {self.version or '?'} {weights} {split}"


class Prediction(NamedTuple):
    """Means over the requests counted, seconds."""

    ttft_s: float
    tpot_s: float


@cache
def points() -> tuple[Point, ...]:
    """All rows."""
    with PATH.open(newline="") as file:
        return tuple(_point(row) for row in csv.DictReader(file))


def _point(row: dict[str, str]) -> Point:
    def whole(name: str) -> int:
        return int(row[name] or 1) or 1

    experts = "DeepSeek" in row["model_path"]
    dp = min(whole("attention_dp_size"), 8) if experts else 1
    # Some rows count all chips of a deployment in a degree: no group here is wider than a node of 8.
    tp = 1 if dp > 1 else min(whole("tp_size"), 8)
    return Point(
        name=row["id"],
        backend=row["backend"],
        version=row["backend_version"],
        model=row["model_path"],
        chip=row["system"],
        weights={"": "auto", "fp8_block": "fp8"}.get(row["gemm_quant_mode"], row["gemm_quant_mode"]),
        prompt=int(row["isl"]),
        output=int(row["osl"]),
        concurrency=int(row["concurrency"] or row["batch_size"]),
        tp=tp,
        dp=dp,
        ep=whole("moe_ep_size") if experts else 1,
        ttft_s=float(row["silicon_ttft_ms"]) / 1e3,
        tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
    )


def predict(point: Point) -> Prediction:
    """Simulate one row. A request that would not fit into the memory of its deployment alone is given what it needs."""
    cost = cost_model(
        point.backend, point.version, point.model, point.chip, point.weights, point.tp, point.dp, point.ep
    )
    length = point.prompt + point.output
    blocks = cost.deployment.num_blocks(BLOCK_TOKENS) * point.dp
    config = SchedulerConfig(
        num_blocks=max(blocks, -(-length // BLOCK_TOKENS) + 1),
        max_model_len=length + 1,
        block_size=BLOCK_TOKENS,
        max_num_batched_tokens=STEP_TOKENS * point.dp,
        max_num_seqs=max(point.concurrency, 1),
        prefix_caching=False,
        policy={"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm-noevict"}[point.backend],
        policy_options=_options(point),
    )
    law: CostModel = cost
    if (point.backend, point.version) in DRAFTED:
        law = Drafting(cost, ACCEPTED)

    one_wave = (point.backend, point.version) in ONE_WAVE
    traffic = Closed(point, 1 if one_wave else WAVES, cost.request_s)
    done = drive(traffic, Replica("engine", config, law), limits=FOREVER)
    waves: list[list[RequestRecord]] = [[] for _ in range(WAVES)]
    for record in done.records:
        waves[record.index // point.concurrency].append(record)
    first = _means(waves[0], traffic)
    if one_wave:
        return first
    middle = _means(waves[1], traffic)
    ttft_s = BURST_SHARE * first.ttft_s + (1.0 - BURST_SHARE) * middle.ttft_s
    return Prediction(ttft_s, middle.tpot_s)


def _means(records: list[RequestRecord], traffic: Closed) -> Prediction:
    return Prediction(
        statistics.fmean(r.read_s[0] - traffic.sent_s[r.index] for r in records),
        statistics.fmean((r.read_s[-1] - r.read_s[0]) / (len(r.read_s) - 1) for r in records),
    )


def _options(point: Point) -> tuple[tuple[str, int], ...]:
    budget = STEP_TOKENS * point.dp
    if point.backend == "sglang":
        return (("chunk", CHUNK_TOKENS * point.dp),)
    if point.backend == "trtllm":  # prompts go whole, beside a token for everybody else
        return (("max_num_tokens", max(budget, point.prompt + point.concurrency)),)
    return ()


@cache
def cost_model(
    backend: str, version: str, model: str, chip: str, weights: str, tp: int, dp: int, ep: int
) -> AnalyticCost:
    """Kept, for it remembers what it has worked out."""
    kv = "fp8" if weights == "fp8" and backend != "sglang" else "auto"
    deployment = Deployment(find_model(model), find_chip(chip), tp=tp, dp=dp, ep=ep, weights=weights, kv=kv)
    return AnalyticCost(deployment, host=HOSTS["vllm-sync" if (backend, version) == ("vllm", "0.12.0") else backend])


class Drafting:
    """One token drafted for each row and verified with the next: a decode's time for a token."""

    def __init__(self, cost: CostModel, accepted: float) -> None:
        self.cost, self.accepted, self.ready = cost, accepted, True

    def predict(self, shape: StepShape) -> Estimate:
        """Rows verify two tokens and gain 1 + `accepted`; what prompts add is as it was."""
        found, plain = self.cost.predict(shape), self._decodes(shape, 1)
        verified = self._decodes(shape, 2)
        scale = (found.seconds - plain + verified / (1.0 + self.accepted)) / found.seconds
        return Estimate(found.seconds * scale, found.low * scale, found.high * scale, found.known)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Nothing is learned."""

    def errors(self) -> tuple[float, float]:
        """Unknown."""
        return 0.0, 0.0

    def _decodes(self, shape: StepShape, tokens: int) -> float:
        """Seconds of a step in which all rows decode, `tokens` each."""
        rows, context = shape.rows, shape.context
        pairs = 0 if tokens == 1 else tokens * context
        return self.cost.predict(StepShape(tokens * rows, rows, context, pairs)).seconds


class Closed:
    """A closed loop of equal requests, begun at once; implements `Traffic`.

    A request takes `api_s` at the API, which is free for the next one after `API_S` of it. `sent_s` says when each left
    its client.
    """

    def __init__(self, point: Point, waves: int, api_s: float) -> None:
        self.total: int | None = waves * point.concurrency
        self.sent_s: dict[int, float] = {}
        self._point, self._api_s = point, api_s
        self._free_s = 0.0  # when the API is
        self._due: list[tuple[float, float]] = []  # at the engine, at its client; sorted
        self._random = random.Random(0)
        for _ in range(point.concurrency):
            self._send(0.0)

    @property
    def next_s(self) -> float:
        """When the next request reaches the engine."""
        return self._due[0][0] if self._due and len(self.sent_s) < (self.total or 0) else float("inf")

    def pop(self) -> Arrival:
        """Prompts have nothing in common."""
        (at_s, sent_s), index, point = self._due.pop(0), len(self.sent_s), self._point
        self.sent_s[index] = sent_s
        sampling = SamplingParams(temperature=0.0, max_tokens=point.output)
        spec = RequestSpec(str(index), (index + 2,) * point.prompt, sampling)
        return Arrival(at_s, spec, point.output, index=index)

    def ended(self, arrival: Arrival, at_s: float, *, ok: bool) -> None:
        """The next one, as soon as its client gets to it."""
        self._send(at_s + self._random.expovariate(1.0 / CLIENT_S))

    def _send(self, at_s: float) -> None:
        begins_s = max(self._free_s, at_s)
        self._free_s = begins_s + min(API_S, self._api_s)
        insort(self._due, (begins_s + self._api_s, at_s))
