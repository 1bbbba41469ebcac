"""Chips and models by name: the lists that come with Paceline, files of the user's own, and checkpoints on disk.

    find_chip("h100"), find_chip("my_chips.toml"), find_chip("my_chips.toml#box")
    find_model("llama-3-8b"), find_model("Qwen/Qwen3-32B-FP8"), find_model("folder/with/config"), find_model("x.gguf")

Files of the user's own are TOML in the form of `data/chips.toml` and `data/models.toml`; `user_files` says where they
are looked for. Their entries come before ours. Nothing here reads the environment: the caller passes it.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from paceline.cost.checkpoint import read_config, read_gguf
from paceline.cost.chip import Chip
from paceline.cost.model import Experts, Latent, Model
from paceline.cost.precision import find_precision
from paceline.errors import ConfigError, ModelNotFound

__all__ = ["Chip", "Experts", "Latent", "Model", "chips", "find_chip", "find_model", "models", "user_files"]

_DATA = Path(__file__).parent / "data"
_ENTRY_KEYS = frozenset({"like", "aliases", "source", "sources", "params_b", "active_b"})
_PARTS = {"latent": Latent, "experts": Experts}
# Endings of repository names that do not change the dimensions, and those that name a precision.
_VARIANTS = re.compile(r"-(instruct|chat|base|it|hf|pt|thinking|preview|2407|2507|text)$")
_QUANTIZED = {"fp8": "fp8", "awq": "int4", "gptq": "int4", "gptq-int4": "int4", "int4": "int4", "int8": "int8"}
_QUANTIZED |= {"nvfp4": "nvfp4", "fp4": "nvfp4", "mxfp4": "mxfp4", "bf16": "bf16", "w8a8": "int8", "w4a16": "int4"}

_T = TypeVar("_T", Chip, Model)


def user_files(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The user's catalogues that exist: chips.toml and models.toml in `$XDG_CONFIG_HOME/paceline`."""
    root = environ.get("XDG_CONFIG_HOME") or ""
    # A relative path is invalid by the XDG specification and is to be ignored.
    base = Path(root) if os.path.isabs(root) else Path.home() / ".config"
    return tuple(path for name in ("chips", "models") if (path := base / "paceline" / f"{name}.toml").is_file())


def chips(files: Sequence[Path] = ()) -> dict[str, Chip]:
    """All chips by name, those of `files` first."""
    return {name: _build(Chip, name, entry) for name, entry in _entries("chips", tuple(files)).items()}


def models(files: Sequence[Path] = ()) -> dict[str, Model]:
    """All models by name, those of `files` first."""
    return {name: _build(Model, name, entry) for name, entry in _entries("models", tuple(files)).items()}


def find_chip(name: str, files: Sequence[Path] = ()) -> Chip:
    """The chip of this name or alias, or of a TOML file (`file.toml`, `file.toml#name`). ConfigError if none."""
    path, _, entry = name.partition("#")
    if path.endswith(".toml"):
        return _from_file(Chip, "chips", Path(path), entry)
    entries = _entries("chips", tuple(files))
    found = _match(name, entries)
    if found is None:
        raise ConfigError(_unknown("chip", name, entries, "add one of your own with a TOML file"))
    return _build(Chip, found, entries[found])


def find_model(name: str, files: Sequence[Path] = ()) -> Model:
    """The model of this name, alias or hub id; or of a folder with a config.json, a .json, .gguf or .toml file.

    Raises ModelNotFound for a name that is none of these, CorruptModel and UnsupportedModel for files.
    """
    path, _, entry = name.partition("#")
    if path.endswith(".toml"):
        return _from_file(Model, "models", Path(path), entry)
    if name.endswith(".gguf"):
        return read_gguf(Path(name))
    if name.endswith(".json") or (Path(name) / "config.json").is_file():
        return read_config(Path(name))
    if name.startswith((".", "/", "~")) and Path(name).expanduser().is_dir():
        raise ModelNotFound(f"{name} is a folder without a config.json")
    entries = _entries("models", tuple(files))
    stem = _plain(name.rpartition("/")[2])
    native = ""
    while True:
        found = _match(stem, entries)
        if found is not None:
            model = _build(Model, found, entries[found])
            return replace(model, native=native) if native else model
        shorter = _VARIANTS.sub("", stem)
        for ending, precision in _QUANTIZED.items():
            if stem.endswith(f"-{ending}"):
                shorter, native = stem.removesuffix(f"-{ending}"), precision
        if shorter == stem:
            break
        stem = shorter
    raise ModelNotFound(_unknown("model", name, entries, "or give a folder with a config.json, or a .gguf file"))


def _unknown(kind: str, name: str, entries: Mapping[str, Mapping[str, Any]], else_: str) -> str:
    """What to say of a name that nobody knows."""
    spellings = {_plain(spelling): found for found, entry in entries.items() for spelling in _spellings(found, entry)}
    plain = _plain(name.rpartition("/")[2])
    near = difflib.get_close_matches(plain, spellings, 5, 0.5)
    near += [spelling for spelling in spellings if plain and spelling.startswith(plain)]
    nearest = list(dict.fromkeys(spellings[spelling] for spelling in near))[:3]
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"known: {', '.join(entries)}."
    return f"{kind} {name!r} is not known; {hint} ({else_})"


