"""Owns the fuzzing of our client: exchanges made by a grammar, broken in known ways, cut anywhere, cancelled anywhere.

    python -m tests.http11.fuzz --minutes 30 [--seed N] [--uvloop]

What must hold of each, whatever comes:

1. The outcome doesn't depend on the segments (but for how much of a body came before an error in it).
2. A valid response is read as what it was made from; one that was broken is an error, or still waits for more.
3. Every connection that isn't idle in the end is closed, once; a connection that is idle may be used again.
4. A second exchange on an idle connection gets its own answer.
5. The reader holds no more than one read above its bound, and nothing raises but an `Http11Error`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from typing import TYPE_CHECKING

from asgi_router.upstream.http11.errors import Http11Error
from tests.http11.memory import Line, drain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.http11.memory import Outcome

SPACE = (b"", b" ", b"  ", b"\t ")
TOKEN = b"!#$%&'*+-.^_`|~09azAZ"
VALUE = bytes(range(0x21, 0x7F)) + b" \t" + bytes(range(0x80, 0x100))
SPECIAL = (
    b"\r",
    b"\n",
    b"\r\n",
    b"\0",
    b" ",
    b"\t",
    b":",
    b"\x0b",
    b"\x7f",
    b"0",
    b";",
    b"chunked",
    b"content-length: 1\r\n",
)


class Made:
    """A response made by the grammar: its bytes, and what it means."""

    def __init__(self, rng: random.Random) -> None:
        self.method = rng.choice(["POST", "POST", "POST", "HEAD"])
        self.status = rng.choice([200, 200, 200, 201, 204, 304, 404, 429, 500, 999])
        self.body = bytes(rng.choices(b"ab\r\n0:;", k=rng.choice([0, 1, 2, 5, 17, 300])))
        self.version = rng.choice([b"1.1", b"1.1", b"1.1", b"1.0"])
        self.framing = rng.choice(["length", "chunked", "close"] if self.version == b"1.1" else ["length", "close"])
        self.fields = [
            (_bytes(rng, TOKEN, 1, 8), _bytes(rng, VALUE, 0, 12).strip(b" \t")) for _ in range(rng.randrange(5))
        ]
        names = (b"connection", b"content-length", b"transfer-encoding", b"upgrade", b"proxy-connection")
        self.fields = [field for field in self.fields if field[0].lower() not in names]
        self.bodiless = self.method == "HEAD" or self.status in (204, 304)
        self.wire = self._write(rng)

    def _write(self, rng: random.Random) -> bytes:
        interim = b"".join(
            b"HTTP/1.1 %d x\r\n%b\r\n" % (rng.choice([100, 102, 103, 199]), b"link: </x>\r\n" * rng.randrange(2))
            for _ in range(rng.choice([0, 0, 0, 1, 3]))
        )
        framing: list[tuple[bytes, bytes]] = []
        if self.framing == "length":
            framing.append((_case(rng, b"content-length"), b"%d" % len(self.body)))
        elif self.framing == "chunked":
            framing.append((_case(rng, b"transfer-encoding"), _case(rng, b"chunked")))
        if rng.random() < 0.2:
            framing.append((b"connection", rng.choice([b"close", b"keep-alive", b"Keep-Alive, x-a"])))
        fields = self.fields + framing
        rng.shuffle(fields)
        self.fields = fields
        lines = [b"%b:%b%b%b\r\n" % (name, rng.choice(SPACE), value, rng.choice(SPACE[:3])) for name, value in fields]
        head = b"HTTP/%b %d%b\r\n%b\r\n" % (self.version, self.status, rng.choice([b"", b" ", b" OK"]), b"".join(lines))
        return interim + head + (b"" if self.bodiless else self._framed(rng))

    def _framed(self, rng: random.Random) -> bytes:
        if self.framing != "chunked":
            return self.body
        wire, at = b"", 0
        while at < len(self.body):
            size = rng.randint(1, len(self.body) - at)
            digits = rng.choice([b"%x", b"%X", b"00%x"]) % size
            extension = rng.choice([b"", b"", b";a", b";a=b", b';a="b;c"'])
            wire += b"%b%b\r\n%b\r\n" % (digits, extension, self.body[at : at + size])
            at += size
        return wire + b"0\r\n" + b"x-trailer: 1\r\n" * rng.choice([0, 0, 1, 3]) + b"\r\n"

    @property
    def until_close(self) -> bool:
        """Its end is the end of the connection."""
        return self.framing == "close" and not self.bodiless

    @property
    def meaning(self) -> Outcome:
        """What a reader must see of it."""
        fields = [(name.lower(), value) for name, value in self.fields]
        return self.status, fields, b"" if self.bodiless else self.body, "ended"


def broken(rng: random.Random, wire: bytes) -> bytes:
    """Break a response in one to three places."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(wire) + 1)
        to = min(len(wire), at + rng.choice([0, 1, 1, 2, 8]))
        piece = rng.choice([b"", rng.choice(SPECIAL), rng.randbytes(rng.choice([1, 1, 4])), wire[to : to + 20]])
        wire = wire[:at] + piece + wire[to:]
    return wire


