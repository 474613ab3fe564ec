"""What is refused, in one table: the call, the error and its words."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from codd.circuits import HMM, Evidence, Factors, Head, HeadConfig, Modulated, SparsePotentials, ops, pairwise
from codd.circuits.constrained import ConstrainedHMM
from codd.circuits.factors import Detour
from codd.constraints import Automaton
from codd.errors import CoddError, ImpossibleEvidence, InvalidCircuit, InvalidEvidence
from tests.support.contract import using
from tests.support.strategies import BACKENDS, shape_checks

INF, NAN = math.inf, math.nan
B, L, N, V = 2, 3, 3, 4
GOOD = HMM.random(N, V)
INITIAL, TRANSITION, EMISSION = GOOD.log_initial, GOOD.log_transition, GOOD.log_emission
LEFT, RIGHT = HMM.random(N, V, rank=2).log_transition
LONG = HMM.random(N, V, length=3)
IDS = torch.zeros(B, L, dtype=torch.int64)
MASK = torch.zeros(B, L, dtype=torch.bool)
SOFT = torch.zeros(B, L, V)
NONE = Evidence(missing=~MASK)
ONE = torch.tensor([1])
TWO = Automaton([[1, -1, -1, -1], [2, -1, -1, -1], [-1, -1, -1, -1]], 0, [2])
"""Accepts one string, of two tokens."""


@pytest.fixture(autouse=True, scope="module")
def unchecked():
    """As users run it: wrong shapes meet the library's own errors."""
    with shape_checks(False):
        yield


def with_row(table: Tensor, row: object, value: float) -> Tensor:
    table = table.clone()
    table[... if row is None else row] = value
    return table


def listed(ids: Tensor, k: int | None = None, **more: Tensor) -> SparsePotentials:
    return SparsePotentials(ids, torch.zeros(*ids.shape[:2], *([] if k is None else [k])), **more)


