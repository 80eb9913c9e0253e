"""Owns the proof that nothing confidential is logged or told: prompts, keys, header values, worker addresses."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.instruments.asgi_client import DISCONNECT, HANG, Exchange
from tests.routed import WORKER, Routed, answer, completion_body

if TYPE_CHECKING:
    from tests.instruments.fake_worker import Script

pytestmark = pytest.mark.anyio

SECRET = "PLANTED-SECRET"
LEAKY = f"{SECRET} in an exception's text"
GOOD = answer("stream")

ENDINGS = {
    "success": GOOD,
    "refused": replace(GOOD, connect=[httpx.ConnectError(LEAKY)]),
    "reset": replace(GOOD, head=[httpx.ReadError(LEAKY)]),
    "odd": replace(GOOD, head=[ValueError(LEAKY)]),
    "bad header": replace(GOOD, head=[httpx.LocalProtocolError(LEAKY)]),
    "mid answer": replace(GOOD, body=[b"data: x\n\n", httpx.ReadError(LEAKY)]),
    "close": replace(GOOD, close=[RuntimeError(LEAKY)]),
    "late": replace(GOOD, head=[HANG]),
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
@pytest.mark.parametrize("leaves", [False, True])
async def test_nothing_confidential_is_logged(ending: Script, leaves: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever happens, no prompt, key, cookie, query or exception text is in a log record or in our errors."""
    caplog.set_level(logging.DEBUG)
    routed = Routed(ending, first_byte_timeout=0.05)
    exchange = Exchange(
        body=completion_body(SECRET * 100, user=SECRET),
        headers=[("authorization", f"Bearer {SECRET}"), ("cookie", SECRET), ("x-api-key", SECRET)],
        query_string=f"key={SECRET}".encode(),
        at={1: DISCONNECT} if leaves else {},
    )
    await exchange.run(routed.app)

    records = [record for record in caplog.records if record.name.startswith("asgi_router")]
    assert records or ending is GOOD
    for record in records:
        assert SECRET not in record.getMessage()
        assert record.exc_info is None
        assert SECRET not in str(vars(record))
    assert SECRET.encode() not in exchange.body
    routed.assert_released(exchange)


@pytest.mark.parametrize("body", [f'{{"prompt": {SECRET}', f'["{SECRET}"]', f'{{"prompt": "{SECRET}\udcff"}}'])
async def test_a_bad_body_is_not_quoted(body: str, caplog: pytest.LogCaptureFixture) -> None:
    """A body that can't be read is neither logged nor sent back."""
    caplog.set_level(logging.DEBUG)
    exchange = await Exchange(body=body.encode("utf-8", "surrogateescape")).run(Routed(GOOD).app)
    assert exchange.status == 400
    assert SECRET.encode() not in exchange.body
    assert SECRET not in caplog.text


@pytest.mark.parametrize("ending", ["refused", "reset", "late"])
async def test_a_workers_address_is_not_told_to_clients(ending: str) -> None:
    """Our errors don't say where the workers are; the log does."""
    exchange = await Exchange(body=completion_body()).run(Routed(ENDINGS[ending], first_byte_timeout=0.05).app)
    assert exchange.status in (502, 504)
    assert WORKER.removeprefix("http://").encode() not in exchange.body
