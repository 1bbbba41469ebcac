"""Asks the server, before any load, who it is, what it takes and how it counts tokens.

Everything that can go wrong with a target is found here, as one clear line, before anything is written.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from paceline.errors import ConfigError
from paceline.measure.address import address_of, key_header
from paceline.measure.bodies import Features, request_body, tls_context
from paceline.measure.plan import BenchPlan, Target
from paceline.measure.prompts import OPENING, WORDS
from paceline.measure.provenance import scrub
from paceline.measure.records import TokenFit
from paceline.measure.scrape import engine_of, metrics_url
from paceline.measure.transcript import Transcript

MIN_WORDS = 64  # fewer one-token words than this make poor prompts
MAX_QUESTIONS = 48  # requests spent on finding the words that are not one token


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What the probe found."""

    features: Features
    target: dict[str, Any]  # for the manifest
    fit: TokenFit
    words: tuple[str, ...]
    warnings: tuple[str, ...] = ()


class Probe:
    """One server under questions. A context manager."""

    def __init__(self, plan: BenchPlan, key: str) -> None:
        self._plan, self._target, self._key = plan, plan.target, key
        self._address = address_of(plan.target.url)
        self._base = self._address.base
        self._warnings: list[str] = []
        self._http = make_http(plan.target, key, timeout_s=min(plan.client.timeout_s, 120.0))
        self._questions = 0

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def run(self) -> Found:
        """Ask everything. Raises ConfigError, in one line, when the server cannot be measured."""
        model, models = self._model()
        features = self._features(model)
        fit, words = self._fit(features)
        facts = self._facts(model, models)
        return Found(features=features, target=facts, fit=fit, words=words, warnings=tuple(self._warnings))

    # Questions

    def _ask(self, method: str, url: str, body: bytes | None = None) -> httpx.Response:
        headers = {"content-type": "application/json"} if body is not None else {}
        try:
            return self._http.request(method, url, content=body, headers=headers)
        except httpx.TimeoutException:
            raise ConfigError(f"{url} did not answer in time") from None
        except httpx.TransportError as error:
            raise ConfigError(transport_message(url, error)) from None

    def _model(self) -> tuple[str, list[dict[str, Any]]]:
        """(model to ask for, what the server lists)."""
        response = self._ask("GET", self._address.at("/models"))
        if response.status_code in (401, 403):
            raise ConfigError(self._refused(response))
        models: list[dict[str, Any]] = []
        if response.status_code == 200:
            try:
                listed = response.json().get("data") or []
            except (ValueError, AttributeError):
                listed = None
            if not isinstance(listed, list):
                raise ConfigError(f"{self._base} is not OpenAI-compatible: /models answers no JSON list")
            models = [m for m in listed if isinstance(m, dict) and isinstance(m.get("id"), str)]
        wanted = self._target.model
        names = [m["id"] for m in models]
        if wanted is None:
            if not names:
                raise ConfigError(f"{self._base} lists no model; name one, or check that the URL is OpenAI-compatible")
            return names[0], models
        if names and wanted not in names:
            self._warnings.append(f"the server does not list {wanted}; it lists {', '.join(names[:5])}")
        return wanted, models

    def _features(self, model: str) -> Features:
        """The richest request that the server takes, tried from the full one down."""
        force = self._target.ignore_eos
        tries = [
            Features(model=model, ignore_eos=ignore, stream_usage=usage, max_tokens_field=field)
            for field in ("max_tokens", "max_completion_tokens")
            for usage in (True, False)
            for ignore in ((True,) if force == "on" else (False,) if force == "off" else (True, False))
        ]
        problem = ""
        for features in tries:
            response = self._generate(features, f"{OPENING} {WORDS[0]}", 2)
            if response.status_code == 200:
                self._check_answer(response)
                if not features.ignore_eos and force == "auto":
                    self._warnings.append("the server does not take ignore_eos: output lengths are not forced")
                if self._target.stream and not features.stream_usage:
                    self._warnings.append("the server does not take stream_options: token counts may be missing")
                return features
            problem = self._problem(response)
            if response.status_code not in (400, 422):
                break
        raise ConfigError(problem)

    def _generate(self, features: Features, text: str, max_tokens: int) -> httpx.Response:
        self._questions += 1
        target = self._target
        chat = target.endpoint == "chat"
        content: Any = [{"role": "user", "content": text}] if chat else text
        path = "/chat/completions" if chat else "/completions"
        return self._ask("POST", self._address.at(path), request_body(target, features, content, max_tokens))

    def _check_answer(self, response: httpx.Response) -> Transcript:
        transcript = read_answer(response)
        error, message = transcript.verdict(choices=1, forced=None)
        if error is not None:
            raise ConfigError(f"{self._base} does not answer as an OpenAI-compatible server: {self._clean(message)}")
        return transcript

    def _problem(self, response: httpx.Response) -> str:
        status = response.status_code
        if status in (401, 403):
            return self._refused(response)
        try:
            payload = response.json()
            error = payload.get("error", payload)
            said = str(error.get("message", error) if isinstance(error, dict) else error)
        except (ValueError, AttributeError):
            said = response.text[:200]
            if status == 404:
                return f"{self._base} is not OpenAI-compatible: {urlsplit(str(response.url)).path} answers 404"
        return f"the server refuses the probe request with HTTP {status}: {self._clean(said)}"

    def _refused(self, response: httpx.Response) -> str:
        which = "the key was refused" if self._key else "a key is needed: give --api-key-env or --api-key-file"
        return f"{self._base} answers HTTP {response.status_code}: {which}"

    def _clean(self, text: str) -> str:
        return scrub(" ".join(text.split()), self._key)[:300]

    # Token counts

    def _fit(self, features: Features) -> tuple[TokenFit, tuple[str, ...]]:
        """What the template adds, and the words that are one token each on this server."""
        base = self._count(features, ())
        if base is None:
            self._warnings.append("the server tells no prompt tokens: prompt lengths are in words")
            return TokenFit(method="none", note="the server tells no prompt tokens"), WORDS
        total = self._count(features, WORDS)
        assert total is not None
        overhead = base - 1  # the opening word is taken as one token
        cost = total - base
        if cost == len(WORDS):
            return TokenFit(method="usage", overhead_tokens=overhead), WORDS
        good = self._sift(features, WORDS, cost, base)
        if len(good) >= MIN_WORDS:
            note = f"{len(WORDS) - len(good)} of {len(WORDS)} words left out: not one token each"
            return TokenFit(method="usage", overhead_tokens=overhead, note=note), tuple(good)
        per_word = max(0.01, cost / len(WORDS))
        self._warnings.append(f"words cost {per_word:.3g} tokens on average: prompt lengths are approximate")
        return TokenFit(method="usage", overhead_tokens=overhead, tokens_per_word=per_word), WORDS

    def _sift(self, features: Features, words: Sequence[str], cost: int, base: int) -> list[str]:
        """Words that cost one token each, by halving; small doubtful groups are dropped."""
        if cost == len(words):
            return list(words)
        if len(words) <= 8 or self._questions >= MAX_QUESTIONS:
            return []
        middle = len(words) // 2
        left = self._count(features, words[:middle])
        if left is None:
            return []
        left_cost = left - base
        return self._sift(features, words[:middle], left_cost, base) + self._sift(
            features, words[middle:], cost - left_cost, base
        )

    def _count(self, features: Features, words: Sequence[str]) -> int | None:
        """The server's count of a prompt of the opening and these words."""
        response = self._generate(features, " ".join((OPENING, *words)), 1)
        if response.status_code != 200:
            raise ConfigError(self._problem(response))
        usage = self._check_answer(response).usage
        return None if usage is None else usage.prompt_tokens

    # Facts

    def _facts(self, model: str, models: list[dict[str, Any]]) -> dict[str, Any]:
        """Model, engine, version and quantization as far as the server tells; what it does not tell is left out."""
        target = self._target
        facts: dict[str, Any] = {"url": self._base, "endpoint": target.endpoint, "model": model}
        listed = next((m for m in models if m["id"] == model), {})
        facts.update({k: listed[k] for k in ("owned_by", "root", "max_model_len") if listed.get(k) is not None})
        for name in ("quantization", "dtype", "format", "meta"):
            if listed.get(name):
                facts[name] = listed[name]
        parts = urlsplit(self._base)
        root = f"{parts.scheme}://{parts.netloc}"
        if (version := self._optional(f"{root}/version")) and isinstance(version.get("version"), str):
            facts["engine_version"] = version["version"]
            facts.update({k: version[k] for k in ("engine", "quantization", "device", "dtype") if version.get(k)})
        if "engine_version" not in facts and (info := self._optional(f"{root}/get_server_info")):
            facts.update({k: info[k] for k in ("version", "quantization", "dtype", "tp_size") if info.get(k)})
        where = metrics_url(self._base, target.metrics_url)
        if where is not None:
            try:
                response = self._http.get(where, timeout=5.0)
                facts["metrics"] = response.status_code == 200
                if engine := engine_of(response.text):
                    facts["engine"] = engine
            except httpx.HTTPError:
                facts["metrics"] = False
        facts.setdefault("engine", facts.get("owned_by", "unknown"))
        return facts

    def _optional(self, url: str) -> dict[str, Any]:
        try:
            response = self._http.get(url, timeout=5.0)
            value = response.json() if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}


def make_http(target: Target, key: str, timeout_s: float = 30.0) -> httpx.Client:
    """A plain client for everything that is not load: no proxies from the environment, no redirects."""
    headers = dict([key_header(target.api_key_header, key)]) if key else {}
    verify: ssl.SSLContext | bool = True
    if address_of(target.url).base.startswith("https"):
        verify = tls_context(target)
    return httpx.Client(headers=headers, verify=verify, timeout=timeout_s, trust_env=False, http2=False)


def read_answer(response: httpx.Response) -> Transcript:
    """The transcript of a whole response, streamed or not."""
    streaming = response.headers.get("content-type", "").startswith("text/event-stream")
    transcript = Transcript(streaming=streaming)
    transcript.feed(response.content, 0)
    transcript.finish()
    return transcript


def transport_message(url: str, error: httpx.TransportError) -> str:
    """One line for a server that could not be talked to."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"TLS to {url} failed: {cause.verify_message} (a private CA is given by --ca-file)"
        if isinstance(cause, ssl.SSLError):
            return f"TLS to {url} failed: {cause.reason or cause}"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx.ConnectError):
        return f"cannot reach {url}: {str(error) or type(error).__name__}"
    return f"{url} does not speak HTTP as expected: {str(error) or type(error).__name__}"
