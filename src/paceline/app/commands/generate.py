"""`paceline generate`: answers to one prompt or many, computed in this process."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.app.config import Resolved
from paceline.app.options import with_settings
from paceline.app.stages import StagePrinter, progress_on_stderr
from paceline.errors import BadRequest, EngineError

if TYPE_CHECKING:
    from paceline.app.llm import LLM, Delta

INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    app.command("generate")(generate)


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, or one conversation, with what the caller calls it."""

    content: str | list[dict[str, Any]]
    id: str | None = None


@with_settings("model", "scheduler", "kv")
def generate(
    resolved: Resolved,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; standard input if neither this nor --file.")] = None,
    file: Annotated[
        str | None,
        typer.Option(help="Prompts: a .txt with one a line, or a .jsonl of objects with 'prompt' or 'messages'."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt to the model as a user's message.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each answer, as it ends.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer; default 256.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token; default 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the tokens that hold this much probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from this many of the likeliest tokens.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Least probability, relative to the likeliest token's.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text to stop before; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of sequence.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="With --json: log-probabilities with this many others.")] = None,
) -> None:
    """Answer prompts with a model in this process. Ctrl-C stops and keeps what is there."""
    from paceline.app.prompting import sampling_options

    jobs = read_jobs(prompt, file, chat=chat)
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop,
        "ignore_eos": ignore_eos,
        "logprobs": logprobs,
    }
    sampling_options(sampling)  # a bad value is refused before the model is loaded
    with open_llm(resolved) as llm:
        _run(llm, jobs, sampling, as_json=as_json)


@contextmanager
def open_llm(resolved: Resolved) -> Iterator[LLM]:
    """The model that the settings name, loaded, with its stages on stderr."""
    from paceline.app.build import plan_engine
    from paceline.app.llm import LLM

    model = resolved.settings.model.model
    with progress_on_stderr(model) as progress:
        spec = plan_engine(resolved.settings, progress=progress)
    print(f"loading {model}", file=sys.stderr)
    with LLM.from_spec(spec, on_stage=StagePrinter()) as llm:
        yield llm


def read_jobs(prompt: str | None, file: str | None, *, chat: bool) -> list[Job]:
    """What is to be answered. Raises BadRequest naming the line at fault."""
    if prompt is not None and file is not None:
        raise BadRequest("give a prompt or --file, not both")
    if file is not None:
        jobs = list(_read_file(file))
    elif prompt is not None:
        jobs = [Job(prompt)]
    elif sys.stdin.isatty():
        raise BadRequest("no prompt: give one as an argument, in a --file, or on standard input")
    else:
        jobs = [Job(sys.stdin.read())]
    if not jobs or not all(job.content for job in jobs):
        raise BadRequest(f"no prompt in {file or 'what was given'}")
    if not chat:
        return jobs
    return [
        Job([{"role": "user", "content": job.content}], job.id) if isinstance(job.content, str) else job for job in jobs
    ]


def _read_file(name: str) -> Iterator[Job]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _read_json_line(name, number, line) if name.endswith(".jsonl") else Job(line)


def _read_json_line(name: str, number: int, line: str) -> Job:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise BadRequest(f"{name}, line {number}: not JSON: {error}") from error
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise BadRequest(f"{name}, line {number}: needs an object with 'prompt' or 'messages', one of the two")
    content = entry.get("prompt", entry.get("messages"))
    kind = str if "prompt" in entry else list
    if not isinstance(content, kind) or not content:
        wanted = "prompt must be text" if kind is str else "messages must be a list"
        raise BadRequest(f"{name}, line {number}: {wanted}, and not empty")
    identity = entry.get("id", entry.get("custom_id"))
    return Job(content, None if identity is None else str(identity))


def _run(llm: LLM, jobs: list[Job], sampling: dict[str, Any], *, as_json: bool) -> None:
    from paceline.app.prompting import render_chat

    prompts = [job.content if isinstance(job.content, str) else render_chat(job.content, llm.tokenizer) for job in jobs]
    printer = _Printer(jobs, as_json=as_json)
    try:
        with printer.progress():
            for delta in llm.stream(prompts, **sampling):
                printer.take(delta)
    except KeyboardInterrupt:
        printer.give_up()
        raise typer.Exit(INTERRUPTED) from None
    printer.close()


class _Printer:
    """Answers to stdout, progress to stderr: a single answer as it is made, several as they end."""

    def __init__(self, jobs: list[Job], *, as_json: bool) -> None:
        self._jobs = jobs
        self._as_json = as_json
        self._texts = [""] * len(jobs)
        self._open = set(range(len(jobs)))
        self._failed = 0
        self._tokens = 0
        self._advance: Any = None

    @contextmanager
    def progress(self) -> Iterator[None]:
        """A bar on a terminal, where one answer is not itself the progress."""
        began = time.monotonic()
        if not sys.stderr.isatty() or (len(self._jobs) == 1 and not self._as_json):
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=len(self._jobs), speed="")
            self._advance = lambda done: bar.update(
                task, advance=done, speed=f"{self._tokens / (time.monotonic() - began):.0f} tokens/s"
            )
            yield

    def take(self, delta: Delta) -> None:
        self._texts[delta.index] += delta.text
        self._tokens += delta.tokens
        if self._advance is not None:
            self._advance(int(delta.answer is not None))
        if len(self._jobs) == 1 and not self._as_json:
            print(delta.text, end="", flush=True)
        if delta.answer is None:
            return
        self._open.discard(delta.index)
        answer = delta.answer
        self._failed += answer.error is not None
        if self._as_json:
            self._print_json(delta.index, asdict(answer))
        elif answer.error is not None:
            print(f"paceline: prompt {delta.index}: {answer.error}", file=sys.stderr)

    def give_up(self) -> None:
        """Ctrl-C: what is there is printed, and marked as cut short."""
        whole = len(self._jobs) - len(self._open)
        if self._as_json:
            for index in sorted(self._open):
                self._print_json(index, {"text": self._texts[index], "finish_reason": "abort"})
        else:
            self._print_texts()
        print(f"paceline: interrupted; {whole} of {len(self._jobs)} answers are whole", file=sys.stderr)

    def close(self) -> None:
        if not self._as_json:
            self._print_texts()
        if self._failed:
            raise EngineError(f"{self._failed} of {len(self._jobs)} prompts failed")

    def _print_texts(self) -> None:
        if len(self._jobs) == 1:
            print()
            return
        for index, text in enumerate(self._texts):
            print(text if index == 0 else f"---\n{text}")

    def _print_json(self, index: int, answer: dict[str, Any]) -> None:
        job = self._jobs[index]
        entry: dict[str, Any] = {"index": index, **({"id": job.id} if job.id is not None else {})}
        entry |= {"prompt" if isinstance(job.content, str) else "messages": job.content}
        for name, value in answer.items():
            if value not in ((), None):
                entry[name] = value
        print(json.dumps(entry, ensure_ascii=False), flush=True)
