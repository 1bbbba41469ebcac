"""What every model is to the backend."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from paceline.runtime.batch import RaggedBatch
from paceline.runtime.kernels.kvpool import KVPool, KVSpec


class Model(Protocol):
    """A decoder that runs one ragged batch at a time over a paged KV pool.

    How native families are built is `registry.ModelFactory`.
    """

    vocab_size: int
    kv_specs: tuple[KVSpec, ...]  # one a layer that caches; `layer` in paged_attention indexes it

    def forward(self, batch: RaggedBatch, pool: KVPool) -> Tensor:
        """Write this step's KV into the pool and return float32 logits [len(batch.logit_rows), vocab_size].

        Called under torch.inference_mode.
        """
        ...
