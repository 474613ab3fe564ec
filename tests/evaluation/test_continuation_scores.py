"""The joint probability of a continuation, against the same by hand."""

import itertools

import pytest
import torch

from codd.circuits import HMM
from codd.coupling import Coupled
from codd.decoding import Model, Options
from codd.evaluation.continuations import ScoringRequest, score_continuations
from tests.support.small_denoisers import MASK, VOCAB, network

GIVEN, WRITTEN = [3, 6, 1], [2, 0, 4, 4, 0]


def model(circuit):
    return Model(network(), circuit, None, MASK)


def test_without_a_circuit_tokens_of_a_block_are_independent():
    [score] = score_continuations(model(None), [ScoringRequest(GIVEN, WRITTEN)])
    ids = torch.tensor([GIVEN + [MASK] * len(WRITTEN)])
    logits = network()(ids)[0, len(GIVEN) :].clone()
    logits[:, MASK] = -torch.inf
    wanted = logits.log_softmax(-1)[range(len(WRITTEN)), WRITTEN].sum()
    assert score.log_prob == pytest.approx(float(wanted), abs=1e-4)


def test_the_null_circuit_changes_nothing():
    null = HMM.neutral(num_states=1, vocab_size=VOCAB)
    requests = [ScoringRequest(GIVEN, WRITTEN), ScoringRequest([], WRITTEN[:2])]
    for a, b in zip(
        score_continuations(model(None), requests), score_continuations(model(null), requests), strict=True
    ):
        assert a.log_prob == pytest.approx(b.log_prob, abs=1e-4)
        assert a.greedy == b.greedy


def test_blocks_multiply_and_each_sees_the_true_tokens_before_it():
    hmm = HMM.random(num_states=4, vocab_size=VOCAB, seed=1)
    [whole] = score_continuations(model(hmm), [ScoringRequest(GIVEN, WRITTEN)], Options(block_length=2))
    total = 0.0
    for start in range(0, len(WRITTEN), 2):
        truth = torch.tensor([WRITTEN[start : start + 2]])
        ids = torch.tensor([GIVEN + WRITTEN[:start] + [MASK] * (len(WRITTEN) - start)])
        at = len(GIVEN) + start
        logits = network()(ids)[:, at : at + truth.shape[1]].clone()
        logits[..., MASK] = -torch.inf
        hidden = torch.ones_like(truth, dtype=torch.bool)
        total += float(Coupled(hmm, logits=logits, tokens=truth, masked=hidden).log_prob(truth)[0])
    assert whole.log_prob == pytest.approx(total, abs=1e-4)


def test_all_continuations_of_two_tokens_sum_to_one():
    hmm = HMM.random(num_states=3, vocab_size=VOCAB, seed=2)
    tokens = [token for token in range(VOCAB) if token != MASK]
    pairs = [ScoringRequest(GIVEN, pair) for pair in itertools.product(tokens, repeat=2)]
    scores = score_continuations(model(hmm), pairs)
    assert sum(torch.tensor([s.log_prob for s in scores]).exp()) == pytest.approx(1.0, abs=1e-3)


def test_a_score_does_not_depend_on_the_others():
    hmm = HMM.random(num_states=4, vocab_size=VOCAB, seed=1)
    requests = [ScoringRequest(GIVEN, WRITTEN), ScoringRequest([], [1]), ScoringRequest([6] * 9, [2, 2, 2])]
    together = score_continuations(model(hmm), requests)
    for request, score in zip(requests, together, strict=True):
        [alone] = score_continuations(model(hmm), [request])
        assert alone.log_prob == pytest.approx(score.log_prob, abs=1e-4)


def test_greedy_is_what_argmax_would_write():
    logits = network()(torch.tensor([GIVEN + [MASK] * 2]))[0, -2:].clone()
    logits[:, MASK] = -torch.inf
    best = logits.argmax(-1).tolist()
    right, wrong = score_continuations(
        model(None), [ScoringRequest(GIVEN, best), ScoringRequest(GIVEN, [best[0], 0 if best[1] else 1])]
    )
    assert right.greedy
    assert not wrong.greedy
