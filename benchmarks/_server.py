"""Servers of their own for a benchmark: `paceline serve`, and any other."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

DEFAULT_MODEL = Path("models/SmolLM2-135M-Instruct.Q4_1.gguf")  # in the cache
START_S = 180.0


def default_model() -> Path:
    """Where `paceline pull` puts the default model."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / DEFAULT_MODEL


@contextlib.contextmanager
def server(model: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """The base URL of a `paceline serve` that is ready; float32 unless the options say more."""
    command = [str(Path(sys.executable).parent / "paceline"), "serve", "--model", str(model), "--dtype", "float32"]
    with running([*command, "--log-level", "warning", *options]) as (url, _):
        yield url


@contextlib.contextmanager
def running(
    command: Sequence[str], *, ready: str = "/ready", env: Mapping[str, str] | None = None, start_s: float = START_S
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The base URL of a server that is ready, and its process. The command is given `--port` and a free one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, env=env) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(f"{url}{ready}", process, start_s)
            yield url, process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def wait_ready(url: str, process: subprocess.Popen[bytes], start_s: float = START_S) -> None:
    """Return when the server answers there; exit when it ended, or took longer than `start_s`."""
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"the server ended with code {process.returncode} before it was ready")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).status_code == 200:
                return
        time.sleep(0.1)
    sys.exit(f"the server was not ready within {start_s:g} s")
