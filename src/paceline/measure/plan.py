"""What to measure, fully stated: target, load, prompts, client. Resolved once, kept in the manifest, run again from it.

Keys never enter a plan: it names the environment variable or the file that holds one.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import msgspec

from paceline.errors import ConfigError
from paceline.measure.address import check_header_name

MAX_RATE = 1e6  # per second: beyond any clock we could keep
MAX_REQUESTS = 5_000_000


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the plan's parts. Defaults are written out, so that a stored plan never changes its meaning."""


class Length(Spec, frozen=True):
    """How many tokens: drawn per request. `low` and `high` bound every kind that draws."""

    kind: str = "fixed"  # fixed | uniform | lognormal
    value: float = 128  # fixed: the length; lognormal: the median
    sigma: float = 0.0  # lognormal: of the logarithm
    low: int = 1
    high: int = 1_000_000


class Arrivals(StrEnum):
    """How open-loop arrivals are spaced, or what else starts a request."""

    CONSTANT = "constant"
    POISSON = "poisson"
    GAMMA = "gamma"  # with `burstiness`: shape of the gaps; 1 is Poisson, below 1 bursty, above 1 regular
    TRACE = "trace"  # times of the trace
    CLOSED = "closed"  # no times: `concurrency` slots, each asks again when it was answered


class Load(Spec, frozen=True):
    """When requests are due. A ramp and bursts change the rate over time and combine with any spacing."""

    arrivals: Arrivals = Arrivals.POISSON
    rate: float | None = None  # requests (conversations) per second
    burstiness: float = 1.0
    ramp_to: float | None = None  # linear from `rate` to this over `duration_s`
    burst_rate: float | None = None  # instead of `rate`, for `burst_for_s` of every `burst_every_s`
    burst_every_s: float = 10.0
    burst_for_s: float = 1.0
    concurrency: int | None = None  # closed loop: slots
    stagger_s: float = 0.0  # closed loop: the slots' first requests are spread over this
    max_concurrency: int | None = None  # open loop: cap; the wait below it is inside the latency
    requests: int | None = None
    duration_s: float | None = None


class Trace(Spec, frozen=True):
    """Arrivals, lengths or texts from a file."""

    path: str
    format: str = "auto"  # azure | mooncake | sharegpt | jsonl
    speed: float = 1.0  # 2 plays it twice as fast
    skip: int = 0
    limit: int | None = None


class Prompts(Spec, frozen=True):
    """What is asked. Lengths are in the server's tokens."""

    input: Length = Length(value=512)
    output: Length = Length(value=128)
    file: str | None = None  # one prompt a line, or JSON lines with "prompt" (and "output_tokens")
    prefix_tokens: int = 0  # shared, in front of the own part and inside the input length
    prefix_groups: int = 1  # how many different prefixes
    prefix_share: float = 1.0  # of requests that carry one
    turns: Length = Length(value=1)
    think: Length = Length(value=0, low=0)  # milliseconds between turns
    turn_input: Length | None = None  # new tokens of each later turn; None: as `input`, without the prefix
    salt: str = ""  # other prompts on the same arrivals and lengths: a cold cache without a restart


class Target(Spec, frozen=True):
    """Whom to ask."""

    url: str
    endpoint: str = "chat"  # chat | completions
    model: str | None = None  # None: the server's first
    stream: bool = True
    api_key_env: str | None = None
    api_key_file: str | None = None
    api_key_header: str = "Authorization"  # carries "Bearer KEY"; under any other name ("api-key") the key alone
    tenant_keys: dict[str, str] = {}  # tenant of a trace's rows -> "env:NAME" or "file:PATH" of its own key
    ca_file: str | None = None
    verify_tls: bool = True
    metrics_url: str | None = None  # None: /metrics of the same host; "" : do not scrape
    choices: int = 1
    ignore_eos: str = "auto"  # auto | on | off: whether output lengths are forced
    temperature: float = 0.0
    class_field: str | None = None  # where a trace's class goes in the request: "service_tier", "paceline.class"
    extra: dict[str, Any] = {}  # further fields of every request body


class ClientPlan(Spec, frozen=True):
    """How we ask."""

    workers: int = 1
    connections: int | None = None  # opened before t0; None: chosen from the load
    timeout_s: float = 600.0
    retries: int = 0
    retry_cap_s: float = 60.0
    warmup_requests: int = 8
    warmup_concurrency: int = 4
    keep_text: bool = True
    tokenizer: str | None = None  # tokenizer.json that counts answers whose usage the server does not tell
    self_check: bool = True  # against the built-in mock at the planned load, before the run
    scrape_every_s: float = 1.0
    loop: str = "auto"  # auto | asyncio | uvloop


class BenchPlan(Spec, frozen=True):
    """One run."""

    target: Target
    load: Load = Load()
    prompts: Prompts = Prompts()
    trace: Trace | None = None
    client: ClientPlan = ClientPlan()
    seed: int = 0
    slos: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    price_per_hour: float | None = None
    name: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built

    @staticmethod
    def from_dict(values: dict[str, Any]) -> BenchPlan:
        """The plan of a manifest. Raises ConfigError for one this version cannot read."""
        try:
            return msgspec.convert(values, BenchPlan)
        except msgspec.ValidationError as error:
            raise ConfigError(f"the plan cannot be read: {error}") from None


