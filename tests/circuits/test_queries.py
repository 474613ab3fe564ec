"""Every query of every layout, kind of evidence and backend, against the table of all strings and all latent paths."""

import itertools
import warnings
from functools import cache

import pytest
import torch

from codd.circuits import HMM, Evidence
from codd.circuits.incremental import RecomputingConditioner
from tests.support.contract import EXACT, check_circuit, check_hmm, check_incremental, using
from tests.support.strategies import KINDS, LAYOUTS, Truth, make_evidence, make_hmm, shape_checks, with_gates

pytestmark = pytest.mark.numerics
B, N, R, V = 2, 3, 2, 4
LOW_RANK = ("low_rank", "low_rank_per_position")
BACKENDS = {"reference": EXACT, "eager": EXACT, "native": 2e-5, "unlisted": EXACT, "triton": 3e-3}
"""How near each is: the compiled loops are asked in float32, the kernels round their factors to ten bits."""
CASES = [
    *(("dense", kind, 3, None) for kind in KINDS),
    *((layout, kind, 3, None) for layout in LAYOUTS[1:] for kind in ("mixed_dense", "mixed_sparse", "mixed_all")),
    *((layout, "mixed_all", length, None) for layout in LAYOUTS for length in (1, 2)),
    *(("dense", kind, length, None) for kind in ("observed", "latent") for length in (1, 2)),
    *((layout, "mixed_dense", 5, None) for layout in ("dense", "low_rank")),
    *(("low_rank", kind, 3, 1.0) for kind in KINDS),
    *(("low_rank_per_position", kind, 3, 1.0) for kind in ("observed", "sparse_tail", "mixed_all")),
    *((layout, kind, 3, 60.0) for layout in LOW_RANK for kind in ("missing", "mixed_dense")),
    *((layout, "mixed_all", length, 1.0) for layout in LOW_RANK for length in (1, 2)),
]
"""Layout, kind of evidence, length of the window, size of the gates."""
MIXED = [case for case in CASES if case[1].startswith("mixed") and case[2] == 3]
SOME = [("dense", "logits_temperatures"), ("dense", "mixed_all"), ("dense", "mixed_dense"), ("per_position", "logits")]
ASKED = [
    *itertools.product(CASES, ("reference", "eager", "native")),
    *((case, "unlisted") for case in MIXED),
    *(((*some, 3, None), "triton") for some in SOME),
    (("low_rank", "mixed_dense", 3, 1.0), "triton"),
]


@cache
def truth_of(layout: str, kind: str, length: int = 3, gates: float | None = None) -> Truth:
    seed, (vocab, states) = LAYOUTS.index(layout) * 100 + KINDS.index(kind), (3, 2) if length > 3 else (V, N)
    hmm, ev = make_hmm(layout, states, vocab, length, seed), make_evidence(kind, (B, length), states, vocab, seed)
    return Truth(hmm, ev if gates is None else with_gates(ev, R, seed, gates))


@pytest.mark.parametrize(("case", "backend"), ASKED, ids=str)
def test_an_hmm_answers_what_enumeration_says(case, backend):
    truth, near = truth_of(*case), BACKENDS[backend]
    hmm = truth.hmm.to(dtype=torch.float64 if near == EXACT else torch.float32)
    if backend == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("kernels run on the GPU here, and the tensors of this test are on the CPU")
    with warnings.catch_warnings(), using(backend):
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy in the interpreter: infinities are allowed for
        check_hmm(hmm, truth, near)


@pytest.mark.parametrize("kind", KINDS)
def test_a_general_circuit_answers_what_enumeration_says(kind):
    truth = truth_of("dense", kind)
    check_circuit(truth.hmm.as_circuit(truth.length), truth)


def test_asking_again_after_every_token_is_incremental_conditioning(monkeypatch):
    truth = truth_of("dense", "logits")
    monkeypatch.setattr(HMM, "incremental", lambda hmm, ev, _: RecomputingConditioner(hmm, ev))
    check_incremental(truth.hmm, truth, EXACT)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_strings_of_a_window_share_all_probability(layout):
    truth = truth_of(layout, "missing")
    with shape_checks(False):
        found = truth.hmm.log_prob(truth.strings)
    torch.testing.assert_close(found, truth.joint[0].logsumexp(-1), rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(found.logsumexp(0), torch.tensor(0.0).double(), rtol=0, atol=EXACT)


@pytest.mark.parametrize("kind", ["missing", "mixed_dense", "mixed_all"])
@pytest.mark.parametrize("layout", LOW_RANK)
def test_gates_of_zero_are_no_gates(layout, kind):
    truth = truth_of(layout, kind)
    zero = Evidence(**{**fields(truth.ev), "step_log_gates": torch.zeros(B, truth.length - 1, R)})
    check_hmm(truth.hmm, Truth(truth.hmm, zero))
    torch.testing.assert_close(Truth(truth.hmm, zero).joint, truth.joint, rtol=1e-12, atol=1e-12)


def fields(ev: Evidence) -> dict:
    return {name: getattr(ev, name) for name in ev.__dataclass_fields__ if name != "kind"}
