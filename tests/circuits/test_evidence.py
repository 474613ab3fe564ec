import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.testing import assert_close

from codd.circuits import Evidence, SparsePotentials
from codd.circuits.evidence import Kind
from tests.support.strategies import KINDS, generator, make_evidence, shape_checks, token_log_weights

INF = math.inf
B, L, V, N = 2, 3, 5, 4
IDS = torch.zeros(B, L, dtype=torch.int64)
MASK = torch.zeros(B, L, dtype=torch.bool)
SOFT = torch.zeros(B, L, V)
EXACT = {"rtol": 1e-12, "atol": 1e-12}
FIELDS = ("tokens", "observed", "log_potentials", "latent_log_potentials", "logits", "missing", "dense", "kind")


def some_sparse(k: int = 2, device: str = "cpu") -> SparsePotentials:
    ids, weights = torch.arange(k).expand(B, L, k).contiguous(), torch.zeros(B, L, k)
    return SparsePotentials(ids.to(device), weights.to(device))


@pytest.fixture(autouse=True, scope="module")
def unchecked():
    with shape_checks(False):
        yield


# Kinds.


def test_the_kind_of_every_position():
    ev = Evidence(
        tokens=torch.zeros(1, 5, dtype=torch.int64),
        observed=torch.tensor([[True, False, False, False, True]]),
        missing=torch.tensor([[False, True, False, False, True]]),
        dense=torch.tensor([[True, True, True, False, False]]),
        logits=torch.zeros(1, 5, V),
        sparse=SparsePotentials(torch.zeros(1, 5, 1, dtype=torch.int64), torch.zeros(1, 5, 1)),
    )
    wanted = [Kind.OBSERVED, Kind.MISSING, Kind.DENSE, Kind.SPARSE, Kind.OBSERVED]
    assert ev.kind.tolist() == [[int(k) for k in wanted]]
    assert ev.rows(Kind.DENSE).tolist() == [[False, False, True, False, False]]
    assert ev.shape == (1, 5)


@pytest.mark.parametrize(
    ("ev", "kind"),
    [
        (Evidence(tokens=IDS), Kind.OBSERVED),
        (Evidence(tokens=IDS, observed=MASK), Kind.MISSING),
        (Evidence(log_potentials=SOFT), Kind.DENSE),
        (Evidence(tokens=IDS, observed=MASK, logits=SOFT), Kind.DENSE),
        (Evidence(sparse=some_sparse()), Kind.SPARSE),
        (Evidence(logits=SOFT, sparse=some_sparse()), Kind.DENSE),
        (Evidence(missing=MASK), Kind.MISSING),
        (Evidence(latent_log_potentials=SOFT), Kind.MISSING),
    ],
)
def test_a_field_alone_decides_the_kind(ev, kind):
    assert bool((ev.kind == kind).all())


# What the weights are.


