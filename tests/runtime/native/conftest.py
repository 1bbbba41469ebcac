"""The native kernels against the torch path. Skipped, with the reason, where they are not installed."""

from __future__ import annotations

import pytest

from paceline.runtime.kernels.native import unavailable


@pytest.fixture(autouse=True)
def needs_native() -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
