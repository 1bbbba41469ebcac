"""`paceline chat`: talk to a model in the terminal, loaded here or behind a server."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Annotated, Any

import typer

from paceline.app.config import Resolved
from paceline.app.options import with_settings
from paceline.errors import EngineError, PacelineError

HELP = """\
  /system TEXT  tell the model how to behave, and start anew
  /reset        forget what was said
  /help         this text
  Ctrl-C        stop an answer
  Ctrl-D        leave"""

Messages = list[dict[str, Any]]
# The model's side: a conversation in, its next message out in pieces. Closing the generator ends the answer.
Talker = Callable[[Messages], Generator[str]]


def register(app: typer.Typer) -> None:
    app.command("chat")(chat)


@with_settings("model", "scheduler", "kv", model_argument=True)
def chat(
    resolved: Resolved,
    url: Annotated[str | None, typer.Option(help="A server to talk to, e.g. http://127.0.0.1:8000.")] = None,
    system: Annotated[str | None, typer.Option(help="How the model is to behave.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 1024,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 always takes the likeliest token.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")] = None,
) -> None:
    """Chat with a model in the terminal. /help says what else there is."""
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    with contextlib.ExitStack() as stack:
        talk = _remote(stack, url, resolved, sampling) if url else _local(stack, resolved, sampling)
        Conversation(talk, system).run()


def _local(stack: contextlib.ExitStack, resolved: Resolved, sampling: dict[str, Any]) -> Talker:
    from paceline.app.commands.generate import open_llm

    llm = stack.enter_context(open_llm(resolved))

    def talk(messages: Messages) -> Generator[str]:
        for delta in llm.stream_chat(messages, **sampling):
            yield delta.text
            if delta.answer is not None and delta.answer.error is not None:
                raise EngineError(delta.answer.error)

    return talk


def _remote(stack: contextlib.ExitStack, url: str, resolved: Resolved, sampling: dict[str, Any]) -> Talker:
    from paceline.app.remote import RemoteChat

    remote = stack.enter_context(RemoteChat(url, resolved.settings.auth.api_key, sampling))
    print(f"talking to {remote.model} at {url}", file=sys.stderr)
    return remote.talk


class Conversation:
    """What was said so far, and the loop that goes on with it."""

    def __init__(self, talk: Talker, system: str | None) -> None:
        self._talk = talk
        self._messages: Messages = []
        self._begin(system)

    def _begin(self, system: str | None) -> None:
        self._system = system
        self._messages = [{"role": "system", "content": system}] if system else []

    def run(self) -> None:
        """Read lines until Ctrl-D or the end of input."""
        prompt = ""
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # gives input() its history and editing
            prompt = "> "
            print("/help for help, Ctrl-D to leave", file=sys.stderr)
        while True:
            try:
                line = input(prompt).strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print("\nCtrl-D leaves", file=sys.stderr)
                continue
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._ask(line)

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        match word:
            case "/reset":
                self._begin(self._system)
            case "/system":
                self._begin(rest.strip() or None)
            case "/help":
                print(HELP, file=sys.stderr)
            case _:
                print(f"no command {word}; /help lists them", file=sys.stderr)

    def _ask(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        answer = ""
        pieces = self._talk(self._messages)
        try:
            for piece in pieces:
                answer += piece
                print(piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print(" [stopped]")
        except PacelineError as error:
            # The conversation stays as it was before, so that one can go on.
            print(f"{error} (/reset starts anew)", file=sys.stderr)
            self._messages.pop()
            return
        finally:
            pieces.close()  # now, not when it is collected: on Ctrl-C, this is what ends the request
        self._messages.append({"role": "assistant", "content": answer})
