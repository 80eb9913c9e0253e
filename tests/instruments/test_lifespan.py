"""Shows that the lifespan harness tells an app that answers from one that does not, fails, or answers wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from tests.instruments.lifespan import Lifespan

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

pytestmark = pytest.mark.anyio


def answers(*kinds: str) -> ASGIApp:
    """An app that sends one of these after each message it receives."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for kind in kinds:
            await receive()
            await send({"type": f"lifespan.{kind}"})

    return app


async def test_an_app_with_a_lifespan() -> None:
    """Startup is answered before the block, shutdown when it is left."""
    async with Lifespan().running(answers("startup.complete", "shutdown.complete")) as life:
        assert life.supported
        assert life.sent == ["startup.complete"]
    assert life.sent == ["startup.complete", "shutdown.complete"]
    assert life.exception is None


@pytest.mark.parametrize("kinds", [["startup.failed"], []])
async def test_an_app_that_fails_or_ignores_its_startup(kinds: list[str]) -> None:
    """It is not `supported`; leaving the block does not wait for an answer that cannot come."""
    async with Lifespan().running(answers(*kinds)) as life:
        assert not life.supported
    assert life.sent == kinds


async def test_an_app_that_raises() -> None:
    """The exception is kept, as servers do not fail for it either."""

    async def raises(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("no lifespan here")

    async with Lifespan().running(raises) as life:
        assert not life.supported
    assert isinstance(life.exception, RuntimeError)


@pytest.mark.parametrize("kinds", [["startup.complete", "startup.complete"], ["started"], ["shutdown.complete"]])
async def test_wrong_answers_are_noticed(kinds: list[str]) -> None:
    """A second answer, an unknown one, and one out of turn raise in the app."""
    async with Lifespan().running(answers(*kinds)) as life:
        await life.shutdown()
    assert isinstance(life.exception, AssertionError)


async def test_a_shutdown_that_never_ends_runs_into_the_bound() -> None:
    """An app that does not answer its shutdown fails the test."""

    async def hangs(scope: Scope, receive: Receive, send: Send) -> None:
        await answers("startup.complete")(scope, receive, send)
        await anyio.sleep_forever()

    with pytest.raises(TimeoutError):
        async with Lifespan().running(hangs, timeout=0.05):
            pass


async def test_the_shutdown_may_wait() -> None:
    """While the app holds its shutdown back the test can go on, and see it come."""
    gate = anyio.Event()

    async def drains(scope: Scope, receive: Receive, send: Send) -> None:
        await answers("startup.complete")(scope, receive, send)
        await receive()
        await gate.wait()
        await send({"type": "lifespan.shutdown.complete"})

    async with Lifespan().running(drains) as life, anyio.create_task_group() as group:
        group.start_soon(life.shutdown)
        await anyio.wait_all_tasks_blocked()
        assert life.sent == ["startup.complete"]
        gate.set()
    assert life.sent[-1] == "shutdown.complete"
