"""The commit loops of all backends: each token from its exact distribution given those before."""

import importlib.util
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from codd.circuits import HMM, Evidence, ops
from codd.circuits.incremental import RecomputingConditioner
from codd.circuits.ops import native
from codd.circuits.ops.commit import eager
from codd.circuits.ops.commit import native as commit_native
from codd.circuits.parameters import WIDEST
from codd.coupling import Coupled
from codd.decoding import samplers
from codd.decoding.options import Options
from codd.decoding.samplers import Noise, Ranking
from tests.support.strategies import generator

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
needs_library = pytest.mark.skipif(native.library() is None, reason="needs the compiled library")
V, N, L = 40, 20, 6
HIDDEN = torch.tensor([[True, True, False, True, True, True]])
CLOSE = {"reference": 1e-5, "eager": 1e-5, "native": 1e-4, "triton": 4e-3}
"""How far probabilities may be off; Triton's contraction rounds its factors to ten bits."""


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Uninitialised memory of the kernels is NaN, so that an unwritten output fails loudly."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from codd.circuits.ops.commit import triton as kernels

    def empty(*size, **options):
        out = EMPTY(*size, **options)
        return out.fill_(float("nan") if out.dtype.is_floating_point else torch.iinfo(out.dtype).max)

    EMPTY = torch.empty
    monkeypatch.setattr(kernels.torch, "empty", empty)
    with warnings.catch_warnings():  # numpy under the interpreter warns of the infinities that the kernels allow for
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


class Case(NamedTuple):
    joint: Coupled
    noise: Noise
    options: Options
    count: int
    due: Tensor | None

    def sampled(self, backend: str) -> Ranking:
        with ops.use(backend):
            return samplers.sample_any_order(self.joint, self.count, self.options, self.noise, due=self.due)


def case(
    options: dict,
    seed: int,
    *,
    scale: float = 3.0,
    states: int = N,
    modulated: bool = True,
    device: str = "cpu",
) -> Case:
    adaptive = {"threshold", "entropy_budget"} & set(options)
    rule = {"sampler": "any_order", **({} if adaptive else {"steps": None}), **options}
    g, due, chosen = generator(seed), rule.pop("due", None), Options.of(**rule)
    joint = Coupled(
        HMM.random(states, V, seed, scale=2.0).to(device),
        logits=scale * torch.randn(1, L, V, generator=g).to(device),
        tokens=torch.randint(V, (1, L), generator=g).to(device),
        masked=HIDDEN.to(device),
        latent_log_potentials=torch.randn(1, L, states, generator=g).to(device) if modulated else None,
    )
    noise = Noise(*(part.to(device) for part in Noise.drawn(L, g)))
    return Case(joint, noise, chosen, chosen.min_tokens if adaptive else 4, None if due is None else torch.tensor(due))


def truncated(p: Tensor, options: Options) -> Tensor:
    """The distribution that tokens are drawn from."""
    p = p ** (1 / options.temperature)
    if options.top_k is not None:
        p = torch.where(p >= p.sort(descending=True).values[options.top_k - 1], p, 0)
    if options.top_p is not None:
        order = (p / p.sum()).argsort(descending=True)
        before = (p / p.sum())[order].cumsum(0).roll(1)
        before[0] = 0
        p = p.index_fill(0, order[before > options.top_p], 0)
    return p / p.sum()


