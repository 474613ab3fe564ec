"""Circuits with a head: what the head is told, what it says, and that files and moves keep it."""

import dataclasses
import json
import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import codd
from codd.circuits import HMM, Factors, Head, HeadConfig, Modulated, load_circuit
from codd.circuits.modulated import WAVES, widened
from codd.circuits.storage import CONFIG_FILE, WEIGHTS_FILE
from tests.support.strategies import generator

N, V, R, D, B, L = 4, 6, 3, 8, 2, 5
MASKED = torch.tensor([[True, False, True, True, False], [True, True, True, True, True]])
SIZES = {
    "latents": HeadConfig(D, N),
    "steps": HeadConfig(D, 0, R),
    "both": HeadConfig(D, N, R),
    "deep": HeadConfig(D, N, R, hidden=7, dropout=0.5),
}


def features(seed: int = 0, length: int = L) -> Tensor:
    return torch.randn(B, length, D, generator=generator(seed))


def shaken(head: Head, seed: int = 1) -> Head:
    """Every weight is drawn anew: a head that has learnt something."""
    with torch.no_grad():
        for x in head.parameters():
            x.copy_(torch.randn(x.shape, generator=generator(seed)))
            seed += 1
    return head


def make_hmm() -> HMM:
    return HMM.from_factors(Factors.near_neutral(N, V, emission_rank=2, inner_states=R, noise=1.0), window=L)


@pytest.fixture(params=SIZES)
def config(request) -> HeadConfig:
    return SIZES[request.param]


@pytest.fixture
def circuit(config) -> Modulated:
    return Modulated(make_hmm(), shaken(Head(config)))


def outputs(head: Head, x: Tensor, masked: Tensor = MASKED) -> list[Tensor]:
    with torch.no_grad():
        return [y for y in head(x, masked) if y is not None]


def test_a_head_for_some_of_the_states(config):
    head, kept = shaken(Head(config)).eval(), torch.tensor([1, 3])
    made = head.restricted(kept).eval()
    assert made.config == dataclasses.replace(config, states=2 if config.states else 0)
    with torch.no_grad():
        (latents, gates), found = head(features(), MASKED), made(features(), MASKED)
    for wanted, x in ((None if latents is None else latents[..., kept], found[0]), (gates, found[1])):
        assert (wanted is None) == (x is None)
        if wanted is not None:
            assert_close(x, wanted)


# The head.


def test_a_new_head_says_nothing(config):
    latents, gates = Head(config).eval()(features(), MASKED)
    assert (latents is None) == (config.states == 0)
    assert (gates is None) == (config.inner_states == 0)
    assert latents is None or (latents.shape == (B, L, N) and not bool(latents.any()))
    assert gates is None or (gates.shape == (B, L - 1, R) and not bool(gates.any()))


def test_all_of_a_new_head_learns(config):
    head = Head(config).eval()
    for _ in range(2):  # what lies before a layer of zeros learns from the second step on
        head.zero_grad()
        sum(y.square().sum() + y.sum() for y in head(features(), MASKED) if y is not None).backward()
        with torch.no_grad():
            for x in head.parameters():
                x -= 0.1 * x.grad
    assert all(bool((x.grad != 0).any()) for x in head.parameters())


def test_the_numbers_by_hand():
    """Layer norm, flag and cosines of the share of masks, one linear map; steps see both of their ends."""
    head = shaken(Head(SIZES["both"])).eval()
    x, b, t = features(), 0, 1
    found = outputs(head, x)

    def told(t: int) -> Tensor:
        row = x[b, t]
        row = (row - row.mean()) / (row.var(unbiased=False) + 1e-5).sqrt() * head.norm.weight + head.norm.bias
        waves = [math.cos(math.pi * k * 3 / 5) for k in range(1, WAVES + 1)]  # three of five are masked
        return torch.cat([row, torch.tensor([float(MASKED[b, t]), *waves])])

    assert_close(found[0][b, t], head.latents.weight @ told(t) + head.latents.bias, rtol=1e-4, atol=1e-4)
    both = torch.cat([told(t), told(t + 1)])
    assert_close(found[1][b, t], head.gates.weight @ both + head.gates.bias, rtol=1e-4, atol=1e-4)


