"""What every policy is."""

from __future__ import annotations

from paceline.core.desk import Desk
from paceline.core.pace import Pace
from paceline.core.policies.parts.knobs import check_knobs
from paceline.core.request import Request
from paceline.core.step import FinishReason, Rejected


class Policy:
    """Decides one step at a time. A policy is a dataclass; its public fields are its knobs.

    It must be deterministic: the same calls give the same decisions, in every process. It may keep state of its own.
    """

    def __post_init__(self) -> None:
        """Refuse knobs that cannot be honoured (`ConfigError`)."""
        check_knobs(self)

    def decide(self, desk: Desk) -> None:
        """Give tokens with `desk.grow` and `desk.admit`, take memory with `desk.preempt`."""
        raise NotImplementedError

    def arrive(self, desk: Desk, request: Request) -> Rejected | None:
        """A request comes: take note of it, or refuse it. The default takes everyone."""
        return None

    def retry_after_s(self, desk: Desk, queue: list[Request]) -> float:
        """Seconds until one of this full queue has begun, for whom it has no room. The default foretells nothing."""
        return 1.0

    def pace_of(self, request: Request) -> Pace | None:
        """How the tokens of one who was taken are to be shown; None: as they come."""
        return None

    def leave(self, request: Request, reason: FinishReason) -> None:
        """A request that had come ends, in whatever way: forget it."""
