"""Room for newcomers: whether there is a seat and memory, whose to take, and what to keep free after it was taken."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.desk import Desk
from paceline.core.request import Request

SPARED_FOR = 8.0  # room that was taken is spared for so many of the tightest ttft, so that it need not be taken again
Evict = Callable[[Desk, Request], None]
Slack = Callable[[Desk, Request], tuple[float, float]]  # how well a request bears to be evicted


class Room:
    """Takes from classes of lower priority for those of higher; nobody has to give way more than `displace` times.

    Who came by room that way will probably not be the last: for a while, those who are only served what is left leave
    as much free. So a steady stream of newcomers costs one eviction, not one each.
    """

    def __init__(self, displace: int, evict: Evict, slack: Slack) -> None:
        self._displace = displace
        self._evict = evict
        self._slack = slack
        self._spare_until_s = 0.0
        self._spare_blocks = 0

    def find(self, desk: Desk, under_way: list[Request], request: Request, *, left: bool) -> bool:
        """Whether the request can be admitted, at the cost of lower classes if need be; with `left`, at nobody's."""
        sparing = desk.now < self._spare_until_s
        if left:
            return self._fits(desk, under_way, request, spare=sparing)
        taken = False
        if not self._fits(desk, under_way, request):
            taken = self._take(desk, under_way, request)
            if not taken:
                return False
        if taken or (sparing and not self._fits(desk, under_way, request, spare=True)):
            needed = desk.blocks_needed(request, request.known)
            self._spare_blocks = max(needed, self._spare_blocks) if sparing else needed
            self._spare_until_s = desk.now + SPARED_FOR * min(desk.tightest_ttft_s, 60.0)
        return True

    def _fits(self, desk: Desk, under_way: list[Request], request: Request, *, spare: bool = False) -> bool:
        """Whether there is a seat, and memory for all it knows, beside what those who run will soon need.

        With `spare`, beside what is spared for others, too.
        """
        if not desk.running:
            return True
        # Everyone may soon need one more block: admitting into the last of them would only evict somebody.
        free = desk.available_blocks - len(desk.running) - (self._spare_blocks if spare else 0)
        free -= sum(desk.blocks_needed(other, other.known) for other in under_way if other.holds_kv)
        return desk.room > spare and desk.blocks_needed(request, request.known) <= free

    def _take(self, desk: Desk, under_way: list[Request], request: Request) -> bool:
        """Evict of lower priority, those who bear it best first, if that is enough; else nobody."""
        lower = [
            other
            for other in desk.running
            if other.kind.priority > request.kind.priority and other.preemptions < self._displace
        ]
        lower.sort(key=lambda other: self._slack(desk, other))
        freed = sum(desk.kv.pool.is_sole(block) for other in lower for block in other.blocks)
        if not lower or desk.blocks_needed(request, request.known) > desk.available_blocks + freed:
            return False
        while lower and not self._fits(desk, under_way, request):
            self._evict(desk, lower.pop())
        return self._fits(desk, under_way, request)
