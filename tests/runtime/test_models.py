"""Each native family against transformers, on tiny random weights in float32."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from paceline.runtime.batch import batch_of
from paceline.runtime.formats.config import config_from_hf
from paceline.runtime.formats.safetensors import SafetensorsWeights
from paceline.runtime.kernels.kvpool import KVPool
from paceline.runtime.kernels.native import unavailable
from paceline.runtime.layers.native import WeightStore
from paceline.runtime.making import choose
from paceline.runtime.models.base import Model
from paceline.runtime.models.registry import NATIVE, native_model

BLOCK = 4
COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # logits far enough apart to tell right from nearly right
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "norm_topk_prob": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases-tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-head-dim": ("Llama", {"head_dim": 16, "num_key_value_heads": 4, "hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 8}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 5, "moe_intermediate_size": 24, "head_dim": 8}),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {
            **EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "norm_topk_prob": False,
            "mlp_only_layers": [0],
            "decoder_sparse_step": 1,
        },
    ),
}


@dataclass
class Pair:
    """A model of ours and transformers' over the same weights."""

    ours: Model
    theirs: Any
    folder: Path

    def again(self, dtype: torch.dtype) -> Model:
        """Ours, loaded in another dtype."""
        return load(self.folder, str(dtype).removeprefix("torch."))

    def pool(self, num_blocks: int) -> KVPool:
        return KVPool(self.ours.kv_specs, num_blocks, BLOCK)

    def reference(self, tokens: list[int]) -> Tensor:
        """Logits after every token, [len(tokens), vocab]."""
        with torch.inference_mode():
            logits: Tensor = self.theirs(torch.tensor([tokens])).logits[0]
        return logits


def randomise(theirs: torch.nn.Module) -> None:
    """Draw what transformers initialises to ones and zeros: those would hide a mistake."""
    for name, parameter in theirs.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)


@pytest.fixture(
    scope="module", params=[(case, kernels) for case in CASES for kernels in ("torch", "native")], ids="-".join
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case, kernels = request.param
    if kernels == "native" and (reason := unavailable()) is not None:
        pytest.skip(reason)
    family, settings = CASES[case]
    folder: Path = tmp_path_factory.mktemp(case)
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **settings})
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    randomise(theirs)
    theirs.save_pretrained(folder)
    return Pair(load(folder, "float32", kernels), theirs, folder)


def load(folder: Path, dtype: str, kernels: str = "torch") -> Model:
    """Our model from a folder, without what `load_model` adds."""
    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    factory = native_model(config.architecture)
    assert factory is not None
    making = choose("cpu", dtype, kernels, "none", None)
    weights = SafetensorsWeights(folder, making.read_dtype)
    try:
        return factory(config, making.parts(weights, WeightStore()))
    finally:
        weights.close()


def tokens_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, COMMON["vocab_size"], (length,), generator=generator).tolist()


def close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_whole_prompts_in_one_batch(pair: Pair) -> None:
    """Several prompts at once, one of a single token, over scattered blocks."""
    pool = pair.pool(40)
    prompts = [tokens_of(n, seed=n) for n in (13, 1, 30, 8)]
    tables = [[9, 2, 31, 4], [7], [1, 0, 3, 5, 6, 8, 39, 38], [20, 11]]
    batch = batch_of(prompts, [0] * 4, tables, block_size=BLOCK, scratch_block=pool.scratch_block, all_logits=True)
    with torch.inference_mode():
        logits = pair.ours.forward(batch, pool)
    close(logits, torch.cat([pair.reference(p) for p in prompts]))


def test_chunks_and_decodes_together(pair: Pair) -> None:
    """Four sequences at different places, each step mixing chunks of several sizes with decodes."""
    pool = pair.pool(60)
    sequences = [tokens_of(n, seed=n) for n in (40, 26, 33, 19)]
    references = [pair.reference(s) for s in sequences]
    tables = [list(range(r, 60, 4)) for r in range(4)]
    done = [0, 0, 0, 0]
    sizes = [(5, 1, 3, 19), (1, 1, 9, 0), (16, 8, 1, 0), (1, 1, 1, 0), (1, 15, 1, 0), (3, 0, 18, 0), (13, 0, 0, 0)]
    for step in sizes:
        rows = [i for i in range(4) if step[i]]
        ends = [done[i] + step[i] for i in rows]
        batch = batch_of(
            [sequences[i][:end] for i, end in zip(rows, ends, strict=True)],
            [done[i] for i in rows],
            [tables[i] for i in rows],
            block_size=BLOCK,
            scratch_block=pool.scratch_block,
        )
        with torch.inference_mode():
            logits = pair.ours.forward(batch, pool)
        close(logits, torch.stack([references[i][end - 1] for i, end in zip(rows, ends, strict=True)]))
        for i, end in zip(rows, ends, strict=True):
            done[i] = end
    assert done == [40, 26, 33, 19]


def test_no_logits_wanted(pair: Pair) -> None:
    """A step of chunks that end before their prompt's end asks for no logits."""
    pool = pair.pool(4)
    batch = batch_of([tokens_of(6, seed=1)], [0], [[0, 1]], block_size=BLOCK, scratch_block=pool.scratch_block)
    none = batch.logit_rows[:0]
    with torch.inference_mode():
        silent = type(batch)(**{**{f: getattr(batch, f) for f in batch.__dataclass_fields__}, "logit_rows": none})
        assert pair.ours.forward(silent, pool).shape == (0, COMMON["vocab_size"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(pair: Pair, dtype: torch.dtype) -> None:
    """Half precision runs on every path, cache included, and differs by its rounding."""
    ours = pair.again(dtype)
    pool = KVPool(ours.kv_specs, 12, BLOCK, dtype=dtype)
    tokens = tokens_of(20, seed=4)
    with torch.inference_mode():
        for start, end in ((0, 9), (9, 17), (17, 18), (18, 19)):
            batch = batch_of(
                [tokens[:end]], [start], [[3, 1, 4, 0, 5]], block_size=BLOCK, scratch_block=pool.scratch_block
            )
            logits = ours.forward(batch, pool)
    wanted = pair.reference(tokens)[18]
    assert logits.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(logits[0], wanted, dim=0) > 0.98


def test_every_registered_family_is_tried() -> None:
    assert {f"{family}ForCausalLM" for family, _ in CASES.values()} == set(NATIVE)


def test_unknown_architecture_has_no_native_model() -> None:
    assert native_model("BloomForCausalLM") is None
