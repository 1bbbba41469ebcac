"""CPU kernels for Paceline. Results go into tensors that the caller gives; see `contracts` for what each one computes.

Importing this raises ImportError, with the reason, on a processor that cannot run any of the kernels.
"""

from paceline_native._core import (
    DecoderLayer,
    PackedLinear,
    argmax,
    available_cores,
    gate,
    isa,
    isas,
    pack,
    pack_int4,
    pack_int8,
    paged_attention,
    restore,
    rms_norm,
    rope,
    run_layers,
    sample,
    set_threads,
    threads,
    use_isa,
)

__version__ = "0.1.0"

__all__ = [
    "DecoderLayer",
    "PackedLinear",
    "argmax",
    "available_cores",
    "gate",
    "isa",
    "isas",
    "pack",
    "pack_int4",
    "pack_int8",
    "paged_attention",
    "restore",
    "rms_norm",
    "rope",
    "run_layers",
    "sample",
    "set_threads",
    "threads",
    "use_isa",
]
