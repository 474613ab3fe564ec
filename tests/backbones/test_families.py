"""What each family makes of a config.json: the published sizes, the other spellings, and what is refused."""

import json
from collections import defaultdict

import pytest
import torch
from safetensors.torch import save_file

from codd.backbones import weights
from codd.backbones.backbone import ModelSpec, SpecialTokenIds
from codd.backbones.config import Config
from codd.backbones.loading import FAMILIES, family_of, load_checkpoint, read_spec
from codd.backbones.transformer import Transformer
from codd.errors import FormatError, InvalidInput
from tests.support.checkpoints import FIXTURES, MINI, backbone, cases, copy_of, edit_config, edit_weights, tensors_of

PUBLISHED = json.loads((FIXTURES / "published_configs.json").read_text())
"""Of each family a published config.json, and the parameters, tensors and special ids of that checkpoint."""
BLOCKS = {"sdar": 4, "fast_dllm": 32, "llada2": 32, "stable_diffcoder": 4}
BY_NAME = {family.NAME: family for family in FAMILIES}


def spec_of(family: str, **changes) -> ModelSpec:
    """The model of a published configuration with some fields changed."""
    fields = {"model_type": "codd-mini", **MINI} if family == "mini" else PUBLISHED[family]["config"]
    return BY_NAME[family].read_spec(Config({**fields, **changes}, "here/config.json"))


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor that a file must have; the table must fill every parameter, none twice."""
    with torch.device("meta"):
        parameters = dict(Transformer(spec.transformer).named_parameters())
    filled: dict[str, int] = defaultdict(int)
    taken: set[tuple[object, ...]] = set()
    found = {}
    for name, slot in weights.expand_keys(spec.keys, spec.transformer).items():
        part = slot.part(parameters[slot.target])
        filled[slot.target] += part.numel()
        found[name] = tuple(part.shape)
        assert (slot.target, slot.expert, slot.rows) not in taken
        taken.add((slot.target, slot.expert, slot.rows))
    assert filled == {name: parameter.numel() for name, parameter in parameters.items()}
    return found


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_configurations(family, tmp_path):
    published = PUBLISHED[family]
    (tmp_path / "config.json").write_text(json.dumps(published["config"]))
    spec = read_spec(tmp_path)
    assert family == family_of(Config(published["config"])).NAME
    assert (spec.family, spec.special) == (family, SpecialTokenIds(**published["special"]))
    assert spec.transformer.block_size == BLOCKS.get(family)
    found = shapes(spec)
    assert len(found) == published["tensors"]
    assert sum(torch.Size(shape).numel() for shape in found.values()) == published["parameters"]


def test_every_family_is_registered_once():
    assert {*BY_NAME} == {*PUBLISHED, "mini"}
    assert len(FAMILIES) == len(BY_NAME)
    for unknown in ({}, {"model_type": "gpt2", "model": {}, "graph": {}}, {"model": {}, "graph": {}}):
        assert family_of(Config(unknown)) is None
    older = {**PUBLISHED["llada"]["config"], "architectures": ["LLaDAModelLM"]}  # the model_type is LLaDA-MoE's, too
    assert family_of(Config(older)) is BY_NAME["llada"]


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
VARIANTS = [
    ("llada_moe", {"moe_layer_freq": [0, 1] * 8, "moe_router_enable_expert_bias": True}),
    ("llada_moe", {"shared_expert_intermediate_size": 512, "qk_layernorm": False}),
    ("llada2", {"num_shared_experts": 0, "first_k_dense_replace": 0, "tie_word_embeddings": True}),
    ("sdar", {"hidden_size": 2560, "tie_word_embeddings": True}),  # heads x width of a head is not the width
    ("illada", {"tie_word_embeddings": False}),
    ("llada", {"weight_tying": True, "include_qkv_bias": True}),
    ("llada", {"n_kv_heads": None, "multi_query_attention": True, "mlp_hidden_size": None}),
    ("dream", {"tie_word_embeddings": True, "num_key_value_heads": None}),
    ("bert", {"tie_word_embeddings": False}),
    ("modernbert", {"tie_word_embeddings": False, "decoder_bias": False}),
    ("modernbert", dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True)),
    ("a2d", {"architectures": ["A2DQwen2LMHeadModel"]}),
    ("a2d", {"architectures": None, "model_type": "a2d-llama", "tie_word_embeddings": False}),
    ("sdar", {"model_type": "sdar_moe", **EXPERTS}),
    ("sdar", {"model_type": "sdar_moe", **EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("esm", {"position_embedding_type": "absolute", "emb_layer_norm_before": True}),
    ("mini", {"kv_heads": None, "causal": True}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_the_tables_of_variants_fill_every_parameter(family, changes):
    assert shapes(spec_of(family, **changes))


@pytest.mark.parametrize(
    ("family", "changes", "special"),
    [
        ("llada", {"mask_token_id": None}, {"mask": 126336, "eos": 126081, "pad": 126081}),
        (
            "llada",
            {"embedding_size": 64, "vocab_size": 60, "mask_token_id": 7, "eos_token_id": [5, 6]},
            {"mask": 7, "eos": 5, "pad": 126081},
        ),
        ("mdlm", {"mask_token_id": 3}, {"mask": 3}),
        ("bert", {"mask_token_id": 103}, {"mask": 103, "pad": 0}),
    ],
)
def test_special_ids(family, changes, special):
    assert spec_of(family, **changes).special == SpecialTokenIds(**special)


def test_block_sizes():
    """From the file; what the caller says goes before it."""
    assert spec_of("sdar", block_size=16).transformer.block_size == 16
    assert read_spec(FIXTURES / "sdar", 8).transformer.block_size == 8
    with pytest.raises(InvalidInput, match="block_size is for block-causal networks, but illada"):
        read_spec(FIXTURES / "illada", 8)
    with pytest.raises(InvalidInput, match="block_size must be a whole number"):
        read_spec(FIXTURES / "sdar", 0)


def test_stop_ids_of_a_generation_config(tmp_path):
    folder = copy_of("sdar", tmp_path)
    assert read_spec(folder).stop_ids == {105, 106}
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert read_spec(folder).stop_ids == {7}
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, "no"]}')
    with pytest.raises(FormatError, match=r"generation_config\.json: eos_token_id must be the id of a token"):
        read_spec(folder)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
REFUSED = {
    "llada": [
        *({"block_type": "sequential"}, {"layer_norm_type": "default"}, {"activation_type": "swiglu"}, {"alibi": True}),
        *({"rope": False}, {"attention_layer_norm": True}, {"include_bias": True}, {"scale_logits": True}),
        {"input_emb_norm": True},
    ],
    "dream": [
        *({"rope_scaling": {"type": "linear", "factor": 4.0}}, {"use_sliding_window": True}, {"use_mrope": True}),
        *({"hidden_act": "gelu"}, {"head_dim": 64}),
    ],
    "sdar": [
        *({"attention_bias": True}, {"rope_scaling": {"type": "yarn"}}),
        {"norm_topk_prob": False, "model_type": "sdar_moe", **EXPERTS},
        {"mlp_only_layers": 7, "model_type": "sdar_moe", **EXPERTS},
    ],
    "a2d": [{"attention_bias": True}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}],
    "stable_diffcoder": [{"mlp_bias": True}],
    "nemotron": [
        {"dlm_paradigm": "autoregressive"},
        {"sliding_window": 4096},
        {"rope_parameters": {**YARN, "rope_theta": 1}},
    ],
    "roberta": [{"is_decoder": True}],
    "esm": [{"is_folding_model": True}, {"position_embedding_type": "relative_key"}, {"mask_token_id": None}],
    "fast_dllm": [{"layer_types": ["sliding_attention"] * 28}],
    "llada_moe": [{"moe_layer_freq": [1] * 3}, {"clip_qkv": -1}],
    "llada2": [
        *({"use_bias": True}, {"use_qk_norm": False}, {"score_function": "softmax"}),
        {"using_split_qkv_in_self_attention": True},
    ],
    "illada": [{"layer_norm_eps": 1e-5}, {"mlp_bias": True}],
    "sedd": [{"graph": {"type": "uniform"}}, {"noise": {"type": "geometric"}}, {"model": {"type": "unet"}}],
    "bert": [
        *({"position_embedding_type": "relative_key"}, {"hidden_act": "relu"}, {"hidden_act": ["gelu"]}),
        {"is_decoder": True},
    ],
    "modernbert": [
        *({"hidden_activation": "quick_gelu"}, {"layer_types": ["sliding_attention"] * 22}),
        *({"layer_types": "full_attention"}, {"rope_parameters": {"rope_theta": 10000.0}}),
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
    ],
}


@pytest.mark.parametrize(("family", "change"), [(family, each) for family, some in REFUSED.items() for each in some])
def test_what_we_do_not_build_is_refused(family, change):
    field = "full_attention" if family == "modernbert" and "rope_parameters" in change else next(iter(change))
    with pytest.raises(FormatError, match=rf"^here/config\.json.*{field}") as raised:
        spec_of(family, **change)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("told", [{"architectures": None}, {}])
def test_a_model_type_that_is_another_familys(told, tmp_path):
    """The class says it, or the module that the file would have."""
    auto_map = {"AutoModelForCausalLM": "modeling_stable_diffcoder.StableDiffcoderForCausalLM"}
    fields = {**PUBLISHED["stable_diffcoder"]["config"], "auto_map": auto_map, **told}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_spec(tmp_path).family == "stable_diffcoder"
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED["a2d"]["config"], "model_type": "llada"}))
    assert (read_spec(tmp_path).family, read_spec(tmp_path).transformer.qk_norm) == ("a2d", True)
    (tmp_path / "config.json").write_text(json.dumps({**fields, "architectures": ["LlamaForCausalLM"], "auto_map": {}}))
    with pytest.raises(FormatError, match="model_type 'llama' is of no family"):
        read_spec(tmp_path)


def test_published_values_that_a_file_leaves_out(tmp_path):
    """They are told, but not once the caller has given others."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["sdar"]["config"]))
    assert read_spec(tmp_path).assumed == {"mask_token_id": 151669, "block_size": 4}
    assert read_spec(tmp_path, 8).assumed == {"mask_token_id": 151669}
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED["sdar"]["config"], "block_size": 4}))
    assert read_spec(tmp_path).assumed == {"mask_token_id": 151669}
    assert not read_spec(FIXTURES / "fastdllm_v2").assumed
    assert read_spec(FIXTURES / "a2d_qwen3", 8).transformer.block_size == 8
    assert read_spec(FIXTURES / "nemotron_diffusion", 16).block_length == 16


