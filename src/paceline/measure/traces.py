"""Trace files: when requests came, how long they were, what they shared.

    azure      CSV: TIMESTAMP,ContextTokens,GeneratedTokens (Azure LLM inference traces, 2023 and 2024)
    mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids (one per block of 512 tokens)
    sharegpt   JSON: [{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}, ...]
    jsonl      our own: one object a line with any of
               at_s | at_ms | timestamp (ms) | arrival_s | arrival_time (s); input_tokens | input_length;
               output_tokens | output_length; prompt | messages; hash_ids with block_tokens, or hash_ids_16;
               tenant; class; group

Times may be epoch times, start anywhere, be negative or out of order: they are sorted and re-based to 0. One that is
not a finite number is refused with its line.
"""

from __future__ import annotations

import csv
import datetime
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import ConfigError
from paceline.measure.plan import Trace

MOONCAKE_BLOCK = 512
_TIME_FIELDS = (("at_s", 1.0), ("arrival_s", 1.0), ("arrival_time", 1.0), ("at_ms", 1e-3), ("timestamp", 1e-3))


class TraceRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request (or conversation) of a trace. Times in seconds from the first; lengths in tokens."""

    at_s: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    blocks: tuple[int, ...] = ()  # equal leading ids mean an equal prefix of that many blocks
    block_tokens: int = MOONCAKE_BLOCK
    texts: tuple[str, ...] = ()  # user turns
    answers: tuple[str, ...] = ()  # reference answers, for their lengths only
    messages: str = ""  # a whole chat as JSON
    tenant: str = ""
    traffic_class: str = ""
    group: str = ""


def load_trace(trace: Trace) -> list[TraceRow]:
    """All rows in order of time, re-based and scaled. Raises ConfigError: missing, malformed or empty file."""
    path = Path(trace.path)
    try:
        form = _detect(path) if trace.format == "auto" else trace.format
        read = _READERS.get(form)
        if read is None:
            raise ConfigError(f"unknown trace format {form!r}: use {', '.join(_READERS)} or auto")
        rows = list(read(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the trace {path}: {reason}") from None
    if not rows:
        raise ConfigError(f"the trace {path} is empty")
    rows = _rebase(rows, trace.speed, path)
    rows = rows[trace.skip :][: trace.limit]
    if not rows:
        raise ConfigError(f"nothing is left of the trace {path} after skip {trace.skip} and limit {trace.limit}")
    return _rebase(rows, 1.0, path) if trace.skip else rows


def _rebase(rows: list[TraceRow], speed: float, path: Path) -> list[TraceRow]:
    """Sort by time and let the first be 0."""
    timed = [row.at_s for row in rows if row.at_s is not None]
    if not timed:
        return rows
    if len(timed) < len(rows):
        raise ConfigError(f"{path}: some rows have a time and some have none")
    first = min(timed)
    rows = sorted(rows, key=lambda row: row.at_s or 0.0)
    return [msgspec.structs.replace(row, at_s=((row.at_s or 0.0) - first) / speed) for row in rows]


def _detect(path: Path) -> str:
    """Which format a file looks like, by its first bytes."""
    with path.open("rb") as file:
        start = file.read(65536).lstrip(b"\xef\xbb\xbf \t\r\n")
    line = start.split(b"\n", 1)[0]
    if line.lower().startswith(b"timestamp,"):
        return "azure"
    if start.startswith(b"["):
        return "sharegpt"
    if start.startswith(b"{"):
        return "mooncake" if b'"hash_ids"' in line and b'"timestamp"' in line else "jsonl"
    if not start:
        raise ConfigError(f"the trace {path} is empty")
    raise ConfigError(f"cannot tell the format of {path}: it is no Azure CSV, JSON lines or ShareGPT JSON")


def _azure(path: Path) -> Iterator[TraceRow]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                yield TraceRow(
                    at_s=_timestamp(row["TIMESTAMP"]),
                    input_tokens=_tokens(int(row["ContextTokens"])),
                    output_tokens=_tokens(int(row["GeneratedTokens"])),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{path}:{number}: not an Azure trace row: {error}") from None


def _timestamp(text: str) -> float:
    """ISO date and time with up to nine decimals, with or without a zone, as seconds."""
    head, dot, rest = text.strip().partition(".")
    digits = "".join(itertools.takewhile(str.isdigit, rest))
    moment = datetime.datetime.fromisoformat(head + rest[len(digits) :])
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.timestamp() + (float(f"0.{digits}") if dot and digits else 0.0)


def _lines(path: Path, convert: Callable[[dict[str, Any]], TraceRow]) -> Iterator[TraceRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf").strip()
            if not line:
                continue
            try:
                values = msgspec.json.decode(line)
                if not isinstance(values, dict):
                    raise ValueError("not an object")
                row = convert(values)
            except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
                reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
                raise ConfigError(f"{path}:{number}: not a trace row: {reason}") from None
            yield row


def _mooncake(path: Path) -> Iterator[TraceRow]:
    def convert(values: dict[str, Any]) -> TraceRow:
        return TraceRow(
            at_s=_finite(values["timestamp"]) / 1e3,
            input_tokens=_tokens(values["input_length"]),
            output_tokens=_tokens(values["output_length"]),
            blocks=tuple(int(block) for block in values["hash_ids"]),
        )

    return _lines(path, convert)


def _own(path: Path) -> Iterator[TraceRow]:
    def convert(values: dict[str, Any]) -> TraceRow:
        at = next((_finite(values[name]) * unit for name, unit in _TIME_FIELDS if values.get(name) is not None), None)
        wanted = values.get("input_tokens", values.get("input_length"))
        output = values.get("output_tokens", values.get("output_length"))
        blocks, size = values.get("hash_ids"), values.get("block_tokens", MOONCAKE_BLOCK)
        if blocks is None and "hash_ids_16" in values:
            blocks, size = values["hash_ids_16"], 16
        prompt, messages = values.get("prompt"), values.get("messages")
        if wanted is None and prompt is None and messages is None:
            raise ValueError("neither a prompt nor an input length")
        return TraceRow(
            at_s=at,
            input_tokens=None if wanted is None else _tokens(wanted),
            output_tokens=None if output is None else _tokens(output),
            blocks=tuple(int(block) for block in blocks or ()),
            block_tokens=_tokens(size),
            texts=() if prompt is None else (str(prompt),),
            messages="" if messages is None else msgspec.json.encode(messages).decode(),
            tenant=str(values.get("tenant", "")),
            traffic_class=str(values.get("class", "")),
            group=str(values.get("group", "")),
        )

    return _lines(path, convert)


def _sharegpt(path: Path) -> Iterator[TraceRow]:
    try:
        entries = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: not a ShareGPT file: its top level is no list")
    for number, entry in enumerate(entries):
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise ConfigError(f"{path}: entry {number} has no list of conversations")
        said = [(str(turn.get("from", "")), str(turn.get("value", ""))) for turn in turns]
        while said and said[0][0] not in ("human", "user"):
            said.pop(0)  # a system line, or an answer whose question was cut off
        texts = tuple(value for who, value in said if who in ("human", "user"))
        answers = tuple(value for who, value in said if who not in ("human", "user"))
        if texts and texts[0].strip() and answers:
            yield TraceRow(texts=texts[: len(answers)], answers=answers[: len(texts)])


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the time {value!r} is not finite")
    return number


def _tokens(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a number of tokens")
    return value


_READERS: dict[str, Callable[[Path], Iterator[TraceRow]]] = {
    "azure": _azure,
    "mooncake": _mooncake,
    "sharegpt": _sharegpt,
    "jsonl": _own,
}
