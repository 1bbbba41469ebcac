"""Paceline on its own loop, without a server."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch  # noqa: F401  # the engine's imports come before memory is measured
from _protocol import Times, work

from paceline.app.build import make_engine, plan_from_arguments
from paceline.core.sampling import SamplingParams
from paceline.core.step import Accepted, RequestSpec
from paceline.engine.loop import EngineLoop
from paceline.runtime.backend import ModelBackend  # noqa: F401
from paceline.runtime.load import load_model  # noqa: F401
from paceline.version import __version__


class PacelineEngine:
    """The scheduler, the engine's loop and the model; steps of decodes first, as large as they come."""

    def __init__(self, order: dict[str, Any]) -> None:
        settings = {"policy": "decode_first", "prefix_caching": False, "max_model_len": order["tokens"]}
        spec = plan_from_arguments("cpu", order["model"], {**settings, "kv_gib": order["kv_gib"], **order["options"]})
        parts = make_engine(spec, lambda *_: None)
        self._loop = EngineLoop(parts.scheduler, parts.backend)
        self._ids = itertools.count()
        info = parts.info
        self.facts = {
            "version": __version__,
            "kernels": info.kernels,
            "quantization": info.quantization,
            "weights_bytes": info.weights_bytes,
            "kv_bytes": info.kv_bytes,
        }

    def run(self, prompts: list[list[int]], count: int) -> tuple[Times, list[int]]:
        ids = [f"r{next(self._ids)}" for _ in prompts]
        times: dict[str, list[float]] = {name: [] for name in ids}
        tokens: list[int] = []
        start_s = time.perf_counter()
        for name, prompt in zip(ids, prompts, strict=True):
            sampling = SamplingParams(temperature=0.0, max_tokens=count)
            assert isinstance(self._loop.submit(RequestSpec(name, tuple(prompt), sampling)), Accepted)
        open_ = set(ids)
        while open_:
            events = self._loop.step()
            if events is None:
                time.sleep(self._loop.rest_s or 0.0)
                continue
            now_s = time.perf_counter() - start_s
            for name, new in zip(events.ids, events.tokens, strict=True):
                times[name] += [now_s] * len(new)
                if name == ids[0]:
                    tokens += new
            open_ -= {finish.request_id for finish in events.finished}
        return list(times.values()), tokens


if __name__ == "__main__":
    work(PacelineEngine)
