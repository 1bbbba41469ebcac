"""A server on the scripted engine as a process of its own, to be killed: FOLDER TOKENIZER_DIR."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from paceline.core.step import RequestSpec
from paceline.serve.batch.settings import BatchSettings
from paceline.serve.server import serve
from paceline.serve.settings import ServeSettings
from paceline.text.tokenizer import Tokenizer
from tests.serve.fake_engine import FakeEngine


async def main(folder: str, tokenizer_dir: str) -> int:
    engine = FakeEngine(max_num_seqs=8)
    engine.step_s = 0.005
    tokenizer = Tokenizer.from_dir(tokenizer_dir)

    def echo(spec: RequestSpec) -> tuple[int, ...]:
        return spec.prompt[-4:]

    engine.backend.script = echo
    batch = BatchSettings(folder=Path(folder), sweep_s=0.05, concurrency=8)
    settings = ServeSettings(port=0, batch=batch)
    return await serve(engine, settings, tokenizer=tokenizer, on_ready=lambda url, info: print(url, flush=True))


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
