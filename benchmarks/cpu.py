"""Paceline on a CPU beside llama.cpp, OpenVINO GenAI, transformers and vLLM: same weights, same machine, same run.

    python benchmarks/cpu.py --setup-peers                  # once: each peer into an environment of its own
    python benchmarks/cpu.py [--parts PART,...] [--peers NAME,...] [--repeats N] [--out DIR] [--json FILE]
    python benchmarks/cpu.py --quick                        # the machine's limits and Paceline alone, under a minute

limits    memory read and the best matrix multiplications that torch, MKL, FBGEMM and our kernels reach
single    decode of one stream in process, by precision, and its fraction of the memory limit
prefill   a prompt of 512 tokens in process, and its fraction of the matrix multiplication's limit
scaling   what a step costs with 1 to 64 streams, against the roofline of bytes and operations
served    total output through HTTP with 1 to 64 streams, 100 tokens in and 128 out
mixed     eight steady streams and a prompt of 2,000 tokens every 10 s: gaps, and times to first token
shapes    single, prefill and served with random weights in the shapes of Qwen2.5-0.5B and Llama-3.2-1B
memory    most that is resident beyond the imports, over weights and KV
start     a server's second start, to the first token of an answer

Systems take turns within a repeat, so that a machine that drifts drifts for all. Before each measurement the benchmark
waits until the machine is quiet. Results go to --out one by one, and what is there is not measured again: the same
command takes up an interrupted run. A table of targets, reached or missed, ends it. docs/cpu.md defines every number.

--smoke goes through every part with sizes that prove nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from _common import Report, arguments
from _cpu import figures, inprocess, served, starts, targets
from _cpu.bench import FULL, SMOKE, Bench, limits_now
from _cpu.models import RANDOM
from _cpu.peers import NAMES, Peers
from _cpu.weights import Files
from _server import default_model
from _state import State

PARTS = ("limits", "single", "prefill", "scaling", "served", "mixed", "shapes", "memory", "start")
PEERS_HELP = 'all by default; "": Paceline alone'
# Minutes of a part's repeat with all peers, on two AVX2 cores.
MINUTES = {
    "limits": 0.2,
    "single": 3,
    "prefill": 2,
    "scaling": 4,
    "served": 15,
    "mixed": 8,
    "shapes": 22,
    "memory": 3,
    "start": 3,
}
QUICK = dataclasses.replace(FULL, decode_out=33, samples=1)
INTERRUPTED = 130


def main() -> int:
    """The command."""
    args = arguments(__doc__, _add)
    cache = default_model().parent.parent
    peers = Peers(args.peers_dir or cache / "peers")
    if args.setup_peers:
        return peers.set_up([name for name in NAMES if name in args.peers])
    if not args.model.exists():
        print(f"cpu: skipped, {args.model} is not there; run `paceline pull smollm2-135m` first")
        return 0
    report = Report("cpu", args)
    bench = Bench(
        state=State(args.out / "smoke" if args.smoke else args.out),
        size=SMOKE if args.smoke else QUICK if args.quick else FULL,
        report=report,
        files=Files(args.model, cache / "cpu_benchmark"),
        peers=peers,
        threads=args.threads,
        repeats=1 if args.quick or args.smoke else args.repeats,
        names=("paceline", *args.peers),
        patience_s=min(args.patience, 3.0) if args.quick else args.patience,
    )
    report.note("threads", bench.threads)
    if args.smoke:
        report.note("smoke", "these sizes prove nothing but that every part works")
    if args.quick:
        _quick(bench)
        code = 0
    else:
        code = _carry_out(bench, args.parts, args.figures)
    report.finish()
    return code


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", type=_names(PARTS), default=PARTS, metavar="PART,...", help="all by default")
    parser.add_argument("--peers", type=_names(NAMES), default=NAMES, metavar="NAME,...", help=PEERS_HELP)
    parser.add_argument("--repeats", type=int, default=3, help="of every measurement (3)")
    parser.add_argument("--out", type=Path, default=Path("results/cpu"), help="where results are kept")
    parser.add_argument("--figures", type=Path, help="where figures go; beside the results by default")
    parser.add_argument("--model", type=Path, default=default_model(), help="the default model's Q4_1 file")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="of every system; the cores by default"
    )
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for a quiet machine (60)")
    parser.add_argument("--peers-dir", type=Path, help="where peers are installed; in the cache by default")
    parser.add_argument("--setup-peers", action="store_true", help="install the peers, and nothing else")
    parser.add_argument("--smoke", action="store_true", help="every part in small, to see that it works")


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        found = tuple(name for name in text.split(",") if name)
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return found

    return parse


def _carry_out(bench: Bench, parts: tuple[str, ...], folder: Path | None) -> int:
    """Measure what is missing, then tell what is there: also on Ctrl-C. The exit code."""
    minutes = bench.repeats * sum(MINUTES[part] for part in parts if part in MINUTES)
    if bench.size is FULL:
        bench.report.note("time, on two AVX2 cores with all peers", f"about {minutes:.0f} min, less what is there")
    code = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers must not outlive us
    try:
        for part in parts:
            print(f"  {part}", file=sys.stderr, flush=True)
            bench.absent.clear()  # what broke down in one part may do in another
            MEASURE[part](bench)
    except KeyboardInterrupt:
        bench.report.note("interrupted", "the same command goes on from here")
        code = INTERRUPTED
    finally:
        bench.close()
    for part in parts:
        TELL[part](bench)
    written = figures.write(bench, folder or bench.state.folder)
    bench.report.note("written", [str(path) for path in written])
    targets.tell(bench)
    return code


def _quick(bench: Bench) -> None:
    """Limits, one stream and prefill of Paceline alone; nothing is kept."""
    limits_now(bench.threads, bench.report, quick=True)
    with tempfile.TemporaryDirectory() as folder:
        bench.state = State(Path(folder))
        bench.names = ("paceline",)
        try:
            for part in ("single", "prefill"):
                MEASURE[part](bench)
        finally:
            bench.close()
        for part in ("single", "prefill"):
            TELL[part](bench)


def _limits(bench: Bench) -> None:
    for repeat in range(bench.repeats):
        bench.limits("alone", repeat)


def _tell_limits(bench: Bench) -> None:
    rows = inprocess.all_limits(bench, "alone")
    for name, unit in (("read", "GB/s"), ("flops", "GFLOP/s"), ("int8", "GOP/s")):
        if rows:
            bench.report.add(f"limit: {name}", [getattr(row, name) / 1e9 for row in rows], unit)


def _shapes(bench: Bench) -> None:
    for shape in RANDOM:
        inprocess.measure_single(bench, shape)
        inprocess.measure_prefill(bench, shape)
        bench.close()  # servers need the memory
        bench.absent.clear()
        served.measure_served(bench, shape)
        bench.close()


def _tell_shapes(bench: Bench) -> None:
    for shape in RANDOM:
        inprocess.tell_single(bench, shape)
        inprocess.tell_prefill(bench, shape)
        served.tell_served(bench, shape)


MEASURE: dict[str, Callable[[Bench], None]] = {
    "limits": _limits,
    "single": inprocess.measure_single,
    "prefill": inprocess.measure_prefill,
    "scaling": inprocess.measure_scaling,
    "served": served.measure_served,
    "mixed": served.measure_mixed,
    "shapes": _shapes,
    "memory": starts.measure_memory,
    "start": starts.measure_start,
}
TELL: dict[str, Callable[[Bench], None]] = {
    "limits": _tell_limits,
    "single": inprocess.tell_single,
    "prefill": inprocess.tell_prefill,
    "scaling": inprocess.tell_scaling,
    "served": served.tell_served,
    "mixed": served.tell_mixed,
    "shapes": _tell_shapes,
    "memory": starts.tell_memory,
    "start": starts.tell_start,
}


if __name__ == "__main__":
    sys.exit(main())
