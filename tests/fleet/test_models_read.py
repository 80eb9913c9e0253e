"""Owns the reading of a worker's list of models: what counts in it, and that nothing in it can do harm."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asgi_router.fleet.models import MAX_MODELS, MAX_NAME, MAX_OBJECT_BYTES, read_models

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["id", "data", "object"]), inner),
    max_leaves=20,
)
ENTRIES = st.lists(VALUES | st.fixed_dictionaries({"id": VALUES | st.sampled_from(["a", "b", "\ud800", ""])}))


@given(
    body=st.binary()
    | VALUES.map(lambda value: json.dumps(value).encode())
    | ENTRIES.map(lambda entries: json.dumps({"data": entries}).encode())
)
def test_hostile_answers(body: bytes) -> None:
    """Whatever a worker answers: no exception, and what is kept are names and JSON objects of these names."""
    known = read_models(body)
    for name, said in (known or {}).items():
        assert 0 < len(name) <= MAX_NAME
        assert len(said) <= MAX_OBJECT_BYTES
        text = said.decode("ascii")
        assert json.loads(text, parse_constant=lambda constant: pytest.fail(constant))["id"] == name


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"", None),
        (b"null", None),
        (b"[]", None),
        (b'{"data": {"id": "a"}}', None),
        (b'{"data": null}', None),
        (b'{"data": ["a", 7, null, [], {}]}', None),
        (b'{"data": [{"id": 7}, {"id": ""}, {"id": null}, {"id": ["a"]}]}', None),
        (b'{"data": [{"id": 7}, {"id": "a"}, "b"]}', ["a"]),
        (b'{"data": []}', []),
        (b'{"data": [{"id": "a", "n": 1}, {"id": "b"}, {"id": "a", "n": 2}]}', ["a", "b"]),
        (b"[" * 100_000, None),
        (b'{"data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (b'{"data": [{"id": "a", "n": ' + b"1" * 5_000 + b"}]}", None),
        (json.dumps({"data": [{"id": "x" * MAX_NAME}, {"id": "x" * (MAX_NAME + 1)}]}).encode(), ["x" * MAX_NAME]),
        (json.dumps({"data": [{"id": str(number)} for number in range(MAX_MODELS + 1)]}).encode(), None),
    ],
)
def test_what_is_a_list_of_models(body: bytes, names: list[str] | None) -> None:
    """An object with a list `data` of objects with an `id` each; a list of nothing else, or too long, is none."""
    known = read_models(body)
    assert (known if known is None else list(known)) == names


@pytest.mark.parametrize("extra", ['"x": NaN', '"x": 1e999', '"x": "' + "x" * MAX_OBJECT_BYTES + '"'])
def test_what_a_model_says_of_itself_has_limits(extra: str) -> None:
    """What others can't read, or is too long, is left away; the model is there all the same."""
    known = read_models(f'{{"data": [{{"id": "a", {extra}}}]}}'.encode())
    assert known is not None
    assert json.loads(known["a"]) == {"id": "a", "object": "model", "created": 0, "owned_by": "asgi-router"}


def test_as_many_models_as_there_may_be() -> None:
    """So many are read, and the first one's words count."""
    entries = [{"id": str(number), "n": number} for number in range(MAX_MODELS)]
    known = read_models(json.dumps({"data": entries}).encode())
    assert known is not None
    assert len(known) == MAX_MODELS
    assert json.loads(known["7"]) == {"id": "7", "n": 7}
