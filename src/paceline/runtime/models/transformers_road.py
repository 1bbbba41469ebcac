"""Every decoder that has no file here runs through transformers' own modelling code, on our paged cache.

A model is taken in three steps. Refusals by name come first: recurrent state, encoder-decoders, code from the
checkpoint, classes without transformers' attention interface. Then a probe learns what each layer caches. Last, its
logits over the paged pool, computed in chunks and packed with a second sequence, are compared with those that
transformers gives without us: whatever a model carries from token to token outside its attention (a convolution, a
recurrence, a count of positions) shows there, and the model is refused instead of answering wrongly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError, CorruptModel, UnsupportedModel
from paceline.runtime.batch import RaggedBatch, batch_of
from paceline.runtime.formats.folder import quantization_method, read_config
from paceline.runtime.formats.safetensors import SafetensorsWeights
from paceline.runtime.kernels.kvpool import KVPool
from paceline.runtime.models.transformers_attention import NAME, Layer, Probe, Step, register, running

# Config fields that name the longest context, in the order of preference.
_LENGTH_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length")
_DEFAULT_LENGTH = 8192
# Names of layer kinds that carry a state from token to token which is not keys and values.
_STATEFUL_LAYERS = ("mamba", "linear", "conv", "recurrent", "rwkv", "ssm", "gdn", "kda", "lightning")


class TransformersModel:
    """A `Model` around a transformers model whose attention is ours."""

    def __init__(self, module: Any, layers: tuple[Layer, ...], max_model_len: int, notes: tuple[str, ...]) -> None:
        self.module = module
        self.layers = layers
        self.kv_specs = tuple(layer.spec for layer in layers)
        self.vocab_size = int(module.config.get_text_config().vocab_size)
        self.architecture = type(module).__name__
        self.max_model_len = max_model_len
        self.notes = notes
        self.weights_bytes = _weights_bytes(module)
        self._keeps_logits = "logits_to_keep" in inspect.signature(module.forward).parameters

    def forward(self, batch: RaggedBatch, pool: KVPool) -> Tensor:
        """Logits [len(batch.logit_rows), vocab_size] in float32; the step's keys and values go into the pool."""
        step = Step(batch, pool, self.layers)
        # A tensor as logits_to_keep is an index into the sequence: only those rows pass the head.
        keep = {"logits_to_keep": batch.logit_rows} if self._keeps_logits else {}
        with running(step):
            logits = _logits(self.module, batch.token_ids, batch.positions, **keep)
        if step.calls != len(self.layers):
            raise RuntimeError(f"{self.architecture} called attention {step.calls} times, {len(self.layers)} before")
        logits = logits if self._keeps_logits else logits.index_select(0, batch.logit_rows)
        return logits.float()


def load_transformers(
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int | None = None,
    progress: Callable[[str, float], None],
) -> TransformersModel:
    """A model folder through transformers. Raises UnsupportedModel by name for what cannot run, CorruptModel."""
    config, model_class = _resolve(folder)
    _refuse(folder, config, model_class)
    SafetensorsWeights(folder, dtype).close()  # missing shards and truncated files, in our words
    register()
    progress("read", 0.0)
    module = _read(folder, config, model_class, dtype).to(device).eval()
    _own_memory(module)
    progress("read", 1.0)
    longest, notes = _fix_length(config, module, max_model_len)
    progress("verify", 0.0)
    try:
        with torch.inference_mode():
            layers = _probe(module, longest, device)
            model = TransformersModel(module, layers, longest, notes)
            _compare(model, device, dtype)
    except Exception as error:  # whatever their code does with an input that it was not written for
        reason = str(error) if isinstance(error, UnsupportedModel) else f"its code fails here ({_one_line(error)})"
        raise UnsupportedModel(f"{folder}: {model_class.__name__} cannot be served: {reason}") from error
    progress("verify", 1.0)
    return model