PARAMETERS = [
    ((with_row(INITIAL, None, -3.0), TRANSITION, EMISSION), r"log_initial sums to 0\.149"),
    ((INITIAL, with_row(TRANSITION, 1, 0.0), EMISSION), "row 1 of log_transition sums to 3"),
    ((INITIAL, TRANSITION, with_row(EMISSION, 2, -1.0)), r"row 2 of log_emission sums to 1\.47"),
    ((INITIAL, TRANSITION.exp(), EMISSION), r"row 0 of log_transition .*log_softmax"),
    ((INITIAL, TRANSITION, with_row(EMISSION, 0, NAN)), "row 0 of log_emission holds NaN"),
    ((with_row(INITIAL, 1, NAN), TRANSITION, EMISSION), "log_initial holds NaN"),
    ((INITIAL, with_row(TRANSITION, 2, -INF), EMISSION), "row 2 of log_transition sums to 0"),
    ((INITIAL[:2], TRANSITION, EMISSION), r"log_transition must be \(2, 2\).*found \(3, 3\)"),
    ((INITIAL[None], TRANSITION, EMISSION), r"log_initial must be \(N,\).*found shape \(1, 3\)"),
    ((INITIAL[:0], TRANSITION, EMISSION), r"N >= 1, found shape \(0,\)"),
    ((INITIAL, TRANSITION[:, :2], EMISSION), r"log_transition .*found \(3, 2\)"),
    ((INITIAL, TRANSITION[0], EMISSION), r"log_transition .*found \(3,\)"),
    ((INITIAL, TRANSITION[None, None], EMISSION), r"log_transition .*found \(1, 1, 3, 3\)"),
    ((INITIAL, (TRANSITION[:, :2], TRANSITION), EMISSION), r"log_transition .*\(3, 2\) and \(3, 3\)"),
    ((INITIAL, (TRANSITION, TRANSITION, TRANSITION), EMISSION), "log_transition must be"),
    ((INITIAL, (TRANSITION, TRANSITION[None]), EMISSION), r"log_transition .*\(3, 3\) and \(1, 3, 3\)"),
    ((INITIAL, TRANSITION, EMISSION[:2]), r"log_emission must be \(3, V\).*found \(2, 4\)"),
    ((INITIAL, TRANSITION, EMISSION[0]), r"log_emission .*found \(4,\)"),
    ((INITIAL, TRANSITION, EMISSION[:, :0]), r"log_emission has empty rows"),
    ((INITIAL, TRANSITION.expand(3, 3, 3), EMISSION.expand(3, 3, 4)), "3 positions and log_transition 3 steps"),
    ((INITIAL.double(), TRANSITION, EMISSION), "found torch.float64, torch.float32, torch.float32"),
    ((INITIAL, TRANSITION, EMISSION.double()), "found torch.float32, torch.float32, torch.float64"),
    ((INITIAL.half(), TRANSITION.half(), EMISSION.half()), "found torch.float16"),
    ((INITIAL.long(), TRANSITION, EMISSION), "found torch.int64"),
    ((INITIAL, TRANSITION, EMISSION.to("meta")), "different devices: cpu, meta"),
    ((INITIAL, TRANSITION.to("meta"), EMISSION), "different devices: cpu, meta"),
    ((INITIAL, (LEFT, with_row(RIGHT, 1, 0.0)), EMISSION), r"row 1 of log_transition\[1\]"),
    ((INITIAL, (with_row(LEFT, 0, 0.0), RIGHT), EMISSION), r"row 0 of log_transition\[0\]"),
    ((INITIAL, TRANSITION, with_row(LONG.log_emission, (2, 1), 0.0)), "row 2, 1 of log_emission sums to 4"),
]
FIELDS = [
    ({}, "empty evidence: give tokens, log_potentials"),
    ({"observed": MASK}, "empty evidence"),
    ({"step_log_gates": torch.zeros(2, 2, 2)}, "empty evidence"),
    ({"tokens": IDS[0]}, r"needs a batch and a length.*\(3,\)"),
    ({"tokens": IDS[..., None]}, r"tokens must have shape \(2, 3\), found \(2, 3, 1\)"),
    ({"tokens": IDS.float()}, r"tokens must be integer ids, found torch.float32"),
    ({"tokens": MASK}, r"tokens must be integer ids, found torch.bool"),
    ({"tokens": IDS, "observed": MASK[:, :2]}, r"observed must have shape \(2, 3\), found \(2, 2\)"),
    ({"tokens": IDS, "observed": IDS}, "observed must be a boolean mask, found torch.int64"),
    ({"tokens": IDS, "missing": IDS}, "missing must be a boolean mask, found torch.int64"),
    ({"logits": SOFT, "observed": MASK}, "observed says which tokens are given, but tokens is None"),
    ({"log_potentials": SOFT[0]}, r"log_potentials must have shape \(3, 4, \*\), found \(3, 4\)"),
    ({"tokens": IDS, "logits": SOFT[:1]}, r"logits must have shape \(2, 3, \*\), found \(1, 3, 4\)"),
    ({"tokens": IDS, "log_potentials": SOFT[:, :2]}, r"log_potentials must have shape \(2, 3, \*\)"),
    ({"tokens": IDS, "latent_log_potentials": SOFT[:1]}, r"latent_log_potentials must have shape \(2, 3, \*\)"),
    ({"tokens": IDS, "missing": MASK[:1]}, r"missing must have shape \(2, 3\)"),
    ({"log_potentials": SOFT.long()}, "log_potentials must be floating point, found torch.int64"),
    ({"logits": SOFT.bool()}, "logits must be floating point, found torch.bool"),
    ({"latent_log_potentials": SOFT.int()}, "latent_log_potentials must be floating point, found torch.int32"),
    ({"logits": SOFT, "log_potentials": SOFT}, "not both"),
    ({"logits": SOFT, "dense": MASK}, "dense chooses between dense and sparse"),
    ({"sparse": listed(IDS[..., None], 1), "dense": MASK}, "dense chooses between dense and sparse"),
    ({"logits": SOFT, "sparse": listed(IDS[..., None], 1), "dense": IDS}, "dense must be a boolean mask"),
    ({"tokens": IDS[:, :2], "sparse": listed(IDS[..., None], 1)}, r"sparse.ids must have shape \(2, 2, \*\)"),
    ({"tokens": IDS, "sparse": listed(IDS[..., None].to("meta"), 1)}, "sparse.ids is on meta"),
    ({"tokens": IDS, "logits": SOFT.to("meta")}, "logits is on meta, the rest of the evidence on cpu"),
    ({"tokens": IDS, "observed": MASK.to("meta")}, "observed is on meta"),
    *(({"logits": SOFT, "temperature": t}, f"positive and finite, found {t}") for t in (0.0, -1.0, INF, NAN)),
    *(({"logits": SOFT, "temperature": torch.tensor([1.0, t])}, f"finite, found {t}") for t in (0.0, INF)),
    ({"logits": SOFT, "temperature": torch.ones(3)}, r"shape \(2,\), found \(3,\)"),
    ({"log_potentials": SOFT, "temperature": 0.5}, "Give logits"),
    ({"log_potentials": SOFT, "temperature": torch.ones(2)}, "Give logits"),
    ({"tokens": IDS, "temperature": 0.5}, "Give logits"),
    (
        {"logits": SOFT, "step_log_gates": torch.zeros(2, 3, 2)},
        r"gates must have shape \(2, 2, \*\), found \(2, 3, 2\)",
    ),
    ({"logits": SOFT, "step_log_gates": torch.zeros(1, 2, 2)}, r"\(2, 2, \*\), found \(1, 2, 2\)"),
    ({"logits": SOFT, "step_log_gates": torch.zeros(2, 2)}, r"\(2, 2, \*\), found \(2, 2\)"),
    ({"logits": SOFT, "step_log_gates": torch.zeros(2, 2, 2).long()}, "must be floating point, found torch.int64"),
    ({"logits": SOFT, "step_log_gates": torch.zeros(2, 2, 2).to("meta")}, "is on meta, the rest of the evidence"),
    *(({"logits": SOFT, "step_log_gates": torch.full((2, 2, 2), x)}, "must be finite") for x in (NAN, -INF, INF)),
]
SPARSE = [
    (lambda: listed(IDS), r"must both be \(B, L, K\), found \(2, 3\)"),
    (lambda: listed(IDS[..., None], 2), r"found \(2, 3, 1\) and \(2, 3, 2\)"),
    (lambda: listed(torch.zeros(B, L, 1), 1), "must be integers, found torch.float32"),
    (lambda: listed(MASK[..., None], 1), "sparse ids must be integers, found torch.bool"),
    (lambda: listed(IDS[..., None], 1, log_tail=torch.zeros(B)), r"log_tail must be \(B, L\)"),
    (lambda: listed(IDS[..., None].expand(B, L, 2), 2), "a token is listed twice"),
    (lambda: listed(torch.tensor([[[3, 1, 3]]]), 3), "a token is listed twice"),
    *((lambda k=k: SparsePotentials.from_logits(SOFT, k), f"1 and V = 4, found {k}") for k in (0, -1, 5)),
    *((lambda t=t: SparsePotentials.from_logits(SOFT, 2, t), "must be positive") for t in (0.0, -1.0, INF, NAN)),
]
MADE = Factors.near_neutral(5, 7, transition_rank=2, emission_rank=3, inner_states=3)
FACTORS = [
    ("initial_logits", torch.zeros(4), r"transition of 4 states must be \(4, 4\).*found \(5, 2\) and \(2, 5\)"),
    ("initial_logits", torch.zeros(5, 1), r"initial_logits must be \(N,\), found \(5, 1\)"),
    ("transition_left", torch.zeros(5, 3), r"transition of 5 states must be \(5, 5\).*\(5, 3\) and \(2, 5\)"),
    ("transition_right", torch.zeros(2, 6), r"transition of 5 states .*\(5, 2\) and \(2, 6\)"),
    ("transition_right", torch.zeros(2), r"transition of 5 states .*\(5, 2\) and \(2,\)"),
    ("transition_right", torch.zeros(2, 5, 5), r"transition of 5 states .*\(2, 5, 5\)"),
    ("emission_left", torch.zeros(4, 3), r"emission of 5 states must be \(5, V\).*\(4, 3\) and \(3, 7\)"),
    ("emission_right", torch.zeros(2, 7), r"emission of 5 states .*\(5, 3\) and \(2, 7\)"),
    ("emission_bias", torch.zeros(6), r"emission_bias must be \(7,\), found \(6,\)"),
    ("detour_share", torch.zeros(4), r"detour of 5 states .*found \(4,\), \(5, 3\), \(3, 5\)"),
    ("detour_left", torch.zeros(5), r"detour of 5 states .*found \(5,\), \(5,\), \(3, 5\)"),
    ("detour_right", torch.zeros(4, 5), r"detour of 5 states .*\(5, 3\), \(4, 5\)"),
]
ODD = (torch.zeros(5), torch.zeros(5, 2), torch.zeros(3, 5))


