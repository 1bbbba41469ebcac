"""File descriptors and ephemeral ports: enough of both before the start, or no start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

SPARE_FILES = 64  # what a process needs beside its connections
FILES_WISHED = 1 << 16  # an open loop without a cap may need far more than it opens first
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def raise_file_limit(needed: int) -> int:
    """Raise this process's soft limit on open files towards `needed`; the limit now. Children inherit it."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return needed
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed if soft == resource.RLIM_INFINITY else soft
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):
        return soft
    return wanted


def ports_available() -> int | None:
    """Ephemeral ports towards one destination; None where the system does not tell."""
    try:
        low, high = map(int, _PORT_RANGE.read_text().split())
    except (OSError, ValueError):
        return None
    return high - low + 1


def check_limits(connections: int, workers: int) -> dict[str, Any]:
    """Make sure that so many connections can be open at once. Raises ConfigError, else tells the limits."""
    per_worker = -(-connections // workers) + SPARE_FILES
    files = raise_file_limit(max(per_worker, FILES_WISHED))
    if files < per_worker:
        raise ConfigError(
            f"{connections} connections in {workers} processes need {per_worker} open files each, and the limit is "
            f"{files}: raise it (ulimit -n) or use more workers"
        )
    ports = ports_available()
    if ports is not None and connections > ports:
        raise ConfigError(
            f"{connections} connections need more than the {ports} ephemeral ports of this machine "
            f"(net.ipv4.ip_local_port_range)"
        )
    return {"open_files": files, "ephemeral_ports": ports}
