"""Owns the table of releases where prefill and decode are apart: who is leased after each step of either worker.

A row is a story of one request. Behind each step stands who holds the request afterwards, with both counters: `PD` both
workers, `-D` the decode worker alone. The prefill worker's lease ends at the first body byte of a stream and at the end
of another answer, the decode worker's at the end of what the client gets; and whatever goes wrong ends both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.disaggregated.routed_apart import AT_ONCE, DECODE, PREFILL, RoutedApart, Walk, request
from tests.instruments.fake_worker import Script
from tests.routed import KINDS, error_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.disaggregated.routed_apart import Dialect
    from tests.routed import Kind

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_graces")]

every_kind = pytest.mark.parametrize("kind", KINDS)
at_once = pytest.mark.parametrize("dialect", AT_ONCE)

HEADS = "p.take PD, d.take PD, p.head PD, d.head PD"
BEGUN = f"{HEADS}, p.chunk -D, d.chunk -D"  # of a stream
PREFILLED = "p.take PD, p.head PD, p.chunk PD, p.end -D, d.take -D, d.head -D, d.chunk -D"  # in vLLM's dialect

# What a story is called, the story, and the client's status.
BOTH: Mapping[str, tuple[str, int]] = {
    "connect error of prefill": ("d.take PD, p.fail --", 502),
    "connect error of decode": ("p.take PD, d.fail --", 502),
    "connect error of decode after the head of prefill": ("p.take PD, p.head PD, d.fail --", 502),
    "prefill breaks off before its head": ("p.take PD, d.take PD, p.fail --", 502),
    "decode breaks off before its head": ("p.take PD, d.take PD, d.fail --", 502),
    "prefill breaks off before its first byte": (f"{HEADS}, p.fail --", 502),
    "decode breaks off before its first byte": (f"{HEADS}, d.fail --", 502),
    "client leaves before the heads": ("p.take PD, d.take PD, leave --", 0),
    "client leaves before the first byte": (f"{HEADS}, leave --", 0),
    "host cancels before the heads": ("p.take PD, d.take PD, cancel --", 0),
    "abort before the heads": ("p.take PD, d.take PD, abort --", 410),
    "shutdown before the heads": ("p.take PD, d.take PD, shutdown --", 503),
}
STREAM: Mapping[str, tuple[str, int]] = {
    "success": (f"{BEGUN}, p.end -D, d.chunk -D, d.end --", 200),
    "success, decode is quicker": ("d.take PD, d.head PD, d.chunk PD, p.take PD, p.head PD, p.chunk -D, d.end --", 200),
    "success, prefill's rest comes last": (f"{BEGUN}, d.end --, p.end --", 200),
    "decode breaks off mid-stream": (f"{BEGUN}, d.fail --", 200),
    "prefill breaks off mid-stream": (f"{BEGUN}, p.fail -D, d.end --", 200),
    "prefill breaks off after its first byte, before decode's": (f"{HEADS}, p.chunk -D, p.fail --", 502),
    "decode breaks off after prefill's first byte": (f"{HEADS}, p.chunk -D, d.fail --", 502),
    "client leaves mid-stream": (f"{BEGUN}, leave --", 200),
    "client leaves between the first bytes": (f"{HEADS}, p.chunk -D, leave --", 0),
    "host cancels mid-stream": (f"{BEGUN}, cancel --", 200),
    "abort mid-stream": (f"{BEGUN}, abort --", 200),
    "shutdown mid-stream": (f"{BEGUN}, shutdown --", 200),
}
WHOLE: Mapping[str, tuple[str, int]] = {
    "success": (f"{HEADS}, p.chunk PD, p.end -D, d.chunk -D, d.end --", 200),
    "success, decode begins before prefill ends": (f"{HEADS}, p.chunk PD, d.chunk PD, p.end -D, d.end --", 200),
    "success, decode ends before prefill ends": (f"{HEADS}, p.chunk PD, d.end P-, p.end --", 200),
    "decode breaks off while prefill answers": (f"{HEADS}, p.chunk PD, d.chunk PD, d.fail --", 200),
    "prefill breaks off while decode answers": (f"{HEADS}, p.chunk PD, d.chunk PD, p.fail -D, d.end --", 200),
    "prefill breaks off before decode answers": (f"{HEADS}, p.chunk PD, p.fail --", 502),
    "client leaves while both answer": (f"{HEADS}, p.chunk PD, d.chunk PD, leave --", 200),
    "client leaves after prefill's end": (f"{HEADS}, p.end -D, d.chunk -D, leave --", 200),
    "shutdown while both answer": (f"{HEADS}, p.chunk PD, d.chunk PD, shutdown --", 200),
}
IN_TURN: Mapping[str, tuple[str, int]] = {
    "success": (f"{PREFILLED}, d.end --", 200),
    "connect error of prefill": ("p.fail --", 502),
    "prefill breaks off before its head": ("p.take PD, p.fail --", 502),
    "prefill breaks off mid-answer": ("p.take PD, p.head PD, p.chunk PD, p.fail --", 502),
    "connect error of decode": ("p.take PD, p.head PD, p.end -D, d.fail --", 502),
    "decode breaks off before its head": ("p.take PD, p.head PD, p.end -D, d.take -D, d.fail --", 502),
    "decode breaks off before its first byte": ("p.take PD, p.head PD, p.end -D, d.take -D, d.head -D, d.fail --", 502),
    "decode breaks off mid-answer": (f"{PREFILLED}, d.fail --", 200),
    "client leaves while prefill works": ("p.take PD, leave --", 0),
    "client leaves mid-prefill": ("p.take PD, p.head PD, p.chunk PD, leave --", 0),
    "client leaves before decode's head": ("p.take PD, p.head PD, p.end -D, d.take -D, leave --", 0),
    "client leaves mid-answer": (f"{PREFILLED}, leave --", 200),
    "host cancels while prefill works": ("p.take PD, cancel --", 0),
    "abort while prefill works": ("p.take PD, abort --", 410),
    "shutdown mid-answer": (f"{PREFILLED}, shutdown --", 200),
}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the rest of a prefill answer as long as a story wants."""
    monkeypatch.setattr("asgi_router.disaggregated.mode.REST_GRACE", 60.0)


