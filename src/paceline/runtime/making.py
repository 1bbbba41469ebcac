"""How a model is made: the device, the types of arithmetic and cache, how weights are held, what computes with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.runtime.formats.packed import packed_path
from paceline.runtime.kernels.kvpool import KV_DTYPES
from paceline.runtime.kernels.native import BFLOAT16, FLOAT32, native, unavailable
from paceline.runtime.layers.native import QUANTIZATIONS, NativeParts, Quantization, WeightStore
from paceline.runtime.layers.parts import Parts, TorchParts

KERNELS = ("auto", "native", "torch")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Making:
    """What `choose` decided."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of cached keys and values
    quantization: str
    no_native: str | None  # why the native kernels do not compute; None where they do
    native_required: bool  # they were asked for, or what they alone can do
    note: str | None = None  # what a person should know

    @property
    def native(self) -> bool:
        """Whether the native kernels compute, for a model that has a file of its own."""
        return self.no_native is None

    @property
    def read_dtype(self) -> torch.dtype:
        """What weights are read as: the native kernels pack from float32."""
        return torch.float32 if self.native else self.dtype

    @property
    def stored(self) -> Quantization:
        """The formats of weights that the native kernels multiply."""
        plain = BFLOAT16 if self.dtype == torch.bfloat16 else FLOAT32
        return QUANTIZATIONS.get(self.quantization, Quantization(plain, plain))

    def parts(self, weights: Mapping[str, Tensor], store: WeightStore) -> Parts:
        """The maker of a model's parts. `store` is for the native ones."""
        if not self.native:
            return TorchParts(weights, self.device, self.dtype)
        return NativeParts(weights, self.stored, store)

    def packed_path(self, cache_dir: Path, content: str) -> Path | None:
        """Where packed weights of a checkpoint with this digest are kept; None where nothing is packed."""
        return packed_path(cache_dir, content, repr(self.stored), native()) if self.native else None

    def require_torch(self, model: str) -> None:
        """Raise ConfigError where a model that runs on transformers' own code was to be made in another way."""
        if self.native_required:
            raise ConfigError(
                f"{model}: this model runs on transformers' own code, which takes kernels 'torch' and "
                f"quantization 'none' alone"
            )


def choose(
    device: str, dtype: str, kernels: str, quantization: str, checkpoint: object, kv_dtype: str = "auto"
) -> Making:
    """Resolve "auto", and refuse what does not go together. `checkpoint` is the dtype that the checkpoint names.

    Raises ConfigError.
    """
    target = _device(device)
    chosen = _dtype(dtype, target, checkpoint)
    if kv_dtype not in ("auto", *KV_DTYPES):
        raise ConfigError(f"kv_cache_dtype {kv_dtype!r} is not one of auto, {', '.join(KV_DTYPES)}")
    if kernels not in KERNELS:
        raise ConfigError(f"kernels {kernels!r} is not one of {', '.join(KERNELS)}")
    known = ("none", *QUANTIZATIONS)
    if quantization not in known:
        raise ConfigError(f"quantization {quantization!r} is not one of {', '.join(known)}")
    reason = _no_native(kernels, target, chosen)
    required = kernels == "native" or quantization != "none"
    if required and reason is not None:
        asked = "kernels 'native'" if kernels == "native" else f"quantization {quantization!r}"
        raise ConfigError(f"{asked} cannot be had: {reason}")
    note = None
    if reason is not None and kernels == "auto" and target.type == "cpu":
        note = f"torch computes, which is slower: {reason}"
    # Weights that were rounded to 8 bits or 4 need no keys of 24, and reading keys is what many long streams wait for.
    usual_kv = chosen if quantization == "none" else torch.bfloat16
    return Making(target, chosen, KV_DTYPES.get(kv_dtype, usual_kv), quantization, reason, required, note)


def _no_native(kernels: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the native kernels do not compute on this device and in this dtype, or None."""
    if kernels == "torch":
        return "kernels 'torch' was asked for"
    if device.type != "cpu":
        return f"the native kernels run on a CPU, not on {device}"
    if dtype == torch.float16:
        return "the native kernels know no float16; take float32 or bfloat16"
    return unavailable()


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known to torch") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r}: Paceline runs on cpu and cuda alone")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: this torch sees no CUDA device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r}: there are {torch.cuda.device_count()} CUDA devices, numbered from 0")
    return device


def _dtype(name: str, device: torch.device, checkpoint: object) -> torch.dtype:
    """The dtype to compute in. On a CPU "auto" is float32: half precision is slower there, and less exact."""
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        return _DTYPES.get(str(checkpoint).removeprefix("torch."), torch.bfloat16)
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]