def by_hand(case: Case) -> tuple[list[tuple[int, int, float]], float]:
    """Positions, tokens and probabilities in float64, and how near any of the decisions was."""
    joint, noise, options, count, due = case
    conditioner = RecomputingConditioner(joint.circuit.to(dtype=torch.float64), joint.evidence)
    heat = options.circuit_temperature if options.tempering == "paper" else 1.0
    left, found, near, spent = HIDDEN[0].nonzero()[:, 0].tolist(), [], 1.0, 0.0
    while left and not (options.fixed_count and len(found) == count):
        with ops.use("reference"):
            table = conditioner.dense_log_marginals()[0].double().exp()
        proposals = {}
        for t in left:
            p = table[t] ** (1 / heat) / (table[t] ** (1 / heat)).sum()
            top = p.sort(descending=True).values
            token = int(p.argmax())
            if options.temperature > 0:
                cumulative = truncated(p, options).cumsum(0)
                token = int((cumulative <= float(noise.tokens[t])).sum())
                near = min(near, float((cumulative - noise.tokens[t]).abs().min()))
            else:
                near = min(near, float(top[0] - top[1]))
            entropy = float(torch.special.entr(p).sum())
            order = {
                "low_confidence": float(p[token]),
                "margin": float(top[0] - top[1]),
                "entropy": -entropy,
                "random": float(noise.order[t]),
                "left_to_right": -t,
            }[options.remasking]
            proposals[t] = (order, token, float(p[token]), entropy)
        limit, now = options.threshold, [t for t in left if due is None or due[t]]
        forced = len(found) < count and bool(now)
        now = now if forced else left
        passed = [t for t in now if limit is not None and proposals[t][2] >= limit] or now
        keys = sorted((proposals[t][0] for t in passed), reverse=True)
        near = min(near, keys[0] - keys[1] if len(keys) > 1 else 1.0)
        place = max(passed, key=lambda t: (proposals[t][0], -t))
        _, token, probability, entropy = proposals[place]
        spent += entropy
        if limit is not None:
            near = min(near, *(abs(proposals[t][2] - limit) for t in now))
        if options.entropy_budget is not None:
            near = min(near, abs(spent - options.entropy_budget))
        over = options.entropy_budget is not None and spent >= options.entropy_budget
        if not forced and (over or (limit is not None and probability < limit)):
            break
        found.append((place, token, probability))
        conditioner.commit(torch.tensor([place]), torch.tensor([token]))
        left.remove(place)
    return found, near


EARLY = [True, True, True, False, False, False]
"""Two of these positions are hidden, and due."""
RULES = [
    *({"remasking": rule} for rule in ("low_confidence", "margin", "left_to_right", "random", "entropy")),
    {"temperature": 0.7},
    {"temperature": 0.3, "remasking": "margin"},
    {"temperature": 1.0, "remasking": "margin", "top_p": 0.8},
    {"temperature": 0.7, "remasking": "random", "top_k": 3},
    {"temperature": 1.3, "remasking": "left_to_right"},
    {"threshold": 0.3},
    {"threshold": 0.6},
    {"threshold": 0.3, "remasking": "random"},
    {"threshold": 0.3, "temperature": 0.7},
    {"threshold": 0.4, "temperature": 0.7, "remasking": "entropy", "top_p": 0.9},
    {"entropy_budget": 1.5},
    {"entropy_budget": 2.5, "temperature": 0.7, "remasking": "margin"},
    {"entropy_budget": 0.0, "remasking": "margin"},
    {"tempering": "paper", "circuit_temperature": 0.5},
    {"tempering": "paper", "circuit_temperature": 0.5, "temperature": 1.0, "threshold": 0.5},
    {"threshold": 0.6, "min_tokens": 3},
    {"threshold": 0.5, "min_tokens": 3, "due": EARLY},
    {"threshold": 0.5, "temperature": 0.7, "due": EARLY},
    {"threshold": 0.3, "remasking": "margin", "min_tokens": 2, "due": EARLY},
    {"entropy_budget": 2.5, "min_tokens": 3, "due": EARLY},
]


CASES = [*((name, rule) for name in ("reference", "eager", "native") for rule in RULES)]
CASES += [("triton", RULES[i]) for i in (0, 1, 3, 4, 5, 7, 9, 10, 14, 16, 18, 20, 21, 24)]  # the interpreter is slow


@pytest.mark.parametrize(("backend", "options"), CASES, ids=str)
def test_every_token_follows_the_conditionals_given_those_before(backend, options, monkeypatch):
    if backend == "triton":
        pytest.importorskip("triton")
    if backend == "native" and native.library() is None:
        pytest.skip("needs the compiled library")
    if CUDA and backend == "triton":
        pytest.skip("the tensors are on the CPU, where kernels run in Triton's interpreter only")
    monkeypatch.setattr(samplers, "CANDIDATES", 8)
    compared, enough = 0, 1 if backend == "triton" else 3
    for seed in range(12):
        # Candidates must be able to settle what the device cannot look at again.
        given = case(options, seed, scale=6.0 if backend == "triton" else 3.0, modulated=seed != 1)
        want, near = by_hand(given)
        if near < 2 * CLOSE[backend] or compared == enough:
            continue
        ranking = given.sampled(backend)
        assert bool(ranking.valid)
        got = ranking.writes()
        compared += 1
        positions = got.positions.tolist()
        assert [*zip(positions, got.tokens.tolist(), strict=True)] == [each[:2] for each in want]
        assert_close(got.scores.double(), torch.tensor([p for *_, p in want]).double(), rtol=0, atol=CLOSE[backend])
    assert compared == enough


