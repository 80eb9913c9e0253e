"""Owns the way of a KV cache from prefill to decode: what is kept for whom, and the small HTTP call that fetches it.

A decode engine asks the prefill engine's connector port, and is answered when the cache is there: a long poll. Where it
is never there, or the prefill engine is gone, the decode engine waits for ever. Real ones do so for minutes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from tests.instruments.steps import Changes

if TYPE_CHECKING:
    from collections.abc import Sequence


class Refused(Exception):
    """What was received is wrong; the text says how."""


@dataclass(frozen=True)
class HandOver:
    """One request's cache, or one for each of its prompts.

    Attributes:
        host, port: where the prefill engine gives it away.
        keys: what it is asked for by.
        seal: must be the same on both legs.
    """

    host: str
    port: int
    keys: tuple[str, ...]
    seal: str


class KvStore:
    """The caches of a prefill engine.

    Attributes:
        kept: the keys of those that are computed, and that nobody has fetched.
        changes: told of every step.
    """

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self.changes = Changes()
        self._known: set[str] = set()
        self._seals: dict[str, str] = {}
        self._asked: Counter[str] = Counter()

    def begin(self, hand_over: HandOver) -> None:
        """Take note of caches that will be computed.

        Raises:
            Refused: there was one by such a key before. A real engine knows a request by it for as long as it takes to
                notice that its client has gone, which is longer than the next attempt takes to come.
        """
        if taken := self._known.intersection(hand_over.keys):
            raise Refused(f"{taken} is in use already")
        self._known.update(hand_over.keys)
        self._seals.update(dict.fromkeys(hand_over.keys, hand_over.seal))
        self.changes.tell()

    def computed(self, keys: Sequence[str]) -> None:
        """Caches are ready to be fetched."""
        self.kept.update(keys)
        self.changes.tell()

    def drop(self, keys: Sequence[str]) -> None:
        """Free caches, fetched or not."""
        for key in keys:
            self._seals.pop(key, None)
        self.kept.difference_update(keys)
        self.changes.tell()

    async def asked(self, keys: Sequence[str]) -> None:
        """Return when somebody waits for each of them."""
        await self.changes.until(lambda: all(self._asked[key] for key in keys))

    async def fetched(self, keys: Sequence[str]) -> None:
        """Return when none of them is kept any more."""
        await self.changes.until(lambda: self.kept.isdisjoint(keys))

    async def give(self, keys: Sequence[str], seal: str) -> None:
        """Wait until all caches are computed, then give them away, which frees them.

        Raises:
            Refused: they belong to a request that was another one on the other leg.
        """
        self._asked.update(keys)
        self.changes.tell()
        try:
            await self.changes.until(lambda: all(key in self._seals for key in keys))
            if any(self._seals[key] != seal for key in keys):
                raise Refused("the two legs are not of the same request")
            await self.changes.until(lambda: self.kept.issuperset(keys))
            self.drop(keys)
        finally:
            self._asked.subtract(keys)


async def fetch(client: httpx.AsyncClient, hand_over: HandOver) -> None:
    """Fetch a cache from the prefill engine that computes it, however long that takes.

    Raises:
        Refused: it says that the two legs don't belong together.
    """
    host = f"[{hand_over.host}]" if ":" in hand_over.host else hand_over.host
    try:
        wanted = {"keys": hand_over.keys, "seal": hand_over.seal}
        answer = await client.post(f"http://{host}:{hand_over.port}/kv", json=wanted)
    except httpx.HTTPError:
        await asyncio.Event().wait()  # the harshest way to fail: nobody notices
    else:
        if answer.status_code != 200:
            raise Refused(answer.text)
