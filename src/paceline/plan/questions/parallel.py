"""Which way of using more chips: tensor, pipeline or expert parallel, in a node and across nodes?

Tensor parallel shares every weight out and sums up twice a layer: faster tokens, as long as the link keeps up.
Pipeline parallel sends a hidden state on once a stage: no faster token, more throughput and more memory, over any link.
Expert parallel deals whole experts out and sends each token to its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.cost.deployment import Deployment, tp_degrees
from paceline.errors import ConfigError
from paceline.plan.answer import Answer, Cell, Column, Table, Value, solve
from paceline.plan.case import Case
from paceline.plan.formula import Amount
from paceline.plan.search import largest
from paceline.plan.units import Unit, digits, show

SUMS = "reductions * layers * 2 * (degree - 1) / degree * tokens * hidden * 2 / link"
HANDS_ON = "(degree - 1) * tokens * hidden * 2 / link"
DISPATCH = "2 * moe_layers * tokens * top_k * hidden * 2 * (degree - 1) / degree / (degree * link)"
NODES = 2
ACROSS = f"{NODES} nodes"


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of using the chips, and what it gives."""

    name: str
    where: str
    case: Case
    fits: int  # sequences
    step_s: float  # between two tokens of each of the traffic's batch
    prefill_s: float
    batch: int  # sequences with which the ITL target is just kept
    per_chip: float  # tokens/s of each chip with them


def ask(case: Case) -> Answer | None:
    """None where the chip's rate is not known."""
    if not case.roofline.knows_compute:
        return None
    layouts = [layout_of(case, *found) for found in candidates(case)]
    able = [layout for layout in layouts if layout.fits]
    values = tuple(_links(case))
    return Answer(
        name="parallel",
        question="Tensor, pipeline or expert parallel?",
        headline=_headline(case, able),
        values=values,
        binds="the link, twice a layer, for tensor parallel; filling the stages for pipeline parallel",
        tables=(_table(layouts, case),),
        notes=(
            "expected times; a pipeline is filled with as many groups of sequences as it has stages",
            f"the link in the node is {show(case.chip.link_gbs * 1e9, Unit.BYTES_PER_S)}, between nodes "
            f"{show(case.deployment.network_gbs * 1e9, Unit.BYTES_PER_S)}, for each chip and direction",
        ),
    )


def candidates(case: Case) -> Iterator[tuple[str, str, Deployment]]:
    """Name, place and deployment of each layout that divides this model: one chip to two nodes."""
    base, node = case.deployment, case.deployment.chips_per_node
    single = {"tp": 1, "pp": 1, "ep": 1, "dp": 1}
    tried: list[tuple[str, str, dict[str, int]]] = [("one chip", "chip", {})]
    degrees = [degree for degree in tp_degrees(base.model) if 1 < degree <= node]
    doubled = [2**power for power in range(1, 12) if 2**power <= node]
    for degree in sorted({*degrees[:1], *doubled}):
        tried.append((f"TP{degree}", "node", {"tp": degree}))
        tried.append((f"PP{degree}", "node", {"pp": degree}))
        if base.model.experts is not None:
            tried.append((f"TP{degree} EP{degree}", "node", {"tp": degree, "ep": degree}))
            tried.append((f"DP{degree} EP{degree}", "node", {"dp": degree, "ep": degree}))
    if node > 1:
        tried.append((f"TP{NODES * node}", ACROSS, {"tp": NODES * node}))
        tried.append((f"TP{node} PP{NODES}", ACROSS, {"tp": node, "pp": NODES}))
        if base.model.experts is not None:
            both = NODES * node
            tried.append((f"DP{both} EP{both}", ACROSS, {"dp": both, "ep": both}))
    for name, where, degrees_of in tried:
        try:
            yield name, where, replace(base, **{**single, **degrees_of, "uneven_stages": True})  # type: ignore[arg-type]
        except ConfigError:  # a degree that does not divide is no candidate
            continue


def layout_of(case: Case, name: str, where: str, deployment: Deployment) -> Layout:
    """What a layout gives."""
    one = replace(case, deployment=deployment, weights_bytes=None, measured=None)
    fits = one.sequences_that_fit(case.traffic.context)
    batch = largest(lambda count: step_of(one, count) <= case.targets.itl_s, fits)
    return Layout(
        name=name,
        where=where,
        case=one,
        fits=fits,
        step_s=step_of(one, case.traffic.batch),
        prefill_s=one.prompt_s(case.traffic.prompt),
        batch=batch,
        per_chip=batch / step_of(one, batch) / deployment.chips if batch else 0.0,
    )


