"""Every error Paceline raises on purpose, as one tree.

    PacelineError
    ├── ConfigError            a setting that cannot be honoured (exit code 64 at the command line)
    ├── ModelError             a checkpoint, tokenizer or hub problem: the server refuses to start
    │   ├── ModelNotFound        no such file, folder, known name or hub id
    │   ├── CorruptModel         truncated, wrong checksum, missing shard or tensor, pickled weights
    │   └── UnsupportedModel     an architecture, tensor type or feature we do not run, by name
    ├── RequestError           what a client sent; carries the HTTP status and the field at fault
    │   ├── BadRequest            400
    │   ├── Unauthorized          401
    │   ├── Forbidden             403
    │   ├── NotFound              404
    │   ├── TooLarge              413
    │   └── Overloaded            429, with retry_after_s
    └── EngineError            the engine cannot answer
        ├── EngineDead            its process ended; waiting requests end with this
        └── EngineNotReady        still starting, or draining

Messages name the field, the value and what to do next. They are mapped to HTTP in `serve` and to exit codes in
`app`, and nowhere else.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Root of the tree. `str(error)` is one clear line for people."""


class ConfigError(PacelineError):
    """A setting that cannot be honoured."""


class ModelError(PacelineError):
    """A model that cannot be served."""


class ModelNotFound(ModelError):
    """No such file, folder, known name or hub id."""


class CorruptModel(ModelError):
    """Files that are there but cannot be trusted or read."""


class UnsupportedModel(ModelError):
    """An architecture, tensor type or feature that Paceline does not run, named in the message."""


class RequestError(PacelineError):
    """Something a client sent. `status` is the HTTP status, `param` the field at fault (None: the whole body)."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class BadRequest(RequestError):
    """400: a field is missing, of the wrong type or out of range."""


class Unauthorized(RequestError):
    """401: no key, or one we do not know."""

    status = 401
    kind = "authentication_error"


class Forbidden(RequestError):
    """403: the key is known and may not do this."""

    status = 403
    kind = "permission_error"


class NotFound(RequestError):
    """404: no such model or path."""

    status = 404
    kind = "not_found_error"


class TooLarge(RequestError):
    """413: the body is over the limit."""

    status = 413


class Overloaded(RequestError):
    """429: the queue is full or the promise could not be kept; come back after `retry_after_s`."""

    status = 429
    kind = "overloaded_error"

    def __init__(self, message: str, *, retry_after_s: float, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class EngineError(PacelineError):
    """The engine cannot answer."""


class EngineDead(EngineError):
    """The engine process ended; every request that waited for it ends with this error."""


class EngineNotReady(EngineError):
    """The engine is still starting, or draining before it stops."""
