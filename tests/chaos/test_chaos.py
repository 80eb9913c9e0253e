"""Owns the short run of the chaos; `python -m tests.chaos` is the long one."""

from __future__ import annotations

import logging

import pytest

from tests.chaos.chaos import Blow
from tests.chaos.load import Answer, Plan, WrongAnswer, outcome
from tests.chaos.run import run
from tests.chaos.worker import Job
from tests.instruments import BACKENDS

SECONDS = 6.0
ERROR = b'data: {"error": {"message": "m", "type": "t", "param": null, "code": "worker_failed"}}\n\n'


@pytest.mark.anyio
@pytest.mark.timeout(240)  # it takes ten seconds; what is bounded inside has to be able to say so
@pytest.mark.parametrize("anyio_backend", BACKENDS[:1])
async def test_chaos(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever happens to workers under load: nothing hangs, leaks, fails without need or looks whole when cut."""
    caplog.set_level(logging.CRITICAL)
    report = await run(SECONDS, seed=3)
    figures = "\n".join(report.lines())
    assert report.broken == [], figures
    assert set(report.blows) == set(Blow), figures
    # And it was no idle run.
    assert report.outcomes["whole"] > 24, figures
    assert report.judged > 24, figures
    assert any(name.startswith("cut") for name in report.outcomes), figures


def framed(job: Job, pieces: list[bytes], end: bytes = b"0\r\n\r\n") -> Answer:
    """A chunked answer."""
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    raw = head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + end
    return Answer(Plan(job, "", None, False), 0.0, 1.0, raw)


STREAM, CHUNKED = Job(1, "stream", 3, 0.0), Job(1, "chunked", 3, 0.0)


@pytest.mark.parametrize("job", [STREAM, CHUNKED], ids=["stream", "json"])
def test_a_whole_answer(job: Job) -> None:
    """All pieces and the end of the framing: whole."""
    assert outcome(framed(job, job.answer())) == ("whole", None)


def test_answers_that_are_plainly_cut() -> None:
    """JSON without the end of its framing; a stream with an error event."""
    assert outcome(framed(CHUNKED, CHUNKED.answer()[:2], end=b"")) == ("cut chunked", None)
    assert outcome(framed(STREAM, [*STREAM.answer()[:2], ERROR], end=b"")) == ("cut stream: worker_failed", None)


@pytest.mark.parametrize(
    "answer",
    [
        framed(STREAM, STREAM.answer()[:-1]),
        framed(CHUNKED, CHUNKED.answer()[:-1]),
        framed(STREAM, STREAM.answer()[:2], end=b""),
        framed(STREAM, [*STREAM.answer()[1:2], ERROR], end=b""),
        framed(CHUNKED, Job(2, "chunked", 3, 0.0).answer()),
        Answer(Plan(STREAM, "", None, False), 0.0),
        Answer(Plan(STREAM, "", None, False), 0.0, hung=True),
    ],
    ids=["no DONE", "half JSON", "no error event", "a piece is missing", "another's answer", "nothing", "hangs"],
)
def test_answers_that_break_a_rule(answer: Answer) -> None:
    """The run's eyes are open: each of these would be reported."""
    with pytest.raises(WrongAnswer):
        outcome(answer)
