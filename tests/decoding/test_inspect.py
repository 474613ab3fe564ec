"""What is shown of a window must be what the loop acts on: its next pick, and the product by hand."""

import functools
import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import codd
from codd import Coupled, Model
from codd.circuits import HMM, Circuit, Factors, leaf, mixture, product
from codd.decoding.inspect import Inspection, inspect
from codd.decoding.options import Options
from tests.support.tiny_models import MASK, VOCAB, biased, modulated, of, random_hmm, run, stated, tiny

PROMPT = [3, 1, 4, 1, 5]
IDS = [*PROMPT, *[MASK] * 8]
WINDOW = (5, 13)


def detours() -> HMM:
    """Steps that can be gated, and tokens that go with states."""
    return HMM.from_factors(Factors.near_neutral(5, VOCAB, inner_states=4, noise=6.0, seed=1))


CIRCUITS = {
    "none": lambda: None,
    "chain": random_hmm,
    "latents": lambda: modulated(random_hmm(), scale=1.0),
    "steps": lambda: modulated(detours(), inner_states=4, scale=1.0),
    "fixed": lambda: random_hmm(length=10),
}
SETTINGS = [
    {},
    {"cfg_scale": 1.5},
    {"circuit_temperature": 0.4},
    {"circuit_temperature": 0.4, "tempering": "paper"},
    {"ban": (0, 7, 9)},
    {"sampler": "factorized"},
    {"activation": 0.7},
]


def look(circuit: object = None, ids: list[int] = IDS, window=WINDOW, *, backbone=None, options=None, **more):
    model = Model(backbone or tiny(), circuit, None, MASK)
    return inspect(model, ids, window, options=options or Options(), **more)


def assert_sound(found: Inspection) -> None:
    """Probabilities, and information that two positions can have of each other."""
    size = len(found.positions)
    for beliefs in (found.network, found.joint):
        assert beliefs.tokens.shape == beliefs.probabilities.shape == (size, beliefs.tokens.shape[1])
        assert bool((beliefs.probabilities.diff(dim=-1) <= 0).all())
        assert bool((beliefs.probabilities >= 0).all())
        assert bool((beliefs.probabilities.sum(-1) <= 1 + 1e-5).all())
        assert not bool((beliefs.tokens == MASK).any())
        assert bool((beliefs.entropies >= 0).all())
    information = found.mutual_information
    assert information.shape == (size, size)
    assert torch.equal(information, information.T)
    assert not bool(information.diagonal().any())
    entropies = found.joint.entropies
    assert bool((information >= 0).all())
    assert bool((information <= torch.minimum(entropies[:, None], entropies) + 1e-5).all())


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(("latents", settings) for settings in SETTINGS),
        ("none", SETTINGS[0]),
        ("none", SETTINGS[1]),
        ("chain", SETTINGS[3]),
        ("chain", SETTINGS[6]),
        ("steps", SETTINGS[0]),
        ("steps", SETTINGS[2]),
        ("fixed", SETTINGS[1]),
        ("fixed", SETTINGS[4]),
    ],
    ids=str,
)
def test_the_loop_picks_what_is_shown(name, settings):
    """One token a step, the surest: before every step, with what was written until then."""
    circuit, backbone = CIRCUITS[name](), tiny()
    chosen = {"gen_length": 5, "block_length": 5, "steps": 5, "sampler": "any_order", "stop": False, **settings}
    ids, written, acted = [*PROMPT, *[MASK] * 5], [], set()
    for step in of(run(backbone, [PROMPT], circuit=circuit, **chosen)):
        found = look(circuit, ids, (5, 10), options=Options.of(**chosen), written=written)
        assert_sound(found)
        assert found.positions.tolist() == [t for t, token in enumerate(ids) if token == MASK]
        assert found.circuit == step.circuit
        acted.add(found.circuit)
        if found.circuit and chosen["sampler"] == "any_order":
            best = found.joint.probabilities[:, 0].argmax()
            assert int(found.positions[best]) == int(step.positions[0])
            assert int(found.joint.tokens[best, 0]) == int(step.tokens[0])
            assert float(found.joint.probabilities[best, 0]) == pytest.approx(float(step.scores[0]), abs=1e-5)
        else:
            best = found.network.probabilities[:, 0].argmax()
            assert int(found.network.tokens[best, 0]) == int(step.tokens[0])
            assert float(found.network.probabilities[best, 0]) == pytest.approx(float(step.scores[0]), abs=1e-5)
        ids = step.ids.tolist()
        written += step.positions.tolist()
    acts = name != "none" and settings.get("sampler") != "factorized"
    assert acted == ({True, False} if acts and "activation" in settings else {acts})


