"""Saved circuits whose configuration or tensors are changed: what is said when they are read."""

import dataclasses
import math

import pytest
import torch

from codd.circuits import HMM, Factors, Head, HeadConfig, Modulated, load_circuit, storage
from codd.errors import CoddError, FormatError, InvalidCircuit
from tests.support.strategies import make_hmm, shape_checks

N, V, R, D = 4, 6, 3, 8
GONE = object()


def factored() -> HMM:
    return HMM.from_factors(Factors.near_neutral(N, V, emission_rank=2, inner_states=R, noise=1.0))


BASES = {
    "hmm": lambda: make_hmm("dense"),
    "factors": factored,
    "modulated": lambda: Modulated(factored(), Head(HeadConfig(D, N, R))),
}
HEAD = dataclasses.asdict(HeadConfig(D, N, R))
NO_NUMBERS = ("x", 0, -3, 2.0, True, [4], 10**30)
NO_HEADS = (
    *(GONE, "wide", {}, {"features": D}, {**HEAD, "colour": 1}, {**HEAD, "features": "many"}),
    *({**HEAD, "features": -20}, {**HEAD, "dropout": 7.0}, {**HEAD, "states": N + 1}),
    {**HEAD, "hidden": 2**40},  # which would take more memory than there is
)
DAMAGED = [
    ("hmm", {"circuit": "tree"}, {}, FormatError, "type 'tree': known are 'hmm', 'modulated', 'graph'"),
    *(("hmm", {}, {name: GONE}, FormatError, f"no tensor '{name}") for name in ("log_initial", "log_emission")),
    ("hmm", {}, {"log_transition": GONE}, FormatError, "no tensor 'log_transition"),
    ("hmm", {}, {"log_emission": torch.zeros(3, 4).double()}, InvalidCircuit, "log_emission sums to 4"),
    *((base, {"window": x}, {}, FormatError, "window must be") for base in ("hmm", "factors") for x in NO_NUMBERS),
    ("factors", {}, {"emission_left": GONE}, FormatError, "no tensor 'emission_left'"),
    ("factors", {}, {"emission_left": torch.zeros(5, 2)}, InvalidCircuit, "emission of 4 states"),
    ("factors", {}, {"initial_logits": torch.full((N,), math.nan)}, InvalidCircuit, "log_initial holds NaN"),
    ("factors", {}, {"detour_share": torch.full((N,), math.nan)}, InvalidCircuit, "NaN"),
    ("modulated", {}, {"head.latents.weight": GONE}, FormatError, "head's tensors do not fit .*latents.weight"),
    ("modulated", {}, {"head.more": torch.zeros(1)}, FormatError, "head's tensors do not fit .*more"),
    ("modulated", {}, {"head.gates.bias": torch.zeros(R + 1)}, FormatError, "tensors do not fit .*gates.bias"),
    ("modulated", {}, {"head.gates.bias": torch.full((R,), math.nan)}, FormatError, "head's gates.bias holds NaN"),
    ("modulated", {}, {"emission_left": GONE}, FormatError, "no tensor 'emission_left'"),
    ("modulated", {}, {"initial_logits": GONE}, FormatError, "no tensor 'log_transition"),
    *(("modulated", {"head": head}, {}, CoddError, "head") for head in NO_HEADS),
]


def changed(given: dict, changes: dict) -> dict:
    return {name: x for name, x in {**given, **changes}.items() if x is not GONE}


@pytest.mark.parametrize(("base", "config", "tensors", "error", "words"), DAMAGED)
def test_what_is_damaged_is_named_in_one_line(base, config, tensors, error, words, tmp_path):
    good = storage.read_folder(BASES[base]().save(tmp_path / "good"))
    storage.write_folder(tmp_path / "bad", changed(good[0], config), changed(good[1], tensors))
    with shape_checks(False), pytest.raises(error, match=words) as caught:
        load_circuit(tmp_path / "bad")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "other"), [(HMM, "modulated"), (Modulated, "factors")])
def test_each_class_reads_its_own_kind(kind, other, tmp_path):
    made = BASES[other]()
    made.save(tmp_path)
    with pytest.raises(FormatError, match=rf"type '{made.kind}', expected '{kind.kind}': use codd\.load_circuit"):
        kind.load(tmp_path)
    assert type(load_circuit(tmp_path)) is type(made)
