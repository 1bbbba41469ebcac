"""What is found out before the load, and what is refused there."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from paceline.errors import ConfigError
from paceline.measure.mock import End, MockRequest, Play, whole
from paceline.measure.mockapi import MockApi, MockConfig
from paceline.measure.plan import BenchPlan, Load, Target
from paceline.measure.probe import Found, Probe
from paceline.measure.prompts import WORDS
from tests.measure.background import Background


def probe(handler: Callable[[MockRequest], Play], key: str = "", **target: Any) -> Found:
    with Background(handler) as server:
        plan = BenchPlan(target=Target(url=server.url, **target), load=Load(rate=1, requests=1))
        with Probe(plan, key) as asked:
            return asked.run()


def api(**config: Any) -> MockApi:
    return MockApi(MockConfig(ttft_ms=0, itl_ms=0, log=False, **config))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_plain_server(endpoint: str, stream: bool) -> None:
    found = probe(api(), endpoint=endpoint, stream=stream)
    assert found.features.model == "mock"
    assert found.features.ignore_eos
    assert found.fit.overhead_tokens == (7 if endpoint == "chat" else 0)
    assert found.words == WORDS
    assert found.target["engine_version"] == "0.0-mock"
    assert found.warnings == ()


def test_a_hosted_server_that_knows_no_ignore_eos() -> None:
    found = probe(api(accept_ignore_eos=False))
    assert not found.features.ignore_eos
    assert "not forced" in found.warnings[0]
    with pytest.raises(ConfigError, match="ignore_eos"):
        probe(api(accept_ignore_eos=False), ignore_eos="on")


class OddWords:
    """A server whose vocabulary needs two tokens for some words."""

    def __init__(self, odd: set[str]) -> None:
        self._odd, self._api = odd, api()

    def __call__(self, request: MockRequest) -> Play:
        if request.path.endswith("/completions"):
            body = msgspec.json.decode(request.body)
            for message in body["messages"]:
                words = message["content"].split()
                message["content"] = " ".join(f"{w} x" if w in self._odd else w for w in words)
            request = MockRequest(request.method, request.path, request.headers, msgspec.json.encode(body), request.at)
        return self._api(request)


def test_words_of_two_tokens_are_found_and_left_out() -> None:
    odd = {WORDS[3], WORDS[100]}
    found = probe(OddWords(odd))
    assert not odd & set(found.words)
    assert len(found.words) > len(WORDS) - 20
    assert found.fit.tokens_per_word == 1.0
    assert "left out" in found.fit.note


def test_a_vocabulary_of_two_token_words_gives_approximate_lengths() -> None:
    found = probe(OddWords(set(WORDS)))
    assert found.fit.tokens_per_word == pytest.approx(2.0)
    assert "approximate" in found.warnings[0]


def answer(status: int, body: bytes, content_type: str = "application/json") -> Callable[[MockRequest], Play]:
    return lambda request: Play([(0.0, whole(status, body, content_type))])


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (answer(404, b"<html>nothing here</html>", "text/html"), "OpenAI-compatible"),
        (answer(200, b"<html>a shop</html>", "text/html"), "not OpenAI-compatible"),
        (answer(200, b'{"data": []}'), "lists no model"),
        (lambda request: Play([(0.0, b"SSH-2.0-x\r\n")], End.FIN), "does not speak HTTP"),
        (lambda request: Play([], End.RESET), "does not speak HTTP"),
        (api(api_key="right"), "a key is needed"),
    ],
)
def test_targets_that_cannot_be_measured(handler: Callable[[MockRequest], Play], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        probe(handler)
    assert "\n" not in str(caught.value)


def test_a_wrong_key_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="the key was refused") as caught:
        probe(api(api_key="right"), key="wrong-key")
    assert "wrong-key" not in str(caught.value)
    assert probe(api(api_key="right"), key="right").features.model == "mock"


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        probe(api(), model="nosuch")


@pytest.mark.parametrize("listed", [b"[1]", b'{"data": 5}', b'{"data": "x"}', b'{"data": {"a": 1}}', b"5", b"<html>"])
def test_a_list_of_models_that_is_none(listed: bytes) -> None:
    with pytest.raises(ConfigError, match="not OpenAI-compatible"):
        probe(lambda request: Play([(0.0, whole(200, listed))]))


def test_nobody_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        plan = BenchPlan(target=Target(url=f"http://127.0.0.1:{unused.getsockname()[1]}"))
        with Probe(plan, "") as asked, pytest.raises(ConfigError, match="cannot reach"):
            asked.run()
