import dataclasses
import math

import pytest
import torch

from codd.circuits import HMM, Factors, Head, HeadConfig, Modulated
from codd.data.windows import WindowBatch, WindowRecipe, draw_windows
from codd.distributed import DistributedContext
from codd.errors import InvalidInput
from codd.training.circuit import initial
from codd.training.circuit.initial import CircuitSpec, state_usage
from codd.training.circuit.trainer import cosine_rate
from codd.training.circuit.updaters import FlowUpdater, GradientUpdater, make_updater
from codd.training.circuit.validation import HeldOut
from codd.training.circuit_recipe import HeadRecipe, RuleRecipe, TablesRecipe
from tests.support.small_windows import (
    ALONE,
    CPU,
    MASK,
    PAIRS,
    VOCAB,
    WIDTH,
    WINDOW,
    check_gradients,
    flat,
    network,
    random_windows,
    recipe_of,
    rows_of_pairs,
    some,
)

TOKENS = 6
SPEC = CircuitSpec(TOKENS, WIDTH, ALONE)
STATIC = TablesRecipe(num_states=3)
THIN = TablesRecipe(num_states=3, transition_rank=2, emission_rank=2)
WAYS = {
    "static": {"circuit": STATIC},
    "anemone": {"circuit": STATIC, "optimizer": RuleRecipe(rule="ratio", momentum=0.5)},
    "thin": {"circuit": THIN},
    "latents": {"circuit": STATIC, "head": HeadRecipe(latents=True)},
    "gates": {"circuit": THIN, "head": HeadRecipe(inner_states=2)},
    "both": {"circuit": THIN, "head": HeadRecipe(latents=True, inner_states=2, hidden=5)},
}


@dataclasses.dataclass(frozen=True)
class OneOfTwo(DistributedContext):
    """A process that leaves its sums to the other one, or adds what that left."""

    sums: list[torch.Tensor] = dataclasses.field(default_factory=list)
    sends: bool = False

    def all_reduce(self, tensors):
        if self.sends:
            self.sums[:] = [x.clone() for x in tensors]
        for mine, other in zip(tensors, () if self.sends else self.sums, strict=not self.sends):
            mine += other


def windows_of(seed: int, **options) -> WindowBatch:
    return random_windows(seed, TOKENS, dtype=torch.float32, **options)


def small_recipe(way: str, **changes):
    return recipe_of(**{"windows": WindowRecipe(5), **WAYS[way], **changes})


def learner_of(way: str, **changes) -> FlowUpdater | GradientUpdater:
    return make_updater(small_recipe(way, **changes), SPEC)


def gradient_learner(way: str, **changes) -> GradientUpdater:
    """By gradients whatever the recipe, with a head that says something."""
    recipe = small_recipe(way, **changes)
    sizes, wanted = recipe.circuit, recipe.head
    factors = Factors.near_neutral(
        sizes.num_states,
        TOKENS,
        transition_rank=sizes.transition_rank,
        emission_rank=sizes.emission_rank,
        inner_states=wanted.inner_states,
        noise=1.0,
    )
    head = None
    if wanted.wanted:
        states = sizes.num_states if wanted.latents else 0
        head = Head(HeadConfig(WIDTH, states, wanted.inner_states, wanted.hidden, wanted.dropout))
        generator = torch.Generator().manual_seed(1)
        for parameter in head.parameters():
            parameter.data.normal_(0, 0.3, generator=generator)
    return GradientUpdater(recipe, factors, head, SPEC)


