"""The next token of each row of a batch: logits in, tokens out.

Every filter is a threshold. The k most likely tokens, the smallest set that holds probability p, and the tokens at
least min_p times as likely as the best are all "the tokens whose logit is at least t", so a filter needs sorted values
but never sorted tokens, and tokens of equal logit share one fate. The survivors then stand in the order of their ids,
and one uniform number u, a function of the request's seed and the token's position, picks the first whose cumulative
probability exceeds u. Since no order depends on the float noise in the logits, that noise (another batch size, another
kernel) changes a token only where u, or a token's membership, lies within `BOUNDARY` of an edge. Such draws are
counted. Greedy rows draw nothing: they take the highest logit, the lowest id among equals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.core.step import RequestSpec, TokenLogprob
from paceline.runtime.logprobs import token_logprobs
from paceline.runtime.random import uniforms

BOUNDARY = 1e-5  # in probability for draws and masses, in scaled logits for thresholds
_CHUNK_ELEMENTS = 1 << 24  # rows are worked on in chunks of at most this many logits (128 MiB in float64)


class SamplerState:
    """What sampling remembers of one request: its parameters, where it stands and, if penalised, what it has seen.

    The backend makes one at admission and calls `append` with every token it samples. `sample` takes these as rows.
    """

    __slots__ = ("_counts", "_ids", "_seen", "_slots", "masked", "outputs", "params", "penalised", "plain", "position")

    def __init__(self, spec: RequestSpec, outputs: Sequence[int] = ()) -> None:
        params = spec.sampling
        self.params = params
        self.position = len(spec.prompt)  # index, in prompt and output, of the token to be drawn next
        self.outputs = 0  # tokens generated so far
        repeats = params.repetition_penalty != 1.0
        self.penalised = repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        # Distinct tokens seen, each with its count in the output, in arrays that the tensors of a step are made from.
        self._slots: dict[int, int] = {}
        self._ids = np.zeros(64 if self.penalised else 0, dtype=np.int64)
        self._counts = np.zeros(64 if self.penalised else 0, dtype=np.float64)
        if repeats:  # the other penalties look at the output alone
            for token in spec.prompt:
                self._slot(token)
        self._advance(0)
        for token in outputs:
            self.append(token)

    def append(self, token: int) -> None:
        """Note the token that was drawn; the next draw is for the position after it."""
        if self.penalised:
            slot = self._slot(token)  # first: it may replace the arrays by longer ones
            self._counts[slot] += 1
        self._advance(1)

    def seen(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Distinct token ids that penalties look at, and how often each is in the output. Views: do not keep them."""
        size = len(self._slots)
        return self._ids[:size], self._counts[:size]

    def _advance(self, count: int) -> None:
        params = self.params
        self.position += count
        self.outputs += count
        # Too early to stop: stop tokens are masked.
        self.masked = self.outputs < params.min_tokens and bool(params.stop_token_ids)
        # The argmax of the raw logits is the answer.
        self.plain = params.temperature == 0.0 and not (self.masked or self.penalised or params.logit_bias)

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token
        return slot


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What `sample` answers; rows parallel to its argument."""

    tokens: list[int]  # the entry of a failed row means nothing
    logprobs: list[tuple[TokenLogprob, ...]]  # [] when no row asked, else one tuple a row: () or a single entry
    near_boundary: int  # draws that float noise in the logits might have turned
    failures: list[tuple[int, str]]  # (row, message), rows ascending


def sample(logits: Tensor, rows: Sequence[SamplerState]) -> SampleResult:
    """Choose a token for each row.

    `logits` is [len(rows), vocab], float32, on any device, and is not written to. Rows whose logits hold NaN or +inf,
    or allow no token at all, are reported in `failures`; the others are not affected. -inf means "never".
    """
    # NaN and +inf win a max, and -inf wins only if there is nothing else: the best logit tells whether a row is sound.
    best, choice = logits.max(dim=-1)
    chosen: list[int] = torch.where(torch.isfinite(best), choice, -1).tolist()
    failures = {row: "the model gave logits that are not finite" for row, token in enumerate(chosen) if token < 0}
    near_boundary = 0
    others = [i for i, row in enumerate(rows) if not row.plain and i not in failures]
    for chunk in _chunks(others, logits.shape[1]):
        tokens, near = _choose(logits[chunk].to(torch.float64), [rows[i] for i in chunk])
        near_boundary += near
        for i, token in zip(chunk, tokens, strict=True):
            chosen[i] = token
            if token < 0:
                failures[i] = "every token is masked out"
    return SampleResult(chosen, _requested_logprobs(logits, rows, chosen), near_boundary, sorted(failures.items()))


def _chunks(indices: list[int], vocab: int) -> Iterator[list[int]]:
    size = max(1, _CHUNK_ELEMENTS // vocab)
    for start in range(0, len(indices), size):
        yield indices[start : start + size]


def _choose(x: Tensor, rows: Sequence[SamplerState]) -> tuple[list[int], int]:
    """Tokens of rows that need more than an argmax (-1 where nothing is allowed), and draws near a boundary.

    `x` is [rows, vocab] in float64 and is overwritten.
    """
    _adjust(x, rows)
    best, choice = x.max(dim=-1)
    chosen: list[int] = torch.where(torch.isfinite(best), choice, -1).tolist()
    draws = [i for i, row in enumerate(rows) if row.params.temperature > 0.0 and chosen[i] >= 0]
    if not draws:
        return chosen, 0
    if len(draws) < len(rows):
        x, best = x[draws], best[draws]
        rows = [rows[i] for i in draws]
    weights, doubtful = _weights(_scale(x, best, rows), rows)
    uniform = uniforms([row.params.seed for row in rows], [row.position for row in rows])
    drawn, near = invert(weights, torch.from_numpy(uniform).to(x.device), doubtful)
    for i, token in zip(draws, drawn.tolist(), strict=True):
        chosen[i] = token
    return chosen, int(near.sum())


def distribution(logits: Tensor, rows: Sequence[SamplerState]) -> Tensor:
    """The probabilities that `sample` draws from, [rows, vocab] float64, for rows with a temperature above 0."""
    x = logits.to(torch.float64, copy=True)
    _adjust(x, rows)
    weights, _ = _weights(_scale(x, x.amax(dim=-1), rows), rows)
    return weights / weights.sum(dim=-1, keepdim=True)


# --- logit_bias, min_tokens, penalties -------------------------------------------------------------------------------


def _adjust(x: Tensor, rows: Sequence[SamplerState]) -> None:
    """Apply logit_bias, the min_tokens mask and the penalties to x [rows, vocab], in place and in this order."""
    biased = [(i, row.params.logit_bias) for i, row in enumerate(rows) if row.params.logit_bias]
    if biased:
        index = _scatter(x, [i for i, _ in biased], [[token for token, _ in bias] for _, bias in biased])
        x.index_put_(index, _column([value for _, bias in biased for _, value in bias], x), accumulate=True)
    masked = [i for i, row in enumerate(rows) if row.masked]
    if masked:
        x[_scatter(x, masked, [rows[i].params.stop_token_ids for i in masked])] = -torch.inf
    penalised = [i for i, row in enumerate(rows) if row.penalised]
    if penalised:
        _penalise(x, penalised, [rows[i] for i in penalised])


def _penalise(x: Tensor, where: list[int], rows: list[SamplerState]) -> None:
    """Repetition over prompt and output (CTRL's rule), then OpenAI's presence and frequency over the output."""
    seen = [row.seen() for row in rows]
    index = _scatter(x, where, [ids for ids, _ in seen])
    lengths = [len(ids) for ids, _ in seen]

    def spread(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float64), lengths)).to(x.device)

    repetition = spread([row.params.repetition_penalty for row in rows])
    presence = spread([row.params.presence_penalty for row in rows])
    frequency = spread([row.params.frequency_penalty for row in rows])
    counts = torch.from_numpy(np.concatenate([counts for _, counts in seen])).to(x.device)
    values = x[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    x[index] = values - counts * frequency - (counts > 0) * presence


def _scatter(x: Tensor, where: list[int], tokens: Sequence[Sequence[int] | NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
    """Index of x [rows, vocab] that addresses `tokens[j]` in row `where[j]`, for all j at once."""
    arrays = [np.asarray(ids, dtype=np.int64) for ids in tokens]
    rows = np.repeat(np.array(where, dtype=np.int64), [len(ids) for ids in arrays])
    return torch.from_numpy(rows).to(x.device), torch.from_numpy(np.concatenate(arrays)).to(x.device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)


# --- filters and the draw --------------------------------------------------------------------------------------------


def _scale(x: Tensor, best: Tensor, rows: Sequence[SamplerState]) -> Tensor:
    """Divide by the temperatures, in place, from the best logit down: 0 for the best, and no temperature overflows."""
    temperature = _column([row.params.temperature for row in rows], x)
    return x.sub_(best[:, None]).div_(temperature[:, None])


def _weights(z: Tensor, rows: Sequence[SamplerState]) -> tuple[Tensor, Tensor]:
    """Weights to draw by, exp(z) or 0 where a filter says so, [rows, vocab]; and the weight in doubt, [rows].

    z is [rows, vocab], float64, its maximum 0 in each row.
    """
    weights = z.exp()
    doubtful = torch.zeros(len(rows), dtype=torch.float64, device=z.device)
    filtered = [i for i, row in enumerate(rows) if _filters(row.params)]
    if filtered:
        index = torch.tensor(filtered, device=z.device)
        part = z if len(filtered) == len(rows) else z[index]
        threshold, doubtful[index] = _thresholds(part, [rows[i].params for i in filtered])
        weights[index] = weights[index].masked_fill_(part < threshold[:, None], 0.0)
    return weights, doubtful


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _thresholds(z: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """The least z that passes top_k, then top_p of what is left, then min_p; and the weight in doubt.

    z is [rows, vocab] with maximum 0; both results are [rows]. In doubt are the tokens that would join or leave if
    logits moved by `BOUNDARY`, or cumulated probabilities did. The best token never leaves.
    """
    threshold = torch.full((len(params),), -torch.inf, dtype=torch.float64, device=z.device)
    doubtful = torch.zeros_like(threshold)
    ranked = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    if ranked:
        index = torch.tensor(ranked, device=z.device)
        part = z if len(ranked) == len(params) else z[index]
        threshold[index], doubtful[index] = _rank_thresholds(part, [params[i] for i in ranked])
    bounded = [i for i, p in enumerate(params) if p.min_p > 0.0]
    if bounded:
        index = torch.tensor(bounded, device=z.device)
        part = z if len(bounded) == len(params) else z[index]
        floor = _column([min(params[i].min_p, 1.0) for i in bounded], z).log_()
        band = ((part - floor[:, None]).abs_() <= BOUNDARY) & (part < 0.0)
        doubtful[index] += torch.where(band, part, -torch.inf).exp_().sum(dim=-1)
        threshold[index] = torch.maximum(threshold[index], floor)
    return threshold, doubtful


def _rank_thresholds(z: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """`_thresholds` for the two filters that look at the order of the values: top_k and top_p."""
    vocab = z.shape[1]
    ordered = _descending(z)
    weights = ordered.exp()
    top_k = torch.tensor([min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params], device=z.device)
    least = ordered.gather(1, top_k[:, None] - 1)  # the k-th value; equals of it stay too
    doubtful = _band_weight(ordered, weights, top_k)
    top_p = [p.top_p for p in params]
    if min(top_p) < 1.0:
        weights.masked_fill_(ordered < least, 0.0)
        cumulated = weights.cumsum(dim=-1)
        total = cumulated[:, -1:]
        before = cumulated - weights  # the weight of all more likely tokens: a token stays while this is below p
        edge = _column(top_p, z)[:, None] * total
        count = torch.searchsorted(before, edge).clamp_(min=1)
        nucleus = ordered.gather(1, count - 1)
        off = _column(top_p, z)[:, None] >= 1.0
        least = torch.maximum(least, nucleus.masked_fill(off, -torch.inf))
        at_edge = (before - edge).abs_() <= BOUNDARY * total
        at_edge[:, 0] = False
        in_doubt = torch.where(at_edge, weights, 0.0).sum(dim=-1)
        in_doubt += _band_weight(ordered, weights, count[:, 0])
        doubtful += in_doubt.masked_fill_(off[:, 0], 0.0)
    return least[:, 0], doubtful


def _band_weight(ordered: Tensor, weights: Tensor, count: Tensor) -> Tensor:
    """Weight of the tokens about as likely as the last of the first `count`, if the one after it is; else 0. [rows]."""
    vocab = ordered.shape[1]
    last = ordered.gather(1, count[:, None] - 1)
    following = ordered.gather(1, count.clamp(max=vocab - 1)[:, None])
    close = (following >= last - BOUNDARY) & (count < vocab)[:, None]
    return torch.where(close & ((ordered - last).abs_() <= BOUNDARY), weights, 0.0).sum(dim=-1)


def _descending(z: Tensor) -> Tensor:
    """Values of each row, largest first. numpy's vector sort is thirty times as fast as torch's on a CPU."""
    if z.device.type == "cpu":
        return torch.from_numpy(np.sort(z.neg().numpy(), axis=-1)).neg_()
    return z.sort(dim=-1, descending=True).values


def invert(weights: Tensor, uniform: Tensor, doubtful: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of the cumulative distribution: the first token whose cumulated weight exceeds `uniform` of the total.

    weights: [rows, vocab] float64, not negative, not all 0. uniform: [rows] in [0, 1). doubtful: [rows], the weight of
    tokens whose membership is in doubt. Returns token ids [rows] int64 and, [rows] bool, whether the draw lies so near
    to the edge of the token's interval that noise might have turned it.
    """
    cumulated = weights.cumsum(dim=-1)
    total = cumulated[:, -1:]
    # Below the total in spite of rounding, else the last token would win even at weight 0.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cumulated, target, right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, token)
    if bool((weight == 0.0).any()):
        # A parallel scan may let the sum creep up over a token of weight 0. Such a token must never come out.
        token = torch.where(weight > 0.0, token, _next_possible(weights, token))
        weight = weights.gather(1, token)
    upper = cumulated.gather(1, token)
    lower = upper - weight
    slack = BOUNDARY * total + doubtful[:, None]
    unsure = doubtful[:, None] > 0.0
    near = (target - lower <= slack) & ((lower > 0.0) | unsure) | (upper - target <= slack) & ((upper < total) | unsure)
    return token[:, 0], near[:, 0]


def _next_possible(weights: Tensor, token: Tensor) -> Tensor:
    """The first token at or after `token` [rows, 1] whose weight is not 0, else the most likely one. [rows, 1]."""
    ids = torch.arange(weights.shape[1], device=weights.device)
    possible = (weights > 0.0) & (ids >= token)
    first = possible.to(torch.uint8).argmax(dim=-1, keepdim=True)
    return torch.where(possible.gather(1, first), first, weights.argmax(dim=-1, keepdim=True))


# --- logprobs -------------------------------------------------------------------------------------------------------


def _requested_logprobs(
    logits: Tensor, rows: Sequence[SamplerState], tokens: list[int]
) -> list[tuple[TokenLogprob, ...]]:
    """One tuple for each row, () for rows that did not ask or failed; [] if none asked."""
    asked = [(i, row.params.logprobs) for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not asked:
        return []
    answers: list[tuple[TokenLogprob, ...]] = [()] * len(rows)
    sound = [(i, top) for i, top in asked if tokens[i] >= 0]
    if sound:
        where = [i for i, _ in sound]
        found = token_logprobs(logits[where], [tokens[i] for i in where], [top for _, top in sound])
        for i, answer in zip(where, found, strict=True):
            answers[i] = (answer,)
    return answers
