"""Owns a stand-in worker, for machines where llama.cpp's wheel does not install: no model, canned answers.

    python -m example_app.simulated_worker --port 9001 [--role prefill]

It speaks the OpenAI API as far as the example needs, and counts a word as a token. What it does have is a
prefix cache, so routing shows here too. Every answer says that it is simulated. With a role it is one half of
a worker, in vLLM's dialect: asked to prefill, it says where the cache is; told that, it fetches it and decodes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections import OrderedDict
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from example_app.parent import stop_when_stdin_closes
from example_app.say import say
from example_app.simulated_hand_over import HandOver, fetch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

MODEL = "simulated"
ANSWER = "Simulated: no model has read this prompt. "
DEFAULT_ANSWER_TOKENS = 16
MAX_ANSWER_TOKENS = 512
SECONDS_PER_TOKEN = 0.002  # so that a stream arrives as one


class PrefixCache:
    """The beginnings of the prompts that a worker has read, at most `capacity` tokens of them.

    An engine keeps one KV entry per token, valid only after the same tokens before it. Here a hash stands for
    the entry, and it covers those tokens too.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[int, None] = OrderedDict()

    def read(self, tokens: list[str]) -> int:
        """Remember a prompt, and return how many tokens at its start were in the cache already."""
        prefixes = list(itertools.accumulate(tokens, lambda prefix, token: hash((prefix, token)), initial=0))[1:]
        cached = sum(1 for _ in itertools.takewhile(self._entries.__contains__, prefixes))

        # The start goes in last: old entries are dropped first, and none is of use without its start.
        for prefix in reversed(prefixes):
            self._entries[prefix] = None
            self._entries.move_to_end(prefix)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

        # The last token is computed in any case, as in every engine: what comes out of it begins the answer.
        return min(cached, max(len(tokens) - 1, 0))


class CountAnswers:
    """Counts the completions that are being answered, in `app.state.answering`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, one = scope["app"].state, int(scope.get("method") == "POST")
        state.answering += one
        try:
            await self._app(scope, receive, send)
        finally:
            state.answering -= one


def create_app() -> Starlette:
    """Return a simulated worker as an ASGI app, with an empty cache of its own."""
    hand_over = HandOver()
    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/kv/{key}", hand_over.give),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/chat/completions", complete, methods=["POST"]),
        ],
        middleware=[Middleware(CountAnswers)],
    )
    app.state.cache = PrefixCache()
    app.state.answering = 0
    app.state.hand_over = hand_over
    return app


async def health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def metrics(request: Request) -> Response:
    """Tell how busy this is, by the names of the engine that it stands in for. Nobody ever waits here."""
    running, waiting = f"llamacpp:requests_processing {request.app.state.answering}", "llamacpp:requests_deferred 0"
    return PlainTextResponse(f"{running}\n{waiting}\n")


async def models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": MODEL}]})


async def complete(request: Request) -> Response:
    """Answer both kinds of completion, in one piece or as server-sent events."""
    try:
        body = await request.json()
        chat = request.url.path.endswith("/chat/completions")
        prompt = body["messages"] if chat else body["prompt"]
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_ANSWER_TOKENS
        words = [*itertools.islice(itertools.cycle(ANSWER.split()), min(int(limit), MAX_ANSWER_TOKENS))]
        include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        transfer = dict(body.get("kv_transfer_params") or {})
    except (AttributeError, KeyError, TypeError, ValueError):
        message = "expected a JSON object with a prompt or messages"
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": error}, status_code=400)

    prompt_tokens = (prompt if isinstance(prompt, str) else json.dumps(prompt)).split()
    cached = request.app.state.cache.read(prompt_tokens)
    if transfer.get("do_remote_prefill"):
        cached = max(cached, await fetch(transfer))
    usage = {
        "prompt_tokens": len(prompt_tokens),
        "completion_tokens": len(words),
        "total_tokens": len(prompt_tokens) + len(words),
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    envelope: dict[str, object] = {
        "id": "simulated-1",
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": MODEL,
        "system_fingerprint": MODEL,
    }
    if body.get("stream"):
        events = _events(envelope, words, chat=chat, usage=usage if include_usage else None)
        return StreamingResponse(events, media_type="text/event-stream")

    await asyncio.sleep(len(words) * SECONDS_PER_TOKEN)
    text = " ".join(words)
    content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    choice = {"index": 0, "finish_reason": "length", **content}
    answer = {**envelope, "choices": [choice], "usage": usage}
    if transfer.get("do_remote_decode"):
        answer["kv_transfer_params"] = request.app.state.hand_over.offer(request, len(prompt_tokens))
    return JSONResponse(answer)


async def _events(
    envelope: dict[str, object], words: list[str], *, chat: bool, usage: dict[str, object] | None
) -> AsyncIterator[str]:
    def event(choices: list[dict[str, object]], **more: object) -> str:
        return f"data: {json.dumps({**envelope, 'choices': choices, **more})}\n\n"

    if chat:
        envelope = {**envelope, "object": "chat.completion.chunk"}
    for word in words:
        await asyncio.sleep(SECONDS_PER_TOKEN)
        content: dict[str, object] = {"delta": {"content": f"{word} "}} if chat else {"text": f"{word} "}
        yield event([{"index": 0, "finish_reason": None, **content}])

    end: dict[str, object] = {"delta": {}} if chat else {"text": ""}
    yield event([{"index": 0, "finish_reason": "length", **end}])
    if usage is not None:
        yield event([], usage=usage)
    yield "data: [DONE]\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m example_app.simulated_worker", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--role", choices=["mixed", "prefill", "decode"], default="mixed", help="shown, no more")
    parser.add_argument("--until-stdin-closes", action="store_true", help="end with the launcher")
    options = parser.parse_args()

    if options.until_stdin_closes:
        stop_when_stdin_closes()
    kind = "worker" if options.role == "mixed" else f"{options.role} worker"
    say(f"simulated {kind} (no model behind it): http://{options.host}:{options.port}")
    uvicorn.run(create_app(), host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
