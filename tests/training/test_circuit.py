import functools
import itertools
import math

import numpy as np
import pytest
import torch
from small_runs import packed

from codd.backbones import Backbone, mini
from codd.backbones.config import Config
from codd.backbones.transformer import initialise
from codd.circuits import HMM
from codd.errors import InvalidInput
from codd.training import circuit as training
from codd.training.circuit import CircuitSettings, FreeLogits, Windows, conditional_loss, factorized_loss, held_out
from codd.training.noise import segment_starts
from codd.training.objective import to_tensors
from codd.training.rows import Example, Rows, pack

CPU = torch.device("cpu")
PAIRS = 4
VOCAB, MASK = 2 * PAIRS + 1, 2 * PAIRS
WINDOW = 8


@functools.cache
def network(*, std: float = 0.5, vocab_size: int = VOCAB) -> Backbone:
    """Random weights; with ``std`` 0 every token but the mask has the same probability everywhere."""
    sizes = {"vocab_size": vocab_size, "width": 16, "layers": 1, "heads": 2, "mlp_width": 16}
    built = mini.build(Config({**sizes, "mask_token_id": vocab_size - 1}, "a test"))
    initialise(built.network, generator=torch.Generator().manual_seed(3), std=std)
    return built.eval().requires_grad_(False)


