"""Shows that the raw ASGI harness notices each wrong behaviour it exists for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from tests.instruments.asgi_client import DISCONNECT, HANG, ASGIViolation, Exchange

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from tests.instruments.asgi_wire import Moment, Server

pytestmark = pytest.mark.anyio

START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"1"), (b"x-a", b"2")]}


def part(body: bytes, *, more: bool = True) -> Message:
    """One body message."""
    return {"type": "http.response.body", "body": body, "more_body": more}


END = part(b"", more=False)


def sends(*messages: Message) -> ASGIApp:
    """An app that sends these, and never looks at `receive`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return app


async def read_body(receive: Receive) -> list[tuple[bytes, bool]]:
    """Read messages until the body or the client is at an end."""
    got: list[tuple[bytes, bool]] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return [*got, (b"GONE", False)]
        got.append((message["body"], message["more_body"]))
        if not message["more_body"]:
            return got


async def watched(scope: Scope, receive: Receive, send: Send) -> None:
    """A well-behaved streaming app with a watcher, as a router is one; it streams until the client goes."""
    await read_body(receive)
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        group.start_soon(watch)
        await send(START)
        while True:
            await send(part(b"x"))
            await anyio.lowlevel.checkpoint()


async def test_a_whole_response_is_clean() -> None:
    """A correct app gives status, all headers, the joined body, one start and one end."""
    exchange = await Exchange().run(sends(START, part(b"a"), part(b"b"), END))
    assert (exchange.status, exchange.body, exchange.chunks) == (200, b"ab", [b"a", b"b", b""])
    assert exchange.header("X-A") == [b"1", b"2"]
    assert (exchange.starts, exchange.ends, exchange.finished_cleanly) == (1, 1, True)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([part(b"a")], "before the start"),
        ([START, START], "second start"),
        ([START, END, part(b"late")], "after the end"),
        ([START, END, END], "after the end"),
        ([{**START, "status": "200"}], "status '200'"),
        ([{**START, "headers": [(b"X-Upper", b"1")]}], "not lower-case"),
        ([{**START, "headers": [("x-text", "1")]}], "not bytes"),
        ([{**START, "headers": [(b"x-split", b"1\r\nx: 2")]}], "control character"),
        ([START, {"type": "http.response.body", "body": "text"}], "body of type str"),
        ([START, {"type": "http.response.body", "body": memoryview(b"x")}], "body of type memoryview"),
        ([{**START, "headers": [(b"content-length", b"3")]}, part(b"ab", more=False)], "less body"),
        ([{**START, "headers": [(b"content-length", b"1")]}, part(b"ab")], "more body"),
        ([{**START, "status": 204}, part(b"ab")], "none are allowed"),
        ([{"type": "http.response.begin"}], "of type 'http.response.begin'"),
        ([], "without starting a response"),
    ],
)
async def test_broken_asgi_is_noticed(messages: list[Message], complaint: str) -> None:
    """Each way to break the message sequence raises in the app, and is kept."""
    exchange = Exchange()
    with pytest.raises(ASGIViolation, match=complaint):
        await exchange.run(sends(*messages))
    assert complaint in exchange.violations[0]
    assert not exchange.finished_cleanly


async def test_a_swallowed_violation_still_fails_the_run() -> None:
    """An app that catches what `send` raises at it cannot hide the violation."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await sends(START, END)(scope, receive, send)
        with pytest.raises(ASGIViolation):
            await send(END)

    with pytest.raises(ASGIViolation, match="after the end"):
        await Exchange().run(app)


@pytest.mark.parametrize("call", ["receive", "send"])
async def test_two_calls_at_once_are_a_violation(call: str) -> None:
    """Two tasks inside `receive`, or inside `send`, are noticed."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await receive()

        async def once() -> None:
            await (receive() if call == "receive" else send(part(b"x")))

        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(once)

    exchange = Exchange()
    with pytest.raises(ExceptionGroup):
        await exchange.run(app)
    assert exchange.violations == [f"the application called {call}() twice at once"]


