"""``preset="reference"`` against an oracle written from the description of the published code, with circuits."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import codd
from codd.coupling import Coupled
from codd.decoding import Options, Step
from codd.decoding.published import bidirectional
from codd.decoding.published.bidirectional import coupled_logits
from codd.decoding.samplers import StepInputs
from codd.decoding.sequence import StepPlan, generator_for, new_sequence
from tests.support import FIXTURES
from tests.support import published_oracle as oracle
from tests.support.published_oracle import Chain, Settings, Turn
from tests.support.tiny_models import run as denoised
from tests.support.tiny_models import tiny

VOCAB, MASK = 96, 95
SURE = 1e-4
"""How far from the border every decision of a case must be; float32 moves probabilities by a hundredth of that."""


@functools.cache
def loaded(name: str) -> codd.Model:
    return codd.load(FIXTURES / name, None, device="cpu")


@dataclass(frozen=True)
class Case:
    """One configuration; circuits, prompts and seeds are drawn from its name and a number."""

    name: str
    loop: str
    """block (of either model), plain or windowed"""
    model: str
    options: dict[str, Any] = field(hash=False)
    chain: str | None = "plain"
    window: int | None = None
    prompt: int = 6
    holes: int = 0
    """Masks in the prompt."""
    wanted: int = 2
    order: float = SURE
    """How far apart the last confidence that is chosen and the first that is not must be."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Run:
    case: Case
    prompt: list[int]
    how: Settings
    turns: list[Turn]
    network: Callable[[list[int]], oracle.Array]
    chain: Chain | None
    seed: int

    def steps(self, **changes: Any) -> list[Step]:
        circuit = None if self.chain is None else hmm_of(self.chain, self.case.window)
        model = replace(loaded(self.case.model), circuit=circuit)
        options = {"seed": self.seed, **self.case.options, **changes}
        return list(model.denoise([self.prompt], preset="reference", **options))


def softmaxes(logits: oracle.Array) -> oracle.Array:
    return np.stack([oracle.softmax(row) for row in logits])


def chain_of(kind: str, rng: np.random.Generator) -> Chain:
    """Four states that disagree about the tokens."""
    states = 4
    emission = softmaxes(2.0 * rng.normal(size=(states, VOCAB)))
    if kind == "masks":  # the reference may write the mask itself
        emission[:, MASK] += 0.2
    if kind == "zeros":
        emission[rng.random(emission.shape) < 0.3] = 0
    emission /= emission.sum(-1, keepdims=True)
    initial = softmaxes(rng.normal(size=(1, states)))[0]
    return Chain(initial, softmaxes(1.5 * rng.normal(size=(states, states))), emission)


def hmm_of(chain: Chain, window: int | None) -> codd.HMM:
    tables = [torch.from_numpy(table).log().float() for table in (chain.initial, chain.transition, chain.emission)]
    return codd.HMM(*tables, window=window)


def network_of(name: str) -> Callable[[list[int]], oracle.Array]:
    backbone = loaded(name).backbone

    def network(ids: list[int]) -> oracle.Array:
        return backbone(torch.tensor([ids]))[0].double().numpy()

    return network


def uniforms_of(seed: int, prompt: list[int]) -> Callable[[int], oracle.Array]:
    """codd's own stream of one sequence, to be asked in the order in which the loops need it."""
    generator = generator_for(seed, prompt)
    return lambda size: torch.rand(size, generator=generator).double().numpy()


def settings_of(options: dict[str, Any], chain: Chain | None, window: int | None) -> Settings:
    names = {"maskgit_plus": "low_confidence", "topk_margin": "margin"}
    same = ("gen_length", "steps", "block_length", "temperature", "top_p", "top_k", "cfg_scale")
    given = {key: options[key] for key in same if key in options}
    alg = options.get("remasking", "low_confidence")
    frac = options.get("activation")
    return Settings(
        mask=MASK,
        alg=names.get(alg, alg),
        chain=chain,
        tau=options.get("circuit_temperature", 1.0),
        frac=math.inf if frac is None else frac,
        window=window or 0,
        **given,
    )