def detoured() -> HMM:
    return HMM.from_factors(Factors.near_neutral(4, 6, inner_states=3))


HEADS = [
    (detoured(), HeadConfig(8, 5), "head is for 5 states and 0 inner ones, the circuit has 4 and 3"),
    (detoured(), HeadConfig(8, 4, 4), "4 states and 4 inner ones, the circuit has 4 and 3"),
    (HMM.random(4, 6), HeadConfig(8, 4, 3), "the circuit has 4 and 0"),
    (HMM.random(4, 6, rank=3), HeadConfig(8, 4, 3), "the circuit has 4 and 0"),
    (HMM.from_factors(Factors.near_neutral(4, 6)), HeadConfig(8, 0, 1), "the circuit has 4 and 0"),
]
CANDIDATES = [
    (IDS[..., None].expand(B, L, 2), "a token is listed twice"),
    (torch.tensor([0, V]).expand(B, L, 2), r"must be in 0\.\.3, found 4"),
    (torch.tensor([0, -1]).expand(B, L, 2), r"must be in 0\.\.3, found -1"),
    (torch.zeros(B, L + 1, 1).long(), r"candidates must be \(2, 3, K\) with 1 <= K <= 4, found"),
    (torch.zeros(B, L, 0).long(), "1 <= K"),
    (torch.arange(V + 1).expand(B, L, V + 1), "1 <= K"),
    (IDS[..., None].int(), "must be int64 on cpu, found torch.int32"),
]


