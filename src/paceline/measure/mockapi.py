"""The built-in mock as an OpenAI-compatible server with exact times, also as a process of its own.

    python -m paceline.measure.mockapi '{"ttft_ms": 200, "itl_ms": 20}'

prints its port and serves until its input ends. Prompts are counted in words, plus the configured template overhead;
every request streams `max_tokens` tokens of one event each.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any

import msgspec

from paceline.measure.mock import End, Handler, MockRequest, MockServer, Play, chunk, http_head, streamed, whole


class MockConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the mock answers. Milliseconds."""

    ttft_ms: float = 100.0
    itl_ms: float = 20.0
    model: str = "mock"
    overhead_tokens: int = 7
    tokenize: bool = True  # offer /tokenize
    accept_ignore_eos: bool = True
    api_key: str = ""
    max_tokens: int = 1 << 20
    service_ms: float | None = None  # one-at-a-time service of this length instead of independent streams
    stall_at_s: float = (
        0.0  # with service_ms: nothing is served for `stall_for_s` from then on, after the first request
    )
    stall_for_s: float = 0.0
    log: bool = True
    port: int = 0


class MockApi:
    """The handler. One instance is one server's state."""

    def __init__(self, config: MockConfig) -> None:
        self.config = config
        self.server: MockServer | None = None
        self.bodies: list[dict[str, Any]] = []  # the last requests' bodies, for tests
        self._count = 0
        self._first: float | None = None
        self._free = 0.0
        self._prompt_tokens = self._output_tokens = 0
        self._templates: dict[int, list[bytes]] = {}

    def __call__(self, request: MockRequest) -> Play:
        path = request.path.split("?")[0]
        if path == "/metrics":
            return _answer(200, self._metrics().encode(), "text/plain")
        if path == "/version":
            return _json(200, {"version": "0.0-mock"})
        if path == "/_log" and self.server is not None:
            logs = {name: (log.received, log.planned_s, log.written) for name, log in self.server.logs.items()}
            return _json(200, logs)
        if self.config.api_key and request.headers.get("authorization") != f"Bearer {self.config.api_key}":
            return _error(401, "no such key")
        if path == "/v1/models":
            return _json(200, {"object": "list", "data": [{"id": self.config.model, "object": "model"}]})
        if path == "/tokenize" and self.config.tokenize:
            return self._tokenize(msgspec.json.decode(request.body))
        if path in ("/v1/chat/completions", "/v1/completions") and request.method == "POST":
            return self._generate(request, msgspec.json.decode(request.body), chat=path == "/v1/chat/completions")
        return _error(404, f"no such path {path}")

    def _tokenize(self, body: dict[str, Any]) -> Play:
        text = body.get("prompt", body.get("content", ""))
        count = len(str(text).split())
        return _json(200, {"count": count, "tokens": list(range(count))})

    def _generate(self, request: MockRequest, body: dict[str, Any], *, chat: bool) -> Play:
        config = self.config
        self.bodies = [*self.bodies[-63:], body]
        if body.get("model") not in (None, config.model):
            return _error(404, f"The model {body.get('model')!r} does not exist")
        if "ignore_eos" in body and not config.accept_ignore_eos:
            return _error(400, "Unrecognized request argument supplied: ignore_eos")
        said = " ".join(str(m.get("content", "")) for m in body["messages"]) if chat else str(body.get("prompt", ""))
        prompt = len(said.split()) + (config.overhead_tokens if chat else 0)
        tokens = min(int(body.get("max_tokens", 16)), config.max_tokens)
        self._prompt_tokens += prompt
        self._output_tokens += tokens
        self._count += 1
        name = f"mock-{self._count}"
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        first, gap = config.ttft_ms / 1e3, config.itl_ms / 1e3
        if config.service_ms is not None:
            first, gap = self._serve_next(request.at, config.service_ms / 1e3) - request.at, 0.0
        if not body.get("stream"):
            choice = {
                "index": 0,
                "finish_reason": "length",
                "message": {"role": "assistant", "content": "tok " * tokens},
            }
            answer = msgspec.json.encode({"id": name, "choices": [choice], "usage": usage})
            return Play([(first + gap * max(0, tokens - 1), whole(200, answer))], name=name if config.log else "")
        return self._stream(name, first, gap, tokens, usage, chat=chat)

    def _stream(self, name: str, first: float, gap: float, tokens: int, usage: dict[str, int], *, chat: bool) -> Play:
        """Head, one event a token, then finish reason, usage, [DONE] and the last chunk in one write."""
        field = b'"delta":{"content":"tok "}' if chat else b'"text":"tok "'
        event = b'data: {"id":"%b","choices":[{"index":0,%b}]}\n\n' % (name.encode(), field)
        finish = b'data: {"id":"%b","choices":[{"index":0,%b,"finish_reason":"length"}]}\n\n' % (
            name.encode(),
            b'"delta":{}' if chat else b'"text":""',
        )
        end = b'data: {"choices":[],"usage":%b}\n\ndata: [DONE]\n\n' % msgspec.json.encode(usage)
        token = chunk(event)
        steps = [(first, http_head() + token)] if tokens else [(first, http_head())]
        steps += [(first + gap * i, token) for i in range(1, tokens)]
        last, data = steps[-1]
        steps[-1] = (last, data + chunk(finish + end) + b"0\r\n\r\n")
        return Play(steps, End.KEEP, name=name if self.config.log else "")

    def _serve_next(self, now: float, service: float) -> float:
        """First come, first served, one at a time; when this one is done."""
        config = self.config
        if self._first is None:
            self._first = now
        start = max(now, self._free)
        stall = self._first + config.stall_at_s
        if config.stall_for_s and stall - service < start < stall + config.stall_for_s:
            start = stall + config.stall_for_s
        self._free = start + service
        return self._free

    def _metrics(self) -> str:
        return (
            "# HELP vllm:prompt_tokens_total x\n# TYPE vllm:prompt_tokens_total counter\n"
            f'vllm:prompt_tokens_total{{model_name="{self.config.model}"}} {self._prompt_tokens}\n'
            f'vllm:generation_tokens_total{{model_name="{self.config.model}"}} {self._output_tokens}\n'
        )


