"""The samplers against enumeration: every completion of a small window, and every latent path."""

import itertools

import pytest
import torch
from torch import Tensor

from codd.circuits import HMM, ops
from codd.coupling import Coupled
from codd.decoding import samplers
from codd.decoding.options import Options
from codd.decoding.samplers import Noise, Ranking, sample_any_order, sample_factorized, sample_latent
from tests.support.enumeration import fits
from tests.support.tiny_models import random_hmm

V, L = 4, 3
OBSERVED = 1
"""The place that is given."""
ROWS = torch.tensor([0, 2])


def window(seed: int = 0, vocab: int = V, temperature: float = 1.0, scale: float = 1.5) -> Coupled:
    draw = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(1, L, vocab, generator=draw)
    tokens = torch.randint(vocab, (1, L), generator=draw)
    masked = torch.tensor([[place != OBSERVED for place in range(L)]])
    circuit = random_hmm(3, vocab, seed)
    return Coupled(circuit, logits=logits, tokens=tokens, masked=masked, temperature=temperature)


def sticky() -> Coupled:
    """Three states that last, each with a word of its own: the two places depend on each other."""
    stay = torch.full((3, 3), 0.01).fill_diagonal_(0.98)
    words = torch.tensor([[0.84, 0.03, 0.03, 0.1], [0.03, 0.84, 0.03, 0.1], [0.03, 0.03, 0.84, 0.1]])
    circuit = HMM(torch.full((3,), 1 / 3).log(), stay.log(), words.log())
    logits = 0.5 * torch.randn(1, L, V, generator=torch.Generator().manual_seed(0))
    masked = torch.tensor([[place != OBSERVED for place in range(L)]])
    return Coupled(circuit, logits=logits, tokens=torch.full((1, L), V - 1), masked=masked)


def exact(joint: Coupled) -> Tensor:
    """The probability of every pair of tokens at the two masked places."""
    pairs = list(itertools.product(range(V), repeat=2))
    return torch.stack(
        [joint.log_prob(torch.tensor([[a, int(joint.tokens[0, OBSERVED]), b]]))[0].exp() for a, b in pairs]
    ).double()


def tempered_by_path(joint: Coupled, temperature: float) -> Tensor:
    """The paper's: a path from its posterior, then both tokens from p(x | z)^(1 / temperature)."""
    hmm, log_phi = joint.circuit, joint.evidence.log_weights(torch.float64)[0]
    assert isinstance(hmm, HMM)
    initial, transition = hmm.log_initial.double(), hmm.log_transition.double()
    emission = hmm.log_emission.double()
    given = int(joint.tokens[0, OBSERVED])
    log_paths, tables = [], []
    for path in itertools.product(range(hmm.num_states), repeat=L):
        weight = initial[path[0]] + transition[path[0], path[1]] + transition[path[1], path[2]]
        weight = weight + emission[path[OBSERVED], given]
        rows = [log_phi[t] + emission[path[t]] for t in ROWS.tolist()]
        log_paths.append(weight + sum(row.logsumexp(-1) for row in rows))
        first, second = ((row / temperature).softmax(-1) for row in rows)
        tables.append((first[:, None] * second).flatten())
    return (torch.stack(log_paths).softmax(0)[:, None] * torch.stack(tables)).sum(0)


def noise(seed: int = 0, size: int = L) -> Noise:
    return Noise.drawn(size, torch.Generator().manual_seed(seed))


def pair_of(ranking: Ranking) -> int:
    """The two tokens as one number."""
    assert bool(ranking.valid)
    written = ranking.writes()
    tokens = dict(zip(written.positions.tolist(), written.tokens.tolist(), strict=True))
    return tokens[0] * V + tokens[2]


def latent(joint: Coupled, options: Options, noise: Noise) -> Ranking:
    return sample_latent(joint, 2, options, noise)


def any_order_(joint: Coupled, options: Options, noise: Noise) -> Ranking:
    return sample_any_order(joint, 2, options, noise)


def frequencies(joint: Coupled, sample, options: Options, count: int = 600) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    found = torch.zeros(V * V)
    for _ in range(count):
        found[pair_of(sample(joint, options, Noise.drawn(L, generator)))] += 1
    return found


