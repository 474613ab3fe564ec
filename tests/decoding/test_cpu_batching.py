"""Sequences that are decided together are decided as each is alone, to the bit."""

import functools
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import codd
from codd.circuits import hmm
from codd.circuits.ops import native
from codd.circuits.protocol import ProbabilisticCircuit
from codd.decoding.accelerate import cpu_batching
from codd.decoding.accelerate.cpu_batching import map_sequences
from codd.decoding.options import Options
from codd.decoding.schedule import plan_steps
from codd.decoding.start import new_sequence
from codd.decoding.state import HiddenStates, SequenceState, StepInputs, StepResult
from codd.decoding.step import masked_positions, run_step
from codd.errors import InvalidInput
from tests.support.tiny_models import MASK, VOCAB, detouring, modulated, random_hmm, tiny

needs_library = pytest.mark.skipif(native.library() is None, reason="without a compiler nothing is shared")
PACES = {
    "count": {"sampler": "any_order", "steps": 8},
    "threshold": {"sampler": "any_order", "threshold": 0.3},
    "entropy": {"sampler": "any_order", "entropy_budget": 1.5, "temperature": 0.8},
    "latent": {"sampler": "latent", "steps": 8},
}
CIRCUITS = {
    "static": lambda: random_hmm(40),
    "modulated": lambda: modulated(random_hmm(40), scale=0.5),
    "gated": lambda: modulated(detouring(), inner_states=4, scale=0.7),
}


@functools.cache
def bundled() -> codd.Model:
    return codd.load(device="cpu")


def inputs(states: Tensor, logits: Tensor, state: SequenceState, circuit: ProbabilisticCircuit) -> StepInputs:
    plan = next(plan_steps(state))
    positions = masked_positions(state, plan)
    features = None if circuit.feature_width is None else HiddenStates(0, states)
    return StepInputs(state, plan, positions, logits[positions], features, circuit)


@torch.no_grad()
def cases(count: int, circuit, backbone, vocab: int, mask: int, **options) -> list[StepInputs]:
    """Sequences of different lengths, of which some places after the prompt are filled already."""
    chosen, made = Options.of(block_length=options["gen_length"], **options), []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(3, vocab - 3, (2 + number,), generator=generator).tolist()
        state = new_sequence(prompt, chosen, mask_id=mask, seed=number, number=number)
        known = len(prompt) + torch.randperm(chosen.gen_length, generator=generator)[: number % 4]
        state.commit(known, torch.randint(3, vocab - 3, (len(known),), generator=generator))
        states = backbone.states(state.ids[None])
        logits = backbone.logits(states, state.ids[None])[0].index_fill(-1, torch.tensor([mask]), -torch.inf)
        made.append(inputs(states[0], logits, state, circuit))
    return made


def small(count: int, circuit: str, pace: str) -> list[StepInputs]:
    return cases(count, CIRCUITS[circuit](), tiny(), VOCAB, MASK, gen_length=12, **PACES[pace])


def alone(given: list[StepInputs]) -> list[StepResult]:
    return [run_step(case) for case in given]


