"""Kinds of setting: each knows how to read a value, from text or from TOML, and how to say what it accepts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
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
    """`base` with what its table says. Errors name the key and the value as they are written there."""
    where = f"class {base.name!r}"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table of its promises, such as ttft_ms = 1000")
    values: dict[str, Any] = {}
    for key, given in table.items():
        if key not in _CLASS_KEYS:
            raise ConfigError(f"{where} has no setting {key!r}; known: {', '.join(_CLASS_KEYS)}")
        accepts, parse = _CLASS_KEYS[key]
        try:
            value = parse(given)
        except (ValueError, OverflowError):
            raise ConfigError(f"{where}: {key} is {_short(repr(given))}; it must be {accepts}") from None
        values[_in_s(key)] = value / 1000 if _in_s(key) != key and value is not None else value
    return replace(base, **values)  # which checks that they agree


def _entry(accepts: str, fits: Callable[[Any], bool], *, or_none: bool = False) -> tuple[str, Callable[[Any], Any]]:
    """A number of a class's table: what may be written, and how it is read. With `or_none`, also that there is none."""

    def parse(given: Any) -> Any:
        if or_none and given in (None, NONE):
            return None
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not fits(given):
            raise ValueError
        return given

    return f'{accepts}, or "{NONE}"' if or_none else accepts, parse


NONE = "none"  # nothing promised, no limit; TOML has no null
_TARGET = _entry("a number of milliseconds above 0", lambda given: 0.0 < float(given) < inf, or_none=True)
# What a table of a class may hold, in the order of `TrafficClass`.
_CLASS_KEYS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "priority": _entry("a whole number", lambda given: isinstance(given, int)),
    "ttft_ms": _TARGET,
    "itl_ms": _TARGET,
    "e2e_ms": _TARGET,
    "percentile": _entry("a number between 0 and 1, such as 0.95", lambda given: 0 < given < 1),
    "weight": _entry("a finite number above 0", lambda given: 0.0 < float(given) < inf),
    "queue_limit": _entry(
        "a whole number, 0 or more", lambda given: isinstance(given, int) and given >= 0, or_none=True
    ),
    "overload": (f"one of {', '.join(one.value for one in Overload)}", Overload),
}


def class_table(kind: TrafficClass) -> dict[str, Any]:
    """A class as its table in paceline.toml: what `_class` reads.

    What it does not promise is left out, but where a built-in class of its name would promise it.
    """
    base = next((one for one in BUILT_IN if one.name == kind.name), TrafficClass(kind.name))
    table: dict[str, Any] = {}
    for key in _CLASS_KEYS:
        value = getattr(kind, _in_s(key))
        if value is not None:
            table[key] = round(1000 * value, 6) if _in_s(key) != key else value
        elif getattr(base, _in_s(key)) is not None:
            table[key] = NONE
    return table


def _in_s(key: str) -> str:
    """The field of a key: people write targets in milliseconds, as the API does."""
    return f"{key[:-3]}_s" if key.endswith("_ms") else key


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
