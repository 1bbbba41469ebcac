"""What a user calls "the URL" of a server, taken apart: base, query, and the header that carries the key."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from paceline.errors import ConfigError

# A query that looks like a key would be written into every result.
_SECRET_NAME = re.compile(r"(?i)(^|[-_.])(key|token|secret|sig|signature|password|auth|authorization|code)$|apikey")
AUTHORIZATION = "Authorization"
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True, slots=True)
class Address:
    """`base` goes up to and with /v1 (or whatever path was given); `query` follows every path below it."""

    base: str
    query: str = ""

    def at(self, path: str) -> str:
        """The URL of a path below the base."""
        return f"{self.base}{path}{'?' if self.query else ''}{self.query}"


def address_of(url: str) -> Address:
    """The address that a URL means, from whatever part of it was given. Raises ConfigError for no HTTP URL."""
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise ConfigError("a URL has no spaces, control characters or letters beyond ASCII: percent-encode them")
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError(f"{url.split('?')[0]!r} is not a URL: its host or port is impossible") from None
    if parts.username or parts.password:
        raise ConfigError("give the key by --api-key-env or --api-key-file, not inside the URL")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"{url.split('?')[0]!r} is not an http or https URL")
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if _SECRET_NAME.search(name):
            raise ConfigError(f"give the key by --api-key-env or --api-key-file, not as {name!r} inside the URL")
    path = parts.path.rstrip("/")
    for tail in ("/chat/completions", "/completions", "/models"):
        path = path.removesuffix(tail)
    return Address(f"{parts.scheme}://{parts.netloc}{path or '/v1'}", parts.query)


def base_url(url: str) -> str:
    """The base alone."""
    return address_of(url).base


def key_header(name: str, key: str) -> tuple[str, str]:
    """(header, value) that carries a key: `Authorization: Bearer KEY`, or the bare key under another name."""
    return name, f"Bearer {key}" if name.lower() == AUTHORIZATION.lower() else key


def check_header_name(name: str) -> None:
    if not _HEADER_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not the name of a header")
