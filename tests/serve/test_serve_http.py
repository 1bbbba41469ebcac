"""What comes over the wire before, beside and instead of a good request: heads, bodies and bytes of any kind."""

from __future__ import annotations

import io
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from paceline.serve import logs
from paceline.serve.keys import ApiKey, hash_key
from paceline.serve.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from paceline.serve.settings import ServeSettings
from paceline.text.chat import ChatTemplate
from paceline.text.tokenizer import Tokenizer
from tests.serve.live import Live, live_server

BODY = b'{"prompt": "a", "max_tokens": 1}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GOOD = b"%sContent-Length: %d\r\n\r\n%s" % (HEAD, len(BODY), BODY)
LAST = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
LIMITS = ServeSettings(max_head_bytes=4096, head_timeout_s=0.3)


@pytest.fixture(scope="module")
def bounded(default_tokenizer: Tokenizer) -> Iterator[Live]:
    with live_server(default_tokenizer, LIMITS) as server:
        server.says(" ok")
        yield server


def talk(live: Live, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send and read to the end of the connection."""
    with socket.create_connection(live.bound.getsockname(), timeout=20) as wire:
        for part in parts:
            wire.sendall(part)
            time.sleep(pause_s)
        return read_all(wire)


def read_all(wire: socket.socket) -> bytes:
    received = b""
    while data := wire.recv(65_536):
        received += data
    return received


def refusal(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nx-request-id: req-" in head
    assert b"\r\ncontent-type: application/json\r\n" in head
    assert b"\r\nconnection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]


NO_HTTP = {
    "bytes": b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an unknown method": b"FROB /version HTTP/1.1\r\nHost: x\r\n\r\n",
    "a length that is none": HEAD + b"Content-Length: abc\r\n\r\n" + BODY,
    "a negative length": HEAD + b"Content-Length: -5\r\n\r\n" + BODY,
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 30\r\n\r\n" + BODY,
    "a length and chunks": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a path that is not ASCII": b"GET /v1/models/\xff HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("name", NO_HTTP)
def test_no_http_is_refused_in_our_shape(bounded: Live, name: str) -> None:
    status, error = refusal(talk(bounded, NO_HTTP[name]))
    assert status == 400
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
    assert bounded.complete().status_code == 200


def test_heads_are_bounded_however_they_come(bounded: Live) -> None:
    large = {
        "one header at once": [HEAD + b"X: " + b"a" * 5000 + b"\r\n\r\n"],
        "one header in pieces": [HEAD + b"X: ", *([b"a" * 500] * 40)],
        "many headers": [HEAD, *([b"X-Filler: 12345678\r\n"] * 300)],
        "a path": [b"GET /", *([b"a" * 500] * 20)],
        "the second head of a connection": [GOOD, HEAD + b"X: ", *([b"a" * 500] * 40)],
    }
    for name, parts in large.items():
        try:
            answer = talk(bounded, *parts, pause_s=0.001)
        except (BrokenPipeError, ConnectionResetError):  # it went on sending, and the server does not wait for that
            continue
        refused = answer[answer.rindex(b"HTTP/1.1") :]
        status, error = refusal(refused)
        assert (status, error["code"]) == (431, "head_too_large"), name
    fitting = HEAD + b"X: " + b"a" * 3000 + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
    # The limit is of each head, not of all heads of a connection.
    assert talk(bounded, fitting * 3 + LAST).count(b"HTTP/1.1 200") == 4


@pytest.mark.parametrize(
    "parts",
    [[], [b"\r\n"] * 8, [b"GET /vers"], [HEAD, *([b"X: y\r\n"] * 8)], [GOOD, HEAD, *([b"X: y\r\n"] * 8)]],
    ids=["nothing", "empty lines", "half a line", "a header now and then", "the second head"],
)
def test_a_head_that_does_not_come_to_an_end_is_given_up(bounded: Live, parts: list[bytes]) -> None:
    began = time.monotonic()
    with socket.create_connection(bounded.bound.getsockname(), timeout=20) as wire:
        try:
            for part in parts:
                wire.sendall(part)
                time.sleep(0.1)
            answer = read_all(wire)
        except (BrokenPipeError, ConnectionResetError):
            return
    assert time.monotonic() - began < 10
    status, error = refusal(answer[answer.rindex(b"HTTP/1.1") :])
    assert (status, error["code"]) == (408, "head_too_slow")


def test_the_time_for_a_head_is_not_that_of_a_body_or_an_answer(default_tokenizer: Tokenizer) -> None:
    with live_server(default_tokenizer, LIMITS) as live:
        live.says(" one two three four five")
        live.engine.step_s = 0.2
        slow = HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(BODY)
        answer = talk(live, slow, *(BODY[i : i + 4] for i in range(0, len(BODY), 4)), pause_s=0.08)
        assert answer.startswith(b"HTTP/1.1 200")
        body = {"prompt": "a", "max_tokens": 6}
        assert live.post("/v1/completions", body).json()["usage"]["completion_tokens"] >= 5
        time.sleep(2 * LIMITS.head_timeout_s)  # an idle connection is kept
        live.engine.step_s = 0.0
        assert live.post("/v1/completions", body).status_code == 200


def test_pipelined_requests_are_answered_in_order(bounded: Live) -> None:
    tagged = [GOOD.replace(b"Host: x", b"Host: x\r\nX-Request-Id: n%d" % i) for i in range(20)]
    answer = talk(bounded, b"".join(tagged) + LAST)
    assert answer.count(b"HTTP/1.1 200") == 21
    places = [answer.index(b"x-request-id: n%d\r\n" % i) for i in range(20)]
    assert places == sorted(places)
    with socket.create_connection(bounded.bound.getsockname()) as wire:
        wire.sendall(b"".join(tagged))
    bounded.until_idle()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_answered_even_to_a_client_that_only_sends(
    default_tokenizer: Tokenizer, chunked: bool
) -> None:
    """More than the kernel's buffers hold: the client sends all of it before it reads."""
    with live_server(default_tokenizer, ServeSettings(max_body_bytes=1000)) as live:
        size = 16 << 20
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (size, bytes(size)) if chunked else bytes(size)
        said = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % size
        status, error = refusal(talk(live, HEAD + said + b"\r\n\r\n", body))
        assert (status, error["code"]) == (413, "body_too_large")
        # Who asks first is told at once, and sends nothing.
        asked = talk(live, HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % size)
        assert asked.startswith(b"HTTP/1.1 413")


@contextmanager
def logged(level: str) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    logs.configure("text", level, stream)
    try:
        yield stream
    finally:
        root = logging.getLogger()
        for handler in [each for each in root.handlers if getattr(each, "paceline", False)]:
            root.removeHandler(handler)
        logging.getLogger("paceline").setLevel(logging.NOTSET)


def test_prompts_are_logged_to_who_asks_for_them_by_name(default_tokenizer: Tokenizer) -> None:
    for asked in (False, True):
        with live_server(default_tokenizer, ServeSettings(log_prompts=asked)) as live, logged("debug") as stream:
            live.says(" ok")
            assert live.complete("a very secret prompt").status_code == 200
        assert ("a very secret prompt" in stream.getvalue()) is asked


def test_listening_beyond_this_machine_without_a_key_warns(default_tokenizer: Tokenizer) -> None:
    key = ApiKey("a", hash_key("s"))
    for host, keys, warns in (("127.0.0.1", (), False), ("0.0.0.0", (key,), False), ("0.0.0.0", (), True)):
        with logged("warning") as stream, live_server(default_tokenizer, ServeSettings(host=host, keys=keys)):
            pass
        assert ("without any API key" in stream.getvalue()) is warns


def test_a_line_of_the_log_is_one_line(live: Live) -> None:
    with logged("info") as stream:
        live.get("/no%0a2030-01-01T00:00:00Z error forged%1b[31m%e2%80%a8")
        live.until(lambda: "forged" in stream.getvalue())
    [line] = [line for line in stream.getvalue().splitlines() if "forged" in line]
    assert r"GET /no\n2030-01-01T00:00:00Z error forged\x1b[31m\u2028 404" in line


WRONG_LISTS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "prompts": (CompletionRequest, {"prompt": [1.5] * 1000}),
    "lists of ids": (CompletionRequest, {"prompt": [["x"]] * 1000}),
    "stop strings": (CompletionRequest, {"prompt": "a", "stop": [1] * 1000}),
    "stop ids": (CompletionRequest, {"prompt": "a", "stop_token_ids": ["x"] * 1000}),
    "biases": (CompletionRequest, {"prompt": "a", "logit_bias": {str(i): 200 for i in range(1000)}}),
    "messages": (ChatRequest, {"messages": [1] * 1000}),
    "parts": (ChatRequest, {"messages": [{"role": "user", "content": [1] * 1000}]}),
    "calls": (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [1] * 1000}]}),
    "messages to count": (TokenizeRequest, {"messages": [1] * 1000}),
    "tokens": (DetokenizeRequest, {"tokens": ["x"] * 1000}),
}