def cut(rng: random.Random, wire: bytes) -> list[bytes]:
    """Cut it into pieces."""
    if rng.random() < 0.2:
        return [wire[at : at + 1] for at in range(len(wire))]
    places = sorted({0, len(wire), *(rng.randrange(len(wire) + 1) for _ in range(rng.randrange(6)))})
    return [wire[start:end] for start, end in itertools.pairwise(places)]


async def exchange(pieces: Sequence[bytes], *, ends: bool, bodiless: bool) -> tuple[Outcome, bool]:
    """Play it on a connection of its own; return what its reader saw, and whether the connection is idle after it."""
    line = Line()
    seen = await line.play(pieces, ends=ends, bodiless=bodiless)
    told = line.log.told
    idle = told == ["opened", "freed"]
    if idle:
        again = await line.play([b"HTTP/1.1 200 OK\r\nconte", b"nt-length: 5\r\n\r\nagain"])
        assert (again[2], again[3]) == (b"again", "ended"), again
    line.connection.abort()
    await asyncio.sleep(0)
    assert told.count("gone") == told.count("closed") == 1, told
    return seen, idle


async def play(rng: random.Random) -> str:
    """Make and play one exchange; return its kind. Raises `AssertionError` if anything doesn't hold."""
    made = Made(rng)
    bodiless = made.method == "HEAD"
    kind = rng.choice(["whole", "whole", "broken", "cut short", "cancelled", "surplus", "line ends"])
    wire = made.wire
    ends = made.until_close or rng.random() < 0.2
    if kind == "broken":
        wire = broken(rng, wire)
    elif kind == "cut short":
        wire = wire[: rng.randrange(len(wire))]
        ends = True
    elif kind == "surplus" and not made.until_close:
        wire += rng.choice([b"x", b"HTTP/1.1 200 OK\r\n\r\n", b"x" + rng.randbytes(5)])
    elif kind == "line ends" and not made.until_close:
        wire += rng.choice([b"\r\n", b"\n", b"\r\n\r\n\r\n"])
    if kind == "cancelled":
        await cancel(rng, cut(rng, wire), bodiless=bodiless)
        return kind

    whole, idle = await exchange([wire], ends=ends, bodiless=bodiless)
    pieces = cut(rng, wire)
    in_pieces, still_idle = await exchange(pieces, ends=ends, bodiless=bodiless)
    if whole[0] and whole[3] in ("ended", "open"):
        assert (in_pieces, still_idle) == (whole, idle), (wire, pieces, whole, in_pieces)
    else:  # an error in a body: what came before it is the same, as far as it came
        assert (in_pieces[0], in_pieces[3]) == (whole[0], whole[3]), (wire, pieces, whole, in_pieces)
        assert whole[2].startswith(in_pieces[2]) or in_pieces[2].startswith(whole[2])
    if kind in ("whole", "surplus", "line ends"):
        assert whole == made.meaning, (wire, whole, made.meaning)
        assert not (idle and (ends or wire != made.wire)), wire
    if kind == "cut short" and not made.until_close:
        assert whole[3] not in ("ended", "open") or bodiless, (wire, whole)
    return kind


async def cancel(rng: random.Random, pieces: list[bytes], *, bodiless: bool) -> None:
    """Cancel the request, or close its answer, between two of the pieces."""
    line = Line()
    task = asyncio.create_task(line.connection.ask(b"", b"", bodiless=bodiless))
    await asyncio.sleep(0)
    for piece in pieces[: rng.randrange(len(pieces) + 1)]:
        if not line.transport.closing:
            line.connection.data_received(piece)
        if rng.random() < 0.3:
            await asyncio.sleep(0)
    if task.done() and task.exception() is None:
        answer = task.result()
        if rng.random() < 0.5:
            drain(answer)
        answer.close()
        answer.close()
    else:
        for _ in range(rng.randint(1, 3)):
            task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and (failure := task.exception()) is not None:
        assert isinstance(failure, Http11Error), failure
    for _ in range(2):
        await asyncio.sleep(0)
    *told, last = line.log.told
    assert last == "freed" or told in (["opened", "gone"], ["opened", "freed", "gone"]), line.log.told


def _bytes(rng: random.Random, alphabet: bytes, least: int, most: int) -> bytes:
    return bytes(rng.choices(alphabet, k=rng.randint(least, most)))


def _case(rng: random.Random, text: bytes) -> bytes:
    return rng.choice([text, text.upper(), text.title()])


async def main(minutes: float, seed: int) -> None:
    """Fuzz for that long, and print how much of what there was."""
    end = time.monotonic() + minutes * 60
    kinds: dict[str, int] = {}
    while time.monotonic() < end:
        try:
            kind = await play(random.Random(seed))
        except BaseException:
            print("seed", seed)  # noqa: T201
            raise
        kinds[kind] = kinds.get(kind, 0) + 1
        seed += 1
    print(f"seeds up to {seed}, none failed:", kinds)  # noqa: T201


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--uvloop", action="store_true")
    arguments = parser.parse_args()
    run = asyncio.run
    if arguments.uvloop:
        import uvloop

        run = uvloop.run
    run(main(arguments.minutes, arguments.seed))
