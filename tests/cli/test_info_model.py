"""What ``codd info`` says of backbones, and that nothing but their headers is read for it."""

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from codd import files
from codd.backbones import loading, mini, weights
from codd.circuits import HMM, Head, HeadConfig, Modulated
from codd.cli import main
from tests.support import FIXTURES, checkpoints, cli
from tests.support.checkpoints import copy_of, edit_config, edit_weights
from tests.support.cli import printed_json

ROTARY = "rotary_emb.inv_freq"

# Of some families (of all: tests/backbones), the fields of config.json: family, layers, width, heads, maximal length.
HUB = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
FIELDS = {
    "llada_gqa_sharded": ("llada", "n_layers", "d_model", "n_heads", "max_sequence_length"),
    "dream_tied": ("dream", *HUB),
    "mdlm": ("mdlm", "n_blocks", "hidden_dim", "n_heads", "model_length"),
    "sedd": ("sedd", "n_blocks", "hidden_size", "n_heads", "length"),
    "fastdllm_v2_tied_sharded": ("fast_dllm", *HUB),
    "llada2_moe": ("llada2", *HUB),
    "stable_diffcoder_sharded": ("stable_diffcoder", *HUB),
}
TIED = ("dream_tied", "fastdllm_v2_tied_sharded")
BLOCKS = {"fast_dllm": 32, "llada2": 32, "stable_diffcoder": 4}
"""The published ones."""
ASSUMED = {"llada2_moe": {"block_size": 32}, "stable_diffcoder_sharded": {"mask_token_id": 5, "block_size": 4}}
"""What the files leave out, if the vocabulary has such a mask."""


def described(capsys, *arguments: object, code: int = 0) -> dict[str, Any]:
    return printed_json(capsys, "info", *arguments, code=code)


def shown(capsys, *arguments: object, code: int = 0) -> dict[str, str]:
    """The lines for people, by their names."""
    assert main(["info", *map(str, arguments)]) == code
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    width = max(line.index("  ", 2) for line in lines)
    return {line[2:width].strip(): line[width:].strip() for line in lines}


def refused(capsys, *arguments: object) -> str:
    return cli.refused(capsys, "info", *arguments)


def headers(folder: Path) -> dict[str, dict[str, object]]:
    """All tensors of a folder's model files, read by the letter of the format."""
    found = {}
    for path in folder.glob("model*.safetensors"):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        found |= json.loads(data[8 : 8 + length])
    found.pop("__metadata__", None)
    return found


def count(tensors: dict[str, dict[str, object]]) -> int:
    return sum(math.prod(header["shape"]) for header in tensors.values())


def config_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())


def random_mini(folder: Path, *, int8: bool = False, **changes: object) -> Path:
    return mini.save(checkpoints.random_mini(**changes), folder, int8=int8)


@pytest.fixture
def llada(tmp_path):
    return copy_of("llada_mha", tmp_path)


@pytest.fixture
def sharded(tmp_path):
    return copy_of("llada_gqa_sharded", tmp_path)


