"""Every setting, once: slices of frozen values, each field with its kind and its help.

The command line's flags, the keys of `paceline.toml`, the `PACELINE_*` variables, `paceline config` and the table in
`docs/configuration.md` are all made from this file. Adding a setting is one field here. Names are unique over all
slices, since a flag and a variable carry no slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any

from paceline.app.kinds import Kind, choice, classes, cores, number, options, path, switch, text, texts, whole
from paceline.app.store import DEFAULT_MODEL
from paceline.core.classes import BUILT_IN, DEFAULT_CLASS, TrafficClass
from paceline.core.policies.registry import ALIASES, POLICIES


def setting(default: Any, kind: Kind, meaning: str, *, secret: bool = False) -> Any:
    """A field of a slice. A secret comes from the environment alone and is never printed."""
    return field(default=default, metadata={"kind": kind, "help": meaning, "secret": secret})


_POLICY = choice(*sorted((*POLICIES, *ALIASES)), brief="the name of a policy")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, and how it is held."""

    model: str = setting(
        DEFAULT_MODEL, text, "a known name, a .gguf file, a folder in Hugging Face layout, or a hub id"
    )
    served_names: tuple[str, ...] = setting((), texts, "what clients call it, the first is shown; its own name if none")
    dtype: str = setting("auto", choice("auto", "float32", "bfloat16", "float16"), "of weights and arithmetic")
    quantization: str = setting(
        "none",
        choice("none", "int8", "int4", "int4-g64", "int4-g128"),
        "of the weights, on a CPU with the native kernels",
    )
    kernels: str = setting(
        "auto", choice("auto", "native", "torch"), "what computes; auto is native on a CPU with them"
    )
    device: str = setting("auto", text, "auto, cpu, cuda, cuda:1, ...; auto takes a GPU when there is one")
    threads: int | None = setting(None, whole(1, 1024), "CPU threads of the model; one for each core if not given")
    cores: tuple[int, ...] = setting(
        (), cores, "pin the model's threads to these cores, one each; native kernels alone"
    )


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What one step may hold and who waits."""

    policy: str = setting("slo", _POLICY, "how each step's tokens are shared out")
    policy_options: tuple[tuple[str, Any], ...] = setting((), options, "the policy's own knobs, by name")
    classes: tuple[TrafficClass, ...] = setting(BUILT_IN, classes, "classes of traffic and what each is promised")
    default_class: str = setting(DEFAULT_CLASS, text, "class of requests that name none")
    max_model_len: int | None = setting(None, whole(1), "most tokens of one sequence; the model's own limit by default")
    max_num_batched_tokens: int = setting(2048, whole(1), "token budget of one step")
    max_num_seqs: int = setting(256, whole(1), "most requests that run at once")
    max_waiting: int | None = setting(None, whole(0), "longest queue before requests get 429; unbounded by default")
    call_log: str | None = setting(None, path, "write every scheduler call here, for replay; it holds prompts as ids")


@dataclass(frozen=True, slots=True)
class KVSettings:
    """Memory for keys and values."""

    block_size: int = setting(16, whole(1, 256), "tokens in a KV block")
    kv_cache_dtype: str = setting(
        "auto",
        choice("auto", "float32", "bfloat16", "float16", "int8"),
        "what keys and values are kept in; auto is dtype, or bfloat16 beside quantized weights",
    )
    kv_gib: float | None = setting(None, number(0), "size of the KV pool in GiB; wins over kv_share")
    kv_share: float | None = setting(
        None,
        number(0, 1),
        "share of the memory that is free once the model is loaded; 0.9 on a GPU, on a CPU 0.3 and at most 4 GiB",
    )
    prefix_caching: bool = setting(True, switch, "reuse the KV of prompts that begin alike")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The HTTP server."""

    host: str = setting("127.0.0.1", text, "address to listen on; 0.0.0.0 for all")
    port: int = setting(8000, whole(0, 65535), "port to listen on; 0 takes a free one")
    tls_cert: str | None = setting(None, path, "certificate chain in PEM; with tls_key, serve HTTPS")
    tls_key: str | None = setting(None, path, "private key in PEM")
    restart: bool = setting(False, switch, "start the engine again if it dies")
    strict_fields: bool = setting(False, switch, "answer 400 to unknown fields in a request instead of ignoring them")
    cors_origins: tuple[str, ...] = setting(
        (), texts, "origins whose pages may call the API from a browser; none by default"
    )
    max_body_mib: float = setting(8.0, number(0), "largest request body in MiB")
    max_choices: int = setting(128, whole(1), "largest n of a request")
    max_sequences: int = setting(1024, whole(1), "most answers of a request, over its prompts and n")
    max_logprobs: int = setting(20, whole(0), "most alternatives of a request's logprobs")
    max_logit_bias: int = setting(1024, whole(0), "most entries of a request's logit_bias")
    keepalive_s: float = setting(15.0, number(0), "silence on a stream after which a comment goes out")
    write_timeout_s: float = setting(300.0, number(0), "how long a reader may take nothing before it counts as gone")
    hung_after_s: float = setting(120.0, number(0), "silence of the engine after which /health fails")
    drain_s: float = setting(30.0, number(0), "how long SIGTERM waits for running requests before it ends them")


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Offline batches on the server: `/v1/files` and `/v1/batches`."""

    batches: bool = setting(True, switch, "take batches; --no-batches turns both endpoints off")
    batch_dir: str | None = setting(
        None, path, "where files and batches lie, one server each; $XDG_DATA_HOME/paceline/batches by default"
    )
    batch_concurrency: int = setting(32, whole(1), "requests of batches in the engine's hands at once")
    max_batch_file_mib: float = setting(200.0, number(0), "largest file of requests in MiB")
    max_batch_requests: int = setting(50_000, whole(1), "most requests in one batch")
    max_tenant_gib: float = setting(2.0, number(0), "room for all files of a tenant in GiB")
    batch_keep_days: float = setting(30.0, number(0), "how long files and ended batches stay")


@dataclass(frozen=True, slots=True)
class AuthSettings:
    """Who may call."""

    api_key_file: str | None = setting(None, path, "keys in TOML, as `paceline key new` prints them")
    api_key: str | None = setting(None, text, "one key that may do everything", secret=True)


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is written to stderr. Prompts only where `log_prompts` asks for them."""

    log_level: str = setting("info", choice("debug", "info", "warning", "error"), "least severity that is written")
    log_format: str = setting("text", choice("text", "json"), "for people, or one JSON object a line")
    log_prompts: bool = setting(False, switch, "at level debug, write prompts too")


