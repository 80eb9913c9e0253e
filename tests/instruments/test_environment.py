"""Shows what the shared conftest promises: three event loops, and an environment that configures nothing."""

from __future__ import annotations

import asyncio
import os

import pytest
import sniffio

from tests.conftest import remove_settings
from tests.instruments import asyncio_only


def loop_name() -> str:
    """The loop we run on, as a test's id names it."""
    if sniffio.current_async_library() == "trio":
        return "trio"
    return "asyncio+uvloop" if "uvloop" in type(asyncio.get_running_loop()).__module__ else "asyncio"


@pytest.mark.anyio
async def test_the_id_names_the_loop(request: pytest.FixtureRequest) -> None:
    """Each async test really runs on the loop its id names."""
    assert request.node.name == f"test_the_id_names_the_loop[{loop_name()}]"


@asyncio_only
@pytest.mark.anyio
async def test_asyncio_only_leaves_trio_out() -> None:
    """A test that needs asyncio never meets trio."""
    assert sniffio.current_async_library() == "asyncio"


def test_nothing_is_set_for_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """Router settings and proxies of the machine are removed before a test, and nothing else is."""
    for name in ("ASGI_ROUTER_WORKERS", "HTTP_PROXY", "no_proxy", "UNRELATED"):
        monkeypatch.setenv(name, "x")
    remove_settings(monkeypatch)
    assert {"ASGI_ROUTER_WORKERS", "HTTP_PROXY", "no_proxy", "UNRELATED"} & set(os.environ) == {"UNRELATED"}
