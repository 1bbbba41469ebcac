"""Keys come from where the plan says, go into one header, and are nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from paceline.errors import ConfigError
from paceline.measure.keys import Keys, check_tenants, read_key, read_keys
from paceline.measure.mock import MockRequest, Play, whole
from paceline.measure.mockapi import MockApi, MockConfig
from paceline.measure.plan import Arrivals, BenchPlan, ClientPlan, Load, Target, Trace
from paceline.measure.runner import rerun, run
from tests.measure.background import Background

URL = "http://h"


def test_keys_come_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.write_text("  from-file\n")
    monkeypatch.setenv("SOME_KEY", "from-env")
    assert read_key(Target(url=URL)) == ""
    assert read_key(Target(url=URL, api_key_env="SOME_KEY")) == "from-env"
    assert read_key(Target(url=URL, api_key_file=str(path))) == "from-file"
    for bad in (
        Target(url=URL, api_key_env="UNSET_KEY"),
        Target(url=URL, api_key_file=str(tmp_path / "none")),
        Target(url=URL, api_key_env="SOME_KEY", api_key_file=str(path)),
    ):
        with pytest.raises(ConfigError):
            read_key(bad)
    path.write_text("two words\n")
    with pytest.raises(ConfigError):
        read_key(Target(url=URL, api_key_file=str(path)))


def test_each_tenant_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b").write_text("key-of-b")
    monkeypatch.setenv("KEY_A", "key-of-a")
    places = {"a": "env:KEY_A", "b": f"file:{tmp_path / 'b'}"}
    keys = read_keys(Target(url=URL, tenant_keys=places))
    assert (keys.of("a"), keys.of("b"), keys.of("c")) == ("key-of-a", "key-of-b", "key-of-a")
    assert keys.scrub("key-of-a and key-of-b") == "*** and ***"
    assert "key-of" not in repr(keys)
    for place in ("KEY_A", "env:", "sk-the-key-itself", "env:UNSET_KEY"):
        with pytest.raises(ConfigError) as caught:
            read_keys(Target(url=URL, tenant_keys={"a": place}))
        assert "sk-" not in str(caught.value)


def test_tenants_of_the_load_and_of_the_keys_are_the_same() -> None:
    both = Target(url=URL, tenant_keys={"a": "env:A", "b": "env:B"})
    check_tenants(both, ["a", "b", "a"])
    check_tenants(Target(url=URL), ["a", "z", ""])  # labels alone
    with pytest.raises(ConfigError, match="tenant b"):
        check_tenants(both, ["a"])
    with pytest.raises(ConfigError, match=r"no key for tenant \(none\), c"):
        check_tenants(both, ["a", "b", "c", ""])
    check_tenants(msgspec.structs.replace(both, api_key_env="REST"), ["a", "b", "c", ""])


def test_two_tenants_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_A", "sk-aaaaaaaaaaaa")
    monkeypatch.setenv("KEY_B", "sk-bbbbbbbbbbbb")
    seen: list[tuple[str, int]] = []
    mock = MockApi(MockConfig(ttft_ms=1, itl_ms=1, log=False))

    def handler(request: MockRequest) -> Play:
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if request.method == "POST":
            seen.append((key, json.loads(request.body)["max_tokens"]))
            if seen[-1] == ("sk-bbbbbbbbbbbb", 9):
                return Play([(0.0, whole(403, f"{key} may not".encode()))])
        return mock(request)

    rows = [{"at_s": i / 50, "input_tokens": 20, "output_tokens": 5 + i % 2, "tenant": "ab"[i % 2]} for i in range(8)]
    rows.append({"at_s": 0.2, "input_tokens": 20, "output_tokens": 9, "tenant": "b"})
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with Background(handler) as server:
        plan = BenchPlan(
            target=Target(url=server.url, tenant_keys={"a": "env:KEY_A", "b": "env:KEY_B"}),
            load=Load(arrivals=Arrivals.TRACE),
            trace=Trace(path=str(trace)),
            client=ClientPlan(self_check=False, warmup_requests=1),
        )
        folder = run(plan, tmp_path / "r")
        again = rerun(folder.path, tmp_path / "again")
    measured = [pair for pair in seen if pair[1] in (5, 6, 9)]
    assert {key for key, tokens in measured if tokens == 5} == {"sk-aaaaaaaaaaaa"}
    assert {key for key, tokens in measured if tokens in (6, 9)} == {"sk-bbbbbbbbbbbb"}
    for done in (folder, again):
        records = done.records()
        assert [record.tenant for record in records] == [*"abababab", "b"]
        assert [record.ok for record in records] == [True] * 8 + [False]
        assert "***" in records[-1].error_message
        for file in done.path.iterdir():
            assert b"aaaaaaaa" not in file.read_bytes()
            assert b"bbbbbbbb" not in file.read_bytes()
    assert "sk-" not in repr(Keys(default="sk-a", tenants={"x": "sk-b"}))
