"""URLs as people give them."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from paceline.errors import ConfigError
from paceline.measure.address import address_of, base_url, check_header_name
from paceline.measure.mock import MockRequest, Play
from paceline.measure.mockapi import MockApi, MockConfig
from paceline.measure.once import measure_once
from paceline.measure.plan import BenchPlan, Target
from paceline.measure.probe import Probe
from tests.measure.background import Background


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("localhost:8000", "http://localhost:8000/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("http://h/api/v3/chat/completions", "http://h/api/v3"),
        ("http://[::1]:80/v1/completions", "http://[::1]:80/v1"),
        ("http://h/v1#part", "http://h/v1"),
    ],
)
def test_base_urls(given: str, base: str) -> None:
    assert base_url(given) == base


def test_a_query_follows_every_path() -> None:
    given = "https://me.example.com/openai/deployments/gpt/chat/completions?api-version=2024-10-21&x=1"
    address = address_of(given)
    assert address.base == "https://me.example.com/openai/deployments/gpt"
    assert address.at("/models") == f"{address.base}/models?api-version=2024-10-21&x=1"
    assert address_of("http://h").at("/models") == "http://h/v1/models"


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x",
        "http://",
        "http://h:99999",
        "http://user:pass@h/",
        "http://h/v1?key=secret",
        "http://h/v1?api_key=secret",
        "http://h/v1?api-key=secret",
        "http://h/v1?apikey=secret",
        "http://h/v1?access_token=secret",
        "http://h/v1?code=secret",
        "http://h/v1?sig=secret",
        "http://h/a path",
        "http://h/v1?x=a\r\nX-Evil:1",
        "http://[::1/v1",
        "://",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Probe(BenchPlan(target=Target(url=url)), "")
    assert "secret" not in str(caught.value)
    assert "pass" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_header_names() -> None:
    check_header_name("api-key")
    for bad in ("", "two words", "a:b", "a\r\nb"):
        with pytest.raises(ConfigError):
            check_header_name(bad)


class Azure:
    """A server that answers only under its deployment's path, with its api-version and its key header."""

    def __init__(self) -> None:
        self._mock = MockApi(MockConfig(ttft_ms=0, itl_ms=0, log=False))

    def __call__(self, request: MockRequest) -> Play:
        path, _, query = request.path.partition("?")
        right = query == "api-version=2024-10-21" and request.headers.get("api-key") == "azure-secret-1"
        if right and "authorization" not in request.headers:
            path = path.replace("/openai/deployments/gpt/", "/v1/")
        return self._mock(dataclasses.replace(request, path=path))


def test_a_server_that_wants_a_query_and_its_own_key_header() -> None:
    key = "azure-secret-1"
    with Background(Azure()) as azure:
        url = f"{azure.url}/openai/deployments/gpt"
        target = Target(url=f"{url}?api-version=2024-10-21", model="mock", api_key_header="api-key")
        with Probe(BenchPlan(target=target), key) as probe:
            assert probe.run().fit.overhead_tokens == 7
        record = asyncio.run(measure_once(target, max_tokens=3, key=key))
        assert record.ok, record.error_message
        with (
            Probe(BenchPlan(target=Target(url=url, model="mock")), key) as probe,
            pytest.raises(ConfigError, match="404"),
        ):
            probe.run()
