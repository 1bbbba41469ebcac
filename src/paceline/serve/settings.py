"""This room's slice of the settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.classes import BUILT_IN, DEFAULT_CLASS, TrafficClass
from paceline.errors import ConfigError
from paceline.serve.batch.settings import BatchSettings
from paceline.serve.keys import ApiKey


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """How to serve, resolved. Sizes in bytes or counts, times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes a free one
    tls_certfile: str | None = None
    tls_keyfile: str | None = None
    served_names: tuple[str, ...] = ()  # what clients call the model; the first is shown. () is the engine's own name
    keys: tuple[ApiKey, ...] = ()  # none: everybody may call
    cors_origins: tuple[str, ...] = ()
    classes: tuple[TrafficClass, ...] = BUILT_IN
    default_class: str = DEFAULT_CLASS  # of requests that name none
    strict_fields: bool = False  # unknown body fields are an error
    log_prompts: bool = False  # at debug level; off unless somebody asks for it by name

    max_head_bytes: int = 64 << 10  # request line and headers
    max_body_bytes: int = 8 << 20
    max_choices: int = 128  # n
    max_sequences: int = 1024  # n times prompts of one body
    max_logprobs: int = 20
    max_stops: int = 16
    max_stop_chars: int = 256
    max_logit_bias: int = 1024

    head_timeout_s: float = 30.0  # for request line and headers to arrive
    body_timeout_s: float = 60.0  # for a whole body to arrive
    keepalive_s: float = 15.0  # of silence on a stream, after which a comment goes out
    write_timeout_s: float = 300.0  # a reader that takes nothing for so long is gone
    hung_after_s: float = 120.0  # without a word from the engine
    drain_s: float = 30.0  # how long running requests may go on after SIGTERM

    batch: BatchSettings = field(default_factory=BatchSettings)

    def __post_init__(self) -> None:
        if (self.tls_certfile is None) != (self.tls_keyfile is None):
            raise ConfigError("TLS needs a certificate and its private key, both or neither")
        names = [kind.name for kind in self.classes]
        if self.default_class not in names:
            raise ConfigError(f"default_class is {self.default_class!r}; it must be one of {', '.join(names)}")

    @property
    def tightest_itl_s(self) -> float | None:
        """The smallest gap between tokens that any class is promised."""
        return min((kind.itl_s for kind in self.classes if kind.itl_s is not None), default=None)
