"""Circuits that listen to the network, in every way of decoding: they get the states of what the network saw."""

import functools
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from codd.backbones import Backbone
from codd.circuits import Modulated
from codd.coupling import Coupled
from codd.decoding import Options, Step, cuda_graphs
from codd.decoding.cuda_graphs import WARMUP, sample_captured
from codd.decoding.samplers import Noise, Ranking, sample_window
from codd.decoding.sequence import generator_for
from tests.support.decoding_windows import heard
from tests.support.tiny_models import MASK, VOCAB, detouring, last, modulated, of, random_hmm, run, tiny

PROMPTS = [[1, 2, 3], [4]]
SIZES = MappingProxyType({"gen_length": 12, "block_length": 6, "steps": 4})


@functools.cache
def loud(kind: str) -> Modulated:
    """Heads that say much: to latents, to steps, to both, through a layer between."""
    if kind == "latents":
        return modulated(random_hmm(5, window=6), scale=0.5)
    if kind == "fixed":
        return modulated(random_hmm(5, length=7), scale=0.5)
    return modulated(detouring(window=6), inner_states=4, hidden=8 if kind == "deep" else 0, scale=0.7, seed=2)


class Slowly:
    """What a step must commit in its window, from the network asked anew and potentials made by hand."""

    def __init__(self, backbone: Backbone, circuit: Modulated, options: Options):
        self.backbone, self.circuit, self.options = backbone, circuit, options

    def joint(self, ids: Tensor, given: Tensor, window: tuple[int, int]) -> Coupled:
        begin, end = window
        logits, states = self.backbone(ids[None]), self.backbone.states(ids[None])
        if self.options.cfg_scale:
            blind = self.backbone(torch.where(given, MASK, ids)[None])
            logits = blind + (self.options.cfg_scale + 1) * (logits - blind)
        if not self.options.published:
            logits[..., MASK] = -torch.inf
        masked = (ids == MASK)[None, begin:end]
        with torch.no_grad():
            latents, gates = self.circuit.head(states[:, begin:end], masked)
        if gates is not None:
            straight = torch.zeros(1, end - begin - 1, self.circuit.num_states)
            gates = torch.cat((straight, gates), -1)
        return Coupled(
            self.circuit.hmm,
            logits=logits[:, begin:end],
            tokens=ids[None, begin:end],
            masked=masked,
            latent_log_potentials=latents,
            step_log_gates=gates,
        )

    def any_order(self, joint: Coupled, count: int) -> tuple[list[tuple[int, int]], list[float]]:
        """The surest token, given those before; and how sure they were, one more included."""
        picks, scores = [], []
        for _ in range(min(count + 1, int(joint.masked.sum()))):
            best = joint.marginals()[0].masked_fill(~joint.masked[0, :, None], -torch.inf)
            place, token = divmod(int(best.argmax()), VOCAB)
            picks.append((place, token))
            scores.append(float(best.max().exp()))
            here = torch.arange(joint.masked.shape[1])[None] == place
            joint = joint.condition(torch.full_like(joint.tokens, token), here)
        return picks[:count], scores

    def latent(self, joint: Coupled, count: int, path: Tensor) -> list[tuple[int, int]]:
        scores = joint.joint_step(path[None]).scores[0].masked_fill(~joint.masked[0, :, None], -torch.inf)
        places = joint.masked[0].nonzero()[:, 0]
        sure = scores[places].softmax(-1).amax(-1)
        first = sure.argsort(descending=True, stable=True)[:count]
        return [(int(place), int(scores[place].argmax())) for place in places[first]]


def in_window(step: Step) -> list[tuple[int, int]]:
    begin, end = step.window
    pairs = zip(step.positions.tolist(), step.tokens.tolist(), strict=True)
    return [(place - begin, token) for place, token in pairs if begin <= place < end]


def before(steps: list[Step], prompt: list[int], size: int) -> list[Tensor]:
    """The sequence before each step."""
    return [torch.tensor([*prompt, *[MASK] * size]), *(step.ids for step in steps[:-1])]


