"""A model on its chips: sizes that published answers give, degrees that must divide, and a budget that adds up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cost.catalogue import chips, find_chip, find_model, models
from paceline.cost.deployment import Deployment, tp_degrees
from paceline.errors import ConfigError, PacelineError

MEASURED = Path(__file__).parents[2] / "shared" / "data" / "vllm_measured"
BESIDE = Path(__file__).parents[3] / "shared" / "data" / "vllm_measured"


def deploy(model: str, chip: str, **changes: object) -> Deployment:
    return Deployment(find_model(model), find_chip(chip), **changes)  # type: ignore[arg-type]


def test_llama_3_8b_on_an_l40s() -> None:
    """18.5 ms to read the weights (8 B at 2 bytes over 864 GB/s), 128 KiB of KV a token, 512 MiB for 4K."""
    deployment = deploy("llama-3-8b", "l40s")
    by_hand = deployment.model.nominal_params * deployment.precision.bytes / deployment.chip.bandwidth
    assert 1e3 * by_hand == pytest.approx(18.5, abs=0.05)
    assert int(1 / by_hand) == 54
    # By the exact count a little more, or less for a token that reads no embedding.
    assert 1e3 * deployment.weights_bytes / deployment.chip.bandwidth == pytest.approx(18.59, abs=0.01)
    assert 1e3 * deployment.token_weights_bytes / deployment.chip.bandwidth == pytest.approx(17.37, abs=0.01)
    assert deployment.kv_bytes_per_token == 128 * 1024
    assert deployment.kv_bytes(4096) == 512 * 2**20


def test_m5_pro_with_a_q4_k_m_file() -> None:
    """4.9 GB at 307 GB/s are 63 tokens a second."""
    deployment = deploy("llama-3-8b", "m5-pro", weights="q4_k_m")
    assert deployment.weights_bytes / 1e9 == pytest.approx(4.9, abs=0.05)
    assert round(deployment.chip.bandwidth / deployment.weights_bytes) == 63


def test_deepseek_by_the_rule_of_thumb() -> None:
    """671 B at 8 bits with a factor of 1.8 are about 1,200 GB, so 8 B200 (1,440 GB)."""
    deployment = deploy("deepseek-v3", "b200", weights="fp8", tp=8, ep=8)
    need = deployment.rule_of_thumb_bytes(1.8)
    assert need / 1e9 == pytest.approx(1200, rel=0.01)
    assert -(-need // (deployment.chip.memory_gb * 1e9)) <= 8
    assert deployment.chips * deployment.chip.memory_gb == 1440
    assert deployment.fits(32_768, 32)


def test_blocks_that_a_real_engine_reported() -> None:
    """A vLLM 0.19 on an RTX 4090 had 2,588 blocks; ours needs no more than its total memory and settings."""
    folder = next((path for path in (MEASURED, BESIDE) if path.is_dir()), None)
    if folder is None:
        pytest.skip("the measured run is not beside this checkout")
    meta = json.loads((folder / "RTX4090_Llama-3.1-8B.meta.json").read_text(encoding="utf-8"))
    cache, arguments = meta["kv_cache"], meta["engine_kwargs"]
    deployment = deploy("llama-3.1-8b", "rtx-4090")
    assert deployment.chip.memory_bytes == pytest.approx(meta["hardware"]["device_total_memory_bytes"], rel=1e-4)
    memory = deployment.memory(
        block_size=cache["block_size"],
        utilization=cache["gpu_memory_utilization"],
        step_tokens=arguments["max_num_batched_tokens"],
        max_rows=arguments["max_num_seqs"],
    )
    assert memory.num_blocks == pytest.approx(cache["num_gpu_blocks"], rel=0.01)


def test_the_share_of_what_is_free() -> None:
    """80 % of the free 80 GB of a B200 with 100 GB used are 64 GB."""
    memory = deploy("llama-3-70b", "b200", weights="fp8").memory(utilization=0.8, share_of="free", used_bytes=100e9)
    assert memory.kv_bytes == pytest.approx(64e9)
    assert "of what is free" in memory.line()


def test_the_budget_adds_up() -> None:
    memory = deploy("llama-3-70b", "h100", tp=4).memory(utilization=0.85)
    spent = memory.weights_bytes + memory.activation_bytes + memory.runtime_bytes + memory.kv_bytes
    assert spent == pytest.approx(0.85 * memory.total_bytes)
    assert memory.block_bytes == 16 * 80 * 1024
    assert memory.num_blocks == int(memory.kv_bytes // memory.block_bytes)
    assert memory.tokens == 16 * memory.num_blocks
    for number in ("85%", f"{memory.num_blocks:,} blocks", f"{memory.weights_bytes / 1e9:.2f} GB of weights"):
        assert number in memory.line()


def test_precisions_follow_the_published_weights() -> None:
    assert deploy("llama-3-8b", "h100").weights == "bf16"
    assert deploy("deepseek-v3", "h200", tp=8).weights == "fp8"
    # Attention and embeddings of gpt-oss stay at 16 bits: 65 GB, as its card says of the checkpoint.
    assert deploy("gpt-oss-120b", "h100").weights_bytes / 1e9 == pytest.approx(65.2, abs=0.5)
    fp8 = deploy("llama-3-8b", "h100", weights="fp8", kv="fp8")
    assert fp8.weights_bytes == pytest.approx(8.03e9 + 2 * 128256 * 4096, rel=0.001)
    assert fp8.kv_bytes_per_token == 64 * 1024


def test_what_tensor_parallel_copies() -> None:
    whole = deploy("llama-3-70b", "h100").stage_kv_bytes_per_token(0)
    assert deploy("llama-3-70b", "h100", tp=8).stage_kv_bytes_per_token(0) == whole / 8
    # 8 key-value heads over 16 chips: each head is on two.
    assert deploy("llama-3-70b", "h100", tp=16).stage_kv_bytes_per_token(0) == whole / 8
    # The latent vector of MLA serves all heads, so each chip keeps it; copies of the attention do split it.
    latent = deploy("deepseek-v3", "h200", tp=8, ep=8)
    assert latent.stage_kv_bytes_per_token(0) == latent.kv_bytes_per_token
    copies = deploy("deepseek-v3", "h200", dp=8, ep=8)
    assert copies.memory().tokens > 5 * latent.memory().tokens
    assert copies.stage_weights_bytes(0) > latent.stage_weights_bytes(0)


def test_stages() -> None:
    deployment = deploy("llama-3.1-405b", "h100", tp=8, pp=2)
    per_chip = [deployment.stage_weights_bytes(stage) for stage in range(2)]
    assert 8 * sum(per_chip) == pytest.approx(deployment.weights_bytes, rel=1e-3)
    uneven = deploy("deepseek-v3", "h100", tp=8, pp=2, uneven_stages=True)
    assert [uneven.stage_layers(stage) for stage in range(2)] == [(3, 28), (0, 30)]


@pytest.mark.parametrize(
    ("model", "degrees", "message"),
    [
        (
            "llama-3-8b",
            {"tp": 3},
            "tp=3 does not divide the 32 attention heads of llama-3-8b; choose one of 1, 2, 4, 8",
        ),
        ("smollm2-135m", {"tp": 2}, "choose one of 1, 3, 9"),
        ("falcon-180b", {"tp": 29}, "neither divides the 8 key-value heads"),
        ("llama-3-8b", {"pp": 3}, "pp=3 does not divide the 32 layers"),
        ("llama-3-8b", {"pp": 64}, "more than the 32 layers"),
        ("deepseek-v3", {"pp": 2}, "uneven_stages"),
        ("llama-3-8b", {"ep": 2}, "needs a mixture of experts"),
        ("mixtral-8x7b", {"ep": 3, "tp": 8}, "does not divide the 8 experts"),
        ("mixtral-8x7b", {"ep": 8, "tp": 4}, "does not divide the 4 chips of a stage"),
        ("llama-3-8b", {"tp": 0}, "tp is 0"),
        ("llama-3-8b", {"weights": "fp9"}, "did you mean fp8"),
        ("llama-3-8b", {"kv": "fp9"}, "kv 'fp9' is not known"),
        ("llama-3-8b", {"network_gbs": 0.0}, "network_gbs is 0"),
        ("llama-3-8b", {"expert_skew": -1.0}, "expert_skew"),
    ],
)
def test_what_cannot_be_laid_out(model: str, degrees: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deploy(model, "h100", **degrees)


def test_wrong_shares() -> None:
    deployment = deploy("llama-3-8b", "h100")
    for wrong in ({"utilization": 0.0}, {"utilization": 1.1}, {"block_size": 0}, {"share_of": "some"}):
        with pytest.raises(ConfigError):
            deployment.memory(**wrong)


def test_what_does_not_fit_says_what_would() -> None:
    deployment = deploy("llama-3-70b", "h100")
    assert not deployment.fits(4096)
    with pytest.raises(ConfigError, match=r"65\.\d+ GB missing") as caught:
        deployment.require_fit(4096)
    for would in ("bf16 on 2 h100 (tp 2)", "fp8 on h100", "int4 on h100"):
        assert would in str(caught.value)
    for other in deployment.alternatives(4096):
        assert other.require_fit(4096).num_blocks >= 256
    with pytest.raises(ConfigError, match="choose a larger chip"):
        deploy("llama-3.1-405b", "m5-pro").require_fit(4096)


def test_long_contexts_need_more_than_weights_do() -> None:
    deployment = deploy("llama-3-8b", "l4")
    assert deployment.fits(4096, 4)
    assert not deployment.fits(131_072)


LAYOUTS = st.builds(
    lambda model, chip, tp, pp, weights: (model, chip, tp, pp, weights),
    st.sampled_from(sorted(models())),
    st.sampled_from(sorted(chips())),
    st.sampled_from([1, 2, 3, 4, 6, 8, 9, 16]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from(["auto", "bf16", "fp8", "int4", "nvfp4", "q4_k_m"]),
)


@given(LAYOUTS)
@settings(max_examples=150, deadline=None)
def test_chips_hold_the_model_and_no_degree_is_broken(layout: tuple[str, str, int, int, str]) -> None:
    name, chip, tp, pp, weights = layout
    try:
        deployment = deploy(name, chip, tp=tp, pp=pp, weights=weights)
    except PacelineError:
        assert tp not in tp_degrees(find_model(name)) or find_model(name).layers % pp or find_model(name).experts
        return
    assert deployment.model.heads % tp == 0
    assert deployment.chips == tp * pp
    stages = [deployment.stage_weights_bytes(stage) for stage in range(pp)]
    held = tp * sum(stages)
    # Chips hold everything once; norms, routers, heads and latent down-projections more than once.
    assert held >= deployment.weights_bytes * 0.999
    assert held <= deployment.weights_bytes * (2.0 if deployment.chips > 1 else 1.001)
    tokens = tp * sum(deployment.stage_kv_bytes_per_token(stage) for stage in range(pp))
    assert tokens >= deployment.kv_bytes_per_token * 0.999
    small, large = (deployment.memory(utilization=share).num_blocks for share in (0.5, 0.95))
    assert small <= large
    assert deployment.memory(step_tokens=16_384).num_blocks <= deployment.memory(step_tokens=512).num_blocks


@given(st.sampled_from(sorted(models())), st.integers(1, 200_000), st.integers(1, 5000))
@settings(max_examples=100, deadline=None)
def test_a_longer_sequence_never_needs_less(name: str, context: int, more: int) -> None:
    model = find_model(name)
    assert 0 < model.kv_bytes(context) <= model.kv_bytes(context + more)
    assert model.kv_bytes(context) <= context * model.kv_bytes_per_token()
    assert model.kv_bytes(context, "fp8") * 2 == model.kv_bytes(context)


def test_how_many_sequences_fit() -> None:
    llama = deploy("llama-3-8b", "h100")
    assert llama.sequences(4096) == llama.num_blocks() // 256
    assert llama.sequences(4096, hybrid=True) in (llama.sequences(4096), llama.sequences(4096) + 1)
    oss = deploy("gpt-oss-20b", "h100")
    assert oss.sequences(32_768, hybrid=True) == pytest.approx(2 * oss.sequences(32_768), rel=0.02)
    assert deploy("llama-3-70b", "h100").sequences(4096, hybrid=True) == 0


def test_layouts_in_words() -> None:
    assert deploy("llama-3-8b", "h100").layout == "llama-3-8b in bf16 on h100"
    deployment = deploy("deepseek-v3", "h200", tp=2, dp=4, ep=8, kv="fp8")
    assert deployment.layout == "deepseek-v3 in fp8, KV in fp8 on 8 h200 (tp 2, dp 4, ep 8)"
    assert replace(deployment, tp=8, dp=1).chips == 8
