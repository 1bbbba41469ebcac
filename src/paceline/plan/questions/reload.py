"""When does reading a cached prefix back beat computing it again, by the tier it lies in?"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.answer import Answer, Cell, Chart, Column, Line, Table, solve
from paceline.plan.case import Case
from paceline.plan.formula import Amount, Formula
from paceline.plan.search import largest
from paceline.plan.units import Unit, show

RELOAD = "latency + kv_bytes / tier_bandwidth"
_reload = Formula(RELOAD)
LENGTHS: tuple[int, ...] = tuple(2**power for power in range(4, 18))


@dataclass(frozen=True, slots=True)
class Tier:
    """A place for KV blocks outside the chip's memory, as one replica sees it."""

    name: str
    bytes_per_s: float
    latency_s: float


def tiers_of(case: Case) -> tuple[Tier, ...]:
    """Datasheet rates. Each chip has its own PCIe and network link; a node's SSD and a store are shared by all."""
    links = case.chips
    found = []
    if case.chip.pcie_gbs:
        found.append(Tier("host memory", links * case.chip.pcie_gbs * 1e9, 20e-6))
    found.append(Tier("another node's memory", links * case.deployment.network_gbs * 1e9, 50e-6))
    found.append(Tier("local SSD", 7e9, 200e-6))  # one NVMe drive, PCIe 4.0 x4
    found.append(Tier("object store", 1.25e9, 30e-3))  # 10 Gbit/s and a request
    return tuple(found)


def ask(case: Case) -> Answer | None:
    """None where the chip's rate is not known."""
    if not case.roofline.knows_compute:
        return None
    prompt = case.traffic.prompt
    needed = solve(
        "break_even_bandwidth",
        "bandwidth from which reloading wins, ideal",
        Unit.BYTES_PER_S,
        "kv_per_token * peak / (2 * active)",
        **case.amounts,
    )
    compute = case.prompt_s(prompt)
    real = solve(
        "break_even_bandwidth_expected",
        f"the same, expected, for {prompt:,} tokens",
        Unit.BYTES_PER_S,
        "kv_bytes / prefill",
        kv_bytes=Amount(case.kv_per_sequence(prompt), Unit.BINARY),
        prefill=Amount(compute, Unit.SECONDS),
    )
    tiers = tiers_of(case)
    faster = [tier.name for tier in tiers if reload_s(case, tier, prompt) < compute]
    headline = (
        f"A prefix of {prompt:,} tokens is {show(case.kv_per_sequence(prompt), Unit.BINARY)} and takes "
        f"{show(compute, Unit.SECONDS)} to compute: reloading wins from {show(real.value, Unit.BYTES_PER_S)} on"
    )
    return Answer(
        name="reload",
        question="When does reloading a cached prefix beat computing it again?",
        headline=f"{headline}, so from {', '.join(faster)}." if faster else f"{headline}, which no tier here has.",
        values=(needed, real),
        binds="the tier's bandwidth, and its latency for short prefixes",
        tables=(_table(case, tiers, compute),),
        charts=(_chart(case, tiers),),
        notes=("the chip computes for others meanwhile: a reload that takes as long still frees it",),
    )


def reload_s(case: Case, tier: Tier, tokens: int) -> float:
    return _reload(latency=tier.latency_s, kv_bytes=case.kv_per_sequence(tokens), tier_bandwidth=tier.bytes_per_s)


def wins_from(case: Case, tier: Tier) -> int | None:
    """The least prefix from which on reloading is faster, up to the longest length looked at; None: at none."""
    losing = [n for n in LENGTHS if reload_s(case, tier, n) >= case.prompt_s(n)]
    if not losing:
        return LENGTHS[0]
    low, high = losing[-1], 2 * losing[-1]
    if high > LENGTHS[-1]:
        return None
    return low + 1 + largest(lambda more: reload_s(case, tier, low + more) >= case.prompt_s(low + more), high - low)


def _table(case: Case, tiers: tuple[Tier, ...], compute_s: float) -> Table:
    prompt = case.traffic.prompt
    rows: list[tuple[Cell, ...]] = []
    for tier in tiers:
        seconds = reload_s(case, tier, prompt)
        first = wins_from(case, tier)
        rows.append(
            (
                tier.name,
                tier.bytes_per_s,
                tier.latency_s,
                seconds,
                compute_s / seconds,
                first if first is not None else "never",
            )
        )
    columns = (
        Column("tier", "tier"),
        Column("bytes_per_s", "bandwidth", Unit.BYTES_PER_S),
        Column("latency_s", "latency", Unit.SECONDS),
        Column("reload_s", f"reload {prompt:,} tokens", Unit.SECONDS),
        Column("gain", "against computing", Unit.FACTOR),
        Column("from_tokens", "wins from", Unit.TOKENS),
    )
    return Table("tiers", columns, tuple(rows), Formula(RELOAD), {"kv_bytes": real_bytes(case)})


def real_bytes(case: Case) -> Amount:
    return Amount(case.kv_per_sequence(case.traffic.prompt), Unit.BINARY)


def _chart(case: Case, tiers: tuple[Tier, ...]) -> Chart:
    lines = [Line("compute it again", tuple((n, case.prompt_s(n)) for n in LENGTHS), "s1")]
    for at, tier in enumerate(tiers):
        points = tuple((float(n), reload_s(case, tier, n)) for n in LENGTHS)
        lines.append(Line(tier.name, points, f"s{2 + at} dash"))
    return Chart(
        caption="Reload or recompute",
        reading="A tier pays where its line is below that of computing.",
        x_label="tokens of the prefix",
        y_label="time",
        lines=tuple(lines),
        y_unit=Unit.SECONDS,
    )
