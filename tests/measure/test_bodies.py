"""Request bodies: what is asked for is in them, and prepared ones come back as they were."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.measure.bodies import BodyStore, Features, flat_text, request_body, resolve
from paceline.measure.plan import Target


def body(
    content: Any = "hi", traffic_class: str = "", features: Features | None = None, **target: Any
) -> dict[str, Any]:
    features = features or Features(model="m")
    data = request_body(Target(url="http://h", **target), features, content, 5, traffic_class)
    return msgspec.json.decode(data, type=dict[str, Any])


def test_a_chat_request() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert body(messages) == {
        "model": "m",
        "messages": messages,
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_plain_completions_request_of_a_hosted_model() -> None:
    features = Features(model="m", stream_usage=False, max_tokens_field="max_completion_tokens")
    asked = body("hi", features=features, endpoint="completions", stream=False, choices=2, extra={"top_k": 3})
    assert asked == {
        "model": "m",
        "prompt": "hi",
        "max_completion_tokens": 5,
        "temperature": 0.0,
        "n": 2,
        "top_k": 3,
    }


def test_forced_lengths_ask_to_ignore_the_end() -> None:
    assert body(features=Features(model="m", ignore_eos=True))["ignore_eos"] is True
    assert "ignore_eos" not in body()


def test_a_class_goes_where_the_server_looks_for_it() -> None:
    assert body(traffic_class="gold", class_field="service_tier")["service_tier"] == "gold"
    asked = body(traffic_class="gold", class_field="paceline.class", extra={"paceline": {"x": 1}})
    assert asked["paceline"] == {"x": 1, "class": "gold"}
    assert "service_tier" not in body(traffic_class="gold")
    assert "service_tier" not in body(class_field="service_tier")


def test_messages_as_one_prompt() -> None:
    assert flat_text([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]) == "a\nb"


@given(st.lists(st.binary(max_size=2000), max_size=20))
def test_prepared_bodies_come_back_as_they_were(bodies: list[bytes]) -> None:
    store = BodyStore()
    for data in bodies:
        store.add(data)
    store.seal()
    assert len(store) == len(bodies)
    if any(bodies):
        assert [bytes(store.get(i)) for i in range(len(bodies))] == bodies
    store.close()


def test_the_head_names_the_host_and_carries_the_key_once() -> None:
    endpoint = resolve(Target(url="http://127.0.0.1:8000/v1"), "secret")
    head = endpoint.head.decode()
    assert head.startswith("POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n")
    assert head.count("secret") == 1
    assert head.endswith("Content-Length: ")
    assert "secret" not in repr(endpoint)


def test_hosts_and_certificates_that_are_none() -> None:
    with pytest.raises(ConfigError, match="cannot resolve"):
        resolve(Target(url="http://no-such-host.invalid"), "")
    with pytest.raises(ConfigError, match="CA file"):
        resolve(Target(url="https://127.0.0.1", ca_file="/no/such/file"), "")
