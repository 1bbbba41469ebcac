"""Constants of the kernels of one generation of chips."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.cost.curves.attention import DecodeCurve, PrefillCurve
from paceline.cost.curves.collective import ReduceCurve
from paceline.cost.curves.experts import ExpertsCurve
from paceline.cost.curves.gemm import GemmCurve
from paceline.cost.host import Host


@dataclass(frozen=True, slots=True)
class Family:
    """Constants shared by the chips of one generation."""

    flops_per_sm: float  # bf16 FLOP/s of one multiprocessor at its boost clock
    gemm: GemmCurve = field(default_factory=GemmCurve)
    decode: DecodeCurve = field(default_factory=DecodeCurve)
    prefill: PrefillCurve = field(default_factory=PrefillCurve)
    experts: ExpertsCurve = field(default_factory=ExpertsCurve)
    reduce: ReduceCurve = field(default_factory=ReduceCurve)
    stream_floor_s: float = 2.0e-6  # an empty kernel, as the GPU sees it
    stream_share: float = 0.70  # of the bandwidth: norms make two passes, activations three streams
    host: Host = field(default_factory=Host)


# Fitted on measured kernels of vLLM 0.14 on A100 and H100 SXM (docs/efficiency.md has the errors on the rows left out).
_AMPERE = Family(
    flops_per_sm=312e12 / 108,
    gemm=GemmCurve(3.5e-6, 0.10e-6, 1.7e-6, hbm_share=0.72, l2_ratio=1.8, half_intensity=12.2, grain=64),
    decode=DecodeCurve(
        11.4e-6,
        3.5e-6,
        share=0.77,
        reach=0.63,
        split_s=3.2e-6,
        piece_s=0.27e-6,
        regroup_s=6.0e-6,
        split_alone=False,
    ),
    prefill=PrefillCurve(7.8e-6, share=0.60, tile_s=2.6e-6, stream_share=1.0, token_s=3.9e-6, write_share=0.80),
    experts=ExpertsCurve(
        22e-6,
        0.5e-6,
        hbm_share=0.85,
        stream_share=0.67,
        padding=75.0,
        overlap=1.7,
        tuned_share=0.60,
        default_share=0.36,
        spill_bytes=18e6,
        spill=0.45,
    ),
    reduce=ReduceCurve(
        4.5e-6,
        0.2e-6,
        one_shot_share=0.59,
        barrier_s=8.5e-6,
        two_shot_share=0.80,
        packet_s=6.5e-6,
        packet_hop_s=1.9e-6,
        packet_share=0.19,
        ring_s=37e-6,
        ring_hop_s=3.5e-6,
        ring_share=0.70,
    ),
)
_HOPPER = Family(
    flops_per_sm=989e12 / 132,
    gemm=GemmCurve(2.6e-6, 0.07e-6, 2.7e-6, hbm_share=0.85, l2_ratio=6.0, half_intensity=14.0, grain=8),
    decode=DecodeCurve(10.6e-6, 3.4e-6, share=0.94, reach=0.81, pieces=32, piece_s=0.12e-6),
    prefill=PrefillCurve(10.5e-6, share=0.64, tile_s=0.7e-6, stream_share=0.80, token_s=4.0e-6, write_share=0.55),
    experts=ExpertsCurve(
        16e-6,
        0.33e-6,
        hbm_share=0.95,
        stream_share=0.44,
        padding=95.0,
        overlap=1.5,
        tuned_share=0.76,
        default_share=0.29,
        unaligned=1.7,
        spill_bytes=9e6,
        spill=0.25,
    ),
    reduce=ReduceCurve(
        4.3e-6,
        0.06e-6,
        one_shot_share=0.65,
        barrier_s=8.0e-6,
        two_shot_share=0.95,
        packet_s=3.6e-6,
        packet_hop_s=1.6e-6,
        packet_share=0.35,
        ring_s=23e-6,
        ring_hop_s=1.2e-6,
        ring_share=0.77,
    ),
)
# Not measured here. Boards with GDDR memory give a multiprocessor a third of the bandwidth that HBM does, so the loads
# that it keeps in flight are enough to fill it; they run FlashAttention 2 as Ampere does. Their matrix units are slower
# for the exponentials beside them (per multiprocessor and clock, half of an A100's), so softmax takes a smaller part of
# attention: 0.67 of the multiplies' time there, a third here. Few tiles of experts are tuned for them.
_AMPERE_GDDR = replace(
    _AMPERE,
    flops_per_sm=155e12 / 84,
    gemm=replace(_AMPERE.gemm, hbm_share=0.90, l2_ratio=4.0),
    decode=replace(_AMPERE.decode, share=0.87, reach=0.45),
    prefill=replace(_AMPERE.prefill, share=0.75),
    experts=replace(_AMPERE.experts, tuned=False),
)
_ADA = replace(_AMPERE_GDDR, flops_per_sm=165e12 / 128)
# Hopper's kernels with what makers' libraries are known to reach: a lower share of a higher peak.
_BLACKWELL = replace(
    _HOPPER,
    flops_per_sm=2250e12 / 148,
    gemm=replace(_HOPPER.gemm, hbm_share=0.82, peak_share={"bf16": 0.85, "fp8": 0.75, "fp4": 0.65}),
    prefill=replace(_HOPPER.prefill, share=0.55),
)
# AMD's matrix units clock down under load and its libraries have fewer tiles to choose from: half of the printed peak.
_CDNA = Family(
    flops_per_sm=1307e12 / 304,
    gemm=GemmCurve(
        5.0e-6, 0.15e-6, 3.0e-6, hbm_share=0.72, peak_share={"bf16": 0.55, "fp8": 0.50, "fp4": 0.45, "int8": 0.5}
    ),
    decode=DecodeCurve(16e-6, 3.5e-6, share=0.75),
    prefill=PrefillCurve(14e-6, share=0.35),
    experts=ExpertsCurve(30e-6, 0.4e-6, hbm_share=0.70, tuned_share=0.40, default_share=0.20),
    stream_share=0.60,
)
# One compiled program a step: no launches inside it, large tiles, memory read ahead by the compiler.
_TPU = Family(
    flops_per_sm=197e12,
    gemm=GemmCurve(1.0e-6, 0.005e-6, 2.0e-6, hbm_share=0.85, grain=8),
    decode=DecodeCurve(5e-6, 1.0e-6, share=0.75, reach=0.01),
    prefill=PrefillCurve(5e-6, share=0.45),
    host=Host(layer_s=3e-6),
)
# Unified memory, one command buffer a step. A core has a third of an A100 multiprocessor's rate and is fed as fast, so
# a third of the multiplies for a number loaded keep it half busy; few tokens are multiplied row by row, unpadded.
_APPLE = Family(
    flops_per_sm=1e12,
    gemm=GemmCurve(
        4.0e-6, 0.2e-6, 4.0e-6, hbm_share=0.85, half_intensity=4.0, grain=1, peak_share={}, weight_only_share=0.70
    ),
    decode=DecodeCurve(10e-6, 2e-6, share=0.75),
    prefill=PrefillCurve(10e-6, share=0.40),
    experts=ExpertsCurve(padding=1.0),
    host=Host(layer_s=20e-6),
)

FAMILIES: dict[str, Family] = {
    "ampere": _AMPERE,
    "ampere-gddr": _AMPERE_GDDR,
    "ada": _ADA,
    "hopper": _HOPPER,
    "blackwell": _BLACKWELL,
    "blackwell-rtx": replace(_ADA, flops_per_sm=468e12 / 188),
    "cdna3": _CDNA,
    "cdna4": replace(_CDNA, flops_per_sm=2500e12 / 256),
    "tpu": _TPU,
    "apple": _APPLE,
    # Also processors: nothing is charged that only matrix units of a certain make demand.
    "generic": Family(
        312e12 / 108,
        gemm=GemmCurve(step_s=0.01e-6, half_intensity=4.0, grain=1),
        experts=ExpertsCurve(padding=1.0),
    ),
}
