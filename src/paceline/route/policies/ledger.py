"""The books of whoever sends requests on: what is under way where, from what was sent and what came back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.route.policies.base import Load


@dataclass(slots=True)
class _Entry:
    replica: str
    prompt_tokens: int
    to_compute: int  # of the prompt, as expected when it was sent
    started: bool = False


@dataclass(slots=True)
class _Account:
    cache_tokens: int
    speed: float
    waiting: int = 0
    waiting_tokens: int = 0
    running: int = 0
    prompt_tokens: int = 0  # of those who run
    generated_tokens: int = 0  # by those who run


class Ledger:
    """Requests in flight by replica. Every one that was sent is ended exactly once, by `ended` or with its replica."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}  # in order of joining
        self._entries: dict[str, _Entry] = {}

    def join(self, name: str, *, cache_tokens: int = 0, speed: float = 1.0) -> None:
        """A replica can take requests."""
        assert name not in self._accounts, f"{name} is here already"
        self._accounts[name] = _Account(cache_tokens, speed)

    def leave(self, name: str) -> list[str]:
        """A replica is gone; the ids of what it had not finished, oldest first, which are no longer in the books."""
        del self._accounts[name]
        lost = [request_id for request_id, entry in self._entries.items() if entry.replica == name]
        for request_id in lost:
            del self._entries[request_id]
        return lost

    def sent(self, request_id: str, name: str, prompt_tokens: int, hit_tokens: int = 0) -> None:
        """A request went to `name`, whose cache is expected to hold `hit_tokens` of its prompt."""
        assert request_id not in self._entries, f"{request_id} is in flight already"
        account = self._accounts[name]
        to_compute = prompt_tokens - hit_tokens
        self._entries[request_id] = _Entry(name, prompt_tokens, to_compute)
        account.waiting += 1
        account.waiting_tokens += to_compute

    def started(self, request_id: str) -> None:
        """A request's first token came: its prompt is done."""
        entry = self._entries.get(request_id)
        if entry is None or entry.started:
            return
        entry.started = True
        account = self._accounts[entry.replica]
        account.waiting -= 1
        account.waiting_tokens -= entry.to_compute
        account.running += 1
        account.prompt_tokens += entry.prompt_tokens

    def grew(self, name: str, tokens: int) -> None:
        """Tokens of requests that have started came from `name`: all of one step at once, because there are many."""
        self._accounts[name].generated_tokens += tokens

    def ended(self, request_id: str, generated: int = 0) -> None:
        """A request's last word came; `generated` of the tokens told to `grew` were its."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        account = self._accounts[entry.replica]
        if entry.started:
            account.running -= 1
            account.prompt_tokens -= entry.prompt_tokens
            account.generated_tokens -= generated
        else:
            account.waiting -= 1
            account.waiting_tokens -= entry.to_compute

    def loads(self, names: Sequence[str] | None = None) -> list[Load]:
        """What is under way at each replica (of `names`, if given), in order of joining."""
        return [
            Load(
                name,
                waiting=account.waiting,
                waiting_tokens=account.waiting_tokens,
                running=account.running,
                running_tokens=account.prompt_tokens + account.generated_tokens,
                cache_tokens=account.cache_tokens,
                speed=account.speed,
            )
            for name, account in self._accounts.items()
            if names is None or name in names
        ]

    def check_integrity(self) -> None:
        """Assert that every account is the sum of its entries."""
        for name, account in self._accounts.items():
            mine = [entry for entry in self._entries.values() if entry.replica == name]
            waiting = [entry for entry in mine if not entry.started]
            running = [entry for entry in mine if entry.started]
            assert account.waiting == len(waiting)
            assert account.waiting_tokens == sum(entry.to_compute for entry in waiting)
            assert account.running == len(running)
            assert account.prompt_tokens == sum(entry.prompt_tokens for entry in running)
            assert account.generated_tokens >= 0
            assert running or not account.generated_tokens, "tokens of nobody"
