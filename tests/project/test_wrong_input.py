"""What a user can give by mistake ends in an error of codd's that names it, not in one of PyTorch's or Python's."""

import numpy as np
import pytest
import torch
from jaxtyping import config

import codd
from codd.constraints import Automaton, Regex
from codd.errors import CoddError
from codd.evaluation import misspecification
from codd_lab.problems import problems

B, L, V = 2, 3, 5
HMM = codd.HMM.random(num_states=2, vocab_size=V)
IDS, MASKED, LOGITS = torch.zeros(B, L, dtype=torch.long), torch.ones(B, L, dtype=torch.bool), torch.zeros(B, L, V)


@pytest.fixture(autouse=True)
def _as_users_run_it(monkeypatch):
    monkeypatch.setattr(config, "jaxtyping_disable", True)


@pytest.fixture(scope="module")
def model() -> codd.Model:
    return codd.load(circuit=None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"logits": LOGITS.tolist()}, "logits must be a torch tensor, found"),
        ({"logits": LOGITS.numpy()}, "logits must be a torch tensor, found array"),
        ({"tokens": IDS.tolist()}, "tokens must be a torch tensor"),
        ({"tokens": IDS.to("meta")}, "on one device, found cpu, meta and cpu"),
        ({"masked": None}, "masked must be a torch tensor, found None"),
        ({"masked": IDS}, "masked must be a boolean mask, found torch.int64"),
        ({"temperature": "warm"}, "temperature must be positive and finite, found 'warm'"),
        ({"circuit": None}, "circuit must be a circuit, such as codd.HMM, found None"),
        ({"constraint": "a+"}, r"constraint must be an Automaton.*found 'a\+'"),
        ({"constraint": Regex("a")}, r"model.automaton\(...\) makes one"),
    ],
)
def test_what_cannot_be_coupled_is_named(changes, named):
    with pytest.raises(CoddError, match=named):
        codd.Coupled(**{"circuit": HMM, "logits": LOGITS, "tokens": IDS, "masked": MASKED, **changes})


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: codd.Coupled(HMM, logits=LOGITS, tokens=IDS, masked=MASKED).log_prob([[0]]), "x0 must be a torch"),
        (lambda: codd.Evidence(tokens=[[0, 1]]), "tokens must be a torch tensor"),
        (lambda: codd.Evidence(tokens=np.zeros((1, 2), int)), "tokens must be a torch tensor"),
        (lambda: HMM.log_prob([[0, 1]]), "tokens must be a torch tensor"),
        (lambda: HMM.marginals(LOGITS), "expected codd.Evidence, found a Tensor"),
        (lambda: HMM.as_circuit(length=L).marginals(LOGITS), "expected codd.Evidence, found a Tensor"),
        (lambda: codd.HMM([0.0], [[0.0]], [[0.0]]), r"parameters must be torch tensors, found \[0.0\]"),
        (lambda: codd.HMM.random(num_states=2.5, vocab_size=V), "must be positive, found 2.5 and 5"),
        (lambda: codd.HMM.random(num_states=2, vocab_size=V, seed="x"), "seed must be a whole number, found 'x'"),
        (lambda: Automaton([[0]], accepting=0), "accepting has 1 dimension"),
        (lambda: problems(2, split="validation"), "split must be one of 'train', 'test', found 'validation'"),
        (lambda: problems(-1), "count must be a whole number of at least 0, found -1"),
    ],
)
def test_what_circuits_and_problems_cannot_use_is_named(call, named):
    with pytest.raises(CoddError, match=named):
        call()


@pytest.mark.parametrize("ids", [[[1, 2]], torch.zeros(0, 4, dtype=torch.long), torch.zeros(1, 0, dtype=torch.long)])
def test_a_network_needs_ids(model, ids):
    with pytest.raises(CoddError, match="ids must be"):
        model.backbone(ids)


def test_what_cannot_be_measured_is_named(model):
    ids, starts = torch.full((1, 40), 5), torch.tensor([0])
    with pytest.raises(CoddError, match="ids and starts must be torch tensors"):
        misspecification(model, ids.tolist(), [0])
    with pytest.raises(CoddError, match="ids must be whole numbers"):
        misspecification(model, ids, starts.float())


def test_any_whole_number_is_a_seed(model):
    ids, starts = torch.full((1, 40), 5), torch.tensor([0])
    assert codd.HMM.random(num_states=2, vocab_size=V, seed=2**80).vocab_size == V
    same = codd.HMM.random(num_states=np.int64(2), vocab_size=V, seed=np.int64(0))
    assert same.log_prob(IDS).equal(HMM.log_prob(IDS))
    assert misspecification(model, ids, starts, ratios=(0.1,), seed=2**80)[0.1]["tokens"] == 3
