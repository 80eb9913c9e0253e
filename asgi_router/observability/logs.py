"""Owns the log of requests: one structured record for each, when it is over."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asgi_router.observability.events import RequestFinished

logger = logging.getLogger("asgi_router.requests")


def requests_are_logged() -> bool:
    """Tell whether anybody would see the records."""
    return logger.isEnabledFor(logging.INFO)


def log_request(event: RequestFinished) -> None:
    """Log a request at INFO: its fields as one line of JSON, and as a mapping in the record's attribute `request`."""
    fields = asdict(event)
    # JSON escapes what could end or colour a line: some of the fields are the client's words.
    logger.info("%s", json.dumps(fields), extra={"request": fields})
