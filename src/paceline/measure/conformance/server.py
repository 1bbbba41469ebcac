"""The pack as a server, for other clients.

    base URL     http://HOST:PORT/case/T03/v1      for a client with a free base URL
                 http://HOST:PORT/v1               with model "T03", for one without
    GET /cases                what there is, with the request that each case wants
    GET /expected/T03         the right values
    GET /received/T03         when its requests came and what they asked for
    GET /judged/T47           of a load case: its figures, from what was received

Answers of a case follow one another with its requests (429, then 200) and start again at the first after the last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline.measure.conformance.load import LoadCase, judge, load_load_cases
from paceline.measure.conformance.script import Case, load_cases, play
from paceline.measure.mock import LAST_CHUNK, MockRequest, Play, chunk, http_head, whole


@dataclass(slots=True)
class _Seen:
    next_answer: int = 0
    received: list[dict[str, Any]] = field(default_factory=list)


class ConformanceApi:
    """The handler of a MockServer. One instance is one server's state."""

    def __init__(self) -> None:
        self._cases = {case.id.lower(): case for case in load_cases()}
        self._loads = {case.id.lower(): case for case in load_load_cases()}
        self._seen: dict[str, _Seen] = {}

    def __call__(self, request: MockRequest) -> Play:
        parts = request.path.split("?")[0].strip("/").split("/")
        if parts == ["cases"]:
            return _json(200, [*map(_describe, self._cases.values()), *map(_describe_load, self._loads.values())])
        if parts[0] in ("expected", "received", "judged") and len(parts) == 2:
            return self._about(parts[0], parts[1].lower())
        if parts[0] == "case" and len(parts) > 2:
            return self._request(request, parts[1].lower(), parts[2:])
        return self._request(request, None, parts)

    def received(self, name: str) -> list[dict[str, Any]]:
        """The requests of one case so far, in the order they came."""
        return self._seen.setdefault(name.lower(), _Seen()).received

    def _about(self, what: str, name: str) -> Play:
        case: Case | LoadCase | None = self._cases.get(name) or self._loads.get(name)
        if case is None:
            return _error(404, f"no case {name}")
        if what == "expected":
            return _json(200, case.expect)
        if what == "received":
            return _json(200, self.received(name))
        if not isinstance(case, LoadCase):
            return _error(404, f"{case.id} is no load case; it is judged by what the client reports")
        return _json(200, judge(case, self.received(name)))

    def _request(self, request: MockRequest, name: str | None, path: list[str]) -> Play:
        if path == ["v1", "models"]:
            ids = [case.id for case in self._cases.values()] + [case.id for case in self._loads.values()]
            chosen = [{"id": i, "object": "model"} for i in ids if name is None or i.lower() == name]
            return _json(200, {"object": "list", "data": chosen})
        if path not in (["v1", "chat", "completions"], ["v1", "completions"]) or request.method != "POST":
            return _error(404, f"no such path {request.path}; GET /cases lists the cases")
        try:
            body = msgspec.json.decode(request.body)
        except msgspec.DecodeError:
            return _error(400, "the body is not JSON")
        name = name or (str(body.get("model", "")).lower() if isinstance(body, dict) else "")
        case = self._cases.get(name)
        if case is None and name not in self._loads:
            return _error(404, f"no case {name!r}; GET /cases lists the cases")
        seen = self._seen.setdefault(name, _Seen())
        seen.received.append({"at_s": request.at, "body": body})
        if case is None:
            return _one_token(self._loads[name].answer_ms, path, body)
        answer = case.answers[seen.next_answer % len(case.answers)]
        seen.next_answer += 1
        return play(answer)


def _one_token(after_ms: float, path: list[str], body: dict[str, Any]) -> Play:
    """The answer of a load case, streamed or whole, as it was asked for."""
    usage = {"prompt_tokens": len(repr(body).split()), "completion_tokens": 1}
    said: dict[str, Any] = (
        {"text": "a"} if path[-2] != "chat" else {"delta" if body.get("stream") else "message": _SAID}
    )
    choice = {"index": 0, "finish_reason": "length", **said}
    if not body.get("stream"):
        return Play([(after_ms / 1e3, whole(200, msgspec.json.encode({"choices": [choice], "usage": usage})))])
    events = b"".join(
        b"data: %b\n\n" % data
        for data in (
            msgspec.json.encode({"choices": [choice]}),
            msgspec.json.encode({"choices": [], "usage": usage}),
            b"[DONE]",
        )
    )
    return Play([(after_ms / 1e3, http_head() + chunk(events) + LAST_CHUNK)])


_SAID = {"role": "assistant", "content": "a"}


def _describe_load(case: LoadCase) -> dict[str, Any]:
    return {**msgspec.to_builtins(case), "group": "load"}


def _describe(case: Case) -> dict[str, Any]:
    asked = {"endpoint": case.ask.endpoint, "stream": case.ask.stream, "max_tokens": case.ask.max_tokens}
    if case.ask.choices > 1:
        asked["n"] = case.ask.choices
    if case.ask.forced:
        asked["ignore_eos"] = True
    client = {"timeout_ms": case.ask.timeout_ms, "retries": case.ask.retries, "retry_cap_ms": case.ask.retry_cap_ms}
    if case.ask.clock_step_s:
        client |= {"clock_step_s": case.ask.clock_step_s, "clock_step_ms": case.ask.clock_step_ms}
    return {
        "id": case.id, "group": case.group, "title": case.title, "why": case.why, "request": asked, "client": client,
        "expect": case.expect,
    }  # fmt: skip


def _json(status: int, value: Any) -> Play:
    return Play([(0.0, whole(status, msgspec.json.encode(value)))])


def _error(status: int, message: str) -> Play:
    return _json(status, {"error": {"message": message, "type": "invalid_request_error", "code": status}})
