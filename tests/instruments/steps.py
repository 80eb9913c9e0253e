"""The words all scripted instruments share: a script is a list of steps, played one after the other.

Bytes are handed over, an `anyio.Event` is waited for, an exception is raised, `HANG` waits for ever, and
`DISCONNECT` (raw ASGI client only) makes the client go away. No step counts seconds: a test decides what
comes after what, never how long it takes.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, Literal

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Callable


class Do(enum.Enum):
    """Steps that are neither data, an event nor an exception."""

    HANG = enum.auto()
    DISCONNECT = enum.auto()


HANG: Final = Do.HANG
DISCONNECT: Final = Do.DISCONNECT

Pause = anyio.Event | Exception | Literal[Do.HANG]


async def perform(step: Pause) -> None:
    """Wait for an event, raise an exception, or hang; always a checkpoint, as real I/O is."""
    await anyio.lowlevel.checkpoint()
    if isinstance(step, anyio.Event):
        await step.wait()
    elif isinstance(step, Exception):
        # The same instance may be raised many times; without this its traceback would grow each time.
        raise step.with_traceback(None)
    else:
        await anyio.sleep_forever()


async def wait_any(*events: anyio.Event) -> None:
    """Return as soon as one of the events is set."""
    async with anyio.create_task_group() as group:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            group.cancel_scope.cancel()

        for event in events:
            group.start_soon(wait, event)


class Changes:
    """Lets tasks wait for a condition on an object's plain attributes; the object tells of each change."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def tell(self) -> None:
        """Wake everyone who waits, to look again."""
        self._event.set()
        self._event = anyio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition()` is true. Not bounded in time: the caller's test is."""
        await anyio.lowlevel.checkpoint()
        while not condition():
            await self._event.wait()
