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
from paceline.measure.client import Endpoint
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


def base_url(url: str) -> str:
    """The URL up to and with /v1, from whatever part of it was given. Raises ConfigError for no HTTP URL."""
    if "://" not in url:
        url = f"http://{url}"
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise ConfigError(f"{url!r} has an impossible port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"{url!r} is not an http or https URL")
    if parts.username or parts.password:
        raise ConfigError("give the key by --api-key-env or --api-key-file, not inside the URL")
    if parts.query or parts.fragment:
        raise ConfigError(f"{url.split('?')[0]!r}: a query or fragment in the URL is not supported")
    path = parts.path.rstrip("/")
    for tail in ("/chat/completions", "/completions", "/models"):
        path = path.removesuffix(tail)
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def resolve(target: Target, key: str) -> Endpoint:
    """Look the host up and build the fixed part of every request. Raises ConfigError."""
    parts = urlsplit(base_url(target.url))
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"cannot resolve {host}: {getattr(error, 'strerror', error)}") from None
    addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
    lines = [
        f"POST {parts.path}{_PATHS[target.endpoint]} HTTP/1.1",
        f"Host: {parts.netloc}",
        f"User-Agent: paceline/{__version__}",
        "Content-Type: application/json",
        f"Accept: {'text/event-stream' if target.stream else 'application/json'}",
        "Accept-Encoding: identity",
    ]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    lines.append("Content-Length: ")
    tls = tls_context(target) if parts.scheme == "https" else None
    return Endpoint(host, port, addresses, tls, "\r\n".join(lines).encode("latin-1"), key)


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