def sure(turns: list[Turn], order: float) -> bool:
    """Whether rounding could not have changed anything."""
    return all(
        min(turn.path_gap, turn.token_gap, turn.count_gap) > SURE
        and turn.order_gap > order
        and turn.inner_gap > order / 10
        for turn in turns
    )


@functools.cache
def runs(case: Case) -> list[Run]:
    """The first few numbers whose decisions are all sure."""
    found: list[Run] = []
    network = network_of(case.model)
    for seed in range(12 * case.wanted):
        rng = np.random.default_rng([seed, *case.name.encode()])
        chain = None if case.chain is None else chain_of(case.chain, rng)
        prompt = rng.integers(0, MASK, case.prompt).tolist()
        for place in rng.choice(case.prompt, case.holes, replace=False).tolist():
            prompt[place] = MASK
        how = settings_of(case.options, chain, case.window)
        draw = uniforms_of(seed, prompt)
        if case.loop == "block":
            turns = oracle.block_diffusion(network, prompt, how, draw, dream=case.model == "decode_dream")
        elif case.loop == "plain":
            turns = oracle.plain_diffusion(network, prompt, how, draw)
        else:
            turns = oracle.windowed_diffusion(network, prompt, how, draw)
        if sure(turns, case.order):
            found.append(Run(case, prompt, how, turns, network, chain, seed))
        if len(found) == case.wanted:
            return found
    raise AssertionError(f"{case}: too few numbers leave every decision sure")


def assert_same(steps: list[Step], turns: list[Turn]) -> None:
    assert len(steps) == len(turns)
    for number, (step, turn) in enumerate(zip(steps, turns, strict=True)):
        assert step.number == number
        assert step.window == turn.window
        assert step.mask_ratio == turn.ratio
        assert step.circuit == turn.circuit
        assert step.positions.tolist() == turn.positions
        assert step.tokens.tolist() == turn.tokens
        assert step.ids.tolist() == turn.after
        assert step.finished == (number == len(turns) - 1)


LLADA, DREAM = "decode_llada", "decode_dream"
FULL = {"mode": "full"}
RUN = ("chain", "prompt", "holes", "wanted", "order")


def block(name: str, model: str, sizes: tuple[int, int, int], **told: Any) -> Case:
    """``sizes``: gen_length, block_length, steps; ``told``: of a `Case`, and options."""
    options = dict(zip(("gen_length", "block_length", "steps"), sizes, strict=True))
    options |= {key: value for key, value in told.items() if key not in RUN}
    return Case(name, "block", model, options, **{key: told[key] for key in RUN if key in told})


def full(name: str, sizes: tuple[int, int], *, window: int | None = None, **told: Any) -> Case:
    """``sizes``: gen_length, steps. With a window there is a circuit."""
    options = FULL | {"gen_length": sizes[0], "steps": sizes[1]}
    options |= {key: value for key, value in told.items() if key not in RUN}
    given = {key: told[key] for key in RUN if key in told}
    kind = "plain" if window is None else "windowed"
    return Case(name, kind, DREAM, options, **{"chain": None if window is None else "plain", "window": window, **given})


