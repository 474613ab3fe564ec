"""Adapters against the peft package itself: it makes them, merges them, and reads ours."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import codd
from codd import files
from codd.backbones import adapters
from codd.backbones.adapters import LowRank
from codd.backbones.backbone import Backbone
from codd.backbones.config import Config
from codd.backbones.loading import load_checkpoint
from codd.errors import FormatError, InvalidInput
from codd.training.circuit.joint import merge as merge_trained
from codd.training.circuit.joint import trainable
from tests.support.checkpoints import FIXTURES, backbone, cases, stated, tensors_of

pytestmark = pytest.mark.filterwarnings(r"ignore:::peft\.")  # of its advice on base models that it does not know
ATTENTION = ["q_proj", "k_proj", "v_proj"]
BASES = {
    "llada_mha": [*ATTENTION, "attn_out", "ff_proj", "up_proj", "blocks.0.ff_out"],
    "llada_gqa_sharded": ATTENTION,
    "dream_tied": [*ATTENTION, "o_proj", "gate_proj", "up_proj", "down_proj"],
    "dream_untied_sharded": [*ATTENTION, "lm_head"],
    "sdar": [*ATTENTION, "o_proj", "gate_proj", "up_proj", "down_proj"],
    "fastdllm_v2_tied_sharded": [*ATTENTION, "o_proj"],
    "llada_moe_sharded": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
    "llada2_moe": ["query_key_value", "dense", "gate_proj", "up_proj", "down_proj"],
    "illada": [*ATTENTION, "o_proj"],
    "bert": ["query", "value", "dense"],
    "modernbert": ["Wqkv", "Wo", "Wi"],
    "mdlm": ["attn_qkv", "attn_out", "adaLN_modulation"],
    "sedd": ["attn_qkv", "mlp.0", "mlp.2"],
}
"""Modules to adapt in each, as peft names them: at least one base of every family."""
EMBEDDINGS = ("wte", "embed_tokens")


def load(name: str, **options: Any) -> Backbone:
    options = {"block_size": stated(name).get("block_size"), **options}
    return load_checkpoint(FIXTURES / name, device="cpu", **options).backbone


def logits_of(model: Backbone, name: str) -> Tensor:
    """In float32 whatever the weights are kept in."""
    return model(cases(name)["b1"]["input_ids"]).float()


def plain_module(name: str) -> nn.Module:
    """Plain layers with the names and weights of a checkpoint: what peft needs of a model."""
    root = nn.Module()
    by_module: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors_of(FIXTURES / name).items():
        module, _, own = key.rpartition(".")
        by_module.setdefault(module, {})[own] = tensor.float()
    for path, own in by_module.items():
        *parents, last = path.split(".")
        place = root
        for parent in parents:
            if not hasattr(place, parent):
                place.add_module(parent, nn.Module())
            place = getattr(place, parent)
        weight = own.get("weight")
        layer = getattr(place, last, None) or nn.Module()
        if weight is not None and weight.ndim == 2:
            rows, columns = weight.shape
            is_table = last in EMBEDDINGS
            layer = nn.Embedding(rows, columns) if is_table else nn.Linear(columns, rows, bias="bias" in own)
        place.add_module(last, layer)
        for key, tensor in own.items():
            layer.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
    return root


def peft_adapter(base: nn.Module, folder: Path, seed: int = 0, **settings: Any) -> Any:
    """An adapter whose matrices all say something, made and saved by peft; gives peft's model."""
    import peft

    model = peft.get_peft_model(base, peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **settings}))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:  # magnitudes and copies stay near what they begin as
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = parameter.data + 0.1 * noise
    model.save_pretrained(folder)
    return model


