"""The client on real sockets against scripted servers: stamps, ends, limits, retries."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.measure.alarm import Alarm, clock
from paceline.measure.bodies import resolve
from paceline.measure.client import Client, ClientSettings, Job, retry_after_s
from paceline.measure.mock import LAST_CHUNK, End, MockRequest, MockServer, Play, chunk, http_head, streamed, whole
from paceline.measure.mockapi import MockApi, MockConfig, constant, content, events
from paceline.measure.once import measure_once
from paceline.measure.plan import Target
from paceline.measure.records import ErrorClass, Kind, RequestRecord

FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
STREAM = events(content("a"), content(" b"), FINISH, {"choices": [], "usage": {"completion_tokens": 2}}, "[DONE]")


def ask(play: Play | Callable[[MockRequest], Play], *, stream: bool = True, **more: Any) -> RequestRecord:
    """One request to a server that plays this."""

    async def work() -> RequestRecord:
        async with MockServer(play if callable(play) else constant(play)) as server:
            return await measure_once(Target(url=server.url, stream=stream), **more)

    return asyncio.run(work())


def check_success(record: RequestRecord) -> None:
    assert record.error is None, record.error_message
    assert record.text == "a b"
    assert record.kinds == "ccFUD"
    assert record.usage is not None
    assert record.usage.completion_tokens == 2


def test_times_are_those_of_the_script() -> None:
    script = [(0.05, events(content("a"))), (0.15, events(content(" b"))), (0.20, events(FINISH, "[DONE]"))]
    record = ask(streamed(script))
    assert record.error is None
    first, second, end = record.row_s(0), record.row_s(1), record.row_s(2)
    assert second - first == pytest.approx(0.10, abs=0.05)
    assert record.closed_s is not None
    assert record.scheduled_s <= (record.dispatched_s or 0) <= (record.written_s or 0) <= first <= second <= end
    assert first >= 0.05
    assert end <= record.closed_s
    assert record.row_reads[2] == record.row_reads[3]  # finish and [DONE] came in one read


@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=6))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_chunk_borders_anywhere_change_nothing(cuts: list[int]) -> None:
    edges = [0, *sorted(set(cuts)), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in itertools.pairwise(edges)]
    check_success(ask(streamed([(0.0, piece) for piece in pieces])))


def test_tcp_borders_anywhere_change_nothing() -> None:
    """Each byte of the whole HTTP response in a write of its own, also of the head and the chunk framing."""
    response = http_head() + chunk(STREAM[:50]) + chunk(STREAM[50:]) + LAST_CHUNK

    def one_write_at(cut: int) -> Play:
        return Play([(0.0, response[:cut]), (0.002, response[cut:])])

    async def work() -> list[RequestRecord]:
        cuts = iter(range(1, len(response), 7))
        async with MockServer(lambda request: one_write_at(next(cuts))) as server:
            return [await measure_once(Target(url=server.url)) for _ in range(1, len(response), 7)]

    for record in asyncio.run(work()):
        check_success(record)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_bodies_are_taken_though_not_asked_for(encoding: str) -> None:
    import zlib

    body = gzip.compress(STREAM) if encoding == "gzip" else zlib.compress(STREAM)
    head = http_head(content_encoding=encoding)
    check_success(ask(Play([(0.0, head), (0.0, chunk(body[:20])), (0.01, chunk(body[20:]) + LAST_CHUNK)])))


def test_an_encoding_that_nobody_asked_for_is_malformed() -> None:
    record = ask(Play([(0.0, http_head(content_encoding="br") + chunk(b"xx") + LAST_CHUNK)]))
    assert record.error is ErrorClass.MALFORMED
    assert "br" in record.error_message


def test_a_body_that_ends_with_the_connection() -> None:
    check_success(ask(Play([(0.0, http_head(chunked=False)), (0.0, STREAM)], End.FIN)))


def test_interim_answers_are_skipped() -> None:
    hint = b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"
    check_success(ask(Play([(0.0, hint + http_head() + chunk(STREAM) + LAST_CHUNK)])))


def test_the_last_event_without_its_blank_line_is_stamped_when_it_came() -> None:
    tail = events(content("a")) + b'data: {"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":"stop"}]}'
    record = ask(Play([(0.0, http_head(chunked=False)), (0.0, tail)], End.FIN, end_s=0.2))
    assert record.error is None
    assert record.kinds == "cc"
    assert record.closed_s is not None
    assert record.closed_s - record.row_s(1) > 0.1


@pytest.mark.parametrize(
    ("play", "error"),
    [
        (streamed([(0.0, events(content("a")))], end=End.FIN), ErrorClass.TRUNCATED),
        (streamed([(0.0, events(content("a")))]), ErrorClass.TRUNCATED),
        (streamed([(0.0, events(content("a"))[:-9])], end=End.FIN), ErrorClass.TRUNCATED),
        (streamed([(0.0, events(content("a")))], end=End.RESET), ErrorClass.TRANSPORT),
        (Play([], End.FIN), ErrorClass.TRANSPORT),
        (Play([(0.0, b"HTTP/1.1 200 OK\r\nconte")], End.FIN), ErrorClass.TRANSPORT),
        (Play([], End.RESET), ErrorClass.TRANSPORT),
        (Play([(0.0, b"SSH-2.0-OpenSSH_9.2\r\n")]), ErrorClass.MALFORMED),
        (streamed([(0.0, events({"error": {"message": "x"}}, "[DONE]"))]), ErrorClass.SERVER_ERROR_IN_STREAM),
        (Play([(0.0, whole(429, b'{"error":{"message":"busy"}}'))]), ErrorClass.REJECTED),
        (Play([(0.0, whole(503, b"gone"))]), ErrorClass.REJECTED),
        (Play([(0.0, whole(401, b"{}"))]), ErrorClass.AUTH),
        (Play([(0.0, whole(404, b"{}"))]), ErrorClass.NOT_FOUND),
        (Play([(0.0, whole(307, b"", location="/x"))]), ErrorClass.HTTP_4XX),
        (Play([(0.0, whole(500, b"oops"))]), ErrorClass.HTTP_5XX),
        (Play([(0.0, whole(200, b"<html>hello</html>"))]), ErrorClass.MALFORMED),
    ],
)
def test_every_bad_end_has_its_class(play: Play, error: ErrorClass) -> None:
    record = ask(play)
    assert record.error is error, record.error_message
    assert record.error_message
    assert record.closed_s is not None


def test_a_stream_that_ends_after_done_without_its_last_chunk_is_a_success() -> None:
    check_success(ask(streamed([(0.0, STREAM)], end=End.FIN)))


def test_partial_tokens_before_a_reset_are_kept_in_the_record() -> None:
    record = ask(streamed([(0.0, events(content("a"), content("b")))], end=End.RESET))
    assert record.kinds == "cc"
    assert not record.ok


def test_a_silent_server_meets_the_deadline() -> None:
    record = ask(Play([], End.HANG), settings=ClientSettings(timeout_s=0.15))
    assert record.error is ErrorClass.TIMEOUT
    assert record.closed_s == pytest.approx(0.15, abs=0.1)
    stalled = streamed([(0.0, events(content("a")))], end=End.HANG)
    assert ask(stalled, settings=ClientSettings(timeout_s=0.15)).error is ErrorClass.TIMEOUT


def test_a_whole_body_where_a_stream_was_asked() -> None:
    body = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}
    record = ask(Play([(0.0, whole(200, msgspec.json.encode(body)))]))
    assert record.ok
    assert record.kinds == Kind.BODY
    assert record.token_rows() == []


def test_refused_connections_and_unknown_hosts() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        record = asyncio.run(measure_once(Target(url=f"http://127.0.0.1:{unused.getsockname()[1]}")))
    assert record.error is ErrorClass.CONNECT
    assert record.dispatched_s is not None


def test_retries_count_inside_the_users_latency_and_every_attempt_is_kept() -> None:
    answers = iter([whole(429, b"{}", retry_after="0.2"), whole(503, b"{}"), None])

    def handler(request: MockRequest) -> Play:
        answer = next(answers)
        return streamed([(0.0, STREAM)]) if answer is None else Play([(0.0, answer)])

    record = ask(handler, settings=ClientSettings(retries=3, retry_cap_s=0.3))
    check_success(record)
    assert [(a.status, a.error, a.retry_after_s) for a in record.attempts] == [
        (429, ErrorClass.REJECTED, 0.2),
        (503, ErrorClass.REJECTED, None),
    ]
    assert record.attempts[1].waited_s == 0.3  # two seconds' backoff would be over the cap
    assert record.row_s(0) - record.scheduled_s >= 0.5
    assert record.attempts[1].dispatched_s - record.attempts[0].ended_s >= 0.2
    assert record.dispatched_s is not None
    assert record.dispatched_s < 0.2


def test_retries_are_off_by_default_and_end() -> None:
    play = Play([(0.0, whole(429, b"{}", retry_after="0"))])
    assert ask(play).attempts == ()
    record = ask(play, settings=ClientSettings(retries=2))
    assert record.error is ErrorClass.REJECTED
    assert len(record.attempts) == 2


def test_the_deadline_ends_a_wait_for_a_retry() -> None:
    play = Play([(0.0, whole(429, b"{}", retry_after="30"))])
    record = ask(play, settings=ClientSettings(retries=1, timeout_s=0.2))
    assert record.error is ErrorClass.TIMEOUT
    assert len(record.attempts) == 1


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "-1"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "inf"}, None),
        (
            {"retry-after": "Wed, 21 Oct 2026 07:28:05 GMT", "date": "Wed, 21 Oct 2026 07:28:00 GMT"},
            5.0,
        ),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers) == seconds


def many(
    plays: Callable[[MockRequest], Play],
    due: Sequence[float],
    client_settings: ClientSettings,
    opened: int = 0,
) -> tuple[list[RequestRecord], MockServer, Client]:
    """Requests at these times through one client."""

    async def work() -> tuple[list[RequestRecord], MockServer, Client]:
        async with MockServer(plays) as server:
            endpoint = resolve(Target(url=server.url), "")
            alarm = Alarm(asyncio.get_running_loop())
            client = Client(endpoint, client_settings, alarm)
            await client.open(opened)
            client.t0 = clock() + 0.01
            records: list[RequestRecord] = []
            over = asyncio.Event()

            def done(record: RequestRecord) -> None:
                records.append(record)
                if len(records) == len(due):
                    over.set()

            def submit(i: int) -> None:
                client.submit(Job(due[i], b"{}", {"id": f"r{i}", "index": i}), done)

            for i, at in enumerate(due):
                alarm.at(client.t0 + at, lambda i=i: submit(i))  # type: ignore[misc]
            await asyncio.wait_for(over.wait(), 20)
            await client.close()
            alarm.close()
            return sorted(records, key=lambda r: r.index), server, client

    return asyncio.run(work())


def test_the_caps_wait_is_inside_the_latency() -> None:
    slow = streamed([(0.1, STREAM)])
    records, _, _ = many(lambda request: slow, [0.0] * 3, ClientSettings(max_concurrency=1))
    ends = [(r.closed_s or 0) - r.scheduled_s for r in records]
    waits = [r.cap_wait_s for r in records]
    assert waits[0] == 0
    assert waits[1] >= 0.1
    assert waits[2] >= 0.2
    assert ends[2] >= 0.3
    for record in records:
        assert record.dispatched_s is not None
        assert record.dispatched_s - record.scheduled_s >= record.cap_wait_s


def test_opened_connections_are_used_and_kept() -> None:
    fast = streamed([(0.0, STREAM)])
    records, server, client = many(lambda request: fast, [i * 0.01 for i in range(20)], ClientSettings(), opened=4)
    assert all(r.ok for r in records)
    assert server.accepted == client.opened
    assert client.opened < 20
    assert records[0].connected_s is None


def test_a_connection_the_server_closed_while_idle_costs_no_request() -> None:
    """A keep-alive that ran out is the connection's affair: the request goes out again on a new one."""
    count = 0

    def handler(request: MockRequest) -> Play:
        nonlocal count
        count += 1
        return streamed([(0.0, STREAM)]) if count != 2 else Play([], End.FIN)  # closed just as the second was sent

    records, server, _ = many(handler, [0.0, 0.1], ClientSettings())
    assert [r.error for r in records] == [None, None]
    assert server.accepted == 2
    assert records[1].connected_s is not None


