"""Our server through HTTP against transformers' `generate`: same weights, same float32, same machine, same run.

    python benchmarks/served_speed.py [--quick] [--json FILE] [--model GGUF_FILE_OR_FOLDER]

One stream: the same prompt to each, tokens a second from request to last token, turn by turn; the texts are compared.
Sixteen streams: clients that each send request after request of varying lengths, so that they arrive and end at
different times, against one `generate` of a batch of sixteen that starts and ends together and pads nothing.
Targets: at least 1.2 times transformers for one stream, at least its batch for sixteen.

Prompts are random tokens and no two begin alike, so the prefix cache helps nobody.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from _common import Report, arguments, measure_limits
from _server import default_model, server

STREAMS = 16
PROMPT = 64  # tokens; the mean where they vary


@dataclass(frozen=True)
class Sizes:
    """How much to measure."""

    repeats: int
    output: int  # tokens of the single stream and of the batch; the mean of the many streams
    window_s: float  # how long the many streams are counted


class Transformers:
    """The same checkpoint in transformers."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        kwargs = {"gguf_file": model.name} if model.suffix == ".gguf" else {}
        folder = model.parent if model.suffix == ".gguf" else model
        import torch

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **kwargs)

    @property
    def weight_bytes(self) -> int:
        """Bytes read for each step: shared tensors once."""
        return sum(p.nbytes for p in self.model.parameters())

    def generate(self, prompts: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        """Seconds, and `count` greedy tokens after each of the prompts, which are of one length."""
        import torch

        ids = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            found = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
            )
        return time.perf_counter() - start, found[:, ids.shape[1] :].tolist()