def check(got: list[StepResult], want: list[StepResult]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.circuit
        assert torch.equal(a.packed, b.packed)
        assert (a.origin, a.window, a.mask_ratio) == (b.origin, b.window, b.mask_ratio)


@pytest.fixture
def met(monkeypatch):
    """Small circuits meet, too; how many walks each call of C did."""
    counts, real = [], native.run_passes

    def noted(walks):
        counts.append(len(walks))
        real(walks)

    monkeypatch.setattr(hmm, "MEMORY_BOUND_STATES", 1)
    monkeypatch.setattr(native, "run_passes", noted)
    return counts


@needs_library
@pytest.mark.parametrize(
    ("circuit", "pace", "count"),
    [
        *((circuit, pace, 3) for circuit in CIRCUITS for pace in PACES),
        ("static", "count", 1),
        ("gated", "latent", 1),
        ("static", "threshold", 9),
        ("modulated", "entropy", 9),
        ("gated", "latent", 9),
    ],
)
@torch.no_grad()
def test_a_sequence_is_decided_alike_alone_and_in_a_crowd(circuit, pace, count, met):
    want = alone(small(count, circuit, pace))
    met.clear()
    check(map_sequences(run_step, small(count, circuit, pace)), want)
    assert (max(met, default=0) > 1) == (count > 1 and circuit != "gated")


@needs_library
@pytest.mark.parametrize("pace", ["count", "threshold"])
@torch.no_grad()
def test_the_bundled_model_decides_alike_alone_and_in_a_crowd(pace, monkeypatch):
    model, largest = bundled(), []
    real = native.run_passes
    monkeypatch.setattr(native, "run_passes", lambda walks: (largest.append(len(walks)), real(walks))[1])

    def given(count: int) -> list[StepInputs]:
        chosen = PACES[pace] | ({"steps": 8} if pace == "count" else {})
        return cases(count, model.circuit, model.backbone, 8192, model.mask_id, gen_length=16, **chosen)

    want = alone(given(4))
    assert max(largest) == 1
    check(map_sequences(run_step, given(4)), want)
    assert max(largest) > 1


@needs_library
@pytest.mark.parametrize("threads", [1, 2])
@torch.no_grad()
def test_other_threads_compute_with_as_many_cores(threads, met):
    """Matrix products have other bits with another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seen = map_sequences(lambda case: (torch.get_num_threads(), threading.get_ident()), small(4, "static", "count"))
    finally:
        torch.set_num_threads(before)
    assert {cores for cores, _ in seen} == {threads}


@needs_library
@torch.no_grad()
def test_the_mode_of_the_caller_is_that_of_all(met):
    given = small(4, "static", "count")
    assert map_sequences(lambda case: torch.is_grad_enabled(), given) == [False] * 4
    with torch.enable_grad():
        assert map_sequences(lambda case: torch.is_grad_enabled(), given) == [True] * 4
    with torch.inference_mode():
        assert map_sequences(lambda case: torch.is_inference_mode_enabled(), given) == [True] * 4


@needs_library
@torch.no_grad()
def test_one_that_fails_does_not_disturb_the_others(met):
    """One at once, one on the way (its logits are NaN), one after all of its walks."""
    want, done = alone(small(7, "static", "count")), {}
    given = small(7, "static", "count")
    given[3] = replace(given[3], logits=torch.full_like(given[3].logits, torch.nan))

    def decided(case: StepInputs) -> StepResult:
        number = case.state.number
        if number == 5:
            raise InvalidInput("at once")
        found = run_step(case)
        if number == 1:
            raise InvalidInput("at the end")
        done[number] = found
        return found

    with pytest.raises(InvalidInput, match="at the end"):
        map_sequences(decided, given)
    assert sorted(done) == [0, 2, 4, 6]
    check([done[number] for number in sorted(done)], [want[number] for number in sorted(done)])


@needs_library
@torch.no_grad()
def test_a_machine_without_threads_to_give_does_it_in_those_that_it_has(met, monkeypatch):
    want, started = alone(small(5, "static", "count")), []

    class Few(threading.Thread):
        def start(self) -> None:
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
            started.append(self)
            super().start()

    monkeypatch.setattr(cpu_batching, "Thread", Few)
    check(map_sequences(run_step, small(5, "static", "count")), want)
    assert len(started) == 2
    assert max(met) == 3


def told(case: StepInputs, options: Options) -> StepInputs:
    return replace(case, state=replace(case.state, options=options))


@torch.no_grad()
def test_what_does_not_walk_stays_in_its_thread(monkeypatch):
    """Circuits that are small, factorized sampling, and a list of anything else."""
    here = {threading.get_ident()}

    def where(case: object) -> int:
        return threading.get_ident()

    assert set(map_sequences(where, small(3, "static", "count"))) == here
    monkeypatch.setattr(hmm, "MEMORY_BOUND_STATES", 1)
    plain = Options.of(sampler="factorized", steps=8)
    assert set(map_sequences(where, [told(case, plain) for case in small(3, "static", "count")])) == here
    assert set(map_sequences(where, ["a", "b", "c"])) == here
    monkeypatch.setattr(native, "library", lambda: None)
    assert set(map_sequences(where, small(3, "static", "count"))) == here
    assert map_sequences(where, []) == []


def test_errors_wait_for_the_rest_and_values_may_be_errors():
    done = []

    def function(case: int) -> Exception:
        done.append(case)
        if case % 2:
            raise ValueError(str(case))
        return KeyError(case)

    with pytest.raises(ValueError, match="1"):
        map_sequences(function, [0, 1, 2, 3])
    assert done == [0, 1, 2, 3]
    assert [type(x) for x in map_sequences(function, [0, 2])] == [KeyError, KeyError]
