"""`paceline calibrate`, put together: a server of our own, designed traffic over HTTP, its call log, a fit, one file.

Client and engine stamp with the same monotonic clock, and the server's answer carries the engine's request id. So one
run tells both how long each step took (the call log) and what lies between a client and the scheduler (its records).
"""

from __future__ import annotations

import asyncio
import datetime
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.app.build import plan_engine
from paceline.app.calibration_load import Limits, Told, Traffic, drive
from paceline.app.private_server import private_server
from paceline.app.settings import KVSettings, Settings
from paceline.core.calllog import read_calls
from paceline.core.config import SchedulerConfig
from paceline.cost.fit import Calibration, Overheads, fit, load_calibration
from paceline.cost.nonnegative import fit_non_negative
from paceline.cost.recorded import CallTimes, RequestTimes, StepRow, read_call_times, rows_of_timeline
from paceline.errors import ConfigError, PacelineError
from paceline.measure.folder import MANIFEST, RunFolder
from paceline.measure.plan import BenchPlan, Target
from paceline.measure.probe import Probe
from paceline.measure.provenance import client_facts
from paceline.measure.records import RequestRecord
from paceline.version import __version__

CALLS, TIMELINE = "calls.jsonl", "timeline.json"  # what a folder of recordings may hold
CLOCK_SHIFT_S = time.monotonic() - time.perf_counter()  # the engine's clock less the client's: 0 where they are one
APART_S = 0.05  # a request that no other was sent so shortly before met an idle server
STALLED = 2.0  # a step that took this many times what is usual: something else had the machine
MOST_STALLED = 0.02  # share of the steps from which on the result is doubted


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """One request by the client's records, in seconds on the engine's clock."""

    written_s: float
    tokens_s: tuple[float, ...]  # arrival of each token


@dataclass(slots=True)
class Recording:
    """All that sources told."""

    rows: list[StepRow] = field(default_factory=list)
    requests: dict[str, RequestTimes] = field(default_factory=dict)  # by the scheduler's id
    clients: dict[str, ClientTimes] = field(default_factory=dict)  # by the same
    config: SchedulerConfig | None = None
    said: list[str] = field(default_factory=list)  # of each source, what it gave

    def add_calls(self, calls: CallTimes, name: str) -> None:
        """Steps and requests of a call log."""
        self.rows += calls.steps
        self.requests.update(calls.requests)
        self.config = calls.config
        self.said.append(f"{name}: {len(calls.steps)} steps, {len(calls.requests)} requests")

    def add_records(self, records: Iterable[RequestRecord], t0_s: float) -> None:
        """A client's records, whose zero is at `t0_s` on the engine's clock."""
        for record in records:
            if record.ok and record.written_s is not None and record.server_request_id:
                arrivals = tuple(t0_s + record.row_s(row) for row in record.token_rows())
                self.clients[f"{record.server_request_id}-0"] = ClientTimes(t0_s + record.written_s, arrivals)


# Measuring ------------------------------------------------------------------------------------------------------------


def calibrate(
    settings: Settings, seconds: float, *, seed: int, told: Callable[[Told], None], keep: Path | None = None
) -> Calibration:
    """Serve the model that the settings name, ask it for about `seconds`, fit. Raises ConfigError, ModelError.

    Ctrl-C ends the traffic: what was measured until then is fitted, if it is enough.
    """
    spec = plan_engine(settings)  # a model that is not there is told before a server is started
    with tempfile.TemporaryDirectory(prefix="paceline-calibrate-") as scratch:
        folder = keep or Path(scratch)
        calls = folder / CALLS
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error
        traffic = Traffic(0.0)
        told(Told("starting the server"))
        began = time.monotonic()
        with private_server(_plain_settings(settings, calls)) as url:
            interrupted = _drive(url, read_calls(calls)[0], seconds, seed, traffic, told)
        told(Told("fitting", time.monotonic() - began, len(traffic.records)))
        recording = Recording()
        recording.add_calls(read_call_times(calls), "own traffic")
    recording.add_records(traffic.records, traffic.t0_s + CLOCK_SHIFT_S)
    failed = [record for record in traffic.records if not record.ok and record.error != "cancelled"]
    if failed and len(failed) == len(traffic.records):
        raise PacelineError(f"every request failed: {failed[0].error_message or failed[0].error}")
    facts = {"seconds": round(time.monotonic() - began, 1), "seed": seed, "requests": len(traffic.records)}
    facts |= {"failed": len(failed), "interrupted": interrupted}
    return build(recording, {"model": spec.name, **_model_facts(settings)}, facts)