def _one_line(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def _resolve(folder: Path) -> tuple[Any, Any]:
    """(config, model class) of a folder, without running code from it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = read_config(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the config classes check themselves, each with errors of its own
        name = raw.get("architectures") or raw.get("model_type")
        if "auto_map" in raw:
            raise UnsupportedModel(f"{folder}: {name} needs code from the checkpoint, which is never run") from error
        if raw.get("model_type") is None:
            raise UnsupportedModel(f"{folder}: config.json names no model_type, so nothing can run it") from error
        raise UnsupportedModel(f"{folder}: transformers does not take {name} ({_one_line(error)})") from error
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if isinstance(model_class, (tuple, list)):
        wanted = raw.get("architectures") or []
        model_class = next((one for one in model_class if one.__name__ in wanted), model_class[0])
    if model_class is None:
        raise UnsupportedModel(f"{folder}: {raw.get('architectures') or config.model_type} is no causal language model")
    return config, model_class


def _refuse(folder: Path, config: Any, model_class: Any) -> None:
    """Raise UnsupportedModel for kinds of models that are known not to run."""
    name = model_class.__name__
    text = config.get_text_config()

    def refuse(reason: str) -> UnsupportedModel:
        return UnsupportedModel(f"{folder}: {name} cannot be served: {reason}")

    if getattr(config, "is_encoder_decoder", False):
        raise refuse("it is an encoder-decoder, and only decoders are served")
    kinds = [str(kind) for kind in getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()]
    stateful = sorted({kind for kind in kinds if any(word in kind for word in _STATEFUL_LAYERS)})
    if stateful:
        raise refuse(f"layers of type {', '.join(stateful)} carry a state that the paged cache does not hold")
    if getattr(model_class, "_is_stateful", False):
        raise refuse("it carries a recurrent state that the paged cache does not hold")
    if not model_class._can_set_attn_implementation():
        raise refuse("its code in transformers predates the attention interface")


def _read(folder: Path, config: Any, model_class: Any, dtype: torch.dtype) -> Any:
    """The model with its weights. Raises CorruptModel where tensors are missing or have other shapes."""
    from transformers import Mxfp4Config
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    packed = quantization_method(read_config(folder)) == "mxfp4"
    unpack = {"quantization_config": Mxfp4Config(dequantize=True)} if packed else {}
    try:
        module, found = model_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, in one line
            **unpack,
        )
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise CorruptModel(f"{folder}: transformers cannot load the weights ({_one_line(error)})") from error
    finally:
        if bars:
            logging.enable_progress_bar()
    for name in sorted(found["missing_keys"]):
        raise CorruptModel(f"{folder}: tensor {name} is missing")
    for name, have, want in sorted(found["mismatched_keys"]):
        raise CorruptModel(f"{folder}: tensor {name} has shape {list(have)}, the config asks for {list(want)}")
    return module


def _own_memory(module: nn.Module) -> None:
    """Copy every tensor that still is a view of its file, one at a time.

    Where no conversion was needed, a CPU's parameters are the mapped file itself: someone who writes over it would
    change a model that is being served, under the name of its old content.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def _fix_length(config: Any, module: nn.Module, limit: int | None) -> tuple[int, tuple[str, ...]]:
    """(longest context, notes), with rotary embeddings that depend on the length fixed for that context.

    transformers switches their frequencies by the longest position in a batch. Keys in a paged cache stay as they were
    rotated, and other requests are in the batch: so the choice is made here, once. Without a limit it is the length
    up to which the model's original frequencies hold.
    """
    text = config.get_text_config()
    found = next((int(getattr(text, key)) for key in _LENGTH_FIELDS if getattr(text, key, None)), None)
    notes: list[str] = []
    if found is None:
        notes.append(f"the config names no context length; {_DEFAULT_LENGTH} is taken")
    native = found or _DEFAULT_LENGTH
    kinds = _rope_kinds(text)
    originals = [int(original or native) for kind, original in kinds if kind in ("dynamic", "longrope")]
    longest = limit or min([native, *originals])
    if longest < 1:
        raise ConfigError(f"max_model_len is {longest}; it must be at least 1")
    if originals and longest > min(originals):
        notes.append(
            f"its rotary frequencies are those of {longest} tokens for every request; "
            f"up to {min(originals)} they would be the original ones"
        )
        _stretch(module, longest)
    elif originals and native > longest:
        notes.append(f"served up to {longest} tokens, its original context; max_model_len opens more, up to {native}")
    return longest, tuple(notes)


def _rope_kinds(text: Any) -> list[tuple[str, int | None]]:
    """(rope type, original length if given) of every set of rotary parameters in a config."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    sets = nested or [parameters]
    outer = getattr(text, "original_max_position_embeddings", None)
    return [
        (str(one.get("rope_type", "default")), outer or one.get("original_max_position_embeddings")) for one in sets
    ]


def _stretch(module: nn.Module, longest: int) -> None:
    """Give rotary modules the frequencies of `longest` tokens, and make them keep those."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for part in module.modules():
        rope_type = getattr(part, "rope_type", None)
        by_layer = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        for layer_type, kind in by_layer.items():
            if kind not in ("dynamic", "longrope"):
                continue
            prefix = "" if layer_type is None else f"{layer_type}_"
            old = getattr(part, f"{prefix}inv_freq")
            named = {} if layer_type is None else {"layer_type": layer_type}
            inv_freq, _ = ROPE_INIT_FUNCTIONS[kind](part.config, old.device, seq_len=longest, **named)
            # Both what is used now and what their code returns to when a batch is short; then the lengths at which
            # it would return, or grow.
            part.register_buffer(f"{prefix}inv_freq", inv_freq, persistent=False)
            setattr(part, f"{prefix}original_inv_freq", inv_freq.clone())
            for name in ("original_max_seq_len", "max_seq_len_cached", f"{prefix}max_seq_len_cached"):
                setattr(part, name, longest)


def _probe(module: Any, horizon: int, device: torch.device) -> tuple[Layer, ...]:
    """What each attention layer caches and sees, in the order of their calls."""
    probe = Probe(horizon)
    tokens = torch.zeros(3, dtype=torch.int64, device=device)
    with running(probe):
        _logits(module, tokens, torch.arange(3, device=device))
    if not probe.layers:
        raise UnsupportedModel("it never calls the attention interface")
    return tuple(probe.layers)


def _compare(model: TransformersModel, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UnsupportedModel unless chunked, packed, paged logits are what transformers computes without us.

    At the far end of the context, where whatever depends on a position shows most.
    """
    count = max(2, min(12, model.max_model_len))
    shift = max(0, model.max_model_len - count)
    tokens = torch.randint(0, model.vocab_size, (2, count), generator=torch.Generator().manual_seed(0))
    first, second = tokens.tolist()
    pool = KVPool(model.kv_specs, 8, 4, device=device, dtype=dtype)
    tables = ([5, 0, 6], [2, 7, 1])  # scattered, so that order in the pool cannot stand in for order in the text
    cut = count // 2
    # A chunk of one sequence beside the whole other one, then its rest beside a lone token of the other.
    seen: list[Tensor] = []
    for sequences, starts in (([first[:cut], second], [0, 0]), ([first, second], [cut, count - 1])):
        batch = batch_of(
            sequences, starts, tables, block_size=4, scratch_block=pool.scratch_block, all_logits=True, device=device
        )
        seen.append(model.forward(replace(batch, positions=batch.positions + shift), pool))
    ours = torch.cat((seen[0][:cut], seen[1][: count - cut], seen[0][cut:], seen[1][count - cut :]))
    reference = [_reference(model.module, row.to(device), shift) for row in tokens]
    theirs = torch.cat((*reference, reference[1][-1:]))
    # Directions, not differences: in half precision a sum in another order moves logits by some percent.
    likeness = nn.functional.cosine_similarity(ours - ours.mean(-1, True), theirs - theirs.mean(-1, True)).min().item()
    if not likeness > (0.9999 if dtype == torch.float32 else 0.98):
        raise UnsupportedModel(
            f"over the paged cache its logits differ from transformers' own (likeness {likeness:.4f}), so they depend "
            f"on something beside keys, values and positions"
        )


def _reference(module: Any, tokens: Tensor, shift: int) -> Tensor:
    """Float32 logits [T, vocab] of one whole sequence [T], its positions from `shift` on, by transformers alone."""
    module.set_attn_implementation("eager")
    try:
        return _logits(module, tokens, shift + torch.arange(len(tokens), device=tokens.device)).float()
    finally:
        module.set_attn_implementation(NAME)


def _logits(module: Any, tokens: Tensor, positions: Tensor, **keywords: Any) -> Tensor:
    """What the model says about packed tokens [T] at positions [T]: [T, vocab], or the rows it was told to keep."""
    output = module(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **keywords)
    return output.logits[0]


def _weights_bytes(module: nn.Module) -> int:
    """Bytes of parameters and buffers; tied ones count once."""
    tensors = {t.data_ptr(): t.nbytes for t in (*module.parameters(), *module.buffers())}
    return sum(tensors.values())
