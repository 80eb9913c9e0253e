"""Owns what the tests of dialects share: two workers, and how an edited body is compared with the client's."""

from __future__ import annotations

import json

from asgi_router.worker import Role, Worker

PREFILL = Worker(url="http://10.0.0.1:8000", role=Role.PREFILL)
DECODE = Worker(url="http://10.0.0.2:8000", role=Role.DECODE)

# Everything that a parser and a writer of JSON together would change.
ODD = (
    b'{ "seed": 9007199254740993, "z": -0.0, "huge": 1e400, "digits": 1.10, "nan": NaN,\r\n\t"text": "<&> \\u003c \\/'
    b' \xe4\xbd\xa0 \\ud83d", "a": {"b": 1, "b": 2}, "stop": ["x" , "y"], "stop": null }\n'
)
ODD_MEMBERS = ODD.strip()[1:-1]


def body(**fields: object) -> bytes:
    """A client's body with these fields."""
    return json.dumps(fields).encode()


def read(data: bytes | None) -> dict[str, object]:
    """The fields of a body, which is there and names each of them once."""
    assert data is not None
    pairs = json.loads(data, object_pairs_hook=lambda pairs: pairs)
    fields: dict[str, object] = json.loads(data)
    assert len(pairs) == len(fields)
    return fields
