"""A run as text, a line a step, so that a policy's behaviour is read and compared like a score.

    3: a+1 b+1. c+256 | -d (d e)
    4-6: a+1 c+1 (d e)

In step 3, `a` and `b` got one token each and `c` got 256; `b` ended with it (the dot); `d` was evicted; after planning,
`d` and `e` wait, in this order. Steps 4 to 6 were all alike. With `clock`, a line begins with the time of the plan, and
none is drawn together.
"""

from __future__ import annotations

from itertools import groupby
from textwrap import dedent
from typing import Any

from tests.core.driver import Run, make, spec

CONFIG = (
    "max_model_len",
    "block_size",
    "max_num_batched_tokens",
    "max_num_seqs",
    "prefix_caching",
)


class Timeline(Run):
    """A run that writes down its steps. Names are one letter; a prompt given as a length repeats a token of its own."""

    def __init__(self, policy: str, *, num_blocks: int = 1000, clock: bool = False, **settings: object) -> None:
        """`settings` are of the scheduler where it knows them, else options of the policy. Blocks hold 4 tokens."""
        config: dict[str, Any] = {
            "max_model_len": 32768,
            **{key: settings.pop(key) for key in CONFIG if key in settings},
        }
        super().__init__(make(num_blocks, policy=policy, policy_options=tuple(settings.items()), **config))
        self.clock = clock
        self.lines: list[tuple[float, str]] = []

    def ask(self, name: str, prompt: int | tuple[int, ...], max_tokens: int = 4, *, priority: int = 0) -> None:
        """Submit a request."""
        tokens = (ord(name),) * prompt if isinstance(prompt, int) else prompt
        assert self.submit(spec(name, tokens, max_tokens, stop=(), priority=priority))

    def step(self) -> bool:
        """One step, and its line."""
        plans, ended, at = len(self.plans), set(self.finishes), self.now
        running = [request.request_id for request in self.scheduler._running]
        progress = super().step()
        if len(self.plans) > plans:
            plan = self.plans[-1]
            queue = list(self.scheduler._waiting)  # a commit changes nothing about it
            rows = [
                f"{name}+{count}" + "." * (name in self.finishes and name not in ended)
                for name, count in zip(plan.ids, plan.counts, strict=True)
            ]
            evicted = [f"-{name}" for name in plan.released if name in running and name in queue]
            line = rows + ["|"] * bool(evicted) + evicted + [f"({' '.join(queue)})"] * bool(queue)
            self.lines.append((at if self.clock else plan.step, " ".join(line)))
        return progress

    def steps(self, count: int) -> None:
        """So many plans."""
        goal = len(self.plans) + count
        while len(self.plans) < goal:
            assert self.step()

    def shows(self, expected: str) -> None:
        """Compare with what was expected, and begin a new page."""
        found = []
        for text, group in groupby(self.lines, key=lambda line: line if self.clock else line[1]):
            numbers = [number for number, _ in group]
            span = f"{numbers[0]:g}" + (f"-{numbers[-1]:g}" if len(numbers) > 1 else "")
            found.append(f"{span}: {text[1] if isinstance(text, tuple) else text}")
        self.lines = []
        assert "\n".join(found) == dedent(expected).strip(), "\n" + "\n".join(found)
