"""Request heads and bodies, and where prepared ones are kept until their time comes."""

from __future__ import annotations

import contextlib
import mmap
import socket
import ssl
import tempfile
from typing import Any
from urllib.parse import urlsplit

import msgspec

from paceline.errors import ConfigError
from paceline.measure.address import address_of, key_header
from paceline.measure.client import Endpoint
from paceline.measure.keys import Keys
from paceline.measure.plan import Target
from paceline.version import __version__

Message = dict[str, Any]
_PATHS = {"chat": "/chat/completions", "completions": "/completions"}


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """What the probe found the server to take."""

    model: str
    ignore_eos: bool = False
    stream_usage: bool = True
    max_tokens_field: str = "max_tokens"  # some hosted models take only max_completion_tokens


def resolve(target: Target, key: str | Keys) -> Endpoint:
    """Look the host up and build the fixed part of every request. Raises ConfigError."""
    keys = Keys(default=key) if isinstance(key, str) else key
    parts = urlsplit(address_of(target.url).at(_PATHS[target.endpoint]))
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"cannot resolve {host}: {getattr(error, 'strerror', error)}") from None
    addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    lines = [
        f"POST {parts.path}{'?' if parts.query else ''}{parts.query} HTTP/1.1",
        f"Host: {parts.netloc}",
        f"User-Agent: paceline/{__version__}",
        "Content-Type: application/json",
        f"Accept: {'text/event-stream' if target.stream else 'application/json'}",
        "Accept-Encoding: identity",
    ]
    tls = tls_context(target) if parts.scheme == "https" else None
    heads = {tenant: _head(lines, target, secret) for tenant, secret in keys.tenants.items()}
    secrets = tuple(dict.fromkeys(filter(None, (keys.default, *keys.tenants.values()))))
    return Endpoint(host, port, addresses, tls, _head(lines, target, keys.default), heads, secrets)


def _head(lines: list[str], target: Target, key: str) -> bytes:
    """Request line and headers up to the value of Content-Length, which comes last."""
    carried = [": ".join(key_header(target.api_key_header, key))] if key else []
    return "\r\n".join([*lines, *carried, "Content-Length: "]).encode("latin-1")


def tls_context(target: Target) -> ssl.SSLContext:
    """The context for https. Raises ConfigError for a CA file that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=target.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use the CA file {target.ca_file}: {error}") from None
    if not target.verify_tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context


def request_body(
    target: Target, features: Features, content: str | list[Message], max_tokens: int, traffic_class: str = ""
) -> bytes:
    """One request as JSON. `content`: the prompt for completions, the messages for chat.

    The class goes where the target's `class_field` says, a name or a path of names with dots.
    """
    body: dict[str, Any] = {"model": features.model}
    body["prompt" if target.endpoint == "completions" else "messages"] = content
    body[features.max_tokens_field] = max_tokens
    body["temperature"] = target.temperature
    if target.choices > 1:
        body["n"] = target.choices
    if features.ignore_eos:
        body["ignore_eos"] = True
    if target.stream:
        body["stream"] = True
        if features.stream_usage:
            body["stream_options"] = {"include_usage": True}
    body.update(target.extra)
    if traffic_class and target.class_field:
        *path, last = target.class_field.split(".")
        place = body
        for name in path:
            place[name] = dict(place.get(name) or {})
            place = place[name]
        place[last] = traffic_class
    return msgspec.json.encode(body)


def flat_text(messages: list[Message]) -> str:
    """Messages as one prompt, for the completions endpoint."""
    return "\n".join(str(message.get("content", "")) for message in messages)


class BodyStore:
    """Prepared bodies in an anonymous file, so that 20k-token prompts of a long trace do not fill the heap.

    Add all, `seal`, then `get`: a view into the map, nothing is copied or encoded at send time.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="paceline-bodies-")  # noqa: SIM115  closed with the store
        self._spans: list[tuple[int, int]] = []
        self._end = 0
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, body: bytes) -> int:
        """Keep a body; its number."""
        self._file.write(body)
        self._spans.append((self._end, self._end + len(body)))
        self._end += len(body)
        return len(self._spans) - 1

    def seal(self) -> None:
        self._file.flush()
        if self._end:
            self._map = mmap.mmap(self._file.fileno(), self._end, access=mmap.ACCESS_READ)
            self._view = memoryview(self._map)

    def get(self, number: int) -> memoryview:
        assert self._view is not None
        start, end = self._spans[number]
        return self._view[start:end]

    def close(self) -> None:
        if self._view is not None:
            self._view.release()
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a transport still holds a slice; the map goes with it
                self._map.close()
        self._file.close()