def _answer(status: int, body: bytes, content_type: str = "application/json") -> Play:
    return Play([(0.0, whole(status, body, content_type))])


def _json(status: int, value: Any) -> Play:
    return _answer(status, msgspec.json.encode(value))


def _error(status: int, message: str) -> Play:
    return _json(status, {"error": {"message": message, "type": "invalid_request_error", "code": status}})


def events(*pieces: str | dict[str, Any]) -> bytes:
    """SSE events of payloads; strings are taken as the data itself."""
    return b"".join(
        b"data: " + (p.encode() if isinstance(p, str) else msgspec.json.encode(p)) + b"\n\n" for p in pieces
    )


def content(text: str, **more: Any) -> dict[str, Any]:
    """A chat chunk that carries text."""
    return {"choices": [{"index": 0, "delta": {"content": text}, **more}]}


def constant(play: Play) -> Handler:
    """A handler that plays the same for every request."""
    return lambda request: play


__all__ = ["MockApi", "MockConfig", "MockProcess", "constant", "content", "events", "streamed"]


class MockProcess:
    """The mock in a process of its own, so that it does not share the client's interpreter. A context manager."""

    def __init__(self, config: MockConfig) -> None:
        self._config = config
        self.url = ""

    def __enter__(self) -> MockProcess:
        command = [sys.executable, "-m", "paceline.measure.mockapi", msgspec.json.encode(self._config).decode()]
        self._process = subprocess.Popen(  # noqa: S603  our own interpreter and module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            self.__exit__(None, None, None)
            raise RuntimeError("the mock server did not start")
        self.url = f"http://127.0.0.1:{int(line)}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


async def _serve(config: MockConfig) -> None:
    import gc

    from paceline.measure.limits import raise_file_limit

    raise_file_limit(1 << 16)
    api = MockApi(config)
    loop = asyncio.get_running_loop()
    over = asyncio.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(over.set)

    async with MockServer(api, port=config.port) as server:
        api.server = server
        threading.Thread(target=wait_for_end, daemon=True).start()
        print(server.port, flush=True)
        gc.collect()
        gc.freeze()
        gc.disable()
        await over.wait()


def main() -> None:
    from paceline.measure.worker import runner_for

    config = msgspec.json.decode(sys.argv[1] if len(sys.argv) > 1 else "{}", type=MockConfig)
    runner_for("auto")(_serve(config))


if __name__ == "__main__":
    main()
