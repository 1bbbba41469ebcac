"""For all tests. Speed lives in benchmarks: how long an example takes on a slow or busy machine is no failure."""

from __future__ import annotations

import signal

from hypothesis import settings

settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")

# What runs in the background, under nohup or a CI runner, may be told to ignore Ctrl-C; so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
