"""What ``codd info`` says of circuits, models and adapters, and that nothing but headers is read of a network."""

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from codd import files
from codd.backbones import loading, mini, weights
from codd.circuits import HMM, Factors, Head, HeadConfig, Modulated, storage
from codd.cli import main
from tests.support import FIXTURES, checkpoints, cli
from tests.support.checkpoints import copy_of, edit_config, edit_weights
from tests.support.cli import printed_json


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


# Circuits.


def test_a_circuit(tmp_path, capsys):
    HMM.random(4, 7).save(tmp_path)
    assert described(capsys, tmp_path) == {
        "path": str(tmp_path),
        "kind": "hmm",
        "num_states": 4,
        "vocab_size": 7,
        "window": None,
        "homogeneous": True,
        "parameters": 4 + 16 + 28,
        "tables": {"log_emission": "float32 4x7", "log_initial": "float32 4", "log_transition": "float32 4x4"},
        "bytes": sum(path.stat().st_size for path in tmp_path.iterdir()),
        "format_version": 1,
        "sha256": json.loads((tmp_path / "config.json").read_text())["sha256"],
        "sha256_matches": True,
    }
    lines = shown(capsys, tmp_path)
    assert lines["tables"] == "log_emission float32 4x7, log_initial float32 4, log_transition float32 4x4"
    assert (lines["num_states"], lines["window"], lines["homogeneous"]) == ("4", "none", "yes")