def test_what_was_written_is_not_hidden_by_guidance():
    ids = [*PROMPT, 2, 6, *[MASK] * 6]
    options = Options(cfg_scale=2.0)
    plain, told = look(ids=ids, options=options), look(ids=ids, options=options, written=[5, 6])
    assert float((plain.network.entropies - told.network.entropies).abs().max()) > 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("name", ["chain", "latents", "steps"])
def test_the_product_by_hand(name, temperature):
    circuit, backbone = CIRCUITS[name](), tiny()
    ids = torch.tensor([[*PROMPT, MASK, MASK, 6, MASK, MASK, 2]])
    states = backbone.states(ids)
    logits = backbone.logits(states, ids)[:, 4:].index_fill(-1, torch.tensor([MASK]), -math.inf)
    masked = ids[:, 4:] == MASK
    features = {} if name == "chain" else {"features": states[:, 4:]}
    joint = Coupled(circuit, logits=logits, tokens=ids[:, 4:], masked=masked, temperature=temperature, **features)
    options = Options(circuit_temperature=temperature)
    found = look(circuit, ids[0].tolist(), (4, 11), options=options, candidates=5)
    assert found.positions.tolist() == [5, 6, 8, 9]
    for beliefs, log_p in ((found.network, logits.log_softmax(-1)), (found.joint, joint.marginals())):
        rows = log_p[masked]
        assert_close(beliefs.probabilities, rows.topk(5).values.exp(), atol=1e-5, rtol=0)
        assert torch.equal(beliefs.tokens, rows.topk(5).indices)
        wanted = torch.distributions.Categorical(logits=rows).entropy()
        assert_close(beliefs.entropies, wanted, atol=1e-4, rtol=0)
    wanted = joint.mutual_information(5)[0][masked[0]][:, masked[0]]
    assert_close(found.mutual_information, wanted, atol=1e-6, rtol=0)
    assert float(wanted.max()) > 1e-3
    assert_sound(found)


def test_a_circuit_of_fixed_length_reaches_back():
    """Masks between its beginning and the window are the circuit's business, but were not asked for."""
    ids = [*PROMPT[:3], MASK, 5, *[MASK] * 8]
    circuit = random_hmm(length=10)
    found, whole = look(circuit, ids), look(circuit, ids, (3, 13))
    assert found.window == WINDOW
    assert found.positions.tolist() == list(range(5, 13))
    assert whole.positions.tolist() == [3, *range(5, 13)]
    assert_close(found.mutual_information, whole.mutual_information[1:, 1:], atol=1e-6, rtol=0)
    assert_close(found.joint.probabilities, whole.joint.probabilities[1:], atol=1e-6, rtol=0)
    short = look(circuit, [3, MASK, 4], (0, 3))  # it cannot cover a text that is shorter than itself
    assert (short.circuit, short.aside) == (False, False)


