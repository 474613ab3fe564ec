"""Sequences that are decided together are decided as each is alone, to the bit."""

import functools
import threading

import pytest
import torch
from tiny_models import MASK, VOCAB, detouring, modulated, random_hmm, tiny
from torch import Tensor

import codd
from codd.circuits import Modulated
from codd.circuits.ops import native
from codd.decoding import decide, together
from codd.decoding.decide import Asked, Decision
from codd.decoding.draft import Draft, turns
from codd.decoding.options import Options
from codd.errors import InvalidInput

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


def asked(number: int, states: Tensor, logits: Tensor, draft: Draft, circuit, options: Options) -> Asked:
    turn = next(turns(draft, options))
    rows = draft.masked[turn.begin : turn.end].nonzero()[:, 0] + turn.begin
    features = states if isinstance(circuit, Modulated) else None
    return Asked(draft, turn, rows, logits[rows], circuit, options, features)


@torch.no_grad()
def cases(count: int, circuit, backbone, vocab: int, mask: int, **options) -> list[Asked]:
    """Sequences of different lengths, of which some places after the prompt are filled already."""
    chosen, made = Options.of(block_length=options["gen_length"], **options), []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(3, vocab - 3, (2 + number,), generator=generator).tolist()
        draft = Draft.begin(prompt, number, mask, chosen, number)
        known = len(prompt) + torch.randperm(chosen.gen_length, generator=generator)[: number % 4]
        draft.commit(known, torch.randint(3, vocab - 3, (len(known),), generator=generator))
        states = backbone.states(draft.ids[None])
        logits = backbone.logits(states, draft.ids[None])[0].index_fill(-1, torch.tensor([mask]), -torch.inf)
        made.append(asked(number, states[0], logits, draft, circuit, chosen))
    return made


def small(count: int, circuit: str, pace: str) -> list[Asked]:
    return cases(count, CIRCUITS[circuit](), tiny(), VOCAB, MASK, gen_length=12, **PACES[pace])


def alone(given: list[Asked]) -> list[Decision]:
    return [decide.block(case) for case in given]


def check(got: list[Decision], want: list[Decision]) -> None:
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

    monkeypatch.setattr(together, "STATES", 1)
    monkeypatch.setattr(native, "run_passes", noted)
    return counts


@needs_library
@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("circuit", CIRCUITS)
@torch.no_grad()
def test_a_sequence_is_decided_alike_alone_and_in_a_crowd(circuit, pace, count, met):
    want = alone(small(count, circuit, pace))
    met.clear()
    check(together.each(decide.block, small(count, circuit, pace)), want)
    assert (max(met, default=0) > 1) == (count > 1 and circuit != "gated")


@needs_library
@pytest.mark.parametrize("pace", ["count", "threshold"])
@torch.no_grad()
def test_the_bundled_model_decides_alike_alone_and_in_a_crowd(pace, monkeypatch):
    model, largest = bundled(), []
    real = native.run_passes
    monkeypatch.setattr(native, "run_passes", lambda walks: (largest.append(len(walks)), real(walks))[1])

    def given(count: int) -> list[Asked]:
        chosen = PACES[pace] | ({"steps": 16} if pace == "count" else {})
        return cases(count, model.circuit, model.backbone, 8192, model.mask_id, gen_length=32, **chosen)

    want = alone(given(9))
    assert max(largest) == 1
    for count in (3, 9):
        check(together.each(decide.block, given(count)), want[:count])
    assert max(largest) > 1


@needs_library
@pytest.mark.parametrize("threads", [1, 2])
@torch.no_grad()
def test_other_threads_compute_with_as_many_cores(threads, met):
    """Matrix products have other bits with another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seen = together.each(lambda case: (torch.get_num_threads(), threading.get_ident()), small(4, "static", "count"))
    finally:
        torch.set_num_threads(before)
    assert {cores for cores, _ in seen} == {threads}


@needs_library
@torch.no_grad()
def test_the_mode_of_the_caller_is_that_of_all(met):
    given = small(4, "static", "count")
    assert together.each(lambda case: torch.is_grad_enabled(), given) == [False] * 4
    with torch.enable_grad():
        assert together.each(lambda case: torch.is_grad_enabled(), given) == [True] * 4
    with torch.inference_mode():
        assert together.each(lambda case: torch.is_inference_mode_enabled(), given) == [True] * 4


@needs_library
@torch.no_grad()
def test_one_that_fails_does_not_disturb_the_others(met):
    """One at once, one on the way (its logits are NaN), one after all of its walks."""
    want, done = alone(small(7, "static", "count")), {}
    given = small(7, "static", "count")
    given[3] = given[3]._replace(logits=torch.full_like(given[3].logits, torch.nan))

    def decided(case: Asked) -> Decision:
        number = case.draft.number
        if number == 5:
            raise InvalidInput("at once")
        found = decide.block(case)
        if number == 1:
            raise InvalidInput("at the end")
        done[number] = found
        return found

    with pytest.raises(InvalidInput, match="at the end"):
        together.each(decided, given)
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

    monkeypatch.setattr(together, "Thread", Few)
    check(together.each(decide.block, small(5, "static", "count")), want)
    assert len(started) == 2
    assert max(met) == 3


@torch.no_grad()
def test_what_does_not_walk_stays_in_its_thread(monkeypatch):
    """Circuits that are small, factorized sampling, and a list of anything else."""
    here = {threading.get_ident()}

    def where(case: object) -> int:
        return threading.get_ident()

    assert set(together.each(where, small(3, "static", "count"))) == here
    monkeypatch.setattr(together, "STATES", 1)
    plain = Options.of(sampler="factorized", steps=8)
    assert set(together.each(where, [case._replace(options=plain) for case in small(3, "static", "count")])) == here
    assert set(together.each(where, ["a", "b", "c"])) == here
    monkeypatch.setattr(native, "library", lambda: None)
    assert set(together.each(where, small(3, "static", "count"))) == here
    assert together.each(where, []) == []


def test_errors_wait_for_the_rest_and_values_may_be_errors():
    done = []

    def function(case: int) -> Exception:
        done.append(case)
        if case % 2:
            raise ValueError(str(case))
        return KeyError(case)

    with pytest.raises(ValueError, match="1"):
        together.each(function, [0, 1, 2, 3])
    assert done == [0, 1, 2, 3]
    assert [type(x) for x in together.each(function, [0, 2])] == [KeyError, KeyError]
