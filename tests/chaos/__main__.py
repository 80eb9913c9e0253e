"""The long run, with its figures: `python -m tests.chaos [--seconds 60] [--seed N] [--uvloop]`."""

from __future__ import annotations

import argparse
import logging
import random
import sys

import anyio

from tests.chaos.run import run


def main() -> int:
    """Run it once; return 1 if a rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--uvloop", action="store_true")
    arguments = parser.parse_args()

    # Failing workers are what this is about; cut answers are exceptions to uvicorn.
    logging.getLogger("asgi_router").setLevel(logging.CRITICAL)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    print(f"seed {arguments.seed}, {arguments.seconds:g} s", flush=True)  # noqa: T201 - its output
    report = anyio.run(run, arguments.seconds, arguments.seed, backend_options={"use_uvloop": arguments.uvloop})
    print("\n".join(report.lines()))  # noqa: T201 - its output
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
