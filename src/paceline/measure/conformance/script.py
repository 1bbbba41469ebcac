"""Cases as data, and the exact bytes and times that play them.

A case has answers, one for each attempt of its one request. An answer is a list of steps `[ms, piece, ...]`: at that
time after the request came in, the pieces are written in one go. A piece is a string (raw bytes of the body) or one of

    {"text": "a"}             a chat chunk with that content; more keys go into the choice ("finish_reason", "index")
    {"delta": {...}}          a chat chunk with that delta
    {"json": {...}}           an event with that payload
    {"role": "assistant"}     a chunk that opens the message and carries nothing
    {"finish": "stop"}        a chunk with a finish reason and an empty delta
    {"usage": [p, c]}         `choices: []` and that usage
    {"done": true}            data: [DONE]
    {"hex": "c3"}             raw bytes
    {"fill": 1000}            a chat chunk of that many bytes, all in its logprobs
"""

from __future__ import annotations

import zlib
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from paceline.errors import ConfigError
from paceline.measure.mock import LAST_CHUNK, End, Play, chunk, http_head


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One HTTP response. Times in milliseconds after the request came in."""

    steps: list[list[Any]] = []
    status: int = 200
    content_type: str = "text/event-stream"
    headers: dict[str, str] = {}
    head_ms: float | None = None  # None: with the first step
    newline: str = "\n"  # of generated events
    space: str = " "  # between `data:` and the payload of generated events
    framing: str = "chunked"  # chunked | close | length | none (no response at all)
    piece_bytes: int = 0  # with `chunked`: cut the body into HTTP chunks of this size, whatever the events
    extension: str = ""  # with `chunked`: of every HTTP chunk
    trailer: str = ""  # with `chunked`: a header after the last chunk
    gzip: bool = False
    version: str = "1.1"  # of HTTP
    interim: int = 0  # an informational status that comes first
    end: End = End.KEEP  # keep | fin | reset | hang
    end_ms: float | None = None
    unterminated: bool = False  # with `chunked`: no last chunk


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the client is told to request."""

    endpoint: str = "chat"  # chat | completions
    stream: bool = True
    max_tokens: int = 64
    choices: int = 1
    forced: bool = False  # ignore_eos: exactly max_tokens are wanted
    timeout_ms: float = 10_000.0
    retries: int = 0
    retry_cap_ms: float = 60_000.0
    clock_step_s: float = 0.0  # the client's wall clock is moved by this,
    clock_step_ms: float = 0.0  # so long after the request was sent


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One hard input and the right values for it. `expect`: see check.py for the keys."""

    id: str
    title: str
    expect: dict[str, Any]
    why: str = ""
    group: str = ""
    ask: Ask = Ask()
    answers: list[Answer]


@cache
def load_cases() -> tuple[Case, ...]:
    """All streamed cases of the pack, in the order of their files. Raises ConfigError for a broken file."""
    cases: list[Case] = []
    folder = files("paceline.measure.conformance") / "cases"
    for group in ("wire", "framing", "vendors", "tokens", "endings"):
        raw = (folder / f"{group}.json").read_bytes()
        try:
            cases += [msgspec.structs.replace(case, group=group) for case in msgspec.json.decode(raw, type=list[Case])]
        except msgspec.DecodeError as error:
            raise ConfigError(f"conformance case file {group}.json: {error}") from None
    names = [case.id for case in cases]
    assert len(set(names)) == len(names), "case ids are unique"
    return tuple(cases)


def choose(ids: list[str]) -> list[Case]:
    """Cases by id, any letter case; all for an empty list. ConfigError names an unknown one."""
    by_id = {case.id.lower(): case for case in load_cases()}
    for name in ids:
        if name.lower() not in by_id:
            raise ConfigError(f"no conformance case {name!r}; `--list` shows them")
    return [by_id[name.lower()] for name in ids] or list(by_id.values())


def body_steps(answer: Answer) -> list[tuple[float, bytes]]:
    """(milliseconds, body bytes) before any content coding and HTTP framing."""
    return [(float(step[0]), b"".join(_piece(piece, answer) for piece in step[1:])) for step in answer.steps]


def _piece(piece: Any, answer: Answer) -> bytes:
    if isinstance(piece, str):
        return piece.encode()
    if "hex" in piece:
        return bytes.fromhex(piece["hex"])
    if "done" in piece:
        return _event(b"[DONE]", answer)
    return _event(msgspec.json.encode(_payload(piece)), answer)


def _event(payload: bytes, answer: Answer) -> bytes:
    newline = answer.newline.encode()
    return b"data:" + answer.space.encode() + payload + newline + newline


def _payload(piece: dict[str, Any]) -> dict[str, Any]:
    if "json" in piece:
        payload: dict[str, Any] = piece["json"]
        return payload
    if "usage" in piece:
        prompt, completion = piece["usage"]
        return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}
    if "role" in piece:
        return {"choices": [{"index": 0, "delta": {"role": piece["role"], "content": ""}}]}
    if "finish" in piece:
        return {"choices": [{"index": 0, "delta": {}, "finish_reason": piece["finish"]}]}
    if "fill" in piece:
        top = [{"token": "x", "logprob": -1.0}] * (piece["fill"] // 32)
        entry = {"token": "a", "logprob": -0.1, "top_logprobs": top}
        return {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [entry]}}]}
    more = {key: value for key, value in piece.items() if key not in ("text", "delta", "usage_too")}
    delta = piece["delta"] if "delta" in piece else {"content": piece["text"]}
    payload = {"choices": [{"index": 0, "delta": delta, **more}]}
    if "usage_too" in piece:
        prompt, completion = piece["usage_too"]
        payload["usage"] = {"prompt_tokens": prompt, "completion_tokens": completion}
    return payload


def wire_steps(answer: Answer) -> list[tuple[float, bytes]]:
    """(milliseconds, bytes on the wire), head and framing included."""
    body = body_steps(answer)
    if answer.gzip:
        body = _compressed(body, whole=not answer.unterminated)
    if answer.framing == "none":
        return []
    first = body[0][0] if body else 0.0
    head = _head(answer, sum(len(data) for _, data in body))
    steps = [(answer.head_ms if answer.head_ms is not None else first, head)]
    if answer.framing != "chunked":
        steps += body
        return steps
    steps += [(at, _chunks(data, answer)) for at, data in body]
    if not answer.unterminated:
        last = steps[-1][0] if answer.end_ms is None else answer.end_ms
        end = b"0\r\n%b\r\n\r\n" % answer.trailer.encode() if answer.trailer else LAST_CHUNK
        steps.append((last, end))
    return steps


def _compressed(body: list[tuple[float, bytes]], whole: bool) -> list[tuple[float, bytes]]:
    """One gzip stream, flushed after each step so that its bytes can be read at once; not `whole`: without its end."""
    packer = zlib.compressobj(wbits=31)
    steps = [(at, packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH)) for at, data in body]
    if whole:
        at, data = steps[-1]
        steps[-1] = (at, data + packer.flush())
    return steps


def _head(answer: Answer, length: int) -> bytes:
    more = {name.replace("-", "_"): value for name, value in answer.headers.items()}
    if answer.gzip:
        more["content_encoding"] = "gzip"
    if answer.framing == "length":
        more["content_length"] = str(length)
    if answer.framing == "close":
        more["connection"] = "close"
    before = f"HTTP/1.1 {answer.interim} Interim\r\nx-interim: 1\r\n\r\n".encode() if answer.interim else b""
    head = http_head(answer.status, answer.content_type, chunked=answer.framing == "chunked", **more)
    return before + head.replace(b"HTTP/1.1", b"HTTP/" + answer.version.encode(), 1)


def _chunks(data: bytes, answer: Answer) -> bytes:
    size = answer.piece_bytes or len(data)
    pieces = [data[i : i + size] for i in range(0, len(data), size)] if size else []
    if not answer.extension:
        return b"".join(chunk(piece) for piece in pieces)
    extension = answer.extension.encode()
    return b"".join(b"%x;%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)


def play(answer: Answer, name: str = "") -> Play:
    """The answer as the mock server plays it."""
    merged: list[tuple[float, bytes]] = []
    for at, data in wire_steps(answer):
        # What is due at one moment leaves in one write, so that it can arrive in one read.
        if merged and merged[-1][0] == at / 1e3:
            merged[-1] = (merged[-1][0], merged[-1][1] + data)
        else:
            merged.append((at / 1e3, data))
    end_s = None if answer.end_ms is None else answer.end_ms / 1e3
    return Play(merged, answer.end, end_s, name)