def committing(ask) -> None:
    ask(HMM.random(3, 5).incremental(Evidence(logits=torch.zeros(1, 4, 5))))


CALLS = [
    *((lambda x=x: HMM(*x), InvalidCircuit, words) for x, words in PARAMETERS),
    *((lambda x=x: Evidence(**x), InvalidEvidence, words) for x, words in FIELDS),
    *((make, InvalidEvidence, words) for make, words in SPARSE),
    *((lambda n=n, x=x: Factors.from_named({**MADE.named(), n: x}), InvalidCircuit, words) for n, x, words in FACTORS),
    (lambda: HMM.from_factors(replace(MADE, detour=Detour(*ODD))), InvalidCircuit, "detour of 5 states"),
    *((lambda h=h, c=c: Modulated(h, Head(c)), InvalidCircuit, words) for h, c, words in HEADS),
    *((lambda x=x: pairwise.by_conditioning(GOOD, NONE, x), InvalidEvidence, words) for x, words in CANDIDATES),
    *((lambda x=x: pairwise.tables(GOOD, NONE, x), InvalidEvidence, words) for x, words in CANDIDATES),
    *((lambda f=f: f(0, 3), InvalidCircuit, "positive, found 0 and 3") for f in (HMM.random, HMM.neutral)),
    *((lambda f=f: f(-1, 2), InvalidCircuit, "positive, found -1 and 2") for f in (HMM.random, HMM.neutral)),
    (lambda: HMM.random(3, 0), InvalidCircuit, "positive, found 3 and 0"),
    (
        lambda: HMM(INITIAL, TRANSITION, EMISSION, window=0),
        InvalidCircuit,
        "window is 0, .* serves at least 1 position",
    ),
    (lambda: HMM(INITIAL, TRANSITION, LONG.log_emission, window=4), InvalidCircuit, "window is 4, .* serves 3"),
    (lambda: GOOD.to(dtype=torch.float16), InvalidCircuit, "dtype must be one of .*found torch.float16"),
    (lambda: GOOD.to(emission=torch.int8), InvalidCircuit, "emission must be one of .*found torch.int8"),
    (lambda: GOOD.as_circuit(), InvalidCircuit, "any length: say which one"),
    (lambda: GOOD.as_circuit(0), InvalidCircuit, "found length=0"),
    (lambda: LONG.as_circuit(4), InvalidCircuit, "serves 3, found length=4"),
    (lambda: HMM.random(3, 4, length=4).log_prob(IDS), InvalidEvidence, "has 3 positions, the circuit serves 4"),
    (lambda: GOOD.conditional_log_prob(IDS[:, :2], NONE), InvalidEvidence, r"shape \(2, 3\), found \(2, 2\)"),
    (lambda: GOOD.conditional_log_prob(IDS + 7, NONE), InvalidEvidence, "found 7"),
    (lambda: GOOD.marginals(NONE, IDS[..., None] + 4), InvalidEvidence, r"candidates must be in 0\.\.3, found 4"),
    (lambda: GOOD.log_partition(Evidence(log_potentials=SOFT[:0])), InvalidEvidence, "batch is empty"),
    (lambda: GOOD.log_partition(IDS), InvalidEvidence, "expected codd.Evidence, found a Tensor"),
    (lambda: GOOD.sample(NONE, num_samples=0), InvalidEvidence, "num_samples must be at least 1, found 0"),
    (lambda: GOOD.conditional_scores(NONE, IDS + 9), InvalidEvidence, r"latents must be in 0\.\.2, found 9"),
    (lambda: GOOD.conditional_scores(NONE, IDS[:1]), InvalidEvidence, r"shape \(2, 3\)"),
    (lambda: GOOD.flows(NONE, torch.ones(5)), InvalidEvidence, r"weights must be \(B,\) = \(2,\), found \(5,\)"),
    (lambda: committing(lambda p: p.commit(torch.tensor([4]), ONE)), InvalidEvidence, r"positions .* 0\.\.3, found 4"),
    (lambda: committing(lambda p: p.commit(ONE, -ONE)), InvalidEvidence, r"tokens must be in 0\.\.4, found -1"),
    (lambda: committing(lambda p: p.commit(ONE.float(), ONE)), InvalidEvidence, "positions must be integers"),
    (lambda: committing(lambda p: p.dense_log_marginals(7 * ONE)), InvalidEvidence, "found 7"),
    (lambda: GOOD.incremental(NONE, 2), InvalidEvidence, "has none"),
    (lambda: GOOD.incremental(Evidence(logits=SOFT), 5), InvalidEvidence, "between 1 and V = 4"),
    (lambda: GOOD.incremental(Evidence(logits=SOFT), 0), InvalidEvidence, "between 1 and V = 4"),
    (lambda: GOOD.incremental(Evidence(logits=SOFT + NAN), 2), InvalidEvidence, "NaN"),
    (lambda: GOOD.incremental(Evidence(logits=torch.zeros(1, 4, 6)), 2), InvalidEvidence, "over 6 tokens"),
    (lambda: ConstrainedHMM(GOOD, TWO).sample(NONE), ImpossibleEvidence, "sequence"),
    (lambda: ConstrainedHMM(GOOD, TWO).sample(NONE, num_samples=0), InvalidEvidence, "num_samples must be at least 1"),
    (lambda: ConstrainedHMM(GOOD, TWO).conditional_scores(NONE, IDS[:1]), InvalidEvidence, "latents must have"),
    (lambda: ConstrainedHMM(GOOD, TWO).save("x"), InvalidCircuit, "save its .hmm"),
    (
        lambda: ConstrainedHMM(GOOD, TWO).incremental(NONE).commit(ONE, ONE),
        InvalidEvidence,
        r"positions must be \(2,\)",
    ),
    (lambda: ConstrainedHMM(GOOD, TWO, log_end=torch.zeros(2)), InvalidEvidence, "log_end"),
    (lambda: ConstrainedHMM(GOOD, TWO, log_start=torch.full((3,), NAN)), InvalidEvidence, "log_start"),
    (lambda: ConstrainedHMM(HMM.random(2, 3), TWO), InvalidCircuit, "over 4 tokens, the circuit over 3"),
    (lambda: ConstrainedHMM(GOOD.as_circuit(3), TWO), InvalidCircuit, "needs an HMM"),
    (lambda: ops.use("fast").__enter__(), ValueError, "'fast'.*reference, eager, native, triton"),
]


