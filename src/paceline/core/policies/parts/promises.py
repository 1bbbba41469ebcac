"""What a request was promised next, and how much it can bear."""

from __future__ import annotations

from math import inf

from paceline.core.request import Request


def gap_s(request: Request) -> float:
    """Longest time between two of its tokens: its itl, or what its end-to-end time leaves for each token to come."""
    gap = inf if request.itl_s is None else request.itl_s
    if request.e2e_s is not None:
        left_s = request.arrived_s + request.e2e_s - request.last_token_s
        gap = min(gap, max(left_s, 0.0) / max(1, request.limit - request.known))
    return gap


def next_token_s(request: Request, *, timeline: bool = False) -> float:
    """Deadline of its next token: of the first one, or a gap after the last is shown; inf where nothing is promised.

    On a timeline, the n-th token is due n gaps after the first one, however early the last one was.
    """
    if request.first_token_s is None:
        return request.deadline_s
    if timeline:
        return request.first_token_s + gap_s(request) * (request.known - request.prompt_len)
    return request.shown_s + gap_s(request)


def slack_per_token(request: Request, now: float, *, timeline: bool = False) -> tuple[float, float]:
    """How well it bears to be evicted: slack for each token that must be computed again; more is a better victim.

    Each eviction so far doubles what there is to compute, so that nobody is chosen over and over. Of those who are late
    already, it is the one with the least to compute.
    """
    slack_s = next_token_s(request, timeline=timeline) - now
    again = (request.planned + 1) * 2**request.preemptions
    if slack_s == inf:
        return inf, -again
    return (slack_s / again if slack_s > 0.0 else -again), -again