@pytest.mark.parametrize("name", FIELDS)
def test_families(name, capsys):
    folder = FIXTURES / name
    config, tensors = config_of(folder), headers(folder)
    family, layers, width, heads, length = FIELDS[name]
    sizes = config["model"] if family == "sedd" else config
    used = {key: header for key, header in tensors.items() if not key.endswith(ROTARY)}
    masks = {"sedd": config.get("tokens"), "mdlm": config.get("vocab_size", 0) - 1}
    masks |= {"stable_diffcoder": 5}
    blocks = config.get("block_size") or config.get("bd_size")
    pad = config.get("pad_token_id")
    found = described(capsys, folder)
    mlp_width = found.pop("mlp_width")
    if not config.get("num_experts") or family == "llada2":  # all layers of others have experts
        assert any(mlp_width in header["shape"] or 2 * mlp_width in header["shape"] for header in used.values())
    assert found == {
        "path": str(folder),
        "kind": "backbone",
        "family": family,
        "bundled": False,
        "folder": str(folder),
        "parameters": count(used),
        "layers": sizes[layers],
        "width": sizes[width],
        "heads": sizes[heads],
        "kv_heads": config.get("n_kv_heads") or config.get("num_key_value_heads") or sizes[heads],
        "causal": False,
        "block_size": blocks or BLOCKS.get(family),
        "experts": config.get("num_experts"),
        "tied": name in TIED or bool(config.get("weight_tying")),
        "vocab_size": config["tokens"] + 1 if family == "sedd" else config.get("embedding_size", config["vocab_size"]),
        "max_length": sizes[length],
        "assumed": ASSUMED.get(name),
        "mask_id": config.get("mask_token_id", masks.get(family)),
        "eos_id": config.get("eos_token_id", pad if family == "llada2" else None),
        "pad_id": pad,
        "bos_id": config.get("bos_token_id"),
        "mask_token": None,
        "tokenizer": None,
        "circuit": None,
        "static_circuit": None,
        "dtypes": {"bfloat16" if used.popitem()[1]["dtype"] == "BF16" else "float32": found["parameters"]},
        "shards": len(list(folder.glob("model*.safetensors"))),
        "tensors": sum(not key.endswith(ROTARY) for key in tensors),
        "unused_tensors": [key for key in tensors if key.endswith(ROTARY)] or None,
        "bytes": sum(path.stat().st_size for path in folder.glob("model*.safetensors")),
        "sha256": None,
        "sha256_matches": None,
    }


def test_the_bundled_model(capsys):
    folder = loading.BUNDLED
    config, tensors = config_of(folder), headers(folder)
    matrices = {key: header for key, header in tensors.items() if header["dtype"] == "I8"}
    others = {k: header for k, header in tensors.items() if header["dtype"] == "F32" and not k.endswith("_scale")}
    found = described(capsys)
    assert found == described(capsys, folder)
    assert found["path"] == found["folder"] == str(folder)
    assert (found["family"], found["bundled"]) == ("mini", True)
    assert found["parameters"] == count(matrices) + count(others)
    assert found["dtypes"] == {"int8": count(matrices), "float32": count(others)}
    assert (found["tensors"], found["unused_tensors"]) == (len(matrices) + len(others), None)
    for ours, stated in (("mask_id", "mask_token_id"), ("eos_id", "eos_token_id"), ("pad_id", "pad_token_id")):
        assert found[ours] == config[stated]
    for field in ("vocab_size", "width", "layers", "heads", "kv_heads", "mlp_width", "max_length", "sha256"):
        assert found[field] == config[field]
    assert found["sha256"] == files.sha256(folder / "model.safetensors")
    assert found["sha256_matches"] is True
    size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    assert found["mask_token"] == "<|mask|>"
    assert found["tokenizer"] == {"kind": "BPE", "vocab_size": size, "chat_template": "own"}


def test_text(capsys):
    lines = shown(capsys, "--check")
    assert lines["parameters"] == f"{described(capsys)['parameters']:,}"
    assert (lines["family"], lines["bundled"], lines["experts"], lines["checked"]) == ("mini", "yes", "none", "yes")
    assert lines["bytes"].startswith("26.9 MB (")
    assert lines["circuit"].startswith("kind modulated, vocab_size 8,192, window 32, num_states 640, ")
    assert shown(capsys, FIXTURES / "llada_gqa_sharded")["dtypes"].startswith("bfloat16 ")


def test_the_heads_of_other_tasks_are_not_counted(tmp_path, capsys):
    folder = copy_of("bert", tmp_path)
    counted = described(capsys, folder)["parameters"]
    heads = [f"bert.pooler.dense.{kind}" for kind in ("bias", "weight")] + ["species.layers.3.weight"]
    edit_weights(folder, **{name: torch.ones(2) for name in heads})
    found = described(capsys, folder)
    assert (found["parameters"], found["unused_tensors"]) == (counted, [*heads[:2], "species.layers.*.weight"])


