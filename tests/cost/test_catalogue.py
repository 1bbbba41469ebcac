"""Chips and models: figures with sources, the names people write, files of the user's own, and clear refusals."""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cost import catalogue
from paceline.cost.catalogue import Chip, Model, chips, find_chip, find_model, models, user_files
from paceline.cost.efficiency import FAMILIES
from paceline.cost.precision import PRECISIONS, find_precision
from paceline.errors import ConfigError, ModelNotFound, PacelineError

DATA = Path(catalogue.__file__).parent / "data"
RAW: dict[str, dict[str, Any]] = tomllib.loads((DATA / "models.toml").read_text(encoding="utf-8"))["models"]

# bf16 KV in KiB a token, as published tables have it.
KV_KIB = {
    "llama-3-8b": 128,
    "llama-3-70b": 320,
    "llama-3.1-405b": 504,
    "mixtral-8x7b": 128,
    "qwen3-8b": 144,
    "qwen3-32b": 256,
    "qwen3-30b-a3b": 96,
    "qwen3-235b-a22b": 188,
    "deepseek-v3": 68.625,
    "gpt-oss-20b": 48,
    "gpt-oss-120b": 72,
    "gemma-3-27b": 496,
    "yi-34b": 240,
    "falcon-180b": 160,
    "llama-2-13b": 800,
    "opt-66b": 2304,
    "opt-175b": 4608,
    "smollm2-135m": 22.5,
}


@pytest.mark.parametrize("name", RAW)
def test_parameters_follow_from_the_dimensions(name: str) -> None:
    model, published = models()[name], RAW[name]
    assert model.params / 1e9 == pytest.approx(published["params_b"], rel=0.005)
    if "active_b" in published:
        assert model.active_params / 1e9 == pytest.approx(published["active_b"], rel=0.02)


@pytest.mark.parametrize(("name", "active_b"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)])
def test_cards_that_leave_the_embedding_out(name: str, active_b: float) -> None:
    assert models()[name].multiplied_params / 1e9 == pytest.approx(active_b, rel=0.005)


@pytest.mark.parametrize("name", KV_KIB)
def test_kv_of_a_token(name: str) -> None:
    assert models()[name].kv_bytes_per_token() / 1024 == pytest.approx(KV_KIB[name], rel=1e-9)


def test_layers_that_slide_keep_their_window() -> None:
    gemma = find_model("gemma-3-27b")
    per_token = (gemma.kv_bytes(40_001) - gemma.kv_bytes(40_000)) / 1024
    assert per_token == 80.0
    assert (gemma.kv_bytes(40_000) - 40_000 * 80 * 1024) / 2**20 == 416.0
    oss = find_model("gpt-oss-120b")
    assert (oss.kv_bytes(40_001) - oss.kv_bytes(40_000)) / 1024 == 36.0
    assert oss.kv_bytes(100) == 100 * oss.kv_bytes_per_token()


def test_people_round_parameters() -> None:
    assert find_model("llama-3-8b").nominal_params == 8.0e9
    assert find_model("deepseek-v3").nominal_params == 671.0e9
    assert find_model("smollm2-135m").nominal_params == 135e6


@pytest.mark.parametrize("entry", [*chips().values(), *models().values()], ids=lambda entry: entry.name)
def test_every_figure_has_a_source(entry: Chip | Model) -> None:
    defaults = {f.name: f.default for f in fields(entry)}
    for key, default in defaults.items():
        if key in ("name", "title", "family", "sources", "native") or getattr(entry, key) in (default, {}):
            continue
        assert entry.sources.get(key), f"{entry.name}.{key} has no source"
        assert not entry.sources[key].endswith(".toml"), f"{entry.name}.{key} names only the file as its source"