def test_two_cities():
    """San Diego or New York, which the network alone would mix."""
    san, diego, new, york, mask = range(5)
    city = Circuit(
        mixture(
            [
                product([leaf(0, [1, 0, 0, 0, 0]), leaf(1, [0, 1, 0, 0, 0])]),
                product([leaf(0, [0, 0, 1, 0, 0]), leaf(1, [0, 0, 0, 1, 0])]),
            ],
            weights=[0.5, 0.5],
        )
    )
    model = Model(stated(torch.zeros(5), mask), city, None, mask)
    found = inspect(model, [mask, mask], (0, 2), options=Options(), candidates=2)
    assert float(found.mutual_information[0, 1]) == pytest.approx(math.log(2), abs=1e-6)
    assert sorted(found.joint.tokens[0].tolist()) == [san, new]
    assert sorted(found.joint.tokens[1].tolist()) == [diego, york]
    assert_close(found.joint.entropies, torch.full((2,), math.log(2)))
    assert_close(found.network.entropies, torch.full((2,), math.log(4)))
    alone = inspect(model, [mask, mask], (0, 2), options=Options(sampler="factorized"))
    assert alone.joint is alone.network
    assert not bool(alone.mutual_information.any())
    after = inspect(model, [new, mask], (0, 2), options=Options(), candidates=2)
    assert after.positions.tolist() == [1]
    assert (int(after.joint.tokens[0, 0]), float(after.joint.probabilities[0, 0])) == (york, pytest.approx(1))
    assert after.mutual_information.tolist() == [[0.0]]
    aside = inspect(model, [york, mask], (0, 2), options=Options())
    assert (aside.circuit, aside.aside) == (False, True)
    assert aside.joint is aside.network


def test_the_neutral_circuit_says_what_the_network_says():
    found = look(HMM.neutral(3, VOCAB))
    assert found.circuit
    assert_close(found.joint.probabilities, found.network.probabilities, atol=1e-5, rtol=0)
    assert_close(found.joint.entropies, found.network.entropies, atol=1e-4, rtol=0)
    assert float(found.mutual_information.max()) < 1e-6


def test_hooks_see_the_masks_of_the_window():
    seen: list[Tensor] = []

    def only_six(logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        seen.append(rows)
        return torch.where(torch.arange(VOCAB) == 6, logits, -math.inf)

    found = look(random_hmm(), options=Options(hooks=[only_six]))
    assert seen[0].tolist() == found.positions.tolist()
    for beliefs in (found.network, found.joint):
        assert_close(beliefs.probabilities[:, 0], torch.ones(8))
        assert bool((beliefs.tokens[:, 0] == 6).all())
        assert float(beliefs.entropies.max()) < 1e-5
    assert float(found.mutual_information.max()) < 1e-6


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_logits(size):
    bias = torch.zeros(VOCAB)
    bias[5], bias[6] = size, -math.inf
    found = look(random_hmm(), backbone=biased(tiny(), bias))
    assert_sound(found)
    for beliefs in (found.network, found.joint):
        assert bool(beliefs.probabilities.isfinite().all())
        assert bool(beliefs.entropies.isfinite().all())


def test_what_it_is_given_is_not_changed():
    ids, written = list(IDS), [2]
    look(random_hmm(), ids, written=written)
    assert (ids, written) == (IDS, [2])


@functools.cache
def bundled() -> Model:
    return codd.load(device="cpu")


def test_the_bundled_model():
    """Its circuit couples neighbours; what is far away, less."""
    model = bundled()
    (prompt,) = model.encode("The capital of France is", gen_length=16, chat=False)
    ids = [*prompt, *[model.mask_id] * 16]
    found = inspect(model, ids, (len(prompt), len(ids)), options=Options())
    assert found.circuit
    assert len(found.positions) == 16
    information = found.mutual_information
    assert bool((found.network.probabilities > 0).all())
    near, far = information.diagonal(1).mean(), information.diagonal(8).mean()
    assert float(near) > 2 * float(far) > 0
    assert bool((information <= found.joint.entropies + 1e-4).all())
    more = inspect(model, ids, (len(prompt), len(ids)), options=Options(), candidates=16).mutual_information
    assert bool((more >= information - 1e-4).all())  # finer classes tell more
