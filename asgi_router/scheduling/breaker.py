"""Owns the circuit breaker of one worker: keep requests away while its connections fail, and try again soon.

1. Closed: requests come. `failures` failures in a row, with no whole answer between them, open it.
2. Open: no requests come, for `cooldown` seconds.
3. Half-open: one request is let in as a probe. The first byte of a good answer closes the breaker, a failure opens it
   anew. If it ends without either (the client left, say) the next one is the probe.

Failures are those of the connection (refused, reset, timed out, no HTTP) and answers like 500: a worker that gives
them at once is always the least busy one, and would draw all requests. 4xx is the client's fault, and 429 and 503
say that the worker is busy: they are neither failure nor success.

Apart from all this a busy worker may ask not to be asked for some seconds (`Retry-After`).
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


BACK_OFF_LIMIT = 60.0
"""Seconds for which a worker is left alone at most, whatever it asks for."""


class BreakerState(enum.StrEnum):
    """Whether requests may come."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """The circuit breaker of one worker.

    Args:
        failures: how many in a row open it; 0 never does.
        cooldown: seconds that it stays open.
        clock: monotonic seconds.
    """

    __slots__ = (
        "_back_off_until",
        "_clock",
        "_cooldown",
        "_entered",
        "_entered_before_opening",
        "_failures",
        "_failures_to_open",
        "_opened",
        "_probe",
    )

    def __init__(self, failures: int, cooldown: float, clock: Callable[[], float]) -> None:
        self._failures_to_open = failures
        self._cooldown = cooldown
        self._clock = clock
        self._failures = 0
        self._opened: float | None = None  # when
        self._entered = 0  # requests so far: each has a number
        self._entered_before_opening = 0
        self._probe = 0  # the number of the probe that is under way
        self._back_off_until = -math.inf

    def __repr__(self) -> str:
        return f"<Breaker {self.state}, {self._failures} failures>"

    @property
    def state(self) -> BreakerState:
        """Where it stands now."""
        if self._opened is None:
            return BreakerState.CLOSED

        return BreakerState.OPEN if self._clock() - self._opened < self._cooldown else BreakerState.HALF_OPEN

    @property
    def admits(self) -> bool:
        """Whether a request may come now."""
        if self._back_off_until > -math.inf and self.backing_off:
            return False
        return self._opened is None or (not self._probe and self.state is BreakerState.HALF_OPEN)

    @property
    def backing_off(self) -> bool:
        """Whether the worker has asked to be left alone, and the time is not over."""
        return self._clock() < self._back_off_until

    def enter(self) -> int:
        """Note that a request comes; return its number, by which it speaks of itself later on."""
        self._entered += 1
        if self._opened is not None and self.admits:
            self._probe = self._entered
        return self._entered

    def is_probe(self, number: int) -> bool:
        """Tell whether a request is the probe."""
        return self._probe == number

    def leave(self, number: int) -> None:
        """Note that a request has ended, with or without a result."""
        if self._probe == number:
            self._probe = 0

    def failed(self, number: int) -> bool:
        """Note the failure of a request, and return whether that has opened the breaker.

        As with a success, one from before the opening tells nothing new.
        """
        if self._opened is not None and number <= self._entered_before_opening:
            return False
        self._failures += 1
        opens = self._opened is not None or 0 < self._failures_to_open <= self._failures
        if opens:
            self.open()
        return opens

    def succeeded(self, number: int) -> bool:
        """Note the whole answer to a request, or the first byte of a good one to the probe.

        Returns whether that has closed the breaker. A request that came before it was opened tells nothing of the
        worker since.
        """
        self._failures = 0
        closes = self._opened is not None and number > self._entered_before_opening
        if closes:
            self._opened = None
            self._probe = 0
        return closes

    def back_off(self, seconds: float) -> None:
        """Let no request in for `seconds`, `BACK_OFF_LIMIT` at most. The longest wish counts."""
        self._back_off_until = max(self._back_off_until, self._clock() + min(seconds, BACK_OFF_LIMIT))

    def open(self) -> None:
        """Open it for one cool-down."""
        self._opened = self._clock()
        self._entered_before_opening = self._entered
        self._probe = 0

    def close(self) -> None:
        """Close it by hand, and ask the worker again even if it wants to be left alone."""
        self._failures = 0
        self._opened = None
        self._probe = 0
        self._back_off_until = -math.inf
