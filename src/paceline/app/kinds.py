"""Kinds of setting: each knows how to read a value, from text or from TOML, and how to say what it accepts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from paceline.core.classes import BUILT_IN, Overload, TrafficClass
from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kind:
    """`parse` turns what was given into the value, or raises ValueError; `accepts` completes "expected ..."."""

    accepts: str
    parse: Callable[[object], Any]
    is_path: bool = False  # relative paths in a file are relative to that file
    is_switch: bool = False  # on the command line: --name or --no-name
    brief: str = ""  # for the documentation, where `accepts` names things that come and go


def _text(given: object) -> str:
    if not isinstance(given, str) or not given.strip() or "\0" in given:
        raise ValueError
    given.encode()  # bytes of the environment that are no UTF-8 come as half characters: ValueError
    return given.strip()


def _boolean(given: object) -> bool:
    if isinstance(given, bool):
        return given
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    try:
        return words[_text(given).lower()]
    except KeyError:
        raise ValueError from None


def _texts(given: object) -> tuple[str, ...]:
    parts = given.split(",") if isinstance(given, str) else given
    if not isinstance(parts, (list, tuple)):
        raise ValueError
    return tuple(_text(part) for part in parts)


def _cores(given: object) -> tuple[int, ...]:
    """Core numbers: a list, or text as taskset takes it: 0-3,8."""
    if not isinstance(given, str):
        given = ",".join(str(part) for part in given) if isinstance(given, (list, tuple)) else str(given)
    cores: list[int] = []
    for part in given.split(","):
        low, dash, high = part.strip().partition("-")
        first, last = int(low), int(high if dash else low)
        if not 0 <= first <= last <= _MOST_CORE:
            raise ValueError
        cores += range(first, last + 1)
    if len(set(cores)) < len(cores):
        raise ValueError
    return tuple(cores)


def _options(given: object) -> tuple[tuple[str, Any], ...]:
    if isinstance(given, str):
        pairs = [part.partition("=") for part in given.split(",")]
        if not all(equals for _, equals, _ in pairs):
            raise ValueError
        given = {name.strip(): _plain(value.strip()) for name, _, value in pairs}
    items = given.items() if isinstance(given, dict) else given
    if not isinstance(items, Iterable) or isinstance(items, str):
        raise ValueError
    pairs_given = [tuple(item) for item in items]
    return tuple((_text(name), value) for name, value in pairs_given)


def _classes(given: object) -> tuple[TrafficClass, ...]:
    """Tables of classes by name; they change or join the built-in ones."""
    if isinstance(given, str):
        given = json.loads(given)
    if isinstance(given, (list, tuple)) and all(isinstance(one, TrafficClass) for one in given):
        return tuple(given)
    if not isinstance(given, dict):
        raise ValueError
    classes = {one.name: one for one in BUILT_IN}
    for name, table in given.items():
        classes[name] = _class(classes.get(name, TrafficClass(name)), table)
    return tuple(classes.values())


def _class(base: TrafficClass, table: object) -> TrafficClass:
    where = f"class {base.name!r}"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table of its promises, such as ttft_ms = 1000")
    known = {_in_ms(one.name): one.type for one in fields(TrafficClass) if one.name != "name"}
    if unknown := next((name for name in table if name not in known), None):
        raise ConfigError(f"{where} has no setting {unknown!r}; known: {', '.join(known)}")
    values = dict(table)
    if "overload" in values:
        words = [one.value for one in Overload]
        if values["overload"] not in words:
            raise ConfigError(f"{where}: overload is {values['overload']!r}; it must be one of {', '.join(words)}")
        values["overload"] = Overload(values["overload"])
    for name, value in values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name != "overload" and not (is_number and ("int" not in str(known[name]) or isinstance(value, int))):
            raise ConfigError(f"{where}: {name} is {value!r}; it must be a number")
    in_seconds = {
        f"{name[:-3]}_s" if name.endswith("_ms") else name: value / 1000 if name.endswith("_ms") else value
        for name, value in values.items()
    }
    return replace(base, **in_seconds)  # which checks the ranges


def class_table(kind: TrafficClass) -> dict[str, Any]:
    """A class as its table in paceline.toml: what `_class` reads."""
    values = {one.name: getattr(kind, one.name) for one in fields(TrafficClass) if one.name != "name"}
    return {
        _in_ms(name): value if _in_ms(name) == name else round(1000 * value, 6)
        for name, value in values.items()
        if value is not None
    }


def _in_ms(name: str) -> str:
    """How people write a target: in milliseconds, as the API does."""
    return f"{name[:-2]}_ms" if name.endswith("_s") else name


def _plain(value: str) -> Any:
    """A number or a truth value where it reads as one, else the text."""
    try:
        return json.loads(value)
    except ValueError:
        return value


text = Kind("text", _text)
classes = Kind("tables of traffic classes by name (or the same as JSON)", _classes)
options = Kind("a table of options (or NAME=VALUE,NAME=VALUE)", _options)
texts = Kind("a list of texts (or one text, with commas)", _texts)
cores = Kind("core numbers such as 0-3,8 (each once)", _cores)
path = Kind("a path", _text, is_path=True)
switch = Kind("true or false", _boolean, is_switch=True)


# Beyond these, what is computed from a setting would overflow somewhere, and whoever wrote it meant something else.
_MOST_WHOLE = 2**31 - 1
_MOST_NUMBER = 1e15
_MOST_CORE = 4095


def _short(given: object) -> str:
    text = str(given)
    return text if len(text) <= 32 else text[:32] + "..."


def whole(minimum: int, maximum: int | None = None) -> Kind:
    """A whole number within bounds, both included."""

    def parse(given: object) -> int:
        if isinstance(given, bool) or not isinstance(given, (int, str)):
            raise ValueError
        value = int(given)
        if value > _MOST_WHOLE and maximum is None:
            raise ConfigError(f"{_short(given)} is too large; no number of things is over {_MOST_WHOLE}")
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError
        return value

    return Kind(f"a whole number {_range(minimum, maximum)}", parse)


def number(above: float, maximum: float | None = None) -> Kind:
    """A finite number over `above`, up to `maximum`."""

    def parse(given: object) -> float:
        if isinstance(given, bool) or not isinstance(given, (int, float, str)):
            raise ValueError
        value = float(given)
        if _MOST_NUMBER < value < float("inf") and maximum is None:
            raise ConfigError(f"{_short(given)} is too large; no size or time is over {_MOST_NUMBER:g}")
        if not above < value < float("inf") or (maximum is not None and value > maximum):
            raise ValueError
        return value

    up_to = "" if maximum is None else f" and up to {maximum:g}"
    return Kind(f"a number over {above:g}{up_to}", parse)


def choice(*options: str, brief: str = "") -> Kind:
    """One of a few words."""

    def parse(given: object) -> str:
        word = _text(given).lower()
        if word not in options:
            raise ValueError
        return word

    return Kind(f"one of {', '.join(options)}", parse, brief=brief)


def _range(minimum: int, maximum: int | None) -> str:
    return f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