class TestDistributions:
    @pytest.mark.parametrize(
        ("sampler", "order"),
        [
            (latent, "low_confidence"),
            (latent, "random"),
            (any_order_, "low_confidence"),
            (any_order_, "entropy"),
            (any_order_, "random"),
        ],
    )
    def test_at_temperature_one_pairs_are_exact_joint_samples(self, sampler, order):
        joint = sticky()
        options = Options.of(steps=None, temperature=1.0, remasking=order)
        found = frequencies(joint, sampler, options, 120)
        wanted = exact(joint)
        assert fits(found, wanted)
        independent = torch.stack([joint.marginals()[0, t].exp() for t in ROWS.tolist()]).double()
        product = (independent[0][:, None] * independent[1]).flatten()
        assert not fits(found, product)  # the test can tell

    def test_the_papers_tempering(self):
        joint = window(4)
        options = Options.of(steps=None, temperature=1.0, tempering="paper", circuit_temperature=0.5)
        found = frequencies(joint, latent, options)
        assert fits(found, tempered_by_path(joint, 0.5))
        assert not fits(found, tempered_by_path(joint, 1.0))

    def test_the_references_tempering_is_the_tempered_product(self):
        joint = window(4, temperature=0.5)
        found = frequencies(joint, latent, Options.of(steps=None, temperature=1.0, circuit_temperature=0.5), 350)
        assert fits(found, exact(joint))
        assert not fits(found, tempered_by_path(window(4), 0.5))


