"""The pack: our client is right on it, exactly, wherever the network cuts; and the pack can be used by others."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from paceline.errors import ConfigError
from paceline.measure.conformance import cli
from paceline.measure.conformance.check import CaseResult, compare, observe
from paceline.measure.conformance.load import load_load_cases, run_load_cases, wrong_figures
from paceline.measure.conformance.pack import run_pack
from paceline.measure.conformance.script import Case, body_steps, choose, load_cases, wire_steps
from paceline.measure.conformance.server import ConformanceApi
from paceline.measure.conformance.statistics import Computed, differences, load_computed
from paceline.measure.metrics import measure
from paceline.measure.mock import MockServer
from paceline.measure.transcript import decode
from tests.measure.virtual import SHRED, World, play_case, wire

CASES = load_cases()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def fault(result: CaseResult) -> str:
    return "; ".join(f"{d.key}: expected {d.expected!r}, got {d.got!r}" for d in result.differences)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_exact(case: Case, world: World) -> None:
    async def main() -> None:
        result = compare(case, observe(measure(play_case(world, case))), tolerance_ms=0.001)
        assert result.passed, f"{case.title}: {fault(result)}"
        assert not result.missing

    asyncio.run(main())


def cuts(case: Case) -> list[tuple[int, int, int]]:
    """Every byte of every write; of a very large write, a sample."""
    found = []
    for number, steps in enumerate(wire(case)):
        for i, (_, data) in enumerate(steps):
            places = list(range(1, len(data)))
            if len(places) > 20_000:
                places = places[:60] + random.Random(0).sample(places, 10) + places[-60:]
            found += [(number, i, place) for place in places]
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_any_cut_changes_nothing(case: Case, world: World) -> None:
    async def main() -> None:
        whole = observe(measure(play_case(world, case)))
        for cut in cuts(case):
            assert observe(measure(play_case(world, case, cut))) == whole, f"{case.title}: cut at {cut}"

    asyncio.run(main())


def test_every_byte_in_a_read_of_its_own(world: World) -> None:
    async def main() -> None:
        for case in CASES:
            if case.id != "T11":  # a megabyte of reads proves nothing more
                whole = observe(measure(play_case(world, case)))
                assert observe(measure(play_case(world, case, SHRED))) == whole, case.title

    asyncio.run(main())


def test_over_real_sockets() -> None:
    """The whole pack through the kernel. Generous with time: a busy machine is not what is tested here."""
    results = asyncio.run(run_pack(CASES, tolerance_ms=150.0))
    wrong = [f"{r.case.id}: {fault(r)}" for r in results if not r.passed]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("case", load_computed(), ids=lambda case: case.id)
def test_computed(case: Computed) -> None:
    assert not differences(case)


LOADS = {case.id: case for case in load_load_cases()}


def arrivals(times: Sequence[float], prompts: Sequence[str] | None = None) -> list[dict[str, Any]]:
    said = prompts or [str(i) for i in range(len(times))]
    return [{"at_s": when, "body": {"prompt": text}} for when, text in zip(times, said, strict=True)]


def test_load_cases_can_pass_and_fail() -> None:
    right = arrivals([i / 200 for i in range(1000)])
    assert wrong_figures(LOADS["T47"], right) == []
    assert "183" in wrong_figures(LOADS["T47"], arrivals([i / 183.5 for i in range(1000)]))[0]
    assert "got 10" in wrong_figures(LOADS["T47"], right[:10])[0]
    rng = random.Random(0)
    alone, t = [], 0.0
    for _ in range(1000):
        t += rng.expovariate(100.0)
        alone.append(t)
    assert wrong_figures(LOADS["T48"], arrivals(alone)) == []
    in_step = sorted(4 * when for when in alone[:250] for _ in range(4))  # four workers, one seed
    assert wrong_figures(LOADS["T48"], arrivals(in_step))
    assert wrong_figures(LOADS["T49"], arrivals(alone[:150]))
    assert wrong_figures(LOADS["T49"], arrivals([i / 50 for i in range(150)])) == []
    assert wrong_figures(LOADS["T50"], arrivals([i / 1000 for i in range(50)])) == []
    assert wrong_figures(LOADS["T50"], arrivals([i / 100 for i in range(50)]))
    waves = [0.07 * (i // 8) for i in range(64)]
    assert wrong_figures(LOADS["T50b"], arrivals(waves)) == []
    assert wrong_figures(LOADS["T50b"], arrivals([0.07 * (i // 9) for i in range(64)]))
    assert wrong_figures(LOADS["T60"], arrivals(range(32))) == []
    assert wrong_figures(LOADS["T60"], arrivals(range(32), [str(i % 31) for i in range(32)]))


def test_our_load_is_right() -> None:
    """The two quick ones with real processes."""
    assert run_load_cases([LOADS["T50"], LOADS["T60"]]) == []


@pytest.mark.slow
def test_all_our_loads_are_right() -> None:
    """Real rates: a busy machine may fail this."""
    assert run_load_cases(list(LOADS.values())) == []


def test_a_client_of_the_wall_clock_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    case = choose(["T51"])[0]
    assert asyncio.run(run_pack([case], tolerance_ms=150.0))[0].passed
    monkeypatch.setattr("paceline.measure.protocol.clock", lambda: time.time())
    monkeypatch.setattr("paceline.measure.conformance.pack.clock", lambda: time.time())
    wrong = asyncio.run(run_pack([case], tolerance_ms=150.0))[0]
    assert {"e2e_ms", "close_ms"} <= {d.key for d in wrong.differences}


def test_expectations_can_fail() -> None:
    case = choose(["T14"])[0]
    right = {"success": True, "output_tokens": 2, "token_events": 2, "ttft_ms": 200.0, "tpot_ms": 20.0}
    assert compare(case, right).passed
    for key, value in (("ttft_ms", 5.0), ("ttft_ms", None), ("success", False), ("output_tokens", None)):
        result = compare(case, {**right, key: value})
        assert [d.key for d in result.differences] == [key]
    assert compare(choose(["T39"])[0], {"tpot_ms": 0.0}).differences  # undefined is not zero
    assert compare(choose(["T22"])[0], {"itl_ms": [30.0, 0.0, 0.0]}).differences
    assert compare(case, {}).missing == tuple(case.expect)


@pytest.mark.parametrize("data", [b"[" * 100_000, b"{oops}", b"", b'{"a"', b"nul"])
def test_what_is_no_json_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        decode(data)


def test_every_case_explains_itself() -> None:
    for case in CASES:
        assert case.title
        assert case.why
        assert case.expect.keys() - {"success"}
        assert body_steps(case.answers[0]) is not None
        for answer in case.answers:
            times = [at for at, _ in wire_steps(answer)]
            assert times == sorted(times), case.id


def test_reference_inputs_are_all_there() -> None:
    """Every numbered input of one request; load and clock inputs are tested with the runner."""
    ids = {case.id[:3] for case in CASES} | {case.id[:3] for case in load_computed()}
    wanted = [*range(1, 4), *range(5, 13), *range(14, 46)]
    assert not {f"T{number:02d}" for number in wanted} - ids - {"T04", "T32", "T13"}


def test_the_documentation_counts_right() -> None:
    text = (Path(__file__).parents[2] / "docs" / "measuring.md").read_text()
    assert f"{len(CASES)} scripted streams, {len(LOADS)} loads and {len(load_computed())} computed cases" in text


def test_other_clients_can_use_it() -> None:
    """The official client against the server: by base URL, and by model name."""

    async def main() -> None:
        async with MockServer(ConformanceApi()) as server, httpx.AsyncClient(base_url=server.url) as http:
            listed = (await http.get("/cases")).json()
            assert len(listed) == len(CASES) + len(LOADS)
            assert (await http.get("/expected/T14")).json()["ttft_ms"] == 200
            for base, model in ((f"{server.url}/case/T06/v1", "any"), (f"{server.url}/v1", "T06")):
                async with openai.AsyncOpenAI(base_url=base, api_key="x", max_retries=0) as client:
                    stream = await client.chat.completions.create(
                        model=model, messages=[{"role": "user", "content": "hi"}], stream=True
                    )
                    text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
                assert text == "abc"
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
                assert (await client.models.list()).data
                with pytest.raises(openai.RateLimitError):
                    await client.chat.completions.create(model="T41", messages=[{"role": "user", "content": "hi"}])
                answer: Any = await client.chat.completions.create(
                    model="T41", messages=[{"role": "user", "content": "hi"}], stream=True
                )
                assert [c.choices[0].delta.content async for c in answer if c.choices] == ["a", "b"]
                with pytest.raises(openai.NotFoundError):
                    await client.chat.completions.create(model="T999", messages=[{"role": "user", "content": "hi"}])
                whole = await client.chat.completions.create(
                    model="T60", messages=[{"role": "user", "content": "hi"}], max_tokens=1
                )
                assert whole.choices[0].message.content == "a"
            assert (await http.get("/judged/T60")).json()["requests"] == 1
            assert (await http.get("/judged/T41")).status_code == 404
            received = (await http.get("/received/T41")).json()
            assert len(received) == 2
            assert received[0]["body"]["model"] == "T41"
            assert (await http.get("/expected/T999")).status_code == 404
            assert (await http.post("/v1/chat/completions", content=b"{")).status_code == 400

    asyncio.run(main())


def test_reports_of_other_clients(tmp_path: Path) -> None:
    path = tmp_path / "reports.json"
    path.write_bytes(msgspec.json.encode({"T14": {"ttft_ms": 5, "success": True}, "T39": {"tpot_ms": None}}))
    wrong, right = cli.check_reports(path)
    assert [d.key for d in wrong.differences] == ["ttft_ms"]
    assert right.passed
    lines = cli.render([wrong, right])
    assert any("expected 200" in line for line in lines)
    assert "1 of 2 streams right" in lines[-1]
    assert msgspec.json.decode(cli.as_json([wrong], []))["streams"][0]["passed"] is False
    for content, hint in ((b'{"T999": {}}', "no conformance case"), (b"[]", "not a JSON object")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=hint):
            cli.check_reports(path)
    with pytest.raises(ConfigError, match="No such file"):
        cli.check_reports(tmp_path / "absent.json")


def test_command(tmp_path: Path) -> None:
    results, wrong = cli.run_own(["t03", "T46"], tolerance_ms=150.0)
    assert [r.case.id for r in results] == ["T03"]
    assert not wrong
    assert len(cli.list_cases()) == len(CASES) + len(LOADS) + len(load_computed())
    assert {p.name for p in cli.export(tmp_path / "pack")} >= {"wire.json", "statistics.json"}
