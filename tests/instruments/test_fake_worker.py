"""Shows that the fake fleet plays its scripts and notices each misuse it exists for."""

from __future__ import annotations

from dataclasses import replace

import anyio
import httpx
import pytest

from tests.instruments.fake_worker import HANG, FakeFleet, FakeStream, Script

pytestmark = pytest.mark.anyio

W1 = "http://w1:8000"
ONE = Script(body=[b"a", b"b"])


def post(url: str = W1) -> httpx.Request:
    """A request for the first worker."""
    return httpx.Request("POST", f"{url}/v1/completions?q=1", headers={"x-a": "1"}, content=b"{}")


async def read(response: httpx.Response) -> list[bytes]:
    """All chunks, read from the stream itself."""
    assert isinstance(response.stream, FakeStream)
    return [chunk async for chunk in response.stream]


async def test_a_request_and_its_answer_are_recorded() -> None:
    """The worker keeps method, URL, headers, body and time-outs, and gives its chunks as they are scripted."""
    fleet = FakeFleet({W1: ONE})
    request = post()
    request.extensions["timeout"] = {"read": 3.0}
    response = await fleet.handle_async_request(request)
    assert (response.status_code, await read(response)) == (200, [b"a", b"b"])
    await response.aclose()
    call = fleet[W1].calls[0]
    assert (call.method, call.url, call.body) == ("POST", f"{W1}/v1/completions?q=1", b"{}")
    assert (b"x-a", b"1") in call.headers
    assert (call.timeout, call.stage) == ({"read": 3.0}, "answered")
    fleet.assert_clean()


async def test_httpx_itself_can_use_the_fleet() -> None:
    """A stock client streams through the fleet and leaves it clean."""
    fleet = FakeFleet({W1: Script.sse("Hel", "lo"), "http://w2": Script.json({"ok": True}, status=429)})
    async with httpx.AsyncClient(transport=fleet) as client:
        response = await client.post(W1)
        assert response.text.endswith('{"content": "lo"}}]}\n\ndata: [DONE]\n\n')
        assert (await client.post("http://w2:80")).json() == {"ok": True}
    assert fleet.close_calls == 1
    fleet.assert_clean()


async def test_origins_do_not_mix() -> None:
    """Each worker gets its own requests only, and an unknown origin fails the test even if it is swallowed."""
    fleet = FakeFleet({W1: ONE, "http://w2:8000": ONE})
    await (await fleet.handle_async_request(post("http://w2:8000"))).aclose()
    assert [len(worker.calls) for worker in fleet.workers.values()] == [0, 1]
    fleet.assert_clean()
    with pytest.raises(AssertionError, match="no worker"):
        await fleet.handle_async_request(post("http://w3:8000"))
    with pytest.raises(AssertionError, match="no worker"):
        fleet.assert_clean()


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), httpx.ConnectTimeout("late")])
async def test_a_failed_connect_reaches_no_worker(error: httpx.TransportError) -> None:
    """The caller gets the very exception, and the worker has seen no request."""
    fleet = FakeFleet({W1: Script(connect=[error])})
    with pytest.raises(type(error)) as caught:
        await fleet.handle_async_request(post())
    assert caught.value is error
    assert (fleet[W1].connects, fleet[W1].calls) == (1, [])
    fleet.assert_clean()


@pytest.mark.parametrize("error", [httpx.ReadError(""), httpx.RemoteProtocolError(""), httpx.ReadTimeout("")])
async def test_a_failure_before_the_head(error: httpx.TransportError) -> None:
    """The worker has the request, the caller an exception and no response to close."""
    fleet = FakeFleet({W1: Script(head=[error])})
    with pytest.raises(type(error)):
        await fleet.handle_async_request(post())
    assert [call.stage for call in fleet[W1].calls] == ["failed"]
    fleet.assert_clean()


async def test_the_head_waits_for_the_test() -> None:
    """Until the event is set there is no response; a caller that gives up is recorded as cancelled."""
    gate = anyio.Event()
    fleet = FakeFleet({W1: [Script(head=[gate], body=[]), Script(head=[HANG])]})
    answers: list[httpx.Response] = []

    async def ask() -> None:
        answers.append(await fleet.handle_async_request(post()))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await fleet[W1].received(1)
        await anyio.wait_all_tasks_blocked()
        assert (answers, fleet[W1].calls[0].stage) == ([], "head")
        gate.set()
    await answers[0].aclose()
    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await fleet[W1].received(2)
        group.cancel_scope.cancel()
    assert [call.stage for call in fleet[W1].calls] == ["answered", "cancelled"]
    fleet.assert_clean()


async def test_the_body_waits_fails_and_hangs_where_the_script_says() -> None:
    """Chunks before the step arrive; the step then waits, raises or hangs."""
    gate = anyio.Event()
    boom = httpx.ReadError("boom")
    fleet = FakeFleet({W1: [Script(body=[b"a", gate, b"b", boom, b"never"]), Script(body=[b"a", HANG])]})
    stream = (await fleet.handle_async_request(post())).stream
    assert isinstance(stream, FakeStream)
    chunks = aiter(stream)
    assert await anext(chunks) == b"a"
    with anyio.move_on_after(0.01) as early:
        await stream._next_chunk()
    assert early.cancelled_caught
    gate.set()
    assert await anext(chunks) == b"b"
    with pytest.raises(httpx.ReadError, match="boom"):
        await anext(chunks)
    await stream.aclose()
    response = await fleet.handle_async_request(post())
    with anyio.move_on_after(0.01) as hanging:
        await read(response)
    assert hanging.cancelled_caught
    assert fleet[W1].streams[1].chunks_given == 1


