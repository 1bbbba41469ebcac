"""The page of one run, for a reader who was not there: verdict, what was asked, numbers, figures, how to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

import msgspec

from paceline.measure.analysis import Analysis
from paceline.measure.gates import joint_confidence
from paceline.measure.metrics import LATENCIES, POOLED
from paceline.measure.report import figures, words
from paceline.measure.report.asked import asked
from paceline.measure.report.engines import engines
from paceline.measure.report.html import (
    Cell,
    Entry,
    Tile,
    code,
    details,
    facts,
    heading,
    page,
    paragraph,
    reasons,
    table,
    tiles,
    verdict,
)
from paceline.measure.report.html import figures as figure_grid
from paceline.measure.stats import Quantile, percentile
from paceline.measure.summary import Rate, Summary, Throughput
from paceline.measure.verdict import client_lateness

WHY = Cell("why", style="left")
GLOSSARY = (
    ("response, from the schedule", "The zero is the moment the request was due, so waiting in the client counts."),
    ("service, from the send", "The zero is the moment the request left. It hides every queue in front of the server."),
    ("TTFT", "Time to first token: the first event that carries a generated token of any channel."),
    ("first visible", "The first token that a user sees; reasoning and tool calls are not."),
    ("ITL", "Gap per token. A read that carries k tokens after a gap enters as gap / k, k times."),
    ("TPOT", "Time per output token: (last − first) / (tokens − those that came with the first)."),
    ("E2E", "Until the last token. `close` is until the end of the response."),
    ("goodput", "Requests that succeeded and met every objective, out of all that were sent."),
    ("with failures", "The same percentile with every failed request as infinitely slow."),
    ("interval", "95 % by order statistics, without assuming any distribution; “?” where n is too small for a bound."),
    ("thin", "Fewer than ten values lie beyond this percentile."),
    ("plateau", "The steady stretch: without the ramp at the start and the drain at the end."),
)


def render(analysis: Analysis) -> str:
    """The whole page."""
    title = title_of(analysis)
    return page(
        title,
        [
            heading(title, 1),
            paragraph(_subtitle(analysis), "soft"),
            verdict(analysis.verdict.outcome.value, analysis.verdict.headline),
            reasons([reason for reason in analysis.verdict.reasons if reason.text not in analysis.verdict.headline]),
            tiles(_tiles(analysis)),
            heading("What was asked"),
            *asked(analysis),
            *_gates(analysis),
            heading("What happened"),
            figure_grid(figures.of_run(analysis)),
            heading("Latencies"),
            paragraph(_latency_note(analysis), "soft small"),
            _latencies(analysis),
            heading("Throughput and success"),
            _throughput(analysis),
            *_errors(analysis),
            *_classes(analysis),
            *_server(analysis),
            *engines(analysis.manifest),
            heading("How far to trust the client"),
            _client(analysis),
            heading("How to run it again"),
            *_again(analysis),
            heading("Words"),
            facts(GLOSSARY),
        ],
    )


def title_of(analysis: Analysis) -> str:
    target = analysis.manifest.target
    model = str(target.get("model") or "unknown model")
    return analysis.plan.name or f"{model.rsplit('/', 1)[-1]} under load"


def _subtitle(analysis: Analysis) -> str:
    manifest, target = analysis.manifest, analysis.manifest.target
    engine = " ".join(str(target[key]) for key in ("engine", "engine_version") if target.get(key))
    parts = [
        str(target.get("model") or ""),
        engine,
        str(target.get("url") or analysis.plan.target.url),
        manifest.created[:16].replace("T", " ") + (" UTC" if manifest.created.endswith("+00:00") else ""),
        "simulated, not measured" if manifest.kind == "simulated" else "",
    ]
    return " · ".join(part for part in parts if part)


def _tiles(analysis: Analysis) -> Iterable[Tile]:
    run = analysis.run
    for name, label in (("ttft", "First token"), ("itl", "Between tokens"), ("e2e", "Whole answer")):
        found = run.latencies[name]
        p50, p95, p99 = (found.quantile(q) for q in (50.0, 95.0, 99.0))
        if p50 is not None and p95 is not None and p99 is not None:
            more = f"median; p95 {words.duration(p95.value)}, p99 {words.duration(p99.value)}"
            yield Tile(label, words.duration(p50.value), more)
    best = run.plateau or run.whole
    if best is not None:
        where = "plateau" if run.plateau is not None else "whole run"
        value = words.count(best.output_tokens.per_s)
        yield Tile("Output tokens/s", value, f"{where}; {words.count(best.requests.per_s)} requests/s")
    if run.goodput.slos:
        slos = ", ".join(map(str, run.goodput.slos))
        yield Tile("Goodput", words.percent(run.goodput.share), slos)
    yield Tile("Success", words.percent(run.success_share), f"{run.succeeded:,} of {len(run.requests):,} sent")
    if analysis.cost is not None and analysis.cost.per_million_output is not None:
        per_request = analysis.cost.per_request
        more = f"{words.money(per_request)} a request; at {analysis.cost.price_per_hour:g} per hour"
        yield Tile("Cost, 1M tokens", words.money(analysis.cost.per_million_output), more)


def _gates(analysis: Analysis) -> Iterable[str]:
    results = analysis.verdict.gates
    if not results:
        return
    yield heading("Gates")
    rows: list[list[Entry]] = [
        [
            Cell(result.gate.text, style="left"),
            Cell(result.status.value, style=f"tag {result.status.value}"),
            Cell(result.value_text, _between(result.low, result.high) if result.gate.unit == "s" else ""),
            result.bound_text,
            f"{result.n:,}",
            Cell(result.why, style="wide"),
        ]
        for result in results
    ]
    yield table(["gate", "", "measured", "bound", "n", WHY], rows)
    note = "Each answer holds at 95 % confidence."
    if len(results) > 1:
        note += f" All {len(results)} together: at least {words.percent(joint_confidence([r.gate for r in results]))}."
    if analysis.baseline:
        note += f" Baseline: run {analysis.baseline}."
    yield paragraph(note, "soft small")


def _between(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return ""
    return words.between(low, high)


def _latency_note(analysis: Analysis) -> str:
    run = analysis.run
    note = (
        f"Percentiles by {run.percentile_method} interpolation, of successful requests. Below each its 95 % interval."
    )
    note += " Grey: thin, fewer than ten values beyond it."
    return note + (" The last column has failed requests as infinitely slow." if run.failed else "")


def _latencies(analysis: Analysis) -> str:
    run = analysis.run
    labels = [entry.label for entry in run.latencies["ttft"].quantiles]
    head: list[Entry] = ["", "n", "mean", *labels, "max"]
    if run.failed:
        head.append(Cell(labels[-1], "with failures"))
    rows: list[list[Entry]] = []
    for name, meaning in (LATENCIES | POOLED).items():
        found = run.latencies[name]
        if found.n or found.n_undefined:
            row: list[Entry] = [Cell(name, meaning, "left"), _n_cell(found), words.duration(found.mean)]
            row += [_quantile_cell(entry) for entry in found.quantiles]
            row.append(words.duration(found.high))
            if run.failed:
                row.append(words.duration(found.tail[-1].value))
            rows.append(row)
    return table(head, rows)


def _n_cell(found: Summary) -> Cell:
    parts = [
        f"{found.n_undefined} undefined" if found.n_undefined else "",
        f"{found.n_not_applicable} n/a" if found.n_not_applicable else "",
        f"{found.n_failed} failed" if found.n_failed else "",
    ]
    return Cell(f"{found.n:,}", ", ".join(part for part in parts if part))


def _quantile_cell(entry: Quantile) -> Cell:
    title = f"n = {entry.n:,}" + ("; too few for a gate" if not entry.gateable else "")
    return Cell(words.duration(entry.value), words.interval(entry), "thin" if entry.thin and entry.n else "", title)


def _throughput(analysis: Analysis) -> str:
    run = analysis.run
    spans: list[tuple[str, Throughput]] = []
    if run.whole is not None:
        spans.append(("whole run", run.whole))
    if run.plateau is not None:
        spans.append(("plateau", run.plateau))
    rows: list[list[Entry]] = [
        [
            Cell(name, f"{words.duration(t.span.start_s)} to {words.duration(t.span.end_s)}", "left"),
            words.duration(t.span.seconds),
            _rate(t.requests),
            _rate(t.input_tokens),
            _rate(t.output_tokens),
            _rate(t.total_tokens),
            words.count(t.mean_in_flight),
        ]
        for name, t in spans
    ]
    head = ["", "length", "requests/s", "input tokens/s", "output tokens/s", "all tokens/s", "mean in flight"]
    return table(head, rows) if rows else paragraph("No response ended, so there is no rate.")


def _rate(rate: Rate) -> Cell:
    unknown = f"{rate.n_unknown} requests without a count" if rate.n_unknown else ""
    return Cell(words.count(rate.per_s, missing="unknown"), unknown or f"{words.count(rate.known)} in all")


def _errors(analysis: Analysis) -> Iterable[str]:
    run = analysis.run
    rows = [
        ("sent", f"{len(run.requests):,}"),
        ("succeeded", f"{run.succeeded:,}"),
        ("failed", ", ".join(f"{error} {n:,}" for error, n in run.errors.items())),
        ("tried again after a rejection", f"{run.rejected_attempts:,}" if run.rejected_attempts else ""),
        ("cut off by the end of the run", f"{run.cancelled:,}" if run.cancelled else ""),
        ("never sent", f"{run.unsent:,}" if run.unsent else ""),
        ("output tokens counted by", ", ".join(f"{source} ({n:,})" for source, n in run.token_sources.items())),
    ]
    yield facts(rows)
    seen: dict[str, str] = {}
    for request in run.requests:
        if request.record.error is not None:
            seen.setdefault(request.record.error.value, request.record.error_message)
    if seen:
        yield table(
            ["error", Cell("first message", style="left")],
            [[Cell(k, style="left"), Cell(v, style="wide")] for k, v in seen.items()],
        )


def _classes(analysis: Analysis) -> Iterable[str]:
    if not analysis.run.classes:
        return
    yield heading("By class of traffic", 3)
    rows: list[list[Entry]] = []
    for name, run in analysis.run.classes.items():
        ttft, itl = run.latencies["ttft"], run.latencies["itl"]
        cells = [_quantile_cell(q) for q in (*ttft.quantiles[:3:2], *itl.quantiles[:3:2])]
        rows.append([name, f"{len(run.requests):,}", words.percent(run.success_share), *cells,
                     words.percent(run.goodput.share)])  # fmt: skip
    yield table(["class", "sent", "success", "TTFT p50", "TTFT p95", "ITL p50", "ITL p95", "goodput"], rows)


def _server(analysis: Analysis) -> Iterable[str]:
    check = analysis.crosscheck
    yield heading("What the server says of itself")
    if not check.readings:
        yield paragraph(f"Nothing: {check.why}.")
        return
    if check.means:
        rows: list[list[Entry]] = [
            [
                row.name.removesuffix("_s"),
                Cell(words.duration(row.client), f"n = {row.client_n:,}"),
                Cell(words.duration(row.server), f"n = {row.server_n:,.0f}"),
                words.duration(None if row.client is None or row.server is None else row.client - row.server),
                {True: "agree within 5 ms", False: "differ", None: "not comparable"}[row.agrees],
            ]
            for row in check.means
        ]
        yield table(["mean", "client", "server", "difference", ""], rows)
    if check.buckets:
        texts = [
            f"p{b.q:g} {words.duration(b.client)} in {words.duration(b.low)} … {words.duration(b.high)}"
            + ("" if b.agrees else " ✗")
            for b in check.buckets
        ]
        yield paragraph("First-token percentiles against the server's histogram: " + "; ".join(texts) + ".", "small")
    if check.why:
        yield paragraph(f"Not comparable: {check.why}.", "small")
    yield facts(
        [
            ("prefix cache hits", words.percent(check.cache_hit_share, missing="")),
            ("preemptions", words.count(check.preemptions, missing="")),
            ("most running", words.count(check.max_running, missing="")),
            ("most waiting", words.count(check.max_waiting, missing="")),
            ("most KV cache used", words.percent(check.max_kv_used, missing="")),
            ("readings", words.count(check.readings)),
        ]
    )


def _client(analysis: Analysis) -> str:
    late = client_lateness(analysis.records)
    lags = [lag for sample in analysis.samples for lag in sample.lags_s]
    check = analysis.manifest.self_check
    rows = [
        ("sent late", f"median {words.duration(percentile(late, 50.0))}, p99 {words.duration(percentile(late, 99.0))}, "
                      f"worst {words.duration(max(late, default=None))}"),
        ("event loop lag", f"p99 {words.duration(percentile(lags, 99.0))}" if lags else ""),
    ]  # fmt: skip
    if check is not None:
        text = (
            f"{check.streams} streams at {check.tokens_per_s:g} tokens/s: TTFT off by {check.ttft_error_p50_ms:.2f} ms "
            f"(median), gaps by {check.itl_error_p99_ms:.2f} ms (p99)"
            if check.ttft_error_p50_ms is not None and check.itl_error_p99_ms is not None
            else check.why
        )
        rows.append(
            ("self-check against an exact mock", text + ("" if check.ok else f" – not good enough: {check.why}"))
        )
    fit = analysis.manifest.token_fit
    if fit is not None and fit.checked:
        text = f"by {fit.method}; {fit.mismatched:,} of {fit.checked:,} prompts off by more than 1 %"
        rows.append(("prompt lengths", text))
    rows += [("warning", text) for text in analysis.manifest.warnings]
    return facts(rows)


def _again(analysis: Analysis) -> Iterable[str]:
    manifest = analysis.manifest
    client = manifest.client
    if manifest.command:
        yield code(shlex.join(manifest.command))
    packages = client.get("packages") or {}
    memory = client.get("memory_bytes")
    yield facts(
        [
            ("run", manifest.run_id),
            ("seed", str(manifest.seed)),
            ("schedule (SHA-256)", manifest.schedule_sha256),
            ("client", f"paceline {client.get('paceline', '?')}, Python {client.get('python', '?')}"),
            ("client machine", _machine(client, memory)),
            ("packages", ", ".join(f"{name} {version}" for name, version in packages.items() if version)),
            ("labels", ", ".join(f"{k}={v}" for k, v in manifest.labels.items())),
            ("repeats or belongs to", manifest.parent or ""),
        ]
    )
    yield details("The whole plan", code(_json(manifest.plan)))
    yield details("The server, as far as it tells", code(_json(manifest.target)))
    yield details("The client machine", code(_json(client)))


def _machine(client: dict[str, Any], memory: Any) -> str:
    parts = [str(client.get("cpu") or ""), f"{client['cpus_usable']} CPUs usable" if client.get("cpus_usable") else ""]
    parts += [f"{memory / 2**30:.0f} GiB" if isinstance(memory, int) else "", str(client.get("platform") or "")]
    return ", ".join(part for part in parts if part)


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