def test_a_causal_model_needs_no_mask(tmp_path, capsys):
    found = described(capsys, random_mini(tmp_path, causal=True, mask_token_id=None))
    assert (found["causal"], found["mask_id"]) == (True, None)


def test_nothing_is_read_but_headers(sharded, capsys, monkeypatch):
    class HeadersOnly:
        def __init__(self, *arguments, **options):
            self.file = safe_open(*arguments, **options)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *raised):
            return self.file.__exit__(*raised)

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            return self.file.get_slice(name)

    monkeypatch.setattr(files, "safe_open", HeadersOnly)
    assert described(capsys, sharded)["family"] == "llada"


# Tokenizers.


def save_tokenizer(folder: Path, size: int, **config: object) -> None:
    vocab = {f"t{i}": i for i in range(size)}
    Tokenizer(models.WordLevel(vocab, unk_token="t0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_tokenizer_fills_in_what_the_configuration_does_not_say(tmp_path, capsys):
    folder = copy_of("bert", tmp_path)
    save_tokenizer(folder, 120, mask_token="t103", pad_token="t7", chat_template="{{ messages }}")
    found = described(capsys, folder)
    assert (found["mask_id"], found["pad_id"], found["eos_id"]) == (103, 0, None)
    assert found["mask_token"] == "t103"
    assert found["tokenizer"] == {"kind": "WordLevel", "vocab_size": 120, "chat_template": "own"}


def test_the_family_has_a_chat_template(llada, capsys):
    size = config_of(llada)["embedding_size"]
    save_tokenizer(llada, size + 3)
    assert described(capsys, llada)["tokenizer"]["chat_template"] == "family"


# Circuits.


def test_its_circuit(tmp_path, capsys):
    folder = random_mini(tmp_path)
    HMM.random(4, 60, length=8).save(folder / "circuit")
    alone = described(capsys, folder / "circuit")
    found = described(capsys, folder, "--check")
    assert {"path": str(folder / "circuit"), **found["circuit"]} == alone
    assert found["checked"] is True


@pytest.mark.parametrize(
    ("name", "field", "circuit"),
    [
        ("circuit", "circuit", HMM.random(4, 61)),
        ("circuit-static", "static_circuit", Modulated(HMM.random(4, 60), Head(HeadConfig(33, 4)))),
    ],
)
def test_a_circuit_that_does_not_belong_to_it(name, field, circuit, tmp_path, capsys):
    folder = random_mini(tmp_path)
    circuit.save(folder / name)
    assert described(capsys, folder, code=1)[field]["vocab_size"] == circuit.vocab_size
    line = shown(capsys, folder, code=1)[field]
    assert line.endswith(f"it DOES NOT BELONG to a model of 60 tokens that is 32 wide: remove the folder {name}/")


def test_both_of_its_circuits(tmp_path, capsys):
    folder = random_mini(tmp_path)
    Modulated(HMM.random(4, 60), Head(HeadConfig(32, 4))).save(folder / "circuit")
    HMM.random(3, 60).save(folder / "circuit-static")
    found = described(capsys, folder)
    assert (found["circuit"]["kind"], found["static_circuit"]["kind"]) == ("modulated", "hmm")


def test_a_circuit_that_was_changed(tmp_path, capsys):
    folder = random_mini(tmp_path)
    HMM.random(4, 60, seed=0).save(folder / "circuit")
    HMM.random(4, 60, seed=1).save(tmp_path / "other")
    (tmp_path / "other" / "circuit.safetensors").replace(folder / "circuit" / "circuit.safetensors")
    assert described(capsys, folder, code=1)["circuit"]["sha256_matches"] is False
    assert "its sha256 DOES NOT MATCH" in shown(capsys, folder, code=1)["circuit"]


# The hub.


def test_a_hub_id(sharded, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(files, "_download", lambda repo_id, wanted, revision: asked.append(wanted) or sharded)
    found = described(capsys, "someone/model")
    assert asked == [("config.json", "adapter_config.json"), loading.CHECKPOINT_FILES]
    assert (found["path"], found["folder"], found["family"]) == ("someone/model", str(sharded), "llada")
    assert shown(capsys, "someone/model")["folder"] == str(sharded)


def test_weights_of_an_unknown_family_are_not_downloaded(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    asked = []
    monkeypatch.setattr(files, "_download", lambda repo_id, wanted, revision: asked.append(wanted) or tmp_path)
    assert "model_type 'gpt2' is of no family that codd knows; use one of llada" in refused(capsys, "openai/gpt2")
    assert asked == [("config.json", "adapter_config.json")]


# What is wrong with a checkpoint: one line that names the file and says what to do.


def test_weights_that_do_not_belong_to_the_configuration(tmp_path, capsys):
    folder = random_mini(tmp_path)
    edit_weights(folder, **{"final_norm.weight": torch.full((32,), 2.0)})
    found = described(capsys, folder, code=1)
    assert (found["sha256"], found["sha256_matches"]) == (config_of(folder)["sha256"], False)
    assert "DOES NOT MATCH the weights" in shown(capsys, folder, code=1)["sha256"]
    edit_config(folder, sha256=float("nan"))
    assert described(capsys, folder, code=1)["sha256_matches"] is False


NORM = "model.transformer.ln_f.weight"
DAMAGE: list[tuple[Callable[[Path], object], str]] = [  # what else loading refuses: tests/backbones/test_weights.py
    (lambda at: edit_config(at, n_layers=4), "lacks 'model.transformer.blocks.3.attn_norm.weight'"),
    (
        lambda at: edit_config(at, model_type="gpt2", architectures=[], auto_map={}),
        "of no family that codd knows; use one of llada",
    ),
    (lambda at: edit_weights(at, **{NORM: torch.ones(3)}), f"{NORM} has shape (3,), but config.json"),
    (lambda at: (at / "tokenizer.json").write_text("{"), "tokenizer.json"),
    (lambda at: (at / "circuit").mkdir(), "circuit/config.json"),
    (lambda at: (at / "config.json").unlink(), "has no config.json; expected a circuit folder"),
    (lambda at: (at / "config.json").write_text("["), "is not JSON"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_a_damaged_checkpoint_is_one_line(damage, words, llada, capsys):
    damage(llada)
    message = refused(capsys, llada)
    assert str(llada) in message
    assert words in message


def test_values_that_are_not_finite(llada, capsys):
    name = "model.transformer.blocks.1.ff_out.weight"
    tensor = load_file(llada / "model.safetensors")[name]
    tensor[-1, -1] = float("nan")
    edit_weights(llada, **{name: tensor})
    assert described(capsys, llada)["family"] == "llada"
    message = refused(capsys, llada, "--check")
    assert f"{llada / 'model.safetensors'}: {name} has NaN or infinite values" in message
    assert "download it again or use an earlier checkpoint" in message


def test_scales_and_every_chunk_are_checked(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(weights, "CHUNK", 7)
    folder = random_mini(tmp_path, int8=True)
    assert described(capsys, folder, "--check")["checked"] is True
    name = "blocks.1.mlp.down.weight_scale"
    scale = load_file(folder / "model.safetensors")[name]
    scale[-1] = float("nan")
    edit_weights(folder, **{name: scale})
    assert name in refused(capsys, folder, "--check")


def test_floats_of_eight_bits_can_be_checked(tmp_path, capsys):
    folder = random_mini(tmp_path)
    edit_weights(folder, **{"final_norm.weight": torch.ones(32).to(torch.float8_e4m3fn)})
    found = described(capsys, folder, "--check", code=1)  # another sha256 than the stated one
    assert found["checked"] is True
    assert found["dtypes"]["float8_e4m3fn"] == 32
