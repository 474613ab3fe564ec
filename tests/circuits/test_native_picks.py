"""The decision in C: what `pick` commits step by step, in one call."""

import pytest
import torch
from torch.testing import assert_close

from codd.circuits import HMM, Evidence
from codd.circuits.ops import native
from codd.circuits.ops.pick.eager import RULES
from codd.circuits.parameters import WIDEST

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs the compiled library")
LENGTH, VOCAB, CANDIDATES = 9, 50, 20
STATES = (7, 32, 45, WIDEST + 4)


def case(states: int, seed: int = 0, *, modulated: bool = True, sharp: float = 3.0) -> tuple[HMM, Evidence]:
    generator = torch.Generator().manual_seed(seed)
    hmm = HMM.random(states, VOCAB, seed, scale=2.0)
    observed = torch.tensor([[True, False, False, True, False, False, False, False, False]])
    return hmm, Evidence(
        tokens=torch.randint(VOCAB, (1, LENGTH), generator=generator),
        observed=observed,
        logits=torch.randn(1, LENGTH, VOCAB, generator=generator) * sharp,
        latent_log_potentials=torch.randn(1, LENGTH, states, generator=generator) if modulated else None,
    )


def step_by_step(hmm, ev, rule, open_, given, count, threshold):
    conditioner, open_ = hmm.incremental(ev, CANDIDATES), open_[None].clone()
    order = None if given is None else given[None]
    found = [conditioner.pick(rule, open_, order, threshold if k else None) for k in range(count)]
    return [(int(p.positions), int(p.tokens), float(p.probabilities)) for p in found if bool(p.keep)]


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("modulated", [True, False])
def test_picks_are_those_of_step_by_step(states, rule, modulated):
    settled = 0
    for seed in range(4):
        hmm, ev = case(states, seed, modulated=modulated)
        given = torch.rand(LENGTH, generator=torch.Generator().manual_seed(seed)) if rule == "given" else None
        open_ = ~ev.observed[0]
        open_[5] = False
        for threshold in (None, 0.5) if rule == "low_confidence" else (None,):
            got = hmm.incremental(ev, CANDIDATES).picks(rule, open_, given, 4, threshold)
            if not got.complete:
                continue
            settled += 1
            want = step_by_step(hmm, ev, rule, open_, given, 4, threshold)
            assert list(zip(*(part.tolist() for part in got[:2]), strict=True)) == [each[:2] for each in want]
            assert_close(got.probabilities, torch.tensor([each[2] for each in want]), rtol=2e-3, atol=1e-5)
    assert settled >= 3