def _plain_settings(settings: Settings, calls: Path) -> Settings:
    """The user's, with a policy that computes what is asked for, in one step where the budget allows it.

    How a step is put together is the scheduler's affair, how long it takes the machine's: a policy that holds back
    prefills would keep large chunks from ever being measured.
    """
    scheduler = replace(
        settings.scheduler, policy="decode_first", policy_options=(), call_log=str(calls), max_waiting=None
    )
    kv: KVSettings = replace(settings.kv, prefix_caching=True)
    return replace(settings, scheduler=scheduler, kv=kv)


def _drive(
    url: str, config: SchedulerConfig, seconds: float, seed: int, traffic: Traffic, told: Callable[[Told], None]
) -> bool:
    """Fill `traffic`; whether Ctrl-C ended it early."""
    plan = BenchPlan(target=Target(url=url, endpoint="completions", ignore_eos="on"), seed=seed)
    with Probe(plan, "") as probe:
        found = probe.run()
    limits = Limits(
        max_model_len=config.max_model_len,
        budget=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        kv_tokens=config.num_blocks * config.block_size,
    )
    try:
        asyncio.run(drive(plan, found, limits, seconds, traffic, told))
    except KeyboardInterrupt:
        return True
    return False


def _model_facts(settings: Settings) -> dict[str, Any]:
    return {"dtype": settings.model.dtype, "device": settings.model.device, "threads": settings.model.threads}


# Refitting ------------------------------------------------------------------------------------------------------------


def recalibrate(sources: Sequence[str], earlier: Path | None = None) -> Calibration:
    """Fit to what servers recorded: URLs, call logs, saved timelines, folders that hold such or a bench run.

    A call log together with the run folder of the bench that made its traffic tells the overheads too; else those of
    `earlier` stay, if it is a calibration. Raises ConfigError.
    """
    recording = Recording()
    for source in sources:
        _take(source, recording)
    before = load_calibration(earlier) if earlier is not None and earlier.exists() else None
    engine = dict(before.engine) if before is not None else {}
    made = build(recording, engine, {"sources": recording.said})
    if made.overheads == Overheads() and before is not None:
        made = replace(made, overheads=before.overheads)
    return made


def _take(source: str, recording: Recording) -> None:
    if not source.strip():
        raise ConfigError("--from is empty; give a server's URL, a call log, a saved timeline or a folder with such")
    if source.startswith(("http://", "https://")):
        from paceline.app.commands.timeline import fetch

        _take_timeline(fetch(source), source, recording)
        return
    path = Path(source)
    if path.is_dir():
        found = [file for name in (CALLS, TIMELINE) if (file := path / name).exists()]
        for file in found:
            _take(str(file), recording)
        if (path / MANIFEST).exists():
            _take_run(RunFolder(path), source, recording)
        elif not found:
            raise ConfigError(f"{source} holds no recorded steps: no {CALLS}, no {TIMELINE}, no bench run")
        return
    try:
        with path.open(encoding="utf-8") as lines:
            first = json.loads(lines.readline() or "null")
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror}") from error
    except (UnicodeDecodeError, ValueError):
        raise ConfigError(f"{source} is neither a call log nor what `paceline timeline --json` prints") from None
    if isinstance(first, dict) and "log" in first:
        recording.add_calls(read_call_times(path), source)
    elif isinstance(first, dict) and "columns" in first:
        _take_timeline(first, source, recording)
    else:
        raise ConfigError(f"{source} is neither a call log nor what `paceline timeline --json` prints")


def _take_timeline(report: Mapping[str, Any], source: str, recording: Recording) -> None:
    rows = rows_of_timeline(report)
    recording.rows += rows
    recording.said.append(f"{source}: {len(rows)} steps")


