"""How many requests a second does a replay simulate? Run: `python -m benchmarks.replay [TRACE ...]`.

What is measured is described in `README.md`. Figures are processor seconds, so that a busy machine counts less.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from asgi_router.replay.apart import replay_of
from asgi_router.replay.choosers import chooser
from asgi_router.replay.generated import conversations, hot_prefix
from asgi_router.replay.simulate import Setup
from asgi_router.replay.traces import Trace, read_trace
from asgi_router.scheduling.policies import PolicyOptions

POLICIES = ("prefill_cost", "cache_aware", "lmetric", "request_num", "round_robin", "oracle")
ROUNDS = 3


def requests_a_second(trace: Trace, policy: str) -> float:
    """Return the best of some rounds."""
    best = 0.0
    for _ in range(ROUNDS):
        began = time.process_time()
        replay_of(trace, Setup(), policy, chooser(policy, PolicyOptions()))
        best = max(best, len(trace.requests) / (time.process_time() - began))
    return best


def main() -> None:
    """Print a table: a line for each load, a column for each policy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="*", type=Path, help="files, beside the loads that are made")
    loads = {
        "made conversations": conversations(requests=20_000, rate=40.0, seed=0),
        "made hot prefix": hot_prefix(requests=20_000, rate=60.0, seed=0),
    }
    loads |= {path.name: read_trace(path) for path in parser.parse_args().traces}
    print("| load | blocks a request |", " | ".join(POLICIES), "|")
    print("|---" * (2 + len(POLICIES)) + "|")
    for name, trace in loads.items():
        blocks = sum(len(request.blocks) for request in trace.requests) / len(trace.requests)
        rates = (f"{requests_a_second(trace, policy):,.0f}" for policy in POLICIES)
        print(f"| {name} | {blocks:.0f} |", " | ".join(rates), "|")


if __name__ == "__main__":
    main()
