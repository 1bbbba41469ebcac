"""`paceline plan` from the command line: text, JSON, page, figures; and what cannot be taken."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.app.cli import exit_code, make_app
from paceline.core.shape import StepShape
from paceline.cost.analytic import AnalyticCost
from paceline.cost.catalogue import find_chip, find_model
from paceline.cost.deployment import Deployment
from paceline.cost.fit import Calibration, fit
from paceline.errors import ConfigError, ModelNotFound, PacelineError, UnsupportedModel
from paceline.plan.registry import QUESTIONS
from tests.browser import needs_browser, screenshot

ROOT = Path(__file__).parents[2]
LLAMA = ("--model", "llama-3-8b", "--chip", "l40s")


def run(*words: str) -> str:
    found = CliRunner().invoke(make_app(), ["plan", *words])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.output


def test_the_whole_answer_as_text() -> None:
    text = run(*LLAMA)
    for shown in ("18.5 ms", "54 tokens/s", "= weights / bandwidth", "= 16 GB / 864 GB/s", "128 KiB", "binds:"):
        assert shown in text
    assert "a million output tokens" not in text, "no price, no cost line"
    assert "a million output tokens" in run("cost", *LLAMA, "--price", "1.2")


def test_a_named_question_that_does_not_arise_says_what_is_missing() -> None:
    assert "Not answered: no price is given; --price says what one chip costs an hour." in run("cost", *LLAMA)
    found = json.loads(run("cost", "fit", *LLAMA, "--json"))["answers"]
    assert list(found) == ["cost", "fit"]
    assert found["cost"]["question"] == "What does a million tokens cost?"
    assert found["cost"]["values"] == {}
    large = ("--model", "llama-3-70b", "--chip", "l40s")
    assert "Not answered: no sequence of this context fits" in run("cost", *large, "--price", "1")


def test_a_context_beyond_the_models_own_is_noted() -> None:
    words = (*LLAMA, "--context", "1000000")
    note = "context of 1,000,000 tokens: llama-3-8b was made for 8,192, and an engine takes no more"
    assert note in " ".join(run("fit", *words).split())
    assert json.loads(run("fit", *words, "--json"))["case"]["notes"] == [note]
    assert "was made for" not in run("fit", *LLAMA, "--context", "8192")
    assert "prompt and output of 8,256 tokens" in " ".join(run("fit", *LLAMA, "--prompt", "8000").split())


def test_json_is_one_object_in_base_units() -> None:
    document = json.loads(run(*LLAMA, "--json"))
    assert document["case"]["model"] == "llama-3-8b"
    assert list(document["answers"]) == [name for name in QUESTIONS if name != "cost"]
    read = document["answers"]["decode"]["values"]["weights_read_s"]
    assert read["value"] == pytest.approx(0.0185, abs=5e-5)
    assert read["unit"] == "s"
    assert read["formula"] == "weights / bandwidth"
    assert read["numbers"]["weights"] == {"value": 16e9, "unit": "B"}


def test_named_questions_alone_and_their_tables() -> None:
    text = run("kv", "critical-batch", *LLAMA)
    assert "How many bytes of KV cache" in text
    assert "does compute bind" in text
    assert "Does it fit" not in text
    assert "sequences that fit" in text
    assert "sequences that fit" not in run("kv", *LLAMA, "--no-tables")


def test_a_page_with_figures(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "plan.html"
    assert str(out) in run(*LLAMA, "--price", "1.2", "--out", str(out)).replace("\n", "")
    page = out.read_text("utf-8")
    assert page.count("<figure>") >= 6
    assert "http" not in page.replace("http-equiv", ""), "nothing is fetched"
    for shown in ("Roofline", "Latency against throughput", "Kleinrock", "16 GB / 864 GB/s", "l40s"):
        assert shown in page


def test_figures_as_files(tmp_path: Path) -> None:
    run("curve", "attention", *LLAMA, "--out", str(tmp_path / "figures"))
    files = sorted((tmp_path / "figures").iterdir())
    assert [path.name for path in files] == ["attention.svg", "curve.svg"]
    for path in files:
        assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


@needs_browser
def test_the_page_is_drawn_in_light_and_dark(tmp_path: Path) -> None:
    out = tmp_path / "plan.html"
    run(*LLAMA, "--out", str(out))
    light, dark = (screenshot(out.as_uri(), tmp_path / f"{dark}.png", dark=dark) for dark in (False, True))
    assert light != dark


def test_the_list_names_questions_chips_and_models() -> None:
    listed = json.loads(run("--list", "--json"))
    assert list(listed["questions"]) == list(QUESTIONS)
    assert all(text.endswith("?") for text in listed["questions"].values())
    assert {"h100", "l40s", "m5-pro"} <= set(listed["chips"])
    assert "llama-3-8b" in listed["models"]
    assert "not published" in run("--list")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--pp", "3"), "--uneven-stages"),
        (("--stamps", "0,0.8,inf"), "must follow each other"),
        (("--used-gb", "1e9"), "below 1e15"),
        (("--weights-gb", "1e9"), "below 1e16"),
        (("--price", "1e10"), "below 1e9"),
    ],
)
def test_absurd_numbers_are_one_line(words: tuple[str, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        run("fit", *LLAMA, *words)


@pytest.mark.parametrize("option", ["--out", "--calibration"])
def test_an_empty_path_is_not_the_current_folder(option: str) -> None:
    found = CliRunner().invoke(make_app(), ["plan", *LLAMA, option, ""])
    assert found.exit_code == 2
    assert "the path is empty" in found.output


def test_stages_may_differ_by_a_layer_where_that_is_allowed() -> None:
    document = json.loads(run("fit", *LLAMA, "--pp", "3", "--uneven-stages", "--json"))
    assert document["case"]["model"] == "llama-3-8b"


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "bert"}, "bert is an encoder,"),
        ({"model_type": "xlm-roberta"}, "xlm-roberta is an encoder,"),
        ({"model_type": "t5", "d_ff": 2048}, "t5 is an encoder with a decoder"),
        ({"model_type": "novel", "is_encoder_decoder": True}, "novel is an encoder with a decoder"),
    ],
)
def test_an_encoder_is_refused_in_one_line(tmp_path: Path, config: dict[str, object], kind: str) -> None:
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 30522}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**sizes, **config}))
    with pytest.raises(UnsupportedModel, match=kind) as caught:
        run("fit", "--model", str(path), "--chip", "h100")
    assert "\n" not in str(caught.value)
    path.write_text(json.dumps({**sizes, "model_type": "modernbert-decoder"}))
    run("fit", "--model", str(path), "--chip", "h100")


def test_the_users_own_chip_and_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "paceline"
    folder.mkdir()
    (folder / "chips.toml").write_text('[chips.mine]\nlike = "h100"\nbandwidth_gbs = 1000\nsource = "measured"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 16,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
                "tie_word_embeddings": True,
                "torch_dtype": "bfloat16",
            }
        )
    )
    document = json.loads(run("decode", "--model", str(config), "--chip", "mine", "--json"))
    weights = document["answers"]["decode"]["values"]["weights_read_s"]
    assert weights["numbers"]["bandwidth"]["value"] == 1000e9
    assert weights["numbers"]["weights"]["value"] == pytest.approx(2.47e9, rel=0.03)


def test_what_was_measured_stands_in_place_of_datasheets(tmp_path: Path) -> None:
    """A server that is twice as slow as datasheets say."""
    slow = AnalyticCost(Deployment(find_model("smollm2-135m"), find_chip("l4")))
    shapes = [StepShape(rows, rows, rows * held) for rows in (1, 2, 4, 8, 16, 32) for held in (10, 100, 500, 1000)]
    shapes += [StepShape().plus(start, count) for start in (0, 200) for count in (16, 64, 256, 1024)]
    Calibration(fit([(shape, 2.0 * slow.predict(shape).seconds) for shape in shapes])).save(tmp_path / "c.json")
    words = ("decode", "prefill", "-m", "smollm2-135m", "-c", "l4", "--context", "500", "--batch", "8", "--json")
    measured = json.loads(run(*words, "--calibration", str(tmp_path / "c.json")))["answers"]
    reckoned = json.loads(run(*words))["answers"]
    for question, name in (("decode", "step_batch"), ("prefill", "prefill_s")):
        before, after = (found[question]["values"][name] for found in (reckoned, measured))
        assert after["value"] == before["value"]
        assert after["expected"]["value"] == pytest.approx(2.0 * before["expected"]["value"], rel=0.15)


@pytest.mark.parametrize(
    ("words", "kind", "shown"),
    [
        (("-m", "llama-3-8b", "-c", "l40"), ConfigError, "did you mean .*l40s"),
        (("-m", "llama3-8b-x", "-c", "l40s"), ModelNotFound, "llama-3-8b"),
        (("-m", "llama-3-8b"), ConfigError, "--chip must be given"),
        ((), ConfigError, "--model and --chip must be given"),
        ((*LLAMA, "--tp", "3"), ConfigError, "tp=3 does not divide the 32 attention heads"),
        ((*LLAMA, "--pp", "5"), ConfigError, "pp=5 does not divide the 32 layers"),
        ((*LLAMA, "--ep", "2"), ConfigError, "needs a mixture of experts"),
        ((*LLAMA, "--weights", "fp7"), ConfigError, "weights 'fp7' is not known"),
        ((*LLAMA, "--itl", "50"), ConfigError, "'50' is not a duration"),
        ((*LLAMA, "--itl", "0ms"), ConfigError, "itl is 0 s"),
        ((*LLAMA, "--context", "0"), ConfigError, "context is 0"),
        ((*LLAMA, "--price", "-1"), ConfigError, "price per hour is -1"),
        ((*LLAMA, "--price", "nan"), ConfigError, "price per hour is nan"),
        ((*LLAMA, "--acceptance", "1"), ConfigError, "acceptance is 1"),
        ((*LLAMA, "--utilization", "1.5"), ConfigError, "utilization is 1.5"),
        ((*LLAMA, "--used-gb", "-3"), ConfigError, "used memory is"),
        ((*LLAMA, "--weights-gb", "inf"), ConfigError, "weights are inf"),
        ((*LLAMA, "--stamps", "1,2"), ConfigError, "three numbers"),
        ((*LLAMA, "--stamps", "3,2,1"), ConfigError, "must follow each other"),
        ((*LLAMA, "--calibration", "none.json"), ConfigError, "cannot read the calibration none.json"),
        (("decoding", *LLAMA), ConfigError, "did you mean decode"),
        ((*LLAMA, "--out", "plan.pdf"), ConfigError, "must end in .html"),
        (("kv", *LLAMA, "--out", "figures"), ConfigError, "no figure"),
    ],
)
def test_what_cannot_be_taken_is_one_line(
    words: tuple[str, ...], kind: type[PacelineError], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as caught:
        run(*words)
    said = str(caught.value)
    assert re.search(shown, said)
    assert "\n" not in said
    assert exit_code(caught.value) in (64, 66)
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        run(*LLAMA, "--out", str(tmp_path / "file" / "plan.html"))


def test_a_model_that_does_not_fit_says_what_would() -> None:
    text = " ".join(run("fit", "--model", "llama-3-70b", "--chip", "l40s").split())
    assert "does not hold one sequence of 4,096 tokens" in text
    assert "What would: llama-3-70b in bf16 on 4 l40s (tp 4)" in text
