"""What benchmarks/cpu.py counts, writes and concludes; and, slow, the whole of it in small with Paceline alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from _common import Report
from _cpu import targets
from _cpu.bench import SMOKE, Bench, Failed, Worker, decode_rate, prompts
from _cpu.models import DEFAULT, Shape
from _cpu.peers import Absent, Peers
from _cpu.systems import SYSTEMS, Room
from _cpu.weights import Files, convert, write_random
from _server import default_model
from _state import State
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
TINY = {
    "llama": Shape("tiny", "llama", 2, 64, 2, 1, 96, 512, 1e4, 1e-5, head_dim=32),
    "qwen2": Shape("tiny", "qwen2", 1, 64, 2, 1, 96, 512, 1e4, 1e-5, head_dim=32),
}
needs_model = pytest.mark.skipif(not default_model().exists(), reason="paceline pull smollm2-135m")


@needs_model
def test_the_default_model_has_as_many_weights_as_its_file() -> None:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(default_model()).tensors}
    maps = [tensor for name, tensor in tensors.items() if len(tensor.shape) == 2 and name != "token_embd.weight"]
    assert sum(int(tensor.n_elements) for tensor in maps) == DEFAULT.map_weights
    assert int(tensors["token_embd.weight"].n_elements) == DEFAULT.head_weights
    assert sum(int(tensor.n_bytes) for tensor in maps) == DEFAULT.map_weights * 5 // 8


@given(st.integers(1, 600), st.integers(1, 600))
def test_a_prompt_in_two_chunks_costs_what_it_costs_whole(first: int, second: int) -> None:
    whole = DEFAULT.attention_operations(0, first + second)
    assert whole == DEFAULT.attention_operations(0, first) + DEFAULT.attention_operations(first, second)


def test_a_prompt_of_one_token_is_a_decode_behind_nothing() -> None:
    assert DEFAULT.prefill_operations(1) == DEFAULT.decode_operations(1, 0)


@pytest.mark.parametrize("name", sorted(TINY))
def test_files_of_random_weights_hold_the_same_values(name: str, tmp_path: Path) -> None:
    shape, source = TINY[name], tmp_path / "Q4_1.gguf"
    write_random(shape, _tokenizer(tmp_path / "tokenizer.gguf"), source)
    reader = gguf.GGUFReader(source)
    assert reader.fields["general.architecture"].contents() == name
    assert not any(key.startswith("llama.") for key in reader.fields) or name == "llama"
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == shape.vocab
    wanted = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    spread = float(wanted["blk.0.ffn_up.weight"].std()) * shape.hidden**0.5
    assert spread == pytest.approx(1.0, rel=0.05)
    for form, bound in (("F16", 1e-3), ("Q8_0", 0.01)):
        path = tmp_path / f"{form}.gguf"
        convert(source, path, form)
        for tensor in gguf.GGUFReader(path).tensors:
            found = dequantize(tensor.data, tensor.tensor_type)
            assert np.abs(found - wanted[tensor.name]).max() <= bound * np.abs(wanted[tensor.name]).max(), tensor.name


def _tokenizer(path: Path) -> Path:
    """A file with a vocabulary of 300 tokens and settings of another model."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(30)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {number}" for number in range(300)])
    writer.add_token_types([1] * 300)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@given(st.integers(1, 16), st.integers(2, 20), st.floats(0.001, 1.0), st.floats(0.0, 5.0))
def test_streams_in_lockstep_decode_one_token_each_a_step(
    streams: int, count: int, step_s: float, first: float
) -> None:
    times = [[first + step_s * number for number in range(count)] for _ in range(streams)]
    assert decode_rate(times) == pytest.approx(streams / step_s, rel=1e-6)


