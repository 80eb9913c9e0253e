"""Owns the proof that no body of an abort does harm: it is refused in OpenAI's shape, or means what it says."""

from __future__ import annotations

import json

import anyio
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asgi_router.abort import MAX_BODY_BYTES, MAX_IDS, AbortRequest, read_abort, read_report
from asgi_router.errors import InvalidRequest
from asgi_router.upstream.calls import WholeAnswer
from tests.abort.calls import ABORT_PATH, ask, engine, told
from tests.instruments.asgi_client import DISCONNECT, Exchange
from tests.routed import Routed, answer, error_of

pytestmark = pytest.mark.timeout(90)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.fixed_dictionaries({}, optional={"req_ids": JSON, "abort_all": JSON, "stop_all": JSON})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no JSON",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'"abort_all"',
        b'{"abort_all": 1}',
        b'{"abort_all": "true"}',
        b'{"abort_all": []}',
        b'{"abort_all": true, "req_ids": "a"}',
        b'{"req_ids": "a"}',
        b'{"req_ids": {"a": 1}}',
        b'{"req_ids": 7}',
        b'{"req_ids": [7]}',
        b'{"req_ids": [null]}',
        b'{"req_ids": [["a"]]}',
        b'{"req_ids": [""]}',
        b'{"req_ids": ["a", ""]}',
        b'{"req_ids": ["a b"]}',
        b'{"req_ids": ["a\\n"]}',
        b'{"req_ids": ["\\ud800"]}',
        b'{"req_ids": ["\xc3\xa4"]}',
        b'{"abort_all": true, "req_ids": [7]}',
        json.dumps({"req_ids": ["a" * 257]}).encode(),
        json.dumps({"req_ids": [str(number) for number in range(MAX_IDS + 1)]}).encode(),
        b"[" * 100_000,
        b'{"abort_all": ' * 20_000,
        b'{"req_ids": [' + b"9" * 5000 + b"]}",
        b'{"abort_all": true',
        b'{"abort_all": true} {"abort_all": true}',
    ],
    ids=lambda body: repr(body[:30]),
)
@pytest.mark.anyio
async def test_a_wrong_body_is_refused(body: bytes) -> None:
    """What can't be read, or is of another type, too long or too many, is 400, and no worker hears of it."""
    routed = Routed(engine(answer("json")))
    assert error_of(await ask(routed, body)) == (400, "invalid_request")
    assert told(routed.worker) == []
    routed.assert_released()


@pytest.mark.anyio
@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_that_is_too_large_is_refused(announced: bool) -> None:
    """More than 512 KiB is 413, by its announcement or by count, before it has come whole."""
    routed = Routed(engine(answer("json")))
    never = anyio.Event()
    if announced:
        exchange = Exchange(path=ABORT_PATH, body=[never], headers=[("content-length", str(MAX_BODY_BYTES + 1))])
    else:
        exchange = Exchange(path=ABORT_PATH, body=[b"[" * 1024] * (MAX_BODY_BYTES // 1024) + [b"[", never])
    await exchange.run(routed.app)
    assert error_of(exchange) == (413, "request_too_large")


@pytest.mark.anyio
async def test_an_upload_that_breaks_off_is_nothing() -> None:
    """Half a body is no abort, even if it could be read."""
    routed = Routed(engine(answer("json")))
    exchange = await Exchange(path=ABORT_PATH, body=[b'{"abort_all": true}', DISCONNECT]).run(routed.app)
    assert (exchange.starts, told(routed.worker)) == (0, [])


def test_what_is_read() -> None:
    """Ids keep their order and come once; null is absent; fields that nobody knows don't count."""
    assert read_abort(b'{"req_ids": ["b", "a", "b"], "x": 1}') == AbortRequest(("b", "a"), False)
    assert read_abort(b'{"req_ids": null, "abort_all": true}') == AbortRequest((), True)
    assert read_abort(b'{"req_ids": ["a"], "abort_all": true}') == AbortRequest(("a",), True)
    most = [f"{number:0256}" for number in range(MAX_IDS)]
    body = json.dumps({"req_ids": most}).encode()
    assert len(body) < MAX_BODY_BYTES
    assert read_abort(body).req_ids == tuple(most)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | (FIELDS | JSON).map(lambda value: json.dumps(value).encode()))
@example(b'{"req_ids": ["a"], "abort_all": NaN}')
def test_any_body_is_refused_or_asks_for_something(body: bytes) -> None:
    """Whatever comes, it is an InvalidRequest that quotes nothing, or ids that are ids, or `abort_all`."""
    read = AbortRequest((), True)
    refusal: InvalidRequest | None = None
    try:
        read = read_abort(body)
    except InvalidRequest as error:
        refusal = error

    if refusal is not None:
        assert refusal.__cause__ is None
        assert refusal.__suppress_context__ or refusal.__context__ is None
    assert read.req_ids or read.abort_all is True
    assert all(name and len(name) <= 256 and name.isascii() and name.isprintable() for name in read.req_ids)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([200, 204, 299, 300, 404, 405, 500, 999]),
    st.binary(max_size=60)
    | st.fixed_dictionaries({}, optional={"result": JSON, "aborted": JSON | st.lists(FIELDS), "not_found": JSON}).map(
        lambda value: json.dumps(value).encode()
    ),
)
def test_any_answer_of_a_worker_is_a_report(status: int, body: bytes) -> None:
    """Whatever a worker answers becomes a report whose ids are ids and whose counts are integers."""
    report = read_report(WholeAnswer(status, body))
    assert report.status == status
    assert (report.result in ("ok", "accepted")) == (200 <= status < 300)
    assert (report.result == "unsupported") == (status in (404, 405))
    assert all(type(tokens) in (int, type(None)) for tokens in report.aborted.values())
    assert all(isinstance(name, str) and name for name in (*report.aborted, *report.not_found))
