"""What a request costs outside the engine: time that is not in any step, and that clients see all the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds. The default is nothing: times are then those at the engine's door.

    A server's HTTP and tokenising take milliseconds for each request (16 ms were fitted on vLLM 0.15, predicting a
    TTFT that is measured at the client); what is given here is added as it stands, without queueing.
    """

    before_s: float = 0.0  # from the client's send until the scheduler can see the request
    before_token_s: float = 0.0  # more of it, for each token of the prompt
    after_s: float = 0.0  # from the end of a step until the client reads its tokens
    after_row_s: float = 0.0  # more of it, for each row before it in the step: streams are written one after the other

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not 0.0 <= value < math.inf:
                raise ConfigError(f"overhead {entry.name} is {value}; it must be a number of seconds from 0 up")

    def reaches_s(self, sent_s: float, prompt_tokens: int) -> float:
        """When the scheduler can see a request."""
        return sent_s + self.before_s + self.before_token_s * prompt_tokens

    def read_s(self, made_s: float, place: int) -> float:
        """When a client reads a token of a step that ended at `made_s`, behind `place` others of its."""
        return made_s + self.after_s + self.after_row_s * place


NONE = Overheads()
