"""`python -m asgi_router.replay TRACE ...` is `asgi-router replay TRACE ...`."""

from __future__ import annotations

import sys

from asgi_router.replay.cli import main

if __name__ == "__main__":
    sys.exit(main(["replay", *sys.argv[1:]]))
