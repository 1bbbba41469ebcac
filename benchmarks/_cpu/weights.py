"""The same weights for every system: GGUF in several types and a Hugging Face folder, written once to the cache.

All are written from one Q4_1 file: that of the default model as it is shipped, or one of random blocks. Q8_0, F16 and
F32 hold what its blocks stand for, as near as their type can; so does the folder (float32 for the default model and
float16 for the large ones, which saves gigabytes).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from _cpu.models import DEFAULT, Shape

Type = gguf.GGMLQuantizationType
TYPES = {"F32": Type.F32, "F16": Type.F16, "Q8_0": Type.Q8_0}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "Q4_1": 3}  # general.file_type
_COUNTED = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")  # the writer's own
_KINDS = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
_UNUSED = 5  # token type of a place in the vocabulary that no text uses


class Files:
    """The files of the models, made when first asked for. `default`: the shipped GGUF file."""

    def __init__(self, default: Path, folder: Path) -> None:
        self._default, self._folder = default, folder

    def path(self, shape: Shape, form: str) -> Path:
        """A GGUF file ("Q4_1", "Q8_0", "F16", "F32") or a Hugging Face folder ("hf")."""
        if form == "Q4_1" and shape is DEFAULT:
            return self._default
        path = self._folder / (f"{shape.name}.hf" if form == "hf" else f"{shape.name}.{form}.gguf")
        if not path.exists():
            print(f"  writing {path}", flush=True)
            self._folder.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.part")
            self._write(shape, form, part)
            part.replace(path)  # a kill leaves the whole file or none
        return path

    def _write(self, shape: Shape, form: str, path: Path) -> None:
        if form == "Q4_1":
            write_random(shape, self._default, path)
        elif form == "hf":
            shutil.rmtree(path, ignore_errors=True)
            write_folder(self.path(shape, "Q4_1"), path, "float32" if shape is DEFAULT else "float16")
        else:
            convert(self.path(shape, "Q4_1"), path, form)


def convert(source: Path, path: Path, form: str) -> None:
    """The same metadata; every matrix in another type, vectors as they are."""
    reader = gguf.GGUFReader(source)
    writer = _writer(reader, path, reader.fields["general.architecture"].contents(), {}, form)
    for tensor in reader.tensors:
        if tensor.tensor_type == Type.F32:
            writer.add_tensor(tensor.name, tensor.data)
        else:
            values = dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, quantize(values, TYPES[form]), raw_dtype=TYPES[form])
    _finish(writer)


def write_random(shape: Shape, tokenizer: Path, path: Path) -> None:
    """Random Q4_1 blocks in the layers, Q8_0 blocks in the embedding, and another file's tokenizer, filled up."""
    rng = np.random.default_rng(0)
    name = shape.architecture
    changes: dict[str, Any] = {
        "general.name": shape.name,
        f"{name}.block_count": shape.layers,
        f"{name}.context_length": shape.context,
        f"{name}.embedding_length": shape.hidden,
        f"{name}.feed_forward_length": shape.inner,
        f"{name}.attention.head_count": shape.heads,
        f"{name}.attention.head_count_kv": shape.kv_heads,
        f"{name}.rope.freq_base": shape.rope_base,
        f"{name}.attention.layer_norm_rms_epsilon": shape.eps,
        f"{name}.vocab_size": shape.vocab,
        f"{name}.rope.dimension_count": shape.head_dim,
    }
    writer = _writer(gguf.GGUFReader(tokenizer), path, name, changes, "Q4_1", vocab=shape.vocab)

    def vector(tensor: str, size: int, value: float) -> None:
        writer.add_tensor(tensor, np.full(size, value, np.float32))

    def matrix(tensor: str, rows: int, columns: int, make: Callable[..., NDArray[np.uint8]], kind: int) -> None:
        writer.add_tensor(tensor, make(rng, rows, columns), raw_dtype=kind)

    matrix("token_embd.weight", shape.vocab, shape.hidden, _random_q8_0, Type.Q8_0)
    vector("output_norm.weight", shape.hidden, 1.0)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        start = f"blk.{layer}."
        vector(f"{start}attn_norm.weight", shape.hidden, 1.0)
        vector(f"{start}ffn_norm.weight", shape.hidden, 1.0)
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            matrix(f"{start}attn_{part}.weight", rows, shape.hidden, _random_q4_1, Type.Q4_1)
            if name == "qwen2":
                vector(f"{start}attn_{part}.bias", rows, 0.01)
        matrix(f"{start}attn_output.weight", shape.hidden, q, _random_q4_1, Type.Q4_1)
        matrix(f"{start}ffn_gate.weight", shape.inner, shape.hidden, _random_q4_1, Type.Q4_1)
        matrix(f"{start}ffn_up.weight", shape.inner, shape.hidden, _random_q4_1, Type.Q4_1)
        matrix(f"{start}ffn_down.weight", shape.hidden, shape.inner, _random_q4_1, Type.Q4_1)
    _finish(writer)


def _random_q4_1(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.uint8]:
    """Blocks of 32: scale and minimum in float16, then nibbles; uniform around 0 with deviation 1 / sqrt(columns)."""
    scale = columns**-0.5 / 4.6
    blocks = rng.integers(0, 256, (rows, columns // 32, 20), dtype=np.uint8)
    blocks[..., :4] = np.array([scale, -7.5 * scale], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def _random_q8_0(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.uint8]:
    """Blocks of 32: a scale in float16, then bytes from -128 to 127; uniform with deviation 1 / sqrt(columns)."""
    blocks = rng.integers(0, 256, (rows, columns // 32, 34), dtype=np.uint8)
    blocks[..., :2] = np.array([columns**-0.5 / 74], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def _writer(
    reader: gguf.GGUFReader, path: Path, architecture: str, changes: dict[str, Any], form: str, vocab: int | None = None
) -> Any:
    """A writer that has the reader's metadata, less what belongs to another architecture, with changes."""
    writer = gguf.GGUFWriter(path, architecture)
    changes = {**changes, "general.file_type": _FILE_TYPES[form]}
    for key, field in reader.fields.items():
        foreign = vocab is not None and key.startswith("llama.") and key not in changes
        if key in _COUNTED or key == "general.architecture" or foreign:
            continue
        value = changes.pop(key, field.contents())
        kind = field.types[0]
        if kind == gguf.GGUFValueType.ARRAY:
            if vocab is not None and key == "tokenizer.ggml.tokens":
                value = value + [f"<unused {number}>" for number in range(len(value), vocab)]
            if vocab is not None and key == "tokenizer.ggml.token_type":
                value = value + [_UNUSED] * (vocab - len(value))
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, kind)
    for key, value in changes.items():
        writer.add_key_value(key, value, _KINDS[type(value)])
    return writer


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_folder(source: Path, folder: Path, dtype: str) -> None:
    """config.json, safetensors and tokenizer, by transformers' own reader of GGUF."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=getattr(torch, dtype))
    # They are plain tensors by now, which it does not believe of what came from GGUF.
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
