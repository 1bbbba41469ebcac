"""What a datasheet says of a chip, in the units that datasheets use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import ConfigError

GB = 1e9
MIB = float(1 << 20)


@dataclass(frozen=True, slots=True)
class Chip:
    """One accelerator. Rates are dense (without structured sparsity) and one direction of a link."""

    name: str
    title: str  # as its maker calls it
    family: str  # generation: what its kernels have in common; a key of `efficiency.FAMILIES`
    memory_gb: float  # as sold
    bandwidth_gbs: float  # of its memory
    tflops: Mapping[str, float] = field(default_factory=dict)  # by format; empty where the maker publishes none
    memory_mib: float = 0.0  # what its driver reports as total, where known; 0: take `memory_gb`
    link_gbs: float = 0.0  # to a neighbour in the node
    pcie_gbs: float = 0.0  # to the host
    node: int = 8  # chips that the link joins
    watts: float = 0.0
    sms: int = 0  # multiprocessors (compute units)
    sources: Mapping[str, str] = field(default_factory=dict)  # field -> where its figure comes from

    @property
    def memory_bytes(self) -> float:
        """Memory that a program can see."""
        return self.memory_mib * MIB if self.memory_mib else self.memory_gb * GB

    @property
    def bandwidth(self) -> float:
        """Bytes per second of its memory."""
        return self.bandwidth_gbs * GB

    def flops(self, dtype: str = "bf16") -> float:
        """FLOP/s in this format. ConfigError where its maker publishes none."""
        if dtype not in self.tflops:
            known = ", ".join(self.tflops) or "none"
            raise ConfigError(
                f"chip {self.name}: no rate of {dtype} is published (known: {known}); "
                f"measure one and add it in a file of your own"
            )
        return self.tflops[dtype] * 1e12

    def critical_batch(self, dtype: str = "bf16") -> float:
        """Tokens a step at which reading 2-byte weights once and multiplying by them take equally long.

        2 * B * params / flops = 2 * params / bandwidth, so B = flops / bandwidth (the chip's ratio, FLOP per byte).
        """
        return self.flops(dtype) / self.bandwidth
