"""Owns the loads under which the candidates are measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Unit = Literal["request", "event"]


@dataclass(frozen=True)
class Scenario:
    """One load. README.md says what each is for."""

    name: str
    title: str
    """What stands over its column."""
    clients: int
    unit: Unit = "request"
    """What CPU time is divided by."""
    body_bytes: int = 0
    different_prompts: int = 1000
    """How many prompts there are before the first comes again; 0: none ever does."""
    shared: float = 0.0
    """The share of its text, from its beginning, that a prompt has in common with all others."""
    events: int = 0
    """Events of a stream; 0: answers that are not streamed."""
    gap_ms: int = 0
    """Milliseconds between two events; 0: as fast as they go."""
    ramp_ms: int = 0
    """Milliseconds within which the clients begin, one after the other."""
    requests: int | None = None
    """Requests after which it ends, if its time isn't over before."""
    seconds: float = 1.0
    """Its length, in lengths of a run (`--seconds`)."""
    rounds: int | None = None
    """Rounds at the most."""
    memory: bool = False
    """Each candidate is started anew, and its memory is measured above what it needs when idle."""
    lasting: bool = False
    """It takes minutes, and is run only if it is named: what a router costs once its tables are full."""
    first_byte: bool = False
    """The time to the first event is measured, above that without a router; cores are kept awake."""

    def arguments(self, seconds: float, first_prompt: int) -> list[str]:
        """Return the arguments of the load for a run of this many seconds."""
        arguments = [
            "-c",
            str(self.clients),
            "-d",
            f"{seconds:.3f}",
            "-R",
            str(self.ramp_ms),
            "-b",
            str(self.body_bytes),
        ]
        arguments += ["-u", str(self.different_prompts), "-i", str(first_prompt), "-f", str(self.shared)]
        if self.requests is not None:
            arguments += ["-n", str(self.requests)]
        if self.events:
            arguments += ["-s", "-k", str(self.events), "-g", str(self.gap_ms)]
        return arguments

    def warm_up(self) -> Scenario:
        """Return the load that goes before: the same, but shorter; the first scenario's before memory is measured."""
        if self.memory:
            return SCENARIOS[0]
        return replace(self, requests=self.requests and max(self.requests // 5, self.clients))

    def quick(self) -> Scenario:
        """Return a smaller one, for a run that only shows that all works."""
        return replace(
            self,
            rounds=1,
            requests=self.requests and self.requests // 5,
            clients=min(self.clients, 200),
            seconds=min(self.seconds, 4.0),
            ramp_ms=min(self.ramp_ms, 1000),
            events=20 if self.gap_ms else self.events,
        )


KB, MB = 1000, 1_000_000

SCENARIOS = (
    Scenario("c32", "c=32", 32),
    Scenario("c128", "c=128", 128),
    Scenario("4k", "4 KB", 32, body_bytes=4 * KB, different_prompts=0, shared=0.5),
    Scenario("100k", "100 KB", 32, body_bytes=100 * KB, different_prompts=0, requests=2000),
    Scenario("100k-known", "100 KB known", 32, body_bytes=100 * KB, different_prompts=0, shared=0.9, requests=2000),
    Scenario("1m", "1 MB", 8, body_bytes=MB, different_prompts=0, requests=200),
    Scenario("1m-known", "1 MB known", 8, body_bytes=MB, different_prompts=0, shared=0.9, requests=200),
    Scenario("streams", "event", 64, unit="event", events=200),
    Scenario(
        "first-byte", "paced event", 200, unit="event", events=40, gap_ms=50, ramp_ms=2000, seconds=8.0, first_byte=True
    ),
    Scenario(
        "1000-streams", "1,000 streams", 1000, unit="event", events=30, gap_ms=100, ramp_ms=1000, requests=1000,
        seconds=10.0, rounds=1, memory=True,
    ),
    Scenario(
        "100k-lasting", "100 KB, new ones for 75 s", 32, body_bytes=100 * KB, different_prompts=0, seconds=75.0,
        rounds=1, memory=True, lasting=True,
    ),
    Scenario(
        "1m-lasting", "1 MB, new ones for 75 s", 8, body_bytes=MB, different_prompts=0, seconds=75.0,
        rounds=1, memory=True, lasting=True,
    ),
)  # fmt: skip

QUICK = ("c32", "100k", "streams", "first-byte", "1000-streams")
"""What a quick run runs."""
