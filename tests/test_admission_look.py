"""Owns the queue's own look at the workers, and that a cancellation in the same turn is not lost."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from asgi_router import admission
from asgi_router.errors import AllBusy
from asgi_router.extraction import CompletionRequest, extract
from asgi_router.observability.record import Times
from tests.instruments import asyncio_only
from tests.routed import completion_body
from tests.scheduling.builders import Clock

if TYPE_CHECKING:
    from asgi_router.scheduling.lease import Lease

pytestmark = pytest.mark.anyio


def select(request: CompletionRequest, exclude: object) -> Lease:
    """Find no place."""
    raise AllBusy("All workers are busy.")


@asyncio_only
async def test_cancelled_natively_in_the_turn_in_which_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a look doesn't swallow a cancellation right after it, as scopes did before anyio 4.16 (anyio#1214)."""
    monkeypatch.setattr(admission, "LOOK_EVERY", 0.01)
    loop = asyncio.get_running_loop()
    queue: admission.Admission[Lease] = admission.Admission(select, queue_size=1, queue_timeout=5.0)
    request = extract(completion_body(), "/v1/completions")
    task = loop.create_task(queue.acquire(request, Times(Clock()), set(), loop))
    await asyncio.sleep(0)
    assert len(queue) == 1

    loop.call_later(0.015, task.cancel)
    time.sleep(0.03)  # noqa: ASYNC251  # the loop shall find both timers due, and in this order
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(queue) == 0
