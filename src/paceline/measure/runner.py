"""One run from plan to folder: probe, self-check, warm up, load, finish. Also resuming one and running one again.

Nothing is written before the server has answered the probe. From then on every finished request is on disk within a
quarter of a second, and a run that ends early, by Ctrl-C or by a crash, is readable and can be resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import secrets
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.errors import ConfigError
from paceline.measure.calibrate import self_check
from paceline.measure.claims import claimed
from paceline.measure.fleet import Fleet, LoadFailed, Stopped
from paceline.measure.folder import SCHEDULE, RowWriter, RunFolder, make_folder, refuse_taken, remove_run
from paceline.measure.jobs import WorkerJob, connections_for
from paceline.measure.keys import Keys, check_tenants, read_keys
from paceline.measure.limits import check_limits
from paceline.measure.plan import Arrivals, BenchPlan, check
from paceline.measure.probe import Found, Probe, make_http
from paceline.measure.progress import Gauge, Progress
from paceline.measure.provenance import client_facts, command_line
from paceline.measure.records import Manifest, RequestRecord, Segment, SelfCheck, TokenFit
from paceline.measure.recount import load_tokenizer, recount
from paceline.measure.resuming import done_indexes, resume_point
from paceline.measure.schedule import Arrival, build_schedule, digest, encode, read_schedule
from paceline.measure.scrape import Scraper, metrics_url
from paceline.measure.threads import in_thread
from paceline.measure.warmup import all_failed, warm_up

T = TypeVar("T")
OnProgress = Callable[[Progress], None]
MISMATCH = 0.01  # a prompt off by more than this share, and by more than one token, has the wrong length


@dataclass(slots=True)
class Extras:
    """What a caller may add to a run."""

    labels: dict[str, str] = field(default_factory=dict)
    parent: str | None = None
    arrivals: list[Arrival] | None = None  # instead of those the plan builds
    self_check: SelfCheck | None = None  # of an earlier run at the same load: not measured again


def run(
    plan: BenchPlan, out_dir: Path, on_progress: OnProgress | None = None, extras: Extras | None = None
) -> RunFolder:
    """Carry out a plan into a new folder.

    Raises ConfigError when it cannot be run (bad plan, bad target), LoadFailed when the load broke down; neither
    leaves a half-written folder for a run that never began. Ctrl-C ends the run early; the folder then says
    "interrupted".
    """
    return asyncio.run(_Run(plan, Path(out_dir), on_progress or _silent, extras or Extras()).new())


def resume(path: Path, on_progress: OnProgress | None = None) -> RunFolder:
    """Carry on an interrupted or crashed run in its folder. Raises ConfigError when nothing is left to do."""
    plan = BenchPlan.from_dict(RunFolder(path).manifest.plan)
    return asyncio.run(_Run(plan, Path(path), on_progress or _silent, Extras()).again(Path(path)))


def rerun(
    path: Path,
    out_dir: Path,
    on_progress: OnProgress | None = None,
    *,
    fresh_prompts: bool = False,
    url: str | None = None,
) -> RunFolder:
    """The same load again: the stored plan and the stored schedule, so no trace file is needed.

    `fresh_prompts` keeps arrivals and lengths and changes the texts, for a cache that remembers the first run.
    """
    folder = RunFolder(path)
    plan = BenchPlan.from_dict(folder.manifest.plan)
    if fresh_prompts:
        prompts = msgspec.structs.replace(plan.prompts, salt=secrets.token_hex(4))
        plan = msgspec.structs.replace(plan, prompts=prompts)
    if url is not None:
        plan = msgspec.structs.replace(plan, target=msgspec.structs.replace(plan.target, url=url))
    arrivals = read_schedule(folder.schedule_path)
    return run(plan, out_dir, on_progress, Extras(parent=folder.manifest.run_id, arrivals=arrivals))


def _silent(progress: Progress) -> None:
    pass


class _Run:
    """The stages of one run."""

    def __init__(self, plan: BenchPlan, path: Path, on_progress: OnProgress, extras: Extras) -> None:
        self._plan, self._path, self._on_progress, self._extras = plan, path, on_progress, extras
        self._progress = Progress()
        self._stop = asyncio.Event()
        self._keys = Keys()

    async def new(self) -> RunFolder:
        plan = self._plan
        check(plan)
        refuse_taken(self._path)
        arrivals = self._extras.arrivals or build_schedule(plan)
        check_tenants(plan.target, (arrival.tenant for arrival in arrivals))
        with self._stoppable():
            found, limits = await self._prepare()
            checked = self._extras.self_check
            if plan.client.self_check and checked is None:
                self._stage("self-check")
                checked = await self._unless_stopped(self_check(plan))
            warm = await self._warm(found, arrivals)
            manifest = self._manifest(arrivals, found, limits, checked)
            return await self._carry(manifest, found, arrivals, warm)

    async def _carry(
        self, manifest: Manifest, found: Found, arrivals: list[Arrival], warm: list[RequestRecord]
    ) -> RunFolder:
        """Make the folder and carry the load into it."""
        made, folder = make_folder(self._path), None
        with claimed(self._path):
            refuse_taken(self._path)  # another run may have begun here meanwhile
            try:
                (self._path / SCHEDULE).write_bytes(encode(arrivals))
                folder = RunFolder.create(self._path, manifest)
                self._write_warmup(folder, warm)
                await self._segment(folder, found, arrivals, first_s=0.0, skip=())
            except (LoadFailed, OSError):
                if folder is None or not folder.manifest.segments:  # it never began
                    remove_run(self._path, made)
                raise
        return folder

    async def again(self, path: Path) -> RunFolder:
        RunFolder(path)  # a folder without a run is refused by name
        with claimed(path):
            return await self._again(RunFolder(path))  # read again: the runner before may have ended just now

    async def _again(self, folder: RunFolder) -> RunFolder:
        manifest = folder.manifest
        folder.settle()
        arrivals = read_schedule(folder.schedule_path)
        records = folder.records()
        last = max((r.closed_s or 0.0 for r in records), default=0.0)
        if manifest.segments and not manifest.segments[-1].ended:  # it crashed
            manifest.segments[-1] = msgspec.structs.replace(manifest.segments[-1], ended="interrupted", ended_s=last)
        skip = tuple(sorted(done_indexes(records)))
        first_s = resume_point(self._plan, arrivals, set(skip), manifest, last)
        if first_s is None or manifest.complete:
            raise ConfigError(f"{folder.path} is complete: nothing is left to resume; use rerun")
        with self._stoppable():
            found, _ = await self._prepare()
            if found.features.model != manifest.target.get("model"):
                raise ConfigError(
                    f"the server now serves {found.features.model}, the run was of {manifest.target.get('model')}"
                )
            self._write_warmup(folder, await self._warm(found, arrivals))
            await self._segment(folder, found, arrivals, first_s=first_s, skip=skip)
        return folder

    # Stages

    async def _prepare(self) -> tuple[Found, dict[str, int | None]]:
        plan = self._plan
        self._keys = read_keys(plan.target)
        if plan.client.tokenizer is not None:
            load_tokenizer(Path(plan.client.tokenizer))  # found out now, not after the run
        limits = check_limits(max(connections_for(plan), plan.load.max_concurrency or 0), plan.client.workers)
        self._stage("probing")
        return await self._unless_stopped(in_thread(self._probe)), limits

    def _probe(self) -> Found:
        with Probe(self._plan, self._keys.default) as probe:
            return probe.run()

    async def _warm(self, found: Found, arrivals: list[Arrival]) -> list[RequestRecord]:
        self._stage("warming up")
        records = await self._unless_stopped(warm_up(self._plan, found, self._keys.default, arrivals))
        if (problem := all_failed(records)) is not None:
            raise LoadFailed(f"every warm-up request failed: {problem}", records[0].error)
        return records

    def _manifest(
        self, arrivals: list[Arrival], found: Found, limits: dict[str, int | None], checked: SelfCheck | None
    ) -> Manifest:
        plan = self._plan
        now = datetime.datetime.now(datetime.UTC)
        # How many a closed loop bounded by time will ask for, nobody can plan.
        open_ended = plan.load.arrivals is Arrivals.CLOSED and plan.load.requests is None and plan.load.duration_s
        talks = sum(arrival.turns > 1 for arrival in arrivals)
        return Manifest(
            run_id=f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}",
            created=now.isoformat(timespec="seconds"),
            plan=plan.to_dict(),
            seed=plan.seed,
            command=command_line(),
            requests_planned=0 if open_ended else sum(arrival.turns for arrival in arrivals),
            conversations_planned=len(arrivals) if talks and not open_ended else 0,
            duration_planned_s=plan.load.duration_s,
            schedule_sha256=digest(encode(arrivals)),
            target=found.target,
            client=client_facts(dict(limits)),
            self_check=checked,
            token_fit=found.fit,
            warnings=[*found.warnings, *_remarks(plan, found, arrivals)],
            parent=self._extras.parent,
            labels=self._extras.labels,
        )

    def _write_warmup(self, folder: RunFolder, records: list[RequestRecord]) -> None:
        writer = RowWriter(folder.warmup_path)
        for record in records:
            writer.write(record)
        writer.close()

    async def _segment(
        self, folder: RunFolder, found: Found, arrivals: list[Arrival], *, first_s: float, skip: tuple[int, ...]
    ) -> None:
        """One uninterrupted stretch of load."""
        self._stage("preparing")
        manifest = folder.manifest
        number = len(manifest.segments)
        self._progress.planned, self._progress.planned_s = manifest.requests_planned, manifest.duration_planned_s
        gauge = Gauge(self._progress)
        fleet = Fleet(lambda said: self._on_progress(gauge.take(said)))
        scraper = self._scraper(folder)
        try:
            await self._unless_stopped(fleet.start(self._jobs(folder, found, number, skip, first_s)))
            self._stage("running")
            t0 = fleet.go(first_s)
            began = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            manifest.segments.append(Segment(index=number, t0_ns=round(t0 * 1e9), t0_wall=began, first_s=first_s))
            folder.save_manifest()
            if scraper is not None:
                scraper.start(t0, number)
            ended = await self._until_over(fleet)
        finally:
            await fleet.close()
            if scraper is not None:
                await asyncio.to_thread(scraper.stop)
        self._finish(folder, ended)

    async def _until_over(self, fleet: Fleet) -> str:
        """How the segment ended: complete, interrupted, or failed with a reason."""
        over = asyncio.ensure_future(fleet.wait())
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({over, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not over.done():
                self._stage("stopping")
                fleet.stop()
            await over
        except LoadFailed as error:
            return f"failed: {error}"
        finally:
            stop.cancel()
        return "interrupted" if self._stop.is_set() else "complete"

    def _finish(self, folder: RunFolder, ended: str) -> None:
        manifest = folder.manifest
        records = folder.records()
        last = max((r.closed_s or 0.0 for r in records), default=0.0)
        manifest.segments[-1] = msgspec.structs.replace(manifest.segments[-1], ended=ended, ended_s=last)
        if self._plan.client.tokenizer is not None:
            manifest.client_tokenizer = recount(folder, records, Path(self._plan.client.tokenizer))
        if manifest.token_fit is not None:
            manifest.token_fit = checked_fit(manifest.token_fit, records)
        folder.save_manifest()
        self._stage("done")

    # Parts

    def _jobs(
        self, folder: RunFolder, found: Found, segment: int, skip: tuple[int, ...], first_s: float
    ) -> list[WorkerJob]:
        workers = self._plan.client.workers
        return [
            WorkerJob(
                folder=str(folder.path),
                plan=self._plan,
                worker=worker,
                workers=workers,
                features=found.features,
                fit=found.fit,
                segment=segment,
                keys=self._keys,
                words=found.words,
                skip=skip,
                first_s=first_s,
            )
            for worker in range(workers)
        ]

    def _scraper(self, folder: RunFolder) -> Scraper | None:
        target = self._plan.target
        url = metrics_url(folder.manifest.target["url"], target.metrics_url)
        if url is None or not folder.manifest.target.get("metrics"):
            return None
        make = partial(make_http, target, self._keys.default)
        return Scraper(url, folder.server_path, make, self._plan.client.scrape_every_s)

    def _stage(self, stage: str) -> None:
        self._progress.stage = stage
        self._on_progress(self._progress)

    # Stopping

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """While inside, the first Ctrl-C or SIGTERM asks for an orderly end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        names = (signal.SIGINT, signal.SIGTERM)
        try:
            for name in names:
                loop.add_signal_handler(name, self._stop.set)
        except NotImplementedError:  # no such thing on this platform
            yield
            return
        try:
            yield
        finally:
            for name in names:
                loop.remove_signal_handler(name)

    async def _unless_stopped(self, work: Awaitable[T]) -> T:
        """The work's result. Raises Stopped when the stop comes first; the work is cancelled then."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise Stopped("stopped before the load began; nothing was measured")
        finally:
            stop.cancel()


def _remarks(plan: BenchPlan, found: Found, arrivals: list[Arrival]) -> list[str]:
    """What a reader of the result should know about how the plan could be carried out."""
    remarks = []
    overhead = found.fit.overhead_tokens
    short = sum(a.inputs[0] is not None and a.inputs[0] <= overhead for a in arrivals)
    if short:
        remarks.append(
            f"{short} prompts should be shorter than the {overhead} tokens the chat template adds: they are not"
        )
    cap, workers = plan.load.max_concurrency, plan.client.workers
    if cap is not None and workers > 1:
        remarks.append(f"the concurrency cap of {cap} is split over {workers} workers, each with its own queue")
    return remarks


def checked_fit(fit: TokenFit, records: list[RequestRecord]) -> TokenFit:
    """How far the prompts' lengths were right, by the server's own count."""
    checked = mismatched = 0
    worst: float | None = None
    for record in records:
        wanted, usage = record.prompt_tokens_wanted, record.usage
        if wanted is None or usage is None or usage.prompt_tokens is None:
            continue
        checked += 1
        off = abs(usage.prompt_tokens - wanted)
        worst = max(worst or 0.0, off / wanted)
        mismatched += off > 1 and off > MISMATCH * wanted
    return msgspec.structs.replace(
        fit, checked=checked, mismatched=mismatched, worst=None if worst is None else round(worst, 5)
    )
