"""Shows what is read of an answer's `usage`, and that a model can't pretend to report one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asgi_router.observability.usage import Usage, read_usage

USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}


@pytest.mark.parametrize(
    ("end", "usage"),
    [
        (json.dumps({"choices": [], "usage": USAGE}), Usage(12, 8, 3)),
        (json.dumps({"choices": [], "usage": USAGE}, indent=1), Usage(12, 8, 3)),
        (f'data: {{"usage":null}}\n\ndata: {{"usage":{json.dumps(USAGE)}}}\n\ndata: [DONE]\n\n', Usage(12, 8, 3)),
        ('{"usage": {"prompt_tokens": 1}} {"usage": {"prompt_tokens": 2}}', Usage(2, None)),
        ('"usage": {"prompt_tokens": 1}', Usage(1, None)),
        ('{"usage": {"prompt_tokens": 1}} {"usage": {"prompt_tok', Usage(1, None)),
        ('{"usage": {"prompt_tokens": -1, "prompt_tokens_details": [3]}}', Usage()),
        ('{"usage": {"prompt_tokens": true, "prompt_tokens_details": {"cached_tokens": "8"}}}', Usage()),
        ('{"usage": {"prompt_tokens": 1e3}}', Usage()),
        (f'{{"usage": {{"prompt_tokens": {2**53}}}}}', Usage()),
        ('{"usage": {"prompt_tokens": -}}', Usage()),
        ('{"usage": {"prompt_tokens": "1", "completion_tokens": 2, "a": 1e400}}', Usage(None, None, None)),
        ('{"usage": [1]}', Usage()),
        ('{"usage": ' + '{"a": ' * 20_000, Usage()),
        ("", Usage()),
    ],
)
def test_usage_is_read_from_the_end_of_an_answer(end: str, usage: Usage) -> None:
    """The last whole `usage` counts; what is no sensible number is nothing."""
    assert read_usage(end.encode()) == usage


@pytest.mark.parametrize("nested", [1, 2])
def test_a_model_can_not_report_a_usage(nested: int) -> None:
    """Text of the model that looks like a `usage` is none, since its quotes are escaped."""
    text: object = '{"usage": {"prompt_tokens": 999}}'
    for _ in range(nested):
        text = json.dumps({"choices": [{"message": {"content": text}}]})
    assert read_usage(str(text).encode()) == Usage()


def test_a_key_that_ends_like_usage_is_none() -> None:
    """A key may be a token of the model's (as in `top_logprobs`), which ends like the one that is looked for."""
    assert read_usage(json.dumps({'"usage': {"prompt_tokens": 999}}).encode()) == Usage()


@given(st.binary() | st.text().map(lambda text: f'"usage": {{{text}'.encode("utf-8", "surrogatepass")))
def test_nothing_in_an_answer_makes_it_raise(end: bytes) -> None:
    """Whatever a worker sends, reading it ends with numbers or None."""
    usage = read_usage(end)
    counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    assert all(count is None or 0 <= count < 2**53 for count in counts)