def _match(name: str, entries: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The entry that answers to `name`."""
    plain = _plain(name)
    for found, entry in entries.items():
        if any(plain == _plain(spelling) for spelling in _spellings(found, entry)):
            return found
    return None


def _spellings(name: str, entry: Mapping[str, Any]) -> Iterable[str]:
    return (name, *entry.get("aliases", ()))


@cache
def _plain(name: str) -> str:
    """Lower case, with one dash for spaces and underscores."""
    return re.sub(r"[\s_]+", "-", name.strip().lower())


@cache
def _entries(kind: str, files: tuple[Path, ...]) -> dict[str, dict[str, Any]]:
    """Raw entries by name, `like` resolved; those of earlier files hide later ones, ours are last."""
    merged: dict[str, dict[str, Any]] = {}
    origin: dict[str, Path] = {}
    citations: dict[str, str] = {}
    for path in (*files, _DATA / f"{kind}.toml"):
        document = _parse(path)
        citations = {**document.get("citations", {}), **citations}
        for name, entry in document.get(kind, {}).items():
            if not isinstance(entry, dict):
                raise ConfigError(f"{path}: {kind}.{name} is {entry!r}, expected a table")
            if name not in merged:
                merged[name], origin[name] = entry, path
    return {name: _resolved(name, merged, citations, kind, origin) for name in merged}


def _resolved(
    name: str, raw: Mapping[str, dict[str, Any]], citations: Mapping[str, str], kind: str, origin: Mapping[str, Path]
) -> dict[str, Any]:
    """The entry with the figures of those it is like below its own, and a source for each figure."""
    chain, at = [name], raw[name].get("like")
    while at is not None:
        base = _match(str(at), raw)
        if base is None or base in chain:
            what = "is like itself" if base else f"is like {at!r}, which is not known"
            raise ConfigError(f"{origin[name]}: {kind}.{name} {what}")
        chain.append(base)
        at = raw[base].get("like")
    figures: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for link in reversed(chain):
        entry = raw[link]
        own = entry.get("sources", {})
        for key, value in entry.items():
            if key in _ENTRY_KEYS and key not in ("params_b", "active_b"):
                continue
            figures[key] = value
            said = own.get(key) or entry.get("source")
            sources[key] = citations.get(said, said) if said else str(origin[link])
    return {**figures, "aliases": raw[name].get("aliases", []), "sources": sources, "origin": str(origin[name])}


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def _from_file(cls: type[_T], kind: str, path: Path, entry: str) -> _T:
    """One entry of a file: the named one, or the only one."""
    own = _parse(path).get(kind, {})
    if not own:
        raise ConfigError(f"{path}: there is no [{kind}.NAME] in it")
    if not entry and len(own) > 1:
        raise ConfigError(f"{path} has several {kind}; choose one: {', '.join(f'{path}#{name}' for name in own)}")
    entries = _entries(kind, (path,))
    found = _match(entry or next(iter(own)), {name: entries[name] for name in own})
    if found is None:
        raise ConfigError(_unknown(kind[:-1], entry, {name: entries[name] for name in own}, f"in {path}"))
    return _build(cls, found, entries[found])


def _build(cls: type[_T], name: str, entry: Mapping[str, Any]) -> _T:
    """The object of an entry; ConfigError names the file, the entry and the key at fault."""
    where = f"{entry['origin']}: {name}"
    given = {key: value for key, value in entry.items() if key not in (*_ENTRY_KEYS, "origin")}
    values = _checked(cls, given, where)
    if cls is Chip:
        values = {"title": name, "family": "generic", **values}
    missing = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    missing = [key for key in missing if key not in values and key != "name"]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} must be given")
    if "native" in values:
        find_precision(values["native"], what=f"{where}: native")
    return cls(name=name, sources=entry["sources"], **values)


def _checked(cls: type[Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`given` with every key known and every value of the type its field says."""
    types = {f.name: str(f.type) for f in fields(cls)}
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key == "name":
            raise ConfigError(f"{where}: name is not a figure; its table is named by [chips.NAME] or [models.NAME]")
        if key not in types or key == "sources":
            near = difflib.get_close_matches(key, [one for one in types if one not in ("name", "sources")], 1)
            raise ConfigError(f"{where}: {key} is not a figure" + (f"; did you mean {near[0]}?" if near else ""))
        if key in _PARTS and isinstance(value, dict):
            values[key] = _part(_PARTS[key], value, f"{where}: {key}")
        elif types[key].startswith("Mapping") and isinstance(value, dict):
            values[key] = {k: _number(v, f"{where}: {key}.{k}") for k, v in value.items()}
        elif types[key] in ("int", "float"):
            number = _number(value, f"{where}: {key}")
            if types[key] == "int" and number != int(number):
                raise ConfigError(f"{where}: {key} is {value!r}, expected a whole number")
            values[key] = int(number) if types[key] == "int" else number
        elif type(value).__name__ == types[key]:
            values[key] = value
        else:
            raise ConfigError(f"{where}: {key} is {value!r}, expected {types[key]}")
    return values


def _part(cls: type[Any], given: Mapping[str, Any], where: str) -> Any:
    """A group of figures inside an entry, such as `experts`."""
    values = _checked(cls, given, where)
    missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in values]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} must be given")
    return cls(**values)


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < 1e18:
        raise ConfigError(f"{where} is {value!r}, expected a number, not negative")
    return float(value)
