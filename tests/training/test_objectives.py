import pytest
import torch

from codd.circuits import HMM, SparsePotentials
from codd.data.windows import WindowBatch
from codd.errors import InvalidInput
from codd.training.circuit.objectives import signed_flows, weights_of, with_tables
from tests.support.window_truth import circuit, draw, gradient_of, known, log_prob, logits_of

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
