"""What holds under all settings: the control, sequences in company, caches that are exact, and the stream."""

import itertools
from typing import Any

import pytest
import torch

import codd
from codd.backbones import Backbone
from codd.circuits import HMM
from codd.constraints import Automaton
from codd.decoding import Options, Step
from codd.decoding.loop import advance
from codd.decoding.runner import CachedRunner, FullRecompute
from codd.decoding.sequence import SequenceState
from tests.support import small_denoisers
from tests.support.tiny_models import MASK, VOCAB, fixture, modulated, of, random_hmm, tiny

ORDERS = ("low_confidence", "margin", "entropy", "random", "left_to_right")
SIZES = {"gen_length": 12, "block_length": 6}
SLIDING = {"blocks": "sliding", "min_tokens": 2}
AUTOMATON = Automaton(
    [[(3 * state + token) % 4 if token < MASK - 1 else -1 for token in range(VOCAB)] for state in range(4)],
    accepting=[1],
)

DRAFTS = {"mode": "speculative", "verifier": small_denoisers.network(causal=True, vocab=VOCAB, mask=MASK)}

NULL: list[tuple[str, dict[str, Any]]] = [
    ("tiny", DRAFTS),
    *(
        ("tiny", {"remasking": order, **pace})
        for order, pace in itertools.product(ORDERS, ({"steps": 4}, {"threshold": 0.2}))
    ),
    *(("tiny", {"remasking": order, "steps": 5, "mode": "full", "top_p": 0.9}) for order in ORDERS),
    *(("tiny", {"remasking": order, "entropy_budget": 2.5, "top_k": 5}) for order in ORDERS),
    *(("tiny", {"remasking": order, "threshold": 0.2, **SLIDING}) for order in ORDERS),
    *(("tiny", {"entropy_budget": 3.0, **SLIDING, "remasking": order}) for order in ORDERS[:2]),
    ("tiny", {"threshold": 0.15, "min_tokens": 3, "mode": "full"}),
    ("blocks", {"entropy_budget": 1.0, "min_tokens": 3, "editing_threshold": 0.2}),
    *(("blocks", {"remasking": order, "threshold": 0.15, "block_length": 2}) for order in ORDERS),
    ("blocks", {"steps": None, "editing_threshold": 0.2, "cfg_scale": 0.5}),
    ("blocks", {"entropy_budget": 2.5, "cache": "dual", "block_length": 2}),
    *(
        ("tiny", {"cache": cache, "refresh": refresh, **way})
        for cache, refresh in (("prefix", None), ("dual", None), ("dual", 2))
        for way in (
            {"threshold": 0.2},
            {"mode": "full", "steps": 6},
            {"mode": "full", "threshold": 0.15},
            {"threshold": 0.2, **SLIDING},
        )
    ),
    *(
        ("tiny", {"constraint": AUTOMATON, **way})
        for way in (
            {"threshold": 0.2},
            {"mode": "full", "steps": 4},
            {"mode": "full", "threshold": 0.15},
            {"steps": 3, "remasking": "margin"},
            {"threshold": 0.2, **SLIDING},
        )
    ),
    ("tiny", {"constraint": AUTOMATON, "mode": "full", "steps": 4, "cache": "dual"}),
]


def network(name: str) -> Backbone:
    return {"tiny": tiny, "blocks": lambda: tiny(block_size=4)}.get(name, lambda: fixture(name))()


def same(a: Step, b: Step) -> bool:
    tensors = all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("positions", "tokens", "scores", "ids"))
    rest = ("number", "mask_ratio", "circuit", "window", "finished", "computed", "cached")
    return tensors and all(getattr(a, name) == getattr(b, name) for name in rest)


def answers(steps: list[Step]) -> list[list[tuple[list[int], list[int], int]]]:
    """Of both prompts: what each step wrote, where, and how many positions the network computed for it."""
    return [
        [(step.ids.tolist(), sorted(step.positions.tolist()), step.computed) for step in of(steps, number)]
        for number in (0, 1)
    ]


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(("name", "way"), NULL, ids=str)
def test_the_null_circuit_writes_what_the_network_writes_alone(name, way):
    """The control of every comparison."""
    alone, null = (codd.Model(network(name), circuit, None, MASK) for circuit in (None, HMM.neutral(1, VOCAB)))
    for seed, temperature in enumerate((0.0, 0.0, 0.5, 1.0)):
        options = {**SIZES, "block_length": 4, "seed": seed, "temperature": temperature, **way}
        prompts = [[1, 2, 3, seed], [5 + seed]]
        for sampler in ("latent", "any_order") if "steps" in way else ("any_order",):
            wanted, found = (list(each.denoise(prompts, sampler=sampler, **options)) for each in (alone, null))
            assert not any(step.circuit for step in wanted)
            assert answers(found) == answers(wanted)
            assert any(step.circuit for step in found)


REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    ([1, 2, 3], {"steps": 4, "sampler": "latent"}),
    ([4], {"steps": None, "sampler": "any_order", "seed": 2}),
    ([4, 1, 5, 2, 2], {"mode": "full", "steps": 3, "sampler": "factorized", "temperature": 1.0}),
    ([2, MASK, 3], {"gen_length": 0, "sampler": "any_order", "threshold": 0.3}),
    ([5, 5], {"cfg_scale": 0.5, "steps": 4, "remasking": "random", "seed": 9, "ban": [1, 2]}),
    ([3, 1], {"entropy_budget": 1.5, "circuit_temperature": 0.6, "activation": 0.9}),
    ([8], {"steps": 6, "sampler": "latent", "temperature": 1.0, "top_p": 0.9}),
    ([9, 9, 1], {"steps": 6, "sampler": "any_order", "temperature": 1.0, "seed": 1}),
    ([1, 2, 1, 2], {"threshold": 0.2, "sampler": "factorized"}),
    ([7], {"mode": "full", "sampler": "latent", "outside": "defer", "temperature": 1.0, "steps": 5}),
    ([6, 3], {"mode": "full", "steps": 4, "constraint": AUTOMATON}),
    ([6, 2, 3], {"threshold": 0.2, "editing_threshold": 0.3, "max_post_steps": 2}),
    ([1, 5, 2], {"threshold": 0.2, "cache": "dual"}),
    ([5, 2], {"threshold": 0.1, "cache": "dual", **SLIDING}),
    ([5, 1], {"threshold": 0.1, **SLIDING}),
    ([1, 5], {"steps": 6, "cache": "prefix", "refresh": 2, "cfg_scale": 0.5}),
    ([2, 4, 1], {**DRAFTS, "temperature": 1.0, "seed": 6}),
    ([7, 3], DRAFTS),
]


EXCLUDED = {"blocks": {"mode", "blocks"}, "mdlm": {"cache", "constraint", "verifier"}}
"""What a network cannot do; and the automaton and the verifier are of the tiny network's tokens."""


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("name", ["tiny", "blocks", "decode_llada", "decode_dream", "mdlm"])
def test_sequences_of_all_kinds_share_their_steps_and_are_as_if_alone(name, one_by_one):
    """They join one after the other while earlier ones are under way, and leave when they are done."""
    backbone = network(name)
    mask = backbone.special.mask
    hmm = random_hmm(5, backbone.vocab_size, window=6)
    model = codd.Model(backbone, modulated(hmm, scale=0.5) if name in ("tiny", "blocks") else hmm, None, mask)
    excluded = EXCLUDED.get(name, {"constraint", "verifier"} if name.startswith("decode") else set())
    kept = [
        ([mask if token == MASK else token for token in prompt], {**SIZES, **way})
        for prompt, way in REQUESTS
        if not excluded & way.keys()
    ]
    if name == "blocks":
        kept = [(prompt, {**way, "block_length": 4}) for prompt, way in kept]
    alone = [list(model.denoise([prompt], **way)) for prompt, way in kept]
    waiting = [model.start([prompt], Options.of(**way))[0] for prompt, way in kept]
    if name == "mdlm":
        runner = FullRecompute(backbone, one_by_one=one_by_one)
    else:
        runner = CachedRunner(backbone, slots=20, length=32, one_by_one=one_by_one)
    seen: dict[SequenceState, list[Step]] = {state: [] for state in waiting}
    running: list[SequenceState] = []
    most = 0
    while waiting or running:
        running += [state for state in waiting[:1] if runner.admit(state)]
        waiting = waiting[1:]
        most = max(most, len(running))
        for state, step in zip(running, advance(runner, running), strict=True):
            assert isinstance(step, Step), step
            seen[state].append(step)
        running = [state for state in running if not state.finished]
    assert most > 2
    for steps, expected in zip(seen.values(), alone, strict=True):
        assert len(steps) == len(expected)
        assert all(map(same, steps, expected))


@pytest.mark.parametrize(
    "circuit", [None, random_hmm(), modulated(random_hmm(length=6), scale=0.5)], ids=["network", "circuit", "modulated"]
)
@pytest.mark.parametrize(
    "way",
    [
        {"steps": 4},
        {"threshold": 0.2, **SLIDING},
        {"mode": "full", "steps": 3},
        {"threshold": 0.1, "editing_threshold": 0.2},
    ],
    ids=str,
)
def test_generate_collects_the_stream(way, circuit):
    """The last ids, the score of every written token in the order of positions, and the number of network calls."""
    model, prompts = codd.Model(tiny(), circuit, None, MASK), [[1, 2, 3], [4, MASK, 5]]
    found, again = (model.generate(prompts, Options.of(**SIZES, **way), seed=3) for _ in range(2))
    steps = list(model.denoise(prompts, **SIZES, **way, seed=3))
    for number, prompt in enumerate(prompts):
        own, scores = of(steps, number), torch.zeros(len(prompt) + 12)
        for step in own:
            scores[step.positions], scores[step.edits.positions] = step.scores, step.edits.scores
        written = [i for i, token in enumerate(prompt) if token == MASK] + list(range(len(prompt), len(own[-1].ids)))
        assert found.sequences[number].tolist() == again.sequences[number].tolist() == own[-1].ids.tolist()
        assert found.positions[number].tolist() == written
        assert torch.equal(found.scores[number], scores[written])
        assert bool((found.scores[number] > 0).all() and (found.scores[number] <= 1).all())
        assert found.steps[number] == len(own)
        assert found.circuit_steps[number] == sum(step.circuit for step in own)
        assert (found.circuit_steps[number] > 0) == (circuit is not None)
