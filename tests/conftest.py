"""Owns what every test gets: the event loops to run on, and an environment without settings."""

from __future__ import annotations

import gc
import importlib
import os
from typing import cast

import pytest

from tests.instruments import BACKENDS


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """The event loop under an async test; `tests.instruments.asyncio_only` narrows it."""
    return cast("tuple[str, dict[str, bool]]", request.param)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what the machine's owner may have set: router settings and proxies change what is under test."""
    remove_settings(monkeypatch)


def remove_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset every ASGI_ROUTER_* and *_PROXY variable, in either case, until the end of the test."""
    for name in list(os.environ):
        if name.upper().startswith("ASGI_ROUTER_") or name.upper().endswith("_PROXY"):
            monkeypatch.delenv(name)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take what collecting has made out of the garbage collector's sight.

    Twelve thousand tests are a heap through which a full collection takes longer than the short graces below last.
    Hypothesis, which pytest loads for the report of a failure at the latest, looks for referrers as it is loaded.
    """
    importlib.import_module("hypothesis")
    gc.collect()
    gc.freeze()


@pytest.fixture
def short_graces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give what hangs 200 or 300 ms, not a second: for tests that show that something ends, not when."""
    monkeypatch.setattr("asgi_router.upstream.answer.CLOSE_GRACE", 0.3)
    monkeypatch.setattr("asgi_router.exchange.END_GRACE", 0.2)
    monkeypatch.setattr("asgi_router.upstream.local.LEAVE_GRACE", 0.2)