@pytest.mark.parametrize("kind", KINDS)
def test_dense_log_weights_are_what_the_fields_say(kind):
    ev = make_evidence(kind, (3, 4), N, V, seed=3)
    assert_close(ev.dense_log_weights(V), token_log_weights(ev, V), **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_log_weights_of_a_token_are_its_column(kind):
    ev = make_evidence(kind, (3, 4), N, V, seed=4)
    ids = torch.randint(V, (3, 4), generator=generator(0))
    wanted = token_log_weights(ev, V).gather(-1, ids[..., None])[..., 0]
    wanted = torch.where(ev.rows(Kind.OBSERVED), 0, wanted)
    assert_close(ev.log_weights_of(ids, V).double(), wanted, **EXACT)


def test_log_weights_of_a_token_are_differentiable():
    ids = torch.tensor([[0, 2, 4], [1, 1, 3]])
    dense = torch.tensor([[True, False, True], [False, True, False]])
    listed = torch.tensor([[0, 1]]).expand(B, L, 2).contiguous()

    def f(logits, weights, tail):
        sparse = SparsePotentials(listed, weights, tail)
        return Evidence(logits=logits, temperature=0.7, sparse=sparse, dense=dense).log_weights_of(ids, V)

    g = generator(0)
    inputs = [torch.randn(B, L, *k, generator=g, dtype=torch.float64).requires_grad_() for k in ((V,), (2,), ())]
    assert gradcheck(f, inputs)
    potentials = torch.randn(B, L, V, generator=g, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda x: Evidence(log_potentials=x).log_weights_of(ids, V), (potentials,))


def test_a_row_without_any_token_has_no_weight_and_no_nan():
    logits = torch.full((1, 2, V), -INF, requires_grad=True)
    ev = Evidence(logits=logits)
    assert bool((ev.dense_log_weights(V) == -INF).all())
    weights = ev.log_weights_of(torch.zeros(1, 2, dtype=torch.int64), V)
    assert bool((weights == -INF).all())
    (gradient,) = torch.autograd.grad(weights.nan_to_num(neginf=0.0).sum(), logits)
    assert not gradient.isnan().any()


# Selection and transport.


@pytest.mark.parametrize("kind", KINDS)
def test_select_takes_whole_sequences(kind):
    ev = make_evidence(kind, (3, 4), N, V, seed=5)
    for rows in ([2, 0], [1, 1, 1], [], [True, False, True]):
        index = torch.tensor(rows, dtype=torch.bool if rows and isinstance(rows[0], bool) else torch.int64)
        part = ev.select(index)
        for name in FIELDS:
            value = getattr(ev, name)
            assert (getattr(part, name) is None) == (value is None)
            assert value is None or torch.equal(getattr(part, name), value[index])
        assert_close(part.dense_log_weights(V), ev.dense_log_weights(V)[index], **EXACT)
        if isinstance(ev.temperature, torch.Tensor):
            assert torch.equal(part.temperature, ev.temperature[index])
        else:
            assert part.temperature == ev.temperature


@pytest.mark.parametrize("kind", KINDS)
def test_to_moves_every_tensor(kind):
    ev = make_evidence(kind, (3, 4), N, V)
    moved = ev.to("meta")
    assert moved.device.type == "meta"
    held = [getattr(moved, name) for name in FIELDS]
    if ev.sparse is not None:
        held += [moved.sparse.ids, moved.sparse.log_weights, moved.sparse.log_tail]
    assert all(x.device.type == "meta" for x in held if x is not None)
    same = ev.to("cpu")
    assert_close(same.dense_log_weights(V), ev.dense_log_weights(V), **EXACT)


# Sparse potentials.


@given(st.integers(1, 9), st.integers(0, 1000), st.sampled_from([0.3, 1.0, 2.5]), st.data())
@settings(max_examples=60, deadline=None)
def test_top_k_keeps_exact_weights_and_the_exact_mass_of_the_rest(vocab, seed, temperature, data):
    k = data.draw(st.integers(1, vocab))
    logits = torch.randn(B, L, vocab, generator=generator(seed), dtype=torch.float64) * 4
    sparse = SparsePotentials.from_logits(logits, k, temperature)
    exact = (logits / temperature).softmax(-1)
    assert_close(sparse.log_weights.exp(), exact.sort(-1, descending=True).values[..., :k], **EXACT)
    assert_close(sparse.log_weights.exp(), exact.gather(-1, sparse.ids), **EXACT)
    assert_close(sparse.log_tail.exp(), exact.scatter(-1, sparse.ids, 0.0).sum(-1), **EXACT)
    assert_close(sparse.log_weights.exp().sum(-1) + sparse.log_tail.exp(), torch.ones(B, L).double(), **EXACT)


def test_a_tail_far_below_the_top_is_not_rounded_away():
    logits = torch.tensor([[[50.0, 0.0, 0.0, 0.0]]])
    sparse = SparsePotentials.from_logits(logits, 1)
    assert_close(sparse.log_tail, torch.tensor([[math.log(3.0) - 50.0]]), rtol=1e-6, atol=0)
