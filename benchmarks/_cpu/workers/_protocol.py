"""What all workers share: orders in, answers out, a line of JSON each. The standard library alone: peers have no more.

The first order says what to load; its answer has memory and versions. Every other order is a batch of prompts of token
ids and a count of greedy tokens; its answer has the time of every token since the batch was begun.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

Times = list[list[float]]  # of each prompt's tokens, seconds since the batch was begun


class Engine(Protocol):
    """A model that is loaded."""

    facts: dict[str, Any]

    def run(self, prompts: list[list[int]], count: int) -> tuple[Times, list[int]]:
        """`count` greedy tokens after each of the prompts: when they were there; the first prompt's tokens."""
        ...


def work(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Answer orders until there are no more. Whatever a library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**found: Any) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    imported = memory("VmRSS")
    order = json.loads(sys.stdin.readline())
    try:
        engine = load(order)
        answer(imported_bytes=imported, facts=engine.facts)
        for line in sys.stdin:
            order = json.loads(line)
            times, tokens = engine.run(order["prompts"], order["count"])
            rounded = [[round(at, 6) for at in one] for one in times]
            answer(times=rounded, tokens=tokens, peak_bytes=memory("VmHWM"))
    except BaseException as error:  # the driver tells it; a library may raise anything
        answer(error=f"{type(error).__name__}: {error}"[:500])
        raise


def memory(name: str) -> int:
    """A line of this process's status, in bytes: VmRSS is what is resident, VmHWM the most that ever was."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])