class Client:
    """Streams completions and notes when tokens came."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=None)  # a slow machine is slow

    async def __aenter__(self) -> Client:
        self.name = (await self._http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def complete(self, prompt: list[int], count: int, on_tokens: Callable[[int], None]) -> str:
        """The text of `count` greedy tokens; `on_tokens` hears how many came, as they come."""
        body = {
            "model": self.name,
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        text, so_far = "", 0
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code} {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                text += "".join(choice["text"] for choice in event["choices"])
                if event.get("usage"):
                    on_tokens(event["usage"]["completion_tokens"] - so_far)
                    so_far = event["usage"]["completion_tokens"]
        assert so_far == count, f"{so_far} tokens came, {count} were asked for"
        return text


class Prompts:
    """Random prompts, no two of which begin alike."""

    def __init__(self, vocab: int, specials: set[int]) -> None:
        self._rng = random.Random(0)
        self._plain = [token for token in range(vocab) if token not in specials]
        self._rng.shuffle(self._plain)
        self._firsts = iter(self._plain)

    def make(self, length: int) -> list[int]:
        return [next(self._firsts), *self._rng.choices(self._plain, k=length - 1)]

    def vary(self, mean: int) -> int:
        """A length between half of the mean and half as much again."""
        return self._rng.randint(mean // 2, mean * 3 // 2)


async def one_stream(client: Client, theirs: Transformers, prompts: Prompts, sizes: Sizes, report: Report) -> float:
    """The median ratio of our speed to theirs."""
    rates: dict[str, list[float]] = {"paceline": [], "transformers": []}
    same = 0
    for turn in range(sizes.repeats + 1):
        prompt = prompts.make(PROMPT)
        seconds, tokens = theirs.generate([prompt], sizes.output)
        start = end = time.perf_counter()

        def note(count: int) -> None:
            nonlocal end
            if count:
                end = time.perf_counter()

        text = await client.complete(prompt, sizes.output, note)
        if turn == 0:
            continue  # both warm up
        rates["transformers"].append(sizes.output / seconds)
        rates["paceline"].append(sizes.output / (end - start))
        same += text == theirs.tokenizer.decode(tokens[0])
    report.add("transformers, 1 stream", rates["transformers"], "tokens/s")
    report.add("paceline over HTTP, 1 stream", rates["paceline"], "tokens/s")
    report.note("same text as transformers", f"{same} of {sizes.repeats}")
    return report.add("ratio, 1 stream", _ratios(rates), "x")


async def many_streams(client: Client, theirs: Transformers, prompts: Prompts, sizes: Sizes, report: Report) -> float:
    """The median ratio of our total speed to theirs."""
    rates: dict[str, list[float]] = {"paceline": [], "transformers": []}
    for turn in range(sizes.repeats + 1):
        count = sizes.output if turn else 4
        seconds, _ = theirs.generate([prompts.make(PROMPT) for _ in range(STREAMS)], count)
        if turn == 0:
            continue
        rates["transformers"].append(STREAMS * count / seconds)
        rates["paceline"].append(await _crowd(client, prompts, sizes))
    report.add(f"transformers, batch of {STREAMS}", rates["transformers"], "tokens/s")
    report.add(f"paceline over HTTP, {STREAMS} streams", rates["paceline"], "tokens/s")
    return report.add(f"ratio, {STREAMS} streams", _ratios(rates), "x")


async def _crowd(client: Client, prompts: Prompts, sizes: Sizes) -> float:
    """Tokens a second over a window in which all streams are busy: each sends its next request when one ends."""
    tokens = 0
    speaking: set[int] = set()
    all_speak = asyncio.Event()

    async def stream(number: int) -> None:
        def note(count: int) -> None:
            nonlocal tokens
            tokens += count
            speaking.add(number)
            if len(speaking) == STREAMS:
                all_speak.set()

        await asyncio.sleep(0.05 * number)
        while True:
            await client.complete(prompts.make(prompts.vary(PROMPT)), prompts.vary(sizes.output), note)

    async def window() -> float:
        await all_speak.wait()
        before, start = tokens, time.perf_counter()
        await asyncio.sleep(sizes.window_s)
        return (tokens - before) / (time.perf_counter() - start)

    streams: list[asyncio.Task[Any]] = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
    counting = asyncio.create_task(window())
    done, _ = await asyncio.wait([*streams, counting], return_when=asyncio.FIRST_COMPLETED)
    for task in (*streams, counting):
        task.cancel()
    await asyncio.gather(*streams, counting, return_exceptions=True)
    for task in done:
        task.result()  # raises what a stream raised
    return counting.result()


def _ratios(rates: dict[str, list[float]]) -> list[float]:
    return [ours / theirs for ours, theirs in zip(rates["paceline"], rates["transformers"], strict=True)]


async def compare(url: str, theirs: Transformers, sizes: Sizes, report: Report) -> bool:
    """Both comparisons; whether both targets hold."""
    prompts = Prompts(len(theirs.tokenizer), set(theirs.tokenizer.all_special_ids))
    async with Client(url) as client:
        one = await one_stream(client, theirs, prompts, sizes, report)
        many = await many_streams(client, theirs, prompts, sizes, report)
    report.note("verdict, 1 stream", f"{'holds' if one >= 1.2 else 'MISSED'}: at least 1.2 times transformers")
    report.note(f"verdict, {STREAMS} streams", f"{'holds' if many >= 1.0 else 'MISSED'}: at least transformers' batch")
    return one >= 1.2 and many >= 1.0


def main() -> int:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", type=Path, default=default_model(), help="a .gguf file or a folder")

    args = arguments(__doc__, add)
    if not args.model.exists():
        print(f"served_speed: skipped, {args.model} is not there; run `paceline pull smollm2-135m` first")
        return 0
    report = Report("served_speed", args)
    sizes = Sizes(repeats=2, output=24, window_s=4.0) if args.quick else Sizes(repeats=5, output=64, window_s=20.0)
    bandwidth, _ = measure_limits(report, repeats=3 if args.quick else 7)
    theirs = Transformers(args.model)
    limit = bandwidth / theirs.weight_bytes
    report.note("most tokens/s of one stream that memory allows", round(limit, 1))
    with server(args.model) as url:
        held = asyncio.run(compare(url, theirs, sizes, report))
    report.finish()
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
