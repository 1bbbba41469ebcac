"""/v1/files and /v1/batches as the openai client uses them."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest

from tests.serve.batch.conftest import CHAT, Client, jsonl, line
from tests.serve.live import Live


def test_a_batch_from_upload_to_output(ann: Client) -> None:
    lines = [line(f"r{i}", f"question {i}", seed=i) for i in range(12)]
    lines[3]["body"]["temperature"] = 9
    lines[7]["body"]["stream"] = True
    batch = ann.start(lines, metadata={"run": "7"})
    assert (batch.status, batch.object, batch.endpoint) == ("validating", "batch", CHAT)
    assert batch.expires_at == batch.created_at + 86_400
    done = ann.when(batch.id, "completed")
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 12, "completed": 10, "failed": 2}
    assert done.metadata == {"run": "7"}
    assert done.model == "tiny-test"
    assert None not in (done.in_progress_at, done.finalizing_at, done.completed_at)
    assert [done.failed_at, done.cancelled_at, done.expired_at, done.errors] == [None] * 4
    output, errors = ann.output(done), ann.errors(done)
    assert set(output) == {f"r{i}" for i in range(12)} - {"r3", "r7"}
    assert set(errors) == {"r3", "r7"}
    one = output["r5"]
    assert one["error"] is None
    assert one["id"].startswith("batch_req_")
    assert one["response"]["status_code"] == 200
    assert one["response"]["request_id"].startswith("req-")
    assert one["response"]["body"]["choices"][0]["message"]["content"] == " one two three"
    assert errors["r3"]["response"]["status_code"] == 400
    assert errors["r3"]["response"]["body"]["error"]["param"] == "temperature"
    assert errors["r7"]["response"]["body"]["error"]["param"] == "stream"
    assert done.usage is not None
    assert done.usage.output_tokens == sum(r["response"]["body"]["usage"]["completion_tokens"] for r in output.values())


def test_the_answer_is_that_of_http(ann: Client) -> None:
    body = line("x", "the same?", temperature=0, logprobs=True, top_logprobs=2, n=2)["body"]
    direct = ann.live.post(CHAT, body, headers={"authorization": "Bearer pk-ann"}).json()
    [answer] = ann.output(ann.when(ann.start([line("x", "the same?", **body)]).id, "completed")).values()
    answer = answer["response"]["body"]
    assert answer["choices"] == direct["choices"]
    assert {k: v for k, v in answer["usage"].items() if k != "prompt_tokens_details"} == {
        k: v for k, v in direct["usage"].items() if k != "prompt_tokens_details"
    }


def test_the_error_is_that_of_http(ann: Client) -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"max_tokens": 0},
        {"tools": [{}]},
        {"top_p": "high"},
        {"messages": []},
        {"service_tier": "gold"},
    )
    for body in wrong:
        asked = line("x", **body)
        direct = ann.live.post(CHAT, asked["body"], headers={"authorization": "Bearer pk-ann"})
        batch = ann.when(ann.start([asked]).id, "completed")
        response = ann.errors(batch)["x"]["response"]
        assert (response["status_code"], response["body"]) == (direct.status_code, direct.json())


def test_completions_too(ann: Client) -> None:
    lines = [line("a", "once", url="/v1/completions", max_tokens=2)]
    done = ann.when(ann.start(lines, endpoint="/v1/completions").id, "completed")
    assert ann.output(done)["a"]["response"]["body"]["choices"][0]["text"] == " one two"


def test_lines_run_as_class_batch(ann: Client) -> None:
    seen = ann.live.engine.backend.seen
    seen.clear()
    lines = [line("plain"), line("flex", service_tier="flex"), line("auto", service_tier="auto")]
    lines += [line("named", paceline={"class": "batch"}), line("pushy", paceline={"class": "interactive"})]
    done = ann.when(ann.start([*lines, line("tier", service_tier="priority")]).id, "completed")
    assert [spec.traffic_class for spec in seen] == ["batch"] * 4
    assert {spec.tenant for spec in seen} == {"ann"}
    errors = {name: one["response"]["body"]["error"]["param"] for name, one in ann.errors(done).items()}
    assert errors == {"pushy": "paceline.class", "tier": "service_tier"}
    assert ann.output(done)["flex"]["response"]["body"]["service_tier"] == "flex"


def test_bad_lines_fail_the_batch_and_are_named(ann: Client) -> None:
    lines = [
        json.dumps(line("good")),
        "{not json",
        "",
        json.dumps({**line("x"), "custom_id": 5}),
        json.dumps({**line("y"), "method": "GET"}),
        json.dumps(line("z", url="/v1/completions")),
        json.dumps(line("good")),
        json.dumps({**line("w"), "body": []}),
        "[1]",
    ]
    file = ann.upload("\r\n".join(lines).encode())
    batch = ann.api.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
    failed = ann.when(batch.id, "failed")
    assert failed.errors is not None
    assert failed.errors.data is not None
    assert [(one.line, one.code) for one in failed.errors.data] == [
        (2, "invalid_json_line"),
        (4, "invalid_custom_id"),
        (5, "invalid_method"),
        (6, "invalid_url"),
        (7, "duplicate_custom_id"),
        (8, "invalid_body"),
        (9, "invalid_json_line"),
    ]
    assert failed.failed_at is not None
    assert failed.output_file_id is None


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n \n", "empty_file"),
        (b"\x00\x01\xff\n", "invalid_json_line"),
        (jsonl([line("a", model="gpt-4o")]), "model_not_found"),
        (jsonl([line(str(i)) for i in range(51)]), "too_many_requests"),
    ],
)
def test_files_that_are_no_batch(ann: Client, content: bytes, code: str) -> None:
    batch = ann.api.batches.create(input_file_id=ann.upload(content), endpoint=CHAT, completion_window="24h")
    failed = ann.when(batch.id, "failed")
    assert failed.errors is not None
    assert failed.errors.data is not None
    assert failed.errors.data[0].code == code


def test_files_by_the_client(ann: Client) -> None:
    content = jsonl([line("a")])
    made = ann.api.files.create(
        file=("../../etc/päss\nwd.jsonl", content),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (made.object, made.purpose, made.bytes) == ("file", "batch", len(content))
    assert made.expires_at == made.created_at + 3600
    assert made.filename == "päss%0Awd.jsonl"  # which the client has escaped
    assert ann.api.files.retrieve(made.id).model_dump() == made.model_dump()
    assert ann.api.files.content(made.id).read() == content
    newer = ann.upload(content)
    listed = [file.id for file in ann.api.files.list(purpose="batch")]
    assert listed.index(newer) < listed.index(made.id)
    assert ann.api.files.list(limit=1).data[0].id == listed[0]
    assert made.id in [file.id for file in ann.api.files.list(limit=2, order="asc")]  # through all pages
    assert ann.api.files.delete(made.id).deleted is True
    with pytest.raises(openai.NotFoundError):
        ann.api.files.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        ann.api.files.delete(made.id)


def test_a_deleted_input_does_not_stop_its_batch(ann: Client) -> None:
    ann.live.call(lambda: setattr(ann.live.engine, "step_s", 0.01))
    batch = ann.start([line(str(i)) for i in range(20)])
    ann.api.files.delete(batch.input_file_id)
    assert len(ann.output(ann.when(batch.id, "completed"))) == 20


def test_batches_are_listed_newest_first_in_pages(bob: Client) -> None:
    made = []
    for i in range(5):
        made.append(bob.start([line(str(i))]).id)
        time.sleep(0.002)
    assert [batch.id for batch in bob.api.batches.list(limit=2)] == made[::-1]
    page = bob.api.batches.list(limit=2)
    assert page.has_more is True
    for batch_id in made:
        bob.when(batch_id, "completed")


def test_another_tenant_sees_nothing(ann: Client, bob: Client) -> None:
    batch = ann.when(ann.start([line("secret")]).id, "completed")
    assert batch.output_file_id is not None
    for file_id in (batch.input_file_id, batch.output_file_id):
        for call in (bob.api.files.retrieve, bob.api.files.content, bob.api.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file_id)
    for ask in (bob.api.batches.retrieve, bob.api.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(batch.id)
    with pytest.raises(openai.NotFoundError):
        bob.api.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
    assert batch.id not in [one.id for one in bob.api.batches.list()]
    assert batch.output_file_id not in [one.id for one in bob.api.files.list()]
    assert ann.output(batch)


def test_a_key_without_the_class_makes_no_batch(batch_server: Live) -> None:
    carol = Client(batch_server, "pk-carol")
    with carol.api, pytest.raises(openai.PermissionDeniedError):
        carol.start([line("a")])


def test_no_key_no_files(batch_server: Live) -> None:
    assert batch_server.get("/v1/files").status_code == 401
    assert batch_server.get("/v1/batches").status_code == 401


def test_cancelling_keeps_what_is_answered(ann: Client) -> None:
    ann.live.call(lambda: setattr(ann.live.engine, "step_s", 0.01))
    batch = ann.start([line(str(i), max_tokens=3 if i < 4 else 400, ignore_eos=True) for i in range(40)])
    ann.live.until(lambda: bool(ann.api.batches.retrieve(batch.id).request_counts.completed))  # type: ignore[union-attr]
    cancelling = ann.api.batches.cancel(batch.id)
    assert cancelling.status == "cancelling"
    assert cancelling.cancelling_at is not None
    done = ann.when(batch.id, "cancelled")
    assert done.request_counts is not None
    assert 0 < done.request_counts.completed == len(ann.output(done)) < 40
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        ann.api.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1 fortnight"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"input_file_id": 7}, "input_file_id"),
    ],
)
def test_bad_batches(ann: Client, change: dict[str, object], param: str) -> None:
    body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"} | change
    answer = ann.live.post("/v1/batches", body, headers={"authorization": "Bearer pk-ann"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_output_is_no_input(ann: Client) -> None:
    done = ann.when(ann.start([line("a")]).id, "completed")
    assert done.output_file_id is not None
    with pytest.raises(openai.BadRequestError, match="purpose"):
        ann.api.batches.create(input_file_id=done.output_file_id, endpoint=CHAT, completion_window="24h")


def test_bad_uploads(ann: Client) -> None:
    def post(**options: object) -> tuple[int, str | None]:
        headers = {"authorization": "Bearer pk-ann"} | options.pop("headers", {})  # type: ignore[operator]
        answer = ann.live.client.post("/v1/files", headers=headers, **options)  # type: ignore[arg-type]
        return answer.status_code, answer.json()["error"]["param"]

    file = {"file": ("in.jsonl", b"{}")}
    assert post(files=file) == (400, "purpose")
    assert post(files=file, data={"purpose": "fine-tune"}) == (400, "purpose")
    assert post(files={"other": ("a", b"")}, data={"purpose": "batch"}) == (400, "file")
    assert post(files=[("file", ("a", b"")), ("file", ("b", b""))], data={"purpose": "batch"})[0] == 400
    assert post(files=file, data={"purpose": "batch"} | {str(i): "x" for i in range(17)})[0] == 400
    assert post(files=file, data={"purpose": "b" * 5000})[0] == 400
    assert post(json={"purpose": "batch"})[0] == 415
    assert post(content=b"--x\r\nnonsense", headers={"content-type": "multipart/form-data; boundary=x"})[0] == 400
    assert post(content=b"", headers={"content-type": "multipart/form-data"})[0] == 400
    seconds = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "soon"}
    assert post(files=file, data=seconds) == (400, "expires_after.seconds")


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=101", "after=batch_nobody", "limit=-1"])
def test_bad_pages(ann: Client, query: str) -> None:
    assert ann.live.get(f"/v1/batches?{query}", headers={"authorization": "Bearer pk-ann"}).status_code == 400


@pytest.mark.parametrize("name", ["..", "%2e%2e%2flock", "x" * 5000, "file-%00", "..%2f..%2fbatches"])
def test_ids_are_no_paths(ann: Client, name: str) -> None:
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
        assert ann.live.get(path, headers={"authorization": "Bearer pk-ann"}).status_code == 404


def test_without_a_folder_there_are_no_batches(shared_server: Live) -> None:
    answer = shared_server.get("/v1/batches")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_batches")
