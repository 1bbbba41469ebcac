"""This room's slice of the settings."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError
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
    strict_fields: bool = False  # unknown body fields are an error
    log_prompts: bool = False  # at debug level; off unless somebody asks for it by name

    max_body_bytes: int = 8 << 20
    max_choices: int = 128  # n
    max_sequences: int = 1024  # n times prompts of one body
    max_logprobs: int = 20
    max_stops: int = 16
    max_stop_chars: int = 256
    max_logit_bias: int = 1024

    body_timeout_s: float = 60.0  # for a whole body to arrive
    keepalive_s: float = 15.0  # of silence on a stream, after which a comment goes out
    write_timeout_s: float = 300.0  # a reader that takes nothing for so long is gone
    hung_after_s: float = 120.0  # without a word from the engine
    drain_s: float = 30.0  # how long running requests may go on after SIGTERM

    def __post_init__(self) -> None:
        if (self.tls_certfile is None) != (self.tls_keyfile is None):
            raise ConfigError("TLS needs a certificate and its private key, both or neither")
