"""The real thing: `paceline serve` with the default model in processes of its own, and the openai client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.text.conftest import MODEL_FILE, model_folder

START_S = 150.0
COMMAND = [sys.executable, "-c", "from paceline.app.cli import main; main()", "serve"]


@dataclass
class LiveServer:
    """A serving process."""

    process: subprocess.Popen[str]
    url: str = ""
    output: list[str] = field(default_factory=list)

    @property
    def model(self) -> str:
        return str(httpx.get(f"{self.url}/v1/models", timeout=30).json()["data"][0]["id"])

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        families = text_string_to_metric_families(text)
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def until(self, condition: Callable[[], bool], within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, "it did not come true in time"
            time.sleep(0.05)

    def until_idle(self) -> None:
        """No request runs or waits, and no KV block is held."""
        names = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
        self.until(lambda: all(self.metric(f"paceline:{name}") == 0 for name in names))


def start_server(folder: Path, *flags: str) -> LiveServer:
    """Start a server on a free port and wait until it says that it is ready."""
    if not (model_folder() / MODEL_FILE).is_file():
        pytest.skip(f"{MODEL_FILE} is not in the cache; run `paceline pull` first")
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", "--kv-gib", "0.5", "--threads", "1", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    server = LiveServer(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.output.append(line)
            if found := re.search(r"Serving on (https?://\S+?)\. ", line):
                server.url = found[1]
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    if not ready.wait(START_S) or not server.url:
        process.kill()
        raise AssertionError("the server did not start:\n" + "".join(server.output))
    return server


def stop_server(server: LiveServer, number: signal.Signals = signal.SIGTERM) -> int:
    if server.process.poll() is None:
        server.process.send_signal(number)
    try:
        code = server.process.wait(30)
    except subprocess.TimeoutExpired:
        server.process.kill()
        raise
    finally:
        if server.process.stdout is not None:
            server.process.stdout.close()
    return code


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    live = start_server(tmp_path_factory.mktemp("serving"))
    yield live
    live.until_idle()
    assert stop_server(live) == 0, "".join(live.output)


@pytest.fixture(scope="session")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="session")
def model(server: LiveServer) -> str:
    return server.model