def test_the_causal_mode_shares_the_weights():
    net, ids = backbone("nemotron_diffusion"), cases("nemotron_diffusion")["b1"]["input_ids"]
    assert net.causal is net.causal
    assert backbone("sdar").causal is None
    assert net.causal.causal is None
    assert not net.config.causal
    assert {id(x) for x in net.parameters()} == {id(x) for x in net.causal.parameters()}
    assert "causal" not in dict(net.named_modules())
    assert torch.allclose(net.causal(ids[:, :9]), net.causal(ids)[:, :9], atol=1e-4)
    moved = load_checkpoint(FIXTURES / "nemotron_diffusion", device="cpu").backbone
    before = moved.causal(ids)
    assert torch.allclose(moved.to(torch.float64).causal(ids).float(), before, atol=1e-4)
    assert moved.causal.dtype == torch.float64


def test_rotary_positions_as_older_and_newer_files_say_them():
    yarn = {"factor": 4.0, "original_max_position_embeddings": 256}
    for family in ("sdar", "dream", "fast_dllm", "llada2", "a2d", "stable_diffcoder"):
        told = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}
        plain = spec_of(family, **told).transformer
        assert (plain.rope_theta, plain.rope_scaling) == (7e5, None)
        older = spec_of(family, rope_theta=7e5, rope_scaling={"type": "yarn", **yarn}).transformer
        newer = {**told, "rope_parameters": {"rope_type": "yarn", "rope_theta": 7e5, **yarn}}
        assert older == spec_of(family, **newer).transformer
        assert (older.rope_scaling.length, older.rope_scaling.factor) == (256, 4.0)
    whole = spec_of("sdar", max_position_embeddings=512, rope_scaling={"type": "yarn", "factor": 2.0}).transformer
    assert whole.rope_scaling.length == 512


