"""Who is next: orders of the waiting queue.

An order takes the desk and gives the waiting requests in the order in which a policy should try them. All are stable:
equals stay in order of arrival, and a preempted request keeps the place the policy gave it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from paceline.core.desk import Desk
from paceline.core.request import Request

Order = Callable[[Desk], list[Request]]

MATCHED_QUEUE = 128  # beyond this many waiting, matching all of them costs more than it gains (SGLang's bound)
SHARED_TOKENS = 32  # a request that finds less than this and shares this much with an earlier one waits for it


def fcfs(desk: Desk) -> list[Request]:
    """First come, first served."""
    return list(desk.waiting.values())


def rank(request: Request) -> tuple[int, int, float]:
    """Its class's priority, then its own, then its arrival: lower goes first (vLLM's direction)."""
    return request.kind.priority, request.spec.priority, request.arrived_s


def by_priority(desk: Desk) -> list[Request]:
    """Lower priority first, of the class before the request's own, then arrival."""
    return sorted(desk.waiting.values(), key=rank)


def longest_output_first(desk: Desk) -> list[Request]:
    """Most `max_tokens` first (SGLang's lof)."""
    return sorted(desk.waiting.values(), key=lambda request: -request.spec.sampling.max_tokens)


def longest_prefix_first(desk: Desk) -> list[Request]:
    """Most cached tokens first (SGLang's lpm), so that what is cached is used before it is evicted.

    Of several that share a prefix nobody has computed yet, the first goes ahead and the others go last: one step later
    they find it cached.
    """
    if len(desk.waiting) > MATCHED_QUEUE:
        return fcfs(desk)
    size = desk.kv.block_size
    matched = {name: len(desk.kv.lookup(request)) * size for name, request in desk.waiting.items()}
    late = _in_batch_duplicates(desk, matched)
    return sorted(desk.waiting.values(), key=lambda request: (request.request_id in late, -matched[request.request_id]))


def _in_batch_duplicates(desk: Desk, matched: dict[str, int]) -> set[str]:
    """Requests that would compute again what an earlier one of this queue is about to compute."""
    depth = -(-SHARED_TOKENS // desk.kv.block_size)  # the block whose name stands for the first SHARED_TOKENS
    seen: set[bytes] = set()
    late = set()
    for name, request in desk.waiting.items():
        if matched[name] > SHARED_TOKENS or len(request.hashes) < depth:
            continue
        if request.hashes[depth - 1] in seen:
            late.add(name)
        seen.add(request.hashes[depth - 1])
    return late


def by_subtree_weight(desk: Desk) -> list[Request]:
    """Depth first through the tree of cached prefixes, most waiting requests first (SGLang's dfs-weight).

    A node's own requests come after those of its children.
    """
    if len(desk.waiting) > MATCHED_QUEUE:
        return fcfs(desk)
    children: dict[bytes, list[bytes]] = {}
    weights: dict[bytes, int] = {}
    own: dict[bytes, list[Request]] = {}
    for request in desk.waiting.values():
        path = [b"", *request.hashes[: len(desk.kv.lookup(request))]]
        for parent, child in pairwise(path):
            if child not in weights:
                children.setdefault(parent, []).append(child)
            weights[child] = weights.get(child, 0) + 1
        own.setdefault(path[-1], []).append(request)
    ordered: list[Request] = []
    stack = [(b"", False)]
    while stack:
        node, visited = stack.pop()
        if visited:
            ordered += own.get(node, [])
            continue
        stack.append((node, True))
        heavy_first = sorted(children.get(node, []), key=lambda child: -weights[child])
        stack += [(child, False) for child in reversed(heavy_first)]
    return ordered


class HighestResponseRatio:
    """Most prefill work seen since arrival per own uncached token first (SGLang's hrrn): short first, but all age.

    What ages a request is work, not time: the tokens that others prefilled while it waited.
    """

    def __init__(self) -> None:
        self._prefilled = 0
        self._at_arrival: dict[str, int] = {}

    def arrived(self, request: Request) -> None:
        """Its age starts now; one that comes back after a preemption starts again."""
        self._at_arrival[request.request_id] = self._prefilled

    def prefilled(self, tokens: int) -> None:
        """Tell it of prefill tokens given in this step."""
        self._prefilled += tokens

    def __call__(self, desk: Desk) -> list[Request]:
        since = {name: self._at_arrival.get(name, self._prefilled) for name in desk.waiting}
        self._at_arrival = since
        if len(desk.waiting) > MATCHED_QUEUE:
            return fcfs(desk)
        size = desk.kv.block_size
        matched = {name: len(desk.kv.lookup(request)) * size for name, request in desk.waiting.items()}
        late = _in_batch_duplicates(desk, matched)

        def key(request: Request) -> tuple[bool, float]:
            name = request.request_id
            return name in late, -(self._prefilled - since[name]) / (request.known - matched[name])

        return sorted(desk.waiting.values(), key=key)


# By name; a call makes a fresh one, because an order may remember.
ORDERS: dict[str, Callable[[], Order]] = {
    "fcfs": lambda: fcfs,
    "priority": lambda: by_priority,
    "lof": lambda: longest_output_first,
    "lpm": lambda: longest_prefix_first,
    "dfs_weight": lambda: by_subtree_weight,
    "hrrn": HighestResponseRatio,
}