async def tell(walk: Walk, story: str, status: int) -> None:
    """Go through a story, and look at each step who is leased."""
    async with walk.going():
        assert walk.held == "PD"
        for line in story.split(", "):
            step, held = line.split()
            await walk.step(step)
            assert walk.held == held, f"after {step}"
        if walk.exchange.complete and walk.legs["p"].at == "body":
            await walk.step("p.end")
    assert walk.held == "--"
    assert (walk.exchange.status or 0) == status
    ended_well = story.endswith(("d.end --", "p.end --"))
    assert walk.exchange.finished_cleanly == (ended_well or status > 200)


@at_once
@every_kind
@pytest.mark.parametrize("event", BOTH)
async def test_before_the_first_byte(dialect: Dialect, kind: Kind, event: str) -> None:
    """Until the first byte both leases end together, whichever worker fails and whoever ends it."""
    await tell(Walk(dialect, kind), *BOTH[event])


@at_once
@pytest.mark.parametrize("event", STREAM)
async def test_stream(dialect: Dialect, event: str) -> None:
    """Of a stream, the prefill worker is released at the first byte of its body."""
    await tell(Walk(dialect, "stream"), *STREAM[event])


@at_once
@pytest.mark.parametrize("event", WHOLE)
async def test_not_a_stream(dialect: Dialect, event: str) -> None:
    """Of another answer, the prefill worker is released at the end of its body."""
    await tell(Walk(dialect, "json"), *WHOLE[event])


@every_kind
@pytest.mark.parametrize("event", IN_TURN)
async def test_in_turn(kind: Kind, event: str) -> None:
    """In vLLM's dialect a prefill answer is never a stream: its worker is released at the end, before decode begins."""
    await tell(Walk("vllm", kind), *IN_TURN[event])


