"""Owns a short run of the fuzzer, `python -m tests.http11.fuzz`: hypothesis chooses, and simplifies a fault."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.http11 import fuzz

if TYPE_CHECKING:
    import random
    from collections.abc import Callable


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_thousand_exchanges(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Whatever a worker sends and however it is cut, what `fuzz.py` lists holds."""
    with asyncio.Runner(loop_factory=new_loop) as runner:

        @settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.randoms(use_true_random=True))
        def play(rng: random.Random) -> None:
            runner.run(fuzz.play(rng))

        play()
