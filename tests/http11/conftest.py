"""Owns what every test here must show besides: the event loop had nothing to complain of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def late_worker() -> None:
    """The worker is uvicorn, which may write some more to a client that is gone: asyncio then complains of it."""


@pytest.fixture(autouse=True)
def no_complaints(caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest) -> Iterator[None]:
    """No callback has raised, no task was destroyed while pending, nothing is written to what is lost."""
    yield
    complaints = {record.getMessage() for when in ("setup", "call") for record in caplog.get_records(when)}
    if "late_worker" in request.fixturenames:
        complaints.discard("socket.send() raised exception.")
    assert complaints == set()
