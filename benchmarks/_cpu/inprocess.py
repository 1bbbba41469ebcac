"""In process: decode of one stream, prefill, and what a step costs from one to 64 streams.

The key of a result is `PART SYSTEM REPEAT`; parts of the large models carry their name.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from _cpu.bench import Bench, decode_rate, prompts
from _cpu.limits import Limits
from _cpu.models import DEFAULT, Shape
from _cpu.systems import LARGE, SCALING, SYSTEMS, Room, System

WARM_UP = 4  # tokens that are not counted, before each measurement


def measure_single(bench: Bench, shape: Shape = DEFAULT) -> None:
    """One stream: tokens a second from the first token to the last."""
    size = bench.size
    new = size.decode_out if shape is DEFAULT else size.large_out

    def work(system: System, repeat: int) -> dict[str, Any]:
        worker = bench.worker(system, shape, _room(bench))
        worker.run(prompts("warm", 1, size.decode_in), WARM_UP)
        busy, rates = bench.quiet(), []
        tokens: list[int] = []
        for sample in range(size.samples):
            found = worker.run(prompts(f"single {repeat} {sample}", 1, size.decode_in), new)
            rates.append(decode_rate(found["times"]))
            tokens = tokens or found["tokens"][:16]
        return {"tokens_per_s": rates, "busy": busy, "tokens": tokens, "facts": worker.loaded["facts"]}

    _alone(bench, "single", shape, work)


def measure_prefill(bench: Bench, shape: Shape = DEFAULT) -> None:
    """One prompt: seconds to its first token."""
    length = bench.size.prefill

    def work(system: System, repeat: int) -> dict[str, Any]:
        worker = bench.worker(system, shape, _room(bench))
        worker.run(prompts("warm", 1, length), 1)
        busy, seconds = bench.quiet(), []
        for sample in range(bench.size.samples):
            found = worker.run(prompts(f"prefill {repeat} {sample}", 1, length), 1)
            seconds.append(found["times"][0][0])
        return {"seconds": seconds, "busy": busy}

    _alone(bench, "prefill", shape, work)


def _room(bench: Bench) -> Room:
    """One for both, so that a worker is loaded once."""
    return Room(1, max(bench.size.prefill, bench.size.decode_in + bench.size.decode_out) + 32)


def _alone(bench: Bench, part: str, shape: Shape, work: Callable[[System, int], dict[str, Any]]) -> None:
    names = tuple(SYSTEMS) if shape is DEFAULT else LARGE
    bench.each(part_of(part, shape), names, work, limits=True)


def measure_scaling(bench: Bench) -> None:
    """Streams in lockstep: as many decodes in a step as there are streams."""
    size = bench.size
    room = Room(max(size.scaling), size.scaling_in + size.scaling_out + 16)

    def work(system: System, repeat: int) -> dict[str, Any]:
        worker = bench.worker(system, DEFAULT, room)
        worker.run(prompts("warm", 2, size.scaling_in), WARM_UP)
        busy, steps = bench.quiet(), {}
        for streams in size.scaling:
            batch = prompts(f"scaling {repeat} {streams}", streams, size.scaling_in)
            steps[str(streams)] = streams / decode_rate(worker.run(batch, size.scaling_out)["times"])
        return {"step_s": steps, "busy": busy}

    bench.each("scaling", SCALING, work, limits=True)


def part_of(part: str, shape: Shape) -> str:
    """A part's name for a model."""
    return part if shape is DEFAULT else f"{part} of {shape.name}"


def tell_single(bench: Bench, shape: Shape = DEFAULT) -> None:
    """Rates, and their fraction of the limits measured in the same repeat."""
    for system in SYSTEMS.values():
        if rates := single_rates(bench, shape, system.name):
            bench.report.add(f"{part_of('single', shape)}: {system.name}", rates, "tokens/s")
            bench.report.add("  of the memory limit", fractions_of_memory(bench, shape, system), "x")
    if shape is DEFAULT:
        _tell_tokens(bench)


