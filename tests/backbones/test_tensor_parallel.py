"""A network divided between two processes is the network."""

import json

import pytest
import torch
from safetensors.torch import load_file

import codd
from codd.backbones.experts import ExpertsConfig
from codd.backbones.tensor_parallel import Partition, ShardedTransformer, misfits
from codd.backbones.transformer import TransformerConfig
from codd.errors import InvalidInput
from tests.support import tensor_parallel_run as run
from tests.support.checkpoints import FIXTURES, backbone
from tests.support.two_processes import run_in_two_processes

TOLERANCE = 1e-4
"""Float32 sums in another order; the largest difference is 1.5e-5."""


def test_two_processes_compute_what_one_does(tmp_path):
    stdout, stderr = run_in_two_processes(str(tmp_path), program=["-m", run.__name__], threads=torch.get_num_threads())
    found = load_file(tmp_path / "found.safetensors")
    for name in run.LAYOUTS:
        wanted = run.logits(name)
        assert found.pop(f"{name}.held") < wanted.pop(f"{name}.held")
        assert len(wanted) > 0
        for case, logits in wanted.items():
            own = found.pop(case)
            possible = logits > -1e5  # MDLM and SEDD write log 0 as about -1e6
            assert torch.equal(possible, own > -1e5)
            worst = float((own - logits).abs()[possible].max())
            print(f"{case}: largest difference {worst:.1e}")
            assert worst <= TOLERANCE, case
    for name in run.DECODED:
        for prompt, ids in run.sequences(name).items():
            assert found.pop(prompt).tolist() == ids.tolist(), prompt
    assert not found
    sdar = codd.load(FIXTURES / "decode_sdar", device="cpu", dtype=torch.float64)
    written = sdar.generate(run.PROMPTS[:1], gen_length=8).completions[0]
    assert json.loads(stdout)["ids"] == written.tolist()  # one of the two has printed
    assert stderr.count("left:") == 2
    assert "gloo" not in stderr, "a thread that outlives the interpreter aborts the process when it drops a tensor"


def test_each_process_holds_half():
    config = backbone("llada_mha").config
    with torch.device("meta"):
        part = ShardedTransformer(config, Partition(1, 2))
    sizes = {name: parameter.numel() for name, parameter in part.named_parameters()}
    for name, parameter in backbone("llada_mha").network.named_parameters():
        shared = "norm" in name or name.startswith("embedding")
        assert sizes[name] * (1 if shared else 2) == parameter.numel(), name


@pytest.mark.parametrize(
    ("processes", "how", "message"),
    [
        ("1", {}, "this is the only one: start several, one for each GPU, with torchrun"),
        ("3", {}, "3 processes cannot share 4 attention heads and 160 columns in an MLP and 4 key heads evenly: start"),
        ("2", {"quantize": "int8"}, "quantize changes whole weights, of which tensor_parallel has parts"),
        ("2", {"adapter": "somewhere"}, "adapter changes whole weights, of which tensor_parallel has parts"),
    ],
)
def test_what_cannot_be_divided(monkeypatch, processes, how, message):
    monkeypatch.setenv("WORLD_SIZE", processes)
    with pytest.raises(InvalidInput, match=message):
        codd.load(FIXTURES / "llada_mha", device="cpu", tensor_parallel=True, **how)


def test_experts_and_key_heads_that_do_not_divide():
    experts = ExpertsConfig(count=8, chosen=2, width=12, layers=(True, True), shared_width=8)
    config = TransformerConfig(64, 32, 2, heads=24, kv_heads=2, mlp_width=1, experts=experts)
    assert misfits(config, 2) == misfits(config, 4) == []  # no layer has an MLP; four processes share two key heads
    assert misfits(config, 3) == ["8 columns in a shared expert", "2 key heads"]
    assert misfits(config, 8) == ["12 columns in an expert"]
