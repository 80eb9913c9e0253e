"""Owns the log of requests: one structured record for each, when it is over."""

from __future__ import annotations

import json
import logging

from asgi_router.observability.events import RequestFinished

MODEL_LENGTH = 200
"""Characters of a model's name that are logged: it is any text of the client's."""

logger = logging.getLogger("asgi_router.requests")

_FIELDS = RequestFinished.__struct_fields__


def requests_are_logged() -> bool:
    """Tell whether anybody would see the records."""
    return logger.isEnabledFor(logging.INFO)


def log_request(event: RequestFinished) -> None:
    """Log a request at INFO: its fields as one line of JSON, and as a mapping in the record's attribute `request`."""
    record = {name: getattr(event, name) for name in _FIELDS}
    record["model"] = event.model[:MODEL_LENGTH]
    # JSON escapes what could end or colour a line: some of the fields are the client's words.
    logger.info("%s", json.dumps(record), extra={"request": record})
