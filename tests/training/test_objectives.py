import itertools

import pytest
import torch

from codd.circuits import HMM, SparsePotentials
from codd.data.windows import WindowBatch
from codd.errors import InvalidInput
from codd.training.circuit.objectives import (
    Signed,
    flow_tables,
    gradient_of,
    log_tables,
    signed_flows,
    weights_of,
    with_tables,
)
from tests.support.window_truth import LENGTH, VOCAB, circuit, draw, known, log_prob, logits_of, path_terms

OBJECTIVES = ["conditional", "local", "generative"]
LAYOUTS = [(None, None), (2, None), (None, 2), (2, 3)]
"""Rank of the transition, and how many tokens of the network's answer are listed."""
WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.5], dtype=torch.float64)


def close(found, wanted, rtol=1e-9, atol=1e-12):
    torch.testing.assert_close(tuple(found), tuple(wanted), rtol=rtol, atol=atol)


def value(objective: str, logits: list[torch.Tensor], windows: WindowBatch) -> torch.Tensor:
    hmm = with_tables(circuit(0), tuple(x.log_softmax(-1) for x in logits))
    return signed_flows(objective, hmm, windows, WEIGHTS).value


@pytest.mark.parametrize(("rank", "sparse"), LAYOUTS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_values_are_sums_over_all_paths_and_strings(objective, rank, sparse):
    hmm, windows = circuit(1, rank=rank), draw(2, sparse=sparse)
    wanted = log_prob(objective, log_tables(hmm), windows)
    found = signed_flows(objective, hmm, windows, WEIGHTS)
    useful = WEIGHTS * windows.masked.any(-1)
    close([found.value, found.weight], [(useful * wanted).sum(), useful.sum()])
    for i in range(1, len(wanted)):
        one = WindowBatch(
            *(x[i : i + 1] for x in (windows.tokens, windows.masked)), **answers(windows, slice(i, i + 1))
        )
        close([signed_flows(objective, hmm, one).value], [wanted[i]])


def answers(windows: WindowBatch, part: slice) -> dict:
    """The network's part of some windows."""
    if windows.sparse is None:
        return {"logits": windows.logits[part]}
    s = windows.sparse
    return {"sparse": SparsePotentials(s.ids[part], s.log_weights[part], s.log_tail[part])}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_each_objective_is_normalised(objective):
    hmm, logits = circuit(3), draw(4, length=2).logits[:1]
    masked = torch.ones(1, 2, dtype=torch.bool)
    strings = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    values = [signed_flows(objective, hmm, WindowBatch(x[None], masked, logits=logits)).value for x in strings]
    assert float(torch.stack(values).exp().sum()) == pytest.approx(1, abs=1e-9)


def test_the_conditional_value_is_the_circuits_own():
    hmm, windows = circuit(1), draw(2)
    wanted = hmm.conditional_log_prob(windows.tokens, known(windows))
    found = signed_flows("conditional", hmm, windows, WEIGHTS)
    close([found.value], [(WEIGHTS * wanted).sum()])
    close([found.tokens], [(WEIGHTS * windows.masked.sum(-1)).sum()])
    neutral = HMM.neutral(3, VOCAB, dtype=torch.float64)
    factorized = windows.logits.log_softmax(-1).gather(-1, windows.tokens[..., None])[..., 0]
    close([signed_flows("conditional", neutral, windows).value], [factorized[windows.masked].sum()])


@pytest.mark.parametrize(("rank", "sparse"), LAYOUTS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_flows_give_the_gradient(objective, rank, sparse):
    hmm, windows = circuit(5, rank=rank), draw(6, sparse=sparse)
    logits = logits_of(hmm)
    found = gradient_of(hmm, signed_flows(objective, hmm, windows, WEIGHTS))
    useful = WEIGHTS * windows.masked.any(-1)
    truth = log_prob(objective, tuple(x.log_softmax(-1) for x in logits), windows) @ useful
    close(found, torch.autograd.grad(truth, logits))
    assert max(float(x.abs().max()) for x in found) > 0.01


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_flows_give_finite_differences(objective):
    windows, step = draw(7, sparse=3), 1e-5
    logits = [x.detach() for x in logits_of(circuit(8))]
    hmm = with_tables(circuit(8), tuple(x.log_softmax(-1) for x in logits))
    found = gradient_of(hmm, signed_flows(objective, hmm, windows, WEIGHTS))
    for table, wanted in zip(logits, found, strict=True):
        for i in range(0, table.numel(), 3):
            ends = []
            for sign in (1, -1):
                table.view(-1)[i] += sign * step
                ends.append(value(objective, logits, windows))
                table.view(-1)[i] -= sign * step
            slope = float(ends[0] - ends[1]) / (2 * step)
            assert slope == pytest.approx(float(wanted.view(-1)[i]), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
@pytest.mark.parametrize(("rank", "sparse"), [(None, None), (4, 20)])
def test_flows_agree_with_autograd_through_the_circuit(dtype, rtol, rank, sparse):
    hmm = HMM.random(16, 60, 9, rank=rank, dtype=dtype)
    windows = draw(10, 12, vocab=60, length=16, sparse=sparse)
    weights = weights_of(windows, "elbo")
    logits = logits_of(hmm)
    tables = tuple(x.log_softmax(-1) for x in logits)
    loss = with_tables(hmm, tables).conditional_log_prob(windows.tokens, known(windows))
    wanted = torch.autograd.grad((loss * weights.to(dtype)).sum(), logits)
    for a, b in zip(gradient_of(hmm, signed_flows("conditional", hmm, windows, weights)), wanted, strict=True):
        assert float((a - b).norm() / b.norm()) < rtol


def test_positive_flows_are_expected_counts_of_the_truth():
    hmm, windows = circuit(1), draw(2)
    found = signed_flows("generative", hmm, windows)
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
    close(flow_tables(found.plus), (initial, transition, emission))
    assert found.minus is None


def test_negative_flows_of_the_local_objective_are_of_emissions_at_masked_positions():
    hmm, windows = circuit(1, rank=2), draw(2)
    found = signed_flows("local", hmm, windows, WEIGHTS)
    initial, left, right, emission = flow_tables(found.minus)
    assert not initial.any()
    assert not left.any()
    assert not right.any()
    close([emission.sum()], [(WEIGHTS * windows.masked.sum(-1)).sum()])
    assert [x is None for x in found.negative] == [True, True, True, False]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_windows_without_masks_count_nothing(objective):
    hmm, windows = circuit(1), draw(2)
    changed = windows._replace(tokens=windows.tokens.clone())
    changed.tokens[0] = (changed.tokens[0] + 1) % VOCAB
    first, other = (signed_flows(objective, hmm, x).tensors() for x in (windows, changed))
    close(first, other, rtol=0, atol=0)
    close([first[-2]], [torch.tensor(4.0, dtype=torch.float64)])
    nothing = signed_flows(objective, hmm, windows._replace(masked=torch.zeros_like(windows.masked)))
    assert all(not x.any() for x in nothing.tensors())


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("rank", "sparse"), [(None, None), (2, 2)])
def test_two_halves_are_the_whole(objective, rank, sparse):
    hmm, windows = circuit(1, rank=rank), draw(2, sparse=sparse)
    parts = [
        signed_flows(
            objective, hmm, WindowBatch(windows.tokens[p], windows.masked[p], **answers(windows, p)), WEIGHTS[p]
        )
        for p in (slice(0, 2), slice(2, 5))
    ]
    whole = signed_flows(objective, hmm, windows, WEIGHTS)
    close((parts[0] + parts[1]).tensors(), whole.tensors())
    for mine, theirs in zip(parts[0].tensors(), parts[1].tensors(), strict=True):
        mine += theirs  # as an all-reduce would
    close(gradient_of(hmm, parts[0]), gradient_of(hmm, whole))


def test_weights():
    windows = draw(2)._replace(level=torch.tensor([0.5, 0.5, 0.25, 1.0, 0.0]))
    close([weights_of(windows)], [torch.tensor([0.0, 1, 1, 1, 1])])
    close([weights_of(windows, "elbo")], [torch.tensor([0.0, 2, 4, 1, 1000])], rtol=1e-6)
    with pytest.raises(InvalidInput, match=r"need WindowBatch\.level"):
        weights_of(windows._replace(level=None), "elbo")


def test_float32_follows_float64():
    windows = draw(3, 8, vocab=40, length=12, sparse=10)
    for objective in OBJECTIVES:
        exact, fast = (
            signed_flows(objective, HMM.random(8, 40, 1, scale=4.0, dtype=torch.float64).to(dtype=dtype), windows)
            for dtype in (torch.float64, torch.float32)
        )
        for a, b in zip(exact.tensors(), fast.tensors(), strict=True):
            assert b.dtype == torch.float32
            assert float((a - b).norm()) <= 2e-5 * float(a.norm())


def test_states_that_emit_next_to_nothing_of_what_is_allowed():
    """The local objective divides by Z, which may be smaller than any number of float32."""
    emission = torch.tensor([[0.0, -150.0, -150.0], [-150.0, 0.0, -150.0]], dtype=torch.float64).log_softmax(-1)
    uniform = torch.zeros(2, 2, dtype=torch.float64).log_softmax(-1)
    hmm = HMM(uniform[0], uniform, emission)
    logits = torch.tensor([0.0, -torch.inf, -1.0], dtype=torch.float64).expand(1, 2, 3)
    windows = WindowBatch(torch.tensor([[0, 2]]), torch.ones(1, 2, dtype=torch.bool), logits=logits)
    exact, fast = (signed_flows("local", hmm.to(dtype=dtype), windows) for dtype in (torch.float64, torch.float32))
    close([exact.value], [log_prob("local", log_tables(hmm), windows)[0]])
    for a, b in zip(exact.tensors(), fast.tensors(), strict=True):
        torch.testing.assert_close(b.double(), a, rtol=1e-5, atol=1e-6)


def test_an_impossible_truth_is_minus_infinity():
    windows = draw(2)
    windows.logits[1, 0, windows.tokens[1, 0]] = -torch.inf
    assert float(signed_flows("conditional", circuit(1), windows).value) == -torch.inf
    without = torch.tensor([1.0, 0, 1, 1, 1], dtype=torch.float64)
    assert torch.isfinite(signed_flows("conditional", circuit(1), windows, without).value)


def test_what_does_not_fit_is_refused():
    hmm, windows = circuit(1), draw(2)
    parts: list[Signed] = [signed_flows(x, hmm, windows) for x in ("local", "generative")]
    with pytest.raises(InvalidInput, match="local objective over 3 positions cannot be added"):
        parts[0] + parts[1]
    with pytest.raises(InvalidInput, match="share their parameters"):
        signed_flows("local", HMM.random(3, VOCAB, 0, length=LENGTH, dtype=torch.float64), windows)