@pytest.mark.parametrize("backend", ["eager", "native", "triton"])
def test_closed_rows_stay_and_what_is_not_settled_is_seen(backend, monkeypatch):
    """Few candidates of flat evidence: the host looks at all tokens, a device says that they do not suffice."""
    if backend == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(samplers, "CANDIDATES", 2)
    device = DEVICE if backend == "triton" else "cpu"
    given = case(RULES[0], 3, scale=0.1, device=device)
    got = given.sampled(backend)
    assert bool(got.valid) == (backend != "triton")
    want, _ = by_hand(case(RULES[0], 3, scale=0.1))
    if backend != "triton":
        assert got.tokens.tolist() == [token for _, token, _ in want]
    with ops.use(backend):
        every = samplers.sample_any_order(given.joint, 4, given.options, given.noise, dense=True)
    assert [*zip(every.rows.tolist(), every.tokens.tolist(), strict=True)] == [each[:2] for each in want]


# The candidates that settle what comes first.


def first(name, probabilities, order, given=None, open_=None, threshold=None):
    """What comes first among hand-made probabilities, (L, K): position, candidate, probability, settled, committed."""
    table = torch.tensor(probabilities)
    if name == "eager":
        rows = torch.arange(len(table)) if open_ is None else torch.tensor(open_).nonzero()[:, 0]
        numbers = None if given is None else torch.tensor(given)[rows]
        place, number, probability, settled = eager.first_candidate(table.log()[rows], order, numbers)
        return int(rows[place]), number, float(probability), settled
    from codd.circuits.ops.commit import triton as kernels

    length, count = table.shape
    open_ = torch.tensor([[True] * length if open_ is None else open_], device=DEVICE)
    tokens, observed = torch.zeros(1, length, dtype=torch.int64, device=DEVICE), torch.zeros_like(open_)
    leaf = ops.Scaled(torch.ones(1, length, 2, device=DEVICE), torch.zeros(1, length, 1, device=DEVICE))
    columns = torch.rand(1, length, count, 2, generator=generator(0)).to(DEVICE)
    candidates = torch.arange(count, device=DEVICE).expand(1, length, -1)
    numbers = None if given is None else torch.tensor([given], device=DEVICE)
    fixed = (table.log()[None].to(DEVICE), candidates, open_, order, numbers, columns, None)
    found = kernels.pick(*fixed, leaf, tokens, observed, threshold)
    position, token, _, _, keep = (x.item() for x in found)
    assert int(observed.sum()) == keep
    assert bool((leaf.values == 1).all()) != keep
    if keep:
        assert not open_[0, position]
        assert_close(leaf.values[0, position], columns[0, position, token] / columns[0, position, token].amax())
    else:
        assert not open_.any()
    return tuple(x.item() for x in found)[: 4 if threshold is None else 5]


BY_HAND = [
    # Ties: the leftmost position, the first candidate.
    ([[0.25, 0.5], [0.5, 0.5], [0.5, 0.5]], "low_confidence", (0, 1, 0.5, True)),
    ([[0.25, 0.5], [0.5, 0.25], [0.0, 0.25]], "margin", (0, 1, 0.5, False)),
    ([[0.25, 0.25], [0.25, 0.25]], "low_confidence", (0, 0, 0.25, False)),
    # Another position may hold a token outside that is surer: settled only if the order does not depend on it.
    ([[0.6, 0.3], [0.2, 0.1]], "low_confidence", (0, 0, 0.6, False)),
    ([[0.6, 0.3], [0.3, 0.2]], "low_confidence", (0, 0, 0.6, True)),
    ([[0.6, 0.3], [0.2, 0.1]], "given", (0, 0, 0.6, True)),
    # The best token of the position itself may be one outside.
    ([[0.25, 0.125], [1.0, 0.0]], "given", (0, 0, 0.25, False)),
    ([[0.5, 0.1], [0.0, 0.5]], "given", (0, 0, 0.5, True)),
    # The lead over a second that is outside is smaller; over one inside it is what it seems.
    ([[0.7, 0.2], [0.5, 0.3]], "margin", (0, 0, 0.7, True)),
    ([[0.7, 0.05], [0.5, 0.4]], "margin", (0, 0, 0.7, False)),
    ([[0.75], [0.5]], "margin", (0, 0, 0.75, False)),
    ([[0.75, 0.0], [0.5, 0.5]], "margin", (0, 0, 0.75, False)),
    ([[0.0, 0.0], [0.0, 0.0]], "low_confidence", (0, 0, 0.0, False)),
]


