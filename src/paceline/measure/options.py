"""The options that every `paceline bench` command takes, declared once, and the plan they make."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
import typer

from paceline.errors import ConfigError
from paceline.measure.keys import check_place
from paceline.measure.plan import Arrivals, BenchPlan, ClientPlan, Length, Load, Prompts, Target, Trace, parse_length

R = TypeVar("R")
DEFAULT_DURATION_S = 60.0
_LOAD, _PROMPTS, _TARGET, _CLIENT, _JUDGE = "Load", "Prompts", "Target", "Client", "Judging and output"


def a_path(text: str | Path) -> Path:
    """A path as a person gives it. An empty one, of a variable that is not set, would be the current folder."""
    if not str(text).strip():
        raise typer.BadParameter("the path is empty")
    return Path(text)


def _option(*names: str, panel: str, help: str) -> Any:  # noqa: A002  typer's own word
    return typer.Option(*names, rich_help_panel=panel, help=help, show_default=False)


def _plain(panel: str, help: str) -> Any:  # noqa: A002
    return typer.Option(rich_help_panel=panel, help=help)


def _path(panel: str, help: str) -> Any:  # noqa: A002
    return typer.Option(rich_help_panel=panel, help=help, parser=a_path, metavar="PATH")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """One field an option. Strings that name lengths and durations are parsed in `to_plan`."""

    rate: Annotated[float | None, _plain(_LOAD, "Open loop: requests (conversations) per second.")] = None
    concurrency: Annotated[int | None, _plain(_LOAD, "Closed loop: this many at once, each asking again.")] = None
    max_concurrency: Annotated[int | None, _plain(_LOAD, "Open loop: cap; its wait counts as latency.")] = None
    requests: Annotated[int | None, _option("--requests", "-n", panel=_LOAD, help="How many in all.")] = None
    duration: Annotated[str | None, _plain(_LOAD, "For how long: 90s, 2min. Without any bound: 60 s.")] = None
    arrivals: Annotated[str, _plain(_LOAD, "Spacing of an open loop: poisson, constant or gamma.")] = "poisson"
    burstiness: Annotated[float, _plain(_LOAD, "Shape of gamma gaps: below 1 bursty, above 1 regular.")] = 1.0
    ramp_to: Annotated[float | None, _plain(_LOAD, "Let the rate move to this over the duration.")] = None
    burst_rate: Annotated[float | None, _plain(_LOAD, "Rate within bursts.")] = None
    burst_every: Annotated[str, _plain(_LOAD, "From burst to burst.")] = "10s"
    burst_for: Annotated[str, _plain(_LOAD, "Length of a burst.")] = "1s"
    stagger: Annotated[str, _plain(_LOAD, "Closed loop: spread the first requests over this.")] = "0s"
    trace: Annotated[Path | None, _path(_LOAD, "Replay a trace: Azure CSV, Mooncake, ShareGPT, JSON lines.")] = None
    trace_format: Annotated[str, _plain(_LOAD, "auto, azure, mooncake, sharegpt or jsonl.")] = "auto"
    trace_speed: Annotated[float, _plain(_LOAD, "2 plays the trace twice as fast.")] = 1.0
    trace_skip: Annotated[int, _plain(_LOAD, "Rows left out at the start.")] = 0
    trace_limit: Annotated[int | None, _plain(_LOAD, "Rows used at most.")] = None
    seed: Annotated[int, _plain(_LOAD, "One seed, one run.")] = 0

    input: Annotated[
        str,
        _option("--input", "-i", panel=_PROMPTS, help="Prompt tokens: 512, uniform:128:900, lognormal:512:0.8:4096."),
    ] = "512"
    output: Annotated[str, _option("--output", "-o", panel=_PROMPTS, help="Output tokens, in the same forms.")] = "128"
    prompts: Annotated[Path | None, _path(_PROMPTS, "Prompts from a file: one a line, or JSON lines.")] = None
    prefix_tokens: Annotated[int, _plain(_PROMPTS, "Tokens of a shared prefix, inside the prompt.")] = 0
    prefix_groups: Annotated[int, _plain(_PROMPTS, "How many different prefixes.")] = 1
    prefix_share: Annotated[float, _plain(_PROMPTS, "Share of requests that carry one.")] = 1.0
    turns: Annotated[str, _plain(_PROMPTS, "Turns of a conversation, as a length.")] = "1"
    think: Annotated[str, _plain(_PROMPTS, "Milliseconds between turns, as a length.")] = "0"
    turn_input: Annotated[str | None, _plain(_PROMPTS, "New tokens of later turns, as a length.")] = None
    salt: Annotated[str, _plain(_PROMPTS, "Other texts on the same arrivals: a cold cache.")] = ""

    model: Annotated[str | None, _option("--model", "-m", panel=_TARGET, help="Without it: the server's first.")] = None
    endpoint: Annotated[str, _plain(_TARGET, "chat or completions.")] = "chat"
    stream: Annotated[bool, _plain(_TARGET, "Ask for a stream.")] = True
    choices: Annotated[int, _plain(_TARGET, "Choices a request (n).")] = 1
    ignore_eos: Annotated[str, _plain(_TARGET, "Force output lengths: auto (where taken), on, off.")] = "auto"
    temperature: Annotated[float, _plain(_TARGET, "Sampling temperature.")] = 0.0
    class_field: Annotated[
        str | None, _plain(_TARGET, "Request field for a trace's class: service_tier, paceline.class.")
    ] = None
    extra: Annotated[str | None, _plain(_TARGET, "Further fields of each request, as a JSON object.")] = None
    api_key_env: Annotated[str | None, _plain(_TARGET, "Environment variable that holds the key.")] = None
    api_key_file: Annotated[Path | None, _plain(_TARGET, "File that holds the key.")] = None
    api_key_header: Annotated[
        str, _plain(_TARGET, "Header of the key, e.g. api-key; Authorization has Bearer before it.")
    ] = "Authorization"
    tenant_key: Annotated[
        list[str] | None, _plain(_TARGET, "A tenant's own key: NAME=env:VARIABLE or NAME=file:PATH. Repeatable.")
    ] = None
    ca_file: Annotated[Path | None, _plain(_TARGET, "Certificates to trust for https.")] = None
    insecure: Annotated[bool, _option("--insecure", panel=_TARGET, help="Do not check the certificate.")] = False
    metrics_url: Annotated[str | None, _plain(_TARGET, "Where /metrics is; empty: do not read it.")] = None

    workers: Annotated[int, _plain(_CLIENT, "Client processes.")] = 1
    connections: Annotated[int | None, _plain(_CLIENT, "Connections opened before the start.")] = None
    timeout: Annotated[str, _plain(_CLIENT, "Deadline of each request.")] = "600s"
    retries: Annotated[int, _plain(_CLIENT, "Retries of 429 and 503, inside the latency.")] = 0
    retry_cap: Annotated[str, _plain(_CLIENT, "Longest wait for one retry.")] = "60s"
    warmup: Annotated[int, _plain(_CLIENT, "Requests before the run, with other prompts.")] = 8
    self_check: Annotated[bool, _plain(_CLIENT, "Measure the client's own error first.")] = True
    keep_text: Annotated[bool, _plain(_CLIENT, "Keep the answers' text in the records.")] = True
    tokenizer: Annotated[
        Path | None, _plain(_CLIENT, "tokenizer.json that counts answers whose usage the server does not tell.")
    ] = None
    loop: Annotated[str, _plain(_CLIENT, "Event loop: auto, uvloop or asyncio.")] = "auto"

    gate: Annotated[list[str] | None, _plain(_JUDGE, "What must hold, e.g. 'p95 ttft <= 500ms'. Repeatable.")] = None
    slo: Annotated[list[str] | None, _plain(_JUDGE, "Per-request objective for goodput: ttft<=500ms.")] = None
    price_per_hour: Annotated[float | None, _plain(_JUDGE, "Cost of the server, for cost per token.")] = None
    out: Annotated[Path | None, _path(_JUDGE, "Folder of the result. Without it: results/, by time.")] = None
    name: Annotated[str, _plain(_JUDGE, "A name for the report.")] = ""
    as_json: Annotated[bool, _option("--json", panel=_JUDGE, help="The result as JSON on standard output.")] = False
    quiet: Annotated[bool, _option("--quiet", "-q", panel=_JUDGE, help="Only the result.")] = False


def takes(kind: type, name: str, only: Iterable[str] = ()) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a command the fields of a dataclass as options of its own; it receives the object as `name`."""
    hints = get_type_hints(kind, include_extras=True)
    wanted = set(only)
    chosen = [field for field in fields(kind) if not wanted or field.name in wanted]

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        own = inspect.signature(command, eval_str=True)
        mine = [parameter for parameter in own.parameters.values() if parameter.name != name]
        added = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in chosen
        ]

        @functools.wraps(command)
        def wrapper(**values: Any) -> R:
            return command(**{name: kind(**{field.name: values.pop(field.name) for field in chosen}), **values})

        del wrapper.__wrapped__
        # The signature below is the truth: typer must not look through to the wrapped one.
        wrapper.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*mine, *added)]
        )
        wrapper.__annotations__ = {p.name: p.annotation for p in (*mine, *added)}
        return wrapper

    return decorate


