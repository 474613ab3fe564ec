"""Picks in one launch against PyTorch, pick by pick, and both against what they mean."""

import itertools
import warnings
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from codd.circuits import HMM, Evidence, ops
from codd.circuits.incremental import IncrementalConditioner
from codd.circuits.ops.draw.eager import Draw
from codd.circuits.ops.pick import eager
from codd.coupling import Coupled
from codd.decoding import any_order, ranking
from codd.decoding.options import Options
from codd.decoding.samplers import Noise
from codd.errors import InvalidEvidence
from tests.support.strategies import generator, shape_checks

pytest.importorskip("triton")
from codd.circuits.ops.pick import triton as kernels

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# (B, L, N, V, K): not multiples of any tile, several tiles of states and of candidates, one of everything.
CASES = [
    ((1, 4, 20, 30, 6), "logits"),
    ((3, 3, 9, 17, 5), "mixed"),
    ((1, 3, 33, 12, 9), "compact"),
    ((2, 2, 9, 8, 5), "compact_latent"),
    ((1, 1, 1, 3, 1), "mixed"),
]
if CUDA:
    SHAPES = [(1, 32, 1024, 126464, 64), (3, 32, 256, 5000, 64), (2, 16, 4096, 3000, 128)]
    CASES += itertools.product(SHAPES, ("logits", "mixed", "compact", "compact_latent"))