BLOCKS = [
    block("even", LLADA, (16, 8, 8)),
    block(
        "uneven-at-the-threshold",
        LLADA,
        (16, 8, 6),
        remasking="margin",
        activation=0.625,
        circuit_temperature=0.7,
        wanted=3,
    ),
    block(
        "tenths-at-the-threshold",
        LLADA,
        (20, 10, 10),
        remasking="entropy",
        activation=0.6,
        circuit_temperature=0.6,
        wanted=3,
    ),
    block("quarters-at-the-threshold", LLADA, (16, 8, 8), activation=0.75, circuit_temperature=0.8, wanted=3),
    block("not-at-the-first-step", LLADA, (12, 6, 4), remasking="random", activation=1.0),
    block("more-steps-than-tokens", LLADA, (8, 4, 12), circuit_temperature=3.0),
    block("temperatures-without-meaning", LLADA, (8, 8, 3), circuit_temperature=0.0, activation=2.0),
    block("never", LLADA, (8, 8, 4), activation=0.0),
    block("guided", LLADA, (12, 6, 6), remasking="margin", cfg_scale=0.7, circuit_temperature=0.9),
    block("masks-in-the-prompt", LLADA, (16, 8, 8), remasking="entropy", activation=0.9, holes=3, wanted=3),
    block("masks-written", LLADA, (16, 8, 8), chain="masks", wanted=3),
    block("zeros", LLADA, (16, 8, 8), remasking="entropy", activation=0.8, chain="zeros"),
    block("drawn", LLADA, (12, 6, 6), temperature=0.7),
    # The softmax of an exponential: all but uniform, and its confidences all but equal.
    block("drawn-margin", LLADA, (12, 6, 6), temperature=0.3, remasking="margin", order=1e-06),
    block("drawn-entropy", LLADA, (6, 6, 3), temperature=0.3, remasking="entropy", order=1e-06),
    block("drawn-random", LLADA, (12, 6, 4), temperature=1.0, remasking="random"),
    block("drawn-without-circuit", LLADA, (12, 6, 6), temperature=0.7, chain=None),
    block("dream", DREAM, (16, 8, 8), remasking="maskgit_plus", activation=0.75, circuit_temperature=0.7, wanted=3),
    block("dream-without-circuit", DREAM, (16, 8, 6), remasking="entropy", top_p=0.8, chain=None),
    block("dream-filtered", DREAM, (16, 8, 6), remasking="entropy", top_p=0.8, top_k=9),
    block("dream-drawn", DREAM, (16, 8, 8), remasking="entropy", temperature=0.2, top_p=0.95, activation=0.8),
    block(
        "dream-drawn-confidence",
        DREAM,
        (16, 8, 4),
        remasking="maskgit_plus",
        temperature=0.2,
        top_p=0.95,
        circuit_temperature=0.5,
    ),
    block("dream-origin", DREAM, (16, 8, 8), remasking="origin", temperature=0.5, top_k=3),
]


def named(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=str)


class TestBlocks:
    @named(BLOCKS)
    def test_every_step(self, case):
        for run in runs(case):
            assert_same(run.steps(), run.turns)

    def test_in_a_batch_of_others(self):
        """Padding and neighbours change nothing."""
        found = [run for case in BLOCKS[1:2] for run in runs(case)]
        case, chain = found[0].case, found[0].chain
        prompts = [[1, 2], found[0].prompt, [*range(15)]]
        model = replace(loaded(case.model), circuit=hmm_of(chain, None))
        seeds = [5, found[0].seed, 7]
        steps = list(model.denoise(prompts, preset="reference", **case.options, seed=seeds))
        assert_same([step for step in steps if step.sequence == 1], found[0].turns)

    def test_scores_are_rounded_to_the_networks_type(self):
        """Spec 1.7: tempered in the logits' own type, then float32, then written back in the logits' own type."""
        rng = np.random.default_rng(3)
        chain, tau, size = chain_of("plain", rng), 0.3, 6
        ids = [*rng.integers(0, MASK, 4).tolist(), *[MASK] * size]
        ids[6] = 17
        rows = torch.tensor([place for place, token in enumerate(ids) if token == MASK])
        logits = torch.from_numpy(3 * rng.normal(size=(len(rows), VOCAB))).bfloat16()
        generator = torch.Generator().manual_seed(4)
        options = Options(preset="reference", circuit_temperature=tau, gen_length=0)
        state = new_sequence(ids, options, mask_id=MASK)
        state.generator = generator
        hmm, state.plan = hmm_of(chain, None), StepPlan(4, 10, 1, last=False)
        found, possible, _ = coupled_logits(hmm, StepInputs(state, rows, logits, hmm), (4, 10))
        assert found.dtype == torch.bfloat16
        assert bool(possible)
        dense = np.zeros((size, VOCAB))
        dense[(rows - 4).numpy()] = (logits / tau).double().numpy()
        uniforms = torch.rand(size, generator=generator.manual_seed(4)).double().numpy()
        scores, _, gap = oracle.circuit_scores(chain, dense, ids[4:], MASK, 1.0, uniforms)
        assert gap > SURE
        wanted = torch.from_numpy(scores[(rows - 4).numpy()])
        exact = found.double() == wanted.bfloat16().double()
        assert exact.double().mean() > 0.99  # float32 may lie on the other side of the middle
        torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-5)

    def test_dreams_blocks_cut_the_number_of_steps(self):
        """Spec 3.3: S = steps // blocks, with no check."""
        case = Case("dream-cut", "block", DREAM, {"gen_length": 12, "block_length": 4, "steps": 7})
        for run in runs(case):
            assert len(run.turns) == 6
            assert_same(run.steps(), run.turns)