def test_older_and_newer_activations():
    assert spec_of("bert", hidden_act="gelu_new").transformer.activation == "gelu_tanh"
    assert spec_of("bert", hidden_act=None).transformer.activation == "gelu"
    silu = spec_of("modernbert", classifier_activation="silu").transformer
    assert (silu.activation, silu.head_transform) == ("gelu", "silu")


def logits_of(folder, name):
    return load_checkpoint(folder, device="cpu").backbone(cases(name)["b2"]["input_ids"])


def test_copies_of_tied_weights_are_ignored(tmp_path):
    for name, head in (("dream_tied", "lm_head.weight"), ("modernbert", "decoder.weight")):
        folder = copy_of(name, tmp_path)
        edit_weights(folder, **{head: torch.full((3, 5), torch.nan)})
        assert torch.equal(logits_of(folder, name), backbone(name)(cases(name)["b2"]["input_ids"]))


def test_untied_heads(tmp_path):
    tables = {
        "bert": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        "modernbert": ("model.embeddings.tok_embeddings.weight", "decoder.weight"),
        "dream_tied": ("model.embed_tokens.weight", "lm_head.weight"),
    }
    for name, (embedding, head) in tables.items():
        folder = copy_of(name, tmp_path)
        edit_config(folder, tie_word_embeddings=False)
        with pytest.raises(FormatError, match=f"lacks '{head}'"):
            logits_of(folder, name)
        tied = tensors_of(folder)[embedding]
        edit_weights(folder, **{head: tied.clone()})
        assert torch.equal(logits_of(folder, name), backbone(name)(cases(name)["b2"]["input_ids"]))
        edit_weights(folder, **{head: 2 * tied})
        assert not torch.equal(logits_of(folder, name), backbone(name)(cases(name)["b2"]["input_ids"]))


