"""A recorded call log of a real engine, as traffic for a simulated one.

traffic = recorded("calls.jsonl")
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.core.calllog import read_calls, spec_from_row
from paceline.core.step import RequestSpec
from paceline.errors import ConfigError
from paceline.simulate.backend import STOP
from paceline.simulate.traffic import Arrival, ListTraffic

_HEAD = b'{"log":'


def is_call_log(path: str | Path) -> bool:
    """Whether a file begins like a call log. False for one that cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_HEAD)) == _HEAD
    except OSError:
        return False


@dataclass(slots=True)
class _Asked:
    spec: RequestSpec
    sent_s: float
    answer: list[int] = field(default_factory=list)


def recorded(path: str | Path, *, speed: float = 1.0, skip: int = 0, limit: int | None = None) -> ListTraffic:
    """What an engine was asked, and the answers that it gave: prompts, times and prefix hits are as they were.

    The warm-up is left out, and so are requests that were refused or ended without a token. One that was cancelled ends
    where it was cancelled. The first request is sent at 0, the others `speed` times as fast as they were; `skip` and
    `limit` choose among them. Raises ConfigError for a log that cannot be used.
    """
    asked: list[_Asked] = []
    latest: dict[str, _Asked] = {}
    rows: dict[int, list[str]] = {}
    number = 1
    try:
        _, calls = read_calls(path)
        for number, call in enumerate(calls, start=2):  # noqa: B007  the line, for the message below
            match call["call"]:
                case "submit" if call["accepted"]:
                    spec = spec_from_row(call["spec"])
                    latest[spec.request_id] = _Asked(spec, call["now"] if spec.sent_s is None else spec.sent_s)
                    asked.append(latest[spec.request_id])
                case "plan" if call["plan"] is not None:
                    rows[call["plan"]["step"]] = call["plan"]["ids"]
                case "commit":
                    for name, tokens in zip(rows.pop(call["step"]), call["tokens"], strict=True):
                        latest[name].answer += tokens
                case "start_over":
                    asked.clear()
                case _:
                    pass
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}:{number}: not a line of a call log: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the call log {path}: {error.strerror}") from None
    heard = sorted((one for one in asked if one.answer), key=lambda one: one.sent_s)[skip:][:limit]
    if not heard:
        raise ConfigError(f"the call log {path} holds no answered request")
    first_s = heard[0].sent_s
    return ListTraffic(_arrival(one, index, (one.sent_s - first_s) / speed) for index, one in enumerate(heard))


def _arrival(asked: _Asked, index: int, at_s: float) -> Arrival:
    """The request again, under an id of its own, ending with the answer's last token."""
    spec, answer = asked.spec, tuple(asked.answer)
    sampling = spec.sampling
    if len(answer) < sampling.max_tokens and answer[-1] not in sampling.stop_token_ids:
        # It ended by a stop string, or was cancelled, or the log ends before it did.
        answer = (*answer[:-1], STOP)
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, STOP))
    return Arrival(
        at_s=at_s,
        spec=replace(spec, request_id=f"r{index}", sampling=sampling, sent_s=at_s),
        output_tokens=len(answer),
        answer=answer,
        index=index,
    )
