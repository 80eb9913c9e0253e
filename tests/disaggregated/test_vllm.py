"""Owns the proof of vLLM's dialect, field by field."""

from __future__ import annotations

import json

import pytest

from asgi_router.disaggregated import DIALECTS
from asgi_router.disaggregated.vllm import Vllm
from asgi_router.errors import InvalidRequest, WorkerError
from asgi_router.worker import Worker
from tests.disaggregated.bodies import DECODE, ODD, ODD_MEMBERS, PREFILL, body, read

ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
MESSAGES = [{"role": "user", "content": "hi"}]
KV = b'{"do_remote_prefill": true, "remote_block_ids": [[1, 2]], "remote_port": 9007199254740993, "x": "<&>"}'


def prefill_body(data: bytes) -> bytes | None:
    """What the prefill worker gets for a client's body."""
    return Vllm().prefill_body(data, PREFILL, DECODE, "ours")


def decode_body(data: bytes, answer: bytes) -> bytes:
    """What the decode worker gets after that answer of the prefill worker's."""
    dialect = Vllm()
    dialect.prefill_body(data, PREFILL, DECODE, "ours")
    return dialect.decode_body(data, PREFILL, DECODE, "ours", answer)


def test_prefill_comes_first() -> None:
    """The decode worker waits for the prefill worker's answer, or serves alone; any two workers fit."""
    dialect = DIALECTS["vllm"]()

    assert dialect.prefill_first
    assert dialect.decodes_alone
    assert dialect.fits(PREFILL, DECODE)
    assert dialect.fits(Worker(url="local"), DECODE)


def test_entry36_prefill_of_a_streamed_chat() -> None:
    """Peer entry 36, vllm-project/router#2: one token, no stream, so no `stream_options`, and no least length."""
    data = body(
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=500,
        max_completion_tokens=400,
        min_tokens=10,
        min_completion_tokens=10,
        temperature=0.5,
        n=1,
    )

    assert read(prefill_body(data)) == {
        "messages": MESSAGES,
        "temperature": 0.5,
        "n": 1,
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "kv_transfer_params": ASKED,
    }


def test_prefill_of_a_chat_without_limits() -> None:
    """A chat gets both limits, whichever the client has named."""
    fields = read(prefill_body(body(messages=MESSAGES)))

    assert (fields["max_tokens"], fields["max_completion_tokens"]) == (1, 1)
    assert fields["stream"] is False


def test_prefill_of_a_completion() -> None:
    """A completion gets no field that its API doesn't know."""
    assert read(prefill_body(body(prompt="hi", max_tokens=5, stream=True))) == {
        "prompt": "hi",
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": ASKED,
    }


def test_f15_every_other_byte_is_kept() -> None:
    """F-15: numbers above 2^53, `<>&`, duplicate keys and white space are the client's, for both workers."""
    prefill = prefill_body(ODD)
    decode = decode_body(ODD, b'{"kv_transfer_params": ' + KV + b"}")

    assert prefill is not None
    assert prefill.startswith(b"{" + ODD_MEMBERS + b',"stream":false,')
    assert decode == b"{" + ODD_MEMBERS + b',"kv_transfer_params":' + KV + b"}\n"


def test_decode_has_the_clients_limits() -> None:
    """The decode worker streams, and stops where the client wants it to."""
    data = body(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, max_tokens=500, min_tokens=10)

    assert decode_body(data, b'{"kv_transfer_params": {"remote_host": "p"}}') == (
        data[:-1] + b',"kv_transfer_params":{"remote_host": "p"}}'
    )


@pytest.mark.parametrize(
    "answer",
    [
        b"{}",
        b'{"choices": []}',
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": {}}',
        b'{"kv_transfer_params": { }}',
        b'{"kv_transfer_params": {"a": 1}, "kv_transfer_params": null}',
    ],
)
def test_an_answer_without_blocks(answer: bytes) -> None:
    """Where there is nothing to fetch (the first token was the last one, say) the decode worker serves alone."""
    assert decode_body(ODD, answer) == ODD


@pytest.mark.parametrize(
    "answer",
    [
        b"null",
        b"[]",
        b"data: {}\n\n",
        b'{"kv_transfer_params": [1]}',
        b'{"kv_transfer_params": "a"}',
        b"{",
        b"\x1f\x8b",
    ],
)
def test_an_answer_that_cannot_be_read(answer: bytes) -> None:
    """It is the worker's fault, not the client's."""
    with pytest.raises(WorkerError, match="prefill worker's answer"):
        decode_body(b"{}", answer)


def test_own_kv_transfer_params_reach_no_worker() -> None:
    """A client doesn't say from which host blocks are fetched: not when divided, not when there is nothing to fetch."""
    data = body(prompt="hi", kv_transfer_params={"do_remote_prefill": True, "remote_host": "6.6.6.6"})

    assert b"6.6.6.6" not in (prefill_body(data) or b"6.6.6.6")
    assert read(decode_body(data, b'{"kv_transfer_params": {"a": 1}}'))["kv_transfer_params"] == {"a": 1}
    assert read(decode_body(data, b"{}")) == {"prompt": "hi"}
    assert read(decode_body(data, b"")) == {"prompt": "hi"}


def test_decode_alone() -> None:
    """Without a prefill leg the decode worker gets the client's bytes."""
    assert Vllm().decode_body(ODD, PREFILL, DECODE, "ours", b"") is ODD


@pytest.mark.parametrize(
    "data",
    [
        body(messages=MESSAGES, n=2),
        body(prompt="a", n=2),
        body(prompt=["a", "b"]),
        body(prompt=[[1, 2], [3]]),
        body(prompt_embeds=["AA==", "AA=="]),
        body(prompt="a", prompt_embeds=["AA=="]),
        b'{"prompt": "a", "n": 1, "n": 3}',
        b'{"prompt": "a", "n": "2"}',
    ],
)
def test_several_sequences_are_not_divided(data: bytes) -> None:
    """Several answers or prompts go to the decode worker alone: vLLM hands over the blocks of one sequence only."""
    dialect = Vllm()

    assert dialect.prefill_body(data, PREFILL, DECODE, "ours") is None
    assert dialect.decode_body(data, PREFILL, DECODE, "ours", b"") is data


@pytest.mark.parametrize(
    "data",
    [
        body(messages=MESSAGES, n=None),
        body(prompt=["a"]),
        body(prompt=[1, 2, 3]),
        body(prompt=[[1, 2, 3]]),
        body(prompt=None, prompt_embeds="AA=="),
        b'{"prompt": "a", "n": 3, "n": 1}',
    ],
)
def test_one_sequence_is_divided(data: bytes) -> None:
    """A single prompt is divided, in every form that it can have."""
    result = prefill_body(data)

    assert result is not None
    assert json.loads(result)["kv_transfer_params"] == ASKED


def test_f14_body_that_is_no_object() -> None:
    """F-14: `null` is the client's fault, for either leg."""
    with pytest.raises(InvalidRequest):
        prefill_body(b"null")
    with pytest.raises(InvalidRequest):
        Vllm().decode_body(b"null", PREFILL, DECODE, "ours", b"{}")
