"""A server with a folder for batches, on the scripted engine, and the openai client for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from openai.types import Batch

from paceline.serve.batch.settings import BatchSettings
from paceline.serve.keys import ApiKey, hash_key
from paceline.serve.settings import ServeSettings
from paceline.text.tokenizer import Tokenizer
from tests.serve.live import Live, live_server

CHAT: Final = "/v1/chat/completions"
KEYS = tuple(
    ApiKey(name, hash_key(f"pk-{name}"), tenant=name, classes=classes)
    for name, classes in (("ann", None), ("bob", None), ("carol", ("interactive",)))
)


def line(custom_id: str, content: str = "hi", *, url: str = CHAT, **body: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": content}]} if url == CHAT else {"prompt": content}
    body = {"model": "tiny-test", **prompt, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def records(content: bytes) -> dict[str, Any]:
    """By custom_id, of which each may come once."""
    found = [json.loads(one) for one in content.splitlines()]
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found), "something was answered twice"
    return by_id


class Client:
    """The openai client, with the few steps that every test takes."""

    def __init__(self, live: Live, key: str = "unused") -> None:
        self.live = live
        self.api = openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0, timeout=30)

    def upload(self, content: bytes, **options: Any) -> str:
        return self.api.files.create(file=("in.jsonl", content), purpose="batch", **options).id

    def start(self, lines: Sequence[Any], endpoint: Any = CHAT, **options: Any) -> Batch:
        file = self.upload(jsonl(lines))
        return self.api.batches.create(
            input_file_id=file, endpoint=endpoint, completion_window=options.pop("window", "24h"), **options
        )

    def when(self, batch_id: str, *statuses: str) -> Batch:
        """The batch once it has one of these statuses; another end is a failure."""
        seen: list[Batch] = []

        def there() -> bool:
            seen.append(self.api.batches.retrieve(batch_id))
            ended = seen[-1].status in ("completed", "failed", "expired", "cancelled")
            assert not ended or seen[-1].status in statuses, seen[-1]
            return seen[-1].status in statuses

        self.live.until(there)
        return seen[-1]

    def output(self, batch: Batch) -> dict[str, Any]:
        return records(self.api.files.content(batch.output_file_id).read()) if batch.output_file_id else {}

    def errors(self, batch: Batch) -> dict[str, Any]:
        return records(self.api.files.content(batch.error_file_id).read()) if batch.error_file_id else {}


@contextmanager
def serving(
    tokenizer: Tokenizer,
    folder: Path,
    *,
    keys: Sequence[ApiKey] = (),
    scheduler: dict[str, Any] | None = None,
    **of: Any,
) -> Iterator[Live]:
    batch = replace(BatchSettings(folder=folder, sweep_s=0.05), **of)
    with live_server(tokenizer, ServeSettings(keys=tuple(keys), batch=batch), **(scheduler or {})) as live:
        live.says(" one two three")
        yield live


@pytest.fixture(scope="session")
def batch_server(default_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(default_tokenizer, tmp_path_factory.mktemp("batches"), keys=KEYS, max_requests=50) as live:
        yield live


@pytest.fixture
def ann(batch_server: Live) -> Iterator[Client]:
    batch_server.says(" one two three")
    client = Client(batch_server, "pk-ann")
    with client.api:
        yield client
    batch_server.call(lambda: setattr(batch_server.engine, "step_s", 0.0))
    batch_server.until_idle()


@pytest.fixture
def bob(batch_server: Live) -> Iterator[Client]:
    client = Client(batch_server, "pk-bob")
    with client.api:
        yield client
