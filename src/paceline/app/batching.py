"""`paceline batch`, put together: a file of requests, the engine process, and the answers on disk."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.app.build import FACTORY, plan_engine
from paceline.app.serving import serve_settings
from paceline.app.settings import AuthSettings, Settings
from paceline.app.stages import StagePrinter, progress_on_stderr
from paceline.engine.client import EngineClient, EngineLaunch
from paceline.errors import BadRequest, ConfigError, PacelineError
from paceline.serve.batch.crew import Crew, Run
from paceline.serve.batch.ledger import Ledger
from paceline.serve.batch.lines import BadLine, LineFile
from paceline.serve.batch.runner import ENDPOINTS, Outcome, Runner
from paceline.serve.context import ServerContext
from paceline.serve.engine_port import Engine
from paceline.serve.keys import Caller
from paceline.serve.settings import ServeSettings
from paceline.text.tokenizer import Tokenizer

_SHOWN_BAD_LINES = 20
_REPORT_S = 10.0  # between lines of progress where stderr is no terminal


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """Where requests come from and answers go."""

    requests: Path
    output: Path
    errors: Path

    def check(self) -> None:
        """Raises ConfigError for names that cannot be right."""
        names = (self.requests, self.output, self.errors)
        if len({path.resolve() for path in names}) < len(names):
            raise ConfigError("input, output and errors must be three files")
        for path in (self.output, self.errors):
            if not path.parent.is_dir():
                raise ConfigError(f"there is no folder {path.parent} to write {path.name} into")
            if path.is_dir():
                raise ConfigError(f"{path} is a folder")


def run_batch(settings: Settings, files: BatchFiles, *, resume: bool, concurrency: int | None) -> int:
    """Answer what is not answered yet; 0 when all succeeded, 1 when some failed. Raises PacelineError."""
    files.check()
    http = serve_settings(replace(settings, auth=AuthSettings()))
    with opened(files, http, resume=resume) as (lines, ledger):
        if ledger.completed or ledger.failed:
            _say(f"{files.output}: {ledger.completed + ledger.failed} of {ledger.total} answered already")
        if next(ledger.undone(), None) is not None:
            asyncio.run(_with_engine(settings, http, lines, ledger, concurrency))
        if not ledger.failed:
            _say(f"all {ledger.total} answered: {files.output}")
            return 0
        _say(f"{ledger.failed} of {ledger.total} failed: {files.errors}; the others: {files.output}")
        return 1


@contextmanager
def opened(files: BatchFiles, http: ServeSettings, *, resume: bool) -> Iterator[tuple[LineFile, Ledger]]:
    """The requests, checked, and the ledger as far as it has come. Raises BadRequest naming every line at fault."""
    lines = LineFile(files.requests, ENDPOINTS)
    ledger = Ledger(lines, files.output, files.errors)
    try:
        try:
            refuse_bad(files.requests, lines.scan(max_line_bytes=http.max_body_bytes))
            if not resume:
                for path in (files.output, files.errors):
                    path.unlink(missing_ok=True)
            ledger.open()
        except OSError as error:
            raise BadRequest(f"cannot use {error.filename or files.requests}: {error.strerror or error}") from error
        yield lines, ledger
    finally:
        ledger.close()
        lines.close()


def refuse_bad(path: Path, bad: list[BadLine]) -> None:
    """Raises BadRequest if there is anything in `bad`, which is printed line by line."""
    if not bad:
        return
    for one in bad[:_SHOWN_BAD_LINES]:
        _say(f"{path}, {one}")
    more = f" (and {len(bad) - _SHOWN_BAD_LINES} more like these)" if len(bad) > _SHOWN_BAD_LINES else ""
    raise BadRequest(f"{path} is no batch as it is{more}; nothing was run")


async def _with_engine(
    settings: Settings, http: ServeSettings, lines: LineFile, ledger: Ledger, concurrency: int | None
) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # as Ctrl-C
    with progress_on_stderr(settings.model.model) as progress:
        spec = plan_engine(settings, progress=progress)
    refuse_bad(lines.path, lines.check_models(http.served_names or (spec.name,)))
    _say(f"loading {spec.name}")
    engine = EngineClient(EngineLaunch(FACTORY, spec.to_config()), restart=True, on_stage=StagePrinter())
    async with engine:
        await work_off(engine, http, lines, ledger, concurrency=concurrency or settings.scheduler.max_num_seqs)


async def work_off(
    engine: Engine,
    http: ServeSettings,
    lines: LineFile,
    ledger: Ledger,
    *,
    concurrency: int,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Answer every line without an answer with a started engine. Raises PacelineError; cancelled, it stops at once."""
    context = ServerContext(engine, http, tokenizer)
    model = await context.model()
    if others := ledger.fingerprints - {model.fingerprint}:
        raise BadRequest(
            f"the answers that are there were made by another model ({min(others)}; this one is {model.fingerprint}): "
            "name another output, or begin anew with --no-resume"
        )
    with _progress(ledger) as show:
        run = Run(lines, ledger, Caller(), on_answer=show)
        try:
            async with Crew(Runner(context), concurrency) as crew:
                await crew.work_off(run)
        except OSError as error:
            raise PacelineError(
                f"cannot write the answers: {error.strerror}; the same command goes on later"
            ) from error


@contextmanager
def _progress(ledger: Ledger) -> Iterator[Callable[[Outcome], None]]:
    """A bar on a terminal, a line now and then elsewhere; it hears of every answer."""
    began, tokens_before = time.monotonic(), ledger.completion_tokens

    def facts() -> str:
        speed = (ledger.completion_tokens - tokens_before) / max(time.monotonic() - began, 1e-3)
        return f"{speed:.0f} tokens/s" + (f", {ledger.failed} failed" if ledger.failed else "")

    if not sys.stderr.isatty():
        yield _report_now_and_then(ledger, facts)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=ledger.total, completed=ledger.completed + ledger.failed, facts="")
        yield lambda _: bar.update(task, advance=1, facts=facts())


def _report_now_and_then(ledger: Ledger, facts: Callable[[], str]) -> Callable[[Outcome], None]:
    reported = time.monotonic()

    def report(_: Outcome) -> None:
        nonlocal reported
        if time.monotonic() - reported >= _REPORT_S:
            reported = time.monotonic()
            _say(f"{ledger.completed + ledger.failed} of {ledger.total}, {facts()}")

    return report


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
