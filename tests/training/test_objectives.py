import itertools

import pytest
import torch

from codd.circuits import HMM, SparsePotentials
from codd.data.windows import WindowBatch
from codd.errors import InvalidInput
from codd.training.circuit.objectives import log_tables, signed_flows, weights_of, with_tables
from tests.support.window_truth import LENGTH, VOCAB, circuit, draw, gradient_of, known, log_prob, logits_of, path_terms

SPARSE = [None, 2, 3]
"""How many tokens of the network's answer are listed; None: it is dense."""
WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.5], dtype=torch.float64)


def close(found, wanted, rtol=1e-9, atol=1e-12):
    torch.testing.assert_close(tuple(found), tuple(wanted), rtol=rtol, atol=atol)


def part(windows: WindowBatch, here: slice) -> WindowBatch:
    s = windows.sparse
    return WindowBatch(
        windows.tokens[here],
        windows.masked[here],
        logits=None if windows.logits is None else windows.logits[here],
        sparse=None if s is None else SparsePotentials(s.ids[here], s.log_weights[here], s.log_tail[here]),
    )


@pytest.mark.parametrize("sparse", SPARSE)
def test_values_are_sums_over_all_paths_and_strings_and_flows_give_their_gradient(sparse):
    hmm, windows = circuit(1), draw(2, sparse=sparse)
    logits = logits_of(hmm)
    truth = log_prob(tuple(x.log_softmax(-1) for x in logits), windows)
    found = signed_flows(hmm, windows, WEIGHTS)
    useful = WEIGHTS * windows.masked.any(-1)
    close([found.value, found.weight], [(useful * truth).sum().detach(), useful.sum()])
    close([found.tokens], [(WEIGHTS * windows.masked.sum(-1)).sum()])
    for i in range(1, len(truth)):
        close([signed_flows(hmm, part(windows, slice(i, i + 1))).value], [truth[i].detach()])
    gradients = gradient_of(hmm, found)
    close(gradients, torch.autograd.grad(truth @ useful, logits))
    assert max(float(x.abs().max()) for x in gradients) > 0.01


def test_the_objective_is_normalised():
    hmm, logits = circuit(3), draw(4, length=2).logits[:1]
    masked = torch.ones(1, 2, dtype=torch.bool)
    strings = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    values = [signed_flows(hmm, WindowBatch(x[None], masked, logits=logits)).value for x in strings]
    assert float(torch.stack(values).exp().sum()) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
@pytest.mark.parametrize("sparse", [None, 20])
def test_flows_agree_with_autograd_through_the_circuit(dtype, rtol, sparse):
    hmm = HMM.random(16, 60, 9, dtype=dtype)
    windows = draw(10, 12, vocab=60, length=16, sparse=sparse)
    weights = weights_of(windows, "elbo")
    logits = logits_of(hmm)
    tables = tuple(x.log_softmax(-1) for x in logits)
    loss = with_tables(hmm, tables).conditional_log_prob(windows.tokens, known(windows))
    wanted = torch.autograd.grad((loss * weights.to(dtype)).sum(), logits)
    for a, b in zip(gradient_of(hmm, signed_flows(hmm, windows, weights)), wanted, strict=True):
        assert float((a - b).norm() / b.norm()) < rtol


def test_positive_flows_are_expected_counts_of_the_truth():
    hmm, windows = circuit(1), draw(2)
    initial, transition, emission = (torch.zeros_like(x) for x in log_tables(hmm))
    paths, log_p = path_terms(log_tables(hmm), LENGTH)
    for tokens in windows.tokens[1:]:
        share = (log_p + hmm.log_emission[paths, tokens].sum(-1)).softmax(0)
        for path, p in zip(paths.tolist(), share, strict=True):
            initial[path[0]] += p
            for a, b in itertools.pairwise(path):
                transition[a, b] += p
            for state, token in zip(path, tokens.tolist(), strict=True):
                emission[state, token] += p
    close(signed_flows(hmm, windows).plus, (initial, transition, emission))


def test_windows_without_masks_count_nothing():
    hmm, windows = circuit(1), draw(2)
    changed = windows._replace(tokens=windows.tokens.clone())
    changed.tokens[0] = (changed.tokens[0] + 1) % VOCAB
    first, other = (signed_flows(hmm, x) for x in (windows, changed))
    close(first.tensors(), other.tensors(), rtol=0, atol=0)
    close([first.weight], [torch.tensor(4.0, dtype=torch.float64)])
    nothing = signed_flows(hmm, windows._replace(masked=torch.zeros_like(windows.masked)))
    assert all(not x.any() for x in nothing.tensors())


@pytest.mark.parametrize("sparse", [None, 2])
def test_two_halves_are_the_whole(sparse):
    hmm, windows = circuit(1), draw(2, sparse=sparse)
    mine, theirs = (signed_flows(hmm, part(windows, p), WEIGHTS[p]) for p in (slice(0, 2), slice(2, 5)))
    whole = signed_flows(hmm, windows, WEIGHTS)
    for x, y in zip(mine.tensors(), theirs.tensors(), strict=True):
        x += y  # as an all-reduce would
    close(mine.tensors(), whole.tensors())
    close(gradient_of(hmm, mine), gradient_of(hmm, whole))


def test_weights():
    windows = draw(2)._replace(level=torch.tensor([0.5, 0.5, 0.25, 1.0, 0.0]))
    close([weights_of(windows)], [torch.tensor([0.0, 1, 1, 1, 1])])
    close([weights_of(windows, "elbo")], [torch.tensor([0.0, 2, 4, 1, 1000])], rtol=1e-6)
    with pytest.raises(InvalidInput, match=r"need WindowBatch\.level"):
        weights_of(windows._replace(level=None), "elbo")


def test_an_impossible_truth_is_minus_infinity():
    windows = draw(2)
    windows.logits[1, 0, windows.tokens[1, 0]] = -torch.inf
    assert float(signed_flows(circuit(1), windows).value) == -torch.inf
    without = torch.tensor([1.0, 0, 1, 1, 1], dtype=torch.float64)
    assert torch.isfinite(signed_flows(circuit(1), windows, without).value)
