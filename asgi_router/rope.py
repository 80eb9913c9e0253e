"""Owns the rope: a long string of bytes in pieces that are never joined.

A copy of a megabyte costs as much as its hash once the memory for it has to come from the system, a page fault for
every 4 KB. So a long text is left as it was parsed, and encoded a part at a time, in memory that is used again.
"""

from __future__ import annotations

from typing import Self

from msgspec import Struct

PART_BYTES = 64 * 1024
"""What is copied at once: half a processor's second cache at the most, and less than malloc takes from the system."""


class Rope(Struct, frozen=True, gc=False):
    """Bytes in pieces. A piece that is a `str` is ASCII, and stands for its bytes."""

    pieces: tuple[bytes | str, ...] = ()
    size: int = 0
    """Bytes of all pieces."""

    @classmethod
    def of(cls, *pieces: bytes | str) -> Self:
        """Return a rope of these pieces."""
        return cls(pieces, sum(map(len, pieces)))

    def head(self, size: int) -> bytes:
        """Return the first `size` bytes, or all if there are no more."""
        first = self.pieces[0] if self.pieces else b""
        if isinstance(first, bytes) and len(first) >= size:
            return first[:size]
        return bytes(RopeReader(self).read(min(size, self.size)))

    def __bytes__(self) -> bytes:
        return bytes(RopeReader(self).read(self.size))


NOTHING = Rope()


class Cut(Struct, frozen=True, gc=False):
    """What is left of a key that was cut into blocks: what choosing a worker needs, a thousandth of a long key."""

    ids: tuple[int, ...]
    """Of its whole blocks: see `scheduling/blocks.py`."""
    size: int
    """Bytes of the key."""
    head: bytes
    """Its first block; if it has no whole one, all of it."""


class RopeReader:
    """Reads a rope from its beginning."""

    __slots__ = ("_at", "_piece", "_pieces")

    def __init__(self, rope: Rope) -> None:
        self._pieces = iter(rope.pieces)
        self._piece: bytes | str = b""
        self._at = 0

    def read(self, size: int) -> bytes | memoryview:
        """Return the next `size` bytes. There have to be so many."""
        found = []
        while size > (rest := len(self._piece) - self._at):
            found.append(self._part(rest))
            size -= rest
            self._piece, self._at = next(self._pieces), 0
        part = self._part(size)
        return b"".join((*found, part)) if found else part

    def _part(self, size: int) -> bytes | memoryview:
        piece, begin = self._piece, self._at
        self._at = end = begin + size
        return piece[begin:end].encode() if isinstance(piece, str) else memoryview(piece)[begin:end]
