"""What is measured: our policy, each preset at its default, and at settings that should suit it best here."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One way to run the server."""

    name: str
    preset: str
    policy: str
    options: dict[str, Any] = field(default_factory=dict)
    budget: int | None = None  # max_num_batched_tokens
    vendor_default: bool = False

    def flags(self, classes: dict[str, dict[str, float]]) -> list[str]:
        """What `paceline serve` is told."""
        flags = ["--policy", self.policy, "--classes", json.dumps(classes)]
        if self.options:
            pairs = (f"{name}={str(value).lower()}" for name, value in self.options.items())
            flags += ["--policy-options", ",".join(pairs)]
        if self.budget is not None:
            flags += ["--max-num-batched-tokens", str(self.budget)]
        return flags


def _vllm(budget: int) -> Variant:
    return Variant(f"vllm, budget {budget}", "vllm", "decode_first", budget=budget)


def _trtllm(kind: str, policy: str, tokens: int) -> Variant:
    options = {"chunking": "first_come", "max_num_tokens": tokens, "unit": 16}
    return Variant(f"trtllm-{kind}, chunked {tokens}", f"trtllm-{kind}", policy, options)


SLO = Variant("slo", "slo", "slo")
# In order of importance: where time runs out, the last ones are left out.
VARIANTS = (
    SLO,
    Variant("vllm", "vllm", "decode_first", vendor_default=True),
    *(_vllm(budget) for budget in (32, 48, 64, 128, 256)),
    Variant("sglang", "sglang", "prefill_first", vendor_default=True),
    Variant("sglang, mixed, chunk 64", "sglang", "prefill_first", {"mixed": True, "chunk": 64}),
    Variant("sglang, mixed, chunk 64, hrrn", "sglang", "prefill_first", {"order": "hrrn", "mixed": True, "chunk": 64}),
    Variant("sglang, chunk 128, interval 4", "sglang", "prefill_first", {"chunk": 128, "interval": 4}),
    _trtllm("noevict", "no_evict", 64),
    Variant("sarathi, chunk 64", "sarathi", "sarathi", {"chunk": 64}),
    Variant("trtllm-noevict", "trtllm-noevict", "no_evict", vendor_default=True),
    Variant("sglang, lpm", "sglang", "prefill_first", {"order": "lpm"}, vendor_default=True),
    _trtllm("maxutil", "max_utilization", 64),
    Variant("sarathi", "sarathi", "sarathi"),
    Variant("orca", "orca", "orca"),
    Variant("trtllm-maxutil", "trtllm-maxutil", "max_utilization"),
    Variant("trtllm-static", "trtllm-static", "static_batch"),
    Variant("dynamic", "dynamic", "dynamic"),
    Variant("static", "static", "static", {"delay_s": 1.0}),
)
BY_NAME = {variant.name: variant for variant in VARIANTS}
# `--lean`: a setting of each preset that should come close. No two prompts begin alike, so lpm has nothing to order by.
_CLOSE = (
    *(f"vllm, budget {budget}" for budget in (32, 48, 64, 128)),
    "sglang, mixed, chunk 64",
    "trtllm-noevict, chunked 64",
    "sarathi, chunk 64",
)
_PLAIN = ("slo", "vllm", "sglang", "trtllm-noevict")
LEAN = tuple(variant for variant in VARIANTS if variant.name in (*_PLAIN, *_CLOSE))
SMOKE = tuple(BY_NAME[name] for name in ("slo", "vllm", "vllm, budget 48"))