def step_of(case: Case, batch: int) -> float:
    """Seconds between two tokens of each of `batch` sequences, in as many groups as the pipeline has stages."""
    return case.step_s(-(-batch // case.deployment.pp))


def _headline(case: Case, able: list[Layout]) -> str:
    if not able:
        return "None of the layouts up to two nodes holds a sequence; see what would under `fit`."
    fast = min(able, key=lambda layout: (layout.step_s, layout.case.chips))
    told = (
        f"Fastest tokens: {fast.name} ({fast.where}), {show(fast.step_s, Unit.SECONDS)} a step for "
        f"{case.traffic.batch} sequences"
    )
    kept = [layout for layout in able if layout.batch]
    if not kept:
        return f"{told}; none keeps {show(case.targets.itl_s, Unit.SECONDS)} a token."
    best = max(kept, key=lambda layout: (round(layout.per_chip, 6), -layout.case.chips))
    return (
        f"{told}. Most for each chip within {show(case.targets.itl_s, Unit.SECONDS)} a token: {best.name} "
        f"({best.where}), {digits(best.per_chip, 3)} tokens/s a chip.{_across(able)}"
    )


def _across(able: list[Layout]) -> str:
    """Of the layouts over nodes, which is the fastest, and what the next one takes."""
    found = sorted((one for one in able if one.where == ACROSS), key=lambda one: one.step_s)
    if len(found) < 2:
        return ""
    first, second = found[:2]
    return (
        f" Across nodes {first.name} is ahead of {second.name}: {show(first.step_s, Unit.SECONDS)} against "
        f"{show(second.step_s, Unit.SECONDS)} a step."
    )


def _links(case: Case) -> Iterator[Value]:
    """What each way sends in a decode step of the traffic's batch, on the links' datasheet rates alone."""
    model, node = case.model, case.deployment.chips_per_node
    put_in = {
        "reductions": Amount(1 if model.parallel else 2, Unit.COUNT),
        "layers": Amount(model.layers, Unit.COUNT),
        "moe_layers": Amount(model.moe_layers, Unit.COUNT),
        "top_k": Amount(model.experts.active if model.experts else 0, Unit.COUNT),
        "hidden": Amount(model.hidden, Unit.COUNT),
        "tokens": Amount(case.traffic.batch, Unit.COUNT),
    }
    places = [("in the node", "node", case.chip.link_gbs, node)] if node > 1 and case.chip.link_gbs else []
    places.append(("between nodes", "network", case.deployment.network_gbs, max(2, NODES * node)))
    for where, key, gbs, degree in places:
        given = {**put_in, "degree": Amount(degree, Unit.COUNT), "link": Amount(gbs * 1e9, Unit.BYTES_PER_S)}
        yield solve(f"tp_{key}_s", f"TP{degree}, {where}: sums", Unit.SECONDS, SUMS, **given)
        given["degree"] = Amount(2, Unit.COUNT)
        yield solve(f"pp_{key}_s", f"PP2, {where}: hidden states", Unit.SECONDS, HANDS_ON, **given)
        if model.experts is not None:
            given["degree"] = Amount(degree, Unit.COUNT)
            yield solve(f"ep_{key}_s", f"EP{degree}, {where}: tokens to experts", Unit.SECONDS, DISPATCH, **given)


def _table(layouts: list[Layout], case: Case) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for one in layouts:
        holds = bool(one.fits)
        rows.append(
            (
                one.name,
                one.where,
                one.case.chips,
                one.fits,
                one.step_s if holds else None,
                one.prefill_s if holds else None,
                one.batch if holds else None,
                one.per_chip if holds else None,
            )
        )
    columns = (
        Column("layout", "layout"),
        Column("where", "in"),
        Column("chips", "chips"),
        Column("fit", "sequences that fit"),
        Column("step_s", f"step of {case.traffic.batch}", Unit.SECONDS),
        Column("prefill_s", f"prompt of {case.traffic.prompt:,}", Unit.SECONDS),
        Column("batch", "in the ITL target"),
        Column("per_chip", "a chip then gives", Unit.TOKENS_PER_S),
    )
    return Table("layouts", columns, tuple(rows))
