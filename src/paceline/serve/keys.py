"""API keys: who calls, for which tenant, in which classes, how often.

A key file names keys and holds their SHA-256, never the keys themselves:

    [[key]]
    name = "search-team"
    sha256 = "9f86d081884c7d65..."
    tenant = "search"
    classes = ["standard"]        # left out: all
    requests_per_minute = 600     # left out: no limit
    max_concurrent = 64           # left out: no limit

SHA-256 without stretching is right for keys that are long and random, as `new_key` makes them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from paceline.errors import ConfigError, Overloaded, Unauthorized

KEY_PREFIX = "pk-"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One named key with what it may do."""

    name: str
    sha256: str = field(repr=False)  # hex digest of the key
    tenant: str = "default"
    classes: tuple[str, ...] | None = None  # classes of traffic; None is all
    requests_per_minute: float | None = None
    max_concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, as far as later decisions care."""

    name: str = "anonymous"
    tenant: str = "default"
    classes: tuple[str, ...] | None = None

    def may_use(self, traffic_class: str) -> bool:
        """Whether this caller's key allows the class."""
        return self.classes is None or traffic_class in self.classes


ANONYMOUS = Caller()


def new_key() -> str:
    """A fresh secret to hand to a client."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(secret: str) -> str:
    """The hex digest that a key file holds."""
    return hashlib.sha256(secret.encode()).hexdigest()


def read_key_file(text: str, where: str = "the key file") -> tuple[ApiKey, ...]:
    """Keys from TOML, shaped as above. Raises ConfigError that names the key and the fault."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from error
    entries = content.pop("key", [])
    if content or not isinstance(entries, list):
        raise ConfigError(f"{where} holds [[key]] tables and nothing else; found {sorted(content) or 'a single key'}")
    keys = tuple(_read_entry(entry, f"{where}, key {i + 1}") for i, entry in enumerate(entries))
    names = [key.name for key in keys]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{where} has several keys named {', '.join(twice)}")
    return keys


def _read_entry(entry: object, where: str) -> ApiKey:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} should be a table")
    known = {"name", "sha256", "tenant", "classes", "requests_per_minute", "max_concurrent"}
    if unknown := sorted(set(entry) - known):
        raise ConfigError(f"{where} has unknown settings {unknown}; known are {sorted(known)}")

    def text(name: str, default: str | None = None) -> str:
        value = entry.get(name, default)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{where} needs {name!r} as a non-empty string")
        return value

    def limit(name: str) -> float | None:
        value = entry.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{where}: {name!r} should be a number above 0, not {value!r}")
        return value

    digest = text("sha256").lower()
    if len(digest) != 64 or any(char not in "0123456789abcdef" for char in digest):
        raise ConfigError(f"{where}: sha256 should be 64 hexadecimal digits")
    classes = entry.get("classes")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(c, str) for c in classes)):
        raise ConfigError(f"{where}: classes should be a list of strings")
    concurrent = limit("max_concurrent")
    return ApiKey(
        name=text("name"),
        sha256=digest,
        tenant=text("tenant", "default"),
        classes=None if classes is None else tuple(classes),
        requests_per_minute=limit("requests_per_minute"),
        max_concurrent=None if concurrent is None else int(concurrent),
    )


class _Usage:
    """How much of its limits one key has used: a token bucket that holds a minute's requests, and a count."""

    def __init__(self, key: ApiKey) -> None:
        self.key = key
        self.running = 0
        self._allowance = key.requests_per_minute or 0.0
        self._as_of: float | None = None

    def take(self, now: float) -> None:
        """Count one more request. Raises Overloaded when a limit is reached."""
        key = self.key
        if key.max_concurrent is not None and self.running >= key.max_concurrent:
            raise Overloaded(
                f"key {key.name!r} has {self.running} requests running, its limit; wait until one ends",
                retry_after_s=1.0,
                code="concurrency_limit_exceeded",
            )
        if key.requests_per_minute is not None:
            passed = now - self._as_of if self._as_of is not None else 0.0
            rate = key.requests_per_minute / 60
            self._allowance = min(self._allowance + passed * rate, max(key.requests_per_minute, 1.0))
            self._as_of = now
            if self._allowance < 1:
                raise Overloaded(
                    f"key {key.name!r} may send {key.requests_per_minute:g} requests a minute",
                    retry_after_s=(1 - self._allowance) / rate,
                    code="rate_limit_exceeded",
                )
            self._allowance -= 1
        self.running += 1


class KeyRing:
    """All keys of a server, with their use. Belongs to one event loop."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._usage = [_Usage(key) for key in keys]
        self._digests = [key.sha256.encode() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._usage)

    @contextmanager
    def admit(self, authorization: str | None, now: float) -> Iterator[Caller]:
        """Hold one request of the key in `Authorization: Bearer KEY` for as long as the context lasts.

        Raises Unauthorized or Overloaded. Without any keys everybody is the anonymous caller.
        """
        if not self._usage:
            yield ANONYMOUS
            return
        usage = self._find(authorization)
        usage.take(now)
        key = usage.key
        try:
            yield Caller(key.name, key.tenant, key.classes)
        finally:
            usage.running -= 1

    def _find(self, authorization: str | None) -> _Usage:
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise Unauthorized("no API key: send the header `Authorization: Bearer YOUR_KEY`", code="missing_api_key")
        digest = hashlib.sha256(secret.strip().encode("utf-8", "surrogateescape")).hexdigest().encode()
        # Every digest is looked at, each in constant time: the time tells nothing about which one matched.
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(found):
            raise Unauthorized("this API key is not known here", code="invalid_api_key")
        return self._usage[found.index(True)]