THIN = HMM.from_factors(Factors.near_neutral(4, 7, transition_rank=2, emission_rank=3), window=8)
MODULATED = Modulated(
    HMM.from_factors(Factors.near_neutral(4, 7, inner_states=2), window=8), Head(HeadConfig(6, 4, 2, 5))
)
HEAD = {"features": 6, "states": 4, "inner_states": 2, "hidden": 5, "dropout": 0.0}
WEIGHTS = sum(x.numel() for x in (*MODULATED.head.state_dict().values(), *MODULATED.hmm.stored().values()))
LAYOUTS = {
    "positions": (HMM.random(4, 7, rank=2, length=3), {"window": 3, "homogeneous": False}),
    "thin": (THIN, {"kind": "hmm", "num_states": 4, "window": 8, "parameters": 4 + 2 * (4 + 4) + 3 * (4 + 7) + 7}),
    "modulated": (MODULATED, {"kind": "modulated", "num_states": 4, "head": HEAD, "parameters": WEIGHTS}),
    "graph": (HMM.random(2, 3, seed=1).as_circuit(4), {"kind": "graph", "vocab_size": 3, "window": 4}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_other_layouts(name, tmp_path, capsys):
    circuit, stated = LAYOUTS[name]
    circuit.save(tmp_path)
    found = described(capsys, tmp_path, "--check")
    assert found.items() >= stated.items()
    assert found["checked"] is True
    assert found["bytes"] == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_the_types_of_tables(tmp_path, capsys):
    HMM.random(4, 300).to(emission=torch.bfloat16).save(tmp_path)
    assert described(capsys, tmp_path)["tables"]["emission"] == "bfloat16 4x300"
    THIN.save(tmp_path, half=True)
    assert {shape.split()[0] for shape in described(capsys, tmp_path)["tables"].values()} == {"float16"}


def test_a_jpc(capsys):
    path = FIXTURES / "hmm" / "hmm_nonhom.jpc"
    found = described(capsys, path)
    assert found == {
        "path": str(path),
        "kind": "pyjuice-hmm",
        "num_states": 8,
        "vocab_size": 30,
        "window": 5,
        "homogeneous": False,
        "leaf_class": "Categorical",
        "parameters": 8 + 4 * 64 + 5 * 240,
        "tables": {"initial": "float32 8", "transition": "float32 4x8x8", "emission": "float32 5x8x30"},
        "bytes": path.stat().st_size,
    }
    assert described(capsys, path, "--check") == {**found, "checked": True}


def changed_table(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    config, tensors = storage.read_folder(folder)
    storage.write_folder(folder, config, {**tensors, name: change(tensors[name])})


@pytest.mark.parametrize(
    ("circuit", "damage", "words"),
    [
        (
            THIN,
            lambda at: changed_table(at, "emission_bias", lambda x: x[1:]),
            "emission_bias must be (7,), found (6,)",
        ),
        (
            HMM.random(4, 7),
            lambda at: changed_table(at, "log_emission", lambda x: x.index_fill(0, torch.tensor([2]), torch.nan)),
            "circuit.safetensors: row 2 of log_emission holds NaN",
        ),
        (
            MODULATED,
            lambda at: changed_table(at, "head.latents.bias", lambda x: x + torch.inf),
            "latents.bias holds NaN or infinite",
        ),
        (HMM.random(4, 7), lambda at: (at / "circuit.safetensors").write_bytes(b""), "circuit.safetensors"),
    ],
)
def test_a_damaged_circuit_is_one_line(circuit, damage, words, tmp_path, capsys):
    circuit.save(tmp_path)
    damage(tmp_path)
    message = refused(capsys, tmp_path)
    assert words in message
    assert str(tmp_path) in message


# Backbones.

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
BLOCKS = {"fast_dllm": 32, "llada2": 32, "stable_diffcoder": 4}
"""The published ones."""
ASSUMED = {"llada2_moe": {"block_size": 32}, "stable_diffcoder_sharded": {"mask_token_id": 5, "block_size": 4}}
"""What the files leave out, if the vocabulary has such a mask."""


def headers(folder: Path) -> dict[str, dict[str, Any]]:
    """All tensors of a folder's model files, read by the letter of the format."""
    found = {}
    for path in folder.glob("model*.safetensors"):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        found |= json.loads(data[8 : 8 + length])
    found.pop("__metadata__", None)
    return found


def count(tensors: dict[str, dict[str, Any]]) -> int:
    return sum(math.prod(header["shape"]) for header in tensors.values())


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def random_mini(folder: Path, *, int8: bool = False, **changes: object) -> Path:
    return mini.save(checkpoints.random_mini(**changes), folder, int8=int8)


@pytest.fixture
def llada(tmp_path):
    return copy_of("llada_mha", tmp_path)


@pytest.mark.parametrize("name", FIELDS)
def test_families(name, capsys):
    folder = FIXTURES / name
    config, tensors = config_of(folder), headers(folder)
    family, layers, width, heads, length = FIELDS[name]
    sizes = config["model"] if family == "sedd" else config
    used = {key: header for key, header in tensors.items() if not key.endswith(ROTARY)}
    masks = {"sedd": config.get("tokens"), "mdlm": config.get("vocab_size", 0) - 1, "stable_diffcoder": 5}
    pad = config.get("pad_token_id")
    found = described(capsys, folder)
    mlp_width = found.pop("mlp_width")
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
        "block_size": config.get("block_size") or config.get("bd_size") or BLOCKS.get(family),
        "experts": config.get("num_experts"),
        "tied": "_tied" in name or bool(config.get("weight_tying")),
        "vocab_size": config["tokens"] + 1 if family == "sedd" else config.get("embedding_size", config["vocab_size"]),
        "max_length": sizes[length],
        "assumed": ASSUMED.get(name),
        "mask_id": config.get("mask_token_id", masks.get(family)),
        "eos_id": config.get("eos_token_id", pad if family == "llada2" else None),
        "pad_id": pad,
        "bos_id": config.get("bos_token_id"),
        **dict.fromkeys(("mask_token", "tokenizer", "circuit", "static_circuit", "sha256", "sha256_matches")),
        "dtypes": {"bfloat16" if used.popitem()[1]["dtype"] == "BF16" else "float32": found["parameters"]},
        "shards": len(list(folder.glob("model*.safetensors"))),
        "tensors": sum(not key.endswith(ROTARY) for key in tensors),
        "unused_tensors": [key for key in tensors if key.endswith(ROTARY)] or None,
        "bytes": sum(path.stat().st_size for path in folder.glob("model*.safetensors")),
    }


def test_the_bundled_model(capsys):
    folder = loading.BUNDLED
    config, tensors = config_of(folder), headers(folder)
    matrices = {key: header for key, header in tensors.items() if header["dtype"] == "I8"}
    others = {k: header for k, header in tensors.items() if header["dtype"] == "F32" and not k.endswith("_scale")}
    size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    found = described(capsys)
    assert found == described(capsys, folder)
    fields = ("vocab_size", "width", "layers", "heads", "kv_heads", "mlp_width", "max_length", "sha256")
    stated = {f"{name}_id": config[f"{name}_token_id"] for name in ("mask", "eos", "pad")}
    assert (
        found.items()
        >= {
            **{name: config[name] for name in fields},
            **stated,
            "path": str(folder),
            "folder": str(folder),
            "family": "mini",
            "bundled": True,
            "parameters": count(matrices) + count(others),
            "dtypes": {"int8": count(matrices), "float32": count(others)},
            "tensors": len(matrices) + len(others),
            "unused_tensors": None,
            "sha256_matches": True,
            "mask_token": "<|mask|>",
            "tokenizer": {"kind": "BPE", "vocab_size": size, "chat_template": "own"},
        }.items()
    )
    lines = shown(capsys, "--check")
    assert lines["parameters"] == f"{found['parameters']:,}"
    assert (lines["family"], lines["bundled"], lines["experts"], lines["checked"]) == ("mini", "yes", "none", "yes")
    assert lines["bytes"].startswith("26.9 MB (")
    assert lines["circuit"].startswith("kind modulated, vocab_size 8,192, window 32, num_states 640, ")


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


def test_nothing_is_read_but_headers(capsys, monkeypatch):
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
    assert described(capsys, FIXTURES / "llada_gqa_sharded")["family"] == "llada"


def save_tokenizer(folder: Path, size: int, **config: object) -> None:
    vocab = {f"t{i}": i for i in range(size)}
    Tokenizer(models.WordLevel(vocab, unk_token="t0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_tokenizer_fills_in_what_the_configuration_does_not_say(tmp_path, llada, capsys):
    folder = copy_of("bert", tmp_path / "bert")
    save_tokenizer(folder, 120, mask_token="t103", pad_token="t7", chat_template="{{ messages }}")
    found = described(capsys, folder)
    assert (found["mask_id"], found["pad_id"], found["eos_id"], found["mask_token"]) == (103, 0, None, "t103")
    assert found["tokenizer"] == {"kind": "WordLevel", "vocab_size": 120, "chat_template": "own"}
    save_tokenizer(llada, config_of(llada)["embedding_size"] + 3)
    assert described(capsys, llada)["tokenizer"]["chat_template"] == "family"


def test_its_circuits(tmp_path, capsys):
    folder = random_mini(tmp_path)
    Modulated(HMM.random(4, 60), Head(HeadConfig(32, 4))).save(folder / "circuit")
    HMM.random(3, 60, length=8).save(folder / "circuit-static")
    alone = described(capsys, folder / "circuit-static")
    found = described(capsys, folder, "--check")
    assert {"path": str(folder / "circuit-static"), **found["static_circuit"]} == alone
    assert (found["circuit"]["kind"], found["checked"]) == ("modulated", True)


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


def test_weights_that_are_not_those_of_the_stated_digest(tmp_path, capsys):
    """Of a circuit by itself, of a model's own, and of the model."""
    folder = random_mini(tmp_path)
    HMM.random(4, 60, seed=0).save(folder / "circuit")
    HMM.random(4, 60, seed=1).save(tmp_path / "other")
    (tmp_path / "other" / "circuit.safetensors").replace(folder / "circuit" / "circuit.safetensors")
    assert described(capsys, folder / "circuit", code=1)["sha256_matches"] is False
    assert "DOES NOT MATCH" in shown(capsys, folder / "circuit", code=1)["sha256"]
    assert described(capsys, folder, code=1)["circuit"]["sha256_matches"] is False
    assert "its sha256 DOES NOT MATCH" in shown(capsys, folder, code=1)["circuit"]
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
        lambda at: edit_config(at, model_type="gpt2\x1b[2J", architectures=[], auto_map={}),
        "model_type 'gpt2\\x1b[2J' is of no family that codd knows; use one of llada",
    ),
    (lambda at: edit_weights(at, **{NORM: torch.ones(3)}), f"{NORM} has shape (3,), but config.json"),
    (lambda at: (at / "tokenizer.json").write_text("{"), "tokenizer.json"),
    (lambda at: (at / "circuit").mkdir(), "circuit/config.json"),
    (lambda at: (at / "config.json").unlink(), "has no config.json; expected a circuit folder"),
    (lambda at: (at / "config.json").write_text("["), "is not JSON"),
    (lambda at: (at / "config.json").write_text("[1, 2]"), "config.json: expected a JSON object"),
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


# Adapters, the hub, and something else.


def test_an_adapter(tmp_path, capsys):
    module = "base_model.model.model.layers.0.self_attn.q_proj."
    tensors = {module + "lora_A.weight": torch.ones(4, 6), module + "lora_B.weight": torch.ones(5, 4)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"], "use_rslora": True}
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**stated, "base_model_name_or_path": "GSAI-ML/LLaDA-8B-Instruct"}))
    assert (
        described(capsys, tmp_path, "--check").items()
        >= {
            "kind": "adapter",
            "base": "GSAI-ML/LLaDA-8B-Instruct",
            "rank": 4,
            "alpha": 8.0,
            "rank_stabilised": True,
            "dora": False,
            "tensors": 2,
            "parameters": 44,
            "checked": True,
            "target_modules": ["v_proj", "q_proj"],
        }.items()
    )
    tensors[module + "lora_A.weight"] = torch.full((4, 6), torch.nan)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert "q_proj.lora_A.weight has NaN" in refused(capsys, tmp_path, "--check")
    config.write_text(json.dumps({**stated, "peft_type": "LOHA"}))
    assert "not peft_type 'LOHA'" in refused(capsys, tmp_path)


def test_a_hub_id_is_asked_for_its_configuration_first(tmp_path, capsys, monkeypatch):
    """Which says what the rest is, and whether gigabytes are worth it."""
    HMM.random(4, 7).save(tmp_path / "circuit")
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "gpt2"}')
    asked: list[tuple[str, ...]] = []
    there = {"a/circuit": tmp_path / "circuit", "a/unknown": tmp_path / "unknown", "a/data": tmp_path / "never made"}
    there["a/model"] = FIXTURES / "llada_gqa_sharded"
    monkeypatch.setattr(files, "_download", lambda repo_id, wanted, revision: asked.append(wanted) or there[repo_id])
    first = ("config.json", "adapter_config.json")
    found = described(capsys, "a/circuit")
    assert (found["path"], found["num_states"], found["sha256_matches"]) == ("a/circuit", 4, True)
    found = described(capsys, "a/model")
    assert (found["path"], found["folder"], found["family"]) == ("a/model", str(there["a/model"]), "llada")
    assert "model_type 'gpt2' is of no family that codd knows" in refused(capsys, "a/unknown")
    message = refused(capsys, "a/data")
    assert message.startswith("codd: a/data: ")
    assert "has no config.json; expected a circuit folder" in message
    circuit = ("config.json", "circuit.safetensors", *storage.PYJUICE_FILES)
    assert asked == [first, circuit, first, loading.CHECKPOINT_FILES, first, first]


def test_something_else(tmp_path, capsys):
    assert "there is no such folder" in refused(capsys, tmp_path / "nowhere")
    assert "No such file" in refused(capsys, "some/where.jpc")
    (tmp_path / "notes.txt").write_text("notes")
    assert "is a file; expected a circuit folder" in refused(capsys, tmp_path / "notes.txt")
    assert "is a folder, but not of a circuit" in refused(capsys, tmp_path)
    HMM.random(4, 7).save(tmp_path / "inner")
    assert f"give one inside it: codd info {tmp_path / 'inner'}" in refused(capsys, tmp_path)
    file = tmp_path / "inner" / "circuit.safetensors"
    assert f"give the folder: codd info {tmp_path / 'inner'}" in refused(capsys, file)