def test_nothing_is_committed_and_no_argument_changes():
    hmm, ev = case(32)
    conditioner, open_ = hmm.incremental(ev, CANDIDATES), ~ev.observed[0]
    before, leaf = open_.clone(), conditioner._leaf.values.clone()
    first = conditioner.picks("low_confidence", open_, None, 6)
    again = conditioner.picks("low_confidence", open_, None, 6)
    for a, b in zip(first[:3], again[:3], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(open_, before)
    assert torch.equal(conditioner._leaf.values, leaf)
    assert torch.equal(conditioner.evidence.observed, ev.observed)


def test_fewer_picks_are_the_first_of_more():
    hmm, ev = case(WIDEST + 4)
    open_ = ~ev.observed[0]
    many = hmm.incremental(ev, CANDIDATES).picks("low_confidence", open_, None, 7)
    few = hmm.incremental(ev, CANDIDATES).picks("low_confidence", open_, None, 3)
    assert [part[:3].tolist() for part in many[:3]] == [part.tolist() for part in few[:3]]


def test_more_than_there_is_ends_with_what_there_is():
    hmm, ev = case(32)
    found = hmm.incremental(ev, CANDIDATES).picks("low_confidence", ~ev.observed[0], None, 100)
    assert sorted(found.positions.tolist()) == (~ev.observed[0]).nonzero()[:, 0].tolist()
    nothing = hmm.incremental(ev, CANDIDATES).picks("low_confidence", torch.zeros(LENGTH, dtype=torch.bool), None, 3)
    assert len(nothing.positions) == 0


def test_flat_evidence_is_left_to_all_tokens():
    """With few candidates and nothing to choose between them, one that was not looked at may be better."""
    hmm, ev = case(32, sharp=0.0)
    assert not hmm.incremental(ev, 2).picks("low_confidence", ~ev.observed[0], None, 2).complete


def test_what_float32_cannot_hold_is_left_to_the_reference():
    hmm, ev = case(32)
    ev.latent_log_potentials[:] = -40 * torch.arange(32.0)
    ev.latent_log_potentials[0, 1] = 40 * torch.arange(32.0)
    sharp = HMM(hmm.log_initial, (torch.eye(32) + 1e-30).log().log_softmax(-1), hmm.log_emission)
    assert not sharp.incremental(ev, CANDIDATES).picks("low_confidence", ~ev.observed[0], None, 2).complete


def test_float64_is_left_to_pytorch():
    hmm, ev = case(32)
    assert (
        hmm.to(dtype=torch.float64).incremental(ev, CANDIDATES).picks("low_confidence", ~ev.observed[0], None, 2)
        is None
    )


def test_weights_that_leave_the_range_of_float32_are_left_to_the_reference():
    """States that the latents allow emit what the network expects with 1e-25 only."""
    hmm, ev = case(32, modulated=False)
    table = hmm.log_emission.clone()
    table[:, 1:] -= 58
    rare = HMM(hmm.log_initial, hmm.log_transition, table.log_softmax(-1))
    ev.potentials[..., 0] = -torch.inf
    assert not rare.incremental(ev, CANDIDATES).picks("low_confidence", ~ev.observed[0], None, 2).complete


def test_impossible_evidence_is_left_to_the_sampler():
    table = torch.full((32, VOCAB), -torch.inf)
    table[:, 0] = 0
    hmm = HMM.random(32, VOCAB)
    ev = Evidence(
        tokens=torch.ones(1, 3, dtype=torch.int64),
        observed=torch.tensor([[True, False, False]]),
        logits=torch.randn(1, 3, VOCAB),
    )
    impossible = HMM(hmm.log_initial, hmm.log_transition, table)
    assert not impossible.incremental(ev, 4).picks("low_confidence", ~ev.observed[0], None, 1).complete


def test_the_matrix_in_16_bits_is_right_to_one_part_in_2048():
    matrix = HMM.random(40, VOCAB, scale=6.0).transition.linear[0]
    small = native.narrowed(matrix)
    assert small is not None
    bits = (small.to(torch.int32) & 0xFFFF) << 13 | 0x20000000
    assert float((bits.view(torch.float32) / matrix - 1).abs().max()) <= 2**-11
    assert native.narrowed(torch.eye(4)) is None  # zeros have no such form


def test_a_circuit_with_zeros_keeps_its_floats():
    hmm, ev = case(WIDEST + 4)
    mixed = hmm.log_transition.exp() * (torch.rand(WIDEST + 4, WIDEST + 4) < 0.7)
    sparse = HMM(hmm.log_initial, (mixed / mixed.sum(-1, keepdim=True)).log(), hmm.log_emission)
    assert sparse.transition.narrowed is None
    open_ = ~ev.observed[0]
    got = sparse.incremental(ev, CANDIDATES).picks("low_confidence", open_, None, 4)
    want = step_by_step(sparse, ev, "low_confidence", open_, None, 4, None)
    assert_close(got.probabilities, torch.tensor([each[2] for each in want]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 33])
def test_a_product_with_panels(rows):
    generator = torch.Generator().manual_seed(rows)
    matrix, left = (torch.rand(*shape, generator=generator) for shape in ((600, 96), (rows, 600)))
    panels = native.in_panels(matrix)
    assert panels is not None
    got = native.product(left, panels)
    assert_close(got.double(), left.double() @ matrix.double(), rtol=1e-6, atol=0)
    alone = torch.cat([native.product(row[None], panels) for row in left])
    assert torch.equal(got, alone)
    assert native.in_panels(torch.rand(4, 33)) is None


class TestDraws:
    """Against the distribution of all tokens, tempered, and an inverse CDF in the order of the vocabulary."""

    @staticmethod
    def by_hand(hmm, ev, open_, uniforms, count, threshold, temperature):
        conditioner, open_, found = hmm.incremental(ev), open_.clone(), []
        for k in range(count):
            log_p = conditioner.dense_log_marginals()[0].double()
            tokens = []
            for row, u in zip((log_p / temperature).softmax(-1), uniforms.double(), strict=True):
                tokens.append(int(torch.searchsorted(row.cumsum(0), u * row.sum(), right=True)))
            scores = log_p.gather(-1, torch.tensor(tokens)[:, None])[:, 0].exp().masked_fill(~open_, -1)
            position = int(scores.argmax())
            if k and float(scores[position]) < threshold:
                break
            found.append((position, tokens[position], float(scores[position])))
            conditioner.commit(torch.tensor([position]), torch.tensor([tokens[position]]))
            open_[position] = False
        return found

    @pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0])
    @pytest.mark.parametrize("threshold", [0.0, 0.6])
    def test_draws(self, temperature, threshold):
        complete = 0
        for seed in range(12):
            hmm, ev = case(45, seed, sharp=6.0)
            uniforms = torch.rand(LENGTH, generator=torch.Generator().manual_seed(seed))
            open_ = ~ev.observed[0]
            draw = native.Drawing(uniforms, temperature)
            got = hmm.incremental(ev, CANDIDATES).picks("low_confidence", open_, None, 5, threshold, draw)
            want = self.by_hand(hmm, ev, open_, uniforms, 5, threshold, temperature)
            want = want if got.complete else want[: len(got.positions)]
            assert list(zip(got.positions.tolist(), got.tokens.tolist(), strict=True)) == [each[:2] for each in want]
            assert_close(got.probabilities, torch.tensor([each[2] for each in want]), rtol=1e-4, atol=1e-5)
            complete += got.complete
        assert complete >= 6

    def test_what_few_candidates_cannot_settle_is_left_open(self):
        hmm, ev = case(32, sharp=0.5)
        draw = native.Drawing(torch.rand(LENGTH), 1.0)
        got = hmm.incremental(ev, 3).picks("low_confidence", ~ev.observed[0], None, 5, None, draw)
        assert not got.complete
