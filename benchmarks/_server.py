"""A `paceline serve` of its own for a benchmark."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

DEFAULT_MODEL = Path("models/SmolLM2-135M-Instruct.Q4_1.gguf")  # in the cache
START_S = 180.0


def default_model() -> Path:
    """Where `paceline pull` puts the default model."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / DEFAULT_MODEL


@contextlib.contextmanager
def server(model: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """The base URL of a server that is ready; float32, like what it is compared with."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).parent / "paceline"), "serve", "--model", str(model), "--dtype", "float32"]
    command += ["--port", str(port), "--log-level", "warning", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(url, process)
            yield url
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Return when the server answers; exit when it ended, or took too long."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"the server ended with code {process.returncode} before it was ready")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        time.sleep(0.1)
    sys.exit(f"the server was not ready within {START_S:g} s")
