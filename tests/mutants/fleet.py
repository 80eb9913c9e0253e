"""Owns the mutants of which worker may be chosen: sessions and models."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MODELS = ["tests/fleet/test_models.py", "tests/fleet/test_models_read.py", "tests/fleet/test_models_served.py"]
SESSIONS = ["tests/scheduling/test_sessions.py", "tests/test_sessions_in_service.py"]

MUTANTS = [
    Mutant(
        "sessions-by-name-alone",
        "two models share a session, and so a worker",
        "scheduling/sessions.py",
        "hash((request.session_id, request.model))",
        "hash(request.session_id)",
        SESSIONS,
    ),
    Mutant(
        "pinned-to-whoever-is-left",
        "a session goes to its worker though that may not be chosen",
        "scheduling/sessions.py",
        " or worker not in candidates",
        "",
        SESSIONS,
    ),
    Mutant(
        "pinned-for-good",
        "a session stays with a worker that is overloaded",
        "scheduling/sessions.py",
        " or _is_overloaded(worker, candidates)",
        "",
        SESSIONS,
    ),
    Mutant(
        "sessions-without-end",
        "the table of sessions grows for ever",
        "scheduling/sessions.py",
        "if len(pins) > self._capacity or now - pins[oldest][1] >= self._ttl:",
        "if False:",
        SESSIONS,
    ),
    Mutant(
        "sessions-keep-workers",
        "a worker that has left is kept by the sessions that it served",
        "scheduling/sessions.py",
        "pins[key] = ref(worker), now",
        "pins[key] = (lambda: worker), now",
        SESSIONS,
    ),
    Mutant(
        "header-over-body",
        "a header that a proxy sets for all separates what the body holds together",
        "dispatcher.py",
        "if self._session_header is not None and not exchange.request.session_id:",
        "if self._session_header is not None:",
        SESSIONS,
    ),
    Mutant(
        "unknown-serves-none",
        "models are refused because nobody has been asked yet",
        "scheduling/state.py",
        "served is None or model in served",
        "model in (served or ())",
        MODELS,
    ),
    Mutant(
        "failure-forgets-models",
        "a worker that is too busy to answer serves all models again",
        "fleet/models.py",
        """                logger.warning("%s: doesn't say which models it serves (%s)", state.worker.url, what)
            return
""",
        """                logger.warning("%s: doesn't say which models it serves (%s)", state.worker.url, what)
            state.discovered = None
            return
""",
        MODELS,
    ),
    Mutant(
        "registering-forgets-models",
        "an engine that registers while it serves gets requests for all models",
        "fleet/registry.py",
        "            state.discovered = old.discovered\n",
        "            pass\n",
        MODELS,
    ),
    Mutant(
        "late-discovery",
        "a worker that joins is asked an interval later",
        "fleet/models.py",
        "self._asked.get(state, -math.inf)",
        "self._asked.setdefault(state, now)",
        MODELS,
    ),
    Mutant(
        "half-a-list-for-a-router",
        "a router keeps requests away by what another one doesn't know yet",
        "fleet/models.py",
        "if _by_a_router(scope) and self._unknown():",
        "if False:",
        MODELS,
    ),
    Mutant(
        "hearsay",
        "routers that are each other's workers keep a model alive that has gone",
        "fleet/models.py",
        "return not (_by_a_router(scope) and any(state.worker.is_local for state in self._workers))",
        "return True",
        MODELS,
    ),
    Mutant(
        "constants-of-python",
        "a worker's NaN makes the whole list unreadable",
        "fleet/models.py",
        "json.dumps(entry, allow_nan=False)",
        "json.dumps(entry)",
        MODELS,
    ),
]
