"""Where a result comes from: this machine, these versions, that server. Keys are not among it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

from paceline.version import __version__

_PACKAGES = ("httptools", "httpx", "msgspec", "numpy", "prometheus_client", "uvloop")
_SECRET_OPTIONS = re.compile(r"(?i)^--?(api[-_]?key|token|password|authorization|secret|bearer)(=|$)")
_SECRET_WORDS = re.compile(r"(?i)\b(bearer\s+|sk-|hf_)[\w.\-]{6,}")


def client_facts(limits: dict[str, Any]) -> dict[str, Any]:
    """The measuring side."""
    info = time.get_clock_info("perf_counter")
    return {
        "paceline": __version__,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "packages": {name: version_of(name) for name in _PACKAGES},
        "clock": {"name": "perf_counter", "implementation": info.implementation, "resolution_s": info.resolution},
        "limits": limits,
    }


def cpu_name() -> str:
    """The processor's marketing name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def command_line(argv: list[str] | None = None) -> list[str]:
    """The command as typed, with the value of anything that looks like a secret replaced."""
    words = list(sys.argv if argv is None else argv)
    clean: list[str] = []
    hide = False
    for word in words:
        if hide:
            clean.append("***")
            hide = False
        elif (match := _SECRET_OPTIONS.match(word)) is not None:
            hide = match.group(2) != "="
            clean.append(word if hide else word[: match.end()] + "***")
        else:
            clean.append(scrub(word))
    if clean:
        clean[0] = Path(clean[0]).name
    return clean


def scrub(text: str, *keys: str) -> str:
    """Text without the given keys, nor anything that looks like one."""
    for key in keys:
        if key:
            text = text.replace(key, "***")
    return _SECRET_WORDS.sub("***", text)
