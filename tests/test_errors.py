"""Owns the proof that every error is answered in OpenAI's shape, with a status that says whose fault it was."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from asgi_router import errors
from asgi_router.errors import (
    AllBusy,
    AnswerCut,
    BodyTooLarge,
    InvalidRequest,
    NoWorker,
    QueueFull,
    QueueTimeout,
    RequestAborted,
    RoutedTwice,
    RouterError,
    ShuttingDown,
    UnknownModel,
    WorkerBusy,
    WorkerError,
    WorkerPreempted,
    WorkerTimeout,
    WorkerUnreachable,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

RETRY = ((b"retry-after", str(errors.RETRY_AFTER).encode()),)

# What the contract promises: class, status, type, code, param, headers.
ANSWERS: list[tuple[type[RouterError], int, str, str, str | None, tuple[tuple[bytes, bytes], ...]]] = [
    (RouterError, 500, "server_error", "router_error", None, ()),
    (InvalidRequest, 400, "invalid_request_error", "invalid_request", None, ()),
    (BodyTooLarge, 413, "invalid_request_error", "request_too_large", None, ()),
    (UnknownModel, 404, "invalid_request_error", "model_not_found", "model", ()),
    (RequestAborted, 410, "request_aborted_error", "request_aborted", None, ()),
    (NoWorker, 503, "service_unavailable_error", "no_worker_available", None, RETRY),
    (RoutedTwice, 508, "server_error", "routed_twice", None, ()),
    (AllBusy, 503, "service_unavailable_error", "all_workers_busy", None, RETRY),
    (QueueFull, 429, "rate_limit_error", "queue_full", None, RETRY),
    (QueueTimeout, 503, "service_unavailable_error", "queue_timeout", None, RETRY),
    (ShuttingDown, 503, "service_unavailable_error", "shutting_down", None, RETRY),
    (WorkerError, 502, "upstream_error", "worker_failed", None, ()),
    (WorkerPreempted, 502, "upstream_error", "worker_preempted", None, ()),
    (WorkerBusy, 502, "upstream_error", "worker_busy", None, ()),
    (WorkerUnreachable, 502, "upstream_error", "worker_unreachable", None, ()),
    (WorkerTimeout, 504, "upstream_error", "worker_timeout", None, ()),
    (AnswerCut, 502, "upstream_error", "worker_failed_mid_answer", None, ()),
]


def family(error: type[RouterError]) -> Iterator[type[RouterError]]:
    """An error class and all that derive from it, anywhere in the package."""
    yield error
    for derived in error.__subclasses__():
        if derived.__module__.startswith("asgi_router."):
            yield from family(derived)


@pytest.mark.parametrize(("error", "status", "kind", "code", "param", "headers"), ANSWERS)
def test_answer(
    error: type[RouterError],
    status: int,
    kind: str,
    code: str,
    param: str | None,
    headers: tuple[tuple[bytes, bytes], ...],
) -> None:
    """Each error has its status, its headers, and a body in OpenAI's shape (F-22, F-23)."""
    raised = error("What happened.")
    assert (raised.status, raised.headers) == (status, headers)
    assert json.loads(raised.body()) == {
        "error": {"message": "What happened.", "type": kind, "param": param, "code": code}
    }


def test_every_error_is_in_the_table() -> None:
    """No error of the package goes without its line in the table above."""
    assert {line[0] for line in ANSWERS} == set(family(RouterError))


def test_every_error_has_a_code_of_its_own() -> None:
    """A client can tell every error from every other by its code."""
    codes = [error.__dict__.get("code") for error in family(RouterError)]
    assert None not in codes
    assert len(set(codes)) == len(codes)


def test_the_type_says_whose_fault_it_was() -> None:
    """The client's faults are 4xx, the workers' and ours are 5xx; only 503 and 429 ask to come back, never 410."""
    for error in family(RouterError):
        assert (400 <= error.status < 500 and error.status not in (410, 429)) == issubclass(error, InvalidRequest)
        assert (error.status == 410) == issubclass(error, RequestAborted)
        assert (error.status in (502, 504)) == issubclass(error, WorkerError)
        assert (error.status in (429, 503)) == issubclass(error, NoWorker) == bool(error.headers)


def test_retry_after_is_a_number_of_seconds() -> None:
    """`Retry-After` is whole seconds, more than none."""
    name, value = NoWorker.headers[0]
    assert name == b"retry-after"
    assert value.isdigit()
    assert int(value) > 0


@pytest.mark.parametrize("message", ["", "ä☃", '"}\n\r\\', "\ud800", "data: x\n\ndata: [DONE]", "\0", "<script>"])
def test_any_message_is_valid_json_on_one_line(message: str) -> None:
    """Whatever a message holds, the body is ASCII JSON without a line break, so that it fits into one event."""
    body = RouterError(message).body()
    assert json.loads(body)["error"]["message"] == message
    assert body.isascii()
    assert b"\n" not in body
    assert b"\r" not in body


def test_an_error_without_a_message() -> None:
    """An empty message is no reason for another shape."""
    assert json.loads(NoWorker().body())["error"]["message"] == ""


def test_the_cause_is_not_told() -> None:
    """Another library's exception, which may name a worker or quote a prompt, stays out of the answer."""
    error = WorkerError("The worker failed.")
    error.__cause__ = OSError("http://10.0.0.1:8000 secret")
    assert b"secret" not in error.body()
