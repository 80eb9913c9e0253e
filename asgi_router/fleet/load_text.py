"""Owns how a worker's metrics are read: which names mean what, and which of many series count the same requests."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from asgi_router.scheduling.remote_load import Load

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.samples import Sample

_ENGINES = (  # the names of running and of waiting requests in each
    ("fastdeploy:num_requests_running", "fastdeploy:num_requests_waiting"),
    ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
)
_OURS = tuple(name.encode() for names in _ENGINES for name in names)

# Ranks that work on the same requests together, so that each of them reports all of these. Ranks by other names
# (vLLM's `engine`, SGLang's `dp_rank`) have requests of their own, and so have processes (FastDeploy's `pid`).
_SAME_REQUESTS = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})

_MAX_BYTES = 64 * 1024
"""Hundreds of ranks, and 20 ms of parsing if the text is made to be slow."""
_MAX_REQUESTS = 1e9
"""Nobody has as many: more is a sign that something is broken."""


def read_load(text: bytes) -> Load | None:
    """Return the load in a worker's metrics, in Prometheus's text format; None where it is not, or makes no sense.

    Raises:
        ImportError: the extra `prometheus` is not installed.
    """
    from prometheus_client.parser import text_string_to_metric_families

    if not text.endswith(b"\n"):
        return None  # cut off, as the format has it: what reads 2 may have been 20

    # Engines report thousands of lines, and parsing them all would hold up the event loop for tens of milliseconds.
    ours = b"\n".join(line for line in text.splitlines() if line.startswith(_OURS))
    if len(ours) > _MAX_BYTES:
        return None
    try:
        samples = [sample for family in text_string_to_metric_families(ours.decode()) for sample in family.samples]
    except Exception:  # whatever it is: the text is a worker's, and the parser doesn't say what it raises
        return None

    for running_name, waiting_name in _ENGINES:
        running, waiting = _total(running_name, samples), _total(waiting_name, samples)
        if running is not None and waiting is not None:
            return Load(running, waiting)
    return None


def _total(name: str, samples: Iterable[Sample]) -> int | None:
    """Return how many requests all series of this name count together; None if there is none, or nonsense in one."""
    # Of series that differ in nothing but such a rank the largest, since they are not written at the same moment.
    largest: dict[frozenset[tuple[str, str]], dict[str, float]] = defaultdict(dict)
    for sample in samples:
        if sample.name != name:
            continue
        if not 0 <= sample.value <= _MAX_REQUESTS:  # false for NaN, too
            return None
        priority = sample.labels.get("priority", "")
        others = frozenset(item for item in sample.labels.items() if item[0] not in _SAME_REQUESTS | {"priority"})
        largest[others][priority] = max(sample.value, largest[others].get(priority, 0.0))

    if not largest:
        return None
    # SGLang reports the requests of each priority, and with an empty one the sum of them.
    return math.ceil(sum(by.get("", sum(by.values())) for by in largest.values()))
