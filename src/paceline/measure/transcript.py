"""What a response said: from event payloads to the rows of a record, and whether it counts as a success.

Knows the OpenAI shapes (chat and plain completions, streamed or whole) and tolerates everything around them: vendor
events, empty deltas, usage anywhere. No sockets and no clock here; reads are ordinals.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from paceline.measure.records import ErrorClass, Kind, Usage
from paceline.measure.sse import Event, SSEParser

_strict = msgspec.json.Decoder().decode
_HIGH_SURROGATES = ("\ud800", "\udbff")
_VISIBLE = {"content": Kind.CONTENT, "refusal": Kind.REFUSAL, "text": Kind.TEXT}
_REASONING = ("reasoning_content", "reasoning", "thinking")

MOST_TOKENS = 10_000_000  # of one request: beyond any context that is


class Transcript:
    """Collects one response body. Feed bytes with their read's ordinal, then `finish`."""

    def __init__(self, *, streaming: bool, keep_text: bool = True) -> None:
        self.streaming = streaming  # by the response's content type, not by what was asked
        self.kinds: list[str] = []
        self.row_reads: list[int] = []
        self.row_chars: list[int] = []
        self.row_tokens: list[int | None] = []
        self.row_events: list[int] = []
        self.row_choices: list[int] = []
        self.texts: list[str] | None = [] if keep_text else None
        self.usage: Usage | None = None
        self.finish_reasons: dict[int, str] = {}
        self.done = False
        self.error: ErrorClass | None = None
        self.error_message = ""
        self.response_id = ""
        self._sse = SSEParser()
        self._body: list[bytes] = []
        self._events = 0
        self._completion: int | None = None  # the running count so far
        self._last_read = 0
        self._halves: dict[int, str] = {}  # choice -> the first half of a character, waiting for the second

    @property
    def comments(self) -> int:
        return self._sse.comments

    @property
    def text(self) -> str | None:
        return None if self.texts is None else "".join(self.texts)

    def feed(self, data: bytes, read: int) -> None:
        """Body bytes (decoded of any content encoding) that came with network read `read`."""
        self._last_read = read
        if not self.streaming:
            self._body.append(data)
            return
        for event in self._sse.feed(data, read):
            self.take(event)

    def finish(self) -> None:
        """The body ended, however it did."""
        if self.streaming:
            for event in self._sse.close():
                self.take(event, cut=True)
        else:
            self._whole(b"".join(self._body))

    def take(self, event: Event, cut: bool = False) -> None:
        """One event of the stream. `cut`: its blank line never came, so broken JSON means a stream cut short."""
        data = event.data.strip()
        if not data:
            return
        ordinal = self._events
        self._events += 1
        if data == b"[DONE]":
            self.done = True
            self._row(Kind.DONE, event.read, ordinal)
            return
        try:
            payload = decode(data)
        except ValueError:
            if cut:
                self._fail(ErrorClass.TRUNCATED, "the stream ended inside an event")
                self._row(Kind.ERROR, event.read, ordinal)
            elif event.name in ("", "message"):
                self._fail(ErrorClass.MALFORMED, f"an event is not JSON: {data[:80]!r}")
                self._row(Kind.ERROR, event.read, ordinal)
            else:
                self._row(Kind.OTHER, event.read, ordinal)
            return
        if not isinstance(payload, dict):
            self._row(Kind.OTHER, event.read, ordinal)
            return
        problem = error_in(payload, event.name)
        if problem is not None:
            self._fail(ErrorClass.SERVER_ERROR_IN_STREAM, problem)
            self._row(Kind.ERROR, event.read, ordinal)
            return
        self._payload(payload, event.read, ordinal)

    def _payload(self, payload: dict[str, Any], read: int, ordinal: int) -> None:
        if not self.response_id and isinstance(payload.get("id"), str):
            self.response_id = whole_characters(payload["id"])
        choices = payload.get("choices")
        choices = [c for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []
        usage = usage_in(payload)
        grown = self._take_usage(usage, choices) if usage is not None else 0
        if not choices:
            self._row(Kind.USAGE if usage is not None else Kind.OTHER, read, ordinal)
            return
        alone = len(choices) == 1
        for choice in choices:
            self._choice(choice, read, ordinal, grown if alone else None)

    def _take_usage(self, usage: Usage, choices: list[dict[str, Any]]) -> int:
        """Keep the counts; by how many tokens a *running* count grew. A total that first comes at the end is none."""
        before, now = self._completion, usage.completion_tokens
        self.usage = usage if self.usage is None else _merge(self.usage, usage)
        if now is None or not choices:
            return 0
        self._completion = now
        if before is None:
            return 0 if any(c.get("finish_reason") for c in choices) else now
        return max(0, now - before)

    def _choice(self, choice: dict[str, Any], read: int, ordinal: int, grown: int | None) -> None:
        index = choice.get("index")
        index = index if isinstance(index, int) else 0
        kind, text = channel_of(choice)
        reason = choice.get("finish_reason")
        if reason:
            self.finish_reasons[index] = whole_characters(str(reason))
        counted = tokens_told(choice)
        if not kind:
            kind = Kind.GROWN if grown else Kind.FINISH if reason else Kind.ROLE
        tokens = None
        if kind in Kind.TOKENS:
            tokens = counted or grown or None
        self._row(kind, read, ordinal, index, text, tokens)

    def _whole(self, body: bytes) -> None:
        """A body that is not a stream. It has no first token: all of it came at once, after all was done."""
        try:
            payload = decode(body)
        except ValueError:
            self._fail(ErrorClass.MALFORMED, f"the body is not JSON: {body[:80]!r}" if body else "the body is empty")
            return
        problem = error_in(payload, "") if isinstance(payload, dict) else "the body is not a JSON object"
        if problem is not None:
            self._fail(
                ErrorClass.SERVER_ERROR_IN_STREAM if isinstance(payload, dict) else ErrorClass.MALFORMED, problem
            )
            return
        if not isinstance(payload.get("choices"), list):
            self._fail(ErrorClass.MALFORMED, "the body has no choices: not an OpenAI-compatible answer")
            return
        self.usage = usage_in(payload)
        self.response_id = whole_characters(payload["id"]) if isinstance(payload.get("id"), str) else ""
        self.done = True
        for choice in payload["choices"]:
            if isinstance(choice, dict):
                index = choice["index"] if isinstance(choice.get("index"), int) else 0
                if choice.get("finish_reason"):
                    self.finish_reasons[index] = whole_characters(str(choice["finish_reason"]))
                self._row(Kind.BODY, self._last_read, 0, index, channel_of(choice)[1])

    def _row(
        self, kind: str, read: int, ordinal: int, choice: int = 0, text: str = "", tokens: int | None = None
    ) -> None:
        if choice in self._halves or not text.isascii():
            text = self._mended(text, choice)
        self.kinds.append(kind)
        self.row_reads.append(read)
        self.row_chars.append(len(text))
        self.row_tokens.append(tokens)
        self.row_events.append(ordinal)
        self.row_choices.append(choice)
        if text and self.texts is not None:
            self.texts.append(text)

    def _mended(self, text: str, choice: int) -> str:
        """Text without half characters: a pair of surrogates that was cut between two events goes to the later one."""
        text = self._halves.pop(choice, "") + text
        if text and _HIGH_SURROGATES[0] <= text[-1] <= _HIGH_SURROGATES[1]:
            self._halves[choice] = text[-1]
            text = text[:-1]
        return whole_characters(text)

    def _fail(self, error: ErrorClass, message: str) -> None:
        if self.error is None:
            self.error = error
            self.error_message = whole_characters(message)

    def verdict(self, *, choices: int, forced: int | None) -> tuple[ErrorClass | None, str]:
        """Success or the first thing that went wrong, for a body that ended cleanly with a 2xx status.

        `choices` were asked for; `forced` is the output length that the server was told to deliver, if it was.
        """
        if self.error is not None:
            return self.error, self.error_message
        if not self.done and len(self.finish_reasons) < choices:
            return ErrorClass.TRUNCATED, "the stream ended without a finish reason or [DONE]"
        if forced is not None:
            told = self.usage.completion_tokens if self.usage else None
            if told is not None and told < forced * choices:
                return ErrorClass.SHORT, f"{told} of {forced * choices} forced tokens"
            if told is None and "stop" in self.finish_reasons.values():
                return ErrorClass.SHORT, f"stopped before the forced {forced} tokens"
        return None, ""

    def columns(self) -> dict[str, Any]:
        """The record's row columns; those that say nothing are ()."""
        plain_events = self.row_events == list(range(len(self.kinds)))
        return {
            "kinds": "".join(self.kinds),
            "row_reads": tuple(self.row_reads),
            "row_chars": tuple(self.row_chars),
            "row_tokens": tuple(self.row_tokens) if any(t is not None for t in self.row_tokens) else (),
            "row_events": () if plain_events else tuple(self.row_events),
            "row_choices": tuple(self.row_choices) if any(self.row_choices) else (),
            "text": self.text,
            "comments": self.comments,
            "usage": self.usage,
            "finish_reason": self.finish_reasons.get(0),
            "done_seen": self.done and self.streaming,
            "server_request_id": self.response_id[:80],
        }


def decode(data: bytes) -> Any:
    """JSON as servers send it. Raises ValueError for what is none.

    Strictly first, which is fast; then with what Python and JavaScript servers are known to emit: NaN and Infinity
    (logprobs), halves of surrogate pairs, control characters in strings.
    """
    try:
        return _strict(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            return json.loads(data.decode("utf-8", "replace"), strict=False)
        except RecursionError:
            raise ValueError("nested too deeply") from None


def whole_characters(text: str) -> str:
    """Text that can be written as UTF-8: surrogate pairs joined, lone halves replaced."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def channel_of(choice: dict[str, Any]) -> tuple[str, str]:
    """(kind, characters) of the generated tokens in one choice; ("", "") where it carries none."""
    text = choice.get("text")
    if isinstance(text, str) and text:
        return Kind.TEXT, text
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        delta = choice.get("message")
        if not isinstance(delta, dict):
            return "", ""
    content = delta.get("content")
    if (
        type(content) is str and content and (len(delta) == 1 or (len(delta) == 2 and "role" in delta))
    ):  # the usual event
        return Kind.CONTENT, content
    kinds: list[str] = []
    parts: list[str] = []
    for key in _REASONING:
        if piece := _text(delta.get(key)):
            kinds.append(Kind.REASONING)
            parts.append(piece)
            break  # some servers send the same reasoning under two names
    for key, kind in _VISIBLE.items():
        if piece := _text(delta.get(key)):
            kinds.append(kind)
            parts.append(piece)
    tools = _tool_text(delta)
    if tools is not None:
        kinds.append(Kind.TOOL)
        parts.append(tools)
    if not kinds:
        return "", ""
    if len(kinds) == 1:
        return kinds[0], parts[0]
    visible = any(kind in Kind.VISIBLE for kind in kinds)
    return (Kind.MULTI if visible else Kind.TOOL), "".join(parts)


def _text(value: Any) -> str:
    """A string, or the text of a list of content parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(p["text"] for p in value if isinstance(p, dict) and isinstance(p.get("text"), str))
    return ""


def _tool_text(delta: dict[str, Any]) -> str | None:
    """Names and arguments of tool calls; None where there is no call. A call with an id alone is one too."""
    calls = delta.get("tool_calls")
    calls = list(calls) if isinstance(calls, list) else []
    if isinstance(delta.get("function_call"), dict):
        calls.append({"function": delta["function_call"]})
    if not calls:
        return None
    parts = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            parts += [v for v in (function.get("name"), function.get("arguments")) if isinstance(v, str)]
    return "".join(parts)


def tokens_told(choice: dict[str, Any]) -> int | None:
    """How many tokens this choice's event holds, where token ids or logprobs tell."""
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        return len(ids)
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict):
        entries = logprobs.get("content")
        if not isinstance(entries, list):
            entries = logprobs.get("tokens")
        if isinstance(entries, list):
            return len(entries)
    return None


def error_in(payload: dict[str, Any], name: str) -> str | None:
    """The message of an error payload in any of the shapes servers use; None: it is no error."""
    error = payload.get("error")
    if error:
        if isinstance(error, dict):
            return str(error.get("message") or error)
        return str(error)
    if name == "error" or payload.get("object") == "error" or payload.get("type") == "error":
        return str(payload.get("message") or payload)
    return None


def usage_in(payload: dict[str, Any]) -> Usage | None:
    """The usage object, if there is one with a count in it."""
    usage = payload.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt, completion = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    if prompt is None and completion is None:
        return None
    prompt_details, details = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    cached = _count(prompt_details.get("cached_tokens")) if isinstance(prompt_details, dict) else None
    reasoning = _count(details.get("reasoning_tokens")) if isinstance(details, dict) else None
    return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached, reasoning_tokens=reasoning)


def _count(value: Any) -> int | None:
    """A count of tokens; what cannot be one is not told at all (gaps per token are kept, so it must stay sane)."""
    known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS
    return value if known else None


def _merge(old: Usage, new: Usage) -> Usage:
    """The newer counts where they are given."""
    return Usage(
        prompt_tokens=old.prompt_tokens if new.prompt_tokens is None else new.prompt_tokens,
        completion_tokens=old.completion_tokens if new.completion_tokens is None else new.completion_tokens,
        cached_tokens=old.cached_tokens if new.cached_tokens is None else new.cached_tokens,
        reasoning_tokens=old.reasoning_tokens if new.reasoning_tokens is None else new.reasoning_tokens,
    )