def test_bert_as_it_was_first_written(tmp_path):
    """Norms with gamma and beta, the second task of its training, and buffers."""
    folder = copy_of("bert", tmp_path)
    old = {}
    for name, tensor in tensors_of(folder).items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        old[name] = tensor
    old["bert.pooler.dense.weight"] = torch.ones(48, 48)
    old["cls.seq_relationship.bias"] = torch.ones(2)
    old["bert.embeddings.position_ids"] = torch.arange(40)[None]
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"].clone()
    save_file(old, folder / "model.safetensors")
    assert torch.equal(logits_of(folder, "bert"), backbone("bert")(cases("bert")["b2"]["input_ids"]))


def test_mdlm_without_its_prefix(tmp_path):
    folder = copy_of("mdlm", tmp_path)
    bare = {name.removeprefix("backbone."): tensor for name, tensor in tensors_of(folder).items()}
    save_file(bare, folder / "model.safetensors")
    assert torch.equal(logits_of(folder, "mdlm"), backbone("mdlm")(cases("mdlm")["b2"]["input_ids"]))


def test_modernbert_as_newer_files_say_it(tmp_path):
    folder = copy_of("modernbert", tmp_path)
    edit_config(
        folder,
        global_attn_every_n_layers=None,
        global_rope_theta=None,
        local_rope_theta=None,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 160000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    )
    assert read_spec(folder).transformer == read_spec(FIXTURES / "modernbert").transformer