@pytest.mark.parametrize("chip", chips().values(), ids=lambda chip: chip.name)
def test_figures_of_a_chip_agree(chip: Chip) -> None:
    assert chip.memory_bytes == pytest.approx(chip.memory_gb * 1e9, rel=0.08)
    for dtype, rate in chip.tflops.items():
        assert dtype in ("bf16", "fp8", "fp4", "int8")
        assert rate > 0
    if "fp8" in chip.tflops:  # dense, not sparse: 8 bits are twice as fast as 16
        assert chip.flops("fp8") == pytest.approx(2 * chip.flops("bf16"), rel=0.02)
    assert chip.family in FAMILIES
    assert chip.family != "generic"
    if chip.sms:
        assert chip.flops("bf16") / chip.sms < 2e13


def test_critical_batch_of_an_h100() -> None:
    assert find_chip("h100").critical_batch("bf16") == pytest.approx(295, abs=1)


def test_no_two_entries_answer_to_one_name() -> None:
    for entries in (catalogue._entries("chips", ()), catalogue._entries("models", ())):
        spellings = [{catalogue._plain(s) for s in (name, *entry["aliases"])} for name, entry in entries.items()]
        names = Counter(spelling for of_one in spellings for spelling in of_one)
        assert not [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100", "h100"),
        ("h100_sxm", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("a100-80gb", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("apple m5 pro", "m5-pro"),
        ("b200_sxm", "b200"),
    ],
)
def test_chips_as_people_and_drivers_write_them(written: str, name: str) -> None:
    assert find_chip(written).name == name


@pytest.mark.parametrize(
    ("written", "name", "native"),
    [
        ("Llama-3-8B", "llama-3-8b", "bf16"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b", "bf16"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", "bf16"),
        ("Qwen/Qwen3-32B-FP8", "qwen3-32b", "fp8"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b", "int4"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3", "fp8"),
        ("meta-llama/Llama-2-70b-chat-hf", "llama-2-70b", "bf16"),
        ("google/gemma-3-27b-it", "gemma-3-27b", "bf16"),
    ],
)
def test_models_as_people_and_hubs_write_them(written: str, name: str, native: str) -> None:
    model = find_model(written)
    assert (model.name, model.native) == (name, native)


@pytest.mark.parametrize(
    ("find", "written", "nearest"),
    [
        (find_chip, "h1000", "h100"),
        (find_chip, "rtx4091", "rtx-4090"),
        (find_model, "lama-3-8b", "llama-3-8b"),
        (find_model, "qwen3", "qwen3-"),
        (find_precision, "fp9", "fp8"),
    ],
)
def test_unknown_names_get_the_nearest(find: Any, written: str, nearest: str) -> None:
    with pytest.raises(PacelineError, match=written) as caught:
        find(written)
    assert nearest in str(caught.value)


def test_a_name_like_no_other_gets_the_list() -> None:
    with pytest.raises(ConfigError, match="known: l4, l40s"):
        find_chip("zzzzzz")
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        find_model("")


def test_precisions() -> None:
    assert find_precision("BF16").bytes == 2.0
    assert find_precision("fp8_e4m3").name == "fp8"
    assert find_precision("4.85bit").bits == 4.85
    assert find_precision("fp8").multiplied_in(find_chip("a100").tflops) == "bf16"
    assert find_precision("fp8").multiplied_in(find_chip("h100").tflops) == "fp8"
    assert find_precision("int8").multiplied_in(find_chip("h100").tflops) == "int8"
    assert find_precision("int8").multiplied_in(find_chip("b300").tflops) == "bf16", "its int8 units are slower"
    assert find_precision("int8").multiplied_in({}) == "bf16"
    assert all(0 < precision.bits <= 32 for precision in PRECISIONS.values())
    for wrong in ("0bit", "65bit", "-4bit"):
        with pytest.raises(ConfigError):
            find_precision(wrong)


OWN = """
[citations]
lab = "measured in our lab"

[chips.box]
title = "Our box"
aliases = ["the-box"]
like = "h100"
bandwidth_gbs = 3000
source = "lab"

[chips.h100]
like = "a100"
memory_gb = 94
"""


def test_a_file_of_ones_own_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "chips.toml"
    path.write_text(OWN, encoding="utf-8")
    box = find_chip("the box", [path])
    assert box.bandwidth_gbs == 3000
    assert box.sources["bandwidth_gbs"] == "measured in our lab"
    # Their h100 hides ours, also for what is like it.
    assert box.memory_gb == 94
    assert box.tflops == find_chip("a100").tflops
    assert "AIConfigurator" in box.sources["tflops"]
    assert find_chip("h100", [path]).sources["memory_gb"] == str(path)
    assert find_chip("h100").memory_gb == 80
    assert find_chip(f"{path}#box") == box
    with pytest.raises(ConfigError, match="several chips"):
        find_chip(str(path))


def test_a_chip_by_itself_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[chips.mine]\nmemory_gb = 24\nbandwidth_gbs = 500.5\ntflops = { bf16 = 50 }\n", encoding="utf-8")
    chip = find_chip(str(path))
    assert (chip.name, chip.family, chip.bandwidth) == ("mine", "generic", 500.5e9)


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(
        '[models.wide]\nlike = "mixtral-8x7b"\nexperts = { count = 16, active = 2, inter = 7168 }\n', encoding="utf-8"
    )
    wide = find_model("wide", [path])
    assert wide.experts is not None
    assert wide.experts.count == 16
    assert wide.params == pytest.approx(find_model("mixtral-8x7b").params, rel=0.001)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[chips.x]\nmemory_gb = 1\n", "bandwidth_gbs must be given"),
        ("[chips.x]\nmemory_gb = 1\nbandwith_gbs = 1\n", "did you mean bandwidth_gbs"),
        ("[chips.x]\nname = 'x'\nmemory_gb = 1\n", "x: name is not a figure; its table is named by"),
        ("[chips.x]\nmemory_gb = 'much'\nbandwidth_gbs = 1\n", "memory_gb is 'much', expected a number"),
        ("[chips.x]\nmemory_gb = -1\nbandwidth_gbs = 1\n", "not negative"),
        ("[chips.x]\nmemory_gb = 1\nbandwidth_gbs = 1\nsms = 1.5\n", "expected a whole number"),
        ("[chips.x]\nmemory_gb = 1\nbandwidth_gbs = 1\ntflops = {bf16 = 'x'}\n", "tflops.bf16 is 'x'"),
        ("[chips.x]\nmemory_gb = 1\nbandwidth_gbs = 1\ntitle = 3\n", "title is 3, expected str"),
        ("[chips.x]\nlike = 'h1000'\n", "is like 'h1000', which is not known"),
        ("[chips.x]\nlike = 'y'\n[chips.y]\nlike = 'x'\n", "is like itself"),
        ("[chips]\nx = 3\n", "expected a table"),
        ("chips = [", "not TOML"),
        ("[models.x]\n", r"no \[chips.NAME\] in it"),
    ],
)
def test_files_that_are_wrong_are_told_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        find_chip(f"{path}#x")
    assert "bad.toml" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        find_chip(str(tmp_path / "none.toml"))


def test_where_the_users_files_are_looked_for(tmp_path: Path) -> None:
    folder = tmp_path / "paceline"
    folder.mkdir()
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert user_files(environ) == ()
    (folder / "models.toml").write_text("[models]\n", encoding="utf-8")
    assert user_files(environ) == (folder / "models.toml",)
    # A models file says nothing of chips, and the other way round.
    assert find_chip("h100", user_files(environ)) == find_chip("h100")


def test_a_chip_without_a_published_rate_says_so() -> None:
    chip = find_chip("m5-pro")
    with pytest.raises(ConfigError, match="no rate of bf16 is published"):
        chip.critical_batch()
    assert replace(chip, tflops={"bf16": 30.7}).critical_batch() == pytest.approx(100)
