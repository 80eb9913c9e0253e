"""Owns the mutants of what is learnt from workers, and of replays."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ADAPTATION = ["tests/scheduling/test_adaptation.py", "tests/test_learning.py"]
SLOTS = ["tests/scheduling/test_slot_picture.py"]
REPLAY = ["tests/replay/test_simulate.py", "tests/replay/test_worker_model.py", "tests/replay/test_oracle.py"]

MUTANTS = [
    Mutant(
        "learnt-from-siblings",
        "a request of a burst, whose prefix was only about to be prefilled, counts as evidence against the picture",
        "scheduling/lease.py",
        "if self._certain:",
        "if True:",
        ADAPTATION,
    ),
    Mutant(
        "rounding-as-evidence",
        "each answer that has a token less than was believed makes the picture smaller",
        "scheduling/prefix_index.py",
        "if found < 0.9 * held - 1:",
        "if found < held:",
        ADAPTATION,
    ),
    Mutant(
        "shrinks-from-the-setting",
        "a picture that was never full shrinks from what it might hold",
        "scheduling/prefix_index.py",
        "believed = min(self._capacity, len(self._blocks))",
        "believed = self._capacity",
        ADAPTATION,
    ),
    Mutant(
        "grows-for-ever",
        "a worker that claims hits makes the picture grow without a bound",
        "scheduling/prefix_index.py",
        "self._capacity = min(self._most, int(self._capacity * (1 + step * share)) + 1)",
        "self._capacity = int(self._capacity * (1 + step * share)) + 1",
        ADAPTATION,
    ),
    Mutant(
        "evicted-for-ever",
        "the hashes of what had to go are remembered without a bound",
        "scheduling/prefix_index.py",
        "excess = len(evicted) + self._capacity - self._most",
        "excess = 0 * self._most",
        ADAPTATION,
    ),
    Mutant(
        "restart-forgets-pins",
        "forgetting a worker's blocks forgets those of requests in flight",
        "scheduling/prefix_index.py",
        "for block, state in self._blocks.items() if state > 0}",
        "for block, state in self._blocks.items() if state > 1 << 40}",
        ADAPTATION,
    ),
    Mutant(
        "siblings-for-free",
        "a conversation that begins destroys that of a sibling, where each slot holds one",
        "scheduling/slot_picture.py",
        "return (len(slot.blocks) - common) * self",
        "return 0 * self",
        SLOTS,
    ),
    Mutant(
        "busy-slots-taken",
        "a prompt is believed to get a slot that another one is computed in, while others are idle",
        "scheduling/slot_picture.py",
        "[slot for slot in self._slots if slot.running is None] or self._slots",
        "self._slots",
        SLOTS,
    ),
    Mutant(
        "failures-fill-slots",
        "a request that failed is believed to have filled its slot",
        "scheduling/slot_picture.py",
        "        if prefilled:\n            slot.kept",
        "        if True:\n            slot.kept",
        SLOTS,
    ),
    Mutant(
        "released-on-the-new-picture",
        "a request is given back to the picture that its worker got meanwhile",
        "scheduling/lease.py",
        "self._picture.unpin(",
        "self.state.prefixes.unpin(",
        SLOTS,
    ),
    Mutant(
        "restart-unnoticed",
        "a worker that comes back is believed to hold what it held",
        "fleet/health.py",
        "state.prefixes.clear()",
        "pass",
        ["tests/fleet/test_health.py"],
    ),
    Mutant(
        "images-scale-texts",
        "prompts with images, whose tokens nobody can estimate, change what is believed of texts",
        "scheduling/token_scales.py",
        "if not request.text_only or counted <= 0:",
        "if counted <= 0:",
        ["tests/scheduling/test_token_scales.py"],
    ),
    Mutant(
        "models-for-ever",
        "every model that a client names stays in memory",
        "scheduling/token_scales.py",
        "if len(sums) > MAX_MODELS:",
        "if len(sums) > 1_000 * MAX_MODELS:",
        ["tests/scheduling/test_token_scales.py"],
    ),
    Mutant(
        "errors-teach",
        "what an error says of its usage is believed",
        "observability/record.py",
        'if client.status == 200 and exchange.outcome == "ok" else Usage()',
        "if client.status else Usage()",
        ADAPTATION,
    ),
    Mutant(
        "transferred-is-cached",
        "what a prefill worker has sent to a decode worker counts as a hit of the latter",
        "router.py",
        "if usage.cached_tokens is not None and exchange.prefill is None:",
        "if usage.cached_tokens is not None:",
        ["tests/disaggregated/test_pairs_in_service.py"],
    ),
    Mutant(
        "replay-counts-to-the-end",
        "in a replay a request counts as queued until its last token",
        "replay/simulate.py",
        "sequence.lease.first_byte(prefilled=True)",
        "pass",
        REPLAY,
    ),
    Mutant(
        "replay-cache-for-ever",
        "a simulated cache evicts nothing",
        "replay/simulate.py",
        "engines = [SimulatedWorker(model, size, self) for model in models]",
        "engines = [SimulatedWorker(replace(model, cache_tokens=10**9), size, self) for model in models]",
        REPLAY,
    ),
]
