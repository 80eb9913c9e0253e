"""Owns the mutants of what operators see and do: aborts, loads of workers, logs, metrics."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LOAD = ["tests/scheduling/test_remote_policies.py", "tests/fleet/test_load.py"]

MUTANTS = [
    Mutant(
        "told-before-the-release",
        "a worker is told that a client has left while the request still counts",
        "router.py",
        """            exchange.release()
            self._exchanges.discard(exchange)
            self._tell(exchange)
            exchange.reason = None  # its traceback holds this frame, and so the prompt, until a collection of garbage
            try:
                await self._aborts.after(exchange)
            finally:
""",
        """            await self._aborts.after(exchange)
            exchange.release()
            self._exchanges.discard(exchange)
            self._tell(exchange)
            if True:
""",
        ["tests/abort/test_on_disconnect.py"],
    ),
    Mutant(
        "drain-not-woken",
        "a native cancellation while a worker is told leaves a drain waiting",
        "router.py",
        """            try:
                await self._aborts.after(exchange)
            finally:
                if not self._exchanges:
""",
        """            await self._aborts.after(exchange)
            if True:
                if not self._exchanges:
""",
        ["tests/abort/test_on_disconnect.py"],
    ),
    Mutant(
        "pool-closed-under-an-abort",
        "the request that an abort ends closes the connections on which workers are being told",
        "router.py",
        "and not self.users and not self._aborts.busy:",
        "and not self.users:",
        ["tests/abort/test_wire.py"],
    ),
    Mutant(
        "abort-passed-on-and-on",
        "routers that are each other's workers pass an abort on for ever",
        "abort.py",
        "passed_on = bool(header(headers, PASSED_ON.encode()))",
        "passed_on = False",
        ["tests/abort/test_fan_out.py"],
    ),
    Mutant(
        "over-and-aborted",
        "a worker is told to abort what it has finished",
        "abort.py",
        "        return not exchange.client.finished  # else",
        "        return True  # else",
        ["tests/abort/test_on_disconnect.py"],
    ),
    Mutant(
        "herd-between-polls",
        "the seed's fault: a worker's word on its load stands unchanged until the next",
        "scheduling/remote_load.py",
        "        total = others + own_requests\n",
        "        total = others + self.own_requests\n",
        LOAD,
    ),
    Mutant(
        "stale-word",
        "what a worker said once is its load for ever",
        "scheduling/remote_load.py",
        "return self.clock() < self.expires",
        "return True",
        LOAD,
    ),
    Mutant(
        "silent-looks-idle",
        "the seed's fault: a worker that says nothing is compared with those that do",
        "scheduling/policies.py",
        "    if len(loads) == len(workers):\n        return loads\n",
        "    if loads:\n        return loads\n",
        LOAD,
    ),
    Mutant(
        "ranks-added-up",
        "each rank of a model replica counts its requests again",
        "fleet/load_text.py",
        'frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})',
        "frozenset()",
        ["tests/fleet/test_load_text.py"],
    ),
    Mutant(
        "half-a-text",
        "metrics that were cut off are read",
        "fleet/load_text.py",
        'if not text.endswith(b"\\n"):',
        "if not text:",
        ["tests/fleet/test_load_text.py"],
    ),
    Mutant(
        "observers-before-release",
        "who is told of a finished request still finds it in the counters",
        "router.py",
        """            exchange.release()
            self._exchanges.discard(exchange)
            self._tell(exchange)
""",
        """            self._tell(exchange)
            exchange.release()
            self._exchanges.discard(exchange)
""",
        ["tests/observability/test_observers.py"],
    ),
    Mutant(
        "series-for-ever",
        "metrics keep every worker that there ever was",
        "observability/tally.py",
        "present = {known: totals for known, totals in self._totals.items() if self._is_here(known[0])}",
        "present = self._totals",
        ["tests/observability/test_tally.py"],
    ),
    Mutant(
        "gone-workers-shown",
        "a scrape shows counters of workers that have left",
        "observability/tally.py",
        "        return not url or url in self._workers\n",
        "        return True\n",
        ["tests/observability/test_metrics.py"],
    ),
    Mutant(
        "any-id-in-an-exemplar",
        "one odd request id keeps all metrics from being read",
        "observability/tally.py",
        " and _PLAIN.fullmatch(value):",
        " and value:",
        ["tests/observability/test_follow_a_request.py"],
    ),
    Mutant(
        "long-exemplar",
        "an exemplar is longer than OpenMetrics allows",
        "observability/tally.py",
        "            room -= len(name) + len(value)\n",
        "",
        ["tests/observability/test_tally.py"],
    ),
    Mutant(
        "ids-as-they-come",
        "the seed's fault: a client's id is written into the log whatever is in it (F-93)",
        "observability/record.py",
        '_ID = re.compile("[!-~]{1,128}")',
        '_ID = re.compile("(?s:.*)")',
        ["tests/observability/test_request_log.py"],
    ),
    Mutant(
        "usage-by-the-model",
        "a model's text is taken for the answer's usage",
        "observability/usage.py",
        "        if at and end[at - 1] == _BACKSLASH:\n            continue\n",
        "",
        ["tests/observability/test_usage.py"],
    ),
]