def replay(circuit: Modulated, prompts: list[list[int]], **chosen) -> list[Step]:
    """Run, and hold every step of every sequence against the slow way."""
    options = Options.of(**chosen)
    steps = run(tiny(), prompts, circuit=circuit, **chosen)
    slow = Slowly(tiny(), circuit, options)
    for number, prompt in enumerate(prompts):
        own, generator = of(steps, number), generator_for(options.seed, prompt)
        start = before(own, prompt, options.gen_length)[0]
        for step, ids in zip(own, before(own, prompt, options.gen_length), strict=True):
            if options.published and not step.circuit:
                continue  # it leaves the circuit out where one token is due
            assert step.circuit
            joint = slow.joint(ids, start != MASK, step.window)
            found = in_window(step)
            if options.published:
                path = torch.rand(step.window[1] - step.window[0], generator=generator)
                assert found == slow.latent(joint, len(found), path)
                continue
            path = Noise.drawn(len(ids), generator).path[slice(*step.window)]
            if options.sampler == "latent":
                assert found == slow.latent(joint, len(found), path)
                continue
            picks, scores = slow.any_order(joint, len(found))
            assert found == picks
            if options.mode == "block":
                torch.testing.assert_close(step.scores.tolist(), scores[: len(found)], rtol=1e-3, atol=1e-5)
            if options.threshold is not None:
                assert all(score >= options.threshold for score in scores[1 : len(found)])
                assert all(score < options.threshold for score in scores[max(1, len(found)) :])
    assert any(step.circuit for step in steps)
    return steps


class TestLoud:
    @pytest.mark.parametrize(
        ("way", "kind"),
        [
            ({"sampler": "any_order"}, "latents"),
            ({"sampler": "any_order"}, "both"),
            ({"sampler": "latent"}, "latents"),
            ({"sampler": "latent"}, "deep"),
            ({"sampler": "any_order", "mode": "full"}, "both"),
            ({"sampler": "latent", "mode": "full"}, "latents"),
            ({"sampler": "any_order", "threshold": 0.3, "steps": None}, "deep"),
            ({"sampler": "any_order", "cfg_scale": 1.5}, "both"),
            ({"preset": "reference"}, "latents"),
            ({"preset": "reference", "mode": "full"}, "both"),
        ],
        ids=str,
    )
    def test_every_step_is_that_of_potentials_made_by_hand(self, way, kind):
        circuit = loud(kind)
        options = {**SIZES, **way}
        steps = replay(circuit, PROMPTS, **options)
        plain = run(tiny(), PROMPTS, circuit=circuit.hmm, **options)
        assert [last(steps, i) for i in (0, 1)] != [last(plain, i) for i in (0, 1)]

    @pytest.mark.parametrize("sampler", ["latent", "any_order"])
    def test_a_window_that_reaches_back_hears_what_is_written(self, sampler):
        options = {"gen_length": 6, "block_length": 4, "steps": None, "sampler": sampler}
        steps = replay(loud("fixed"), [[1, 2, 3, 4]], **options)
        assert {step.window for step in steps} == {(1, 8), (3, 10)}

    def test_masks_in_the_prompt(self):
        replay(loud("both"), [[MASK, 2, MASK, MASK, 5, 6, MASK]], gen_length=0, steps=2, sampler="any_order")

    @pytest.mark.parametrize("kind", ["latents", "both"])
    def test_a_window_of_one(self, kind):
        steps = run(tiny(), [[1]], circuit=loud(kind), gen_length=7, block_length=6, steps=2)
        assert steps[-1].window == (7, 8)
        assert steps[-1].circuit


class Replayed:
    """What a graph does, without one: the same work again on the same buffers, into the same result."""

    def __init__(self, function):
        self.function, self.found = function, function()

    def replay(self) -> None:
        self.found.copy_(self.function())


@pytest.mark.parametrize("kind", ["latents", "both"])
@pytest.mark.parametrize("options", [{"sampler": "latent"}, {"sampler": "any_order"}], ids=str)
def test_a_captured_step_hears_every_window_anew(options, kind, monkeypatch):
    def capture(function):
        made = Replayed(function)
        return made, made.found

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    circuit, chosen = loud.__wrapped__(kind), Options.of(**options)
    changed = 0
    with torch.no_grad():
        for window in [heard(seed) for seed in range(WARMUP + 8)]:
            found = Ranking.unpacked(sample_captured(sample_window, circuit, window, 1, chosen)).writes()
            for a, b in zip(found, sample_window(circuit, window, 1, chosen).writes(), strict=True):
                torch.testing.assert_close(a, b)
            other = sample_window(circuit, window._replace(features=-window.features), 1, chosen).writes()
            changed += not torch.equal(found.scores, other.scores)
    assert changed
    assert len(cuda_graphs._STEPS[circuit].graphs) == 1
    del cuda_graphs._STEPS[circuit]