def test_what_comes_while_a_stream_waits_for_its_first_token_is_not_counted() -> None:
    assert decode_rate([[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]) == pytest.approx(2.0)


def test_prompts_are_the_same_for_every_system_and_differ_from_each_other() -> None:
    assert prompts("a", 3, 8) == prompts("a", 3, 8)
    assert len({tuple(prompt) for prompt in prompts("a", 8, 8) + prompts("b", 8, 8)}) == 16


def _bench(folder: Path, **changes: Any) -> Bench:
    report = Report("cpu", SimpleNamespace(json=None, quick=True))  # type: ignore[arg-type]
    plain: dict[str, Any] = {
        "state": State(folder / "kept"),
        "size": SMOKE,
        "report": report,
        "files": Files(folder / "model.gguf", folder),
        "peers": Peers(folder / "peers"),
        "threads": 1,
        "repeats": 2,
        "names": ("paceline", "vllm"),
        "patience_s": 0.0,
    }
    return Bench(**{**plain, **changes})


def test_a_system_that_breaks_down_is_told_and_left_out_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, asked = _bench(tmp_path), []

    def work(system: Any, repeat: int) -> int:
        asked.append((system.name, repeat))
        if system.peer == "vllm":
            raise Failed("no room")
        return repeat

    names = ("paceline int8", "vllm float32", "llama.cpp Q8_0")  # the last peer was not asked for
    bench.each("part", names, work)
    assert asked == [("paceline int8", 0), ("vllm float32", 0), ("paceline int8", 1)]
    assert "ABSENT: vllm float32: part vllm float32 0: no room" in capsys.readouterr().out
    again = _bench(tmp_path)
    again.each("part", ("paceline int8",), work)
    assert len(asked) == 3
    assert again.values("part", "paceline int8") == [0, 1]


def test_a_peer_that_is_not_installed_says_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(Absent, match="--setup-peers"):
        _bench(tmp_path).start(SYSTEMS["vllm float32"], DEFAULT, Room(1, 64))


def test_a_worker_answers_until_it_breaks(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks/_cpu/workers')!r})\n"
        "from _protocol import work\n"
        "class Echo:\n"
        "    facts = {'version': '1'}\n"
        "    def __init__(self, order):\n"
        "        print('a library that talks')\n"
        "    def run(self, prompts, count):\n"
        "        if count > 3: raise ValueError('too many')\n"
        "        return [[0.1 * n for n in range(count)] for _ in prompts], prompts[0]\n"
        "work(Echo)\n"
    )
    worker = Worker([sys.executable, str(script)], {}, {})
    assert worker.loaded["facts"] == {"version": "1"}
    found = worker.run([[5, 6], [7]], 2)
    assert found["times"] == [[0.0, 0.1], [0.0, 0.1]]
    assert found["tokens"] == [5, 6]
    assert found["peak_bytes"] >= worker.loaded["imported_bytes"] > 0
    with pytest.raises(Failed, match="ValueError: too many"):
        worker.run([[1]], 4)


def test_verdicts() -> None:
    assert targets.Target("a", 1.8, 1.5).verdict == "reached (20% above)"
    assert targets.Target("a", 1.2, 1.5).verdict == "MISSED (20% below)"
    assert targets.Target("a", 90.0, 100.0, at_most=True).verdict == "reached (10% below)"
    assert targets.Target("a", 150.0, 100.0, at_most=True).verdict == "MISSED (50% above)"
    assert targets.Target("a", None, 1.5).verdict == "not measured"


def test_targets_follow_from_what_is_kept(tmp_path: Path) -> None:
    bench = _bench(tmp_path)
    assert all(target.found is None for target in targets.targets(bench))
    gigabyte = {"read": 37e9, "flops": 170e9, "int8": 280e9}
    for repeat, rate in enumerate((150.0, 170.0)):
        bench.state.put(f"limits single {repeat}", gigabyte)
        bench.state.put(f"single paceline int8 {repeat}", {"tokens_per_s": [rate]})
        bench.state.put(f"single llama.cpp Q8_0 {repeat}", {"tokens_per_s": [100.0]})
    found = {target.name: target for target in targets.targets(bench)}
    ratio = found["smollm2-135m: one stream, int8 over llama.cpp Q8_0"]
    assert ratio.found == pytest.approx(1.6)
    share = found["smollm2-135m: one stream, int8, of the memory limit"].found
    assert share == pytest.approx(160 * (DEFAULT.map_weights + DEFAULT.head_weights) / 37e9)


@pytest.mark.slow
@needs_model
def test_every_part_in_small_with_paceline_alone(tmp_path: Path) -> None:
    parts = "limits,single,prefill,scaling,served,mixed,memory,start"
    command = [sys.executable, "benchmarks/cpu.py", "--smoke", "--peers", "", "--patience", "0", "--parts", parts]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "served: paceline float32, 1 streams" in done.stdout
    assert (tmp_path / "smoke" / "cpu_scaling.json").exists()
