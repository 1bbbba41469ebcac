"""Two servers, or two settings of one, under the same load in turns: runs the cells that compare.py plans and judges.

Within a pair everything but the arm is the same: arrivals, lengths, prompts. The cache is stated, not hoped for:
"cold" gives every cell texts that its server has not seen, "primed" sends each cell's prompts once, unmeasured,
before they count.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.errors import ConfigError
from paceline.measure.analysis import analyse
from paceline.measure.compare import Cell, CellResult, Comparison, compare_cells, plan_cells
from paceline.measure.folder import RunFolder, write_atomically
from paceline.measure.plan import Arrivals, BenchPlan
from paceline.measure.records import SelfCheck
from paceline.measure.runner import Extras, OnProgress, run
from paceline.measure.verdict import Outcome

INDEX = "compare.json"
CACHES = ("cold", "primed")
MIN_PAIRS = 6  # fewer cannot reach p < 0.05 in a sign-flip test
PRIMING_CONCURRENCY = 4
ATTEMPTS = 3  # of a cell whose run is INVALID


class DuelIndex(msgspec.Struct, kw_only=True):
    """What compare.json holds: the cells by folder, in the order they ran."""

    cells: list[tuple[Cell, str]]
    cache: str
    smallest_effect: float
    names: tuple[str, str]


def run_duel(
    plans: tuple[BenchPlan, BenchPlan],
    out_dir: Path,
    *,
    pairs: int = MIN_PAIRS,
    aa_pairs: int = 2,
    cache: str = "cold",
    smallest_effect: float = 0.03,
    names: tuple[str, str] = ("A", "B"),
    on_progress: OnProgress | None = None,
    on_cell: Callable[[Cell, RunFolder, Outcome], None] | None = None,
) -> Comparison:
    """All cells, then the verdict. An interrupted cell ends the duel; whole pairs before it are judged."""
    if pairs < 1 or aa_pairs < 0:
        raise ConfigError("a comparison needs at least one pair")
    if cache not in CACHES:
        raise ConfigError(f"the cache is {' or '.join(CACHES)}, not {cache!r}")
    if (out_dir / INDEX).exists():
        raise ConfigError(f"{out_dir} already holds a comparison; choose another folder")
    index = DuelIndex(cells=[], cache=cache, smallest_effect=smallest_effect, names=names)
    cells = _Cells(plans, out_dir, cache, on_progress, on_cell)
    results: list[CellResult] = []
    for cell in plan_cells(pairs, aa_pairs, plans[0].seed):
        measured = cells.measure(cell)
        if measured is None:
            break
        name, result = measured
        results.append(result)
        index.cells.append((cell, name))
        write_atomically(out_dir / INDEX, msgspec.json.encode(index))
    if not results:
        raise ConfigError("the comparison was stopped before one cell was complete")
    return judged(results, index)


class _Cells:
    """Measures cells; one whose run the client spoilt is measured again, a few times."""

    def __init__(
        self,
        plans: tuple[BenchPlan, BenchPlan],
        out_dir: Path,
        cache: str,
        on_progress: OnProgress | None,
        on_cell: Callable[[Cell, RunFolder, Outcome], None] | None,
    ) -> None:
        self._plans, self._out, self._cache = plans, out_dir, cache
        self._on_progress, self._on_cell = on_progress, on_cell
        self._one_server = plans[0].target.url == plans[1].target.url
        self._checked: SelfCheck | None = None

    def measure(self, cell: Cell) -> tuple[str, CellResult] | None:
        """(folder name, result) of a cell; None: it was interrupted."""
        name = cell.name
        for attempt in range(ATTEMPTS):
            name = cell.name if attempt == 0 else f"{cell.name}.again{attempt}"
            plan = cell_plan(self._plans[cell.arm == "B"], cell, self._cache, self._one_server, attempt)
            if self._cache == "primed" and not _prime(plan, self._out / f"{name}.priming", self._on_progress):
                return None
            labels = {"arm": cell.arm, "pair": str(cell.pair), "cell": cell.name, "cache": self._cache}
            extras = Extras(labels=labels, parent=self._out.name, self_check=self._checked)
            folder = run(plan, self._out / name, self._on_progress, extras)
            self._checked = folder.manifest.self_check
            analysis = analyse(folder)
            outcome = analysis.verdict.outcome
            if self._on_cell is not None:
                self._on_cell(cell, folder, outcome)
            if not folder.manifest.complete:
                return None
            if outcome is not Outcome.INVALID:
                break
        return name, CellResult(cell, analysis.run, outcome)


def judged(results: list[CellResult], index: DuelIndex) -> Comparison:
    """The verdict over measured cells."""
    a, b = index.names
    return compare_cells(results, smallest_effect=index.smallest_effect, cache=index.cache, name_a=a, name_b=b)


def cell_plan(plan: BenchPlan, cell: Cell, cache: str, one_server: bool, attempt: int = 0) -> BenchPlan:
    """The plan of one cell. A server that has seen the pair's texts before gets others, when the cache is cold."""
    salt = f"{plan.prompts.salt}:pair{cell.pair}{'aa' if cell.same_arm else ''}"
    if cache == "cold" and (one_server or cell.same_arm):
        salt += f":{cell.position}"
    if cache == "cold" and attempt:
        salt += f":again{attempt}"
    prompts = msgspec.structs.replace(plan.prompts, salt=salt)
    return msgspec.structs.replace(plan, seed=cell.seed, prompts=prompts)


def _prime(plan: BenchPlan, folder: Path, on_progress: OnProgress | None) -> bool:
    """Send the cell's prompts once. False: it was interrupted."""
    load = msgspec.structs.replace(
        plan.load,
        arrivals=Arrivals.CLOSED,
        rate=None,
        ramp_to=None,
        burst_rate=None,
        max_concurrency=None,
        duration_s=None,
        concurrency=max(PRIMING_CONCURRENCY, plan.client.workers),
        requests=plan.load.requests or _expected_requests(plan),
    )
    client = msgspec.structs.replace(plan.client, self_check=False, warmup_requests=0, keep_text=False)
    primed = run(
        msgspec.structs.replace(plan, load=load, client=client), folder, on_progress, Extras(labels={"priming": "yes"})
    )
    return primed.manifest.complete


def _expected_requests(plan: BenchPlan) -> int:
    from paceline.measure.schedule import build_schedule

    return len(build_schedule(plan))


def read_duel(path: Path) -> Comparison:
    """Judge a comparison that is on disk again. Raises ConfigError when it is none."""
    try:
        index = msgspec.json.decode((path / INDEX).read_bytes(), type=DuelIndex)
    except (OSError, msgspec.DecodeError):
        raise ConfigError(f"{path} is no comparison: it has no readable {INDEX}") from None
    results = []
    for cell, name in index.cells:
        analysis = analyse(RunFolder(path / name))
        results.append(CellResult(cell, analysis.run, analysis.verdict.outcome))
    return judged(results, index)
