"""Owns what the tests of aborts share: engines that can be told, requests with an id, and the asking itself."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import anyio
from anyio.lowlevel import checkpoint

from tests.instruments.asgi_client import HANG, Exchange
from tests.instruments.fake_worker import Script
from tests.routed import Kind, Routed, answer, completion_body

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import httpx

    from asgi_router.observability.events import RequestFinished
    from tests.instruments.asgi_wire import Action, Moment
    from tests.instruments.fake_worker import Call, FakeWorker, Step
    from tests.instruments.steps import Pause

ABORT_PATH = "/v1/abort_requests"
UNKNOWN_PATH = Script.json({"detail": "Not Found"}, status=404)

Answer = dict[str, object]


def engine(completion: Script, told: Script = UNKNOWN_PATH) -> Callable[[httpx.Request], Script]:
    """A worker that answers completions by one script, and aborts by another."""
    return lambda request: told if request.url.path == ABORT_PATH else completion


def knows(aborted: dict[str, int] | None = None, not_found: Sequence[str] = ()) -> Script:
    """What a FastDeploy engine answers that has aborted these requests, with as many tokens each."""
    listed = [{"request_id": name, "output_token_count": tokens} for name, tokens in (aborted or {}).items()]
    result = {"aborted": listed, "not_found": list(not_found)}
    return Script.json({"request_id": "control-1", "status": "success", "error_message": None, "result": result})


def stuck(kind: Kind = "stream", close: Sequence[Pause] = ()) -> tuple[Script, anyio.Event]:
    """A good answer that stops after its first chunk, and the event that the client has that chunk."""
    taken = anyio.Event()
    script = answer(kind)

    def steps() -> Iterator[Step]:
        yield next(iter(script.body))
        taken.set()  # the next chunk is asked for only when `send` has returned
        yield HANG

    return replace(script, body=steps(), close=close), taken


def request(name: str = "job-1", *, at: Mapping[Moment, Action] | None = None, body_id: str | None = None) -> Exchange:
    """A completion request with an `x-request-id`, and perhaps another id in its body."""
    body = completion_body() if body_id is None else completion_body(request_id=body_id)
    return Exchange(body=body, headers=[("x-request-id", name)], at=at or {})


async def ask(app: Routed, payload: object, *, headers: Sequence[tuple[str, str]] = ()) -> Exchange:
    """Ask for an abort; the answer is JSON in any case."""
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    exchange = Exchange(path=ABORT_PATH, body=body, headers=headers)
    await exchange.run(app.app)
    assert exchange.finished_cleanly
    assert exchange.header("content-type") == [b"application/json"]
    return exchange


async def abort(app: Routed, *ids: str, headers: Sequence[tuple[str, str]] = ()) -> Answer:
    """Abort requests by their ids, or all if there are none, and return what became of it."""
    exchange = await ask(app, {"req_ids": ids} if ids else {"abort_all": True}, headers=headers)
    assert exchange.status == 200
    answer = exchange.json()
    assert isinstance(answer, dict)
    assert set(answer) == {"aborted", "not_found", "unconfirmed", "workers"}
    return answer


def aborted(answer: Answer) -> dict[str, int | None]:
    """The tokens of each aborted request."""
    items = cast("list[dict[str, object]]", answer["aborted"])
    assert all(set(item) == {"request_id", "output_token_count"} for item in items)
    return {cast("str", item["request_id"]): cast("int | None", item["output_token_count"]) for item in items}


def results(answer: Answer) -> list[tuple[object, object]]:
    """What came of telling each worker, and its status."""
    workers = cast("list[dict[str, object]]", answer["workers"])
    return [(worker["result"], worker["status"]) for worker in workers]


def told(worker: FakeWorker) -> list[object]:
    """The bodies of the aborts that a worker was told."""
    return [json.loads(call.body) for call in abort_calls(worker)]


def abort_calls(worker: FakeWorker) -> list[Call]:
    """The aborts that a worker was told."""
    return [call for call in worker.calls if call.url.endswith(ABORT_PATH)]


def outcomes(app: Routed) -> list[tuple[str, str]]:
    """A list to which each finished request adds its id and its outcome from now on."""
    seen: list[tuple[str, str]] = []

    def note(event: RequestFinished) -> None:
        seen.append((event.request_id, event.outcome))

    app.router.observers.append(note)
    return seen


async def until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds. For what nobody tells of; the caller bounds it."""
    while not condition():
        await checkpoint()
