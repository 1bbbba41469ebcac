"""What the runner and its worker processes say to each other, and how a load is shared among them."""

from __future__ import annotations

import msgspec

from paceline.measure.bodies import Features
from paceline.measure.keys import Keys
from paceline.measure.plan import BenchPlan
from paceline.measure.prompts import WORDS
from paceline.measure.records import ErrorClass, TokenFit, WorkerSample


class WorkerJob(msgspec.Struct, kw_only=True):
    """Everything a worker needs. Travels over a pipe, so the keys in it touch no command line and no file."""

    folder: str
    plan: BenchPlan
    worker: int
    workers: int
    features: Features
    fit: TokenFit
    segment: int = 0
    keys: Keys = Keys()
    words: tuple[str, ...] = WORDS
    skip: tuple[int, ...] = ()  # arrivals that earlier segments finished
    first_s: float = 0.0  # resumed closed loop: when on the axis its slots start


class Said(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line from a worker to the runner."""

    kind: str  # ready | progress | end | error
    worker: int
    message: str = ""
    error: ErrorClass | None = None
    connections: int = 0
    sample: WorkerSample | None = None
    ttft_s: tuple[float, ...] = ()  # of requests that ended since the last line, from the schedule
    gap_s: tuple[float, ...] = ()  # their mean gap between token rows


def share(total: int, worker: int, workers: int) -> int:
    """This worker's part of something split evenly, the first ones taking the remainder."""
    return total // workers + (worker < total % workers)


def connections_for(plan: BenchPlan) -> int:
    """How many connections to open before t0: all of a closed loop's, two seconds' worth of an open loop's rate."""
    load = plan.load
    if plan.client.connections is not None:
        return plan.client.connections
    if load.concurrency is not None:
        return load.concurrency
    wanted = min(256, max(16, round(2 * (load.rate or 16))))
    return wanted if load.max_concurrency is None else min(wanted, load.max_concurrency)