@pytest.fixture
def in_double(monkeypatch):
    """What the library does in 32 bits is done in 64, so that differences tell."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def in_64_bits(updater: GradientUpdater) -> GradientUpdater:
    for parameter in updater.parameters.values():
        parameter.grad = None
        parameter.data = parameter.data.double()
        parameter.grad = torch.zeros_like(parameter)
    return updater


@pytest.mark.parametrize("weighting", ["token", "elbo"])
@pytest.mark.parametrize("way", ["static", "thin", "latents", "gates", "both"])
def test_gradients_are_those_of_finite_differences(way, weighting, in_double):
    updater = in_64_bits(gradient_learner(way, weighting=weighting))
    windows = random_windows(3, TOKENS)
    weights = torch.where(windows.masked.any(-1), 1.0 if weighting == "token" else 1 / windows.level, 0)

    def loss() -> float:
        with torch.no_grad():
            return -float((updater.log_prob(windows) * weights).sum())

    sums = updater.differentiate(windows)
    assert sums.tolist() == pytest.approx(
        [
            -loss(),
            float((windows.factorized_log_prob() * weights).sum()),
            float((windows.masked.sum(-1) * weights).sum()),
        ]
    )
    found = {name: parameter.grad.clone() for name, parameter in updater.parameters.items()}
    assert check_gradients(updater.parameters, found, loss) == len(found)
    updater.move(sums, 0.0)
    for name, parameter in updater.parameters.items():
        torch.testing.assert_close(parameter.grad, found[name] / sums[2])  # per masked token


@pytest.mark.parametrize("way", WAYS)
def test_states_are_kept_to_the_bit(way):
    first, second = learner_of(way), learner_of(way, seed=1)
    for step in range(3):
        first.update(windows_of(step), 1.0)
    kept = {name: x.clone() for name, x in first.tensors().items()}
    second.restore(kept)
    unlike = learner_of(way)
    unlike.restore({name: x for name, x in kept.items() if not name.startswith("optimizer.") or "updates" in name})
    for updater in (first, second, unlike):
        for step in (3, 4):
            updater.update(windows_of(step), 0.5)
    found = second.tensors()
    assert found.keys() == first.tensors().keys()
    assert all(torch.equal(x, found[name]) for name, x in first.tensors().items())
    assert any(not torch.equal(x, unlike.tensors()[name]) for name, x in first.tensors().items())


@pytest.mark.parametrize("weighting", ["token", "elbo"])
@pytest.mark.parametrize("way", WAYS)
def test_halves_of_a_batch_add_up(way, weighting):
    first = OneOfTwo(0, 2, CPU)
    contexts = (ALONE, first, dataclasses.replace(first, sends=True))
    recipe = small_recipe(way, weighting=weighting)
    whole, half, rest = (make_updater(recipe, SPEC._replace(context=context)) for context in contexts)
    for step in range(3):
        windows = windows_of(step, count=9)
        rest.update(some(windows, slice(4, None)), 1.0)
        shared = half.update(some(windows, slice(4)), 1.0)
        torch.testing.assert_close(shared, whole.update(windows, 1.0), rtol=1e-5, atol=1e-4)
        rest.restore({name: x.clone() for name, x in half.tensors().items()})
    for found, wanted in zip(half.tensors().values(), whole.tensors().values(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_the_circuit_is_a_finished_copy(way):
    updater = learner_of(way)
    updater.update(windows_of(0), 1.0)
    circuit = updater.circuit()
    hmm = circuit.hmm if isinstance(circuit, Modulated) else circuit
    assert isinstance(circuit, Modulated) == (way in ("latents", "gates", "both"))
    assert hmm.window == 5
    assert not any(table.requires_grad for table in (hmm.log_initial, *hmm.transition.log_factors, hmm.log_emission))
    if isinstance(circuit, Modulated):
        assert not circuit.head.training
        assert not any(x.requires_grad for x in circuit.head.parameters())
        assert updater.head.training
    before = hmm.log_emission.clone()
    weights = [x.clone() for x in circuit.head.parameters()] if isinstance(circuit, Modulated) else []
    updater.update(windows_of(1), 1.0)
    assert torch.equal(hmm.log_emission, before)
    if isinstance(circuit, Modulated):
        assert all(map(torch.equal, circuit.head.parameters(), weights))


def test_dropout_is_for_training_alone():
    updater = gradient_learner("both", head=HeadRecipe(latents=True, inner_states=2, hidden=5, dropout=0.5))
    windows, found = windows_of(1), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(updater.differentiate(windows))
    assert float(found[0][0]) != float(found[1][0])
    circuit = updater.circuit()
    said = [circuit.modulate(windows.features, windows.masked) for _ in range(2)]
    torch.testing.assert_close(said[0], said[1], rtol=0, atol=0)


def test_the_neutral_circuit_has_the_networks_loss():
    windows, neutral = windows_of(2), HMM.neutral(3, TOKENS)
    factors = Factors(neutral.log_initial, (neutral.log_transition,), (neutral.log_emission,))
    for updater in (
        FlowUpdater(small_recipe("anemone"), factors, SPEC),
        GradientUpdater(small_recipe("static"), factors, None, SPEC),
    ):
        coupled, network_alone, tokens = updater.update(windows, 1.0).tolist()
        wanted = windows.logits.log_softmax(-1).gather(-1, windows.tokens[..., None])[..., 0][windows.masked].sum()
        assert coupled == pytest.approx(network_alone, abs=1e-4)
        assert network_alone == pytest.approx(float(wanted), abs=1e-4)
        assert tokens == int(windows.masked.sum())


def test_windows_without_masks_count_nothing():
    windows = windows_of(1)
    more = WindowBatch(*(None if x is None else torch.cat((x, x)) for x in windows))
    more.masked[6:] = False
    for way in ("anemone", "both"):
        updaters = [learner_of(way) for _ in range(2)]
        sums = [x.update(found, 1.0) for x, found in zip(updaters, (windows, more), strict=True)]
        torch.testing.assert_close(*sums)
        for a, b in zip(*(x.tensors().values() for x in updaters), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    nothing = gradient_learner("both")
    before = {name: x.clone() for name, x in nothing.tensors().items()}
    nothing.update(windows._replace(masked=torch.zeros_like(windows.masked)), 1.0)
    assert all(torch.equal(nothing.tensors()[name], x) for name, x in before.items())


PAIR_WAYS = {
    "thin": (RuleRecipe(lr=0.1), {"circuit": TablesRecipe(4 * PAIRS, transition_rank=8, emission_rank=8, noise=1.0)}),
    "head": (RuleRecipe(lr=0.1, head_lr=0.01), {"head": HeadRecipe(latents=True, inner_states=6)}),
}


@pytest.mark.parametrize("way", PAIR_WAYS)
def test_what_the_network_misses_is_learned(way):
    optimizer, changes = PAIR_WAYS[way]
    backbone = network(std=0.0)
    recipe = recipe_of(**{"circuit": TablesRecipe(4 * PAIRS), "optimizer": optimizer, **changes})
    updater, steps, seen = make_updater(recipe, CircuitSpec(VOCAB, WIDTH, ALONE)), 100, []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        windows = draw_windows(backbone, MASK, rows_of_pairs(step), recipe.windows, generator)
        coupled, factorized, tokens = updater.update(windows, cosine_rate(step, step / steps, 5)).tolist()
        assert factorized / tokens == pytest.approx(-math.log(2 * PAIRS), abs=1e-4)
        seen.append(coupled / tokens)
    assert sum(seen[-10:]) > sum(seen[:10]) + 5
    held_out = HeldOut.prepare(backbone, MASK, rows_of_pairs(10**6, 100), WINDOW, (0.1, 1.0), 0)
    scores = held_out.scores(updater.circuit())
    # All masked, a block is four draws of one pair in four, however many tokens the network thinks possible.
    best = -math.log(PAIRS) / 2
    gain = best + math.log(2 * PAIRS)
    assert scores[1.0]["factorized"] == pytest.approx(-math.log(2 * PAIRS), abs=1e-4)
    assert scores[1.0]["factorized"] + 0.85 * gain < scores[1.0]["coupled"] < best + 0.1
    # One of eight masked: the other of its pair is known, and so is it.
    assert scores[0.1]["coupled"] > -0.3


def test_recipes_choose_their_learner(tmp_path):
    kinds = {way: type(learner_of(way)) for way in WAYS}
    assert kinds == {**dict.fromkeys(WAYS, GradientUpdater), "anemone": FlowUpdater}
    flat(TOKENS).save(tmp_path / "static")
    started = learner_of("anemone", start=str(tmp_path / "static"))
    assert isinstance(started, FlowUpdater)
    torch.testing.assert_close(started.circuit().log_emission, flat(TOKENS).log_emission)


@pytest.mark.parametrize("way", ["thin", "latents", "gates", "both"])
def test_a_saved_circuit_is_trained_on(way, tmp_path):
    """Its sizes are its own, whatever the recipe says of tables."""
    first = gradient_learner(way)
    first.circuit().save(tmp_path / "circuit")
    again = learner_of("static", start=str(tmp_path / "circuit"))
    assert isinstance(again, GradientUpdater)
    windows = windows_of(4)
    torch.testing.assert_close(again.log_prob(windows), first.log_prob(windows))
    assert again.parameters.keys() == first.parameters.keys()
    again.update(windows, 1.0)


@pytest.mark.parametrize("way", ["static", "latents"])
def test_states_that_are_not_used_go_first(tmp_path, way):
    """Two of five that nothing leads to: without them the circuit is the same."""
    used = torch.tensor([0, 2, 3])
    blocked = torch.full((5,), -torch.inf).index_fill(0, used, 0.0)
    initial, transition, emission = Factors.near_neutral(5, TOKENS, noise=1.0).tables()
    hmm = HMM((initial + blocked).log_softmax(-1), (transition + blocked).log_softmax(-1), emission, window=5)
    start, head = hmm, gradient_learner("latents", circuit=TablesRecipe(5)).head
    if way == "latents":
        assert head is not None
        start = Modulated(hmm, head)
    start.save(tmp_path / "circuit")
    shares = state_usage(start, windows_of, ALONE)
    assert shares[[1, 4]].tolist() == [0, 0]
    assert float(shares.sum()) == pytest.approx(1)
    recipe = small_recipe(way, start=str(tmp_path / "circuit"), keep_states=3)
    made = make_updater(recipe, SPEC, windows_of).circuit()
    windows = windows_of(7)
    hmm, modulation = start.condition_on(windows.features, windows.masked)
    smaller, modulation_of_it = made.condition_on(windows.features, windows.masked)
    torch.testing.assert_close(smaller.log_emission, hmm.log_emission[used])
    found = smaller.conditional_log_prob(windows.tokens, windows.evidence(*modulation_of_it))
    torch.testing.assert_close(found, hmm.conditional_log_prob(windows.tokens, windows.evidence(*modulation)))


def test_of_states_that_are_used_alike_the_first_stay(tmp_path, monkeypatch):
    start = HMM.random(4, TOKENS)
    recipe = small_recipe("static", start=str(start.save(tmp_path / "circuit")), keep_states=2)
    monkeypatch.setattr(initial, "state_usage", lambda *_: torch.tensor([0.3, 0.1, 0.3, 0.3]))
    made = make_updater(recipe, SPEC, windows_of).circuit()
    assert isinstance(made, HMM)
    torch.testing.assert_close(made.log_emission, start.log_emission[[0, 2]])
    with pytest.raises(InvalidInput, match=r"has 4 states, fewer than the 5 that are to be kept: lower keep_states"):
        learner_of("static", start=recipe.start, keep_states=5)


def test_what_does_not_fit_is_refused(tmp_path):
    start = str(tmp_path / "circuit")
    gradient_learner("thin").circuit().save(start)
    gradient_learner("latents").circuit().save(tmp_path / "modulated")
    listens = {"start": str(tmp_path / "modulated")}
    for way, begin, (vocab, width), words in (
        ("static", {"start": start}, (9, WIDTH), "is over 6 tokens, the backbone over 9"),
        ("gates", {"start": start}, (TOKENS, WIDTH), "was not made with 2 inner states, which cannot be added"),
        ("anemone", {"start": start}, (TOKENS, WIDTH), "is modulated or factored; the rule 'ratio'.* use 'adam'"),
        ("latents", {}, (TOKENS, 0), "make it with --features"),
        ("latents", {"start": start}, (TOKENS, 0), "make it with --features"),
        ("latents", listens, (TOKENS, 4), "hidden states of 16 numbers, there are 4"),
    ):
        with pytest.raises(InvalidInput, match=words):
            make_updater(small_recipe(way, **begin), CircuitSpec(vocab, width, ALONE))
