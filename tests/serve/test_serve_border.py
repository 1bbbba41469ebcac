"""Request ids, keys and their limits, CORS, the small endpoints, metrics and logs."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from paceline.core.classes import STANDARD, TrafficClass
from paceline.errors import ConfigError, Overloaded, Unauthorized
from paceline.serve import logs
from paceline.serve.keys import ApiKey, KeyRing, hash_key, new_key, read_key_file
from paceline.serve.settings import ServeSettings
from paceline.text.tokenizer import Tokenizer
from tests.serve.live import Live, live_server

SECRET, OTHER = new_key(), new_key()


# Request ids ----------------------------------------------------------------------------------------------------------


def test_request_ids_in_and_out(live: Live) -> None:
    assert live.get("/version", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = {live.get("/version").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    for bad in ("a b", "x" * 129, "né".encode(), "<script>"):
        answer = live.get("/version", headers={"x-request-id": bad}).headers["x-request-id"]
        assert answer.startswith("req-")
    assert live.complete("", headers=None).headers["x-request-id"]


def test_the_same_request_id_twice_at_once(live: Live) -> None:
    first = live.post("/v1/completions", {"prompt": "a"}, headers={"x-request-id": "same"})
    second = live.post("/v1/completions", {"prompt": "a"}, headers={"x-request-id": "same"})
    assert first.status_code == second.status_code == 200
    assert first.json()["id"] != second.json()["id"]


# Keys -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(default_tokenizer: Tokenizer) -> Iterator[Live]:
    keys = (
        ApiKey("team", hash_key(SECRET), tenant="t1", classes=("standard",), max_concurrent=1),
        ApiKey("slow", hash_key(OTHER), classes=("batch",), requests_per_minute=2),
    )
    with live_server(default_tokenizer, ServeSettings(keys=keys)) as server:
        server.says(" ok")
        yield server


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def test_keys_are_needed_where_models_are_used(guarded: Live) -> None:
    for path in ("/v1/models", "/v1/models/tiny-test", "/v1/nothing"):
        response = guarded.get(path)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "missing_api_key"
        assert response.headers["x-request-id"]
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert guarded.post(path, {}).status_code == 401
        assert guarded.post(path, {}, headers=bearer("wrong")).json()["error"]["code"] == "invalid_api_key"
        assert guarded.post(path, {}, headers={"authorization": f"Basic {SECRET}"}).status_code == 401
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert guarded.get(path).status_code == 200
    assert guarded.get("/v1/models", headers=bearer(SECRET)).status_code == 200


def test_concurrency_of_a_key(guarded: Live) -> None:
    guarded.says(" word" * 1000)
    guarded.engine.step_s = 0.005
    body = {"prompt": "a", "stream": True, "max_tokens": 1000}
    with guarded.client.stream("POST", "/v1/completions", json=body, headers=bearer(SECRET)) as response:
        lines = response.iter_lines()  # kept: dropping it would close the stream
        next(lines)
        refused = guarded.get("/v1/models", headers=bearer(SECRET))
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "concurrency_limit_exceeded"
    guarded.until(lambda: guarded.get("/v1/models", headers=bearer(SECRET)).status_code == 200)
    guarded.engine.step_s = 0.0
    guarded.says(" ok")
    guarded.until_idle()


def test_classes_and_rate_of_a_key(guarded: Live) -> None:
    response = guarded.post("/v1/completions", {"prompt": "a"}, headers=bearer(OTHER))
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "class_not_allowed"
    assert guarded.get("/v1/models", headers=bearer(OTHER)).status_code == 200
    response = guarded.get("/v1/models", headers=bearer(OTHER))
    assert response.status_code == 429
    assert 1 <= int(response.headers["retry-after"]) <= 30
    assert response.json()["error"]["code"] == "rate_limit_exceeded"


def test_rate_recovers_with_time() -> None:
    ring = KeyRing((ApiKey("a", hash_key("s"), requests_per_minute=60),))
    for _ in range(60):
        with ring.admit("Bearer s", 100.0):
            pass
    with pytest.raises(Overloaded) as caught, ring.admit("Bearer s", 100.0):
        pass
    assert caught.value.retry_after_s == pytest.approx(1.0)
    with ring.admit("bearer s", 101.0) as caller:
        assert caller.name == "a"
    with pytest.raises(Unauthorized), ring.admit("Bearer S", 101.0):
        pass


def test_tenants_do_not_share_a_salt(guarded: Live) -> None:
    guarded.engine.backend.seen.clear()
    body = {"prompt": "a", "cache_salt": "x"}
    assert guarded.post("/v1/completions", body, headers=bearer(SECRET)).status_code == 200
    assert guarded.engine.backend.seen[-1].cache_salt == "t1/x"


def test_key_files() -> None:
    digest = hash_key("s")
    text = f'[[key]]\nname = "a"\nsha256 = "{digest}"\nclasses = ["x"]\nrequests_per_minute = 1.5\nmax_concurrent = 2\n'
    (key,) = read_key_file(text)
    assert key == ApiKey("a", digest, "default", ("x",), 1.5, 2)
    assert digest not in repr(key)
    assert read_key_file("") == ()
    for bad, what in {
        "name = 1": "nothing else",
        "[[key]]": "sha256",
        '[[key]]\nsha256 = "abc"\nname = "a"': "64 hexadecimal",
        f'[[key]]\nsha256 = "{digest}"': "'name'",
        text + text: "several keys named a",
        text + "secret = 1\n": "unknown settings",
        text.replace("1.5", "0"): "above 0",
        text.replace('["x"]', '"x"'): "list of strings",
        "[[key": "not valid TOML",
        "key = 1": "single key",
    }.items():
        with pytest.raises(ConfigError, match=what):
            read_key_file(bad)


# CORS -----------------------------------------------------------------------------------------------------------------

ASK = {"origin": "https://a.example", "access-control-request-method": "POST"}


def test_cors_is_off(live: Live) -> None:
    assert "access-control-allow-origin" not in live.get("/version", headers={"origin": "https://a.example"}).headers
    assert live.client.options("/v1/completions", headers=ASK).status_code == 405


def test_cors_for_named_origins(default_tokenizer: Tokenizer) -> None:
    settings = ServeSettings(cors_origins=("https://a.example",), keys=(ApiKey("a", hash_key(SECRET)),))
    with live_server(default_tokenizer, settings) as live:
        answer = live.client.options("/v1/completions", headers=ASK)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        refused = live.client.options("/v1/completions", headers={**ASK, "origin": "https://b.example"})
        assert "access-control-allow-origin" not in refused.headers
        # An error must be readable for the page, too.
        error = live.post("/v1/completions", {}, headers={"origin": "https://a.example"})
        assert error.status_code == 401
        assert error.headers["access-control-allow-origin"] == "https://a.example"


# Small endpoints ------------------------------------------------------------------------------------------------------


def test_models(live: Live) -> None:
    listed = live.get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny-test", "model", 2048)
    assert live.get("/v1/models/tiny-test").json() == card


def test_served_names(default_tokenizer: Tokenizer) -> None:
    with live_server(default_tokenizer, ServeSettings(served_names=("org/name", "alias"))) as live:
        assert [card["id"] for card in live.get("/v1/models").json()["data"]] == ["org/name", "alias"]
        assert live.get("/v1/models/org/name").json()["id"] == "org/name"
        for name in ("org/name", "alias"):
            assert live.complete(model=name).json()["model"] == "org/name"
        assert live.complete(model="tiny-test").status_code == 404


def test_tokenize_and_back(live: Live) -> None:
    answer = live.post("/tokenize", {"prompt": "Hello 你好", "return_token_strs": True}).json()
    assert answer["tokens"] == live.tokenizer.encode("Hello 你好")
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    assert live.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "Hello 你好"}
    messages = [{"role": "user", "content": "hi"}]
    of_chat = live.post("/tokenize", {"messages": messages}).json()["tokens"]
    live.chat("hi")
    assert tuple(of_chat) == live.engine.backend.seen[-1].prompt


def test_version(live: Live) -> None:
    from paceline.version import __version__

    assert live.get("/version").json() == {"version": __version__}


# Metrics --------------------------------------------------------------------------------------------------------------


def test_metrics_tell_what_happened(default_tokenizer: Tokenizer) -> None:
    with live_server(default_tokenizer) as live:
        live.says(" one two three")
        live.engine.step_s = 0.02  # tokens come one at a time
        prompt = len(live.tokenizer.encode("word " * 40))
        for _ in range(2):
            assert live.complete("word " * 40, n=2).status_code == 200
        live.stream("/v1/completions", {"prompt": "word " * 40, "max_tokens": 2})
        live.complete("", stream=True)
        want = {
            "paceline:prompt_tokens_total": 5 * prompt,
            "paceline:generation_tokens_total": 4 * 4 + 2,
            "paceline:request_prompt_tokens_count": 5,
            "paceline:request_prompt_tokens_sum": 5 * prompt,
            "paceline:request_generation_tokens_sum": 4 * 4 + 2,
            "paceline:time_to_first_token_seconds_count": 5,
            "paceline:inter_token_latency_seconds_count": 4 * 3 + 1,
            "paceline:e2e_request_latency_seconds_count": 5,
            "paceline:request_queue_time_seconds_count": 5,
            "paceline:request_prefill_time_seconds_count": 5,
            "paceline:request_decode_time_seconds_count": 5,
            "paceline:request_inference_time_seconds_count": 5,
            "paceline:request_params_n_sum": 5,
            "paceline:num_requests_running": 0,
            "paceline:num_requests_waiting": 0,
            "paceline:kv_cache_usage_perc": 0,
            "paceline:num_preemptions_total": 0,
            "paceline:requests_aborted_total": 0,
        }
        assert {name: live.metric(name) for name in want} == want
        assert live.metric("paceline:request_success_total", finished_reason="stop") == 4
        assert live.metric("paceline:request_success_total", finished_reason="length") == 1
        assert live.metric("paceline:request_errors_total", status="400") == 1
        assert live.metric("paceline:http_requests_total", path="/v1/completions", status="200") == 3
        assert 0 < live.metric("paceline:prefix_cache_hits_total") <= live.metric("paceline:prefix_cache_queries_total")
        assert live.metric("paceline:prompt_tokens_cached_total") == live.metric("paceline:prefix_cache_hits_total")
        steps = live.metric("paceline:step_duration_seconds_count")
        assert (
            steps == live.metric("paceline:iteration_tokens_total_count") == live.metric("paceline:engine_steps_total")
        )
        assert steps > 0
        assert {labels["model_name"] for labels, _ in live.samples("paceline:num_requests_running")} == {"tiny-test"}


def test_goodput_is_counted_by_class(default_tokenizer: Tokenizer) -> None:
    promised = TrafficClass("promised", ttft_s=30.0, itl_s=30.0)
    full = TrafficClass("full", queue_limit=0)
    classes = (promised, STANDARD, full)
    settings = ServeSettings(classes=classes, default_class="promised")
    with live_server(default_tokenizer, settings, classes=classes) as live:
        assert live.chat().status_code == 200
        assert live.chat(paceline={"ttft_ms": 0.001}).status_code == 200, "late, and answered"
        assert live.chat(paceline={"class": "full"}).status_code == 429
        assert live.chat(paceline={"class": "standard"}, max_tokens=10**6).status_code == 400
        sent, good = "paceline:class_requests_total", "paceline:class_requests_good_total"
        assert {labels["class"]: value for labels, value in live.samples(sent)} == {"promised": 2, "full": 1}
        assert {labels["class"]: value for labels, value in live.samples(good)} == {"promised": 1}


def test_strangers_cannot_grow_the_metrics(live: Live) -> None:
    for i in range(5):
        live.get(f"/no/such/path/{i}")
    paths = {labels["path"] for labels, _ in live.samples("paceline:http_requests_total")}
    assert not any("such" in path for path in paths)
    assert "other" in paths


# Logs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["json", "text"])
def test_logs_carry_the_request_id_and_no_prompt(live: Live, form: str) -> None:
    stream = io.StringIO()
    logs.configure(form, "debug", stream)
    try:
        live.complete("a very secret prompt", headers=None, frobnicate=1)
        live.post(
            "/v1/completions", {"prompt": "another secret", "max_tokens": -1}, headers={"x-request-id": "find-me"}
        )
        live.until(lambda: "find-me" in stream.getvalue())
    finally:
        root = logging.getLogger()
        for handler in [h for h in root.handlers if getattr(h, "paceline", False)]:
            root.removeHandler(handler)
        logging.getLogger("paceline").setLevel(logging.NOTSET)
    text = stream.getvalue()
    assert "secret" not in text
    assert "frobnicate" in text
    if form == "json":
        lines = [json.loads(line) for line in text.splitlines()]
        assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
        (access,) = [x for x in lines if x.get("request_id") == "find-me" and x["logger"] == "paceline.access"]
        assert access["message"] == "POST /v1/completions 400"
        assert access["seconds"] >= 0
    else:
        assert "request_id=find-me" in text