def rows_of_pairs(number: int, count: int = 16, answer: int = 16) -> Rows:
    """Answers in which each second token is fixed by the one before it."""
    random = np.random.default_rng(number)
    examples = []
    for _ in range(count):
        first = random.integers(PAIRS, size=(3 + answer) // 2 + 1)
        tokens = np.stack((first, first + PAIRS), axis=1).flatten()[: 2 + answer]
        examples.append(Example(tokens.astype(np.uint16), 2))
    return pack(examples, 2 + answer, MASK)


def prose(count: int, length: int) -> Rows:
    tokens = np.random.default_rng(2).integers(0, VOCAB - 1, (count, length)).astype(np.uint16)
    return Rows(tokens, np.ones(tokens.shape, np.uint8), np.ones(tokens.shape, np.bool_))


QUESTIONS = packed([(5, 16), (3, 8), (9, 24), (1, 8), (4, 32), (2, 5)] * 20, 48)
SETTINGS = CircuitSettings(num_states=4 * PAIRS, window=WINDOW, steps=150, windows=2, lr=0.1, warmup=5, report_every=50)


def flat(vocab_size: int) -> HMM:
    """The circuit that changes nothing, over windows of this length."""
    tables = (torch.zeros(shape).log_softmax(-1) for shape in ((2,), (2, 2), (2, vocab_size)))
    return HMM(*tables, window=WINDOW)


def random_windows(generator: torch.Generator, vocab_size: int, *, count: int = 4, size: int = 5) -> Windows:
    logits = torch.randn(count, size, vocab_size, generator=generator, dtype=torch.float64)
    tokens = torch.randint(vocab_size, (count, size), generator=generator)
    return Windows(logits, tokens, torch.rand(count, size, generator=generator) < 0.6)


def test_what_the_network_misses_is_learned():
    seen = {}
    circuit = training.train_circuit(
        network(std=0.0), MASK, rows_of_pairs, SETTINGS, report=lambda step, metrics, _: seen.update({step: metrics})
    )
    assert list(seen) == [50, 100, 150]
    assert seen[50]["loss"] > seen[150]["loss"]
    assert seen[50]["factorized"] == pytest.approx(math.log(2 * PAIRS), abs=1e-4)
    scores = held_out(network(std=0.0), MASK, circuit, rows_of_pairs(10**6, 100))
    # All masked, a block is four draws of one pair in four, however many tokens the network thinks possible.
    best = -math.log(PAIRS) / 2
    gain = best + math.log(2 * PAIRS)
    assert scores[1.0].factorized == pytest.approx(-math.log(2 * PAIRS), abs=1e-4)
    assert scores[1.0].factorized + 0.9 * gain < scores[1.0].coupled < best + 0.1
    # One of eight masked: the other of its pair is known, and so is it.
    assert scores[0.1].coupled > -0.25


def test_the_gradient_is_that_of_finite_differences():
    generator = torch.Generator().manual_seed(0)
    states, vocab = 3, 6
    windows = random_windows(generator, vocab)
    shapes = ((states,), (states, states), (states, vocab))
    logits = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def loss(*parameters):
        return conditional_loss(FreeLogits(*parameters).circuit(5), windows)

    assert torch.autograd.gradcheck(loss, logits, eps=1e-6, atol=1e-8)


def test_the_neutral_circuit_has_the_networks_loss():
    windows = random_windows(torch.Generator().manual_seed(1), 7)
    neutral = HMM.neutral(3, 7, dtype=torch.float64)
    torch.testing.assert_close(conditional_loss(neutral, windows), factorized_loss(windows))
    wanted = windows.logits.log_softmax(-1).gather(-1, windows.tokens[..., None])[..., 0][windows.masked].mean()
    torch.testing.assert_close(factorized_loss(windows), -wanted)


def test_windows_without_masks_count_nothing():
    windows = random_windows(torch.Generator().manual_seed(1), 7)
    more = Windows(*(torch.cat((x, x)) for x in windows))
    more.masked[4:] = False
    circuit = HMM.random(3, 7, dtype=torch.float64)
    torch.testing.assert_close(conditional_loss(circuit, more), conditional_loss(circuit, windows))
    nothing = windows._replace(masked=torch.zeros_like(windows.masked))
    assert conditional_loss(circuit, nothing).abs() < 1e-9


def test_the_start_is_near_the_network():
    backbone = network(vocab_size=500)
    settings = CircuitSettings(num_states=128, window=WINDOW)
    start = FreeLogits.near_neutral(settings, backbone.vocab_size, CPU).circuit(WINDOW)
    for scores in held_out(backbone, 499, start, packed([(4, 16)] * 100, 20, vocab_size=499)).values():
        assert abs(scores.coupled - scores.factorized) < 0.04


def test_a_seed_is_a_circuit():
    settings = CircuitSettings(num_states=4, window=WINDOW, steps=3)
    first, again, other = (
        training.train_circuit(network(), MASK, rows_of_pairs, CircuitSettings(**{**vars(settings), "seed": seed}))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first.log_emission, again.log_emission)
    assert torch.equal(first.log_transition, again.log_transition)
    assert not torch.allclose(first.log_emission, other.log_emission)
    assert not first.log_emission.requires_grad
    assert first.window == WINDOW


def test_a_run_by_the_clock_ends_with_it():
    asked = []

    def clock(step):
        asked.append(step)
        return step / 4

    training.train_circuit(network(), MASK, rows_of_pairs, SETTINGS, done=clock)
    assert asked == [0, 1, 2, 3, 4]


def test_the_learning_rate_falls_to_zero():
    rates = [training._learning_rate(step, step / 100, SETTINGS) for step in range(101)]
    assert rates[0] < rates[4] <= SETTINGS.lr
    assert all(a > b for a, b in itertools.pairwise(rates[5:]))
    assert rates[-1] == 0


@pytest.mark.parametrize("block_share", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("rows", [QUESTIONS, prose(40, 45)], ids=["questions", "prose"])
def test_windows_lie_in_one_text_and_hold_masks(rows, block_share):
    _, segments, scored = to_tensors(rows, CPU)
    settings = CircuitSettings(window=WINDOW, block_share=block_share, windows=3)
    phases, found = set(), 0
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        hidden, may_begin = training.mask_rows(segments, scored, int(segments.max()) + 1, settings, generator)
        starts, useful = training.pick(may_begin, 3, generator)
        assert not (hidden & ~scored).any()
        for row, slot in useful.nonzero().tolist():
            begin = int(starts[row, slot])
            here = slice(begin, begin + WINDOW)
            text = (segments[row] == segments[row, begin]) & scored[row]
            assert text[here].all()
            assert hidden[row, here].any()
            answer = int(text.nonzero()[0])
            if rows is QUESTIONS:
                # Answers of full blocks are cut from where they begin; the odd one has no block to itself.
                assert (begin - answer) % WINDOW == 0
            phases.add((begin - answer) % WINDOW)
            if block_share == 1.0 and begin - answer >= WINDOW:
                assert not hidden[row, answer:begin].any()
            if block_share == 1.0:
                assert hidden[row, begin + WINDOW :][text[begin + WINDOW :]].all()
            found += 1
    assert found > 100
    assert len(phases) == (1 if rows is QUESTIONS else WINDOW)


def test_the_network_is_asked_about_texts_by_themselves():
    backbone = network(vocab_size=30)
    tokens, segments, scored = to_tensors(QUESTIONS, CPU)
    generator = torch.Generator().manual_seed(0)
    settings = CircuitSettings(window=WINDOW)
    hidden, may_begin = training.mask_rows(segments, scored, int(segments.max()) + 1, settings, generator)
    starts, useful = training.pick(may_begin, 2, generator)
    windows = training.look(backbone, 29, training.Shown(tokens, segments, hidden), (starts, useful), WINDOW)
    assert (windows.logits[..., 29] == -torch.inf).all()
    first = segment_starts(segments)
    for row, slot in useful.nonzero().tolist()[:20]:
        begin, number = int(starts[row, slot]), 2 * row + slot
        text = segments[row] == segments[row, begin]
        shown = torch.where(hidden, 29, tokens)[row, text]
        at = begin - int(first[row, begin])
        alone = backbone(shown[None])[0, at : at + WINDOW, :29]
        torch.testing.assert_close(windows.logits[number, :, :29], alone, atol=1e-4, rtol=1e-4)
        assert torch.equal(windows.tokens[number], tokens[row, begin : begin + WINDOW])
        assert torch.equal(windows.masked[number], hidden[row, begin : begin + WINDOW])


@pytest.mark.parametrize("rows", [packed([(5, 16), (3, 8)] * 20, 48), prose(40, 45)], ids=["questions", "prose"])
def test_held_out_blocks(rows):
    backbone = network(vocab_size=30)
    neutral = flat(backbone.vocab_size)
    scores = held_out(backbone, backbone.vocab_size - 1, neutral, rows, at_once=7)
    assert [score.tokens for score in scores.values()] == [
        round(ratio * WINDOW) * len(rows.tokens) for ratio in training.RATIOS
    ]
    for score in scores.values():
        assert score.coupled == pytest.approx(score.factorized, abs=1e-5)
    assert scores == held_out(backbone, backbone.vocab_size - 1, neutral, rows, at_once=7)


def test_a_block_is_masked_with_all_to_its_right():
    _, segments, scored = to_tensors(packed([(2, 8), (1, 4)], 16), CPU)
    hidden = training._mask_block(segments, scored, torch.tensor([[2]]), torch.tensor([[True, False, False, True]]))
    assert hidden[0].nonzero().flatten().tolist() == [2, 5, 6, 7, 8, 9]


def test_rows_shorter_than_a_window_are_refused():
    with pytest.raises(InvalidInput, match="no window of 8"):
        held_out(network(), MASK, flat(VOCAB), prose(2, 7))
