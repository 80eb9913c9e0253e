"""Shows how workers' own counts of prompt tokens correct the estimates."""

from __future__ import annotations

import pytest

from asgi_router.extraction import CompletionRequest
from asgi_router.rope import Rope
from asgi_router.scheduling.prompt import Prompt
from asgi_router.scheduling.token_scales import LARGEST, LEAST_TOKENS, MAX_MODELS, SMALLEST, TokenScales


def asked(tokens: int = 1_000, *, model: str = "m", text_only: bool = True) -> CompletionRequest:
    """Return a request whose prompt is estimated to have so many tokens."""
    return CompletionRequest(model, False, "", tokens, Rope.of("x" * tokens * 4), text_only=text_only)


def test_the_first_count_is_believed() -> None:
    """What a worker counts is better than a rule of thumb, from the first answer on."""
    scales = TokenScales()
    assert scales.of(asked()) == 1.0
    scales.learn(asked(1_000), 1_500)
    assert scales.of(asked()) == 1.5


def test_a_long_prompt_says_more_than_a_short_one() -> None:
    """Counts weigh by their tokens: the template's own ones make the ratio of a short prompt less meaningful."""
    scales = TokenScales()
    scales.learn(asked(100), 140)
    scales.learn(asked(10_000), 12_000)
    assert scales.of(asked()) == pytest.approx(1.2, rel=0.01)


def test_a_greeting_says_nothing() -> None:
    """A prompt of a few tokens gets as many from the template: the next one would be taken to be five times as long."""
    scales = TokenScales()
    for _ in range(1_000):
        scales.learn(asked(3), 15)
    assert scales.of(asked()) == 1.0
    scales.learn(asked(LEAST_TOKENS), 2 * LEAST_TOKENS)
    assert scales.of(asked()) == 2.0


def test_what_is_long_ago_counts_less() -> None:
    """Prompts change, by language say: after some ten thousand tokens the scale is that of the new ones."""
    scales = TokenScales()
    for _ in range(100):
        scales.learn(asked(1_000), 1_000)
    for _ in range(200):
        scales.learn(asked(1_000), 2_000)
    assert scales.of(asked()) == pytest.approx(2.0, rel=0.01)


def test_each_model_has_its_own() -> None:
    """Models have tokenizers of their own; one that isn't known is like the one that was heard of last."""
    scales = TokenScales()
    scales.learn(asked(model="a"), 2_000)
    scales.learn(asked(model="b"), 500)
    assert [scales.of(asked(model=model)) for model in ("a", "b", "c")] == [2.0, 0.5, 0.5]


def test_what_is_no_text_alone_is_neither_learnt_nor_scaled() -> None:
    """Token ids are counted exactly, and images in no known way."""
    scales = TokenScales()
    scales.learn(asked(text_only=False), 5_000)
    assert scales.of(asked()) == 1.0
    scales.learn(asked(), 2_000)
    assert scales.of(asked(text_only=False)) == 1.0


@pytest.mark.parametrize(("counted", "scale"), [(0, 1.0), (1, SMALLEST), (2**52, LARGEST)])
def test_a_senseless_count_does_no_harm(counted: int, scale: float) -> None:
    """A worker can't make a prompt weigh nothing, or everything."""
    scales = TokenScales()
    scales.learn(asked(), counted)
    assert scales.of(asked()) == scale


def test_an_absurd_count_is_soon_forgotten() -> None:
    """It weighs no more than the largest count that can be true."""
    scales = TokenScales()
    scales.learn(asked(), 2**52)
    for _ in range(100):
        scales.learn(asked(), asked().prompt_tokens)
    assert scales.of(asked()) < 1.2


def test_models_that_come_and_go_leave_no_memory() -> None:
    """The table is bounded, and a model that is in use stays."""
    scales = TokenScales()
    for number in range(3 * MAX_MODELS):
        scales.learn(asked(model="used"), 3_000)
        scales.learn(asked(model=f"m{number}"), 500)
    assert len(scales._models) == MAX_MODELS
    assert scales.of(asked(model="used")) == pytest.approx(3.0)


def test_a_prompt_is_scaled_as_a_whole() -> None:
    """Its length and its blocks alike, so that the same share of it counts as cached."""
    plain, scaled = Prompt(asked(), 512), Prompt(asked(), 512, scale=1.5)
    assert (plain.tokens, scaled.tokens) == (1_000, 1_500)
    assert scaled.block_tokens == 1.5 * plain.block_tokens
    assert scaled.blocks == plain.blocks
