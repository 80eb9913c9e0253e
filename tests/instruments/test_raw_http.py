"""Shows that the raw client and server tell a clean end from a cut one, and a close from a reset, at both ends."""

from __future__ import annotations

import anyio
import httpx
import pytest

from tests.instruments.raw_http import Truncated, connect
from tests.instruments.raw_server import CLOSE, HANG, REQUEST, RESET, Step, raw_server

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nx-a: 1\r\nX-A:2\r\n\r\n"


async def test_a_request_and_its_answer_cross_byte_by_byte() -> None:
    """The server records what came, the client reads head, headers and body."""
    async with raw_server([REQUEST, OK]) as server, connect(server.host, server.port) as client:
        await client.post(b"{}", headers=[("x-b", "3")])
        head = await client.read_head()
        assert (head.status, await client.read_body(head)) == (200, b"ok")
        sent = b"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-length: 2\r\nx-b: 3\r\n\r\n{}"
        assert bytes(server.connections[0].received) == sent
        request, body = server.connections[0].requests[0]
        assert (request.header("X-B"), body) == ([b"3"], b"{}")


async def test_a_connection_serves_one_request_after_the_other() -> None:
    """A request that comes after an answer, when the script waits for it already, is read as the first one was."""
    async with raw_server([REQUEST, OK] * 3) as server, connect(server.host, server.port) as client:
        for path in ("/long/first", "/2", "/3"):
            await client.post(b"{}", path=path)
            assert await client.read_body(await client.read_head()) == b"ok"
        assert server.connections[0].received.count(b"POST") == 3
        assert [body for _, body in server.connections[0].requests] == [b"{}"] * 3


async def test_chunks_keep_their_boundaries() -> None:
    """Each chunk comes as it was framed, also when it trickles in, and the last one is told apart."""
    gate = anyio.Event()
    script: list[Step] = [CHUNKED + b"3;ext=1\r\nab", gate, b"c\r\n1\r\nd\r\n0\r\ntrailer: 1\r\n\r\n"]
    async with raw_server(script) as server, connect(server.host, server.port) as client:
        head = await client.read_head()
        assert head.header("x-a") == [b"1", b"2"]
        gate.set()
        assert [await client.read_chunk() for _ in range(3)] == [b"abc", b"d", None]


async def test_a_chunked_request_is_read_whole() -> None:
    """A REQUEST step understands chunked uploads, and two requests on one connection."""
    async with raw_server([REQUEST, OK, REQUEST, OK]) as server, connect(server.host, server.port) as client:
        await client.send(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        await client.send(b"2\r\nbc\r\n0\r\n\r\nGET /2 HTTP/1.1\r\n\r\n")
        await server.connections[0].received_requests(2)
        bodies = [(head.first_line.split()[1], body) for head, body in server.connections[0].requests]
        assert bodies == [(b"/", b"abc"), (b"/2", b"")]


@pytest.mark.parametrize("body", [b"", b"3\r\n", b"3\r\nab", b"3\r\nabc\r\n", b"3\r\nabc\r\n0\r\n"])
async def test_a_cut_chunked_body_is_not_an_end(body: bytes) -> None:
    """Wherever it is cut before the last blank line, reading it raises."""
    async with raw_server([CHUNKED + body]) as server, connect(server.host, server.port) as client:
        head = await client.read_head()
        with pytest.raises(Truncated):
            await client.read_body(head)


async def test_a_short_body_of_declared_length_is_not_an_end() -> None:
    """Fewer bytes than content-length raise, with what had come."""
    async with raw_server([OK[:-1]]) as server, connect(server.host, server.port) as client:
        head = await client.read_head()
        with pytest.raises(Truncated) as caught:
            await client.read_body(head)
        assert caught.value.partial == b"o"


async def test_a_body_without_length_ends_with_the_connection() -> None:
    """As HTTP/1.0 has it."""
    script = [b"HTTP/1.1 200 OK\r\n\r\nto the", b" end"]
    async with raw_server(script) as server, connect(server.host, server.port) as client:
        assert await client.read_body(await client.read_head()) == b"to the end"


async def test_the_server_can_reset_or_close() -> None:
    """A reset is an error for the client, a close a clean end."""
    gate = anyio.Event()
    async with raw_server([b"x", gate, RESET], [b"x", gate, CLOSE]) as server:
        async with connect(server.host, server.port) as first:
            assert await first.read_exactly(1) == b"x"
            async with connect(server.host, server.port) as second:
                assert await second.read_exactly(1) == b"x"
                gate.set()
                with pytest.raises(ConnectionResetError):
                    await first.read_to_end()
                assert await second.read_to_end() == b""
        assert [connection.server for connection in server.connections] == ["reset", "closed"]


@pytest.mark.parametrize("how", ["reset", "closed"])
async def test_the_server_sees_how_the_client_left(how: str) -> None:
    """Also while its script hangs."""
    async with raw_server([b"x", HANG]) as server, connect(server.host, server.port) as client:
        assert await client.read_exactly(1) == b"x"
        client.reset() if how == "reset" else client.close()
        with anyio.fail_after(5):
            await server.connections[0].gone()
        assert server.connections[0].client == how


async def test_the_client_can_half_close() -> None:
    """The server sees the end of the request, and its answer still arrives."""
    gate = anyio.Event()
    async with raw_server([gate, OK]) as server, connect(server.host, server.port) as client:
        await client.send(b"hello")
        client.finish_sending()
        await server.connected(1)
        with anyio.fail_after(5):
            await server.connections[0].gone()
        assert bytes(server.connections[0].received) == b"hello"
        gate.set()
        assert await client.read_to_end() == OK


async def test_a_request_cut_off_by_the_client_ends_the_script() -> None:
    """No answer is played to a client that left in the middle of its request."""
    async with raw_server([REQUEST, OK]) as server, connect(server.host, server.port) as client:
        await client.send(b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\n{")
        client.finish_sending()
        assert await client.read_to_end() == b""
        assert server.connections[0].requests == []


async def test_a_large_body_passes_both_ways() -> None:
    """More than any socket buffer holds: partial writes are continued."""
    large = b"x" * 8_000_000
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 8000000\r\n\r\n" + large
    async with raw_server([REQUEST, answer]) as server, connect(server.host, server.port) as client:
        await client.post(large)
        assert await client.read_body(await client.read_head()) == large
        assert server.connections[0].requests[0][1] == large


async def test_a_stale_connection_of_a_real_pool() -> None:
    """A server that resets a connection once it is idle meets httpx on the next one."""
    idle = anyio.Event()
    async with raw_server([REQUEST, OK, idle, RESET], [REQUEST, OK]) as server:
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.post(server.url)).text == "ok"
            idle.set()
            await server.connections[0].gone()
            assert (await client.post(server.url)).text == "ok"
        assert [len(connection.requests) for connection in server.connections] == [1, 1]


async def test_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent peer fails the test soon, and says that time was up."""
    monkeypatch.setattr("tests.instruments.raw_http.READ_TIMEOUT", 0.05)
    async with raw_server([HANG]) as server, connect(server.host, server.port) as client:
        with pytest.raises(TimeoutError):
            await client.read_head()


async def test_nobody_listens() -> None:
    """Connecting to a closed port is an error, not a hang."""
    async with raw_server([]) as server:
        pass
    with pytest.raises(OSError, match=r"[Cc]onnect"):
        async with connect(server.host, server.port):
            pass
