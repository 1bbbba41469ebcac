"""Trace files: when requests came, how long they were, what they shared.

    azure      CSV: TIMESTAMP,ContextTokens,GeneratedTokens (Azure LLM inference traces, 2023 and 2024)
    mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids (one per block of 512 tokens)
    sharegpt   JSON: [{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}, ...]
    jsonl      our own: one object a line with any of
               at_s | at_ms | timestamp (ms) | arrival_s | arrival_time (s); input_tokens | input_length;
               output_tokens | output_length; prompt | messages; hash_ids with block_tokens, or hash_ids_16;
               tenant; class; group

Times may be epoch times, start anywhere, be negative or out of order: they are sorted and re-based to 0. A row that
cannot be what it says is refused with its line, the column and what that may hold: a time that is not finite, an answer
of no token, hash_ids that are not one a block of the prompt.
"""

from __future__ import annotations

import csv
import datetime
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import ConfigError
from paceline.measure.plan import Trace

MOONCAKE_BLOCK = 512
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
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


def load_trace(trace: Trace, classes: Collection[str] | None = None) -> list[TraceRow]:
    """All rows in order of time, re-based and scaled. Raises ConfigError: missing, malformed or empty file.

    `classes` are those that there are; None where nobody knows them, as for a server that somebody else set up.
    """
    path = Path(trace.path)
    try:
        form = _detect(path) if trace.format == "auto" else trace.format
        read = _READERS.get(form)
        if read is None:
            raise ConfigError(f"unknown trace format {form!r}: use {', '.join(_READERS)} or auto")
        rows = list(read(path, classes))
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


def _azure(path: Path, classes: Collection[str] | None) -> Iterator[TraceRow]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        if missing := [name for name in _AZURE_COLUMNS if name not in (reader.fieldnames or ())]:
            raise ConfigError(
                f"{path}:1: column {missing[0]} is missing; an Azure trace has the columns {', '.join(_AZURE_COLUMNS)}"
            )
        for number, row in enumerate(reader, start=2):
            try:
                yield TraceRow(
                    at_s=_timestamp(row["TIMESTAMP"]),
                    input_tokens=_tokens("column ContextTokens", _whole(row["ContextTokens"])),
                    output_tokens=_tokens("column GeneratedTokens", _whole(row["GeneratedTokens"]), least=1),
                )
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: {error}") from None


def _whole(text: str | None) -> object:
    """The number in a cell of a CSV file, or what else is there; None where the row ends before it."""
    text = None if text is None else text.strip()
    try:
        return int(text or "")
    except ValueError:
        return text


def _timestamp(text: str) -> float:
    """ISO date and time with up to nine decimals, with or without a zone, as seconds."""
    head, dot, rest = text.strip().partition(".")
    digits = "".join(itertools.takewhile(str.isdigit, rest))
    try:
        moment = datetime.datetime.fromisoformat(head + rest[len(digits) :])
    except ValueError:
        raise ValueError(
            f"column TIMESTAMP is {text[:64]!r}; it must be a date and time such as 2023-11-16 18:15:46.6805900"
        ) from None
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
                row = convert(_object(line))
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: {error}") from None
            yield row


def _object(line: bytes) -> dict[str, Any]:
    try:
        values = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        place = re.search(r"byte (\d+)", str(error))
        where = f" (from byte {place[1]} on)" if place else ""
        raise ValueError(f"not JSON{where}; a line must be one JSON object") from None
    if not isinstance(values, dict):
        raise ValueError('not a JSON object; a line must be one, such as {"at_s": 0, "input_tokens": 100}')
    return values


def _mooncake(path: Path, classes: Collection[str] | None) -> Iterator[TraceRow]:
    def convert(values: dict[str, Any]) -> TraceRow:
        for name in ("timestamp", "input_length", "output_length", "hash_ids"):
            if name not in values:
                raise ValueError(
                    f"{name} is missing; a Mooncake row has timestamp, input_length, output_length, hash_ids"
                )
        wanted = _tokens("input_length", values["input_length"])
        return TraceRow(
            at_s=_finite("timestamp", values["timestamp"]) / 1e3,
            input_tokens=wanted,
            output_tokens=_tokens("output_length", values["output_length"], least=1),
            blocks=_blocks("hash_ids", values["hash_ids"], wanted, MOONCAKE_BLOCK),
        )

    return _lines(path, convert)


def _own(path: Path, classes: Collection[str] | None) -> Iterator[TraceRow]:
    def convert(values: dict[str, Any]) -> TraceRow:
        at = next(
            (_finite(name, values[name]) * unit for name, unit in _TIME_FIELDS if values.get(name) is not None), None
        )
        wanted = _optional_tokens(values, "input_tokens", "input_length")
        ids, size = "hash_ids", _tokens("block_tokens", values.get("block_tokens", MOONCAKE_BLOCK), least=1)
        if values.get(ids) is None and "hash_ids_16" in values:
            ids, size = "hash_ids_16", 16
        prompt, messages = values.get("prompt"), values.get("messages")
        if wanted is None and prompt is None and messages is None:
            raise ValueError(
                "neither a prompt nor an input length; give prompt, messages, input_tokens or input_length"
            )
        return TraceRow(
            at_s=at,
            input_tokens=wanted,
            output_tokens=_optional_tokens(values, "output_tokens", "output_length", least=1),
            blocks=_blocks(ids, values.get(ids), wanted, size),
            block_tokens=size,
            texts=() if prompt is None else (str(prompt),),
            messages="" if messages is None else msgspec.json.encode(messages).decode(),
            tenant=str(values.get("tenant", "")),
            traffic_class=_class(values.get("class", ""), classes),
            group=str(values.get("group", "")),
        )

    return _lines(path, convert)


def _sharegpt(path: Path, classes: Collection[str] | None) -> Iterator[TraceRow]:
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


def _finite(name: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]  # what is no number at all is a TypeError
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is {_short(value)}; it must be a finite number")
    return number


def _tokens(name: str, value: object, *, least: int = 0) -> int:
    if value is None or value == "":
        raise ValueError(f"{name} is empty; it must be a whole number of tokens, {least} or more")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {_short(value)}; it must be a whole number of tokens, {least} or more")
    return value


def _optional_tokens(values: dict[str, Any], *names: str, least: int = 0) -> int | None:
    """The first of these fields that there is."""
    name = next((name for name in names if values.get(name) is not None), None)
    return None if name is None else _tokens(name, values[name], least=least)


def _blocks(name: str, value: object, tokens: int | None, size: int) -> tuple[int, ...]:
    """Ids of a prompt's blocks: of all, or of those that are full. Without a length, as many as there are."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        raise ValueError(f"{name} is {_short(value)}; it must be a list of whole numbers, one a block of {size} tokens")
    if tokens is not None and not tokens // size <= len(value) <= -(-tokens // size):
        needed = f"{-(-tokens // size)} blocks of {size}"
        raise ValueError(f"{name} has {len(value)} ids; a prompt of {tokens} tokens has {needed}, one id each")
    return tuple(value)


def _class(value: object, classes: Collection[str] | None) -> str:
    name = str(value)
    if name and classes is not None and name not in classes:
        raise ValueError(f"class is {_short(name)}; it must be one of {', '.join(classes)}")
    return name


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 64 else f"{text[:61]}..."


_READERS: dict[str, Callable[[Path, Collection[str] | None], Iterator[TraceRow]]] = {
    "azure": _azure,
    "mooncake": _mooncake,
    "sharegpt": _sharegpt,
    "jsonl": _own,
}