def merged_by_peft(model: Any, name: str, folder: Path) -> Path:
    """A checkpoint of what peft makes of base and adapter."""
    shutil.copytree(FIXTURES / name, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    tensors = {key: x.detach().contiguous().clone() for key, x in model.merge_and_unload().state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def settings_of(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def compare(name: str, tmp_path: Path, *, apart: bool = True, **settings: Any) -> Tensor:
    """Logits with the adapter, which must be those of what peft merges; merged, and kept apart where that goes."""
    model = peft_adapter(plain_module(name), tmp_path / "adapter", **settings)
    merged_by_peft(model, name, tmp_path / "merged")
    size = stated(name).get("block_size")
    wanted = load_checkpoint(tmp_path / "merged", device="cpu", block_size=size).backbone
    expected, plain = logits_of(wanted, name), logits_of(backbone(name), name)
    assert (expected - plain).abs().max() > 0.05  # it says something
    found = load(name, adapter=tmp_path / "adapter")
    torch.testing.assert_close(logits_of(found, name), expected, atol=1e-5, rtol=1e-5)
    for key, parameter in wanted.network.named_parameters():
        torch.testing.assert_close(found.network.get_parameter(key), parameter, atol=1e-6, rtol=1e-6, msg=key)
    if apart:
        kept = load(name, adapter=tmp_path / "adapter", merge=False)
        assert any(isinstance(module, LowRank) for module in kept.modules())
        # x W + x A B against x (W + A B): the weights are random in every run, and what rounds differs with them.
        torch.testing.assert_close(logits_of(kept, name), expected, atol=2e-4, rtol=1e-4)
        kept.switch_adapter(False)
        assert torch.equal(logits_of(kept, name), plain)
    return expected


@pytest.mark.parametrize("name", BASES)
def test_every_family_is_what_peft_merges(name, tmp_path):
    apart = "moe" not in name and "lm_head" not in BASES[name]
    compare(name, tmp_path, apart=apart, target_modules=BASES[name])


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {
            "rank_pattern": {"q_proj": 2, r"layers\.[12]\..*[kv]_proj": 3},
            "alpha_pattern": {"0.self_attn.v_proj": 1, "[qv]_proj": 9, "_proj": 5},
        },
        {"target_modules": r".*\.self_attn\.[qv]_proj", "exclude_modules": r".*\.0\..*"},
        {"target_modules": "all-linear", "exclude_modules": ["lm_head"]},
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        {"layers_to_transform": 0},
        {"exclude_modules": ["k_proj", "layers.1.self_attn.q_proj"]},
        {"init_lora_weights": "gaussian", "fan_in_fan_out": False, "lora_dropout": 0.5},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_settings_mean_what_they_mean_to_peft(settings, tmp_path):
    compare("sdar", tmp_path, **{"target_modules": ATTENTION, **settings})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sdar", {"use_dora": True, "target_modules": [*ATTENTION, "down_proj"]}),
        ("llada_mha", {"use_dora": True, "target_modules": ATTENTION, "use_rslora": True}),
        ("sdar", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
        ("dream_untied_sharded", {"target_modules": ["q_proj", "o_proj"], "bias": "all"}),
        ("dream_tied", {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
        ("sdar", {"target_modules": ["embed_tokens", "v_proj"]}),
        ("llada_gqa_sharded", {"target_modules": ["wte", "ff_out"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_is_no_plain_addition_is_merged_and_not_kept_apart(name, settings, tmp_path):
    compare(name, tmp_path, apart=False, **settings)
    with pytest.raises(InvalidInput, match="load this adapter with merge=True"):
        load(name, adapter=tmp_path / "adapter", merge=False)


def test_switching(lora):
    model, plain = load("sdar", adapter=lora, merge=False), backbone("sdar")
    alone = load("sdar", adapter=lora, merge=False)
    for on in (True, False, False, True, True, False):
        model.switch_adapter(on)
        assert torch.equal(logits_of(model, "sdar"), logits_of(alone if on else plain, "sdar"))
    assert set(model.state_dict()) == set(plain.state_dict())
    adapters.attach(model, lora, merge=True)  # into the network itself
    assert torch.equal(logits_of(model, "sdar"), logits_of(load("sdar", adapter=lora), "sdar"))
    with pytest.raises(InvalidInput, match="no adapter to switch on: give adapter= and merge=False"):
        plain.switch_adapter(True)


def test_a_switch_is_noticed_where_graphs_of_the_network_are_kept(lora):
    from codd.decoding.cuda_graphs import _Weights

    model, addresses = load("sdar", adapter=lora, merge=False), set()
    for on in (True, False):
        model.switch_adapter(on)
        weights = _Weights(model)
        addresses.add(weights.addresses())
        model.switch_adapter(not on)
        assert weights.replaced()
    assert len(addresses) == 2  # a graph of one is not found for another


def test_precision(tmp_path):
    peft_adapter(plain_module("sdar"), tmp_path / "adapter", target_modules=ATTENTION)
    options = {"device": "cpu", "block_size": 4}
    half = codd.load(FIXTURES / "sdar", adapter=str(tmp_path / "adapter"), dtype=torch.float16, **options).backbone
    whole = codd.load(FIXTURES / "sdar", adapter=str(tmp_path / "adapter"), **options).backbone
    plain = dict(backbone("sdar").network.named_parameters())
    for name, parameter in half.network.named_parameters():
        assert parameter.dtype == torch.float16
        # The base is rounded when it is loaded, the sum once more.
        error = (parameter.float() - whole.network.get_parameter(name)).abs()
        assert bool((error <= (plain[name].abs() + parameter.float().abs()) * 2.0**-11 + 2.0**-24).all())


@pytest.fixture(scope="module")
def plain_lora(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "adapter"
    peft_adapter(plain_module("sdar"), folder, target_modules=ATTENTION)
    return folder


@pytest.fixture
def lora(plain_lora, tmp_path) -> Path:
    """One that a test may damage."""
    return Path(shutil.copytree(plain_lora, tmp_path / "adapter"))


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


FIRST = "base_model.model.model.layers.0.self_attn.q_proj."


def test_names_of_older_files(lora):
    expected = logits_of(load("sdar", adapter=lora), "sdar")
    older = {name.replace(".weight", ".default.weight"): x for name, x in tensors(lora).items()}
    save_file(older, lora / "adapter_model.safetensors")
    assert torch.equal(logits_of(load("sdar", adapter=lora), "sdar"), expected)
    save_file(
        {**older, FIRST + "lora_A.weight": older[FIRST + "lora_A.default.weight"].clone()},
        lora / "adapter_model.safetensors",
    )
    with pytest.raises(FormatError, match="are the same tensor"):
        load("sdar", adapter=lora)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {FIRST + "lora_B.weight": None},
            "'model.layers.0.self_attn.q_proj' has lora_A, but .* asks for lora_A and lora_B",
        ),
        ({FIRST + "lora_magnitude_vector": torch.ones(64)}, "has lora_A and lora_B and lora_magnitude_vector, but"),
        ({FIRST + "lora_A.weight": torch.ones(4, 47)}, r"lora_A.weight has shape \(4, 47\), but .* ask for \(4, 48\)"),
        ({FIRST + "lora_A.weight": torch.ones(3, 48)}, r"shape \(3, 48\), but this base and adapter_config.json ask"),
        ({FIRST + "lora_A.weight": torch.ones(4, 48).int()}, "is of type I32; expected floating-point"),
        ({FIRST + "lora_A.weight": torch.full((4, 48), torch.nan)}, "q_proj.lora_A.weight has NaN or infinite"),
        ({"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.ones(4, 48)}, "this base has not"),
        ({"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 48)}, "this base has not"),
        ({FIRST + "lora_B.bias": torch.ones(64)}, "this base has not"),
        (
            {FIRST.replace("q_proj", "o_proj") + "lora_A.weight": torch.ones(4, 64)},
            "has lora_A, but adapter_config.json asks for",
        ),
        ({FIRST.replace("q_proj", "q_norm") + "weight": torch.ones(7)}, r"shape \(7,\), but"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(lora, changes, message):
    changed = {name: x for name, x in {**tensors(lora), **changes}.items() if x is not None}
    save_file(changed, lora / "adapter_model.safetensors")
    for merge in (True, False):
        if not merge and "q_norm" in next(iter(changes)):
            continue  # refused for what it is
        with pytest.raises(FormatError, match=message) as raised:
            load("sdar", adapter=lora, merge=merge)
        assert str(lora) in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "LoRA and DoRA, but not peft_type 'IA3'. Merge the adapter into its base with peft"),
        ({"peft_type": None}, "not peft_type None"),
        ({"trainable_token_indices": [1, 2]}, "not trainable_token_indices"),
        ({"megatron_config": {"a": 1}, "lora_bias": True}, "not lora_bias, megatron_config"),
        ({"layer_replication": [[0, 2]]}, "not layer_replication"),
        ({"target_parameters": ["experts.up"]}, "not target_parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, "not init_lora_weights 'pissa_niter_4'"),
        ({"r": 0}, "r must be a whole number from 1"),
        ({"r": 3}, r"has shape \(\d+, 4\), but this base and adapter_config.json ask for \(\d+, 3\)"),
        ({"lora_alpha": "much"}, "lora_alpha must be a number above zero, found 'much'"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
        ({"use_dora": True}, "asks for lora_A and lora_B and lora_magnitude_vector"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must be an object"),
        ({"alpha_pattern": {"q_proj": -1}}, r"\(alpha_pattern\): lora_alpha must be a number above zero"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern: .* cannot match .*parenthesis"),
        ({"rank_pattern": {f"({i})": 4 for i in range(9000)}}, r"more than 0\.2 s"),
        ({"rank_pattern": {"q" * 10_001: 4}}, "more than 10000 characters"),
        ({"rank_pattern": {"q_proj": 2}}, r"shape \(\d+, 4\), but .* ask for \(\d+, 2\)"),
    ],
)
def test_a_configuration_that_codd_does_not_read_is_refused_by_name(lora, changes, message, monkeypatch):
    if "0\\.2 s" in message:
        monkeypatch.setattr(adapters, "PATIENCE", 0.2)
    settings_of(lora, **changes)
    with pytest.raises(FormatError, match=message):
        load("sdar", adapter=lora)


def test_a_regular_expression_gives_up():
    found = adapters._Adapter(Path("x"), None, Config({}), backbone("sdar"), True)
    with pytest.raises(FormatError, match=r"config.json: exclude_modules: .* retry-limit"):
        found._matches("exclude_modules", "((o|oo)+)+", "o" * 60 + "x")


def test_files_that_are_not_there(lora, tmp_path):
    (lora / "adapter_model.safetensors").rename(lora / "adapter_model.bin")
    with pytest.raises(FormatError, match=r"adapter_model.bin is a pickle, which codd does not load"):
        load("sdar", adapter=lora)
    (lora / "adapter_model.bin").unlink()
    with pytest.raises(FormatError, match=r"has no adapter_model.safetensors. Download the adapter again"):
        load("sdar", adapter=lora)
    (lora / "adapter_model.safetensors").write_bytes(b"12345678{}")
    with pytest.raises(FormatError, match="truncated, damaged or not a safetensors file"):
        load("sdar", adapter=lora)
    with pytest.raises(FormatError, match=r"adapter_config.json: is missing, so that this is no adapter of PEFT"):
        load("sdar", adapter=FIXTURES / "sdar")
    with pytest.raises(FormatError, match="there is no such folder"):
        load("sdar", adapter=tmp_path / "nowhere")


def test_an_adapter_that_is_empty(lora):
    save_file({}, lora / "adapter_model.safetensors")
    with pytest.raises(FormatError, match=r"adapter_model.safetensors: holds no tensors"):
        load("sdar", adapter=lora)


def test_a_hub_id_is_asked_for_two_files(lora, monkeypatch):
    asked = []
    monkeypatch.setattr(files, "_download", lambda *given: asked.append(given) or lora)
    found = load("sdar", adapter="someone/lora")
    assert asked == [("someone/lora", ("adapter_config.json", "adapter_model.safetensors"), None)]
    assert torch.equal(logits_of(found, "sdar"), logits_of(load("sdar", adapter=lora), "sdar"))


def test_an_adapter_of_another_base(lora):
    settings_of(lora, base_model_name_or_path="JetLM/SDAR-4B-Chat")
    with pytest.raises(FormatError, match=r"made for 'JetLM/SDAR-4B-Chat': load it on that base"):
        load("illada", adapter=lora)
    with pytest.raises(FormatError, match="this base has not"):
        load("llada_mha", adapter=lora)


def test_a_tied_embedding_is_not_changed_behind_the_heads_back(tmp_path):
    peft_adapter(plain_module("dream_tied"), tmp_path, target_modules=["embed_tokens"])
    with pytest.raises(FormatError, match="changes an embedding that is tied to the head"):
        load("dream_tied", adapter=tmp_path)


def random_additions(model: Backbone) -> Backbone:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in trainable(model, "lora", 3, 0).items():
        if name.endswith(".up"):
            parameter.data.normal_(0, 0.2, generator=generator)
    return model


@pytest.mark.parametrize("name", ["sdar", "llada_mha", "modernbert", "sedd", "llada2_moe"])
def test_what_training_adds_is_saved_for_peft_and_for_us(name, tmp_path):
    import peft

    trained = random_additions(load(name))
    folder = adapters.save(trained, tmp_path / "adapter", "somewhere/base")
    expected = logits_of(trained, name).detach()
    found = load(name, adapter=folder)
    torch.testing.assert_close(logits_of(found, name), expected, atol=1e-4, rtol=1e-5)
    kept = load(name, adapter=folder, merge=False)
    torch.testing.assert_close(logits_of(kept, name), expected, atol=1e-4, rtol=1e-5)
    read = peft.PeftModel.from_pretrained(plain_module(name), folder)
    merged = merged_by_peft(read, name, tmp_path / "merged")
    theirs = load_checkpoint(merged, device="cpu", block_size=stated(name).get("block_size")).backbone
    merge_trained(trained)
    for key, parameter in trained.network.named_parameters():
        torch.testing.assert_close(theirs.network.get_parameter(key), parameter.detach(), atol=1e-6, rtol=1e-6, msg=key)
        torch.testing.assert_close(found.network.get_parameter(key), parameter.detach(), atol=1e-6, rtol=1e-6, msg=key)
    assert read.peft_config["default"].base_model_name_or_path == "somewhere/base"
