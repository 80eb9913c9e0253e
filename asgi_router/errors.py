"""Owns what can go wrong and how a client is told: exceptions whose type says whose fault it was.

A `RouterError` becomes an OpenAI-shaped JSON answer while the response has not begun. Messages are ours, short
and fixed: they never quote the request, a worker's address or another library's exception.
"""

from __future__ import annotations

import json
from typing import ClassVar

RETRY_AFTER = 1
"""Seconds that a client is asked to wait (`Retry-After`) when no worker can take its request now."""


class RouterError(Exception):
    """The request can't be completed."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "router_error"
    param: ClassVar[str | None] = None
    headers: ClassVar[tuple[tuple[bytes, bytes], ...]] = ()

    def body(self) -> bytes:
        """Return the error in OpenAI's shape, as JSON."""
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


class InvalidRequest(RouterError):
    """The client's fault: the request can't be read or forwarded."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class BodyTooLarge(InvalidRequest):
    """The client's fault: the body is larger than `MAX_BODY_BYTES`."""

    status = 413
    code = "request_too_large"


class UnknownModel(InvalidRequest):
    """The client's fault: every worker lists its models, and none lists this one."""

    status = 404
    code = "model_not_found"
    param = "model"


class RequestAborted(RouterError):
    """Nobody's fault: somebody who may has asked for its end.

    410 is the 4xx that fits and that no client library repeats: an abort that is answered by the same request again
    would be none. (409 and 5xx are repeated by OpenAI's own.)
    """

    status = 410
    type = "request_aborted_error"
    code = "request_aborted"


class NoWorker(RouterError):
    """Nobody's fault: no worker can take a request now."""

    status = 503
    type = "service_unavailable_error"
    code = "no_worker_available"
    headers = ((b"retry-after", str(RETRY_AFTER).encode()),)


class RoutedTwice(RouterError):
    """The operator's fault: a router sent the request to one that has no worker of its own, or round in circles."""

    status = 508
    code = "routed_twice"


class AllBusy(NoWorker):
    """Nobody's fault: every worker that could take the request has as many as it may have."""

    code = "all_workers_busy"


class QueueFull(AllBusy):
    """Nobody's fault: the workers are busy, and as many requests are waiting as may wait."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class QueueTimeout(AllBusy):
    """Nobody's fault: no place became free within `QUEUE_TIMEOUT`."""

    code = "queue_timeout"


class ShuttingDown(NoWorker):
    """Nobody's fault: the router takes no new requests, or the time to finish this one is over."""

    code = "shutting_down"


class WorkerError(RouterError):
    """The worker's fault: it broke before its answer began, or answered what is not HTTP."""

    status = 502
    type = "upstream_error"
    code = "worker_failed"


class WorkerBusy(WorkerError):
    """Nobody's fault: the worker has answered 429 or 503, and another one may be asked instead.

    The client never sees this: where there is no other worker it gets the worker's own answer.
    """

    code = "worker_busy"


class WorkerPreempted(WorkerBusy):
    """Nobody's fault: the workers gave the request up, and it begins again on others. The client never sees this."""

    code = "worker_preempted"


class WorkerUnreachable(WorkerError):
    """The worker's fault: no connection, so it has seen nothing of the request; another one may be tried."""

    code = "worker_unreachable"


class WorkerTimeout(WorkerError):
    """The worker's fault: `FIRST_BYTE_TIMEOUT` or `IDLE_TIMEOUT` passed without a byte."""

    status = 504
    code = "worker_timeout"


class AnswerCut(WorkerError):
    """The worker's fault: it broke after its answer began. The client sees the answer cut short."""

    code = "worker_failed_mid_answer"


# What is late, is said beforehand by one of these, and made only when it is.


def silent() -> WorkerTimeout:
    """Return the error of a worker whose answer hasn't begun in time."""
    return WorkerTimeout("The worker did not answer in time.")


def paused() -> WorkerTimeout:
    """Return the error of a worker whose answer has stopped."""
    return WorkerTimeout("The worker paused for too long.")


def unreachable() -> WorkerUnreachable:
    """Return the error of a worker that could not be connected to in time."""
    return WorkerUnreachable("No connection to the worker could be made in time.")
