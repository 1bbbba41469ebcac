"""API keys: where a plan says to find them, and words for people with none in them.

A plan names environment variables and files; what they hold is read once, kept in memory, handed to the workers over a
pipe and sent in one header. It is in no repr, no message and no file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from paceline.errors import ConfigError
from paceline.measure.plan import Target
from paceline.measure.provenance import scrub


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of one run. `default` is also what probe, warm-up and metrics use; "" is none."""

    default: str = ""
    tenants: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Keys({'one' if self.default else 'none'}, tenants {sorted(self.tenants)})"

    def of(self, tenant: str) -> str:
        return self.tenants.get(tenant, self.default)

    def scrub(self, text: str) -> str:
        """The text without any of them."""
        return scrub(text, self.default, *self.tenants.values())


def read_keys(target: Target) -> Keys:
    """Every key that the plan points to. Raises ConfigError; its message never holds a key.

    Without a key for everybody, the first tenant's asks for the models and warms up.
    """
    tenants = {tenant: _read_place(place) for tenant, place in target.tenant_keys.items()}
    default = read_key(target) or next(iter(tenants.values()), "")
    return Keys(default=default, tenants=tenants)


def read_key(target: Target) -> str:
    """The key for everybody, "" for none. Raises ConfigError."""
    if target.api_key_env and target.api_key_file:
        raise ConfigError("give the key by an environment variable or a file, not both")
    if target.api_key_env:
        return _from_environment(target.api_key_env)
    return _from_file(target.api_key_file) if target.api_key_file else ""


def check_tenants(target: Target, tenants: Iterable[str]) -> None:
    """Raise ConfigError when the load has a tenant that no key stands for, or a key no tenant of the load has."""
    if not target.tenant_keys:
        return
    asked = set(tenants)
    if unused := sorted(set(target.tenant_keys) - asked):
        raise ConfigError(f"no request of the load is of tenant {', '.join(unused)}; a trace's rows name theirs")
    everybody = target.api_key_env or target.api_key_file
    if not everybody and (bare := sorted(asked - set(target.tenant_keys))):
        named = ", ".join(tenant or "(none)" for tenant in bare)
        raise ConfigError(f"no key for tenant {named}: give --tenant-key for each, or one for everybody")


def check_place(place: str) -> None:
    """Raise ConfigError for what is neither `env:NAME` nor `file:PATH`. Not shown: it may be the key itself."""
    kind, _, name = place.partition(":")
    if kind not in ("env", "file") or not name:
        raise ConfigError("say where a tenant's key is: TENANT=env:VARIABLE or TENANT=file:PATH")


def _read_place(place: str) -> str:
    check_place(place)
    kind, _, name = place.partition(":")
    return _from_environment(name) if kind == "env" else _from_file(name)


def _from_environment(name: str) -> str:
    key = os.environ.get(name, "")
    if not key:
        raise ConfigError(f"the environment variable {name} holds no key")
    return _fit_for_a_header(key)


def _from_file(path: str) -> str:
    try:
        return _fit_for_a_header(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"cannot read the key file {path}") from None


def _fit_for_a_header(key: str) -> str:
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("the key is empty or holds characters that no HTTP header can carry")
    return key
