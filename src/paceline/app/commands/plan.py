"""`paceline plan`: what a model does on a chip, with the formula and the numbers put in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.app.planning import PlanOptions, case_of, catalogue
from paceline.errors import ConfigError
from paceline.measure.options import a_path, takes

if TYPE_CHECKING:
    from paceline.plan.answer import Answer
    from paceline.plan.case import Case


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)


@takes(PlanOptions, "options")
def plan(
    options: PlanOptions,
    questions: Annotated[
        list[str] | None,
        typer.Argument(metavar="[QUESTION]...", show_default=False, help="Answer these alone; --list names them."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, in base units.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Write a page with figures (.html), or the figures into a folder.",
            parser=a_path,
            metavar="PATH",
        ),
    ] = None,
    tables: Annotated[
        bool | None, typer.Option("--tables/--no-tables", help="Print tables too; by default of named questions.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Print the questions, chips and models there are.")] = False,
) -> None:
    """Size a deployment: does it fit, how fast, what binds, what it costs; each with its formula.

    The ideal is the datasheet's; beside it stands what the cost model expects of real kernels, and its range.

    paceline plan --model llama-3-8b --chip l40s

    paceline plan decode budget -m qwen3-32b -c h100 --tp 2 --weights fp8 --itl 30ms

    paceline plan -m deepseek-v3 -c b200 --tp 8 --ep 8 --price 6 --out plan.html
    """
    if listing:
        _print_catalogue(as_json)
        return
    from paceline.plan.registry import answer

    case = case_of(options)
    answers = answer(case, questions or ())
    if out is not None:
        for path in write(out, case, answers):
            typer.echo(str(path), err=as_json)
    if as_json:
        from paceline.plan.data import report

        typer.echo(json.dumps(report(case, answers), indent=2, allow_nan=False))
    elif out is None:
        from rich.console import Console

        from paceline.plan.text import print_answers

        print_answers(Console(highlight=False), case, answers, tables=bool(questions) if tables is None else tables)


def write(out: Path, case: Case, answers: list[Answer]) -> list[Path]:
    """A page where `out` ends in .html, else each figure as an SVG into a folder. ConfigError: it cannot be written."""
    from paceline.plan.page import render, standalone

    if out.suffix in (".html", ".htm"):
        contents = {out: render(case, answers)}
    elif out.suffix:
        raise ConfigError(f"--out is {out}; it must end in .html, or be a folder for figures")
    else:
        contents = {
            out / f"{one.name}{f'-{number}' if number else ''}.svg": standalone(chart)
            for one in answers
            for number, chart in enumerate(one.charts)
        }
        if not contents:
            raise ConfigError("these questions have no figure; --json or a page (--out plan.html) hold their answers")
    try:
        for path, text in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or out}: {error.strerror or error}") from error
    return list(contents)


def _print_catalogue(as_json: bool) -> None:
    from paceline.plan.registry import QUESTIONS, question_of

    chips, models = catalogue()
    about = {name: question_of(name) for name in QUESTIONS}
    if as_json:
        typer.echo(json.dumps({"questions": about, "chips": list(chips), "models": list(models)}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    grid = Table("question", "", box=None, pad_edge=False)
    for name, text in about.items():
        grid.add_row(name, text)
    console.print(grid)
    grid = Table("chip", "memory", "GB/s", "TFLOP/s", box=None, pad_edge=False)
    for name, chip in chips.items():
        rates = ", ".join(f"{dtype} {rate:g}" for dtype, rate in chip.tflops.items()) or "not published"
        grid.add_row(name, f"{chip.memory_gb:g} GB", f"{chip.bandwidth_gbs:g}", rates)
    console.print()
    console.print(grid)
    grid = Table("model", "parameters", "active", "layers", box=None, pad_edge=False)
    for name, model in models.items():
        active = f"{model.active_params / 1e9:.3g}e9" if model.experts else ""
        grid.add_row(name, f"{model.params / 1e9:.3g}e9", active, str(model.layers))
    console.print()
    console.print(grid)
