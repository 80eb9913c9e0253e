"""Owns vLLM's dialect, that of its NIXL connector: the prefill worker answers where its KV blocks are to be had.

Facts of vLLM that are not in its documentation, and what follows from them:

1. A prefill worker leaves its blocks out of the answer (`kv_transfer_params` null or absent) where there is nothing
   to fetch: the first token ended the answer, or the search is a beam search. That is no failure. The decode worker
   then does the whole work, as it does behind vLLM's own example proxy.
2. An answer describes the blocks of one sequence. With `n` above 1 or a batch of prompts the other sequences would
   be decoded from blocks that are not theirs, or have been freed (vllm-project/vllm#38900). Such a request is not
   divided: a decode worker can serve it alone.
3. `max_completion_tokens` wins over `max_tokens`, so both are set; completions know only the second one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asgi_router.disaggregated.dialect import asks_for_one_answer
from asgi_router.disaggregated.json_edit import JsonObject
from asgi_router.errors import InvalidRequest, WorkerError

if TYPE_CHECKING:
    from asgi_router.worker import Worker

_KV = "kv_transfer_params"
_ASKS_FOR_REMOTE_DECODE = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
# What makes no sense for one token that nobody reads. vLLM refuses stream_options where nothing is streamed.
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "min_completion_tokens")


class Vllm:
    """The prefill worker computes one token of an answer that isn't streamed; then the decode worker fetches the rest.

    A client's own `kv_transfer_params` reach no worker: they name hosts to fetch from.
    """

    prefill_first = True
    decodes_alone = True

    def __init__(self) -> None:
        self._fields: JsonObject | None = None

    def fits(self, prefill: Worker, decode: Worker) -> bool:
        """Return that any two do: who is where is in the prefill worker's answer."""
        return True

    def prefill_body(self, body: bytes, prefill: Worker, decode: Worker, request_id: str) -> bytes | None:
        """Return the body that asks for the first token alone; None where there are several answers or prompts.

        Raises:
            InvalidRequest: the body is no JSON object in UTF-8.
        """
        self._fields = fields = JsonObject(body)
        if not asks_for_one_answer(fields) or _has_several_prompts(fields):
            return None

        add = {"stream": b"false", "max_tokens": b"1", _KV: _ASKS_FOR_REMOTE_DECODE}
        if fields.has("messages") or fields.has("max_completion_tokens"):
            add["max_completion_tokens"] = b"1"
        return fields.edited(drop=_NOT_FOR_PREFILL, add=add)

    def decode_body(
        self, body: bytes, prefill: Worker, decode: Worker, request_id: str, prefill_answer: bytes
    ) -> bytes:
        """Return the client's body with the `kv_transfer_params` of the prefill worker's answer, as they stand there.

        Without an answer, or without any in it, the body is the client's own.

        Raises:
            InvalidRequest: the body is no JSON object in UTF-8.
            WorkerError: the answer is no JSON object, or its `kv_transfer_params` are none.
        """
        kv = _kv_transfer_params(prefill_answer) if prefill_answer else None
        fields, self._fields = self._fields or JsonObject(body), None
        if kv is None and fields.get(_KV) is None:
            return body
        return fields.edited(drop=(_KV,), add={} if kv is None else {_KV: kv})


def _has_several_prompts(fields: JsonObject) -> bool:
    sizes = [fields.batch_size(name) or 1 for name in ("prompt", "prompt_embeds") if fields.has(name)]
    return sum(sizes) > 1


def _kv_transfer_params(answer: bytes) -> bytes | None:
    try:
        value = JsonObject(answer).get(_KV)
    except InvalidRequest:
        raise WorkerError("The prefill worker's answer can't be read.") from None
    if value is None or value == b"null":
        return None
    if not value.startswith(b"{"):
        raise WorkerError("The prefill worker's answer can't be read.")
    return None if value[1:-1].isspace() or value == b"{}" else value
