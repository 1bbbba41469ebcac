"""The next token of each row of a batch: logits in, tokens out.

Every filter is a threshold. The k most likely tokens, the smallest set that holds probability p, and the tokens at
least min_p times as likely as the best are all "the tokens that weigh at least t", so a filter needs sorted weights but
never sorted tokens, and tokens of equal weight share one fate. The survivors then stand in the order of their ids,
and one uniform number u, a function of the request's seed and the token's position, picks the first whose cumulative
probability exceeds u. Since no order depends on the float noise in the logits, that noise (another batch size, another
kernel) changes a token only where u, or a token's membership, lies within `BOUNDARY` of an edge. Such draws are
counted. Greedy rows draw nothing: they take the highest logit, the lowest id among equals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.core.step import RequestSpec, TokenLogprob
from paceline.runtime.kernels.native import native, unavailable
from paceline.runtime.logprobs import rows_at_once, token_logprobs
from paceline.runtime.random import uniforms

BOUNDARY = 1e-5  # in probability for draws and sums, in logits over temperature for thresholds
NOT_FINITE, MASKED_OUT = -1, -2  # instead of a token
_FAILURES = {NOT_FINITE: "the model gave logits that are not finite", MASKED_OUT: "every token is masked out"}


class SamplerState:
    """What sampling remembers of one request: its parameters, where it stands and, if penalised, what it has seen.

    The backend makes one at admission and calls `append` with every token it samples. `sample` takes these as rows.
    """

    __slots__ = (
        *("_counts", "_ids", "_slots", "adjusted", "masked"),
        *("outputs", "params", "penalised", "plain", "position"),
    )

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
        # The logits are changed before a token is chosen.
        self.adjusted = self.masked or self.penalised or bool(params.logit_bias)
        # The argmax of the raw logits is the answer.
        self.plain = params.temperature == 0.0 and not self.adjusted

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
    choose = _choose_natively if logits.device.type == "cpu" and unavailable() is None else _choose_all
    chosen, near_boundary = choose(logits, rows)
    failures = [(i, _FAILURES[token]) for i, token in enumerate(chosen) if token < 0]
    return SampleResult(chosen, _requested_logprobs(logits, rows, chosen), near_boundary, failures)


# --- which token, by the native kernel -------------------------------------------------------------------------------


def _choose_natively(logits: Tensor, rows: Sequence[SamplerState]) -> tuple[list[int], int]:
    """As `_choose_all`; the kernel (`paceline_native.sample`) sorts no more than what is near a threshold."""
    # Rows that are adjusted first go along as greedy ones: that tells whether their logits are sound.
    chosen, near_boundary = _draw_natively(logits, rows, greedy=[row.plain or row.adjusted for row in rows])
    adjusted = [i for i, row in enumerate(rows) if row.adjusted and chosen[i] >= 0]
    size = rows_at_once(logits)
    for start in range(0, len(adjusted), size):
        chunk = adjusted[start : start + size]
        part = [rows[i] for i in chunk]
        x = logits[chunk].to(torch.float64)
        _adjust(x, part)
        # Rounded about the best logit: as fine as a draw is exact, however large the logits are.
        x = x.sub_(x.amax(dim=-1, keepdim=True)).to(torch.float32)
        tokens, near = _draw_natively(x, part, greedy=[row.params.temperature == 0.0 for row in part])
        near_boundary += near
        for i, token in zip(chunk, tokens, strict=True):
            chosen[i] = token if token >= 0 else MASKED_OUT
    return chosen, near_boundary


def _draw_natively(x: Tensor, rows: Sequence[SamplerState], greedy: Sequence[bool]) -> tuple[list[int], int]:
    """Tokens (NOT_FINITE where there is none to take) and draws near a boundary. x [rows, vocab] is float32."""
    params = [row.params for row in rows]
    tokens, near = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.uint8)
    native().sample(
        x if x.stride(1) == 1 else x.contiguous(),
        np.array([0.0 if is_greedy else p.temperature for p, is_greedy in zip(params, greedy, strict=True)]),
        np.array([p.top_k for p in params], dtype=np.int64),
        np.array([p.top_p for p in params], dtype=np.float64),
        np.array([p.min_p for p in params], dtype=np.float64),
        np.zeros(len(rows)) if all(greedy) else uniforms([p.seed for p in params], [row.position for row in rows]),
        tokens,
        near,
    )
    return tokens.tolist(), int(near.sum())


# --- which token, by torch -------------------------------------------------------------------------------------------


def _choose_all(logits: Tensor, rows: Sequence[SamplerState]) -> tuple[list[int], int]:
    """The token of each row (or NOT_FINITE or MASKED_OUT), and how many draws lie near a boundary."""
    # NaN and +inf win a max, and -inf wins only if there is nothing else: the best logit tells whether a row is sound.
    best, choice = logits.max(dim=-1)
    chosen: list[int] = torch.where(torch.isfinite(best), choice, NOT_FINITE).tolist()
    near_boundary = 0
    others = [i for i, row in enumerate(rows) if not row.plain and chosen[i] >= 0]
    size = rows_at_once(logits)
    for start in range(0, len(others), size):
        chunk = others[start : start + size]
        part = logits if len(chunk) == len(rows) else logits[chunk]
        tokens, near = _choose(part.to(torch.float64, copy=True), [rows[i] for i in chunk])
        near_boundary += near
        for i, token in zip(chunk, tokens, strict=True):
            chosen[i] = token if token >= 0 else MASKED_OUT
    return chosen, near_boundary


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
    weights, doubtful = _weigh(x, best, rows)
    uniform = uniforms([row.params.seed for row in rows], [row.position for row in rows])
    drawn, near = invert(weights, torch.from_numpy(uniform).to(x.device), doubtful)
    for i, token in zip(draws, drawn.tolist(), strict=True):
        chosen[i] = token
    return chosen, int(near.sum())


def distribution(logits: Tensor, rows: Sequence[SamplerState]) -> Tensor:
    """The probabilities that `sample` draws from, [rows, vocab] float64, for rows with a temperature above 0."""
    x = logits.to(torch.float64, copy=True)
    _adjust(x, rows)
    weights, _ = _weigh(x, x.amax(dim=-1), rows)
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


def _weigh(x: Tensor, best: Tensor, rows: Sequence[SamplerState]) -> tuple[Tensor, Tensor]:
    """Weights to draw by, [rows, vocab], made in the place of the logits x; and the weight in doubt, [rows].

    The best token weighs 1 and the others less, so that no temperature, however small, can overflow.
    """
    temperature = _column([row.params.temperature for row in rows], x)
    weights = x.sub_(best[:, None]).div_(temperature[:, None]).exp_()
    doubtful = torch.zeros_like(best)
    filtered = [i for i, row in enumerate(rows) if _filters(row.params)]
    if len(filtered) == len(rows):
        threshold, doubtful = _thresholds(weights, [row.params for row in rows])
        weights.masked_fill_(weights < threshold, 0.0)
    elif filtered:
        index = torch.tensor(filtered, device=x.device)
        part = weights[index]
        threshold, doubtful[index] = _thresholds(part, [rows[i].params for i in filtered])
        weights[index] = part.masked_fill_(part < threshold, 0.0)
    return weights, doubtful


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _thresholds(weights: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """The least weight that passes top_k, then top_p of what is left, then min_p; and the weight in doubt.

    weights is [rows, vocab], the largest of each row 1; the results are [rows, 1] and [rows]. In doubt are the tokens
    that would come or go if logits moved by `BOUNDARY`, or cumulated probabilities did. The best token never goes.
    """
    vocab = weights.shape[1]
    ranking = _Ranking(weights)
    top_k = torch.tensor([[min(p.top_k, vocab) if p.top_k > 0 else vocab] for p in params], device=weights.device)
    top_p = _column([p.top_p for p in params], weights)[:, None]
    min_p = _column([min(p.min_p, 1.0) for p in params], weights)[:, None]

    first = vocab - top_k
    least = ranking.sorted.gather(1, first)
    doubtful = ranking.weight_about(least, unless_last=first)

    # What top_p cuts weighs at most 1 - p of what top_k left; the ranking counts from what top_k cut.
    cut = ranking.weight_below(ranking.rank(least))
    left = ranking.total - cut
    edge = cut + (1.0 - top_p) * left
    first = ranking.rank_of_weight(edge).clamp_(max=vocab - 1)
    nucleus = ranking.sorted.gather(1, first)
    in_doubt = ranking.weight_about(nucleus, unless_last=first)
    in_doubt += ranking.weight_at(edge - BOUNDARY * left, edge + BOUNDARY * left)
    doubtful += in_doubt.masked_fill_(top_p >= 1.0, 0.0)
    least = torch.maximum(least, nucleus.masked_fill_(top_p >= 1.0, 0.0))

    doubtful += ranking.weight_about(min_p)
    return torch.maximum(least, min_p), doubtful[:, 0]


class _Ranking:
    """The weights of each row in ascending order, and sums over ranges of that order. All arguments are [rows, 1]."""

    def __init__(self, weights: Tensor) -> None:
        self.sorted = _sort(weights)
        self._cumulated = self.sorted.cumsum(dim=-1)
        self.total = self._cumulated[:, -1:]
        self._best = weights.shape[1] - 1

    def rank(self, weight: Tensor, *, after: bool = False) -> Tensor:
        """How many tokens weigh less (`after`: no more) than `weight`."""
        return torch.searchsorted(self.sorted, weight, right=after)

    def rank_of_weight(self, mass: Tensor) -> Tensor:
        """How many of the lightest tokens weigh no more than `mass` together."""
        return torch.searchsorted(self._cumulated, mass, right=True)

    def weight_below(self, rank: Tensor) -> Tensor:
        """The weight of the `rank` lightest tokens."""
        return torch.where(rank > 0, self._cumulated.gather(1, (rank - 1).clamp_(min=0)), 0.0)

    def weight_about(self, weight: Tensor, *, unless_last: Tensor | None = None) -> Tensor:
        """The weight of all tokens but the best whose logit is within `BOUNDARY` of that of `weight`.

        `unless_last` is the rank of a token of this weight: if none before it is as near, the answer is 0.
        """
        low, high = self.rank(weight * (1.0 - BOUNDARY)), self.rank(weight * (1.0 + BOUNDARY), after=True)
        high = high.clamp_(max=self._best) if unless_last is None else torch.where(low < unless_last, high, low)
        return (self.weight_below(high) - self.weight_below(low)).clamp_(min=0.0)

    def weight_at(self, low_mass: Tensor, high_mass: Tensor) -> Tensor:
        """The weight of all tokens but the best at which the cumulated weight lies between these."""
        low = torch.searchsorted(self._cumulated, low_mass)
        high = self.rank_of_weight(high_mass).clamp_(max=self._best)
        return (self.weight_below(high) - self.weight_below(low)).clamp_(min=0.0)


def _sort(weights: Tensor) -> Tensor:
    """Each row ascending. On a CPU numpy's vectorised sort is twenty times as fast as torch's."""
    if weights.device.type == "cpu":
        return torch.from_numpy(np.sort(weights.numpy(), axis=-1))
    return weights.sort(dim=-1).values


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
