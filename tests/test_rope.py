"""Ropes: bytes in pieces read as the same bytes in one piece, and cut into the same blocks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asgi_router.extraction import extract
from asgi_router.prefix_key import BYTES_PER_TOKEN
from asgi_router.rope import PART_BYTES, Rope, RopeReader
from asgi_router.scheduling.blocks import block_hashes, cut
from tests.prompts import CHAT, TEXT

ASCII = st.text(st.characters(max_codepoint=127), max_size=40)
PIECES = st.lists(st.one_of(st.binary(max_size=40), ASCII), max_size=8)
LONG = "".join(f"{number} " for number in range(60_000))  # 349 KB: read in several parts


def joined(pieces: list[bytes | str]) -> bytes:
    return b"".join(piece.encode() if isinstance(piece, str) else piece for piece in pieces)


@given(PIECES, st.data())
def test_it_reads_as_its_bytes(pieces: list[bytes | str], data: st.DataObject) -> None:
    """However it is cut into pieces, and into whatever parts it is read: no byte is lost, doubled or moved."""
    rope, whole = Rope.of(*pieces), joined(pieces)
    assert (bytes(rope), rope.size) == (whole, len(whole))
    assert rope.head(7) == whole[:7]
    reader, at = RopeReader(rope), 0
    while at < len(whole):
        size = data.draw(st.integers(1, len(whole) - at))
        assert bytes(reader.read(size)) == whole[at : at + size]
        at += size
    assert bytes(reader.read(0)) == b""


@given(PIECES, st.integers(1, 30), st.booleans())
def test_blocks_are_those_of_its_bytes(pieces: list[bytes | str], block_bytes: int, growing: bool) -> None:
    """Pieces leave no mark on a block's id: another client's prompt may come in others."""
    whole = Rope.of(joined(pieces))
    assert block_hashes(Rope.of(*pieces), block_bytes, growing=growing) == block_hashes(
        whole, block_bytes, growing=growing
    )


@pytest.mark.parametrize("block_bytes", [64, 512, 2_000, PART_BYTES, 3 * PART_BYTES])
@pytest.mark.parametrize("at", [1, 1_000, PART_BYTES, 200_001])
@pytest.mark.parametrize("growing", [False, True])
def test_long_texts_are_cut_alike(block_bytes: int, at: int, growing: bool) -> None:
    """A text that is read in parts has the blocks that it has in one piece, and those of two pieces, too."""
    expected = block_hashes(Rope.of(LONG.encode()), block_bytes, ("m",), growing=growing)
    for rope in (Rope.of(LONG), Rope.of(LONG[:at], LONG[at:].encode()), Rope.of(LONG[:at].encode(), LONG[at:])):
        assert block_hashes(rope, block_bytes, ("m",), growing=growing) == expected
    assert len(set(expected)) == len(expected) > 0


@pytest.mark.parametrize("end", ["", "é", "\U0001f600", "漢" * 1_000])
@pytest.mark.parametrize("length", [90_000, 99_999, 100_001, 349_000])
@pytest.mark.parametrize("route", ["chat", "parts", "prompt", "batch"])
def test_a_long_text_matches_its_continuation(end: str, length: int, route: str) -> None:
    """The key is the same up to the end of what two prompts share, however each of them is held in memory."""

    def body(text: str, more: str = "") -> bytes:
        fields: dict[str, object] = {"prompt": [text, more] if route == "batch" else text + more}
        content = [{"type": "text", "text": text}, {"type": "text", "text": more}] if route == "parts" else text + more
        if route in ("chat", "parts"):
            fields = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": content}]}
        return json.dumps(fields).encode()

    path = CHAT if route in ("chat", "parts") else TEXT
    said = LONG[:length]
    first, second = extract(body(said), path), extract(body(said, end + LONG[:500]), path)
    shared = first.key.size
    assert said.encode() in first.prefix_key
    assert second.prefix_key[:shared] == first.prefix_key[:shared]
    assert second.prefix_key.endswith((end + LONG[:500]).encode())
    assert len(second.prefix_key) == second.key.size
    assert second.prompt_tokens == -(-second.key.size // BYTES_PER_TOKEN)
    blocks = block_hashes(first.key, 512)
    assert block_hashes(second.key, 512)[: len(blocks)] == blocks


def test_what_is_left_of_a_key() -> None:
    """A key that is cut for good is known by its blocks, its length, and its first block."""
    rope = Rope.of(LONG[:300].encode(), LONG[300:])
    left = cut(rope, 512, ("m",), 200)
    assert left.ids == block_hashes(rope, 512, ("m",), 200)
    assert (left.size, left.head) == (len(LONG), LONG[:512].encode())
    assert cut(Rope.of("short"), 512).head == b"short"


def test_a_long_salt_hides_no_prompt() -> None:
    """What separates caches is no part of the prompt's length, nor of what may be read of it."""
    said = [{"role": "user", "content": "x" * 200_000}]
    plain = extract(json.dumps({"messages": said}).encode(), CHAT)
    salted = extract(json.dumps({"cache_salt": "s" * 5_000_000, "messages": said}).encode(), CHAT)
    assert salted.prompt_tokens == plain.prompt_tokens > 50_000
    assert salted.prefix_key.endswith(plain.prefix_key)
