"""What weights and caches of fewer bits cost in quality: the default model over the project's own documentation.

    python benchmarks/quantization.py [--quick] [--json FILE] [--tokens N]

Windows of text are read at once, and every token but the first of a window is predicted from those before it. Against
float32, for each window: the mean negative log-likelihood that is lost (nats a token), how often the most likely token
is the same, and the divergence KL(float32 || it) of whole distributions. Rows are the min, median and max over windows.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from _common import Report, arguments
from torch import Tensor

from paceline.app.store import default_cache_dir, find_known
from paceline.runtime.batch import batch_of
from paceline.runtime.kernels.kvpool import KV_DTYPES, KVPool
from paceline.runtime.kernels.native import unavailable
from paceline.runtime.load import LoadedModel, load_model
from paceline.runtime.tokenizer_export import export_tokenizer
from paceline.text.tokenizer import Tokenizer

DOCS = Path(__file__).parents[1] / "docs"
WINDOW = 256  # tokens
BLOCK = 16
# What is set apart from float32 (of weights, of the cache).
KINDS = (
    ("bfloat16", "none", "float32"),
    ("float32", "none", "bfloat16"),
    ("float32", "none", "int8"),
    ("float32", "int8", "float32"),
    ("float32", "int8", "bfloat16"),
    ("float32", "int4", "bfloat16"),
    ("float32", "int4-g64", "bfloat16"),
    ("float32", "int4-g128", "bfloat16"),
)


def windows(model: Path, count: int, room: Path) -> list[list[int]]:
    """Windows of tokens of the documentation, spread over all of it."""
    tokenizer = Tokenizer.from_dir(export_tokenizer(model, room, vocab_size=None))
    text = "\n".join(page.read_text("utf-8") for page in sorted(DOCS.glob("*.md")))
    tokens = tokenizer.encode(text)
    starts = range(0, len(tokens) - WINDOW, (len(tokens) - WINDOW) // count)
    return [list(tokens[start : start + WINDOW]) for start in starts][:count]


@torch.inference_mode()
def predictions(loaded: LoadedModel, texts: list[list[int]]) -> Iterator[Tensor]:
    """Log-probabilities [WINDOW - 1, vocab] of what follows each token of a window."""
    blocks = WINDOW // BLOCK
    pool = KVPool(loaded.model.kv_specs, blocks, BLOCK, dtype=KV_DTYPES[loaded.info.kv_dtype])
    for text in texts:
        batch = batch_of(
            [text], [0], [range(blocks)], block_size=BLOCK, scratch_block=pool.scratch_block, all_logits=True
        )
        yield loaded.model.forward(batch, pool)[:-1].log_softmax(-1)


def main() -> int:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--windows", type=int, default=0, help=f"of {WINDOW} tokens each (64; 6 with --quick)")

    args = arguments(__doc__, add)
    if (reason := unavailable()) is not None:
        print(f"quantization: skipped, {reason}")
        return 0
    known = find_known("smollm2-135m")
    assert known is not None
    models = default_cache_dir(os.environ)
    model = models / known.file_name
    report = Report("quantization", args)
    texts = windows(model, args.windows or (6 if args.quick else 64), models.parent / "tokenizers" / "quantization")
    report.note("tokens predicted", len(texts) * (WINDOW - 1))
    following = [torch.tensor(text[1:])[:, None] for text in texts]
    exact = list(predictions(load_model(model, kv_dtype="float32"), texts))
    losses = [-float(p.gather(1, f).mean()) for p, f in zip(exact, following, strict=True)]
    report.add("float32: loss", losses, "nats")
    for dtype, quantization, kv_dtype in KINDS:
        loaded = load_model(model, dtype=dtype, quantization=quantization, kv_dtype=kv_dtype)
        name = f"{dtype if quantization == 'none' else quantization} weights, {kv_dtype} cache"
        lost, alike, apart = [], [], []
        for p, q, f, loss in zip(exact, predictions(loaded, texts), following, losses, strict=True):
            lost.append(-float(q.gather(1, f).mean()) - loss)
            alike.append(100 * float((p.argmax(-1) == q.argmax(-1)).float().mean()))
            apart.append(float((p.exp() * (p - q)).sum(-1).mean()))
        report.add(f"{name}: loss more", lost, "nats")
        report.add(f"{name}: same best token", alike, "%")
        report.add(f"{name}: divergence", apart, "nats")
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
