"""A serving process for a test, and clients that are as patient, slow or rude as the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.reliability.engines import NAME, Fake

ROOT = Path(__file__).parents[2]


class Served:
    """A serving process and where to reach it."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.host, port = url.removeprefix("http://").split(":")
        self.port = int(port)

    def engine_pid(self) -> int | None:
        """Of the engine process, which is the server's only child."""
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self.process.pid}/task").iterdir():
                for child in (task / "children").read_text().split():
                    if b"paceline.engine.child" in Path(f"/proc/{child}/cmdline").read_bytes():
                        return int(child)
        return None

    def metric(self, name: str) -> float:
        """The sum of a metric's values, now."""
        text = httpx.get(f"{self.url}/metrics", timeout=30.0).text
        found = re.findall(rf"^paceline:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert found, f"no metric {name} in\n{text}"
        return sum(map(float, found))

    def wait_metric(self, name: str, value: float, *, within_s: float = 60.0) -> None:
        """Wait until a metric has this value."""
        deadline = time.monotonic() + within_s
        while (now := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {now}, not {value}, after {within_s:g} s"
            time.sleep(0.05)

    def unsent(self) -> int:
        """Connections for which the server's kernel holds bytes that the other side does not take."""
        count = 0
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, _, _, queues, *_ = line.split()
            count += int(local.split(":")[1], 16) == self.port and int(queues.split(":")[0], 16) > 0
        return count

    def wait_unsent(self, count: int, *, within_s: float = 30.0) -> None:
        """Wait until that many connections hold bytes: the server may still be writing what the engine has made."""
        deadline = time.monotonic() + within_s
        while (now := self.unsent()) != count:
            assert time.monotonic() < deadline, f"{now} of {count} readers are as slow as they should be"
            time.sleep(0.1)

    def wait_ready(self, *, within_s: float) -> None:
        """Wait until it takes requests."""
        deadline = time.monotonic() + within_s
        while self.status("/ready") != 200:
            assert self.process.poll() is None, f"the server ended with code {self.process.returncode}"
            assert time.monotonic() < deadline, f"not ready within {within_s:g} s"
            time.sleep(0.02)

    def status(self, path: str) -> int | None:
        """The HTTP status of a GET; None when nobody answers."""
        try:
            return httpx.get(self.url + path, timeout=10.0).status_code
        except httpx.TransportError:
            return None


@contextlib.contextmanager
def served(fake: Fake) -> Iterator[Served]:
    """A serving process with a made-up model, ready."""
    with running([sys.executable, "-m", "tests.reliability.engines", json.dumps(asdict(fake))]) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, f"the server ended before it was ready, with code {process.wait()}"
        yield Served(process, url)


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process, ended afterwards however the test went."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.send_signal(signal.SIGTERM)  # the second one hurries
                process.wait(20)
            process.kill()


def allow_open_files(count: int) -> None:
    """Raise this process's soft limit; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        assert hard == resource.RLIM_INFINITY or hard >= count, f"no more than {hard} open files are allowed here"
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def completion(max_tokens: int, *, prompt: str = "hello", stream: bool = True, **more: Any) -> dict[str, Any]:
    """The body of a completion request."""
    return {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "stream": stream} | more


class RawClient:
    """One connection, by hand: whether and when it reads is the test's decision."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._answer = bytearray()

    @classmethod
    async def post(cls, server: Served, body: dict[str, Any], *, receive_buffer: int | None = None) -> RawClient:
        """Connect and send a completion request. `receive_buffer`: bytes of the kernel's buffer on our side."""
        import socket

        connection = socket.socket()
        connection.setblocking(False)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(connection, (server.host, server.port))
        # A stream reader stops taking from its socket at twice its limit.
        reader, writer = await asyncio.open_connection(sock=connection, limit=256 if receive_buffer else 2**16)
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {server.host}\r\ncontent-type: application/json\r\n"
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content)
        await writer.drain()
        return cls(reader, writer)

    async def until(self, marker: bytes) -> str:
        """Read until this has come; all of the answer so far."""
        while marker not in self._answer:
            more = await self._reader.read(65536)
            assert more, f"the answer ended without {marker!r}:\n{self._answer[-500:].decode()}"
            self._answer += more
        return self._answer.decode()

    async def __aenter__(self) -> RawClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Go away without a word."""
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