PLAIN = [
    full("top-p", (16, 6), top_p=0.7, wanted=3),
    full("top-k", (16, 6), top_k=4, remasking="entropy", wanted=3),
    full("both", (18, 7), top_p=0.85, top_k=6, remasking="topk_margin", wanted=3),
    full("one-a-step", (12, 12), remasking="maskgit_plus"),
    full("published-settings", (16, 8), remasking="entropy", temperature=0.2, top_p=0.95),
    full("published-margin", (16, 5), remasking="margin", temperature=0.2, top_p=0.95),
    full("published-low-confidence", (24, 4), remasking="maskgit_plus", temperature=0.2, top_p=0.95),
    full("coins", (20, 6), remasking="origin", wanted=3),
    full("coins-drawn", (20, 5), remasking="origin", temperature=0.8, top_k=10),
    full("holes", (10, 5), prompt=9, holes=4),
]


class TestPlain:
    @named(PLAIN)
    def test_every_step(self, case):
        for run in runs(case):
            assert_same(run.steps(), run.turns)

    def test_a_circuit_that_is_left_out(self):
        """The oracle has none; codd has one and is told to leave it."""
        run = runs(PLAIN[0])[0]
        model = replace(loaded(DREAM), circuit=hmm_of(chain_of("plain", np.random.default_rng(0)), 8))
        steps = list(model.denoise([run.prompt], preset="reference", **run.case.options, sampler="factorized"))
        assert_same(steps, run.turns)

    def test_no_number_of_steps_means_one_a_token(self):
        run = runs(PLAIN[3])[0]
        assert run.how.steps == run.how.gen_length
        assert_same(run.steps(steps=None), run.turns)


WINDOWED = [
    full(
        "entropy", (24, 6), window=8, remasking="entropy", circuit_temperature=0.8, activation=0.9, prompt=8, wanted=4
    ),
    full("margin", (20, 5), window=8, remasking="topk_margin", activation=0.75, prompt=5, wanted=4),
    full("topprob", (28, 7), window=8, remasking="topprob", activation=0.5, prompt=10, wanted=4),
    full("maskgit", (18, 9), window=5, remasking="maskgit_plus", circuit_temperature=0.5, prompt=4, wanted=3),
    full("one-a-step", (9, 12), window=6, remasking="entropy", prompt=12),
    full("one-mask", (1, 3), window=8, remasking="entropy", prompt=20),
    full("as-long-as-the-sequence", (16, 4), window=20, remasking="entropy", activation=0.7, prompt=4),
    full("filtered", (22, 6), window=8, remasking="entropy", top_p=0.9, top_k=20, activation=0.8, wanted=3),
    full(
        "published-settings",
        (22, 6),
        window=8,
        remasking="entropy",
        temperature=0.2,
        top_p=0.95,
        circuit_temperature=0.9,
        wanted=3,
    ),
    full("hotter", (22, 11), window=12, remasking="entropy", temperature=1.2, top_p=0.95, prompt=1, wanted=4),
    full("topprob-drawn", (18, 4), window=8, remasking="topprob", temperature=2.0, top_p=0.5, wanted=3),
    full("origin", (20, 6), window=8, remasking="origin", temperature=0.4, activation=0.8),
    full("masks-in-the-prompt", (14, 6), window=8, remasking="margin", activation=0.9, prompt=12, holes=5, wanted=3),
    full("masks-written", (20, 6), window=8, remasking="entropy", chain="masks"),
    full("zeros", (20, 6), window=8, remasking="margin", chain="zeros"),
]


