"""llama.cpp by the low level of llama-cpp-python: one context, a sequence for each prompt, its own greedy sampler."""

from __future__ import annotations

import ctypes
import time
from importlib import import_module
from typing import Any

from _protocol import Times, work

llama: Any = import_module("llama_cpp.llama_cpp")
version: str = import_module("llama_cpp").__version__


class LlamaCpp:
    """Prompts are put into the context in batches of up to 512 tokens, then all decode in lockstep."""

    def __init__(self, order: dict[str, Any]) -> None:
        options = order["options"]
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.use_extra_bufts = True  # weights repacked for this processor
        self._model = llama.llama_model_load_from_file(order["model"].encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {order['model']}")
        self._streams = order["streams"]
        context = llama.llama_context_default_params()
        context.n_ctx = order["tokens"] * self._streams
        context.n_batch = context.n_ubatch = self._batch = options.get("batch", 512)
        context.n_seq_max = self._streams
        context.n_threads = context.n_threads_batch = order["threads"]
        if "flash" in options:
            context.flash_attn_type = int(options["flash"])
        self._context = llama.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {context.n_ctx} tokens")
        self._memory = llama.llama_get_memory(self._context)
        self._greedy = llama.llama_sampler_init_greedy()
        self._room = llama.llama_batch_init(max(self._batch, self._streams), 0, 1)
        self.facts = {
            "version": version,
            "weights_bytes": llama.llama_model_size(self._model),
            "system": llama.llama_print_system_info().decode().strip(),
        }

    def run(self, prompts: list[list[int]], count: int) -> tuple[Times, list[int]]:
        llama.llama_memory_clear(self._memory, True)
        times: Times = [[] for _ in prompts]
        tokens: list[int] = []
        start_s = time.perf_counter()
        last = self._prefill(prompts, times, start_s)
        tokens.append(last[0])
        for step in range(1, count):
            rows = [(last[seq], len(prompt) + step - 1, seq, True) for seq, prompt in enumerate(prompts)]
            last = [self._sample(place) for place in self._decode(rows)]
            now_s = time.perf_counter() - start_s
            for one in times:
                one.append(now_s)
            tokens.append(last[0])
        return times, tokens

    def _prefill(self, prompts: list[list[int]], times: Times, start_s: float) -> list[int]:
        """The first token of each, in order: batches are filled without regard to where a prompt ends."""
        rows = [
            (token, place, seq, place == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        firsts = [0] * len(prompts)
        for begin in range(0, len(rows), self._batch):
            part = rows[begin : begin + self._batch]
            for place in self._decode(part):
                seq = part[place][2]
                firsts[seq] = self._sample(place)
                times[seq].append(time.perf_counter() - start_s)
        return firsts

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, sequence, whether its logits are wanted); the places of those that are."""
        room = self._room
        room.n_tokens = len(rows)
        for place, (token, position, seq, wanted) in enumerate(rows):
            room.token[place] = token
            room.pos[place] = position
            room.n_seq_id[place] = 1
            room.seq_id[place][0] = seq
            room.logits[place] = int(wanted)
        code = llama.llama_decode(self._context, room)
        if code != 0:
            raise RuntimeError(f"llama_decode: {code}")
        return [place for place, row in enumerate(rows) if row[3]]

    def _sample(self, place: int) -> int:
        return int(llama.llama_sampler_sample(self._greedy, self._context, place))


def _quiet(level: int, text: bytes, data: Any) -> None:
    """llama.cpp tells much while it loads; warnings and errors alone are of use."""
    if level in (3, 4):
        print(text.decode(errors="replace"), end="")


if __name__ == "__main__":
    callback = llama.llama_log_callback(_quiet)
    llama.llama_log_set(callback, ctypes.c_void_p(0))
    work(LlamaCpp)
