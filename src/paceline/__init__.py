"""Paceline: LLM inference that holds the latency it promised.

    from paceline import LLM

    llm = LLM("smollm2-135m")
    for answer in llm.generate(["The capital of France is"], max_tokens=8):
        print(answer.text)

Names are resolved lazily, so that `import paceline` (and `paceline --help`) loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.app.llm import LLM, AsyncLLM
    from paceline.core.sampling import SamplingParams

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

_LAZY = {
    "LLM": "paceline.app.llm",
    "AsyncLLM": "paceline.app.llm",
    "SamplingParams": "paceline.core.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
