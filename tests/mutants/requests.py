"""Owns the mutants of what requests do on their way: leases, exits, retries, headers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

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
        "upstream/answer.py",
        "anyio.move_on_after(CLOSE_GRACE, shield=True)",
        "anyio.move_on_after(CLOSE_GRACE)",
    ),
    Mutant(
        "no-close-deadline",
        "the shield has no deadline",
        "upstream/answer.py",
        "anyio.move_on_after(CLOSE_GRACE, shield=True)",
        "anyio.CancelScope(shield=True)",
    ),
    Mutant(
        "finished-after-last-send",
        "the answer counts as finished only after its last send",
        "client.py",
        """        self.finished = True
        self._last.append(chunk)
        return self._deliver({"type": "http.response.body", "body": chunk, "more_body": False})
""",
        """        self._last.append(chunk)

        async def deliver() -> None:
            await self._deliver({"type": "http.response.body", "body": chunk, "more_body": False})
            self.finished = True

        return deliver()
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
        "    key = chat_key(fields) if is_chat else prompt_key(fields)\n",
        "    key = prompt_key(fields)\n",
        ["tests/test_seed_contract.py"],
    ),
    Mutant(
        "prompt-kept",
        "the prompt is held in memory for as long as its answer takes",
        "extraction.py",
        '            body=b"",\n',
        "",
        ["tests/test_extraction.py"],
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
        "frames-of-the-cancelled",
        "the prompt hangs on a cancellation that anyio's task group keeps",
        "dispatcher.py",
        "                exc.__traceback__ = None\n",
        "                del exc\n",
        ["tests/test_exit_by_client.py"],
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
        """            if message["type"] == "http.disconnect":
                raise ClientGone
            part = """,
        """            part = """,
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
        """            exchange.allow(send_timeout, ClientGone)
            await client.write(chunk)
""",
        """            await client.write(chunk)
""",
    ),
    Mutant(
        "no-retry-of-stale",
        "a keep-alive connection that the worker has just closed fails the request",
        "upstream/http11/pool.py",
        "if exc.answered or more is not None or self.closed or",
        "if True or",
        ["tests/wire/test_pool.py"],
    ),
    Mutant(
        "no-retry-of-stale-httpx",
        "the same, over stock httpx",
        "upstream/transport.py",
        "        return self._sent and not self._connected\n",
        "        return False\n",
        ["tests/test_transport.py"],
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
        "if attempt is None or attempt.passed:\n            return  # it is too late: the reason stays",
        "if attempt is None:\n            return",
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
        "        if self._back_off_until > -math.inf and self.backing_off:\n            return False\n",
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
        "connection-listed-headers",
        "headers that Connection lists are passed on",
        "headers.py",
        '    return frozenset(token.strip().lower() for token in value.split(b",")) - _NEVER_CONNECTION_LISTED\n',
        "    return frozenset()\n",
        ["tests/test_headers.py"],
    ),
    Mutant(
        "cancelled-and-not-uncancelled",
        "a client that has left leaves the server's task cancelled",
        "time_limit.py",
        "task.uncancel() <= self._before and exc_type is asyncio.CancelledError",
        "exc_type is asyncio.CancelledError",
        ["tests/test_time_limit.py", "tests/wire/test_served_in_place.py"],
    ),
    Mutant(
        "swallows-the-hosts-cancellation",
        "a native cancellation that comes together with ours is lost",
        "time_limit.py",
        "task.uncancel() <= self._before and exc_type",
        "task.uncancel() < 99 and exc_type",
        ["tests/test_time_limit.py", "tests/wire/test_served_in_place.py"],
    ),
    Mutant(
        "listener-kept",
        "whoever listens for the client's leaving goes on after the answer",
        "dispatcher.py",
        "            listener.cancel()\n",
        "            pass\n",
        ["tests/wire/test_served_in_place.py"],
    ),
    Mutant(
        "own-answer-not-closed",
        "an answer over our own transport is left open when its client leaves",
        "upstream/answer.py",
        "        answer.close()\n",
        "        pass\n",
        ["tests/wire/test_served_in_place.py"],
    ),
    Mutant(
        "limit-forgotten",
        "a time limit that was put off once is never looked at again",
        "time_limit.py",
        """        elif self.until < math.inf:
            self._set(loop, self.until)
""",
        "",
        ["tests/test_time_limit.py"],
    ),
    Mutant(
        "end-lost-behind-a-send",
        "what arrives while a message is sent, and ends the answer, is lost",
        "upstream/relay.py",
        """                chunk += _take(answer) or b""  # what has come since
""",
        "                pass\n",
        ["tests/wire/test_served_in_place.py"],
    ),
]