def check(plan: BenchPlan) -> None:
    """Raise ConfigError, in one clear line, for a plan that cannot be run."""
    _check_load(plan)
    for name in ("input", "output", "turns", "think", "turn_input"):
        length = getattr(plan.prompts, name)
        if length is not None:
            check_length(name, length)
    prompts, client = plan.prompts, plan.client
    _require(0.0 <= prompts.prefix_share <= 1.0, "the prefix share must lie between 0 and 1")
    _require(prompts.prefix_tokens >= 0 and prompts.prefix_groups >= 1, "prefix tokens and groups must be positive")
    _require(plan.target.endpoint in ("chat", "completions"), f"unknown endpoint {plan.target.endpoint!r}")
    _require(plan.target.ignore_eos in ("auto", "on", "off"), "ignore_eos is one of auto, on, off")
    check_header_name(plan.target.api_key_header)
    _require(plan.target.choices >= 1, "at least one choice must be asked for")
    _require(client.workers >= 1, "at least one worker process is needed")
    _require(client.timeout_s > 0 and math.isfinite(client.timeout_s), "the timeout must be a positive number")
    _require(client.retries >= 0 and client.warmup_requests >= 0, "retries and warm-up requests cannot be negative")
    cap = plan.load.max_concurrency
    _require(cap is None or cap >= client.workers, "the concurrency cap is below the number of workers")
    if plan.load.concurrency is not None:
        _require(plan.load.concurrency >= client.workers, "the concurrency is below the number of workers")


def _check_load(plan: BenchPlan) -> None:
    load = plan.load
    for name in ("rate", "ramp_to", "burst_rate"):
        rate = getattr(load, name)
        _require(
            rate is None or (math.isfinite(rate) and 0 < rate <= MAX_RATE),
            f"impossible rate: {name} = {rate}; it must be above 0 and at most {MAX_RATE:g} per second",
        )
    duration = load.duration_s
    _require(
        duration is None or (math.isfinite(duration) and duration > 0), f"the duration must be above 0, not {duration}"
    )
    _require(load.requests is None or 0 < load.requests <= MAX_REQUESTS, f"requests must be 1 .. {MAX_REQUESTS}")
    _require(load.burstiness > 0 and math.isfinite(load.burstiness), "burstiness must be above 0")
    _require(load.max_concurrency is None or load.max_concurrency > 0, "the concurrency cap must be at least 1")
    if load.arrivals is Arrivals.CLOSED:
        _require(load.concurrency is not None and load.concurrency > 0, "a closed loop needs a concurrency above 0")
        _require(load.rate is None, "a closed loop has no rate; choose a rate or a concurrency")
        _require(load.max_concurrency is None, "a closed loop's concurrency is its cap")
        _require(load.stagger_s >= 0, "the stagger cannot be negative")
    elif load.arrivals is Arrivals.TRACE:
        _require(plan.trace is not None, "replay needs a trace file")
    else:
        _require(load.rate is not None, "an open loop needs a rate")
    if load.arrivals is not Arrivals.TRACE:
        bounded = load.requests is not None or duration is not None or plan.trace is not None
        _require(bounded, "say when to stop: a number of requests or a duration")
    if load.ramp_to is not None:
        _require(duration is not None, "a ramp needs a duration")
    if load.rate is not None and duration is not None and load.requests is None:
        expected = (load.rate + (load.rate if load.ramp_to is None else load.ramp_to)) / 2 * duration
        _require(
            expected <= MAX_REQUESTS, f"impossible rate: about {expected:.3g} requests; {MAX_REQUESTS:.3g} is most"
        )
    if load.burst_rate is not None:
        _require(0 < load.burst_for_s < load.burst_every_s, "a burst must be shorter than its period")
    if plan.trace is not None:
        _require(plan.trace.speed > 0 and math.isfinite(plan.trace.speed), "the trace's speed must be above 0")


def check_length(name: str, length: Length) -> None:
    """Raise ConfigError for a length that cannot be drawn."""
    _require(length.kind in ("fixed", "uniform", "lognormal"), f"{name}: unknown kind {length.kind!r}")
    _require(math.isfinite(length.value) and length.value >= 0, f"{name}: {length.value} is not a length")
    _require(0 <= length.low <= length.high, f"{name}: the bounds {length.low} .. {length.high} are empty")
    _require(length.sigma >= 0 and math.isfinite(length.sigma), f"{name}: sigma must be a number from 0 up")


def parse_length(text: str, *, low: int = 1) -> Length:
    """Read `512`, `uniform:128:900`, or `lognormal:MEDIAN:SIGMA[:MAX]`. Raises ConfigError."""
    kind, *numbers = text.split(":")
    try:
        if not numbers:
            return Length(value=_whole(kind), low=min(low, _whole(kind)))
        if kind == "uniform" and len(numbers) == 2:
            least, most = map(_whole, numbers)
            if least > most:
                raise ConfigError(f"{text!r}: the lower bound is above the upper one")
            return Length(kind=kind, value=(least + most) / 2, low=least, high=most)
        if kind == "lognormal" and len(numbers) in (2, 3):
            high = _whole(numbers[2]) if len(numbers) == 3 else Length().high
            length = Length(kind=kind, value=float(numbers[0]), sigma=float(numbers[1]), low=low, high=high)
            check_length(text, length)
            return length
    except ValueError:
        pass
    raise ConfigError(f"{text!r} is not a length: use 512, uniform:128:900 or lognormal:MEDIAN:SIGMA[:MAX]")


def _whole(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
