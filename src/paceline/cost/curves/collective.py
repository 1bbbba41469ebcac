"""Sums over chips: what a message of some size costs on a link, by the algorithm that a server would use.

- Up to 8 MB, on chips that all see each other's memory, one kernel does it: in one shot (everyone reads everything:
  lowest latency, g - 1 times the bytes) or in two (reduce a part each, then read the parts: one more barrier).
- Otherwise a library's ring: 2 (g - 1) / g of the bytes over each link, in packets that carry their own flags (low
  latency, a fifth of the bandwidth) or in plain ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cost.curves.timing import KernelTime

ONE_KERNEL_BYTES = 8 * 1024 * 1024  # largest message; vLLM's limit on its buffers
DIRECT_LINK = 100e9  # bytes/s from which on a link is taken to join the memories of chips (NVLink, xGMI)


@dataclass(frozen=True, slots=True)
class ReduceCurve:
    """Constants of a family's collectives."""

    floor_s: float = 4.3e-6  # launch and a barrier
    peer_s: float = 0.1e-6  # for each chip
    one_shot_share: float = 0.63  # of the link's bandwidth
    barrier_s: float = 5.0e-6  # that two shots need more
    two_shot_share: float = 0.75
    packet_s: float = 4.0e-6  # ring with flags in its packets,
    packet_hop_s: float = 2.0e-6  # and for each chip
    packet_share: float = 0.20
    ring_s: float = 30.0e-6
    ring_hop_s: float = 2.0e-6
    ring_share: float = 0.76

    def time(self, nbytes: float, gpus: int, *, link: float) -> KernelTime:
        """`nbytes` on each of `gpus`; `link` in bytes/s of one chip, one direction."""
        if gpus <= 1 or nbytes <= 0.0 or link <= 0.0:
            return KernelTime(0.0, "link")
        wire = 2.0 * (gpus - 1) / gpus * nbytes
        if nbytes < ONE_KERNEL_BYTES and link >= DIRECT_LINK:
            start_s = self.floor_s + self.peer_s * gpus
            one_s = (gpus - 1) * nbytes / (link * self.one_shot_share)
            two_s = self.barrier_s + wire / (link * self.two_shot_share)
            return _of(start_s, min(one_s, two_s))
        packets = self.packet_s + self.packet_hop_s * gpus, wire / (link * self.packet_share)
        ring = self.ring_s + self.ring_hop_s * gpus, wire / (link * self.ring_share)
        return _of(*min(packets, ring, key=sum))


def _of(start_s: float, moving_s: float) -> KernelTime:
    return KernelTime(start_s + moving_s, "latency" if start_s > moving_s else "link")
