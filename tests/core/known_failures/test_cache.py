"""Cache correctness: what can be reused is, down to a block, and eviction never strands what is left."""

from __future__ import annotations

import random

import pytest

from tests.core.driver import Run, make, spec


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 32, 33, 64])
def test_less_than_a_block_is_lost_of_what_could_be_reused(block_size: int, length: int) -> None:
    """vllm#54607, vllm-ascend#7965: prompts below a block, or of exactly so many blocks, find less than there is."""
    run = Run(make(64, block_size=block_size))
    prompt = tuple(range(1, length + 1))
    for name in ("cold", "warm"):
        run.submit(spec(name, prompt, 1, stop=()))
        run.finish()
    reusable = length - 1  # the last token's logits are needed, so it is computed again
    lost = reusable - run.finishes["warm"].cached_tokens
    assert 0 <= lost < block_size, "with blocks of one token nothing is lost"
    stats = run.scheduler.stats()
    assert stats.prefix_queries_tokens == 2 * length, "what was looked up is counted beside what was found"
    assert stats.prefix_hits_tokens == run.finishes["warm"].cached_tokens


@pytest.mark.parametrize("seed", range(5))
def test_every_cached_block_keeps_its_ancestors(seed: int) -> None:
    """llm-d-inference-sim#704: heads of chains evicted before their tails; what is left can never be found."""
    rng = random.Random(seed)
    run = Run(make(24))
    stems = [tuple(rng.randrange(1, 9) for _ in range(24)) for _ in range(4)]
    for number in range(60):
        stem = rng.choice(stems)
        run.submit(spec(f"r{number}", (*stem[: rng.randrange(1, 25)], 10 + number % 30), rng.randrange(1, 12)))
        for _ in range(rng.randrange(4)):
            run.step()
        pool = run.scheduler._kv.pool
        parents = chains(run, stems)
        cached = {pool._names[block] for block in pool._cached}
        for name in cached & parents.keys():
            assert parents[name] is None or pool.find(parents[name]) is not None  # type: ignore[arg-type]
    run.finish()


def chains(run: Run, stems: list[tuple[int, ...]]) -> dict[bytes | None, bytes | None]:
    """Parent by name of every block along the stems."""
    from paceline.core.prefix import extend_chain

    parents: dict[bytes | None, bytes | None] = {}
    for stem in stems:
        names: list[bytes] = []
        extend_chain(names, run.scheduler._kv._root, stem, 4, 6)
        parents |= dict(zip(names, [None, *names], strict=False))
    return parents


def test_a_resumed_request_is_not_counted_as_a_hit() -> None:
    """vllm#25787: lookups after a preemption made the hit rate look better than it was."""
    run = Run(make(9))
    run.submit(spec("a", (1,) * 12, 12, stop=()))
    run.submit(spec("b", (2,) * 12, 9, stop=()))
    run.finish()
    assert run.finishes["b"].preemptions == 1
    stats = run.scheduler.stats()
    assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (24, 0)
    assert stats.recomputed_tokens < 12, "though it did find blocks again"
