"""The life of a batch, from `validating` to its end, and how long what it leaves stays.

Each batch that has not ended has one task here. Whatever ends the process, the next start takes up every batch where
its record on disk and its ledger say it was. What goes wrong on the way (a full disk) is logged and tried again at the
next sweep; a batch ends only in one of the ways that its statuses name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, BinaryIO

from msgspec.structs import replace

from paceline.core.classes import BATCH
from paceline.engine.supervisor import EngineState
from paceline.errors import (
    BadRequest,
    ConfigError,
    EngineError,
    EngineNotReady,
    Forbidden,
    Overloaded,
    RequestError,
    TooLarge,
)
from paceline.serve.batch.crew import Crew, Run, Strikes, in_thread
from paceline.serve.batch.ledger import Ledger
from paceline.serve.batch.lines import BadLine, LineFile
from paceline.serve.batch.runner import Runner
from paceline.serve.batch.settings import BatchSettings
from paceline.serve.batch.store import TRANSITIONS, BatchRecord, Fault, FileRecord, Status, Store, new_id
from paceline.serve.context import ServerContext
from paceline.serve.keys import Caller

log = logging.getLogger("paceline.serve")

_OPEN_PER_TENANT = (
    2  # batches of a tenant with their files open: the second begins while the first one's last lines run
)
_FULL_RETRY_S = 60.0
_LAST_WORDS_S = 1.0


class Batches:
    """All batches of a server. Belongs to its event loop; open between `start` and `stop`."""

    def __init__(self, context: ServerContext, settings: BatchSettings, now: Callable[[], float] = time.time) -> None:
        """`now`: Unix seconds."""
        self._context = context
        self.settings = settings
        self._now = now
        self._runner = Runner(context, most_waiting=settings.most_waiting)
        self._crew = Crew(self._runner, settings.concurrency)
        self._store: Store | None = None
        self._why_closed = "the server is still starting"
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, Run] = {}
        self._doors: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of a tenant, one at a time adds
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_OPEN_PER_TENANT))
        self._sweeper: asyncio.Task[None] | None = None

    # Being there -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take up what an earlier process left. A folder that cannot be used is logged: serving goes on without."""
        if self.settings.folder is None:
            self._why_closed = "this server takes no batches"
            return
        try:
            self._store = await in_thread(Store, self.settings.folder)
        except ConfigError as error:
            self._why_closed = str(error)
            log.warning("no batches here: %s", error)
            return
        await self._crew.__aenter__()
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Put everything down where it is; a later start goes on from there. Idempotent."""
        self._why_closed = "the server is stopping; send it to another"
        store, self._store = self._store, None
        if store is None:
            return
        assert self._sweeper is not None
        if self._lives and self._context.engine.state is EngineState.DEAD:
            await asyncio.wait(self._lives.values(), timeout=_LAST_WORDS_S)  # they note what it died of
        tasks = [self._sweeper, *self._lives.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._crew.__aexit__()
        store.close()

    @property
    def store(self) -> Store:
        """Raises EngineNotReady while there is none to use, with the reason."""
        if self._store is None:
            raise EngineNotReady(self._why_closed)
        return self._store

    # What callers ask for --------------------------------------------------------------------------------------------

    def room_for(self, caller: Caller) -> int:
        """How many bytes the next file of this tenant may have. Raises TooLarge when it has no room for any."""
        files = self.store.files_of(caller.tenant)
        if len(files) >= self.settings.max_tenant_files:
            raise TooLarge(f"you have {len(files)} files, the most there may be; delete some", code="too_many_files")
        left = self.settings.max_tenant_bytes - sum(file.size for file in files)
        if left <= 0:
            raise TooLarge("your files fill the room that you have here; delete some", code="storage_full")
        return min(left, self.settings.max_file_bytes)

    async def upload(
        self, caller: Caller, filename: str, source: BinaryIO, size: int, keep_s: int | None
    ) -> FileRecord:
        """Keep what a client sent. Raises TooLarge, OSError."""
        async with self._doors[caller.tenant]:
            if size > self.room_for(caller):
                raise TooLarge("your files would not fit the room that you have here; delete some", code="storage_full")
            record = self._new_file(caller.tenant, filename, "batch", size, keep_s)
            try:
                await in_thread(self.store.add_file, record, source)
            except (ConfigError, OSError) as error:
                raise EngineNotReady(f"the file cannot be kept: {error}") from error
        return record

    async def delete(self, caller: Caller, file_id: str) -> None:
        """Raises NotFound."""
        record = self.store.file(file_id, caller.tenant)
        await in_thread(self.store.remove_file, record)

    async def create(
        self,
        caller: Caller,
        *,
        endpoint: str,
        input_file_id: str,
        window: tuple[str, int],
        metadata: dict[str, str] | None,
        output_keep_s: int | None,
    ) -> BatchRecord:
        """A new batch; `window` as written, and in seconds. Raises Forbidden, NotFound, BadRequest, Overloaded."""
        if not caller.may_use(BATCH.name):
            raise Forbidden(f"key {caller.name!r} may not use class {BATCH.name!r}", code="class_not_allowed")
        store = self.store
        file = store.file(input_file_id, caller.tenant)
        if file.purpose != "batch":
            raise BadRequest(f"{file.id} has purpose {file.purpose!r}, not 'batch'", param="input_file_id")
        now = int(self._now())
        record = BatchRecord(
            id=new_id("batch_"),
            tenant=caller.tenant,
            caller=caller.name,
            endpoint=endpoint,
            input_file_id=file.id,
            completion_window=window[0],
            created_at=now,
            expires_at=now + window[1],
            metadata=metadata,
            output_keep_s=output_keep_s,
        )
        async with self._doors[caller.tenant]:
            alive = sum(not batch.status.is_end for batch in store.batches_of(caller.tenant))
            if alive >= self.settings.max_tenant_batches:
                raise Overloaded(
                    f"you have {alive} batches that have not ended, the most there may be",
                    retry_after_s=_FULL_RETRY_S,
                    code="too_many_batches",
                )
            await in_thread(store.add_batch, record, file)
        self._live(record)
        return record

    async def cancel(self, caller: Caller, batch_id: str) -> BatchRecord:
        """Ask for an end: what is answered stays. Raises NotFound; BadRequest if it is ending anyway."""
        record = self.store.batch(batch_id, caller.tenant)
        if record.status is Status.CANCELLING:
            return record
        if Status.CANCELLING not in TRANSITIONS[record.status]:
            raise BadRequest(f"{record.id} is {record.status}: it cannot be cancelled any more", code="batch_ended")
        shown = self.shown(record)
        saving = self._become(self.store, record, Status.CANCELLING)
        if record.id in self._lives:
            self._lives[record.id].cancel()
        record = await saving
        return replace(record, completed=shown.completed, failed=shown.failed)

    def shown(self, record: BatchRecord) -> BatchRecord:
        """With its counts as of now."""
        run = self._runs.get(record.id)
        return record if run is None else _counted(record, run.ledger)

    # One life --------------------------------------------------------------------------------------------------------

    def _live(self, record: BatchRecord) -> None:
        if self._store is None or record.id in self._lives:
            return  # stopping, or there already
        task = self._lives[record.id] = asyncio.create_task(self._life(record.id), name=record.id)
        task.add_done_callback(lambda _: self._lives.pop(record.id))

    async def _life(self, batch_id: str) -> None:
        """Until its end, or that of this process. Being cancelled tells it of a wish: its record says which."""
        store = self.store
        try:
            try:
                await self._advance(store, batch_id)
            except asyncio.CancelledError:
                if self._store is None:
                    raise  # the server stops; the next one goes on
                await self._finish(store, batch_id)
        except EngineError as error:
            log.warning("%s waits: %s", batch_id, error)
        except RequestError as error:
            await self._fail(store, batch_id, [Fault(code="damaged_batch", message=str(error))])
        except Exception:
            log.exception("%s cannot go on for now", batch_id)

    async def _advance(self, store: Store, batch_id: str) -> None:
        """From wherever it is, to its end if nobody interferes."""
        record = store.batches[batch_id]
        if record.status in (Status.VALIDATING, Status.IN_PROGRESS) and self._now() < record.expires_at:
            await self._runner.ready()
            if record.status is Status.VALIDATING:
                await self._validate(store, record)
            record = store.batches[batch_id]
            if record.status is Status.IN_PROGRESS:
                await self._work_off(store, record)
        await self._finish(store, batch_id)

    async def _validate(self, store: Store, record: BatchRecord) -> None:
        model = await self._context.model()
        lines = LineFile(store.folder_of(record) / "input.jsonl", (record.endpoint,))
        try:
            bad = await in_thread(self._scan, lines)
        finally:
            lines.close()
        bad += lines.check_models(model.names)
        if bad:
            await self._fail(store, record.id, [_fault(one) for one in bad])
            return
        record = replace(record, total=len(lines), model=model.name, fingerprint=model.fingerprint)
        await self._become(store, record, Status.IN_PROGRESS)

    async def _fail(self, store: Store, batch_id: str, faults: list[Fault]) -> None:
        record = replace(store.batches[batch_id], faults=tuple(faults))
        await self._become(store, record, Status.FAILED)
        await in_thread(store.clear_work, record)

    def _scan(self, lines: LineFile) -> list[BadLine]:
        most = self.settings.max_requests
        try:
            return lines.scan(max_line_bytes=self._context.settings.max_body_bytes, max_lines=most)
        except FileNotFoundError:
            return [BadLine(None, "input_gone", "its input is gone from the disk")]

    async def _work_off(self, store: Store, record: BatchRecord) -> None:
        model = await self._context.model()
        if model.fingerprint != record.fingerprint:
            log.warning("%s was begun with another model; it waits for a server of that one", record.id)
            await asyncio.Future()  # until it expires or is cancelled
        async with self._turns[record.tenant], self._opened(store, record) as run:
            self._runs[record.id] = run
            try:
                await self._crew.work_off(run)
            finally:
                del self._runs[record.id]

    @asynccontextmanager
    async def _opened(self, store: Store, record: BatchRecord) -> AsyncIterator[Run]:
        """Its lines and its ledger, as far as it has come."""
        folder = store.folder_of(record)
        lines = LineFile(folder / "input.jsonl", (record.endpoint,), salt=record.id)
        ledger = Ledger(lines, folder / "output.jsonl", folder / "errors.jsonl")
        try:
            bad = await in_thread(self._scan, lines)
            if bad:  # it was good once: limits have become narrower, or somebody was here
                raise BadRequest(str(bad[0]))
            await in_thread(ledger.open)
            yield Run(lines, ledger, Caller(record.caller, record.tenant), strikes=Strikes(folder / "strikes"))
        finally:
            await in_thread(ledger.close)
            lines.close()

    # Its end ---------------------------------------------------------------------------------------------------------

    async def _finish(self, store: Store, batch_id: str) -> None:
        """Publish what it has, in a way that can be broken off anywhere and done again."""
        record = store.batches[batch_id]
        match record.status:
            case Status.VALIDATING | Status.IN_PROGRESS if self._now() >= record.expires_at:
                end = Status.EXPIRED
            case Status.IN_PROGRESS:
                record, end = await self._become(store, record, Status.FINALIZING), Status.COMPLETED
            case Status.FINALIZING:
                end = Status.COMPLETED
            case Status.CANCELLING:
                end = Status.CANCELLED
            case _:
                end = record.status
        if not record.status.is_end:
            if record.total:
                record = await self._publish(store, record, expired=end is Status.EXPIRED)
            record = await self._become(store, record, end)
            log.info("%s is %s", record.id, end, extra={"completed": record.completed, "failed": record.failed})
        await in_thread(store.clear_work, record)

    async def _publish(self, store: Store, record: BatchRecord, *, expired: bool) -> BatchRecord:
        async with self._opened(store, record) as run:
            if expired:
                await in_thread(run.expire)
            record = _counted(record, run.ledger)
        # Ids first: whoever does this again makes no second file.
        if record.completed:
            record = replace(record, output_file_id=record.output_file_id or new_id("file-"))
        if record.failed:
            record = replace(record, error_file_id=record.error_file_id or new_id("file-"))
        store.batches[record.id] = record
        await in_thread(store.save_batch, record.id)
        for file_id, name in ((record.output_file_id, "output"), (record.error_file_id, "errors")):
            if file_id is not None:
                source = store.folder_of(record) / f"{name}.jsonl"
                filename = f"{record.id}_{name.removesuffix('s')}.jsonl"
                file = self._new_file(
                    record.tenant, filename, "batch_output", source.stat().st_size, record.output_keep_s, file_id
                )
                await in_thread(store.publish, file, source)
        return record

    def _become(self, store: Store, record: BatchRecord, status: Status) -> Coroutine[Any, Any, BatchRecord]:
        """Change a batch's status, seen by everybody at once; what is returned waits until it is on disk."""
        assert status in TRANSITIONS[record.status], f"{record.id} cannot go from {record.status} to {status}"
        record = replace(record, status=status, times={**record.times, status: int(self._now())})
        store.batches[record.id] = record

        async def save() -> BatchRecord:
            await in_thread(store.save_batch, record.id)
            return record

        return save()

    def _new_file(
        self, tenant: str, filename: str, purpose: str, size: int, keep_s: int | None, file_id: str | None = None
    ) -> FileRecord:
        now = int(self._now())
        return FileRecord(
            id=file_id or new_id("file-"),
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            size=size,
            created_at=now,
            expires_at=now + int(self.settings.keep_s if keep_s is None else keep_s),
        )

    # Housekeeping ----------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        while True:
            try:
                await self._tidy(self.store)
            except Exception:
                log.exception("looking after the batches failed; it is tried again")
            await asyncio.sleep(self.settings.sweep_s)

    async def _tidy(self, store: Store) -> None:
        """Let every batch live that should, end those whose time is over, remove what has been kept long enough."""
        now = self._now()
        for batch in list(store.batches.values()):
            life = self._lives.get(batch.id)
            if batch.status.is_end:
                if batch.times[batch.status] + self.settings.keep_s <= now:
                    await in_thread(store.remove_batch, batch)
            elif life is None:
                self._live(batch)
            elif batch.expires_at <= now and Status.EXPIRED in TRANSITIONS[batch.status] and not life.cancelling():
                life.cancel()
        for file in list(store.files.values()):
            if file.expires_at <= now:
                await in_thread(store.remove_file, file)


def _counted(record: BatchRecord, ledger: Ledger) -> BatchRecord:
    return replace(
        record,
        completed=ledger.completed,
        failed=ledger.failed,
        prompt_tokens=ledger.prompt_tokens,
        completion_tokens=ledger.completion_tokens,
    )


def _fault(bad: BadLine) -> Fault:
    return Fault(code=bad.code, message=bad.message, line=bad.number, param=bad.param)
