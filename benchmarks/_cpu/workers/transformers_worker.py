"""transformers' `generate` on a static batch."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from _protocol import Times, work
from transformers import AutoModelForCausalLM


class Transformers:
    """A Hugging Face folder; all prompts of a batch are of one length."""

    def __init__(self, order: dict[str, Any]) -> None:
        torch.set_num_threads(order["threads"])
        dtype = getattr(torch, order["options"]["dtype"])
        self._model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=dtype).eval()
        weights = sum(parameter.nbytes for parameter in self._model.parameters())
        self.facts = {"version": transformers.__version__, "torch": torch.__version__, "weights_bytes": weights}

    def run(self, prompts: list[list[int]], count: int) -> tuple[Times, list[int]]:
        ids = torch.tensor(prompts)
        at: list[float] = []
        start_s = time.perf_counter()

        def note(_: Any, logits: Any) -> Any:
            at.append(time.perf_counter() - start_s)  # its token is one argmax away
            return logits

        with torch.inference_mode():
            found = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
                logits_processor=[note],
            )
        return [list(at) for _ in prompts], found[0, ids.shape[1] :].tolist()


if __name__ == "__main__":
    work(Transformers)