def takes_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command every field of BenchOptions as an option of its own; it receives them as `options`."""
    return takes(BenchOptions, "options")(command)


def usage_error(message: str, option: str | None = None) -> typer.BadParameter:
    """An error of the command line itself: exit code 64."""
    return typer.BadParameter(message, param_hint=option)


def seconds(option: str, text: str) -> float:
    """A duration option; a bare number is taken as seconds here, where nothing else is ever meant."""
    from paceline.measure.slo import parse_duration

    try:
        value = float(text)
    except ValueError:
        try:
            value = parse_duration(text)
        except ConfigError as error:
            raise usage_error(str(error), option) from None
    if not 0.0 <= value < math.inf:
        raise usage_error(f"{text} is no duration; it must be a number of seconds from 0 up", option)
    return value


def _length(option: str, text: str, low: int = 1) -> Length:
    try:
        return parse_length(text, low=low)
    except ConfigError as error:
        raise usage_error(str(error), option) from None


def to_plan(url: str, options: BenchOptions, *, needs_load: bool = True) -> BenchPlan:
    """The plan of a command line. Raises typer.BadParameter for what cannot be read (64), never for what cannot run."""
    _check_judging(options)
    trace = None
    if options.trace is not None:
        if options.prompts is not None:
            raise usage_error("a trace brings its own prompts or lengths: give --trace or --prompts, not both")
        trace = Trace(
            path=str(options.trace),
            format=options.trace_format,
            speed=options.trace_speed,
            skip=options.trace_skip,
            limit=options.trace_limit,
        )
    return BenchPlan(
        target=_target(url, options),
        load=_load(options, needs_load=needs_load),
        prompts=_prompts(options),
        trace=trace,
        client=_client(options),
        seed=options.seed,
        slos=tuple(options.slo or ()),
        gates=tuple(options.gate or ()),
        price_per_hour=options.price_per_hour,
        name=options.name,
    )


def _check_judging(options: BenchOptions) -> None:
    from paceline.measure.gates import parse_gate
    from paceline.measure.slo import parse_slos

    try:
        for text in options.gate or ():
            parse_gate(text)
        parse_slos(options.slo or ())
    except ConfigError as error:
        raise usage_error(str(error)) from None
    if options.price_per_hour is not None and not options.price_per_hour >= 0:
        raise usage_error("a price is a number from 0 up", "--price-per-hour")


def _load(options: BenchOptions, *, needs_load: bool) -> Load:
    try:
        arrivals = Arrivals(options.arrivals)
    except ValueError:
        raise usage_error("use poisson, constant or gamma", "--arrivals") from None
    if options.rate is not None and options.concurrency is not None:
        raise usage_error("give --rate (open loop, perhaps with --max-concurrency) or --concurrency, not both")
    if options.concurrency is not None:
        arrivals = Arrivals.CLOSED
    elif options.rate is None and options.trace is not None:
        arrivals = Arrivals.TRACE
    elif options.rate is None and needs_load:
        raise usage_error("say how much load: --rate, --concurrency or --trace")
    duration = None if options.duration is None else seconds("--duration", options.duration)
    if duration is None and options.requests is None and arrivals is not Arrivals.TRACE and options.trace is None:
        duration = DEFAULT_DURATION_S
    return Load(
        arrivals=arrivals,
        rate=options.rate,
        burstiness=options.burstiness,
        ramp_to=options.ramp_to,
        burst_rate=options.burst_rate,
        burst_every_s=seconds("--burst-every", options.burst_every),
        burst_for_s=seconds("--burst-for", options.burst_for),
        concurrency=options.concurrency,
        stagger_s=seconds("--stagger", options.stagger),
        max_concurrency=options.max_concurrency,
        requests=options.requests,
        duration_s=duration,
    )


def _prompts(options: BenchOptions) -> Prompts:
    return Prompts(
        input=_length("--input", options.input),
        output=_length("--output", options.output),
        file=None if options.prompts is None else str(options.prompts),
        prefix_tokens=options.prefix_tokens,
        prefix_groups=options.prefix_groups,
        prefix_share=options.prefix_share,
        turns=_length("--turns", options.turns),
        think=_length("--think", options.think, low=0),
        turn_input=None if options.turn_input is None else _length("--turn-input", options.turn_input),
        salt=options.salt,
    )


def _target(url: str, options: BenchOptions) -> Target:
    extra: dict[str, Any] = {}
    if options.extra is not None:
        try:
            extra = msgspec.json.decode(options.extra, type=dict[str, Any])
        except msgspec.DecodeError:
            raise usage_error("not a JSON object", "--extra") from None
    return Target(
        url=url,
        endpoint=options.endpoint,
        model=options.model,
        stream=options.stream,
        api_key_env=options.api_key_env,
        api_key_file=None if options.api_key_file is None else str(options.api_key_file),
        api_key_header=options.api_key_header,
        tenant_keys=_tenant_keys(options.tenant_key or ()),
        ca_file=None if options.ca_file is None else str(options.ca_file),
        verify_tls=not options.insecure,
        metrics_url=options.metrics_url,
        choices=options.choices,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        class_field=options.class_field,
        extra=extra,
    )


def _tenant_keys(given: Iterable[str]) -> dict[str, str]:
    """What --tenant-key says. The text is never shown: somebody will put the key itself there."""
    keys: dict[str, str] = {}
    for text in given:
        tenant, _, place = text.partition("=")
        try:
            check_place(place)
        except ConfigError as error:
            raise usage_error(str(error), "--tenant-key") from None
        keys[tenant.strip()] = place
    return keys


def _client(options: BenchOptions) -> ClientPlan:
    return ClientPlan(
        workers=options.workers,
        connections=options.connections,
        timeout_s=seconds("--timeout", options.timeout),
        retries=options.retries,
        retry_cap_s=seconds("--retry-cap", options.retry_cap),
        warmup_requests=options.warmup,
        keep_text=options.keep_text or options.tokenizer is not None,
        tokenizer=None if options.tokenizer is None else str(options.tokenizer),
        self_check=options.self_check,
        loop=options.loop,
    )
