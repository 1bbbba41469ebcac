"""What a start does before it imports the rest of this room, a third of a second: the port and the event loop."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

from paceline.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError, in one line, when the port is taken or the address is not ours."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror or error}") from error
    except UnicodeError as error:  # a label of a name is empty or too long
        raise ConfigError(f"cannot listen on {host[:64]!r}: not a valid host name") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
        bound.listen(2048)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use; choose another with --port") from error
        if error.errno == errno.EACCES:
            raise ConfigError(f"port {port} needs more rights than this user has; choose one above 1023") from error
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    bound.setblocking(False)
    return bound


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed; None is asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop  # type: ignore[no-any-return]
