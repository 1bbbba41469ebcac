"""vLLM's engine in this process, step by step."""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from _protocol import Times, work

vllm: Any = import_module("vllm")


class Vllm:
    """A Hugging Face folder."""

    def __init__(self, order: dict[str, Any]) -> None:
        options = {"dtype": "float32", "enable_prefix_caching": False, **order["options"]}
        self._llm = vllm.LLM(
            model=order["model"],
            max_model_len=order["tokens"],
            max_num_seqs=order["streams"],
            disable_log_stats=True,
            seed=0,
            **options,
        )
        self._next = 0
        self.facts = {"version": vllm.__version__}

    def run(self, prompts: list[list[int]], count: int) -> tuple[Times, list[int]]:
        engine = self._llm.llm_engine
        params = vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        start_s = time.perf_counter()
        names = []
        for prompt in prompts:
            names.append(f"r{self._next}")
            self._next += 1
            engine.add_request(names[-1], {"prompt_token_ids": prompt}, params)
        times: dict[str, list[float]] = {name: [] for name in names}
        tokens: list[int] = []
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now_s = time.perf_counter() - start_s
            for output in outputs:
                name = next(name for name in names if output.request_id.startswith(name))
                have = output.outputs[0].token_ids
                times[name] += [now_s] * (len(have) - len(times[name]))
                if name == names[0]:
                    tokens = list(have)
        return list(times.values()), tokens


if __name__ == "__main__":
    work(Vllm)
