"""The kernels of a step on one chip of a deployment, one `Operation` each, with the work that each does.

Three groups, by what their time depends on: the tokens of the step (matrix multiplies, experts, element-wise kernels,
collectives), its rows (head and sampling), and what its rows attend to (attention). Sizes are those of the chip with
the most to do.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.cost.deployment import Deployment
from paceline.cost.efficiency import Kernels, KernelTime
from paceline.cost.links import Links
from paceline.cost.operation import Operation, operation
from paceline.cost.skew import even_equivalent, hottest_share
from paceline.cost.split import Split

ACTIVATION_BYTES = 2.0  # activations are 16 bits whatever the weights are
# Short rows (drafts to verify, the end of a prompt) are bound by reading what is before them, as decodes are. From this
# length on a row does more FLOP for each byte of KV than any chip can keep up with.
SHORT = 1024
SAMPLER_BYTES = 12.0  # traffic for one logit of one row: read, widened, normalised, compared


class Work:
    """Makes operations of a deployment."""

    def __init__(self, deployment: Deployment, kernels: Kernels) -> None:
        self.deployment = deployment
        self.model = deployment.model
        self.kernels = kernels
        self.links = Links(deployment, kernels)
        formats = deployment.chip.tflops
        precision = deployment.precision
        self.expert_dtype = precision.multiplied_in(formats)
        self.dtype = self.expert_dtype if precision.scope != "experts" else "bf16"

    def rank_tokens(self, tokens: int) -> int:
        """Of the copy of the attention with the most."""
        return -(-tokens // self.deployment.dp)

    # What depends on the tokens.

    def of_tokens(self, tokens: int) -> Iterator[Operation]:
        """Everything but attention itself and the head. `tokens` are those of the step, over all copies."""
        mine = self.rank_tokens(tokens)
        model, hidden = self.model, self.model.hidden
        yield self._stream("embedding", 1, mine, 2 * hidden)
        yield from self._projections(mine)
        yield self._stream("norms", 2 * model.layers, mine, 4 * hidden)
        if model.dense_layers:
            yield from self._mlp("mlp", model.dense_layers, mine, model.ffn)
        if model.experts is not None:
            yield from self._experts(tokens, mine)
        yield from self.links.of_tokens(tokens, mine)

    def _projections(self, tokens: int) -> Iterator[Operation]:
        deployment, model = self.deployment, self.model
        layers, hidden, heads = model.layers, model.hidden, model.heads // deployment.tp
        latent = model.latent
        if latent is None:
            wide = (heads + 2 * deployment.kv_heads_per_chip) * model.head_dim
            yield self._gemm("qkv", layers, tokens, wide, hidden)
            out = heads * model.head_dim
        else:
            down = latent.q_rank + latent.kv_rank + latent.rope_dim
            query = heads * (latent.nope_dim + latent.rope_dim)
            yield self._gemm("latent down", layers, tokens, down if latent.q_rank else down + query, hidden)
            if latent.q_rank:
                yield self._gemm("queries up", layers, tokens, query, latent.q_rank)
            # Keys and values up, or, absorbed in a decode, queries down and values up: as many multiplies.
            yield self._gemm("latent up", layers, tokens, heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
            wide, out = down + query, heads * latent.value_dim
        yield self._stream("rotary and cache", layers, tokens, 2 * wide)
        yield self._gemm("attention out", layers, tokens, hidden, out)

    def _mlp(self, name: str, layers: int, tokens: int, width: int) -> Iterator[Operation]:
        """Gate and up in one multiply, the activation, down; `width` is that of the whole MLP."""
        up, part = self.model.matrices - 1, width // self.deployment.tp
        yield self._gemm(f"{name} up", layers, tokens, up * part, self.model.hidden)
        yield self._stream(f"{name} activation", layers, tokens, (up + 1) * part)
        yield self._gemm(f"{name} down", layers, tokens, self.model.hidden, part)

    def _experts(self, tokens: int, mine: int) -> Iterator[Operation]:
        deployment, model, experts = self.deployment, self.model, self.model.experts
        assert experts is not None
        layers = model.moe_layers
        yield self._gemm("router", layers, mine, experts.count, model.hidden)
        if experts.shared_inter:
            yield from self._mlp("shared expert", layers, mine, experts.shared_inter)
        width = max(1, experts.inter // deployment.expert_tp)
        # The chip with the most tokens is waited for; unevenly chosen experts are as fewer evenly chosen ones.
        busiest = hottest_share(tokens, experts.count, experts.active, deployment.ep, deployment.expert_skew)
        count = even_equivalent(experts.count, experts.active, deployment.expert_skew)
        seen = max(1, round(tokens * busiest))
        time = self.kernels.experts(
            seen,
            model.hidden,
            width,
            max(count, deployment.ep),
            experts.active,
            ep=deployment.ep,
            dtype=self.expert_dtype,
            weight_bytes=deployment.expert_weight_bytes,
            matrices=model.matrices,
        )
        pairs = seen * experts.active / deployment.ep
        touched = count * (1.0 - (1.0 - min(1.0, experts.active / count)) ** seen) / deployment.ep
        numbers = float(model.matrices * model.hidden * width)
        moved = touched * numbers * deployment.expert_weight_bytes + 2 * pairs * model.hidden * ACTIVATION_BYTES
        yield operation("experts", layers, 2.0 * pairs * numbers, moved, time)

    # What depends on the rows.

    def of_rows(self, rows: int) -> Iterator[Operation]:
        """Head and sampling, on the last token of each row alone."""
        deployment, model = self.deployment, self.model
        mine = self.rank_tokens(rows)
        if not mine:
            return
        part = -(-model.vocab // deployment.tp)
        size = deployment.table_weight_bytes
        time = self.kernels.gemm(mine, part, model.hidden, weight_bytes=size)
        numbers = float(part) * model.hidden
        moved = numbers * size + ACTIVATION_BYTES * mine * (part + model.hidden)
        yield operation("head", 1, 2.0 * mine * numbers, moved, time)
        moved = SAMPLER_BYTES * mine * model.vocab
        yield operation("sampling", 1, 0.0, moved, self.kernels.stream(moved))
        yield from self.links.of_rows(mine, model.vocab)

    # What depends on what is attended to.

    def of_attention(self, found: Split) -> Iterator[Operation]:
        """Decodes and prefills, in layers that see everything and in layers that slide."""
        model = self.model
        full, slides = model.full_layers, model.window_layers
        if found.decodes:
            if full:
                yield self._decode("decode attention", full, found.decodes, found.context)
            if slides:
                yield self._decode("decode attention, window", slides, found.decodes, found.decode_window(model.window))
        if found.prefills:
            if full:
                yield self._prefill("prefill attention", full, found, found.pairs, found.seen)
            if slides:
                pairs, seen = found.pairs_window(model.window), found.seen_window(model.window)
                yield self._prefill("prefill attention, window", slides, found, pairs, seen)

    def _decode(self, name: str, layers: int, rows: int, context: int) -> Operation:
        time, flops, moved = self._reading(rows, context)
        return operation(name, layers, flops, moved, time)

    def _reading(self, rows: int, context: int) -> tuple[KernelTime, float, float]:
        """(time, FLOPs, bytes) of one query a row against `context` positions, in one layer."""
        deployment, model = self.deployment, self.model
        heads, latent = model.heads // deployment.tp, model.latent
        rows, context = self.rank_tokens(rows), self.rank_tokens(context)
        dim = model.head_dim if latent is None else latent.kv_rank + latent.rope_dim
        size = deployment.kv_precision.bytes
        time = self.kernels.decode_attention(
            rows,
            context,
            heads=heads,
            kv_heads=deployment.kv_heads_per_chip if latent is None else 1,
            head_dim=dim,
            kv_bytes=size,
            latent=latent is not None,
        )
        return time, 4.0 * context * heads * dim, context * deployment.kv_numbers_per_chip * size

    def _prefill(self, name: str, layers: int, found: Split, pairs: int, seen: int) -> Operation:
        deployment, model = self.deployment, self.model
        heads, latent = model.heads // deployment.tp, model.latent
        # Scores are as wide as a key, outputs as a value: the mean of both counts.
        dim = model.head_dim if latent is None else (latent.nope_dim + latent.rope_dim + latent.value_dim) // 2
        rows, tokens = self.rank_tokens(found.prefills), self.rank_tokens(found.prefill_tokens)
        share = self.rank_tokens(pairs)
        kv_heads = deployment.kv_heads_per_chip if latent is None else heads
        time = self.kernels.prefill_attention(rows, tokens, share, heads=heads, kv_heads=kv_heads, head_dim=dim)
        if found.each <= SHORT:
            reading = self._reading(found.prefills, seen)[0]
            time = max(time, reading, key=lambda kernel: kernel.seconds)
        moved = self.rank_tokens(seen) * deployment.kv_numbers_per_chip * deployment.kv_precision.bytes
        moved += 2 * ACTIVATION_BYTES * tokens * heads * dim
        return operation(name, layers, 4.0 * share * heads * dim, moved, time)

    # Kernels.

    def _gemm(self, name: str, calls: int, m: int, n: int, k: int) -> Operation:
        size = self.deployment.linear_weight_bytes
        time = self.kernels.gemm(m, n, k, dtype=self.dtype, weight_bytes=size)
        moved = size * n * k + ACTIVATION_BYTES * m * (n + k)
        return operation(name, calls, 2.0 * m * n * k, moved, time)

    def _stream(self, name: str, calls: int, tokens: int, numbers: int) -> Operation:
        """Moves `numbers` activations a token."""
        moved = ACTIVATION_BYTES * tokens * numbers
        return operation(name, calls, 0.0, moved, self.kernels.stream(moved))
