"""Policies by name: one line each, and the names other engines' users know them by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from paceline.core.policies.base import Policy
from paceline.core.policies.decode_first import DecodeFirst
from paceline.core.policies.orca import Orca
from paceline.core.policies.parts.knobs import with_knobs
from paceline.core.policies.prefill_first import PrefillFirst
from paceline.core.policies.sarathi import Sarathi
from paceline.core.policies.slo import Slo
from paceline.core.policies.static import Dynamic, Static
from paceline.core.policies.trtllm import MaxUtilization, NoEvict, StaticBatch
from paceline.errors import ConfigError

POLICIES: dict[str, Callable[..., Policy]] = {
    "decode_first": DecodeFirst,
    "dynamic": Dynamic,
    "max_utilization": MaxUtilization,
    "no_evict": NoEvict,
    "orca": Orca,
    "prefill_first": PrefillFirst,
    "sarathi": Sarathi,
    "slo": Slo,
    "static": Static,
    "static_batch": StaticBatch,
}

ALIASES = {
    "sglang": "prefill_first",
    "trtllm-maxutil": "max_utilization",
    "trtllm-noevict": "no_evict",
    "trtllm-static": "static_batch",
    "vllm": "decode_first",
}


def make_policy(name: str, options: Iterable[tuple[str, Any]] = ()) -> Policy:
    """The policy of that name or alias with its knobs set; `ConfigError` names what there is."""
    kind = POLICIES.get(ALIASES.get(name, name))
    if kind is None:
        known = ", ".join(sorted([*POLICIES, *ALIASES]))
        raise ConfigError(f"policy is {name!r}; it must be one of {known}")
    return with_knobs("policy", name, kind, options)