@pytest.mark.numerics
class TestAnyOrder:
    @pytest.mark.parametrize("order", ["low_confidence", "margin", "entropy"])
    @pytest.mark.parametrize("seed", range(6))
    def test_greedy_picks_are_those_of_the_conditionals(self, seed, order):
        joint = window(seed)
        ranking = sample_any_order(joint, 2, Options.of(remasking=order), noise())
        left = ROWS.tolist()
        for row, token, score in zip(ranking.rows, ranking.tokens, ranking.scores, strict=True):
            p = joint.marginals()[0].exp()
            top = p.sort(-1, descending=True).values
            sure = {
                "low_confidence": top[:, 0],
                "margin": top[:, 0] - top[:, 1],
                "entropy": -torch.special.entr(p).sum(-1),
            }[order]
            place = max(left, key=lambda t: float(sure[t]))
            assert int(row) == place
            assert int(token) == int(p[place].argmax())
            assert float(score) == pytest.approx(float(p[place].max()), abs=1e-5)
            where = torch.zeros(1, L, dtype=torch.bool)
            where[0, place] = True
            joint = joint.condition(torch.full((1, L), int(token)), where)
            left.remove(place)

    def test_the_papers_tempering_sharpens_every_conditional(self):
        """Each token from its conditional given those before it, to the power of 1 / temperature."""
        joint, heat = window(4), 0.5
        options = Options.of(temperature=1.0, remasking="left_to_right", tempering="paper", circuit_temperature=heat)
        found = frequencies(joint, any_order_, options)
        pairs = exact(joint).view(V, V)
        first = pairs.sum(1) ** (1 / heat)
        given = (pairs / pairs.sum(1, keepdim=True)) ** (1 / heat)
        wanted = (first / first.sum())[:, None] * given / given.sum(1, keepdim=True)
        assert fits(found, wanted.flatten())
        assert not fits(found, exact(joint))

    def test_tempered_conditionals_are_what_thresholds_and_scores_are_about(self):
        joint = window(2)
        plain = sample_any_order(joint, 2, Options.of(), noise())
        cold = Options.of(tempering="paper", circuit_temperature=0.25)
        sharpened = sample_any_order(joint, 2, cold, noise())
        place = int(sharpened.rows[0])
        p = joint.marginals()[0, place].exp() ** 4
        assert float(sharpened.scores[0]) == pytest.approx(float(p.max() / p.sum()), rel=1e-4)
        second = float(sharpened.scores[1])
        assert second > float(plain.scores[1])
        for threshold, wanted in ((second - 1e-4, 2), (second + 1e-4, 1)):
            options = cold.changed(threshold=threshold)
            assert len(sample_any_order(joint, 1, options, noise()).rows) == wanted

    def test_what_only_tempering_makes_certain_is_conditioned_on_what_was_picked(self):
        """Pairs (0, 3), (1, 4), (2, 4): 0 and 4 are the likeliest, cold they look certain, and exclude each other."""
        emission = torch.tensor([[0.5, 0, 0, 0.5, 0], [0, 0.5, 0, 0, 0.5], [0, 0, 0.5, 0, 0.5]]).log()
        circuit = HMM(torch.tensor([0.4, 0.3, 0.3]).log(), torch.eye(3).log(), emission)
        logits = torch.tensor([[[1.0, 1, 1, 0, 0], [0, 0, 0, 1, 1]]]).log()
        joint = Coupled(circuit, logits=logits, tokens=torch.zeros(1, 2).long(), masked=torch.ones(1, 2).bool())
        options = Options.of(tempering="paper", circuit_temperature=0.01)
        found = sample_any_order(joint, 2, options, noise(size=2))
        pair = dict(zip(found.rows.tolist(), found.tokens.tolist(), strict=True))
        assert (pair[0], pair[1]) in ((0, 3), (1, 4), (2, 4))

    def test_the_joint_threshold_goes_on_while_the_conditional_is_sure(self):
        """Two words that are even chances, but certain given each other: both, or only the first."""
        emission = torch.tensor([[0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5]]).log()
        circuit = HMM(torch.tensor([0.5, 0.5]).log(), torch.eye(2).log(), emission)
        logits = torch.tensor([[[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]]]).log()
        joint = Coupled(circuit, logits=logits, tokens=torch.zeros(1, 2).long(), masked=torch.ones(1, 2).bool())
        options = Options.of(threshold=0.9)
        together = sample_any_order(joint, 1, options, noise(size=2))
        assert together.scores.tolist() == pytest.approx([0.5, 1.0])
        assert together.tokens.tolist() in ([0, 2], [1, 3])
        alone = sample_factorized(logits[0], 1, options, noise(size=2))
        assert int(alone.keep.sum()) == 1  # without the circuit the second is a coin toss

    @pytest.mark.parametrize("seed", range(4))
    def test_where_the_joint_threshold_stops(self, seed):
        joint = window(seed)
        everything = sample_any_order(joint, 2, Options.of(), noise())
        second = float(everything.scores[1])
        for threshold, wanted in ((second - 1e-3, 2), (second + 1e-3, 1)):
            options = Options.of(threshold=threshold)
            assert len(sample_any_order(joint, 1, options, noise()).rows) == wanted

    def test_candidates_that_are_certain_are_the_tokens_of_that_number(self, monkeypatch):
        """Without the loops in C, and with few of many tokens looked at: the same picks as among all of them."""
        monkeypatch.setattr(samplers, "CANDIDATES", 3)
        for seed in range(3):
            joint = window(seed, vocab=12, scale=60)
            with ops.use("eager"):
                few, all_ = (sample_any_order(joint, 2, Options.of(), noise(), dense=dense) for dense in (False, True))
            assert few.scores.tolist() == pytest.approx(all_.scores.tolist())
            assert few.rows.tolist() == all_.rows.tolist()
            assert few.tokens.tolist() == all_.tokens.tolist()

    def test_an_entropy_budget_is_spent_on_conditional_entropies(self):
        joint = window(2)
        ranking = sample_any_order(joint, 2, Options.of(), noise())
        place, token = int(ranking.rows[0]), int(ranking.tokens[0])
        where = torch.zeros(1, L, dtype=torch.bool)
        where[0, place] = True
        after = joint.condition(torch.full((1, L), token), where)
        other = int(ranking.rows[1])
        spent = float(torch.special.entr(joint.marginals()[0, place].exp()).sum())
        spent += float(torch.special.entr(after.marginals()[0, other].exp()).sum())
        for budget, wanted in ((spent - 1e-3, 1), (spent + 1e-3, 2)):
            found = sample_any_order(joint, 1, Options.of(entropy_budget=budget), noise())
            assert len(found.rows) == wanted

    @pytest.mark.parametrize("order", ["low_confidence", "margin", "left_to_right", "random"])
    @pytest.mark.parametrize("scale", [0.05, 0.5, 4.0])
    def test_candidates_give_what_all_tokens_give(self, order, scale, monkeypatch):
        """Flat logits leave the candidates little; then all tokens must be looked at."""
        monkeypatch.setattr(samplers, "CANDIDATES", 3)
        for seed in range(3):
            joint = window(seed, vocab=40, scale=scale)
            options = Options.of(remasking=order)
            few = sample_any_order(joint, 2, options, noise(seed))
            whole = sample_any_order(joint, 2, options, noise(seed), dense=True)
            assert torch.equal(few.rows, whole.rows)
            assert torch.equal(few.tokens, whole.tokens)
            torch.testing.assert_close(few.scores, whole.scores)
            assert bool(few.valid)

    def test_impossible_evidence_is_said_to_be(self):
        only = HMM(torch.zeros(1), torch.zeros(1, 1), torch.eye(V)[None, 1].log())
        joint = Coupled(
            only, logits=torch.zeros(1, 2, V), tokens=torch.tensor([[2, 0]]), masked=torch.tensor([[False, True]])
        )
        assert not bool(sample_latent(joint, 1, Options.of(), noise(size=2)).valid)
        assert not bool(sample_any_order(joint, 1, Options.of(), noise(size=2)).valid)
