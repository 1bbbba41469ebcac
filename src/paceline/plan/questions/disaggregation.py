"""Does it pay to prefill and decode apart; how many of each, and over what link?

Together, every step carries decodes and a share of some prompt, and must end within the ITL target. Apart, a decode
step carries decodes alone and a prompt has a replica to itself; KV travels in between. The work is the same, so apart
pays where promises keep the shared step small, and costs where prompts would have filled steps that only read weights.
"""

from __future__ import annotations

from paceline.plan.answer import Answer, Cell, Column, Table, Value, solve
from paceline.plan.case import Case
from paceline.plan.formula import Amount
from paceline.plan.pools import Split, split_of
from paceline.plan.units import Unit, digits, show

RELIEF = 1.05  # less than this is within what a model of queues can tell


def ask(case: Case) -> Answer | None:
    """None where the chip's rate is not known, or no sequence fits."""
    own = case.at_own_context()
    fits = own.sequences_that_fit(own.traffic.context)
    if not case.roofline.knows_compute or not fits:
        return None
    split = split_of(case)
    traffic, targets = case.traffic, case.targets
    return Answer(
        name="disaggregation",
        question="Does it pay to prefill and decode apart?",
        headline=_headline(split),
        values=(*_rates(case, split), *_link(case, split)),
        binds=f"together: {_binds_together(split, fits)}; apart: the slower pool, then the link",
        tables=(_ratios(split), _links(case, split)),
        notes=(
            f"prompts of {traffic.prompt:,}, answers of {traffic.output:,}, TTFT "
            f"{show(targets.ttft_s, Unit.SECONDS)}, ITL {show(targets.itl_s, Unit.SECONDS)}; all requests alike: with "
            "a spread of lengths both need slack, which a simulation tells",
            "prompts queue as in M/D/1, so that the mean first token is in time",
        ),
    )


def _rates(case: Case, split: Split) -> list[Value]:
    """Requests a second that a replica bears in each role, and in the best pool."""
    output = case.amounts["output"]
    prefills, decodes = split.best
    together, decode = (
        solve(
            name,
            f"{label}, batch {role.batch}",
            Unit.REQUESTS_PER_S,
            "batch / (output * step)" if role.batch else "0",
            batch=Amount(role.batch, Unit.COUNT),
            output=output,
            step=Amount(role.step_s, Unit.SECONDS),
        )
        for name, label, role in (
            ("together", "together", split.together),
            ("decode", "a decode replica", split.decode),
        )
    )
    prefill = solve(
        "prefill",
        "a prefill replica",
        Unit.REQUESTS_PER_S,
        "load / prefill",
        load=Amount(split.prefill.load, Unit.COUNT),
        prefill=Amount(split.prefill.step_s, Unit.SECONDS),
    )
    apart = solve(
        "apart",
        f"apart, {prefills}P{decodes}D, for each replica",
        Unit.REQUESTS_PER_S,
        "min(x * prefill, y * decode) / (x + y)",
        x=Amount(prefills, Unit.COUNT),
        y=Amount(decodes, Unit.COUNT),
        prefill=prefill,
        decode=decode,
    )
    return [together, prefill, decode, apart]


def _link(case: Case, split: Split) -> list[Value]:
    """The bandwidth that KV needs, and the time it takes on the network there is."""
    nbytes = Amount(case.kv_per_sequence(case.traffic.prompt), Unit.BINARY)
    return [
        solve(
            "link_needed",
            "link that keeps up with a prefill replica",
            Unit.BYTES_PER_S,
            "kv_bytes / prefill",
            kv_bytes=nbytes,
            prefill=Amount(split.prefill.step_s, Unit.SECONDS),
        ),
        solve(
            "transfer_s",
            "a prompt's KV between nodes",
            Unit.SECONDS,
            "kv_bytes / (network * chips)",
            kv_bytes=nbytes,
            network=Amount(case.deployment.network_gbs * 1e9, Unit.BYTES_PER_S),
            chips=case.amounts["chips"],
        ),
    ]


def _headline(split: Split) -> str:
    prefills, decodes = split.best
    apart, together = split.apart(prefills, decodes), split.together.rate
    if not together and not apart:
        return "Neither keeps these promises: a prompt or a decode step alone takes longer than they allow."
    ratio = f"{prefills}P{decodes}D"
    if not together:
        return f"Yes: together these promises cannot be kept; apart ({ratio}) a replica bears {digits(apart, 3)}/s."
    told = f"{digits(apart, 3)} requests/s for each replica apart ({ratio}), {digits(together, 3)} together"
    if not apart:
        return f"No: apart these promises cannot be kept; together a replica bears {digits(together, 3)}/s."
    if apart / together >= RELIEF:
        return f"Yes: {told}, {show(apart / together, Unit.FACTOR)}."
    return f"No: {told}." if apart * RELIEF < together else f"It makes no difference that could be told: {told}."


def _binds_together(split: Split, fits: int) -> str:
    if not split.together.batch:
        return "the shortest shared step, or the wait for it, is too long"
    if split.together.batch >= fits:
        return "memory for KV"
    return "the ITL target"


def _ratios(split: Split) -> Table:
    prefills, decodes = split.best
    rows: list[tuple[Cell, ...]] = []
    for x, y in sorted(
        {(1, 3), (1, 2), (1, 1), (2, 1), (3, 1), (prefills, decodes)}, key=lambda pair: pair[0] / pair[1]
    ):
        slower = "decode" if x * split.prefill.rate > y * split.decode.rate else "prefill"
        rows.append((f"{x}P{y}D", split.apart(x, y), slower))
    rows.append(("together", split.together.rate, ""))
    columns = (
        Column("pools", "pools"),
        Column("per_replica", "for each replica", Unit.REQUESTS_PER_S),
        Column("binds", "the slower pool"),
    )
    return Table("ratios", columns, tuple(rows))


def _links(case: Case, split: Split) -> Table:
    chips, nbytes, prefill_s = case.chips, case.kv_per_sequence(case.traffic.prompt), split.prefill.step_s
    links = (
        ("in the node", chips * case.chip.link_gbs * 1e9),
        ("over PCIe", chips * case.chip.pcie_gbs * 1e9),
        ("between nodes", chips * case.deployment.network_gbs * 1e9),
        ("100 Gbit/s for all", 12.5e9),
        ("25 Gbit/s for all", 3.125e9),
    )
    rows: list[tuple[Cell, ...]] = []
    for name, rate in links:
        if rate:
            seconds = nbytes / rate
            rows.append((name, rate, seconds, seconds / prefill_s, "yes" if seconds <= prefill_s else "no"))
    columns = (
        Column("link", "link"),
        Column("bytes_per_s", "bandwidth", Unit.BYTES_PER_S),
        Column("transfer_s", "a prompt's KV", Unit.SECONDS),
        Column("share", "of its prefill", Unit.SHARE),
        Column("hidden", "keeps up"),
    )
    return Table("links", columns, tuple(rows))
