"""A server whose model costs nothing: the real HTTP process and engine process around a backend that makes up text.

    python -m tests.reliability.engines '{"delay_s": 0.01, "restart": true}'

prints its URL in a line once it answers. Settings are those of `Fake`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.core.config import SchedulerConfig
from paceline.core.scheduler import Scheduler
from paceline.core.step import StepPlan, StepResult, TokenLogprob
from paceline.engine.client import EngineClient
from paceline.engine.messages import EngineInfo
from paceline.engine.process import EngineLaunch
from paceline.engine.server import EngineParts, StageReporter
from paceline.serve.early import bind
from paceline.serve.server import Server
from paceline.serve.settings import ServeSettings

NAME = "made-up"


@dataclass(frozen=True)
class Fake:
    """What a test may set."""

    delay_s: float = 0.0  # of every step
    num_blocks: int = 65_536
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    load_s: float = 0.0  # how long a start takes
    restart: bool = False
    send_buffer: int | None = None  # bytes the kernel holds for each reader; loopback's own default is megabytes
    tokenizer_dir: str = ""  # filled in


class Babbler:
    """A `Backend` that answers letters at once."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._tops: dict[str, int | None] = {}  # alternatives asked for, of every request it holds

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in plan.released:
            del self._tops[request_id]
        for admission in plan.admitted:
            assert admission.spec.request_id not in self._tops, "admitted twice"
            self._tops[admission.spec.request_id] = admission.spec.sampling.logprobs
        time.sleep(self._delay_s)
        tokens = tuple((97 + plan.step % 26,) if samples else () for samples in plan.samples)
        tops = [self._tops[request_id] for request_id in plan.ids]
        logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
        if any(top is not None for top in tops):
            logprobs = tuple(
                tuple(TokenLogprob(t, -0.5, 1, tuple((i, -1.0 - i) for i in range(top or 0))) for t in row)
                for row, top in zip(tokens, tops, strict=True)
            )
        return StepResult(plan.step, tokens, logprobs, seconds=self._delay_s)


def make_engine(config: dict[str, Any], report_stage: StageReporter) -> EngineParts:
    """The factory that the engine process calls."""
    fake = msgspec.convert(config, Fake)
    report_stage("load")
    time.sleep(fake.load_s)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=fake.num_blocks,
            max_model_len=8192,
            max_num_seqs=fake.max_num_seqs,
            max_num_batched_tokens=fake.max_num_batched_tokens,
        )
    )
    info = EngineInfo(
        model=NAME,
        architecture="none",
        road="native",
        vocab_size=256,
        max_model_len=8192,
        eos_token_ids=(),
        tokenizer_dir=fake.tokenizer_dir,
        block_size=16,
        num_blocks=fake.num_blocks,
        dtype="none",
        kv_dtype="none",
        device="cpu",
        weights_bytes=0,
        kv_bytes=0,
        namespace="",
    )
    return EngineParts(scheduler, Babbler(fake.delay_s), info)


def write_tokenizer(folder: Path) -> None:
    """One token for each byte."""
    alphabet = {letter: number for number, letter in enumerate(_byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def _byte_letters() -> list[str]:
    """How byte-level tokenizers spell each byte: printable ones as themselves, the others from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    spelled = {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [spelled.get(byte, chr(byte)) for byte in range(256)]


def main(settings: str) -> int:
    """Serve until told to stop."""
    fake = msgspec.json.decode(settings, type=Fake)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        config = {**asdict(fake), "tokenizer_dir": folder}
        engine = EngineClient(EngineLaunch("tests.reliability.engines:make_engine", config), restart=fake.restart)
        return asyncio.run(_serve(engine, fake))


async def _serve(engine: EngineClient, fake: Fake) -> int:
    with bind("127.0.0.1", 0) as bound:
        if fake.send_buffer is not None:  # accepted connections inherit it
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, fake.send_buffer)
        server = Server(engine, ServeSettings(), bound, None)
        return await server.serve(lambda url, _: print(url, flush=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