class TestWindows:
    @named(WINDOWED)
    def test_every_step(self, case):
        for run in runs(case):
            assert_same(run.steps(), run.turns)

    def test_the_blocks_length_is_the_windows_where_the_circuit_says_nothing(self):
        run = runs(WINDOWED[0])[0]
        model = replace(loaded(DREAM), circuit=hmm_of(run.chain, None))
        options = run.case.options | {"block_length": run.how.window, "seed": run.seed}
        assert_same(list(model.denoise([run.prompt], preset="reference", **options)), run.turns)


@functools.cache
def in_bfloat16() -> codd.Model:
    return codd.load(FIXTURES / DREAM, None, device="cpu", dtype=torch.bfloat16)


def drawn_or_greedy(logits: Tensor, asked: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, bool, float]:
    """Spec 3.1 and 8.2 B3 at temperature 0.2 and top-p 0.95: tokens and what they are drawn from where ``asked``.

    All rows are given to PyTorch's Categorical at once; if it refuses them, every token is the most probable one. Also
    whether it did, and how near a number came to an edge.
    """
    scores = logits / 0.2
    ordered, places = scores.sort(dim=-1, descending=True, stable=True)
    total = ordered.softmax(-1).cumsum(-1)
    for row in range(len(scores)):
        kept = int((total[row] <= 0.95).sum()) + 1  # the token that crosses is kept
        scores[row, places[row, kept:]] = torch.finfo(scores.dtype).min
    p = scores.softmax(-1)
    try:
        shares = torch.distributions.Categorical(probs=p).probs[asked]
    except ValueError:
        return p[asked].argmax(-1), p[asked], True, math.inf
    found = [oracle.inverse_cdf(row.double().numpy(), float(u)) for row, u in zip(shares, uniforms, strict=True)]
    return torch.tensor([token for token, _ in found]), p[asked], False, min(near for _, near in found)