@dataclass(frozen=True, slots=True)
class Settings:
    """All slices. Each part of Paceline receives its own, resolved."""

    model: ModelSettings = ModelSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    kv: KVSettings = KVSettings()
    serve: ServeSettings = ServeSettings()
    batch: BatchSettings = BatchSettings()
    auth: AuthSettings = AuthSettings()
    log: LogSettings = LogSettings()


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting of the table, seen from outside."""

    slice: str
    name: str
    kind: Kind
    help: str
    default: Any
    secret: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "PACELINE_" + self.name.upper()

    @property
    def key(self) -> str:
        return f"{self.slice}.{self.name}"


def _entries() -> Iterator[Entry]:
    for part in fields(Settings):
        each: Field[Any]
        for each in fields(part.default):  # type: ignore[arg-type]
            data = each.metadata
            yield Entry(part.name, each.name, data["kind"], data["help"], each.default, data["secret"])


TABLE: dict[str, Entry] = {entry.name: entry for entry in _entries()}
SLICES: dict[str, type] = {part.name: type(part.default) for part in fields(Settings)}


def as_markdown() -> str:
    """The tables of docs/configuration.md: `python -m paceline.app.settings` prints them."""
    parts = []
    for part in fields(Settings):
        kind: Any = SLICES[part.name]
        rows = [
            f"## [{part.name}]\n\n{kind.__doc__}\n",
            "| key | flag | default | accepts | meaning |",
            "|---|---|---|---|---|",
        ]
        for entry in (entry for entry in TABLE.values() if entry.slice == part.name):
            flag = f"only `{entry.variable}`" if entry.secret else f"`{entry.flag}`"
            accepts = entry.kind.brief or entry.kind.accepts
            rows.append(f"| `{entry.name}` | {flag} | {_shown_default(entry)} | {accepts} | {entry.help} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _shown_default(entry: Entry) -> str:
    match entry.default:
        case bool(value):
            return f"`{str(value).lower()}`"
        case float(number):
            return f"`{number:g}`"
        case str(value) | int(value):
            return f"`{value}`"
    return ""


if __name__ == "__main__":
    print(as_markdown(), end="")