def _take_run(folder: RunFolder, source: str, recording: Recording) -> None:
    records = folder.records()
    for segment in folder.manifest.segments:
        own = [record for record in records if record.segment == segment.index]
        recording.add_records(own, segment.t0_ns / 1e9 + CLOCK_SHIFT_S)
    recording.said.append(f"{source}: {len(records)} requests of a client")


# Both -----------------------------------------------------------------------------------------------------------------


def build(recording: Recording, engine: Mapping[str, Any], facts: Mapping[str, Any]) -> Calibration:
    """Fit and put together. Raises ConfigError for too few steps."""
    cost = fit(recording.rows)
    usual = [cost.seconds(row.shape) + cost.beside_s(row.beside) for row in recording.rows]
    stalled = sum(row.seconds > STALLED * one for row, one in zip(recording.rows, usual, strict=True)) / len(usual)
    now = datetime.datetime.now(datetime.UTC)
    provenance = {
        "created": now.isoformat(timespec="seconds"),
        "paceline": __version__,
        "machine": {
            name: value
            for name, value in client_facts({}).items()
            if name in ("cpu", "cpus_usable", "memory_bytes", "platform", "load_average")
        },
        "steps": len(recording.rows),
        "errors": dict(zip(("median", "p95"), cost.errors(), strict=True)),
        "stalled_share": stalled,
        **facts,
    }
    return Calibration(cost, overheads_of(recording), {**engine, **_engine_facts(recording.config)}, provenance)


def _engine_facts(config: SchedulerConfig | None) -> dict[str, Any]:
    """What a simulation of the same engine needs to know of it."""
    if config is None:
        return {}
    names = ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "namespace")
    return {name: getattr(config, name) for name in names}


def overheads_of(recording: Recording) -> Overheads:
    """What lies between client and scheduler, from requests that both sides saw; zeros where there are none."""
    sent = sorted(one.written_s for one in recording.clients.values())
    submits: list[tuple[float, float]] = []  # prompt tokens, seconds
    delivers: list[tuple[float, float]] = []  # place in the step, seconds
    for request_id, client in recording.clients.items():
        seen = recording.requests.get(request_id)
        if seen is None:
            continue
        if seen.idle and _alone(client.written_s, sent):
            submits.append((seen.prompt_tokens, seen.submitted_s - client.written_s))
        if len(client.tokens_s) == len(seen.tokens):  # else the server put several into one event
            delivers += [
                (place, arrived - committed)
                for arrived, (committed, place) in zip(client.tokens_s, seen.tokens, strict=True)
            ]
    return Overheads(*_line(submits), *_line(delivers))


def _alone(written_s: float, sent: Sequence[float]) -> bool:
    place = int(np.searchsorted(sent, written_s))
    return place == 0 or written_s - sent[place - 1] > APART_S


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Start and slope, neither negative, robust; zeros without points."""
    usable = [(x, seconds) for x, seconds in points if seconds > 0.0]
    if not usable:
        return 0.0, 0.0
    xs, seconds = (np.array(column, dtype=np.float64) for column in zip(*usable, strict=True))
    start, slope = fit_non_negative(np.column_stack([np.ones_like(xs), xs]), seconds, units=float(np.median(seconds)))
    return float(start), float(slope)


def doubts(calibration: Calibration) -> list[str]:
    """What a person should know before trusting it, in sentences."""
    found = []
    provenance = calibration.provenance
    if provenance.get("stalled_share", 0.0) > MOST_STALLED:
        found.append(
            f"{provenance['stalled_share']:.0%} of the steps took over {STALLED:g} times what their like take: "
            "something else was using this machine; calibrate again when it is quiet"
        )
    if provenance.get("failed"):
        found.append(f"{provenance['failed']} of {provenance['requests']} requests failed")
    if provenance.get("interrupted"):
        found.append("it was stopped early: the largest batches may be missing, see the fitted ranges")
    if calibration.overheads == Overheads():
        found.append("no client's records were given: time outside of steps counts as zero")
    return found
