"""A server of our own for a measurement: the settings go in, a URL comes out, and it ends with us.

    with private_server(settings) as url:
        ...

It is `paceline serve` in a process of its own, so that what is measured is what a client of a real server meets.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import IO

import msgspec

from paceline.app.settings import AuthSettings, LogSettings, Settings
from paceline.errors import EngineError

START_S = 300.0  # a large model takes its time to load
END_S = 30.0
_CHILD = "from paceline.app.private_server import main; main()"


@contextlib.contextmanager
def private_server(settings: Settings) -> Iterator[str]:
    """The base URL of a server that is ready, on a free local port and without keys, batches or TLS.

    Raises EngineError, with the last line it wrote, where it does not become ready.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve = replace(settings.serve, host="127.0.0.1", port=port, tls_cert=None, tls_key=None, drain_s=1.0)
    quiet = LogSettings(log_level="warning", log_format=settings.log.log_format)
    batch = replace(settings.batch, batches=False)
    own = replace(settings, serve=serve, auth=AuthSettings(), log=quiet, batch=batch)
    with tempfile.TemporaryFile() as words:
        # A session of its own: Ctrl-C is ours, and the server ends when we let go of its input.
        process = subprocess.Popen(  # noqa: S603  our own code
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=words,
            start_new_session=True,
        )
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(own) + b"\n")
            process.stdin.flush()
            url = f"http://127.0.0.1:{port}"
            _wait_ready(url, process, words)
            yield url
        finally:
            _end(process)


def _wait_ready(url: str, process: subprocess.Popen[bytes], words: IO[bytes]) -> None:
    import httpx

    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineError(f"the server ended with code {process.returncode} before it was ready: {_last(words)}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return
        time.sleep(0.05)
    raise EngineError(f"the server was not ready within {START_S:g} s: {_last(words)}")


def _last(words: IO[bytes]) -> str:
    words.seek(0)
    lines = words.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1].removeprefix("paceline: ") if lines else "it said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    """The child: settings on the first line of standard input, then serve until that input ends."""
    from paceline.app import serving
    from paceline.app.cli import exit_code
    from paceline.errors import PacelineError

    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        code = serving.serve(settings)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr, flush=True)
        code = exit_code(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the watching thread holds standard input


def _end_with_parent() -> None:
    with contextlib.suppress(OSError, ValueError):
        os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)
