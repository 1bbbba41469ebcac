"""`paceline serve`, put together: settings and keys to the HTTP room, an engine process behind it, words for people."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.app.build import FACTORY, EngineSpec, expect_tokenizer, plan_engine
from paceline.app.settings import AuthSettings, BatchSettings, Settings
from paceline.app.stages import StagePrinter, progress_on_stderr
from paceline.engine.client import EngineClient, EngineLaunch
from paceline.engine.messages import EngineInfo, Stage
from paceline.errors import ConfigError
from paceline.serve import logs
from paceline.serve.batch import settings as batches
from paceline.serve.early import bind, loop_factory
from paceline.serve.keys import ApiKey, hash_key, read_key_file
from paceline.serve.settings import ServeSettings
from paceline.version import __version__

log = logging.getLogger("paceline.serve")


def serve_settings(settings: Settings) -> ServeSettings:
    """The HTTP room's slice. Raises ConfigError for a key file that cannot be used."""
    serve = settings.serve
    return ServeSettings(
        host=serve.host,
        port=serve.port,
        tls_certfile=serve.tls_cert,
        tls_keyfile=serve.tls_key,
        served_names=settings.model.served_names,
        keys=read_keys(settings.auth),
        cors_origins=serve.cors_origins,
        classes=settings.scheduler.classes,
        default_class=settings.scheduler.default_class,
        strict_fields=serve.strict_fields,
        log_prompts=settings.log.log_prompts,
        max_body_bytes=int(serve.max_body_mib * (1 << 20)),
        max_choices=serve.max_choices,
        max_sequences=serve.max_sequences,
        max_logprobs=serve.max_logprobs,
        max_logit_bias=serve.max_logit_bias,
        keepalive_s=serve.keepalive_s,
        write_timeout_s=serve.write_timeout_s,
        hung_after_s=serve.hung_after_s,
        drain_s=serve.drain_s,
        batch=batch_settings(settings.batch, os.environ),
    )


def batch_settings(batch: BatchSettings, environ: Mapping[str, str]) -> batches.BatchSettings:
    """What the server allows of batches; `environ` says where a user's data lies."""
    return batches.BatchSettings(
        folder=batch_folder(batch, environ) if batch.batches else None,
        concurrency=batch.batch_concurrency,
        max_file_bytes=int(batch.max_batch_file_mib * (1 << 20)),
        max_requests=batch.max_batch_requests,
        max_tenant_bytes=int(batch.max_tenant_gib * (1 << 30)),
        keep_s=batch.batch_keep_days * 86_400,
    )


def batch_folder(batch: BatchSettings, environ: Mapping[str, str]) -> Path:
    """The folder named, else `$XDG_DATA_HOME/paceline/batches`, where XDG says a user's data lies."""
    if batch.batch_dir is not None:
        return Path(batch.batch_dir).expanduser()
    root = environ.get("XDG_DATA_HOME") or ""
    base = Path(root) if os.path.isabs(root) else Path.home() / ".local" / "share"
    return base / "paceline" / "batches"


def read_keys(auth: AuthSettings) -> tuple[ApiKey, ...]:
    """Keys of the file, and the one of the environment, which may do everything."""
    keys: tuple[ApiKey, ...] = ()
    if auth.api_key_file is not None:
        file = Path(auth.api_key_file)
        try:
            file = file.expanduser()
            keys = read_key_file(file.read_text("utf-8"), str(file))
        except (OSError, UnicodeDecodeError, RuntimeError) as error:  # RuntimeError: ~ of a user that does not exist
            raise ConfigError(
                f"cannot read the key file {file}: {getattr(error, 'strerror', None) or error}"
            ) from error
        if not keys:
            raise ConfigError(f"{file} holds no key; `paceline key new NAME` prints an entry")
    if auth.api_key is not None:
        keys = (*keys, ApiKey("environment", hash_key(auth.api_key)))
    return keys


def serve(settings: Settings) -> int:
    """Serve until told to stop; the exit code. Raises what kept it from starting."""
    logs.configure(settings.log.log_format, settings.log.log_level)
    http = serve_settings(settings)
    if http.port:
        bind(http.host, http.port).close()  # a port in use is told before a model is fetched, not after
    with progress_on_stderr(settings.model.model) as progress:
        spec = plan_engine(settings, log=settings.log, progress=progress)
    front = Front(settings, spec.name)
    launch = EngineLaunch(FACTORY, spec.to_config())
    engine = EngineClient(launch, restart=settings.serve.restart, on_stage=front.on_stage)
    front.on_starting()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(engine, http, front, spec))


