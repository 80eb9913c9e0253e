"""Owns the mutants of prefill and decode apart."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

APART = [f"tests/disaggregated/test_{name}.py" for name in ("release_matrix", "new_pairs", "pairing", "faults_apart")]

MUTANTS = [
    Mutant(
        "frames-of-the-leg",
        "the prompt hangs on a leg's cancellation that anyio's task group keeps",
        "disaggregated/prefill_leg.py",
        "                exc.__traceback__ = None",
        "                del exc",
        ["tests/disaggregated/test_memory_apart.py"],
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
        "if answer.status >= 400:",
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
        """                    exchange.allow(None, silent)
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
