"""OpenVINO GenAI: its continuous batching on a GGUF file, step by step."""

from __future__ import annotations

import time
from importlib import import_module
from importlib.metadata import version
from typing import Any

from _openvino import config_of, pipeline_of
from _protocol import Times, work

openvino: Any = import_module("openvino")
np: Any = import_module("numpy")


class OpenVino:
    """Requests are added together; the pipeline's own scheduler does the rest."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._pipe = pipeline_of(order["model"], order["threads"], order["kv_gib"], order["options"])
        self._next = 0
        self.facts = {"version": version("openvino-genai")}

    def run(self, prompts: list[list[int]], count: int) -> tuple[Times, list[int]]:
        config = config_of(count)
        start_s = time.perf_counter()
        handles = []
        for prompt in prompts:
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipe.add_request(self._next, ids, config))
            self._next += 1
        times: Times = [[] for _ in prompts]
        tokens: list[int] = []
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            now_s = time.perf_counter() - start_s
            for index, handle in enumerate(handles):
                if handle.can_read():
                    new = next(iter(handle.read().values())).generated_ids
                    times[index] += [now_s] * len(new)
                    if index == 0:
                        tokens += new
        return times, tokens


if __name__ == "__main__":
    work(OpenVino)
