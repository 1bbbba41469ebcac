"""/v1/files and /v1/batches, in OpenAI's shapes. Whatever belongs to another tenant is not there: 404."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from paceline.errors import BadRequest, NotFound
from paceline.serve.answering import caller_of, context_of
from paceline.serve.batch.manager import Batches
from paceline.serve.batch.runner import ENDPOINTS
from paceline.serve.batch.store import BatchRecord, FileRecord, Status
from paceline.serve.batch.upload import receive_upload
from paceline.serve.exchange import JsonResponse, read_json
from paceline.serve.schemas import parse_body

LEAST_KEEP_S = 3600
MOST_KEEP_S = 30 * 86_400
MOST_WINDOW_S = 7 * 86_400
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([hd])")
_RecordT = TypeVar("_RecordT", FileRecord, BatchRecord)


class ExpiresAfter(BaseModel):
    """How long a file stays."""

    model_config = ConfigDict(strict=True, frozen=True)
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=LEAST_KEEP_S, le=MOST_KEEP_S)]


class CreateBatch(BaseModel):
    """POST /v1/batches"""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: (
        Annotated[
            dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


def batches_of(request: Request) -> Batches:
    """The batches of the server that this request came to."""
    batches = request.app.state.batches
    assert isinstance(batches, Batches)
    if batches.settings.folder is None:
        raise NotFound("this server takes no batches; it was started without a folder for them", code="no_batches")
    return batches


# Files ---------------------------------------------------------------------------------------------------------------


async def upload_file(request: Request) -> Response:
    """POST /v1/files"""
    batches, caller = batches_of(request), caller_of(request)
    room = batches.room_for(caller)
    async with receive_upload(request, max_bytes=room, timeout_s=batches.settings.upload_timeout_s) as upload:
        if upload.fields.get("purpose") != "batch":
            raise BadRequest("purpose should be 'batch'", param="purpose")
        keep_s = _expires_after(upload.fields)
        record = await batches.upload(caller, upload.filename, upload.content, upload.size, keep_s)
    return JsonResponse(_file(record))


async def list_files(request: Request) -> Response:
    """GET /v1/files"""
    records = batches_of(request).store.files_of(caller_of(request).tenant)
    if (purpose := request.query_params.get("purpose")) is not None:
        records = [record for record in records if record.purpose == purpose]
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("order should be asc or desc", param="order")
    page, more = _page(request, records if order == "desc" else records[::-1], most=10_000, default=10_000)
    return _listing([_file(record) for record in page], more)


async def get_file(request: Request) -> Response:
    """GET /v1/files/{id}"""
    return JsonResponse(_file(_file_of(request)))


async def file_content(request: Request) -> Response:
    """GET /v1/files/{id}/content"""
    record = _file_of(request)
    return FileResponse(batches_of(request).store.content(record), media_type="application/jsonl")


async def delete_file(request: Request) -> Response:
    """DELETE /v1/files/{id}"""
    file_id = request.path_params["file_id"]
    await batches_of(request).delete(caller_of(request), file_id)
    return JsonResponse({"id": file_id, "object": "file", "deleted": True})


# Batches -------------------------------------------------------------------------------------------------------------


async def create_batch(request: Request) -> Response:
    """POST /v1/batches"""
    batches = batches_of(request)
    body = parse_body(CreateBatch, await read_json(request, context_of(request).settings))
    if body.endpoint not in ENDPOINTS:
        raise BadRequest(f"endpoint should be one of {', '.join(ENDPOINTS)}", param="endpoint")
    record = await batches.create(
        caller_of(request),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        window=(body.completion_window, window_s(body.completion_window)),
        metadata=body.metadata,
        output_keep_s=None if body.output_expires_after is None else body.output_expires_after.seconds,
    )
    return JsonResponse(_batch(record))


async def list_batches(request: Request) -> Response:
    """GET /v1/batches"""
    batches = batches_of(request)
    page, more = _page(request, batches.store.batches_of(caller_of(request).tenant), most=100, default=20)
    return _listing([_batch(batches.shown(record)) for record in page], more)


async def get_batch(request: Request) -> Response:
    """GET /v1/batches/{id}"""
    batches = batches_of(request)
    record = batches.store.batch(request.path_params["batch_id"], caller_of(request).tenant)
    return JsonResponse(_batch(batches.shown(record)))


async def cancel_batch(request: Request) -> Response:
    """POST /v1/batches/{id}/cancel"""
    return JsonResponse(_batch(await batches_of(request).cancel(caller_of(request), request.path_params["batch_id"])))


ROUTES = (
    Route("/v1/files", upload_file, methods=["POST"]),
    Route("/v1/files", list_files, methods=["GET"]),
    Route("/v1/files/{file_id}", get_file, methods=["GET"]),
    Route("/v1/files/{file_id}", delete_file, methods=["DELETE"]),
    Route("/v1/files/{file_id}/content", file_content, methods=["GET"]),
    Route("/v1/batches", create_batch, methods=["POST"]),
    Route("/v1/batches", list_batches, methods=["GET"]),
    Route("/v1/batches/{batch_id}", get_batch, methods=["GET"]),
    Route("/v1/batches/{batch_id}/cancel", cancel_batch, methods=["POST"]),
)


def window_s(window: str) -> int:
    """Seconds of "24h" or "7d". Raises BadRequest."""
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * {"h": 3600, "d": 86_400}[found[2]] if found is not None else 0
    if not 0 < seconds <= MOST_WINDOW_S:
        raise BadRequest("completion_window should be like 24h, from 1h to 7d", param="completion_window")
    return seconds


def _expires_after(fields: dict[str, str]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    given = {"anchor": anchor, "seconds": int(seconds) if seconds is not None and seconds.isdecimal() else seconds}
    try:
        return parse_body(ExpiresAfter, given).seconds
    except BadRequest as error:
        raise BadRequest(f"expires_after.{error}", param=f"expires_after.{error.param}") from None


def _file_of(request: Request) -> FileRecord:
    return batches_of(request).store.file(request.path_params["file_id"], caller_of(request).tenant)


def _page(request: Request, records: Sequence[_RecordT], *, most: int, default: int) -> tuple[Sequence[_RecordT], bool]:
    """At most `limit` records after the one that `after` names, and whether there are more."""
    given = request.query_params.get("limit", str(default))
    if not given.isdecimal() or not 1 <= int(given[:6]) <= most:
        raise BadRequest(f"limit should be from 1 to {most}", param="limit")
    if (after := request.query_params.get("after")) is not None:
        start = next((place for place, record in enumerate(records, 1) if record.id == after), None)
        if start is None:
            raise BadRequest(f"after: no such id here: {after[:64]!r}", param="after")
        records = records[start:]
    return records[: int(given[:6])], len(records) > int(given[:6])


def _listing(data: list[dict[str, Any]], more: bool) -> Response:
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return JsonResponse({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more})


def _file(record: FileRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.size,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def _batch(record: BatchRecord) -> dict[str, Any]:
    faults = [{"code": one.code, "line": one.line, "message": one.message, "param": one.param} for one in record.faults]
    shown_times = (status for status in Status if status is not Status.VALIDATING)
    total = record.prompt_tokens + record.completion_tokens
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": record.model,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": record.status,
        "output_file_id": record.output_file_id if record.status.is_end else None,
        "error_file_id": record.error_file_id if record.status.is_end else None,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        **{f"{status}_at": record.times.get(status) for status in shown_times},
        "request_counts": {"total": record.total, "completed": record.completed, "failed": record.failed},
        "usage": {
            "input_tokens": record.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": record.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": total,
        },
        "metadata": record.metadata,
    }
