"""What is compared: each system's file, precision and settings, for a worker in process and for a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _cpu.models import Shape
from _cpu.peers import Peers
from _cpu.weights import Files

WORKERS = Path(__file__).parent / "workers"
PROBE = 320  # tokens
SLO = {"itl_ms": 100.0, "ttft_ms": 5000.0}  # of the mixed load


@dataclass(frozen=True)
class Room:
    """How much a worker or a server must hold at once. The client of a server asks it for `PROBE` tokens at first."""

    streams: int
    tokens: int  # of the longest sequence, prompt and answer together

    def kv_gib(self, shape: Shape) -> float:
        """For so many sequences of that length in float32, and a little for the ends of blocks."""
        return 1.1 * shape.kv_bytes(self.streams * (self.tokens + 16)) / 2**30


@dataclass(frozen=True)
class System:
    """One way to compute the model."""

    name: str
    peer: str
    form: str  # of the weights' file
    precision: str  # of the weights in memory, which decides its limit
    options: dict[str, Any] = field(default_factory=dict)  # of the worker

    @property
    def ours(self) -> bool:
        return self.peer == "paceline"

    @property
    def limit(self) -> str:
        """Which matrix multiplication bounds it: integers for quantized weights."""
        return "int8" if self.precision in ("int8", "int4") else "float32"

    def worker(self, peers: Peers) -> list[str]:
        """The command of its worker. Raises Absent."""
        return [peers.python(self.peer), str(WORKERS / f"{self.peer.replace('.', '_')}_worker.py")]

    def order(self, files: Files, shape: Shape, room: Room, threads: int) -> dict[str, Any]:
        """What its worker is told to load."""
        options = {**self.options, "threads": threads} if self.ours else self.options
        return {
            "model": str(files.path(shape, self.form)),
            "threads": threads,
            "streams": room.streams,
            "tokens": room.tokens,
            "kv_gib": room.kv_gib(shape),
            "options": options,
        }

    def serve(
        self, peers: Peers, files: Files, shape: Shape, room: Room, threads: int, *, extra: Sequence[str] = ()
    ) -> tuple[list[str], str]:
        """(command of its server, path that answers once it is ready). Raises Absent."""
        model = str(files.path(shape, self.form))
        home = peers.home(self.peer)
        if self.peer == "paceline":
            command = [str(Path(sys.executable).parent / "paceline"), "serve", "--model", model, "--no-batches"]
            for name, value in {**self.options, "threads": threads, "max_model_len": room.tokens}.items():
                command += [f"--{name.replace('_', '-')}", str(value)]
            command += ["--kv-gib", f"{room.kv_gib(shape):.3f}", "--log-level", "warning"]
            return [*command, *extra], "/ready"
        if self.peer == "llama.cpp":
            command = [str(home / "build" / "bin" / "llama-server"), "--model", model, "--threads", str(threads)]
            command += ["--parallel", str(room.streams), "--ctx-size", str(room.streams * room.tokens)]
            # A thread for each connection, those of the client that are open and idle too: else requests wait for one.
            command += ["--threads-http", str(2 * room.streams + 32)]
            return [*command, "--cache-ram", "0", "--no-webui", "--log-verbosity", "1", *extra], "/health"
        if self.peer == "openvino":
            command = [peers.python(self.peer), str(WORKERS / "openvino_server.py"), "--model", model]
            command += ["--threads", str(threads), "--kv-gib", f"{room.kv_gib(shape):.3f}"]
            return [*command, "--options", json.dumps(self.options), *extra], "/health"
        assert self.peer == "vllm"
        # What `vllm serve` runs; the command itself does not find its version in this build.
        command = [peers.python(self.peer), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--dtype", self.precision]
        command += ["--max-model-len", str(room.tokens), "--max-num-seqs", str(room.streams)]
        return [*command, "--no-enable-prefix-caching", "--disable-log-stats", *extra], "/health"


def _ours(name: str, precision: str, **options: str) -> System:
    return System(f"paceline {name}", "paceline", "Q4_1", precision, {"dtype": "float32", **options})


def _llama(form: str, precision: str) -> System:
    return System(f"llama.cpp {form}", "llama.cpp", form, precision)


def _openvino(form: str, precision: str) -> System:
    return System(f"openvino {form}", "openvino", form, precision)


def _transformers(dtype: str) -> System:
    return System(f"transformers {dtype}", "transformers", "hf", dtype, {"dtype": dtype})


def _vllm(dtype: str) -> System:
    return System(f"vllm {dtype}", "vllm", "hf", dtype, {"dtype": dtype})


SYSTEMS = {
    system.name: system
    for system in (
        _ours("int8", "int8", quantization="int8"),
        _ours("int4", "int4", quantization="int4"),
        _ours("float32", "float32"),
        _ours("bfloat16", "bfloat16", dtype="bfloat16"),
        _llama("Q8_0", "int8"),
        _llama("Q4_1", "int4"),
        _llama("F16", "float16"),
        _openvino("Q8_0", "int8"),
        _openvino("Q4_1", "int4"),
        _openvino("F16", "float16"),
        _transformers("float32"),
        _transformers("bfloat16"),
        _vllm("float32"),
        _vllm("bfloat16"),
    )
}
# What takes long is measured where it can win, or where it is asked for.
OURS = ("paceline int8", "paceline int4", "paceline float32")
SERVED = (*OURS, "llama.cpp Q8_0", "llama.cpp Q4_1", "openvino Q8_0", "vllm float32", "transformers float32")
SCALING = (*OURS, "llama.cpp Q8_0", "openvino Q8_0", "vllm float32")
LARGE = (*OURS, "llama.cpp Q8_0", "llama.cpp Q4_1", "llama.cpp F16", "openvino Q8_0", "vllm float32")
LARGE_SERVED = (*OURS, "llama.cpp Q8_0", "llama.cpp Q4_1", "openvino Q8_0", "vllm float32")
STARTED = ("paceline int8", "paceline float32", "llama.cpp Q8_0", "openvino Q8_0", "vllm float32")


@dataclass(frozen=True)
class Mixed:
    """A server under the mixed load: a system, and what its server is told beside."""

    name: str
    system: str
    extra: tuple[str, ...] = ()


MIXED = (
    Mixed(
        "paceline int8, slo",
        "paceline int8",
        ("--policy", "slo", "--classes", json.dumps({"interactive": SLO, "standard": SLO})),
    ),
    Mixed("vllm float32", "vllm float32"),
    Mixed("llama.cpp Q8_0", "llama.cpp Q8_0"),
    Mixed("llama.cpp Q8_0, batch 128", "llama.cpp Q8_0", ("--batch-size", "128", "--ubatch-size", "128")),
    Mixed("openvino Q8_0", "openvino Q8_0"),
)
