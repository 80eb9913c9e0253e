"""Owns what is still held of a prompt after both legs were cancelled: nothing, and not only after a collection."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.disaggregated.routed_apart import DIALECTS, PREFILLED, RoutedApart
from tests.instruments.asgi_client import HANG, Exchange
from tests.routed import answer, completion_body

if TYPE_CHECKING:
    from tests.disaggregated.routed_apart import Dialect

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_client_that_left_leaves_no_prompt(dialect: Dialect) -> None:
    """Each worker gets a body of its own, and none of them hangs on an exception that a task group keeps."""
    routed = RoutedApart(replace(PREFILLED, head=[HANG]), replace(answer("stream"), head=[HANG]), pd_dialect=dialect)
    exchange = Exchange(body=completion_body("x" * 3_000_000))
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        async with exchange.running(routed.app):
            await routed.prefill.changes.until(lambda: bool(routed.prefill.calls))
            exchange.disconnect()
        routed.assert_released(exchange)
        for worker in routed.fleet.workers.values():
            worker.calls.clear()
        held, _ = tracemalloc.get_traced_memory()
        gc.collect()
        left, _ = tracemalloc.get_traced_memory()
        assert held - left < 300_000
    finally:
        tracemalloc.stop()
        gc.enable()
