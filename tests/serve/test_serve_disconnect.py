"""Clients that leave free their blocks; readers that dawdle hold up nobody."""

from __future__ import annotations

import socket
import time
from typing import Any

import httpx
import pytest

from paceline.serve.exchange import encode_json
from paceline.serve.settings import ServeSettings
from paceline.text.tokenizer import Tokenizer
from tests.serve.live import Live, events_of, live_server

USER = [{"role": "user", "content": "hi"}]


def connect(live: Live, *, receive_buffer: int | None = None) -> socket.socket:
    address = live.bound.getsockname()
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(address)
    return connection


def send_chat(connection: socket.socket, **fields: Any) -> None:
    body = encode_json({"messages": USER, **fields})
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    connection.sendall(head % len(body) + body)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_aborts_and_frees(live: Live, n: int, stream: bool) -> None:
    live.says(" word" * 1500)
    live.engine.step_s = 0.005
    before = live.metric("paceline:requests_aborted_total")
    connection = connect(live)
    send_chat(connection, n=n, stream=stream)
    if stream:
        assert b"200 OK" in connection.recv(1000)
    live.until(lambda: live.call(lambda: live.engine.held_blocks) > 0)
    connection.close()
    live.until_idle()
    assert live.metric("paceline:requests_aborted_total") == before + n
    assert live.metric("paceline:generation_tokens_total") < 1500


def test_leaving_while_waiting(live: Live) -> None:
    live.engine.paused = True
    connection = connect(live)
    send_chat(connection)
    live.until(lambda: live.call(lambda: live.engine.live) == 1)
    connection.close()
    live.until_idle()


def test_leaving_in_the_middle_of_a_body(live: Live) -> None:
    connection = connect(live)
    connection.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    connection.close()
    assert live.chat().status_code == 200


def test_slow_readers_hold_up_nobody(default_tokenizer: Tokenizer) -> None:
    with live_server(default_tokenizer, num_blocks=20_000, max_num_seqs=512) as live:
        live.small_send_buffers()
        live.says(" word" * 300)
        slow = [connect(live, receive_buffer=2048) for _ in range(50)]
        for connection in slow:
            # Log-probabilities make a stream large enough to fill every buffer on the way.
            send_chat(connection, stream=True, logprobs=True, top_logprobs=20, max_tokens=200)
        live.until(lambda: live.metric("paceline:generation_tokens_total") == 50 * 200)  # nobody held up the engine
        live.says(" one two three")
        assert live.call(lambda: live.engine.live) == 0
        assert not live.call(lambda: live.server.context.idle.is_set()), "the readers were not slow enough"
        assert live.chat().json()["choices"][0]["message"]["content"] == " one two three"
        # Whoever reads at last gets everything.
        text = b""
        slow[0].settimeout(20)
        while b"data: [DONE]" not in text:
            part = slow[0].recv(1 << 16)
            assert part
            text += part
        events = events_of(dechunk(text))
        assert events.pop() == "[DONE]"
        tokens = [entry for event in events for choice in event["choices"] for entry in logprobs_of(choice)]
        assert [entry["token"] for entry in tokens] == [" word"] * 200
        for connection in slow:
            connection.close()
        live.until(lambda: live.call(lambda: live.server.context.idle.is_set()))
        live.until_idle()


def dechunk(raw: bytes) -> str:
    """The body of a response in chunked encoding."""
    rest = raw.partition(b"\r\n\r\n")[2]
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body.decode()


def logprobs_of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    return choice["logprobs"]["content"] if choice["logprobs"] else []


def test_reader_that_takes_nothing_is_given_up(default_tokenizer: Tokenizer) -> None:
    with live_server(default_tokenizer, ServeSettings(write_timeout_s=0.2)) as live:
        live.small_send_buffers()
        live.says(" word" * 2000)
        live.engine.step_s = 0.002
        connection = connect(live, receive_buffer=2048)
        send_chat(connection, stream=True, logprobs=True, top_logprobs=20, max_tokens=1900)
        live.until(lambda: live.metric("paceline:requests_aborted_total") == 1)
        live.until_idle()
        assert live.call(lambda: live.server.context.idle.is_set())
        connection.close()


def test_silence_is_broken_by_comments(default_tokenizer: Tokenizer) -> None:
    with live_server(default_tokenizer, ServeSettings(keepalive_s=0.05)) as live:
        live.says(" one two three")
        live.engine.paused = True
        with live.client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith(":")
            live.engine.paused = False
            text = "\n".join(lines)
        assert events_of(text.lstrip("\n") + "\n\n")[-1] == "[DONE]"


def test_many_streams_at_once(live: Live) -> None:
    import asyncio

    async def one(client: httpx.AsyncClient, i: int) -> str:
        body = {"prompt": [100 + i], "stream": True, "max_tokens": 20}
        text = ""
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                text += line + "\n"
        return "".join(c["text"] for e in events_of(text)[:-1] for c in e["choices"])

    async def all_of_them() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=live.url, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    words = {i: live.tokenizer.encode(f" answer number {i}") for i in range(64)}
    live.engine.backend.script = lambda spec: words[spec.prompt[0] - 100]
    assert asyncio.run(all_of_them()) == [f" answer number {i}" for i in range(64)]


@pytest.mark.slow
def test_a_thousand_slow_readers(default_tokenizer: Tokenizer) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("needs 4096 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    try:
        with live_server(default_tokenizer, num_blocks=40_000, max_num_seqs=1024) as live:
            live.small_send_buffers()
            live.says(" word" * 100)
            slow = [connect(live, receive_buffer=2048) for _ in range(1000)]
            for connection in slow:
                send_chat(connection, stream=True, logprobs=True, top_logprobs=20, max_tokens=64)
            live.until(lambda: live.metric("paceline:generation_tokens_total") == 1000 * 64)
            live.says(" one two three")
            for _ in range(10):
                began = time.monotonic()
                assert live.chat().json()["choices"][0]["message"]["content"] == " one two three"
                assert time.monotonic() - began < 1
            assert not live.call(lambda: live.server.context.idle.is_set()), "the readers were not slow enough"
            for connection in slow:
                connection.close()
            live.until(lambda: live.call(lambda: live.server.context.idle.is_set()))
            live.until_idle()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