@pytest.mark.parametrize("name", ["eager", "triton"])
@pytest.mark.parametrize(("probabilities", "order", "want"), BY_HAND)
def test_what_comes_first_by_hand(name, probabilities, order, want):
    if name == "triton":
        pytest.importorskip("triton")
    given = [1.0, 0.0] if order == "given" else None
    assert first(name, probabilities, order, given) == pytest.approx(want)


@pytest.mark.parametrize("name", ["eager", "triton"])
def test_closed_positions_do_not_count(name):
    if name == "triton":
        pytest.importorskip("triton")
    table = [[1.0, 0.0], [0.1, 0.1], [0.4, 0.3]]
    assert first(name, table, "low_confidence", None, [False, False, True]) == pytest.approx((2, 0, 0.4, True))
    assert first(name, [[0.9, 0.1], [0.5, 0.5]], "given", [9.0, -torch.inf], [False, True])[:2] == (1, 0)


@pytest.mark.parametrize(
    ("probabilities", "threshold", "settled", "keep"),
    [
        ([[0.6, 0.3], [0.7, 0.2]], 0.65, True, True),
        ([[0.6, 0.3], [0.7, 0.2]], 0.75, True, False),
        # Nothing reaches it, although it is not certain what comes first; or a token outside might.
        ([[0.3, 0.2], [0.2, 0.1]], 0.8, True, False),
        ([[0.3, 0.2], [0.1, 0.1]], 0.75, False, False),
    ],
)
def test_a_threshold_on_a_device_by_hand(probabilities, threshold, settled, keep):
    pytest.importorskip("triton")
    assert first("triton", probabilities, "low_confidence", threshold=threshold)[3:] == (settled, keep)


# The loop in C.


def test_a_matrix_in_16_bits_is_right_to_one_part_in_2048():
    matrix = HMM.random(40, V, scale=6.0).transition.linear[0]
    small = native.narrowed(matrix)
    assert small is not None
    bits = (small.to(torch.int32) & 0xFFFF) << 13 | 0x20000000
    assert float((bits.view(torch.float32) / matrix - 1).abs().max()) <= 2**-11
    assert native.narrowed(torch.eye(4)) is None  # zeros have no such form


@needs_library
@pytest.mark.parametrize("states", [7, 32, 45, WIDEST + 4])
@pytest.mark.parametrize("zeros", [False, True])
def test_the_loop_in_c_serves_any_number_of_states(states, zeros, monkeypatch):
    """Also more than fit in the widest float32 matrix; with zeros that has no form in 16 bits."""
    monkeypatch.setattr(samplers, "CANDIDATES", 20)
    given = case(RULES[0], 1, states=states)
    if zeros:
        hmm = given.joint.circuit
        mixed = hmm.log_transition.exp() * (torch.rand(states, states, generator=generator(0)) < 0.7)
        given.joint.circuit = HMM(hmm.log_initial, (mixed / mixed.sum(-1, keepdim=True)).log(), hmm.log_emission)
        assert given.joint.circuit.transition.narrowed is None
    got, want = given.sampled("native"), given.sampled("eager")
    assert got.rows.tolist() == want.rows.tolist()
    assert got.tokens.tolist() == want.tokens.tolist()
    assert_close(got.scores, want.scores, rtol=2e-3, atol=1e-5)


