"""Something that bytes travel over: a network card, a PCIe connection, a disk. One transfer after another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """Usable bandwidth in one direction, and what a transfer takes even if it is empty."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """A transfer that meets no other."""
        return self.latency_s + nbytes / self.bytes_per_s


class Link:
    """A link with its queue: first come, first served."""

    __slots__ = ("busy_s", "free_s", "moved_bytes", "spec")

    def __init__(self, spec: LinkSpec) -> None:
        self.spec = spec
        self.free_s = 0.0  # when everything that was entered has gone through
        self.moved_bytes = 0.0
        self.busy_s = 0.0

    def done_s(self, now_s: float, nbytes: float) -> float:
        """When a transfer entered now would have come; nothing is entered."""
        return max(now_s, self.free_s) + self.spec.seconds(nbytes)

    def enter(self, now_s: float, nbytes: float) -> float:
        """Enter a transfer; when it will have come. The latency is of the message, not of the wire: it overlaps."""
        done_s = self.done_s(now_s, nbytes)
        self._occupy(done_s - self.spec.latency_s, nbytes)
        return done_s

    def _occupy(self, until_s: float, nbytes: float) -> None:
        self.busy_s += nbytes / self.spec.bytes_per_s
        self.moved_bytes += nbytes
        self.free_s = until_s


def send(now_s: float, nbytes: float, out: Link, into: Link) -> float:
    """A transfer that leaves by one link and comes by another, at the speed of the slower; when it will have come."""
    start_s = max(now_s, out.free_s, into.free_s)
    wire_s = nbytes / min(out.spec.bytes_per_s, into.spec.bytes_per_s)
    for link in (out, into):
        link._occupy(start_s + wire_s, nbytes)
    return start_s + wire_s + max(out.spec.latency_s, into.spec.latency_s)