async def _serve(engine: EngineClient, http: ServeSettings, front: Front, spec: EngineSpec) -> int:
    """The engine first: its process imports torch on one core, while this one imports the HTTP room on another."""
    starting = asyncio.create_task(engine.start())
    try:
        # Imports in a thread would hold up the engine's start too, which is two turns of the event loop.
        while engine.pid is None and not starting.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
        server = await asyncio.to_thread(importlib.import_module, "paceline.serve.server")
        code: int = await server.serve(
            engine,
            http,
            starting=starting,
            expected_tokenizer=await asyncio.to_thread(expect_tokenizer, spec),
            on_listening=front.on_listening,
            on_ready=front.on_ready,
        )
        return code
    finally:
        starting.cancel()
        await engine.close()


class Front:
    """What the person who starts a server sees: stages on stderr, then how to call it on stdout; or JSON logs."""

    def __init__(self, settings: Settings, model: str) -> None:
        self._settings = settings
        self._model = model
        self._is_for_people = settings.log.log_format == "text"
        self._print_stage: Callable[[Stage], None] = StagePrinter()
        self._began = time.monotonic()

    def on_starting(self) -> None:
        if self._is_for_people:
            print(f"Paceline {__version__}: loading {self._model}", file=sys.stderr, flush=True)

    def on_listening(self, url: str) -> None:
        if not self._is_for_people:
            log.info("starting", extra={"version": __version__, "model": self._model, "url": url})

    def on_stage(self, stage: Stage) -> None:
        if self._is_for_people:
            self._print_stage(stage)
        elif stage.seconds is not None:
            log.info("stage", extra={"stage": stage.name, "seconds": round(stage.seconds, 3)})

    def on_ready(self, url: str, info: EngineInfo) -> None:
        seconds = time.monotonic() - self._began
        facts = {
            "model": info.model,
            "architecture": info.architecture,
            "road": info.road,
            "dtype": info.dtype,
            "kv_dtype": info.kv_dtype,
            "kernels": info.kernels,
            "quantization": info.quantization,
            "device": info.device,
            "max_model_len": info.max_model_len,
            "kv_tokens": info.num_blocks * info.block_size,
            "kv_gib": round(info.kv_bytes / (1 << 30), 3),
        }
        if not self._is_for_people:
            log.info("ready", extra={"url": url, "seconds": round(seconds, 3), **facts})
            return
        held = info.dtype if info.quantization == "none" else f"{info.quantization} weights and {info.dtype}"
        print(
            f"ready in {seconds:.1f} s: {info.architecture} ({info.road}), {held} on {info.device} by {info.kernels} "
            f"kernels, context "
            f"{info.max_model_len} tokens, KV cache {facts['kv_gib']:.2f} GiB in {info.kv_dtype} for "
            f"{facts['kv_tokens']} tokens",
            file=sys.stderr,
        )
        print(f"\nServing on {url}. Try:\n\n{curl_line(url, info, self._settings)}\n", flush=True)


def curl_line(url: str, info: EngineInfo, settings: Settings) -> str:
    """A command that works as it stands, given the key in PACELINE_API_KEY where one is needed."""
    body: dict[str, object]
    if _has_chat_template(Path(info.tokenizer_dir)):
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        path, body = "chat/completions", {"messages": messages, "temperature": 0}
    else:
        path, body = "completions", {"prompt": "Once upon a time", "max_tokens": 32}
    name = next(iter(settings.model.served_names), info.model)
    parts = ["curl", "-s"]
    if settings.serve.tls_cert is not None:
        parts += ["--cacert", settings.serve.tls_cert]
    words = [shlex.join([*parts, f"{url}/v1/{path}"])]
    if settings.auth.api_key_file is not None or settings.auth.api_key is not None:
        words.append('-H "Authorization: Bearer $PACELINE_API_KEY"')
    words.append("-H 'Content-Type: application/json'")
    words.append(f"-d {shlex.quote(json.dumps({'model': name, **body}))}")
    return " \\\n  ".join(words)


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and "chat_template" in json.loads(config.read_text("utf-8"))
