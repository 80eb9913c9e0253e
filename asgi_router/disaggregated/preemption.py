"""Owns the second start of a request that its workers gave up: FastDeploy does so when its cache is full.

Such an answer is whole, has the status 200 and only says so: it ends with `pd_reschedule`, or holds a "PD Error". The
request goes to a new pair, with the tokens that there are already, so that it goes on from there.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx

from asgi_router.disaggregated.json_edit import edit_object, member
from asgi_router.upstream.answer import HttpxAnswer, close, read

if TYPE_CHECKING:
    from collections.abc import Callable

    from asgi_router.exchange import Exchange
    from asgi_router.upstream.answer import WorkerAnswer

MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""An answer that is larger is passed on without a look at it."""


async def read_ahead(answer: WorkerAnswer, on_chunk: Callable[[], None]) -> tuple[bytes, WorkerAnswer]:
    """Read an answer whole, and return it with one that gives it once more.

    `on_chunk` is called for each part of it. One that is too large is read no further: the second then gives what was
    read, and the rest.

    Raises:
        RouterError: the worker failed.
    """
    parts: list[bytes] = []
    size = 0
    try:
        while chunk := await read(answer):
            on_chunk()
            parts.append(chunk)
            size += len(chunk)
            if size > MAX_ANSWER_BYTES:
                break
    except BaseException:
        await close(answer)
        raise

    again = HttpxAnswer(httpx.Response(answer.status, headers=answer.headers, stream=_Again(parts, answer)))
    return (b"" if size > MAX_ANSWER_BYTES else b"".join(parts)), again


class _Again(httpx.AsyncByteStream):
    def __init__(self, parts: list[bytes], rest: WorkerAnswer) -> None:
        self._parts = parts
        self._rest = rest

    def __aiter__(self) -> _Again:
        return self

    async def __anext__(self) -> bytes:
        chunk = self._parts.pop(0) if self._parts else await read(self._rest)
        if not chunk:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        await close(self._rest)


def given_up(answer: bytes) -> tuple[bool, list[object]]:
    """Tell whether an answer says that the workers gave up, and return the tokens that it has all the same."""
    try:
        fields = json.loads(answer)
    except (ValueError, RecursionError):
        return False, []
    if not isinstance(fields, dict):
        return False, []

    error = fields.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    choices = fields.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    inner = choice.get("message")
    tokens = choice.get("completion_token_ids") or (
        inner.get("completion_token_ids") if isinstance(inner, dict) else None
    )
    gave_up = choice.get("finish_reason") == "pd_reschedule" or (isinstance(message, str) and "PD Error" in message)
    return gave_up, tokens if isinstance(tokens, list) else []


def begin_again(exchange: Exchange, tokens: list[object]) -> None:
    """Give the next pair of `exchange` the tokens so far."""
    exchange.preempted += 1
    try:
        before = json.loads(member(exchange.body, "completion_token_ids") or b"[]")
    except ValueError:
        before = []
    so_far = [*(before if isinstance(before, list) else []), *tokens]
    if so_far:
        exchange.body = edit_object(exchange.body, add={"completion_token_ids": json.dumps(so_far).encode()})