class TestFallback:
    """Half-precision probabilities that do not sum to 1 make every token of a step the most probable one."""

    OPTIONS = MappingProxyType({"temperature": 0.2, "top_p": 0.95, "preset": "reference"})

    def replay(self, seed: int, prompt: list[int], **options: Any) -> tuple[list[bool], float]:
        """Compare a run without a circuit step by step, from the logits that it saw; which steps were greedy."""
        seen: list[tuple[Tensor, Tensor, Tensor]] = []

        def look(logits: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
            logits = logits / 2  # flatter ones are refused more often
            seen.append((logits.clone(), positions, ids))
            return logits

        steps = list(in_bfloat16().denoise([prompt], **self.OPTIONS, **options, hooks=[look], seed=seed))
        draw, greedy, nearest = uniforms_of(seed, prompt), [], math.inf
        for step, (logits, positions, ids) in zip(steps, seen, strict=True):
            assert logits.dtype == torch.bfloat16
            asked = (ids == MASK)[positions] & (positions < step.window[1])
            tokens, p, fell, near = drawn_or_greedy(logits, asked, torch.from_numpy(draw(int(asked.sum()))))
            confidence = (p * (p + 1e-10).log()).sum(-1)
            if options["remasking"] == "maskgit_plus":
                confidence = p.gather(-1, tokens[:, None])[:, 0]
            first = confidence.argsort(descending=True, stable=True)[: len(step.positions)]
            greedy.append(fell)
            nearest = min(nearest, near)
            if nearest > SURE:
                assert step.positions.tolist() == positions[asked][first].tolist()
                assert step.tokens.tolist() == tokens[first].tolist()
                if options.get("mode") != "full":
                    assert len(positions) == len(ids)  # the draw is of all positions, prompt and later blocks included
        return greedy, nearest

    @pytest.mark.parametrize("rule", ["entropy", "maskgit_plus"])
    @pytest.mark.parametrize(
        "mode",
        [{"gen_length": 24, "block_length": 12, "steps": 8}, {"gen_length": 24, "steps": 8, "mode": "full"}],
        ids=str,
    )
    def test_every_step(self, mode, rule):
        greedy, surely = [], 0
        for seed in range(8):
            prompt = np.random.default_rng(seed).integers(0, MASK, 8).tolist()
            found, near = self.replay(seed, prompt, remasking=rule, **mode)
            greedy += found
            surely += near > SURE
        assert surely >= 3
        assert {True, False} == set(greedy)

    @pytest.mark.parametrize("windowed", [False, True])
    def test_a_position_that_is_written_already_can_spoil_the_draw(self, windowed):
        """Through the circuit, too, which the published loop applies to all positions of its window."""
        rng = np.random.default_rng(0)
        hmm, outcomes = hmm_of(chain_of("plain", rng), 6), set()
        options = Options(**self.OPTIONS, gen_length=0, remasking="entropy", mode="full" if windowed else "block")
        for trial in range(150):
            ids = torch.tensor([*rng.integers(0, MASK, 4).tolist(), MASK, MASK])
            logits = torch.from_numpy(rng.normal(size=(6, VOCAB))).bfloat16()
            state = new_sequence(ids.tolist(), options, mask_id=MASK, seed=trial)
            generator = state.generator.get_state()
            state.plan, state.family = StepPlan(0, 6, 2, last=False), "dream"
            result = bidirectional.step(StepInputs(state, torch.arange(6), logits, hmm))
            assert result.circuit
            state.generator.set_state(generator)
            path = torch.rand(6, generator=state.generator)
            free = Coupled(hmm, logits=logits[None], tokens=ids[None], masked=(ids == MASK)[None])
            latents, scores, _ = free.joint_step(path[None])
            everywhere = Coupled(hmm, logits=logits[None], tokens=ids[None], masked=torch.ones(1, 6, dtype=torch.bool))
            scores = torch.where((ids == MASK)[:, None], scores[0], everywhere.scores(latents)[0])
            torch.testing.assert_close(scores, logits.float().log_softmax(-1) + hmm.log_emission[latents[0]])
            scores = scores.bfloat16()
            uniforms = torch.rand(2, generator=state.generator)
            tokens, _, fell, near = drawn_or_greedy(scores, ids == MASK, uniforms)
            alone = drawn_or_greedy(scores[4:], torch.ones(2, dtype=torch.bool), uniforms)[2]
            outcomes.add((fell, alone))
            if near > SURE:
                ranking = result.ranking()
                found = dict(zip(ranking.rows.tolist(), ranking.tokens.tolist(), strict=True))
                assert [found[4], found[5]] == tokens.tolist()
        assert (True, False) in outcomes  # the two masked positions by themselves would have been drawn


def test_a_step_with_nothing_due_is_legal():
    """Each mask is revealed by a coin of its own, so that steps may be left when none is; any vocabulary, and drawn."""
    idle = 0
    for seed in range(5):
        options = FULL | {"gen_length": 4, "steps": 4, "remasking": "origin", "temperature": 1.0, "seed": seed}
        steps = denoised(tiny(vocab=301), [[1, 2]], sampler="factorized", preset="reference", **options)
        assert len(steps) == 4
        assert steps[-1].finished
        idle += sum(len(step.positions) == 0 for step in steps)
    assert idle > 0
