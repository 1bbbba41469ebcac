"""For all tests. Speed lives in benchmarks: how long an example takes on a slow or busy machine is no failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")
