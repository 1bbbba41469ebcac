"""Knobs: a policy's public fields, each with what it may be: a wrong value is one line, not a strange server.

chunk: int = knob(512, least=1)  # tokens of a step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field, fields
from typing import Any, TypeVar

from paceline.errors import ConfigError

T = TypeVar("T", bool, int, float, str)
P = TypeVar("P")


def knob(default: T, *, least: float | None = None, most: float | None = None, one_of: Iterable[str] = ()) -> T:
    """A dataclass field with bounds (both included) or a list of the names it accepts."""
    value: T = field(default=default, metadata={"least": least, "most": most, "one_of": tuple(one_of)})
    return value


def with_knobs(what: str, name: str, kind: Callable[..., P], options: Iterable[tuple[str, Any]]) -> P:
    """A `kind` with these knobs set, by name and of their types; `ConfigError` says which is not and what there is."""
    knobs = {entry.name: entry.default for entry in fields(kind) if entry.init}  # type: ignore[arg-type]
    chosen = dict(options)
    for key, value in chosen.items():
        if key not in knobs:
            raise ConfigError(f"{what} {name} has no option {key!r}; it has {', '.join(knobs) or 'none'}")
        wanted = type(knobs[key])
        if wanted is float and type(value) is int:
            chosen[key] = float(value)
        elif type(value) is not wanted:
            raise ConfigError(f"{what} option {key} is {value!r}; it must be of type {wanted.__name__}")
    return kind(**chosen)


def check_knobs(policy: Any) -> None:
    """Hold every knob of a policy to what it may be; `ConfigError` names knob, value and what is accepted."""
    for entry in fields(policy):
        if entry.init and (wanted := _wanted(getattr(policy, entry.name), **entry.metadata)):
            raise ConfigError(f"policy option {entry.name} is {getattr(policy, entry.name)!r}; it must be {wanted}")


def _wanted(
    value: Any, *, least: float | None = None, most: float | None = None, one_of: tuple[str, ...] = ()
) -> str | None:
    """What it must be instead; None when it is."""
    if one_of and value not in one_of:
        return f"one of {', '.join(one_of)}"
    # Written so that "not a number" is refused too.
    if (least is not None and not value >= least) or (most is not None and not value <= most):
        if least is None or most is None:
            return f"at least {least:g}" if most is None else f"at most {most:g}"
        return f"between {least:g} and {most:g}"
    return None