@pytest.mark.parametrize("name", WRONG_LISTS)
def test_the_first_fault_of_a_list_is_enough(name: str) -> None:
    """An error for each of a million items took seconds in which the server did nothing else."""
    kind, body = WRONG_LISTS[name]
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 3  # a union gives one for each branch


def test_too_many_prompts_are_refused_before_any_is_tokenised(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("tokenised")

    with monkeypatch.context() as patched:
        patched.setattr(Tokenizer, "encode", encode)
        for body in ({"prompt": ["ab"] * 2000}, {"prompt": ["ab", "ab"], "n": 1000}, {"prompt": ["ab", ""]}):
            assert live.post("/v1/completions", body).status_code == 400
        assert live.chat(n=1000).status_code == 400


def test_what_is_long_is_worked_on_beside_the_event_loop(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[tuple[str, str]] = []
    encode, render = Tokenizer.encode, ChatTemplate.render

    def note_encode(self: Tokenizer, *args: Any, **options: Any) -> list[int]:
        threads.append(("encode", threading.current_thread().name))
        return encode(self, *args, **options)

    def note_render(self: ChatTemplate, *args: Any, **options: Any) -> str:
        threads.append(("render", threading.current_thread().name))
        return render(self, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", note_encode)
    monkeypatch.setattr(ChatTemplate, "render", note_render)
    live.says(" ok")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 100
    for body, path, of in (
        ({"prompt": "word " * 1000}, "/v1/completions", "encode"),
        ({"prompt": ["word " * 100] * 10}, "/v1/completions", "encode"),
        ({"messages": turns}, "/v1/chat/completions", "render"),
        ({"messages": [{"role": "user", "content": "word " * 1000}]}, "/v1/chat/completions", "render"),
        ({"messages": turns}, "/tokenize", "render"),
    ):
        threads.clear()
        assert live.post(path, body).status_code == 200
        assert {name for what, name in threads if what == of}.isdisjoint({"live-server"}), body
    threads.clear()
    assert live.chat("short").status_code == 200
    assert {name for _, name in threads} == {"live-server"}
