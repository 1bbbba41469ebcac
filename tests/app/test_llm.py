"""The Python API over the real model: batches, streams, stops, chats, threads, and what goes wrong."""

from __future__ import annotations

import asyncio
import doctest
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

import paceline
import paceline.app.llm as module
from paceline.app.llm import LLM, Answer, AsyncLLM
from paceline.core.sampling import SamplingParams
from paceline.core.step import StepPlan, StepResult
from paceline.errors import BadRequest, ConfigError, EngineDead, ModelNotFound

GREEDY = {"temperature": 0, "max_tokens": 12}
HELLO = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test the engine is idle and every block is accounted for."""
    yield
    if "llm" in request.fixturenames:
        engine: LLM = request.getfixturevalue("llm")
        assert not engine._live
        assert engine._loop.live == ()
        engine._loop.scheduler.check_integrity()


@pytest.mark.parametrize("name", ["LLM", "AsyncLLM"])
def test_the_documented_examples_run(name: str) -> None:
    [example] = doctest.DocTestFinder(recurse=False).find(getattr(module, name), name)
    assert doctest.DocTestRunner().run(example).failed == 0


def test_the_package_offers_both() -> None:
    assert (paceline.LLM, paceline.AsyncLLM) == (LLM, AsyncLLM)


def test_a_batch_answers_in_order_as_each_alone_would(llm: LLM) -> None:
    prompts = [f"Question {i}: what is {i} plus {i}? Answer:" for i in range(20)]
    together = llm.generate(prompts, **GREEDY)
    assert [answer.text for answer in together] == [llm.generate(prompt, **GREEDY)[0].text for prompt in prompts]
    assert all(answer.finish_reason in {"length", "stop"} for answer in together)


def test_token_ids_are_a_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The capital of France is")
    as_text, [as_ids], [in_list] = (
        llm.generate("The capital of France is", **GREEDY)[0].text,
        llm.generate(ids, **GREEDY),
        llm.generate([ids], **GREEDY),
    )
    assert as_text == as_ids.text == in_list.text
    assert as_ids.prompt_tokens == len(ids)


def test_streamed_pieces_make_the_answer(llm: LLM) -> None:
    prompts = ["Once upon a time", "List: red, green,"]
    texts, tokens, answers = ["", ""], [0, 0], {}
    for delta in llm.stream(prompts, **GREEDY):
        texts[delta.index] += delta.text
        tokens[delta.index] += delta.tokens
        if delta.answer is not None:
            answers[delta.index] = delta.answer
    assert texts == [answers[0].text, answers[1].text] == [one.text for one in llm.generate(prompts, **GREEDY)]
    assert tokens == [12, 12]


def test_a_stop_string_ends_the_request_and_is_not_shown(llm: LLM) -> None:
    [whole] = llm.generate("1, 2, 3, 4,", temperature=0, max_tokens=40)
    [cut] = llm.generate("1, 2, 3, 4,", temperature=0, max_tokens=40, stop=["9", " 8"])
    assert cut.text == whole.text[: whole.text.index(" 8")]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", " 8")
    assert len(cut.tokens) < len(whole.tokens)


def test_end_of_sequence_and_stop_tokens(llm: LLM) -> None:
    reply = llm.chat(HELLO, temperature=0, max_tokens=60)
    assert (reply.finish_reason, reply.stop_reason) == ("stop", None)
    assert "<|im_end|>" not in reply.text
    on = llm.chat(HELLO, temperature=0, max_tokens=60, ignore_eos=True)
    assert (on.finish_reason, len(on.tokens)) == ("length", 60)
    third = reply.tokens[2]
    stopped = llm.chat(HELLO, temperature=0, max_tokens=60, stop_token_ids=[third])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", third)


def test_seeds_repeat_and_absent_seeds_differ(llm: LLM) -> None:
    def draw(**sampling: Any) -> str:
        return llm.generate("Once upon a time", max_tokens=16, **sampling)[0].text

    assert draw(seed=7) == draw(seed=7)
    assert len({draw() for _ in range(4)}) > 1
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=16)
    assert draw(sampling=params) == draw(seed=7)


def test_logprobs_are_parallel_to_tokens(llm: LLM) -> None:
    [answer] = llm.generate("The capital of France is", **GREEDY, logprobs=2, prompt_logprobs=0)
    assert [one.token for one in answer.logprobs] == list(answer.tokens)
    assert all(one.rank == 1 and len(one.top) == 2 for one in answer.logprobs)
    assert len(answer.prompt_logprobs) == answer.prompt_tokens - 1


def test_the_answer_fits_the_context(llm: LLM) -> None:
    [answer] = llm.generate([[5] * 500], temperature=0, max_tokens=1000, ignore_eos=True)
    assert (answer.finish_reason, answer.prompt_tokens + len(answer.tokens)) == ("length", 512)


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ("", {}, "the prompt is empty"),
        (["fine", ""], {}, "prompt 1: the prompt is empty"),
        ([[1, 70_000]], {}, "token id 70000 is outside the vocabulary of 49152"),
        ([[1] * 512], {}, "the prompt has 512 tokens and SmolLM2-135M-Instruct.Q4_1 takes 512"),
        ("x", {"temperature": -0.1}, "temperature is -0.1; it must be from 0 to 2"),
        ("x", {"top_p": 0}, "top_p is 0"),
        ("x", {"max_tokens": 0}, "max_tokens is 0; it must be a whole number of at least 1"),
        ("x", {"max_tokens": True}, "max_tokens is True"),
        ("x", {"stop": [""]}, "stop is ['']"),
        ("x", {"tempratur": 1}, "unknown sampling parameter 'tempratur'"),
        ("x", {"logit_bias": {70_000: 1}}, "logit_bias: token id 70000 is outside the vocabulary"),
        ("x", {"stop_token_ids": [-1]}, "stop_token_ids: token id -1 is outside the vocabulary"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(
    llm: LLM, prompts: Any, sampling: dict[str, Any], message: str
) -> None:
    steps = llm._loop.stats().steps
    with pytest.raises(BadRequest) as caught:
        llm.generate(prompts, **sampling)
    assert message in str(caught.value)
    assert llm._loop.stats().steps == steps


def test_chat_refuses_what_the_template_refuses(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="messages is empty"):
        llm.chat([])


def test_a_closed_stream_frees_its_blocks_at_once(llm: LLM) -> None:
    stream = llm.stream(["a long story:"] * 5, max_tokens=200, ignore_eos=True)
    next(stream)
    assert llm._loop.scheduler.stats().kv_blocks_used > 0
    stream.close()
    assert llm._loop.scheduler.stats().kv_blocks_used == 0
    assert llm.generate("1, 2,", **GREEDY)[0].text


def test_a_stream_that_nobody_starts_costs_nothing(llm: LLM) -> None:
    llm.stream("never read", **GREEDY)
    assert llm._loop.live == ()


def test_streams_may_interleave_in_one_thread(llm: LLM) -> None:
    alone = [llm.generate(prompt, **GREEDY)[0].text for prompt in ("1, 2,", "a, b,")]
    texts = ["", ""]
    for first, second in zip(llm.stream("1, 2,", **GREEDY), llm.stream("a, b,", **GREEDY), strict=True):
        texts[0] += first.text
        texts[1] += second.text
    assert texts == alone


def test_threads_share_the_batches(llm: LLM) -> None:
    prompts = [f"{i}, {i + 1}," for i in range(6)]
    alone = [llm.generate(prompt, **GREEDY)[0].text for prompt in prompts]
    steps = llm._loop.stats().steps
    found: dict[int, str] = {}

    def ask(index: int) -> None:
        found[index] = llm.generate(prompts[index], **GREEDY)[0].text

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(6)] == alone
    assert llm._loop.stats().steps - steps < 6 * 12


def test_an_interrupt_comes_between_two_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that was running is committed, its text kept, and the LLM goes on to work."""
    steps: list[int] = []
    backend = llm._loop.backend
    execute = backend.execute

    def interrupted(plan: StepPlan) -> StepResult:
        steps.append(plan.step)
        if len(steps) == 4:
            signal.raise_signal(signal.SIGINT)
        return execute(plan)

    monkeypatch.setattr(backend, "execute", interrupted)
    seen: list[int] = []
    stream = llm.stream("1, 2, 3,", temperature=0, max_tokens=30, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        seen.extend(delta.tokens for delta in stream)
    monkeypatch.undo()
    assert len(steps) == 4
    assert seen == [1, 1, 1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate("1, 2,", **GREEDY)[0].text


def test_a_failed_step_ends_everybody_with_one_clear_error(model_file: str) -> None:
    with LLM(model_file, max_model_len=64, kv_gib=0.01, threads=1) as broken:

        def execute(plan: StepPlan) -> StepResult:
            raise RuntimeError("out of memory")

        broken._loop.backend.execute = execute  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(EngineDead, match="RuntimeError: out of memory"):
                broken.generate("x", **GREEDY)
    with pytest.raises(EngineDead, match="this LLM was closed"):
        broken.generate("x", **GREEDY)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prot": 1}, "LLM has no setting 'prot'; known: model, served_names, dtype"),
        ({"port": 1}, "LLM has no setting 'port'"),
        ({"kv_gib": -1}, "LLM(kv_gib=...): -1 is not accepted; expected a number over 0"),
        ({"dtype": "int3"}, "LLM(dtype=...): 'int3' is not accepted"),
        ({"kv_gib": 0.001}, "kv_gib gives a KV pool of 0.001 GiB"),
    ],
)
def test_bad_settings_name_the_argument(model_file: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(model_file, **settings)
    assert message in str(caught.value)


def test_async_streams_share_an_engine_process(model_file: str, llm: LLM) -> None:
    prompts = [f"{i}, {i + 1}," for i in range(5)]
    alone = [llm.generate(prompt, **GREEDY)[0].text for prompt in prompts]

    async def run() -> list[Answer]:
        async with AsyncLLM(model_file, max_model_len=512, kv_gib=0.05, threads=1) as engine:
            assert engine.info.stages[-1].name == "warm up"
            with pytest.raises(BadRequest, match="the prompt is empty"):
                await engine.generate("")
            answers = await asyncio.gather(*(engine.generate(prompt, **GREEDY) for prompt in prompts))
            stream = engine.stream_chat(HELLO, max_tokens=400, ignore_eos=True)
            async for _ in stream:
                break
            await stream.aclose()
            stopped = await engine.generate("1, 2, 3, 4,", temperature=0, max_tokens=40, stop=" 8")
            assert (stopped.finish_reason, stopped.stop_reason) == ("stop", " 8")
            reply = await engine.chat(HELLO, temperature=0, max_tokens=60)
            assert reply.text == llm.chat(HELLO, temperature=0, max_tokens=60).text
            return list(answers)

    assert [answer.text for answer in asyncio.run(run())] == alone


def test_async_errors_are_raised_where_they_happen(model_file: str) -> None:
    async def run() -> None:
        with pytest.raises(ConfigError, match="AsyncLLM has no setting 'prot'"):
            AsyncLLM(model_file, prot=1)
        with pytest.raises(ModelNotFound, match=r"no such file or folder: \./absent"):
            await AsyncLLM("./absent").start()
        with pytest.raises(ConfigError, match="kv_gib gives a KV pool"):
            await AsyncLLM(model_file, kv_gib=0.001).start()
        with pytest.raises(EngineDead, match="was not started"), suppress(StopAsyncIteration):
            await anext(AsyncLLM(model_file).stream("x"))

    asyncio.run(run())