@needs_library
@pytest.mark.parametrize(
    "what", ["flat", "lost messages", "lost weights", "impossible", "float64", "few", "drawn flat"]
)
def test_what_the_loop_in_c_leaves_to_pytorch(what, monkeypatch):
    """It stops, or does not begin, and the answer is that of the loop in PyTorch."""
    monkeypatch.setattr(samplers, "CANDIDATES", 3 if "flat" in what else 20)
    options = {**RULES[0], "temperature": 1.0 if what == "drawn flat" else 0.0}
    given = case(options, 2, scale=0.5 if "flat" in what else 3.0, states=32)
    hmm, ev, finished = given.joint.circuit, given.joint.evidence, []
    if what == "lost messages":
        ev.latent_log_potentials[:] = -40 * torch.arange(32.0)
        ev.latent_log_potentials[0, 1] = 40 * torch.arange(32.0)
        hmm = HMM(hmm.log_initial, (torch.eye(32) + 1e-30).log().log_softmax(-1), hmm.log_emission)
    elif what == "lost weights":  # states emit what the network expects with 1e-25 only
        table = hmm.log_emission.clone()
        table[:, 1:] -= 58
        hmm = HMM(hmm.log_initial, hmm.log_transition, table.log_softmax(-1))
        ev.potentials[..., 0] = -torch.inf
    elif what == "impossible":
        table = torch.full((32, V), -torch.inf)
        table[:, 39] = 0
        hmm = HMM(hmm.log_initial, hmm.log_transition, table)
        ev.tokens.fill_(1)
    elif what == "float64":
        hmm = hmm.to(dtype=torch.float64)
    elif what == "few":
        monkeypatch.setattr(samplers, "CANDIDATES", V)
    given.joint.circuit = hmm
    run = commit_native._run
    monkeypatch.setattr(commit_native, "_run", lambda *args: finished.append(run(*args)) or finished[-1])
    got, want = given.sampled("native"), given.sampled("eager")
    assert not any(complete for _, complete in finished)
    assert bool(finished) == (what not in ("float64", "few"))
    assert bool(got.valid) == bool(want.valid) == (what != "impossible")
    assert got.rows.tolist() == want.rows.tolist()
    assert got.tokens.tolist() == want.tokens.tolist()


@needs_library
def test_the_loop_in_c_changes_nothing_that_it_was_given(monkeypatch):
    monkeypatch.setattr(samplers, "CANDIDATES", 20)
    given = case(RULES[0], 1)
    conditioner = given.joint.conditionals(20)
    before = conditioner._leaf.values.clone()
    rule = samplers.sampling_rule(given.options, 3, 3)
    open_ = HIDDEN[0].clone()
    few = conditioner.commit_tokens(open_, given.noise.tokens, None, rule)
    more = conditioner.commit_tokens(open_, given.noise.tokens, None, rule._replace(most=100))
    assert torch.equal(open_, HIDDEN[0])
    assert torch.equal(conditioner._leaf.values, before)
    assert few.positions.tolist() == more.positions[:3].tolist()
    assert sorted(more.positions.tolist()) == HIDDEN[0].nonzero()[:, 0].tolist()
    nothing = conditioner.commit_tokens(torch.zeros(L, dtype=torch.bool), given.noise.tokens, None, rule)
    assert len(nothing.positions) == 0
    assert bool(nothing.valid)


# Devices.


@pytest.mark.skipif(not CUDA, reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("options", RULES[:6], ids=str)
def test_the_loop_can_be_captured_in_a_graph_and_waits_for_nothing(options):
    g, hmm = generator(0), HMM.random(256, 5000, seed=1).to(DEVICE, emission=torch.bfloat16)
    ev = Evidence(logits=2 * torch.randn(1, 32, 5000, generator=g).bfloat16().to(DEVICE))
    noise = Noise(*(part.to(DEVICE) for part in Noise.drawn(32, g)))
    rule = samplers.sampling_rule(Options.of(sampler="any_order", steps=None, **options), 32, 32)
    few = rule.candidates_suffice and rule.temperature == 0
    given = noise.order if rule.order == "given" else None

    def all_of_them():
        conditioner = hmm.incremental(ev, 64 if few else None)
        return conditioner.commit_tokens(torch.ones(32, dtype=torch.bool, device=DEVICE), noise.tokens, given, rule)

    want = all_of_them()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        all_of_them()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = all_of_them()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)
