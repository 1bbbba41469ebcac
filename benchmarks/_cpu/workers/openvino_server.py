"""OpenVINO GenAI behind HTTP: the least of an OpenAI-compatible server, since its package has none.

Streams of text completions on the standard library's asyncio; the pipeline steps on a thread of its own. A client that
goes away is not noticed: this serves a benchmark on loopback, nobody else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any

from _openvino import config_of, pipeline_of

openvino: Any = import_module("openvino")
np: Any = import_module("numpy")


class Stepping(threading.Thread):
    """Adds requests to the pipeline between its steps, and hands their tokens to the event loop."""

    def __init__(self, pipe: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        self._pipe, self._loop = pipe, loop
        self._asked: queue.SimpleQueue[tuple[Any, int, asyncio.Queue[list[int]]]] = queue.SimpleQueue()
        self._live: list[tuple[Any, asyncio.Queue[list[int]]]] = []
        self._next = 0

    def ask(self, ids: Any, count: int) -> asyncio.Queue[list[int]]:
        """A queue of new tokens, as they come."""
        found: asyncio.Queue[list[int]] = asyncio.Queue()
        self._asked.put((ids, count, found))
        return found

    def run(self) -> None:
        while True:
            while not self._live or not self._asked.empty():
                ids, count, found = self._asked.get()
                self._live.append((self._pipe.add_request(self._next, ids, config_of(count)), found))
                self._next += 1
            self._pipe.step()
            new = [(found, self._read(handle)) for handle, found in self._live]
            self._live = [pair for pair in self._live if str(pair[0].get_status()).endswith("RUNNING")]
            self._loop.call_soon_threadsafe(self._deliver, new)

    @staticmethod
    def _read(handle: Any) -> list[int]:
        return list(next(iter(handle.read().values())).generated_ids) if handle.can_read() else []

    @staticmethod
    def _deliver(new: list[tuple[asyncio.Queue[list[int]], list[int]]]) -> None:
        for found, tokens in new:
            if tokens:
                found.put_nowait(tokens)


class Server:
    """`/v1/models`, `/v1/completions` and `/health`; a connection stays open from one request to the next."""

    def __init__(self, pipe: Any, stepping: Stepping) -> None:
        self._tokenizer, self._stepping = pipe.get_tokenizer(), stepping
        self._texts: dict[int, str] = {}  # of tokens that were seen: each is decoded once

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode("latin-1").split("\r\n")
                method, path, _ = lines[0].split(" ")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._answer(f"{method} {path}", body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, asked: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if asked == "POST /v1/completions":
            order = json.loads(body)
            pieces = [piece async for piece in self._complete(order, writer if order.get("stream") else None)]
            if not order.get("stream"):
                usage = pieces.pop()["usage"]
                text = "".join(piece["choices"][0]["text"] for piece in pieces)
                choice = {"index": 0, "text": text, "finish_reason": "length"}
                self._whole(writer, "200 OK", {"choices": [choice], "usage": usage})
        elif asked == "GET /v1/models":
            self._whole(writer, "200 OK", {"data": [{"id": "openvino", "object": "model"}]})
        elif asked == "GET /health":
            self._whole(writer, "200 OK", {})
        else:
            self._whole(writer, "404 Not Found", {"error": {"message": f"nothing at {asked}"}})
        await writer.drain()

    async def _complete(self, order: dict[str, Any], stream: asyncio.StreamWriter | None) -> AsyncIterator[Any]:
        """The events of one answer, also written to the stream as they come."""
        prompt, count = order["prompt"], order["max_tokens"]
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt).input_ids
        else:
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        found, left = self._stepping.ask(ids, count), count
        if stream is not None:
            stream.write(_head("200 OK", "text/event-stream", "Transfer-Encoding: chunked"))
        while left > 0:
            tokens = await found.get()
            left -= len(tokens)
            end = None if left > 0 else "length"
            text = "".join(map(self._text, tokens))
            yield self._send(stream, {"choices": [{"index": 0, "text": text, "finish_reason": end}]})
        total = ids.shape[1] + count
        usage = {"prompt_tokens": ids.shape[1], "completion_tokens": count, "total_tokens": total}
        yield self._send(stream, {"choices": [], "usage": usage})
        if stream is not None:
            stream.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    @staticmethod
    def _send(stream: asyncio.StreamWriter | None, event: dict[str, Any]) -> dict[str, Any]:
        if stream is not None and not stream.is_closing():
            stream.write(_chunk(b"data: " + json.dumps(event).encode() + b"\n\n"))
        return event

    @staticmethod
    def _whole(writer: asyncio.StreamWriter, status: str, value: Any) -> None:
        body = json.dumps(value).encode()
        writer.write(_head(status, "application/json", f"Content-Length: {len(body)}") + body)

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token])
        return self._texts[token]


def _head(status: str, kind: str, length: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{length}\r\n\r\n".encode()


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv-gib", type=float, required=True)
    parser.add_argument("--options", type=json.loads, default={}, help="as workers take them")
    args = parser.parse_args()
    pipe = pipeline_of(args.model, args.threads, args.kv_gib, args.options)
    stepping = Stepping(pipe, asyncio.get_running_loop())
    stepping.start()
    server = await asyncio.start_server(Server(pipe, stepping).connect, "127.0.0.1", args.port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