IMPLEMENTATIONS = {"eager": eager, "triton": kernels}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Uninitialised memory is NaN, so that an unwritten output fails loudly."""

    def empty(*size, **options):
        out = EMPTY(*size, **options)
        return out.fill_(float("nan") if out.dtype.is_floating_point else torch.iinfo(out.dtype).max)

    EMPTY = torch.empty
    monkeypatch.setattr(kernels.torch, "empty", empty)
    with warnings.catch_warnings():  # numpy under the interpreter warns of the infinities that the kernels allow for
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def case(shape, style, seed=1):
    """A circuit and evidence."""
    batch, length, states, vocab, _ = shape
    g = generator(seed)
    hmm = HMM.random(states, vocab, seed=seed).to(DEVICE)
    if style.startswith("compact"):
        hmm = hmm.to(emission=torch.bfloat16)
    logits = 2 * torch.randn(batch, length, vocab, generator=g)
    if style == "offset":
        logits = 8 * logits + 1e8 * torch.randn(batch, length, 1, generator=g)
    fields = {"logits": logits.bfloat16() if style == "compact" else logits, "temperature": 0.7}
    if style in ("mixed", "compact_latent"):
        fields["latent_log_potentials"] = torch.randn(batch, length, states, generator=g)
    if style == "mixed":
        fields["temperature"] = 0.5 + torch.rand(batch, generator=g)
        fields["missing"] = torch.rand(batch, length, generator=g) < 0.2
        fields["observed"] = torch.rand(batch, length, generator=g) < 0.3
        fields["tokens"] = torch.randint(vocab, (batch, length), generator=g)
    return hmm, Evidence(**fields).to(DEVICE)


def conditioner(hmm, ev, count, backend="triton"):
    with ops.use(backend):
        return hmm.incremental(ev, count)


def masked(found: IncrementalConditioner):
    return ~found.evidence.observed


def compared(found: IncrementalConditioner) -> IncrementalConditioner:
    """With every launch checked against PyTorch on copies of the same tensors."""
    fast = found._backend

    def marginals(*args):
        got, want = fast.candidate_marginals(*args), eager.candidate_marginals(*args)
        some = slice(None) if args[-1] is None else args[-1].any(-1)  # with nothing open they may be anything
        assert_close(got[some], want[some], rtol=2e-5, atol=2e-5)
        return got

    def pick(log_p, candidates, open_, rule, given, columns, scale, leaf, tokens, observed, threshold):
        copies = [x.clone() for x in (open_, leaf.values, leaf.log_scale, tokens, observed)]
        fixed = (log_p, candidates, copies[0], rule, given, columns, scale)
        want = eager.pick(*fixed, ops.Scaled(copies[1], copies[2]), *copies[3:], threshold)
        got = fast.pick(log_p, candidates, open_, rule, given, columns, scale, leaf, tokens, observed, threshold)
        assert torch.equal(got.keep, want.keep)
        for a, b in zip(got, want, strict=True):
            assert_close(a[got.keep], b[got.keep], rtol=1e-5, atol=1e-6)
        for a, b in zip((open_, tokens, observed), (copies[0], *copies[3:]), strict=True):
            assert torch.equal(a, b)
        assert_close(leaf.values, copies[1], rtol=1e-5, atol=1e-6)
        assert_close(leaf.log_scale, copies[2], rtol=1e-5, atol=1e-5)
        return got

    found._backend = replace(fast, pick=pick, candidate_marginals=marginals)
    return found


@pytest.mark.parametrize(
    ("shape", "style", "rule"),
    [
        (*c, rule)
        for i, c in enumerate(CASES)
        for j, rule in enumerate(eager.RULES)
        if CUDA or i == 1 or (i + j) % 3 == 0
    ],
    ids=str,
)
def test_one_launch_equals_pytorch_until_all_is_committed(shape, style, rule):
    batch, length, *_, count = shape
    hmm, ev = case(shape, style)
    exact = hmm.to(dtype=torch.float64) if not CUDA else None
    found = compared(conditioner(hmm, ev, count))
    open_ = masked(found)
    # Equal numbers: the leftmost comes first.
    given = (3 * torch.rand(batch, length, generator=generator(3))).floor().to(DEVICE) if rule == "given" else None
    for k in range(length + 1):
        before = open_.clone()
        got = found.pick(rule, open_, given)
        assert torch.equal(before.any(-1), (before & ~open_).any(-1))
        each = torch.arange(batch, device=DEVICE)
        some = before.any(-1)
        assert bool(before[each, got.positions][some].all())
        assert torch.equal(found.evidence.tokens[each, got.positions][some], got.tokens[some])
        assert torch.equal(found.evidence.observed, ~open_)
        if exact is not None and k % 2:
            want = exact.marginals(found.evidence).gather(-1, found.candidates)
            # Leaf values come from a contraction that rounds to ten bits.
            assert_close(found.log_marginals().double().exp(), want.exp(), rtol=0, atol=2e-3)
    assert not open_.any()
    assert not got.keep.any()


@pytest.mark.parametrize(("shape", "style"), [*CASES, (CASES[0][0], "offset")], ids=str)
def test_columns_and_weights_are_those_of_pytorch(shape, style):
    hmm, ev = case(shape, style)
    found = conditioner(hmm, ev, shape[-1])
    prepared = found._prepared
    found._totals = None  # PyTorch prepares what the kernels do not
    del found._prepared
    columns, weights = found._prepared
    assert_close(prepared[0].float(), columns, rtol=1e-6, atol=0)
    assert_close(prepared[1], weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "count", "rule"),
    [("triton", 4, "margin"), *itertools.product(["eager"], [None, 4], eager.RULES)],
)
def test_a_pick_is_a_choice_and_a_commit(backend, rule, count):
    shape = (2, 5, 6, 11, count)
    hmm, ev = case(shape, "mixed", seed=4)
    fast, slow = (conditioner(hmm, ev, count, backend) for _ in range(2))
    open_ = masked(fast) & torch.tensor([True, True, False, True, True], device=DEVICE)
    given = torch.rand(2, 5, generator=generator(0)).to(DEVICE) if rule == "given" else None
    for _ in range(int(open_.sum(-1).min())):
        want = eager.choose(slow.log_marginals(), open_.clone(), rule, given, count is not None)
        got = fast.pick(rule, open_, given)
        assert torch.equal(got.positions, want.positions)
        assert torch.equal(got.sure, want.sure)
        slow.commit(got.positions, got.tokens)
        assert_close(fast.log_marginals(), slow.log_marginals(), rtol=1e-4, atol=1e-4)
        assert_close(fast.log_partition, slow.log_partition, rtol=1e-5, atol=1e-4)
    assert torch.equal(fast.evidence.tokens, slow.evidence.tokens)


def choose(name, probabilities, rule, open_=None, given=None):
    """A pick among hand-made probabilities, (L, K), with a circuit of two states behind it."""
    log_p = torch.tensor(probabilities).log()[None].to(DEVICE)
    _, length, count = log_p.shape
    open_ = torch.ones(1, length, dtype=torch.bool) if open_ is None else torch.tensor([open_])
    state = (torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, length, dtype=torch.bool))
    leaf = ops.Scaled(torch.ones(1, length, 2, device=DEVICE), torch.zeros(1, length, 1, device=DEVICE))
    columns = torch.rand(1, length, count, 2, generator=generator(0)).to(DEVICE)
    candidates = (10 + torch.arange(count, device=DEVICE)).expand(1, length, -1)
    order = None if given is None else torch.tensor([given], device=DEVICE)
    fixed = (log_p, candidates, open_.to(DEVICE), rule, order, columns, None, leaf)
    got = IMPLEMENTATIONS[name].pick(*fixed, *(x.to(DEVICE) for x in state))
    return tuple(x.item() for x in got)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("probabilities", "rule", "want"),
    [
        # Ties: the leftmost position, the first candidate.
        ([[0.25, 0.5], [0.5, 0.5], [0.5, 0.5]], "low_confidence", (0, 11, 0.5, True)),
        ([[0.25, 0.5], [0.5, 0.25], [0.0, 0.25]], "margin", (0, 11, 0.5, False)),
        ([[0.25, 0.25], [0.25, 0.25]], "low_confidence", (0, 10, 0.25, False)),
        # Another position may hold a token outside that is surer than the pick: then it is not sure, unless the order
        # does not depend on it.
        ([[0.6, 0.3], [0.2, 0.1]], "low_confidence", (0, 10, 0.6, False)),
        ([[0.6, 0.3], [0.3, 0.2]], "low_confidence", (0, 10, 0.6, True)),
        ([[0.6, 0.3], [0.2, 0.1]], "given", (0, 10, 0.6, True)),
        # The best token of the picked position itself may be one outside.
        ([[0.25, 0.125], [1.0, 0.0]], "given", (0, 10, 0.25, False)),
        ([[0.5, 0.1], [0.0, 0.5]], "given", (0, 10, 0.5, True)),
        # The lead over a second that is outside is smaller; over one inside it is what it seems.
        ([[0.7, 0.2], [0.5, 0.3]], "margin", (0, 10, 0.7, True)),
        ([[0.7, 0.05], [0.5, 0.4]], "margin", (0, 10, 0.7, False)),
        ([[0.75], [0.5]], "margin", (0, 10, 0.75, False)),
        ([[0.75, 0.0], [0.5, 0.5]], "margin", (0, 10, 0.75, False)),
        # Impossible.
        ([[0.0, 0.0], [0.0, 0.0]], "low_confidence", (0, 10, 0.0, False)),
    ],
)
def test_by_hand(name, probabilities, rule, want):
    given = [1.0, 0.0] if rule == "given" else None
    assert choose(name, probabilities, rule, given=given) == pytest.approx((*want, True))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_closed_positions_do_not_count(name):
    assert choose(name, [[1.0, 0.0], [0.1, 0.1], [0.4, 0.3]], "low_confidence", [False, False, True])[0] == 2
    assert choose(name, [[1.0, 0.0], [0.1, 0.1], [0.4, 0.3]], "low_confidence", [False, False, True])[3] is True
    assert choose(name, [[0.9, 0.1], [0.5, 0.5]], "given", [False, True], [9.0, -torch.inf])[:2] == (1, 10)
    assert choose(name, [[0.9, 0.1], [0.5, 0.5]], "margin", [False, False])[3:] == (True, False)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_token_that_only_the_circuit_wants(backend):
    """The network prefers tokens 0 and 1 a little, the circuit token 4 very much."""
    emission = torch.tensor([[0.025, 0.025, 0.025, 0.025, 0.9]]).log()
    hmm = HMM(torch.zeros(1), torch.zeros(1, 1), emission).to(DEVICE)
    ev = Evidence(logits=torch.tensor([[[0.2, 0.1, 0, 0, 0]]], device=DEVICE))
    for count, want in ((2, (0, False)), (5, (4, True))):
        found = conditioner(hmm, ev, count, backend)
        got = found.pick("low_confidence", masked(found))
        assert (int(got.tokens), bool(got.sure)) == want


@pytest.mark.parametrize("what", ["tile", "strides"])
def test_what_the_kernel_does_not_serve_goes_through_pytorch(monkeypatch, what):
    hmm, ev = case((2, 4, 6, 9, 3), "mixed")
    found, other = (conditioner(hmm, ev, 3) for _ in range(2))
    open_ = masked(found)
    want = found.pick("margin", open_.clone())
    if what == "tile":
        monkeypatch.setattr(kernels, "LARGEST", 2)
    strided = open_.T.contiguous().T
    for a, b in zip(other.pick("margin", strided), want, strict=True):
        assert_close(a, b)
    assert_close(other.log_marginals(), found.log_marginals())


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_sequence_with_nothing_open_stays_as_it_is(backend):
    hmm, ev = case((2, 4, 6, 9, 3), "logits")
    found = conditioner(hmm, ev, 3, backend)
    before = found.log_marginals()
    open_ = torch.zeros(2, 4, dtype=torch.bool, device=DEVICE)
    open_[1] = True
    got = found.pick("low_confidence", open_)
    assert got.keep.tolist() == [False, True]
    assert found.evidence.observed.sum(-1).tolist() == [0, 1]
    assert_close(found.log_marginals()[0], before[0])


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_an_open_position_that_is_known_is_closed_and_nothing_else(backend):
    hmm, ev = case((1, 4, 6, 9, 3), "logits")
    found = conditioner(hmm, ev, 3, backend)
    at, token = torch.tensor([2], device=DEVICE), found.candidates[:, 2, 1].clone()
    found.commit(at, token)
    before = found.log_marginals()
    open_ = torch.ones(1, 4, dtype=torch.bool, device=DEVICE)
    got = found.pick("low_confidence", open_)
    assert (int(got.positions), int(got.tokens), float(got.probabilities)) == (2, int(token), 1.0)
    assert open_[0].tolist() == [True, True, False, True]
    assert_close(found.log_marginals(), before)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda p, m: p.pick("entropy", m), "rule must be one of low_confidence, margin, given, found 'entropy'"),
        (lambda p, m: p.pick("given", m), "found none with rule='given'"),
        (lambda p, m: p.pick("margin", m, m.float()), "found one with rule='margin'"),
        (lambda p, m: p.pick("margin", m[:, 1:]), "open_ must have the shape"),
        (lambda p, m: p.pick("margin", m.int()), "must be a boolean mask"),
    ],
)
def test_what_makes_no_sense_is_refused(ask, message):
    hmm, ev = case((1, 4, 6, 9, 3), "logits")
    found = conditioner(hmm, ev, 3)
    with shape_checks(False), pytest.raises(InvalidEvidence, match=message):
        ask(found, masked(found))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("probabilities", "threshold", "sure", "keep", "left"),
    [
        ([[0.6, 0.3], [0.7, 0.2]], 0.65, True, True, [True, False]),
        ([[0.6, 0.3], [0.7, 0.2]], 0.75, True, False, [False, False]),
        # Nothing reaches it, although it is not certain what comes first.
        ([[0.3, 0.2], [0.2, 0.1]], 0.8, True, False, [False, False]),
        # A token outside of the candidates might.
        ([[0.3, 0.2], [0.1, 0.1]], 0.75, False, False, [False, False]),
    ],
)
def test_a_threshold_by_hand(name, probabilities, threshold, sure, keep, left):
    log_p = torch.tensor([probabilities], device=DEVICE).log()
    open_ = torch.ones(1, 2, dtype=torch.bool, device=DEVICE)
    tokens, observed = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE), torch.zeros_like(open_)
    leaf = ops.Scaled(torch.ones(1, 2, 2, device=DEVICE), torch.zeros(1, 2, 1, device=DEVICE))
    columns, candidates = torch.rand(1, 2, 2, 2, device=DEVICE), 1 + torch.arange(2, device=DEVICE).expand(1, 2, -1)
    fixed = (log_p, candidates, open_, "low_confidence", None, columns, None, leaf, tokens, observed)
    got = IMPLEMENTATIONS[name].pick(*fixed, threshold)
    assert (bool(got.sure), bool(got.keep)) == (sure, keep)
    assert open_[0].tolist() == left
    assert int(observed.sum()) == int(tokens.sum()) == keep
    assert bool((leaf.values == 1).all()) != keep


DRAWS = [
    (Draw(), False),
    (Draw(temperature=0.7), True),
    (Draw(temperature=1.5), True),
    (Draw(temperature=0.5, rule="margin", entropies=True), True),
    (Draw(rule="entropy"), False),
]


def assert_chosen(log_p, tokens, uniforms, temperature):
    """The best tokens; or those in whose stretch of the sum the numbers lie, up to the rounding of a long sum."""
    p = (log_p if uniforms is None else ranking.temper(log_p, temperature)).double().softmax(-1)
    own, rounding = p.gather(1, tokens[:, None])[:, 0], 2e-5
    if uniforms is None:
        assert bool((own >= p.amax(1) - rounding).all())
        return
    end = p.cumsum(1).gather(1, tokens[:, None])[:, 0]
    assert bool((own > 0).all())
    assert bool(((end - own - rounding <= uniforms) & (uniforms <= end + rounding)).all())
    choice = ranking.choose_tokens(log_p, uniforms, temperature, None, None)
    assert float((choice == tokens).double().mean()) >= 0.9


if CUDA:
    PROPOSED = [(*case, *draw) for case, draw in itertools.product(CASES, DRAWS)]
else:  # every case and every draw: the interpreter is slow
    PROPOSED = [(*case, *draw) for case, draw in zip((*CASES[1:], CASES[1]), DRAWS, strict=True)]


@pytest.mark.parametrize(("shape", "style", "draw", "drawn"), PROPOSED, ids=str)
def test_proposals_are_those_of_pytorch(shape, style, draw, drawn):
    batch, length, *_ = shape
    hmm, ev = case(shape, style)
    found, slow = (conditioner(hmm, ev, None, backend) for backend in ("triton", "eager"))
    everything = torch.ones(batch, length, dtype=torch.bool, device=DEVICE)
    uniforms = torch.rand(batch, length, generator=generator(7)).to(DEVICE)
    got = found.propose(everything, draw, uniforms if drawn else None)
    log_p = found.dense_log_marginals()
    # The contraction behind the leaf values rounds to ten bits, the other one to the last.
    assert_close(log_p.exp(), slow.dense_log_marginals().exp(), rtol=0, atol=2e-3)
    log_p = log_p.flatten(0, 1)
    tokens = got.tokens.flatten()
    assert_chosen(log_p, tokens, uniforms.flatten() if drawn else None, draw.temperature)
    assert_close(got.probabilities.flatten(), ranking.token_probability(log_p, tokens))
    order = ranking.priority(draw.rule, log_p, tokens, None)
    assert_close(got.order.flatten(), order, rtol=1e-4, atol=1e-5)
    entropies = ranking.entropy(log_p) if draw.needs_entropies else torch.zeros_like(order)
    assert_close(got.entropies.flatten(), entropies, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("style", ["mixed", "compact_latent", "compact"])
def test_an_offer_is_taken_as_pytorch_takes_it(style):
    shape = (2, 4, 9, 15, None)
    hmm, ev = case(shape, style, seed=3)
    found = conditioner(hmm, ev, None)
    slow = conditioner(hmm, ev, None)
    slow._backend = replace(slow._backend, take=None)
    open_ = masked(found)
    open_[0] = False
    state = [(one, open_.clone(), torch.zeros(2, device=DEVICE)) for one in (found, slow)]
    g = generator(5)
    for number in range(5):
        offers = eager.Offers(
            torch.randint(15, (2, 4), generator=g).to(DEVICE),
            *((4 * torch.rand(2, 4, generator=g)).ceil().to(DEVICE) / 4 for _ in range(3)),
        )
        limits = [eager.Limits(number == 0, 0.5, 3.0 if number % 2 else None, spent) for *_, spent in state]
        got, want = (one.take(offers, left, limit) for (one, left, _), limit in zip(state, limits, strict=True))
        for a, b in zip(got, want, strict=True):
            assert_close(a[1:], b[1:])
        assert got.keep.tolist() == want.keep.tolist()
        assert torch.equal(state[0][1], state[1][1])
        assert_close(state[0][2], state[1][2])
        assert_close(found._leaf.values, slow._leaf.values)
        assert_close(found.log_partition, slow.log_partition, rtol=1e-5, atol=1e-4)
    assert torch.equal(found.evidence.tokens, slow.evidence.tokens)
    assert torch.equal(found.evidence.observed, slow.evidence.observed)


SAMPLED = [
    *({"remasking": rule} for rule in ("low_confidence", "margin", "left_to_right", "random", "entropy")),
    {"temperature": 0.7},
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
]


@pytest.mark.parametrize(
    ("backend", "options"),
    [*(("eager", options) for options in SAMPLED), *(("triton", options) for options in SAMPLED[::2])],
    ids=str,
)
def test_the_samplers_picks_on_a_device_are_those_on_the_host(monkeypatch, backend, options):
    if backend == "triton" and CUDA:
        pytest.skip("the tensors are on the CPU, where kernels run in Triton's interpreter only")
    monkeypatch.setattr(any_order, "CANDIDATES", 8)
    g = generator(2)
    hmm = HMM.random(8, 12, seed=1)
    hidden = torch.tensor([[True, True, False, True, True, True]])
    joint = Coupled(hmm, logits=4 * torch.randn(1, 6, 12, generator=g), tokens=torch.full((1, 6), 3), masked=hidden)
    rows, shuffled = torch.tensor([0, 1, 2, 4, 5]), torch.tensor([0.3, 0.9, 0.95, 0.1, 0.5])
    open_rows = hidden[0, rows]
    chosen = Options.of(sampler="any_order", **options)
    few = chosen.temperature == 0 and chosen.entropy_budget is None and any_order._candidates_suffice(chosen)
    for count in (None,) if not chosen.fixed_count else (1, 3, 4) if backend == "eager" else (4,):
        noise = Noise(torch.rand(6, generator=g), torch.zeros(6).scatter(0, rows, shuffled), torch.zeros(6))
        want = any_order.sample_any_order(joint, rows[open_rows], count, chosen, noise)
        with ops.use(backend):
            given = joint.conditionals(any_order.CANDIDATES if few else None)
            got = any_order._sample_on_device(given, rows, open_rows, count, noise.at(rows), chosen)
        assert bool(got.valid)
        got = got.writes()
        assert rows[got.positions].tolist() == rows[open_rows][want.rows].tolist()
        assert got.tokens.tolist() == want.tokens.tolist()
        assert_close(got.scores, want.scores, rtol=0, atol=3e-3)


@pytest.mark.skipif(not CUDA, reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("rule", eager.RULES)
def test_picks_can_be_captured_in_a_graph_and_wait_for_nothing(rule):
    hmm, ev = case((1, 32, 256, 5000, 64), "compact")
    given = torch.rand(1, 32, generator=generator(0)).to(DEVICE) if rule == "given" else None

    def all_of_them():
        found = hmm.incremental(ev, 64)
        open_ = torch.ones(1, 32, dtype=torch.bool, device=DEVICE)
        return [found.pick(rule, open_, given) for _ in range(32)]

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
        for x, y in zip(a, b, strict=True):
            assert_close(x, y)