@pytest.mark.parametrize(("call", "error", "words"), CALLS, ids=[str(i) for i in range(len(CALLS))])
def test_what_is_refused_says_why(call, error, words):
    with pytest.raises(error, match=words):
        call()


DOES_NOT_FIT = [
    ({"tokens": IDS + 4}, r"observed tokens must be in 0\.\.3, found 4"),
    ({"tokens": IDS - 1}, r"observed tokens must be in 0\.\.3, found -1"),
    ({"sparse": listed(IDS[..., None] + 9, 1)}, r"sparse ids .*found 9"),
    ({"sparse": listed(IDS[..., None] - 2, 1)}, r"sparse ids .*found -2"),
    ({"log_potentials": torch.zeros(2, 3, 5)}, "over 5 tokens, the circuit over 4"),
    ({"logits": torch.zeros(2, 3, 3)}, "over 3 tokens, the circuit over 4"),
    ({"latent_log_potentials": SOFT}, "over 4 states, the circuit has 3"),
    ({"tokens": IDS[:, :0]}, "has 0 positions, the circuit serves"),
    ({"tokens": IDS.to("meta")}, "the evidence is on meta, the circuit on cpu"),
    ({"logits": SOFT, "step_log_gates": torch.zeros(2, 2, 2)}, "over 2 inner states, the circuit has no such steps"),
    *(({name: SOFT + x}, r"NaN or \+inf") for name in ("log_potentials", "logits") for x in (NAN, INF)),
    ({"latent_log_potentials": SOFT[..., :3] + NAN}, r"NaN or \+inf"),
]
QUERIES = ("log_partition", "marginals", "posterior", "sample", "flows", "joint_step", "incremental")