@pytest.mark.parametrize(
    ("server", "messages"),
    [
        ("uvicorn", [(b"a", True), (b"b", False)]),
        ("hypercorn", [(b"a", True), (b"b", True), (b"", False)]),
    ],
)
async def test_the_body_comes_in_the_servers_way(server: Server, messages: list[tuple[bytes, bool]]) -> None:
    """Chunks arrive one by one; hypercorn ends them with an empty message."""
    got: list[tuple[bytes, bool]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        got.extend(await read_body(receive))
        await sends(START, END)(scope, receive, send)

    await Exchange(body=[b"a", b"b"], server=server).run(app)
    assert got == messages


async def test_the_client_can_go_during_the_upload() -> None:
    """`DISCONNECT` between chunks gives the chunk before it, then the disconnect; no answer is asked for."""
    got: list[tuple[bytes, bool]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        got.extend(await read_body(receive))

    exchange = await Exchange(body=[b"a", DISCONNECT, b"never"]).run(app)
    assert got == [(b"a", True), (b"GONE", False)]
    assert exchange.disconnected
    assert not exchange.finished_cleanly


async def test_an_upload_can_pause_and_stall() -> None:
    """An event holds the upload until it is set, `HANG` until the client goes."""
    gate = anyio.Event()
    got: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] != "http.disconnect":
            got.append(message["body"])

    exchange = Exchange(body=[b"a", gate, b"b", HANG])
    async with exchange.running(app):
        await anyio.wait_all_tasks_blocked()
        assert got == [b"a"]
        gate.set()
        await anyio.wait_all_tasks_blocked()
        assert got == [b"a", b"b"]
        exchange.disconnect()


@pytest.mark.parametrize("moment", ["start", 1, 3])
async def test_the_client_goes_after_a_message(moment: Moment) -> None:
    """The message itself arrives, nothing after it does, and the watcher is told."""
    exchange = await Exchange(at={moment: DISCONNECT}).run(watched)
    assert exchange.disconnected
    assert (exchange.status, len(exchange.chunks)) == (200, 0 if moment == "start" else moment)
    assert not exchange.finished_cleanly


async def test_an_app_deaf_to_the_disconnect_runs_into_the_bound() -> None:
    """Before the start, too, an app that does not listen is noticed by the time bound."""

    async def deaf(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep_forever()

    exchange = Exchange()
    with pytest.raises(TimeoutError, match="not over in time"):
        async with exchange.running(deaf, timeout=0.05):
            exchange.disconnect()
    assert exchange.ended


async def test_a_late_send_is_silent_or_raises() -> None:
    """After a disconnect `send` reaches nobody; with `late_send` it raises, as ASGI 2.4 servers do."""
    silent = await Exchange(at={1: DISCONNECT}).run(sends(START, part(b"a"), part(b"b"), END))
    assert (silent.body, silent.complete, silent.ends) == (b"a", False, 1)
    gone = OSError("gone")
    with pytest.raises(OSError, match="gone") as caught:
        await Exchange(at={1: DISCONNECT}, late_send=gone).run(sends(START, part(b"a"), part(b"b")))
    assert caught.value is gone


@pytest.mark.parametrize(("moment", "chunks"), [("start", 0), (2, 1), ("end", 2)])
async def test_send_can_raise_at_any_message(moment: Moment, chunks: int) -> None:
    """The exception comes out of the app as it is, and the client has what came before."""
    exchange = Exchange(at={moment: OSError("broken pipe")})
    with pytest.raises(OSError, match="broken pipe") as caught:
        await exchange.run(sends(START, part(b"a"), part(b"b"), END))
    assert caught.value is exchange.exception
    assert (len(exchange.chunks), exchange.complete) == (chunks, False)


async def test_send_can_hang_and_be_cancelled() -> None:
    """A client that stops reading parks `send` for ever; `cancel()` gets the app out."""
    exchange = Exchange(at={2: HANG})
    async with exchange.running(sends(START, part(b"a"), part(b"b"))):
        await exchange.hung()
        assert exchange.chunks == [b"a"]
        exchange.cancel()
    assert exchange.cancelled
    assert not exchange.hanging


async def test_send_can_wait_for_an_event() -> None:
    """A slow client holds back one message until the test lets it go."""
    gate = anyio.Event()
    exchange = Exchange(at={1: gate})
    async with exchange.running(sends(START, part(b"a"), END)):
        await exchange.started()
        await anyio.wait_all_tasks_blocked()
        assert exchange.chunks == []
        gate.set()
    assert exchange.finished_cleanly


@pytest.mark.parametrize("finished_first", [True, False])
async def test_the_normal_end_lets_a_watcher_run_inside_the_last_send(finished_first: bool) -> None:
    """An app that marks itself finished only after its last `send` is cancelled by its own watcher."""
    state = {"finished": False, "cut": False}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive)
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                await receive()
                if not state["finished"]:
                    state["cut"] = True
                    group.cancel_scope.cancel()

            group.start_soon(watch)
            await send(START)
            state["finished"] = finished_first
            await send(END)
            state["finished"] = True
            group.cancel_scope.cancel()

    exchange = await Exchange().run(app)
    assert exchange.complete
    assert state == {"finished": finished_first, "cut": not finished_first}


async def test_uvicorn_repeats_the_disconnect_and_hypercorn_hangs() -> None:
    """A second `receive` after the disconnect returns at once under uvicorn, never under hypercorn."""

    async def greedy(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive)
        await sends(START, END)(scope, receive, send)
        for _ in range(2):
            assert (await receive())["type"] == "http.disconnect"

    assert (await Exchange().run(greedy)).finished_cleanly
    with pytest.raises(TimeoutError):
        await Exchange(server="hypercorn").run(greedy, timeout=0.05)


async def test_receive_blocks_while_the_response_is_under_way() -> None:
    """Between the body and the end of the response `receive` says nothing."""
    told = anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive)
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                await receive()
                told.set()

            group.start_soon(watch)
            await send(START)
            await anyio.wait_all_tasks_blocked()
            assert not told.is_set()
            await send(END)

    await Exchange().run(app)
    assert told.is_set()


async def test_the_scope_is_what_a_server_gives() -> None:
    """Defaults are a JSON POST; the test may drop the "asgi" key, replace headers and set raw paths."""
    plain = Exchange().scope
    assert (plain["method"], plain["asgi"]["spec_version"]) == ("POST", "2.3")
    assert (b"content-length", b"2") in plain["headers"]
    odd = Exchange(spec_version=None, path="/a b", headers=[("Host", "h"), ("X", "1"), ("X", "2")], body=[b""]).scope
    assert "asgi" not in odd
    assert odd["raw_path"] == b"/a%20b"
    assert [pair for pair in odd["headers"] if pair[0] in (b"host", b"x")] == [
        (b"host", b"h"),
        (b"x", b"1"),
        (b"x", b"2"),
    ]
    assert (b"transfer-encoding", b"chunked") in odd["headers"]


async def test_send_need_not_suspend() -> None:
    """With `send_suspends=False` no other task runs between the app's messages."""
    turns: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as group:

            async def other() -> None:
                turns.append("other")

            group.start_soon(other)
            await sends(START, part(b"a"), END)(scope, receive, send)
            turns.append("sent")

    await Exchange(send_suspends=False).run(app)
    await Exchange().run(app)
    assert turns == ["sent", "other", "other", "sent"]
