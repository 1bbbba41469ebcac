"""What every endpoint needs: the engine, its model once known, the settings, the metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.engine.supervisor import EngineState
from paceline.errors import EngineNotReady, NotFound, UnsupportedModel
from paceline.serve.attainment import Attainment
from paceline.serve.engine_port import Engine
from paceline.serve.metrics import ServeMetrics
from paceline.serve.prepare import Model
from paceline.serve.settings import ServeSettings
from paceline.serve.timeline import Timeline
from paceline.text.tokenizer import Tokenizer


class ServerContext:
    """One server's state. Belongs to one event loop."""

    def __init__(self, engine: Engine, settings: ServeSettings, tokenizer: Tokenizer | None = None) -> None:
        """Without a `tokenizer`, the engine's own is loaded once the engine is ready."""
        self.engine = engine
        self.settings = settings
        self.draining = False
        self.attainment = Attainment(settings.classes)
        self.metrics = ServeMetrics(
            lambda: self.shown_name, lambda: engine.stats, lambda: self.attainment.report(time.monotonic())
        )
        self.timeline = Timeline()
        self.idle = asyncio.Event()  # no generating request is running
        self.idle.set()
        self._given_tokenizer = tokenizer
        self._expected: tuple[str, asyncio.Task[Tokenizer]] | None = None  # a folder, and its tokenizer to come
        self._model: Model | None = None
        self._loading = asyncio.Lock()
        self._running = 0
        engine.add_stats_listener(self.metrics.note_step)
        engine.add_stats_listener(self.timeline.note)

    @property
    def shown_name(self) -> str:
        """The model's name, "" before it is known."""
        if self.settings.served_names:
            return self.settings.served_names[0]
        return self._model.name if self._model is not None else ""

    async def model(self) -> Model:
        """What is served. Raises EngineNotReady before the engine was ready once, ModelError for a bad tokenizer."""
        info = self.engine.info
        if self._model is not None and self._model.info is info:
            return self._model
        async with self._loading:
            if self._model is None or self._model.info is not info:
                tokenizer = self._given_tokenizer
                if tokenizer is None:
                    tokenizer = await self._load_tokenizer(info.tokenizer_dir)
                if tokenizer.vocab_size > info.vocab_size:
                    raise UnsupportedModel(
                        f"the tokenizer of {info.model} has {tokenizer.vocab_size} tokens and the model "
                        f"{info.vocab_size}: they do not belong together"
                    )
                names = self.settings.served_names or (Path(info.model).name,)
                self._model = Model(info, tokenizer, names, int(time.time()))
            return self._model

    def expect_tokenizer(self, folder: Path) -> None:
        """Begin to load the tokenizer of the folder that the engine will most likely name once it is ready."""
        loading = asyncio.create_task(asyncio.to_thread(Tokenizer.from_dir, folder))
        loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # whether or not it is wanted
        self._expected = (str(folder), loading)

    async def _load_tokenizer(self, folder: str) -> Tokenizer:
        expected, self._expected = self._expected, None  # once: another life of the engine may find other files there
        if expected is not None and expected[0] == folder:
            return await expected[1]
        return await asyncio.to_thread(Tokenizer.from_dir, folder)

    async def named_model(self, name: str | None) -> Model:
        """The model, if that is what the client calls it. Raises NotFound."""
        model = await self.model()
        if name is not None and name not in model.names:
            raise NotFound(
                f"the model {name[:128]!r} does not exist here; served is {', '.join(map(repr, model.names))}",
                param="model",
                code="model_not_found",
            )
        return model

    def unready_reason(self) -> str | None:
        """Why the engine cannot answer now; None if it can."""
        state = self.engine.state
        if state in (EngineState.STARTING, EngineState.DEAD):
            return state.value
        if self.engine.last_seen_s > self.settings.hung_after_s:
            return "hung"
        return None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a generating request. Raises EngineNotReady while draining."""
        if self.draining:
            raise EngineNotReady("this server is stopping and takes no new requests; send it to another")
        self._running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self.idle.set()
