import json

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from codd.circuits import HMM, ops
from codd.circuits.storage import CONFIG_FILE
from codd.errors import InvalidCircuit
from tests.support.strategies import LAYOUTS, generator, make_evidence, make_hmm


def tensors_of(hmm: HMM) -> list[Tensor]:
    return [hmm.log_initial, *hmm.transition.log_factors, hmm.emission.stored]


def assert_identical(found: HMM, wanted: HMM) -> None:
    assert repr(found) == repr(wanted)
    for a, b in zip(tensors_of(found), tensors_of(wanted), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_loaded_is_bit_identical(layout, dtype, tmp_path):
    compact = dtype == torch.bfloat16
    hmm = make_hmm(layout, dtype=torch.float32 if compact else dtype)
    hmm = hmm.to(emission=torch.bfloat16) if compact else hmm
    assert hmm.save(tmp_path / "circuit") == tmp_path / "circuit"
    assert_identical(HMM.load(tmp_path / "circuit"), hmm)
    assert_identical(HMM.load(str(tmp_path / "circuit"), device="cpu"), hmm)


def test_the_configuration_says_what_the_circuit_is(tmp_path):
    HMM.random(3, 5, length=4).save(tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert (config["circuit"], config["num_states"], config["vocab_size"], config["window"]) == ("hmm", 3, 5, 4)


# Types.


def test_to_another_type_and_back():
    hmm = make_hmm("low_rank", dtype=torch.float32)
    assert hmm.to(dtype=torch.float64).dtype == torch.float64
    assert_identical(hmm.to(dtype=torch.float64).to(dtype=torch.float32), hmm)
    assert_identical(hmm.to("cpu"), hmm)
    assert hmm.to("meta").device.type == "meta"


def test_bfloat16_emissions_are_rounded_probabilities():
    hmm = HMM.random(4, 50, seed=1)
    small = hmm.to(emission=torch.bfloat16)
    assert small.emission.stored.dtype == torch.bfloat16
    assert small.dtype == torch.float32
    assert_close(small.emission.stored.float(), hmm.log_emission.exp(), rtol=2**-8, atol=0)
    assert torch.equal(small.to(emission=torch.bfloat16).emission.stored, small.emission.stored)
    assert_close(small.to(emission=torch.float32).log_emission, small.log_emission, rtol=0, atol=0)


def test_bfloat16_emissions_in_float64_are_the_rounded_ones():
    small = HMM.random(3, 4).to(emission=torch.bfloat16)
    exact = small.to(dtype=torch.float64)
    ev = make_evidence("mixed_all", (3, 4))
    assert exact.log_emission.dtype == torch.float64
    assert_close(small.log_partition(ev).double(), exact.log_partition(ev), rtol=1e-5, atol=1e-5)


def test_bfloat16_emissions_beside_float64_tables_are_refused():
    with pytest.raises(InvalidCircuit, match=r"found torch.float64, torch.float64, torch.bfloat16"):
        HMM.random(3, 4, dtype=torch.float64).to(emission=torch.bfloat16)


@pytest.mark.parametrize("kind", ["observed", "logits", "mixed_sparse", "mixed_all"])
def test_both_backends_serve_bfloat16_emissions(kind):
    hmm, ev = HMM.random(3, 6).to(emission=torch.bfloat16), make_evidence(kind, (2, 4), 3, 6, dtype=torch.float32)
    with ops.use("reference"):
        value, marginals, emission = hmm.log_partition(ev), hmm.marginals(ev), hmm.flows(ev).emission
    # Rounded rows do not sum to one exactly, which the two ways to spread a sparse tail feel.
    near = {"rtol": 2e-3, "atol": 2e-3}
    assert_close(hmm.log_partition(ev), value, **near)
    assert_close(hmm.marginals(ev).exp(), marginals.exp(), **near)
    assert_close(hmm.flows(ev).emission, emission, **near)
    assert hmm.sample(ev, generator=generator(0)).tokens.shape == (2, 4)