@pytest.mark.parametrize("status", [400, 500])
@every_kind
@at_once
async def test_refused_by_prefill(dialect: Dialect, kind: Kind, status: int) -> None:
    """F-03: a prefill worker that refuses ends the decode leg at its head, and is released at the end of its answer."""
    walk = Walk(dialect, kind, prefill_status=status)
    await tell(walk, "d.take PD, p.take PD, p.head P-, p.chunk P-, p.end --", status)
    assert walk.routed.decode.calls[0].stage == "cancelled"


@pytest.mark.parametrize("status", [400, 500])
@every_kind
async def test_refused_by_prefill_in_turn(kind: Kind, status: int) -> None:
    """The same where decode isn't asked yet: it never is."""
    walk = Walk("vllm", kind, prefill_status=status)
    await tell(walk, "p.take PD, p.head P-, p.chunk P-, p.end --", status)
    assert walk.routed.calls[DECODE] == 0


@pytest.mark.parametrize("status", [400, 500])
@every_kind
@at_once
async def test_refused_by_decode(dialect: Dialect, kind: Kind, status: int) -> None:
    """A decode worker that refuses ends the prefill leg at its head, and is released at the end of its answer."""
    walk = Walk(dialect, kind, decode_status=status)
    await tell(walk, "p.take PD, d.take PD, d.head -D, d.chunk -D, d.end --", status)
    assert walk.routed.prefill.calls[0].stage == "cancelled"


@pytest.mark.parametrize("status", [400, 500])
@every_kind
async def test_refused_by_decode_in_turn(kind: Kind, status: int) -> None:
    """The same where prefill is over by then."""
    walk = Walk("vllm", kind, decode_status=status)
    await tell(walk, "p.take PD, p.head PD, p.end -D, d.take -D, d.head -D, d.chunk -D, d.end --", status)


@at_once
@every_kind
@pytest.mark.parametrize("missing", [PREFILL, DECODE])
async def test_no_pair(dialect: Dialect, kind: Kind, missing: str) -> None:
    """F-12: where one role has no worker nothing is taken, and nothing is sent to the other one."""
    routed = RoutedApart(Script(), Script(), pd_dialect=dialect)
    routed.router.workers.remove(missing)
    exchange = await request(kind).run(routed.app)
    assert error_of(exchange) == (503, "no_worker_available")
    assert set(routed.requests.values()) == set(routed.calls.values()) == {0}
    routed.assert_released(exchange)


@every_kind
@pytest.mark.parametrize(("dialect", "fields"), [("fastdeploy", {"request_id": 123}), ("sglang", {"n": 2})])
async def test_f11_a_body_that_can_not_be_divided(dialect: Dialect, kind: Kind, fields: dict[str, object]) -> None:
    """F-11: when the workers' bodies can't be made both leases are given back, and nobody is asked."""
    routed = RoutedApart(Script(), Script(), pd_dialect=dialect)
    exchange = await request(kind, **fields).run(routed.app)
    assert error_of(exchange) == (400, "invalid_request")
    assert routed.calls == {PREFILL: 0, DECODE: 0}
    assert routed.events[0].attempts == 1  # they were leased
    routed.assert_released(exchange)


@every_kind
async def test_both_are_released_before_the_client_has_the_end(kind: Kind) -> None:
    """Whoever has seen a whole answer finds the counters as they were, also if it is a prefill worker's refusal."""
    walk = Walk("fastdeploy", kind, prefill_status=422)
    seen: list[str] = []
    inner_send = walk.exchange.send

    async def send(message: object) -> None:
        if isinstance(message, dict) and message["type"] == "http.response.body" and not message.get("more_body"):
            seen.append(walk.held)
        await inner_send(message)  # type: ignore[arg-type]

    walk.exchange.send = send  # type: ignore[method-assign]
    async with walk.going():
        await walk.to("d.take p.take p.head p.end")
    assert seen == ["--"]