async def test_other_tasks_run_between_chunks() -> None:
    """A free-running body is a checkpoint per chunk, so that nobody's watcher starves."""
    fleet = FakeFleet({W1: Script(body=[b"x"] * 50)})
    seen: list[int] = []

    async def watch() -> None:
        while len(seen) < 50:
            seen.append(fleet[W1].streams[0].chunks_given)
            await anyio.lowlevel.checkpoint()

    response = await fleet.handle_async_request(post())
    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        await read(response)
    assert len(set(seen)) > 10


async def test_a_response_never_closed_is_noticed() -> None:
    """Reading to the end is not closing: the leak is counted and fails `assert_clean`."""
    fleet = FakeFleet({W1: ONE})
    response = await fleet.handle_async_request(post())
    await read(response)
    assert (fleet[W1].open_responses, fleet[W1].never_closed) == (1, 1)
    with pytest.raises(AssertionError, match="1 of them never closed"):
        fleet.assert_clean()


async def test_reading_after_close_is_noticed() -> None:
    """It raises, and is kept even if the caller swallows it."""
    fleet = FakeFleet({W1: ONE})
    stream = (await fleet.handle_async_request(post())).stream
    assert isinstance(stream, FakeStream)
    chunks = aiter(stream)
    await stream.aclose()
    with pytest.raises(httpx.StreamClosed):
        await anext(chunks)
    with pytest.raises(AssertionError, match="read after aclose"):
        fleet.assert_clean()


async def test_reading_twice_and_closing_under_a_reader_are_noticed() -> None:
    """A second iteration raises; a close while another task reads is kept."""
    fleet = FakeFleet({W1: Script(body=[HANG])})
    stream = (await fleet.handle_async_request(post())).stream
    assert isinstance(stream, FakeStream)
    async with anyio.create_task_group() as group:
        group.start_soon(anext, aiter(stream))
        await anyio.wait_all_tasks_blocked()
        await stream.aclose()
        group.cancel_scope.cancel()
    with pytest.raises(httpx.StreamConsumed):
        aiter(stream)
    assert fleet[W1].misuse == ["the body was closed while it was being read", "the body was iterated twice"]


async def test_a_close_can_raise() -> None:
    """The exception comes out of `aclose`, and the response counts as closed."""
    fleet = FakeFleet({W1: replace(ONE, close=[httpx.ReadError("broken")])})
    response = await fleet.handle_async_request(post())
    with pytest.raises(httpx.ReadError, match="broken"):
        await response.aclose()
    fleet.assert_clean()


@pytest.mark.parametrize("shield", [True, False])
async def test_a_slow_close_tells_a_shield_from_none(shield: bool) -> None:
    """Under a cancelled scope only a shielded close comes to its end; the other leaves the response open."""
    gate = anyio.Event()
    fleet = FakeFleet({W1: replace(ONE, close=[gate])})
    response = await fleet.handle_async_request(post())

    async def finish() -> None:
        await fleet[W1].closing(1)
        gate.set()

    async def cancelled_close() -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            with anyio.CancelScope(shield=shield):
                await response.aclose()

    async with anyio.create_task_group() as group:
        group.start_soon(finish)
        group.start_soon(cancelled_close)
    assert fleet[W1].never_closed == 0
    assert fleet[W1].open_responses == (0 if shield else 1)


async def test_a_hanging_close_stays_open() -> None:
    """A close that hangs until somebody gives up was begun, but leaves the response open."""
    fleet = FakeFleet({W1: replace(ONE, close=[HANG])})
    response = await fleet.handle_async_request(post())
    with anyio.move_on_after(0.01) as grace:
        await response.aclose()
    assert grace.cancelled_caught
    assert (fleet[W1].open_responses, fleet[W1].never_closed) == (1, 0)
    await fleet[W1].closing(1)


async def test_scripts_can_change_from_request_to_request() -> None:
    """A list is used up to its last, a function is asked each time, and a worker's scripts can be replaced."""
    fleet = FakeFleet({W1: [Script(status=500), Script(status=200)]})

    async def status() -> int:
        response = await fleet.handle_async_request(post())
        await response.aclose()
        return response.status_code

    assert [await status() for _ in range(3)] == [500, 200, 200]
    fleet[W1].scripts = lambda request: Script(status=int(request.headers["x-a"]) + 400)
    assert await status() == 401


async def test_a_request_after_the_transport_was_closed_is_noticed() -> None:
    """It raises as httpx does, and is kept."""
    fleet = FakeFleet({W1: ONE})
    await fleet.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        await fleet.handle_async_request(post())
    with pytest.raises(AssertionError, match="closed"):
        fleet.assert_clean()
