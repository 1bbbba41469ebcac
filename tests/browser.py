"""A real browser for the tests of pages; they skip where there is none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium: apt install chromium")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
_DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")


def screenshot(url: str, target: Path, *, dark: bool = False, size: str = "1240,2400") -> bytes:
    """The page as PNG."""
    flags = [*_FLAGS, *(_DARK if dark else ()), f"--window-size={size}", f"--screenshot={target}"]
    _run(flags, url, target.with_suffix(".profile"))
    return target.read_bytes()


def rendered(url: str, profile: Path) -> str:
    """The document as it stands once its scripts have run."""
    return _run([*_FLAGS, "--virtual-time-budget=4000", "--dump-dom"], url, profile)


def _run(flags: list[str], url: str, profile: Path) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, *flags, f"--user-data-dir={profile}", url]
    return subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout
