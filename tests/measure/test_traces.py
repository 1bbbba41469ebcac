"""Trace files of every format, and those that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.measure.plan import Trace
from paceline.measure.traces import TraceRow, load_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
DATA = Path(__file__).parents[3] / "shared" / "data"


def load(path: Path, text: str | bytes, **more: object) -> list[TraceRow]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_trace(Trace(path=str(path), **more))  # type: ignore[arg-type]


@pytest.mark.skipif(not DATA.exists(), reason="the public traces are not beside the repository")
def test_the_azure_trace() -> None:
    rows = load_trace(Trace(path=str(DATA / "azure_conv_2023.csv"), limit=1000))
    assert rows[0] == TraceRow(at_s=0.0, input_tokens=374, output_tokens=44)
    assert rows[1].at_s == pytest.approx(4.314589, abs=1e-5)
    assert [r.at_s for r in rows] == sorted(r.at_s or 0.0 for r in rows)


@pytest.mark.skipif(not DATA.exists(), reason="the public traces are not beside the repository")
def test_the_mooncake_trace() -> None:
    rows = load_trace(Trace(path=str(DATA / "mooncake_conversation.jsonl"), speed=2.0))
    assert rows[0].input_tokens == 6758
    assert rows[0].blocks[:2] == (0, 1)
    assert rows[0].block_tokens == 512
    times = [r.at_s or 0.0 for r in rows]
    assert times == sorted(times)
    assert all(len(r.blocks) * 512 + 512 > (r.input_tokens or 0) for r in rows[:200])


def test_azure_times_with_zone_and_without_decimals(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:01.250000+00:00,3,4\n2024-05-10 00:00:00+00:00,1,2\n"
    )
    rows = load(tmp_path / "a.csv", text)
    assert [(r.at_s, r.input_tokens, r.output_tokens) for r in rows] == [(0.0, 1, 2), (1.25, 3, 4)]


def test_own_format_with_epoch_times_negative_times_and_disorder(tmp_path: Path) -> None:
    lines = [
        {"at_ms": 1_700_000_002_500, "input_tokens": 2, "tenant": "t", "class": "gold"},
        {"at_ms": 1_700_000_000_000, "input_tokens": 1, "output_tokens": 9},
    ]
    rows = load(tmp_path / "t.jsonl", "\n".join(map(json.dumps, lines)))
    assert [(r.at_s, r.input_tokens) for r in rows] == [(0.0, 1), (2.5, 2)]
    assert (rows[1].tenant, rows[1].traffic_class) == ("t", "gold")
    rows = load(tmp_path / "n.jsonl", '{"at_s": -3, "input_tokens": 1}\n{"at_s": -1.5, "input_tokens": 2}\n')
    assert [r.at_s for r in rows] == [0.0, 1.5]


def test_prompts_messages_and_blocks(tmp_path: Path) -> None:
    lines = [
        {"prompt": "hello there"},
        {"messages": [{"role": "user", "content": "x"}]},
        {"input_length": 40, "hash_ids_16": [1, 2, 3]},
    ]
    rows = load(tmp_path / "t.jsonl", "\n".join(map(json.dumps, lines)), format="jsonl")
    assert rows[0].texts == ("hello there",)
    assert json.loads(rows[1].messages) == [{"role": "user", "content": "x"}]
    assert (rows[2].blocks, rows[2].block_tokens) == ((1, 2, 3), 16)


def test_sharegpt(tmp_path: Path) -> None:
    entries = [
        {
            "conversations": [
                {"from": "system", "value": "be kind"},
                {"from": "human", "value": "q1"},
                {"from": "gpt", "value": "a1"},
                {"from": "human", "value": "q2"},
                {"from": "gpt", "value": "a2"},
                {"from": "human", "value": "q3 without an answer"},
            ]
        },
        {"conversations": [{"from": "gpt", "value": "only an answer"}]},
    ]
    rows = load(tmp_path / "s.json", json.dumps(entries))
    assert rows == [TraceRow(texts=("q1", "q2"), answers=("a1", "a2"))]


def test_skip_limit_and_speed(tmp_path: Path) -> None:
    text = "".join(f'{{"at_s": {i}, "input_tokens": {i + 1}}}\n' for i in range(10))
    rows = load(tmp_path / "t.jsonl", text, skip=4, limit=3, speed=2.0)
    assert [(r.at_s, r.input_tokens) for r in rows] == [(0.0, 5), (0.5, 6), (1.0, 7)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("e.jsonl", "", "empty"),
        ("e.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "empty"),
        ("e.json", "[]", "empty"),
        ("x.txt", "hello", "cannot tell the format"),
        ("t.jsonl", '{"at_s": NaN, "input_tokens": 1}\n', ":1:"),
        ("t.jsonl", '{"at_s": "inf", "input_tokens": 1}\n', ":1: at_s is 'inf'; it must be a finite number"),
        ("t.jsonl", '{"at_s": [1], "input_tokens": 1}\n', r":1: at_s is \[1\]; it must be a finite number"),
        (
            "t.jsonl",
            '{"at_s": 1, "input_tokens": "x"}\n',
            ":1: input_tokens is 'x'; it must be a whole number of tokens",
        ),
        ("t.jsonl", '{"input_tokens": 1, "output_tokens": 0}\n', ":1: output_tokens is 0; .* of tokens, 1 or more"),
        ("t.jsonl", '{"input_tokens": 1, "hash_ids": 7}\n', ":1: hash_ids is 7; it must be a list of whole numbers"),
        (
            "t.jsonl",
            '{"input_tokens": 100, "hash_ids": [1, 2]}\n',
            ":1: hash_ids has 2 ids; a prompt of 100 tokens has 1",
        ),
        ("t.jsonl", '{"input_tokens": 50, "hash_ids_16": [1, 2]}\n', ":1: hash_ids_16 has 2 ids; .* 4 blocks of 16"),
        ("t.jsonl", '{"input_tokens": 9, "block_tokens": 0}\n', ":1: block_tokens is 0; .* 1 or more"),
        ("t.jsonl", "[1]\n", "entry 0"),
        ("t.jsonl", '{"input_tokens": 1}\n[1]\n', ":2: not a JSON object"),
        ("t.jsonl", '{"at_s": 1e999, "input_tokens": 1}\n', ":1:"),
        ("t.jsonl", '{"at_s": 1, "input_tokens": 1}\n{"at_s": 2, "input_tokens": -5}\n', ":2:"),
        ("t.jsonl", '{"at_s": 1, "input_tokens": 1}\n{broken\n', r":2: not JSON \(from byte 1 on\); a line must be"),
        ("t.jsonl", '{"at_s": 1}\n', "neither"),
        ("t.jsonl", '{"at_s": 1, "input_tokens": 1}\n{"input_tokens": 1}\n', "some rows have a time"),
        ("m.jsonl", '{"timestamp": 1, "hash_ids": [1]}\n', ":1: input_length is missing"),
        (
            "m.jsonl",
            '{"timestamp": 1, "input_length": 1200, "output_length": 9, "hash_ids": [1]}\n',
            ":1: hash_ids has 1 ids; a prompt of 1200 tokens has 3 blocks of 512",
        ),
        (
            "m.jsonl",
            '{"timestamp": 1, "input_length": 9, "output_length": 0, "hash_ids": [1]}\n',
            ":1: output_length is 0; it must be a whole number of tokens, 1 or more",
        ),
        ("a.csv", f"{AZURE}yesterday,1,2\n", ":2: column TIMESTAMP is 'yesterday'; it must be a date and time"),
        ("a.csv", f"{AZURE}2024-05-10 00:00:00,1\n", ":2: column GeneratedTokens is empty; it must be a whole number"),
        ("a.csv", f"{AZURE}2024-05-10 00:00:00,abc,1\n", ":2: column ContextTokens is 'abc'; it must be a whole"),
        ("a.csv", f"{AZURE}2024-05-10 00:00:00,-3,1\n", ":2: column ContextTokens is -3; .* 0 or more"),
        ("a.csv", f"{AZURE}2024-05-10 00:00:00,3,0\n", ":2: column GeneratedTokens is 0; .* 1 or more"),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens\n2024-05-10 00:00:00,1\n",
            ":1: column GeneratedTokens is missing; an Azure",
        ),
        ("s.json", "[1]", "entry 0"),
        ("s.json", "[{", "not JSON"),
        ("b.jsonl", b"\x00\x01\xff", "cannot tell"),
    ],
)
def test_broken_traces_are_refused_in_one_line(tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path / name, text)
    assert "\n" not in str(caught.value)


def test_ids_may_be_those_of_full_blocks_alone(tmp_path: Path) -> None:
    rows = load(tmp_path / "t.jsonl", '{"input_tokens": 1200, "hash_ids": [1, 2]}\n{"input_tokens": 9, "hash_ids": []}')
    assert [row.blocks for row in rows] == [(1, 2), ()]


def test_an_unknown_class_is_refused_where_the_classes_are_known(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"input_tokens": 1, "class": "batch"}\n{"input_tokens": 1, "class": "gold"}\n')
    assert load_trace(Trace(path=str(path)))[1].traffic_class == "gold"
    with pytest.raises(ConfigError, match=r":2: class is 'gold'; it must be one of standard, batch"):
        load_trace(Trace(path=str(path)), ["standard", "batch"])


def test_a_missing_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_trace(Trace(path=str(tmp_path / "none.csv")))


def test_an_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown trace format"):
        load(tmp_path / "t.jsonl", "{}", format="xml")
