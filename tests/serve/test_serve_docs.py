"""docs/api.md names every field, metric and limit that the code has."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.engine.messages import EngineStats
from paceline.serve.app import ROUTES
from paceline.serve.metrics import ServeMetrics
from paceline.serve.schemas import ChatRequest, CompletionRequest, field_names
from paceline.serve.settings import ServeSettings

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"[a-z_/0-9]+", TEXT))


def test_fields() -> None:
    assert field_names(ChatRequest) | field_names(CompletionRequest) <= WORDS


def test_endpoints() -> None:
    assert {route.path for route in ROUTES if "{" not in route.path} <= WORDS


def test_metrics() -> None:
    metrics = ServeMetrics(lambda: "m", EngineStats, dict)
    names = {family.name.removeprefix("paceline:") for family in metrics.registry.collect()}
    assert len(names) > 30
    assert {name for name in names if name not in WORDS} == set()


def test_limits() -> None:
    settings = ServeSettings()
    for shown in (
        f"| request line and headers | {settings.max_head_bytes >> 10} KiB |",
        f"| time for request line and headers | {settings.head_timeout_s:g} s |",
        f"{settings.max_body_bytes >> 20} MiB",
        f"| `n` | {settings.max_choices} |",
        f"| prompts times `n` | {settings.max_sequences:,} |",
        f"`top_logprobs` | {settings.max_logprobs} |",
        f"{settings.max_stops} strings of {settings.max_stop_chars} characters",
        f"{settings.max_logit_bias:,} entries",
        f"{settings.body_timeout_s:g} s",
        f"After {settings.keepalive_s:g} s of silence",
        f"takes nothing for {settings.write_timeout_s:g} s",
    ):
        assert shown in TEXT, shown