@pytest.mark.parametrize("kind", ["hmm", "graph"])
@pytest.mark.parametrize(("fields", "words"), DOES_NOT_FIT)
def test_evidence_that_does_not_fit_is_refused_by_every_query(fields, words, kind):
    circuit, ev = GOOD if kind == "hmm" else GOOD.as_circuit(3), Evidence(**fields)
    for query in [name for name in QUERIES if kind == "hmm" or name not in ("flows", "incremental")]:
        with pytest.raises(InvalidEvidence, match=words):
            getattr(circuit, query)(ev)


@pytest.mark.parametrize("rank", [None, 5])
def test_gates_of_another_rank_are_refused(rank):
    words = "steps of rank 5" if rank else "no such steps"
    ev = Evidence(logits=SOFT, step_log_gates=torch.zeros(2, 2, 2))
    for query in QUERIES:
        with pytest.raises(InvalidEvidence, match=words):
            getattr(HMM.random(N, V, rank=rank), query)(ev)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_impossible_names_its_sequences(backend):
    potentials = torch.zeros(5, 3, 4)
    potentials[1, 2] = potentials[4, 0] = -INF
    with using(backend), pytest.raises(ImpossibleEvidence, match=r"sequence\(s\) 1, 4 of") as error:
        GOOD.sample(Evidence(log_potentials=potentials))
    assert error.value.sequences == (1, 4)
    assert isinstance(error.value, CoddError)


def test_what_is_no_error():
    HMM(INITIAL, with_row(TRANSITION, 1, 0.0), EMISSION, validate=False)
    observed = torch.tensor([[True, False, True]] * 2)
    for mask in (99, -1):  # at hidden positions
        GOOD.log_partition(Evidence(tokens=torch.where(observed, 0, mask), observed=observed))
