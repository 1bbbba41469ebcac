"""What this room asks of an engine. `paceline.engine.client.EngineClient` is one; tests bring others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from paceline.core.step import FinishReason, RequestSpec
from paceline.engine.messages import EngineInfo, EngineStats
from paceline.engine.stream import Update
from paceline.engine.supervisor import EngineState
from paceline.errors import PacelineError


class TokenStream(Protocol):
    """One accepted request: an async iterator of `Update`, the last of which has `finish`.

    Raises EngineDead when the engine ends first. However slowly it is read, nobody else waits.
    """

    def __aiter__(self) -> TokenStream: ...

    async def __anext__(self) -> Update: ...

    def cancel(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """End the request early and go on reading: the last Update says `reason`."""
        ...

    async def aclose(self) -> None:
        """Stop reading; a request that still runs is cancelled and its blocks are freed."""
        ...


class Engine(Protocol):
    """The engine as seen from the HTTP side, on one event loop."""

    stats: EngineStats

    @property
    def state(self) -> EngineState: ...

    @property
    def info(self) -> EngineInfo:
        """Raises EngineNotReady before the engine was ready once."""
        ...

    @property
    def last_seen_s(self) -> float:
        """Seconds since the engine last said anything."""
        ...

    async def start(self) -> EngineInfo: ...

    async def submit(self, spec: RequestSpec) -> TokenStream:
        """Raises Overloaded, BadRequest, EngineNotReady or EngineDead."""
        ...

    async def close(self, timeout_s: float = 10.0) -> None: ...

    async def wait_dead(self) -> PacelineError | None: ...

    def add_stats_listener(self, listener: Callable[[EngineStats], None]) -> None: ...