def tell_prefill(bench: Bench, shape: Shape = DEFAULT) -> None:
    """Rates, and their fraction of the limits measured in the same repeat."""
    for system in SYSTEMS.values():
        if seconds := prefill_seconds(bench, shape, system.name):
            rates = [bench.size.prefill / one for one in seconds]
            bench.report.add(f"{part_of('prefill', shape)}: {system.name}", rates, "tokens/s")
            bench.report.add(f"  of the {system.limit} limit", fractions_of_products(bench, shape, system), "x")


def _tell_tokens(bench: Bench) -> None:
    """How many of the first greedy tokens are transformers': whether all compute the same model."""
    reference = bench.values("single", "transformers float32")
    if not reference:
        return
    for system in SYSTEMS:
        found = bench.values("single", system)
        if found and system != "transformers float32":
            pairs = list(zip(found[0]["tokens"], reference[0]["tokens"], strict=False))
            same = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
            bench.report.note(f"first tokens as transformers', {system}", f"{same} of {len(pairs)}")


def tell_scaling(bench: Bench) -> None:
    """Milliseconds a step, and over the least that the machine's limits allow."""
    for name, steps in step_costs(bench).items():
        for streams, seconds in steps.items():
            bench.report.add(f"scaling: {name}, {streams} streams", [1e3 * s for s in seconds], "ms/step")
            least = roofline_s(bench, SYSTEMS[name], streams)
            bench.report.add("  over the roofline", [s / least for s in seconds], "x")


# What others make figures and verdicts of


def single_rates(bench: Bench, shape: Shape, name: str) -> list[float]:
    """Tokens a second of one stream, all samples of all repeats."""
    return [rate for found in bench.values(part_of("single", shape), name) for rate in found["tokens_per_s"]]


def prefill_seconds(bench: Bench, shape: Shape, name: str) -> list[float]:
    """Of a prompt, all samples of all repeats."""
    return [one for found in bench.values(part_of("prefill", shape), name) for one in found["seconds"]]


def fractions_of_memory(bench: Bench, shape: Shape, system: System) -> list[float]:
    """Of the rate at which weights alone could be read; keys and values are not counted."""
    limits = all_limits(bench, part_of("single", shape))
    found = bench.values(part_of("single", shape), system.name)
    least = shape.weight_bytes(system.precision)
    return [rate * least / lim.read for one, lim in zip(found, limits, strict=False) for rate in one["tokens_per_s"]]


def fractions_of_products(bench: Bench, shape: Shape, system: System) -> list[float]:
    """Of the rate of the best matrix multiplication in that kind of number."""
    limits = all_limits(bench, part_of("prefill", shape))
    found = bench.values(part_of("prefill", shape), system.name)
    operations = shape.prefill_operations(bench.size.prefill)
    return [
        operations / seconds / lim.of(system.limit)
        for one, lim in zip(found, limits, strict=False)
        for seconds in one["seconds"]
    ]


def all_limits(bench: Bench, part: str) -> list[Limits]:
    """Those of each repeat."""
    return [Limits(**found) for found in bench.values("limits", part)]


def step_costs(bench: Bench) -> dict[str, dict[int, list[float]]]:
    """Seconds a step of each system, by streams."""
    found: dict[str, dict[int, list[float]]] = {}
    for name in SCALING:
        for one in bench.values("scaling", name):
            for streams, seconds in one["step_s"].items():
                found.setdefault(name, {}).setdefault(int(streams), []).append(seconds)
    return found


def roofline_s(bench: Bench, system: System, streams: int) -> float:
    """The least that a step of so many decodes can take: its bytes, or its operations, whichever is longer."""
    limits = all_limits(bench, "scaling")
    context = bench.size.scaling_in + bench.size.scaling_out // 2
    bytes_ = DEFAULT.weight_bytes(system.precision) + DEFAULT.kv_bytes(streams * context)
    operations = DEFAULT.decode_operations(streams, context)
    read = statistics.median(one.read for one in limits)
    return max(bytes_ / read, operations / statistics.median(one.of(system.limit) for one in limits))


def growth(steps: dict[int, list[float]], few: int, many: int) -> Sequence[float]:
    """How much more a step of many costs than one of few, in each repeat."""
    return [b / a for a, b in zip(steps[few], steps[many], strict=True)]
