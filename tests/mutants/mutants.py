"""Owns the mutants: each one a fault that a router of this kind has had in public, or could have."""

from __future__ import annotations

from dataclasses import dataclass, field

EXITS = ["tests/test_exit_paths.py", "tests/test_exit_by_client.py", "tests/test_native_cancel.py"]
MODELS = ["tests/fleet/test_models.py", "tests/fleet/test_models_read.py", "tests/fleet/test_models_served.py"]
SESSIONS = ["tests/scheduling/test_sessions.py", "tests/test_sessions_in_service.py"]
APART = [f"tests/disaggregated/test_{name}.py" for name in ("release_matrix", "new_pairs", "pairing", "faults_apart")]
LOAD = ["tests/scheduling/test_remote_policies.py", "tests/fleet/test_load.py"]


@dataclass(frozen=True)
class Mutant:
    """One change of one file, and the tests that must notice it."""

    name: str
    fault: str
    file: str
    old: str
    new: str
    tests: list[str] = field(default_factory=lambda: EXITS)


MUTANTS = [
    Mutant(
        "release-after-close",
        "the release stands behind the awaited close, in the same block",
        "router.py",
        """            # First and without an await: nothing can come between a request's end and its release.
            exchange.release()
            self._exchanges.discard(exchange)
""",
        """            self._exchanges.discard(exchange)
            await anyio.lowlevel.checkpoint()
            exchange.release()
""",
    ),
    Mutant(
        "no-shield",
        "the close of the worker's response is not shielded",
        "upstream/relay.py",
        "anyio.move_on_after(CLOSE_GRACE, shield=True)",
        "anyio.move_on_after(CLOSE_GRACE)",
    ),
    Mutant(
        "no-close-deadline",
        "the shield has no deadline",
        "upstream/relay.py",
        "anyio.move_on_after(CLOSE_GRACE, shield=True)",
        "anyio.CancelScope(shield=True)",
    ),
    Mutant(
        "finished-after-last-send",
        "the answer counts as finished only after its last send",
        "client.py",
        """        self.finished = True
        self._last.append(chunk)
        await self._deliver({"type": "http.response.body", "body": chunk, "more_body": False})
""",
        """        self._last.append(chunk)
        await self._deliver({"type": "http.response.body", "body": chunk, "more_body": False})
        self.finished = True
""",
    ),
    Mutant(
        "watcher-after-head",
        "nobody listens for a disconnect until the worker's head is there",
        "dispatcher.py",
        """            await exchange.client.wait_gone()
        except Exception as exc:""",
        """            while not exchange.client.started:
                await anyio.sleep(0.001)
            await exchange.client.wait_gone()
        except Exception as exc:""",
    ),
    Mutant(
        "tokens-not-released",
        "the seed's fault: requests are released, prefill tokens are not",
        "scheduling/lease.py",
        "        self.state.prefill_tokens -= self.prefill_tokens\n",
        "",
        ["tests/test_seed_contract.py", "tests/scheduling"],
    ),
    Mutant(
        "release-twice",
        "a second release takes another request's share",
        "scheduling/lease.py",
        "        if self._released:\n            return\n",
        "",
    ),
    Mutant(
        "empty-message",
        "the seed's other fault: selection sees nothing of the prompt",
        "extraction.py",
        "        key = chat_key(fields)\n",
        "        key = prompt_key({})\n",
        ["tests/test_seed_contract.py"],
    ),
    Mutant(
        "lease-stays-on-retry",
        "the lease on a worker that refused the connection is forgotten",
        "dispatcher.py",
        """                exchange.release()
                logger.warning""",
        """                logger.warning""",
    ),
    Mutant(
        "no-rollback",
        "a prompt that was never prefilled is recorded as cached",
        "scheduling/lease.py",
        "prefilled=self._prefilled",
        "prefilled=True",
        ["tests/scheduling"],
    ),
    Mutant(
        "queue-until-the-end",
        "the first byte doesn't take the request out of the queue",
        "upstream/relay.py",
        "            lease.first_byte(prefilled=status < 400)\n",
        "            pass\n",
    ),
    Mutant(
        "truncated-upload",
        "a client that leaves in its upload has half a prompt sent",
        "client.py",
        """        if message["type"] == "http.disconnect":
            raise ClientGone
        if not message.get""",
        """        if not message.get""",
    ),
    Mutant(
        "clean-looking-end",
        "an answer that broke off is ended like a whole one",
        "client.py",
        """        await self.write(gap + b"data: " + error.body() + b"\\n\\n")""",
        """        await self.end(gap + b"data: " + error.body() + b"\\n\\n")""",
    ),
    Mutant(
        "resent-on-reset",
        "a request is sent again although the worker may have begun",
        "upstream/transport.py",
        "        if not was_stale:\n",
        "        if False:\n",
    ),
    Mutant(
        "idle-counts-the-client",
        "a client that reads slowly counts as a worker that pauses",
        "upstream/relay.py",
        """            exchange.allow(send_timeout, gone)
            await client.write(chunk)
""",
        """            await client.write(chunk)
""",
    ),
    Mutant(
        "no-retry-of-stale",
        "a keep-alive connection that the worker has just closed fails the request",
        "upstream/transport.py",
        "        return self._sent and not self._connected\n",
        "        return False\n",
        ["tests/wire/test_pool.py"],
    ),
    Mutant(
        "served-in-the-servers-task",
        "native cancellation reaches the pool, which loses connections to it",
        "dispatcher.py",
        """            tasks.start_soon(serve)
            with listening:
                await self._listen(exchange)
""",
        """            tasks.start_soon(self._listen, exchange)
            await serve()
            tasks.cancel_scope.cancel()
""",
        ["tests/wire/test_pool.py"],
    ),
    Mutant(
        "crash-passed-on",
        "a request that brings its worker down goes on to the next worker",
        "upstream/transport.py",
        "        if isinstance(error, WorkerUnreachable):",
        "        if False:",
        ["tests/test_transport.py"],
    ),
    Mutant(
        "late-reason",
        "a deadline that passes in the tick of the data is taken for the client's leaving",
        "exchange.py",
        """        if self._attempt.cancel_called:
            return  # it is too late: the reason stays
""",
        "",
        ["tests/test_odd_hosts.py"],
    ),
    Mutant(
        "repeated-without-a-mark",
        "any request is sent to another worker when the first one breaks",
        "dispatcher.py",
        "        return marked or self._mode.repeats(error)\n",
        "        return True\n",
    ),
    Mutant(
        "retry-after-ignored",
        "a worker that asks to be left alone is asked",
        "scheduling/breaker.py",
        "        if self.backing_off:\n            return False\n",
        "",
        ["tests/test_failover.py"],
    ),
    Mutant(
        "a-failing-worker-draws-all",
        "answers like 500 are no failures",
        "mixed.py",
        "        note_failure(lease)\n    elif lease.succeeded():",
        "    elif lease.succeeded():",
        ["tests/fleet/test_breaker_in_service.py"],
    ),
    Mutant(
        "abort-as-a-failure",
        "a request that somebody aborted counts as its worker's failure",
        "dispatcher.py",
        "            # No text of another library's exception: it may quote headers.\n",
        "            if exchange.lease:\n                exchange.lease.failed()\n",
        ["tests/abort/test_abort.py"],
    ),
    Mutant(
        "told-before-the-release",
        "a worker is told that a client has left while the request still counts",
        "router.py",
        """            exchange.release()
            self._exchanges.discard(exchange)
            self._tell(exchange)
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
        "connection-listed-headers",
        "headers that Connection lists are passed on",
        "headers.py",
        "    return frozenset(tokens) - _NEVER_CONNECTION_LISTED\n",
        "    return frozenset()\n",
        ["tests/test_headers.py"],
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
        '        if text.endswith("\\\\", 0, match.start()):\n            continue\n',
        "",
        ["tests/observability/test_usage.py"],
    ),
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
        "if self._settings.session_header and not exchange.request.session_id:",
        "if self._settings.session_header:",
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
    Mutant(
        "prefill-lease-kept",
        "the seed's fault: a pair that fails gives back the decode worker alone",
        "exchange.py",
        """        if self.prefill is not None:
            self.prefill.release()
        if self.lease is not None:""",
        """        if self.lease is not None:""",
        APART,
    ),
    Mutant(
        "pair-not-rolled-back",
        "without a decode worker the prefill worker stays leased",
        "disaggregated/pairing.py",
        """        except BaseException:
            prefill.release()
            raise""",
        """        except ZeroDivisionError:
            raise""",
        APART,
    ),
    Mutant(
        "prefill-lease-to-the-end",
        "the prefill worker of a stream counts as busy until its answer has ended",
        "disaggregated/prefill_leg.py",
        "if request is not None and request.stream:",
        "if False:",
        APART,
    ),
    Mutant(
        "prefill-leg-not-ended",
        "a decode worker fails, and its prefill leg goes on",
        "disaggregated/mode.py",
        "                legs.cancel_scope.cancel()",
        "                pass",
        APART,
    ),
    Mutant(
        "decode-leg-not-ended",
        "a prefill worker fails, and decode waits for it for ever",
        "disaggregated/prefill_leg.py",
        """                self.failure = error
                both.cancel()""",
        """                self.failure = error""",
        APART,
    ),
    Mutant(
        "decode-waits-for-a-refused-prefill",
        "the seed's fault: a prefill worker's 4xx counts as a success",
        "disaggregated/prefill_leg.py",
        "if response.status_code >= 400:",
        "if response.status_code >= 600:",
        APART,
    ),
    Mutant(
        "prefill-outlives-a-decode-error",
        "a decode worker refuses, and its prefill leg goes on",
        "disaggregated/mode.py",
        "            leg.stop()\n",
        "",
        APART,
    ),
    Mutant(
        "answer-ahead-of-prefill",
        "an answer begins before the prefill worker has accepted",
        "disaggregated/mode.py",
        "None if leg is None else leg.accepted.wait",
        "None",
        APART,
    ),
    Mutant(
        "decode-is-always-to-blame",
        "the prefill worker's failures count for the decode worker",
        "disaggregated/mode.py",
        "exchange.blamed = prefill if leg.refusal or leg.failure else None",
        "exchange.blamed = None",
        APART,
    ),
    Mutant(
        "prefill-is-always-to-blame",
        "a prefill worker that has accepted is blamed for a late decode worker",
        "disaggregated/prefill_leg.py",
        "            self._exchange.blamed = None\n",
        "",
        APART,
    ),
    Mutant(
        "refusal-under-two-leases",
        "whoever has seen a prefill worker's refusal finds the decode worker counted",
        "disaggregated/mode.py",
        """        if exchange.lease is not None:
            exchange.lease.release()
""",
        "",
        APART,
    ),
    Mutant(
        "gone-with-the-answer",
        "a client that has its whole answer runs out of time",
        "disaggregated/mode.py",
        """                    exchange.allow(None, late=WorkerTimeout("Nothing is late any more."))
""",
        "",
        ["tests/disaggregated/test_exits_apart.py::test_send_timeout_ends_with_the_answer"],
    ),
    Mutant(
        "partner-by-luck",
        "a prefill worker is chosen that fits no decode worker, though another one would",
        "disaggregated/pairing.py",
        "for decodes in (ready, able):",
        "for decodes in ():",
        APART,
    ),
    Mutant(
        "retry-without-a-fit",
        "another pair is tried where there is none that fits",
        "disaggregated/pairing.py",
        "return any(self._fit(prefill, decode) for prefill in prefills for decode in decodes)",
        "return bool(prefills and decodes)",
        APART,
    ),
]
