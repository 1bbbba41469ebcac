"""When there will be a place: a seat, memory, and a pace that can be kept, for one who would wait behind others."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf

from paceline.core.desk import Desk
from paceline.core.policies.parts.backlog import Backlog, due_before
from paceline.core.policies.parts.envelope import Envelope, with_decodes
from paceline.core.policies.parts.lengths import Lengths
from paceline.core.policies.parts.promises import gap_s
from paceline.core.request import Request
from paceline.core.shape import StepShape

CAUTION = 1.25  # times the expected wait, so that few of those who are taken are late
LIKELY = 0.75  # share of answers that end no later than foretold
SOONEST = 0.25  # of a promised time to the last token: when the first is due at the earliest
SMOOTHING = 0.05  # weight of the newest step in the time a token takes


class Places:
    """Foretells who ends when, from what answers of their class have been like and how long a token takes."""

    def __init__(self, lengths: Lengths, backlog: Backlog, held_to: Callable[[Request], float], share: float) -> None:
        """Steps are held to a percentile that depends on the request, and to a share of the promised gap: what is left
        of it is for prompts."""
        self._lengths, self._backlog = lengths, backlog
        self._held_to, self._share = held_to, share
        self._token_s = 0.0  # smoothed over recent steps in which somebody decoded; 0 while there was none

    def saw(self, seconds: float) -> None:
        """A step in which answers went on takes so long."""
        self._token_s += (SMOOTHING if self._token_s else 1.0) * (seconds - self._token_s)

    def spare(self, request: Request) -> None:
        """Of a promised time to the last token, spare what the answer is expected to take: its first token is due
        before that, though no earlier than a quarter of it."""
        if request.e2e_s is not None:
            answer_s = self._lengths.left(request, LIKELY) * self._token_s
            first_s = max(request.e2e_s - answer_s, SOONEST * request.e2e_s)
            request.deadline_s = min(request.deadline_s, request.arrived_s + first_s)

    def first_token_s(self, desk: Desk, request: Request) -> float:
        """Seconds until its first token, with caution: all prompts before it are done, and it has found a place."""
        place_s = self.wait_s(desk, request) + self._backlog.own_s(desk, request)
        return CAUTION * max(self._backlog.wait_s(desk, request), place_s)

    def wait_s(self, desk: Desk, request: Request) -> float:
        """Seconds until one who joins now finds a place; 0 while nobody knows.

        Before it go all who wait and are due before it and not late yet, and who was evicted from an answer. It may
        take the place of who is of lower priority. Memory is counted as it will be when answers have ended.
        """
        running = [other for other in desk.running if other.kind.priority <= request.kind.priority]
        if not self._token_s or not running:
            return 0.0
        queue = [
            other
            for other in desk.waiting.values()
            if other.first_token_s is not None or due_before(other, request, desk.now)
        ]
        queue.sort(key=lambda other: other.deadline_s)
        queue.append(request)
        size, seats = desk.kv.blocks_for, self._seats(desk, [*running, *queue], self._held_to(request)) - len(running)
        ends = []
        for number, other in enumerate(running):
            left = self._lengths.left(other, LIKELY)
            ends.append((left * self._token_s, number, size(other.known + left)))
        blocks = desk.kv.pool.num_blocks - sum(held for *_, held in ends)
        heapify(ends)
        now_s = 0.0
        for number, other in enumerate(queue, start=len(running)):
            left = self._lengths.left(other, LIKELY)
            needed = size(other.known + left)
            while ends and (seats <= 0 or needed > blocks):
                now_s, _, freed = heappop(ends)
                seats, blocks = seats + 1, blocks + freed
            seats, blocks = seats - 1, blocks - needed
            heappush(ends, (now_s + left * self._token_s, number, needed))
        return now_s

    def _seats(self, desk: Desk, everyone: list[Request], percentile: float) -> int:
        """How many may run at once: as many as there are seats, and as keep their pace."""
        gap = min(map(gap_s, everyone))
        step = Envelope(desk)
        if gap == inf or step.cost is None:
            return desk.max_num_seqs
        step.percentile = percentile
        context = sum(other.known for other in everyone) // len(everyone)

        def keep_pace(rows: int) -> bool:
            return step.takes_s(with_decodes(StepShape(), rows, rows * context)) <= self._share * gap

        if not keep_pace(1):
            return desk.max_num_seqs  # a pace that cannot be kept at all bounds nothing
        low, high = 1, min(desk.max_num_seqs, len(everyone))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if keep_pace(middle) else (low, middle - 1)
        return low if low < len(everyone) else desk.max_num_seqs