def test_stopping_records_what_runs_as_cancelled_and_nothing_of_what_waits() -> None:
    async def work() -> list[RequestRecord]:
        async with MockServer(constant(Play([], End.HANG))) as server:
            alarm = Alarm(asyncio.get_running_loop())
            client = Client(resolve(Target(url=server.url), ""), ClientSettings(max_concurrency=2), alarm, t0=clock())
            records: list[RequestRecord] = []
            for i in range(5):
                client.submit(Job(0.0, b"{}", {"id": f"r{i}", "index": i}), records.append)
            await asyncio.sleep(0.05)
            await client.close()
            alarm.close()
            return records

    records = asyncio.run(work())
    assert [r.error for r in records] == [ErrorClass.CANCELLED] * 2


def test_the_key_reaches_the_server_and_no_record() -> None:
    key = "sk-very-secret-0123456789"
    seen: list[str] = []

    def handler(request: MockRequest) -> Play:
        seen.append(request.headers.get("authorization", ""))
        return Play([(0.0, whole(401, msgspec.json.encode({"error": {"message": f"bad key {key}"}})))])

    record = ask(handler, key=key)
    assert seen == [f"Bearer {key}"]
    assert key not in msgspec.json.encode(record).decode()
    assert "***" in record.error_message


def test_https_with_a_private_ca(tmp_path: Path) -> None:
    certificate, key_file = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key_file)

    async def work(**target: Any) -> RequestRecord:
        async with MockServer(constant(streamed([(0.0, STREAM)])), tls=context) as server:
            return await measure_once(Target(url=server.url, **target))

    check_success(asyncio.run(work(ca_file=str(certificate))))
    check_success(asyncio.run(work(verify_tls=False)))
    record = asyncio.run(work())
    assert record.error is ErrorClass.TLS
    assert "certificate" in record.error_message


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, made by the openssl command."""
    import shutil
    import subprocess

    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_every_endpoint_of_the_mock(endpoint: str, stream: bool) -> None:
    async def work() -> RequestRecord:
        async with MockServer(MockApi(MockConfig(ttft_ms=20, itl_ms=5))) as server:
            target = Target(url=server.url, endpoint=endpoint, stream=stream, model="mock")
            return await measure_once(target, prompt="one two three", max_tokens=6, forced=True)

    record = asyncio.run(work())
    assert record.ok, record.error_message
    assert record.usage is not None
    assert record.usage.prompt_tokens == (10 if endpoint == "chat" else 3)
    assert record.usage.completion_tokens == 6
    assert len(record.token_rows()) == (6 if stream else 0)
