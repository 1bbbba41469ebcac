"""A chat with a server that speaks the OpenAI API, Paceline's or another."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import httpx

from paceline.errors import EngineError

_CONNECT_S = 10.0


class RemoteChat:
    """One server, and the model that it serves. Raises EngineError with what the server said."""

    def __init__(self, url: str, api_key: str | None, sampling: dict[str, Any]) -> None:
        base = url.rstrip("/")
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self._client = httpx.Client(
            base_url=base if base.endswith("/v1") else f"{base}/v1",
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # an answer may take as long as it takes
        )
        try:
            self.model: str = self._checked(self._get("/models")).json()["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            self._client.close()
            raise EngineError(f"{url} does not answer like an OpenAI-compatible server") from None
        except BaseException:
            self._client.close()
            raise

    def talk(self, messages: list[dict[str, Any]]) -> Generator[str]:
        """The next message in pieces. Closing the generator closes the connection, and the server stops computing."""
        body = {"model": self.model, "messages": messages, "stream": True, **self._sampling}
        try:
            with self._client.stream("POST", "/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                for line in self._checked(response).iter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        yield _text_of(json.loads(data))
        except httpx.HTTPError as error:
            raise EngineError(f"the connection broke: {error}") from error

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._client.get(path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineError(f"cannot reach {self._client.base_url}: {error}") from error

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if not response.is_error:
            return response
        try:
            said = response.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):
            said = response.reason_phrase
        hint = "; set PACELINE_API_KEY" if response.status_code == 401 else ""
        raise EngineError(f"the server said {response.status_code}: {said}{hint}")

    def __enter__(self) -> RemoteChat:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


def _text_of(chunk: dict[str, Any]) -> str:
    if "error" in chunk:
        raise EngineError(f"the server said: {chunk['error'].get('message', chunk['error'])}")
    choices = chunk.get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""