def test_dropout_acts_in_training_only():
    head = shaken(Head(SIZES["deep"])).train()
    torch.manual_seed(0)
    one, two = outputs(head, features()), outputs(head, features())
    assert not torch.equal(one[0], two[0])
    circuit = Modulated(make_hmm(), head)
    assert not circuit.head.training
    one, two = outputs(circuit.head, features()), outputs(circuit.head, features())
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


# The pair.


def test_the_direct_way_has_no_gate(circuit):
    found, head = circuit.modulate(features(), MASKED), circuit.head(features(), MASKED)
    if head.step_log_gates is None:
        assert found.step_log_gates is None
    else:
        assert found.step_log_gates.shape == (B, L - 1, N + R)
        assert not bool(found.step_log_gates[..., :N].any())
        assert torch.equal(found.step_log_gates[..., N:], head.step_log_gates)
    assert widened(head, circuit.hmm).latent_log_potentials is head.latent_log_potentials


@pytest.mark.parametrize(
    ("config", "words"),
    [("latents", "latents by 8"), ("steps", "steps by 8"), ("both", "latents and steps by 8")],
)
def test_it_says_what_it_modulates(config, words):
    assert words in repr(Modulated(make_hmm(), Head(SIZES[config])))
    assert "nothing" in repr(Modulated(make_hmm(), Head(HeadConfig(D, 0))))


# Elsewhere.


def same_head(a: Modulated, b: Modulated) -> bool:
    left, right = a.head.state_dict(), b.head.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_moves(circuit):
    for moved in (circuit.to("cpu"), circuit.to(), circuit.to(dtype=torch.float64)):
        assert same_head(moved, circuit)
        assert moved.head is not circuit.head
        assert not moved.head.training
        assert moved.window == L
        assert_close(outputs(moved.head, features()), outputs(circuit.head, features()))
    assert circuit.to(dtype=torch.float64).dtype == torch.float64
    assert circuit.to(emission=torch.bfloat16).hmm.emission.compact
    assert circuit.to("meta").device.type == "meta"
    assert all(x.device.type == "meta" for x in circuit.to("meta").head.parameters())


# Files.


def test_what_is_saved_is_loaded(circuit, tmp_path):
    assert circuit.save(tmp_path) == tmp_path
    for found in (Modulated.load(tmp_path), load_circuit(str(tmp_path)), codd.load_circuit(tmp_path)):
        assert isinstance(found, Modulated)
        assert same_head(found, circuit)
        assert (repr(found), found.head.config) == (repr(circuit), circuit.head.config)
        assert torch.equal(found.hmm.log_emission, circuit.hmm.log_emission)
        assert not found.head.training


def test_half_precision_is_near_and_small(circuit, tmp_path):
    found = Modulated.load(circuit.save(tmp_path, half=True))
    listed = json.loads((tmp_path / CONFIG_FILE).read_text())["tensors"]
    assert {x["dtype"] for x in listed.values()} == {"float16"}
    numbers = sum(math.prod(x["shape"]) for x in listed.values())
    assert (tmp_path / WEIGHTS_FILE).stat().st_size < 2 * numbers + 8192
    assert all(x.dtype == torch.float32 for x in found.head.parameters())
    assert_close(found.hmm.log_emission, circuit.hmm.log_emission, rtol=0, atol=2e-2)
    for a, b in zip(outputs(found.head, features()), outputs(circuit.head, features()), strict=True):
        assert_close(a, b, rtol=1e-2, atol=5e-2)
    again = Modulated.load(found.save(tmp_path / "again", half=True))
    assert same_head(again, found)
