"""The shared test instruments: each is a small program of its own, with its own tests beside it.

This file owns the mark for tests that need asyncio (native cancellation, uvicorn); all else runs on trio as
well.
"""

from __future__ import annotations

import pytest

BACKENDS = [
    pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="asyncio+uvloop"),
    pytest.param(("trio", {}), id="trio"),
]

# Use as `pytestmark = [pytest.mark.anyio, asyncio_only]`, or as a decorator on one test.
asyncio_only = pytest.mark.parametrize("anyio_backend", BACKENDS[:2])
