"""Settings resolved, once: flags over `paceline.toml` over the environment over defaults.

`resolve` is pure: what it reads is what it is given. Each value remembers where it came from, so that
`paceline config` can say so and a bad one is refused with its source named.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.app.settings import SLICES, TABLE, Entry, Settings
from paceline.core.policies.registry import make_policy
from paceline.errors import ConfigError

FILE_NAME = "paceline.toml"
DEFAULT = "default"
_LONGEST_SHOWN = 200  # characters of a bad value that an error repeats


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A parsed `paceline.toml`."""

    path: Path
    tables: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings, where each came from, and what was strange on the way without being wrong."""

    settings: Settings
    origins: Mapping[str, str]  # by setting name: "--port", "paceline.toml: serve.port", "PACELINE_PORT" or "default"
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Given:
    value: object
    origin: str
    base: Path | None = None  # folder that relative paths are relative to; None is the current one


def read_file(path: str | None, cwd: Path) -> ConfigFile | None:
    """The configuration file: the one named, else `paceline.toml` in `cwd` if there is one."""
    try:
        target = cwd / (FILE_NAME if path is None else Path(path).expanduser())
    except RuntimeError as error:  # ~ of a user that does not exist
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from None
    if path is None and not target.is_file():
        return None
    try:
        return ConfigFile(target, tomllib.loads(target.read_text("utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {target}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{target} is not valid TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{target} is nested too deeply") from None


def resolve(
    flags: Mapping[str, object],
    file: ConfigFile | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    flag_label: Callable[[Entry], str] = lambda entry: entry.flag,
) -> Resolved:
    """Every setting from the strongest source that gives it; ConfigError for the first value that cannot be taken.

    `flags` maps setting names to values; None counts as not given.
    """
    given = {name: _Given(value, flag_label(TABLE[name])) for name, value in flags.items() if value is not None}
    from_environment, warnings = _from_environment(environ or {})
    for weaker in (_from_file(file), from_environment):
        given = {**weaker, **given}
    values = {name: _parse(TABLE[name], one) for name, one in given.items()}
    origins = {name: given[name].origin if name in given else DEFAULT for name in TABLE}
    settings = Settings(
        **{part: kind(**{n: v for n, v in values.items() if TABLE[n].slice == part}) for part, kind in SLICES.items()}
    )
    _check_together(settings, origins)
    return Resolved(settings, origins, warnings)


def _from_file(file: ConfigFile | None) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for slice_name, table in (file.tables if file else {}).items():
        assert file is not None
        if slice_name not in SLICES:
            raise ConfigError(f"{file.path}: unknown table [{slice_name}]; {_nearest(slice_name, SLICES)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{file.path}: {slice_name} must be a table, written [{slice_name}]")
        names = [name for name, entry in TABLE.items() if entry.slice == slice_name and not entry.secret]
        for name, value in table.items():
            if name not in names:
                raise ConfigError(f"{file.path}: unknown key {slice_name}.{name}; {_nearest(name, names)}")
            given[name] = _Given(value, f"{file.path}: {slice_name}.{name}", file.path.parent)
    return given


def _from_environment(environ: Mapping[str, str]) -> tuple[dict[str, _Given], tuple[str, ...]]:
    """Variables that name a setting, and a warning for each that looks as if it should."""
    variables = {entry.variable: name for name, entry in TABLE.items()}
    given: dict[str, _Given] = {}
    warnings: list[str] = []
    for variable, value in environ.items():
        if not variable.startswith("PACELINE_"):
            continue
        if variable not in variables:
            warnings.append(f"{variable} is set and is no setting; {_nearest(variable, variables)}")
        elif value != "":  # an empty variable counts as unset, as shells and unit files write it
            given[variables[variable]] = _Given(value, variable)
    return given, tuple(warnings)


def _parse(entry: Entry, given: _Given) -> Any:
    try:
        value = entry.kind.parse(given.value)
    except ConfigError as error:  # inside a table, a kind says itself what is wrong
        raise ConfigError(f"{given.origin}: {error}") from None
    except (ValueError, TypeError, OverflowError, RecursionError):
        shown = "the value" if entry.secret else _shown(given.value)
        hint = ""
        if given.origin == entry.variable and str(given.value).startswith("tcp://"):
            hint = " (Kubernetes sets this for a Service of that name: set enableServiceLinks: false in the pod)"
        raise ConfigError(f"{given.origin}: {shown} is not accepted; expected {entry.kind.accepts}{hint}") from None
    # A model is a path only where it looks like one. Relative paths in a file are relative to that file.
    is_path = entry.kind.is_path or (entry.name == "model" and str(value).startswith(("./", "../")))
    if not is_path or given.base is None:
        return value
    try:
        return str(given.base / Path(value).expanduser())
    except RuntimeError as error:  # ~ of a user that does not exist
        raise ConfigError(f"{given.origin}: {_shown(value)}: {error}") from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


def _check_together(settings: Settings, origins: Mapping[str, str]) -> None:
    """Settings that are right alone and wrong together."""
    serve = settings.serve
    if (serve.tls_cert is None) != (serve.tls_key is None):
        there, missing = ("tls_cert", "tls_key") if serve.tls_cert else ("tls_key", "tls_cert")
        raise ConfigError(f"{origins[there]}: {there} needs {missing} beside it")
    names = [one.name for one in settings.scheduler.classes]
    if settings.scheduler.default_class not in names:
        raise ConfigError(
            f"{origins['default_class']}: there is no class {_shown(settings.scheduler.default_class)}; "
            f"it must be one of {', '.join(names)}"
        )
    try:
        make_policy(settings.scheduler.policy, settings.scheduler.policy_options)
    except ConfigError as error:
        raise ConfigError(f"{origins['policy_options']}: {error}") from None


def _nearest(word: str, known: Mapping[str, object] | list[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
