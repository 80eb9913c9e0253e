"""Owns what can go wrong on the way to a worker, at the level of connections and HTTP/1.1.

The type says whether the worker may have seen anything of the request. Messages are ours and fixed: they never
quote what was sent or received.
"""

from __future__ import annotations


class Http11Error(Exception):
    """A request has failed."""


class RequestRefused(Http11Error):
    """What was to be sent is no HTTP/1.1 request. Nothing was sent."""


class ConnectFailed(Http11Error):
    """No connection could be made. Nothing was sent."""


class ConnectTimedOut(ConnectFailed):
    """No connection could be made in time. Nothing was sent."""


class SendTimedOut(Http11Error):
    """The worker took no byte of the request's body for too long."""


class ReadTimedOut(Http11Error):
    """The worker sent no byte for too long."""


class ConnectionBroken(Http11Error):
    """The connection was closed, by the worker, the network or ourselves, before the answer was complete.

    Attributes:
        answered: any byte of an answer had come.
        sending: the request was not yet sent completely.
    """

    def __init__(self, message: str, *, answered: bool = False, sending: bool = False) -> None:
        super().__init__(message)
        self.answered = answered
        self.sending = sending


class AnswerCutShort(ConnectionBroken):
    """The worker closed the connection cleanly in the middle of an answer, or instead of one."""


class InvalidAnswer(Http11Error):
    """What the worker sent is not HTTP/1.1, or could be read in two ways."""
