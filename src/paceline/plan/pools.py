"""What a replica bears within the promises when it prefills and decodes together, and when it does one of the two.

Closed forms over step times: all requests alike, arrivals as of Poisson, the mean first token in time. Prompts
queue for the tokens that steps have room for, as in M/D/1: under a load of r they wait r / (2 * (1 - r)) service times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.plan.case import Case
from paceline.plan.questions.budget import expected_budget
from paceline.plan.search import largest

MOST_REPLICAS = 16


@dataclass(frozen=True, slots=True)
class Role:
    """What a replica does all day, and the requests a second it bears; 0 where it cannot keep the promises."""

    rate: float
    batch: int = 0  # sequences that decode at once
    chunk: float = 0.0  # prompt tokens in the mean step
    step_s: float = 0.0  # mean step, or the prefill of a prompt
    load: float = 0.0  # of what computes prompts


@dataclass(frozen=True, slots=True)
class Split:
    """A replica in each of the three roles."""

    together: Role
    prefill: Role
    decode: Role

    def apart(self, prefills: int, decodes: int) -> float:
        """Requests a second for each replica, of a pool with so many of either kind."""
        return min(prefills * self.prefill.rate, decodes * self.decode.rate) / (prefills + decodes)

    @property
    def best(self) -> tuple[int, int]:
        """Prefill and decode replicas, at most 16 in all, that bear the most for each; the fewest that do."""
        pairs = [(x, total - x) for total in range(2, MOST_REPLICAS + 1) for x in range(1, total)]
        return max(pairs, key=lambda pair: (round(self.apart(*pair), 9), -sum(pair)))


def split_of(case: Case) -> Split:
    """What a replica of the case bears in each role."""
    own = case.at_own_context()
    return Split(together_of(own), prefill_of(own), decode_of(own))


def together_of(case: Case) -> Role:
    """Steps that carry decodes, and prompts at the pace at which the decoding sequences end.

    The largest step is the one that just keeps the ITL target; what prompts need of it is the load of the queue.
    """
    traffic, best = case.traffic, Role(0.0)
    for batch in _grid(case.sequences_that_fit(traffic.context)):
        chunk = batch * traffic.prompt / traffic.output  # for each token written, so many are to be read
        room = expected_budget(case, batch)
        if room == 0:
            break  # a larger batch has less
        load = chunk / room
        if load >= 1.0:
            break
        service_s = max(1.0, traffic.prompt / room) * case.step_s(batch, room)
        if service_s * (1.0 + load / (2.0 * (1.0 - load))) > case.targets.ttft_s:
            continue
        step_s = case.step_s(batch, math.ceil(chunk))
        rate = batch / (traffic.output * step_s)
        if rate > best.rate:
            best = Role(rate, batch, chunk, step_s, load)
    return best


def prefill_of(case: Case) -> Role:
    """One prompt after the other; the first token also waits for its KV to be sent."""
    service_s = case.prompt_s(case.traffic.prompt)
    room = (case.targets.ttft_s - transfer_s(case)) / service_s - 1.0  # service times that a prompt may wait
    if room <= 0.0:
        return Role(0.0, step_s=service_s)
    load = 2.0 * room / (1.0 + 2.0 * room)
    return Role(load / service_s, step_s=service_s, load=load)


def decode_of(case: Case) -> Role:
    """Decodes alone, as many as fit and keep the ITL target."""
    fits = case.sequences_that_fit(case.traffic.context)
    batch = largest(lambda count: case.step_s(count) <= case.targets.itl_s, fits)
    if not batch:
        return Role(0.0)
    step_s = case.step_s(batch)
    return Role(batch / (case.traffic.output * step_s), batch, step_s=step_s)


def transfer_s(case: Case) -> float:
    """Seconds that a prompt's KV takes between nodes, over all chips' links at once."""
    return case.kv_per_sequence(case.traffic.prompt) / (case.deployment.network_gbs * 1e9 * case.chips)


def _grid(most: int) -> list[int]:
    """Batches to try: all small ones, then steps of two percent."""
    found = list(range(1, min(most, 64) + 1))
    while found and found[-1] < most:
        found.append(min(most, max(found[-1] + 1, round(1.02 * found[-1]))))
    return found
