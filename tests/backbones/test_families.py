"""What each family makes of a config.json: the published sizes, the other spellings, and what is refused."""

import json
from collections import defaultdict
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from codd.backbones import (
    bert,
    dream,
    fast_dllm,
    illada,
    llada,
    llada2,
    llada_moe,
    mdlm,
    mini,
    modernbert,
    sdar,
    sedd,
    weights,
)
from codd.backbones.backbone import ModelSpec, SpecialTokenIds
from codd.backbones.config import Config
from codd.backbones.loading import FAMILIES, load_checkpoint, read_spec
from codd.backbones.transformer import Transformer
from codd.errors import FormatError, InvalidInput
from tests.support.checkpoints import FIXTURES, MINI, backbone, cases, copy_of, edit_config, edit_weights, tensors_of

LLADA_8B = {
    "model_type": "llada",
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "vocab_size": 126464,
    "embedding_size": 126464,
    "max_sequence_length": 4096,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "block_type": "llama",
    "include_bias": False,
    "include_qkv_bias": False,
    "weight_tying": False,
    "mask_token_id": 126336,
    "eos_token_id": 126081,
    "pad_token_id": 126081,
}
DREAM_7B = {
    "model_type": "Dream",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "mask_token_id": 151666,
    "eos_token_id": 151643,
    "pad_token_id": 151643,
    "bos_token_id": 151643,
}
MDLM_OWT = {
    "model_type": "mdlm",
    "vocab_size": 50258,
    "hidden_dim": 768,
    "cond_dim": 128,
    "n_blocks": 12,
    "n_heads": 12,
    "model_length": 1024,
    "time_conditioning": False,
}
SEDD_SMALL = {
    "tokens": 50257,
    "graph": {"type": "absorb"},
    "noise": {"type": "loglinear"},
    "model": {
        "type": "ddit",
        "hidden_size": 768,
        "cond_dim": 128,
        "length": 1024,
        "n_blocks": 12,
        "n_heads": 12,
        "scale_by_sigma": True,
    },
}
BERT_BASE = {
    "model_type": "bert",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
MODERNBERT_BASE = {
    "model_type": "modernbert",
    "hidden_size": 768,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "vocab_size": 50368,
    "max_position_embeddings": 8192,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "position_embedding_type": "absolute",
    "bos_token_id": 50281,
    "eos_token_id": 50282,
    "pad_token_id": 50283,
}
SDAR_8B = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 151643,
    "eos_token_id": 151643,
}
FAST_DLLM_1_5B = {
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "model_type": "Fast_dLLM_Qwen",
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "layer_types": ["full_attention"] * 28,
    "bd_size": 32,
    "eos_token_id": 151645,
    "pad_token_id": 151645,
    "bos_token_id": 151643,
}
LLADA_MOE_7B = {
    "architectures": ["LLaDAMoEModelLM"],
    "model_type": "llada",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "expert_intermediate_size": 1024,
    "dense_intermediate_size": 8192,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_layer_freq": [1] * 16,
    "qk_layernorm": True,
    "rope_theta": 50000,
    "rms_norm_eps": 1e-5,
    "vocab_size": 157184,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "eos_token_id": 156892,
    "pad_token_id": 156892,
}
LLADA2_MINI = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
    "rope_theta": 600000,
    "rms_norm_eps": 1e-6,
    "vocab_size": 157184,
    "use_bias": False,
    "use_qkv_bias": False,
    "pad_token_id": 156892,
}
ILLADA_8B = {
    "architectures": ["ILLaDAForCausalLM"],
    "model_type": "illada",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 155136,
    "max_position_embeddings": 8192,
}
_QWEN3_8B, _QWEN25_1_5B = 8_190_735_360, 1_543_714_304
_MOE = 2 * 157184 * 2048 + 2048 + 16 * (4 * 2048**2 + 2 * 128 + 2 * 2048 + 64 * 2048 + 64 * 3 * 1024 * 2048)
_GROUPED = 256 * 3 * 512 * 2048 + 3 * 512 * 2048 + 256 * 2049
_LLADA2 = 2 * 157184 * 2048 + 2048 + 20 * (2 * 128 + 2 * 2048 + 5120 * 2048) + 3 * 5120 * 2048 + 19 * _GROUPED
_LLAMA = 155136 * 4096 + 4096 + 32 * (2 * 4096 + 2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
_EMBEDDED = 50258 * 768 + 50258 * 769  # tokens in and, with a bias, out
_CONDITIONED = 256 * 128 + 128 + 128 * 128 + 128 + 129 * 2 * 768 + 768  # the noise level, the last modulation and norm
_DIT_BLOCK = 4 * 768**2 + 2 * 4 * 768**2 + 5 * 768 + 2 * 768 + 129 * 6 * 768
DIT_SMALL = _EMBEDDED + _CONDITIONED + 12 * _DIT_BLOCK
PUBLISHED_SIZES = [
    (llada, LLADA_8B, 16_031_162_368 // 2, 3 + 9 * 32),  # bytes in bfloat16, from the index of its shards
    (dream, DREAM_7B, 7_615_616_512, 3 + 12 * 28),  # as Qwen2.5-7B
    (sdar, SDAR_8B, _QWEN3_8B, 3 + 11 * 36),
    (fast_dllm, FAST_DLLM_1_5B, _QWEN25_1_5B, 2 + 12 * 28),
    (llada_moe, LLADA_MOE_7B, _MOE, 3 + 16 * (8 + 1 + 3 * 64)),
    (llada2, LLADA2_MINI, _LLADA2, 3 + 20 * 6 + 3 + 19 * (2 + 3 + 3 * 256)),
    (illada, ILLADA_8B, _LLAMA, 2 + 9 * 32),
    (mdlm, MDLM_OWT, DIT_SMALL, 10 + 10 * 12),
    (sedd, SEDD_SMALL, DIT_SMALL, 10 + 10 * 12),
    (bert, BERT_BASE, 109_514_298, 10 + 16 * 12),
    (modernbert, MODERNBERT_BASE, 149_655_232, 6 + 6 * 22 - 1),
]
NAMES = [family.NAME for family, *_ in PUBLISHED_SIZES]


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


@pytest.mark.parametrize(("family", "fields", "parameters", "tensors"), PUBLISHED_SIZES, ids=NAMES)
def test_published_sizes(family, fields, parameters, tensors):
    config = Config(fields)
    assert [other.NAME for other in FAMILIES if other.recognises(config)] == [family.NAME]
    found = shapes(family.read_spec(config))
    assert len(found) == tensors
    assert sum(torch.Size(shape).numel() for shape in found.values()) == parameters


@pytest.mark.parametrize(("family", "fields", "parameters", "tensors"), PUBLISHED_SIZES, ids=NAMES)
def test_published_configs_are_read_from_a_file(family, fields, parameters, tensors, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_spec(tmp_path).family == family.NAME


def test_llada_keys():
    found = shapes(llada.read_spec(Config(LLADA_8B)))
    assert found["model.transformer.ff_out.weight"] == (126464, 4096)
    assert found["model.transformer.blocks.31.ff_out.weight"] == (4096, 12288)
    assert found["model.transformer.blocks.0.ff_proj.weight"] == (12288, 4096)
    assert found["model.transformer.blocks.0.k_proj.weight"] == (4096, 4096)


def test_dream_keys():
    found = shapes(dream.read_spec(Config(DREAM_7B)))
    assert found["model.layers.27.self_attn.q_proj.weight"] == (3584, 3584)
    assert found["model.layers.27.self_attn.k_proj.weight"] == (512, 3584)
    assert found["model.layers.27.self_attn.v_proj.bias"] == (512,)
    assert found["model.layers.0.mlp.down_proj.weight"] == (3584, 18944)
    assert found["lm_head.weight"] == (152064, 3584)


def test_modernbert_keys():
    found = shapes(modernbert.read_spec(Config(MODERNBERT_BASE)))
    assert "model.layers.0.attn_norm.weight" not in found
    assert found["model.layers.1.attn_norm.weight"] == (768,)
    assert found["model.layers.21.mlp.Wi.weight"] == (2304, 768)


def test_the_two_llada_of_one_model_type():
    """And older files of the dense one state no architecture."""
    assert not llada_moe.recognises(Config(LLADA_8B))
    assert llada.recognises(Config({**LLADA_8B, "architectures": ["LLaDAModelLM"]}))


def test_expert_keys():
    found = shapes(llada2.read_spec(Config(LLADA2_MINI)))
    assert found["model.layers.0.mlp.gate_proj.weight"] == (5120, 2048)
    assert found["model.layers.0.attention.query_key_value.weight"] == ((16 + 2 * 4) * 128, 2048)
    assert found["model.layers.19.mlp.experts.255.down_proj.weight"] == (2048, 512)
    assert found["model.layers.1.mlp.gate.expert_bias"] == (256,)
    assert found["model.layers.1.mlp.shared_experts.up_proj.weight"] == (512, 2048)


def test_block_sizes():
    """From the file, else the published one; what the caller says goes before both."""
    assert [family.read_spec(Config(fields)).transformer.block_size for family, fields, *_ in PUBLISHED_SIZES] == [
        {"sdar": 4, "fast_dllm": 32, "llada2": 32}.get(family.NAME) for family, *_ in PUBLISHED_SIZES
    ]
    assert sdar.read_spec(Config({**SDAR_8B, "block_size": 16})).transformer.block_size == 16
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


VARIANTS = [
    (llada_moe, {**LLADA_MOE_7B, "moe_layer_freq": [0, 1] * 8, "moe_router_enable_expert_bias": True}),
    (llada_moe, {**LLADA_MOE_7B, "shared_expert_intermediate_size": 512, "qk_layernorm": False}),
    (llada2, {**LLADA2_MINI, "num_shared_experts": 0, "first_k_dense_replace": 0, "tie_word_embeddings": True}),
    (sdar, {**SDAR_8B, "hidden_size": 2560, "tie_word_embeddings": True}),  # heads x width of a head is not the width
    (illada, {**ILLADA_8B, "tie_word_embeddings": False}),
    (llada, {**LLADA_8B, "weight_tying": True, "include_qkv_bias": True}),
    (llada, {**LLADA_8B, "n_kv_heads": None, "multi_query_attention": True, "mlp_hidden_size": None}),
    (dream, {**DREAM_7B, "tie_word_embeddings": True, "num_key_value_heads": None}),
    (bert, {**BERT_BASE, "tie_word_embeddings": False}),
    (modernbert, {**MODERNBERT_BASE, "tie_word_embeddings": False, "decoder_bias": False}),
    (
        modernbert,
        {**MODERNBERT_BASE, **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True)},
    ),
    (mini, {**MINI, "kv_heads": None, "causal": True}),
]


@pytest.mark.parametrize(("family", "fields"), VARIANTS)
def test_the_tables_of_variants_fill_every_parameter(family, fields):
    assert shapes(family.read_spec(Config(fields)))


@pytest.mark.parametrize(
    ("family", "fields", "special"),
    [
        (llada, LLADA_8B, SpecialTokenIds(mask=126336, eos=126081, pad=126081)),
        (llada, {**LLADA_8B, "mask_token_id": None}, SpecialTokenIds(mask=126336, eos=126081, pad=126081)),
        (llada, {**LLADA_8B, "embedding_size": 64, "vocab_size": 60, "mask_token_id": 7, "eos_token_id": [5, 6]}, None),
        (dream, DREAM_7B, SpecialTokenIds(mask=151666, eos=151643, pad=151643, bos=151643)),
        (sdar, SDAR_8B, SpecialTokenIds(mask=151669, eos=151643, bos=151643)),
        (fast_dllm, FAST_DLLM_1_5B, SpecialTokenIds(mask=151665, eos=151645, pad=151645, bos=151643)),
        (llada_moe, LLADA_MOE_7B, SpecialTokenIds(mask=156895, eos=156892, pad=156892)),
        (llada2, LLADA2_MINI, SpecialTokenIds(mask=156895, eos=156892, pad=156892)),
        (illada, ILLADA_8B, SpecialTokenIds(mask=5)),
        (mdlm, MDLM_OWT, SpecialTokenIds(mask=50257)),
        (mdlm, {**MDLM_OWT, "mask_token_id": 3}, SpecialTokenIds(mask=3)),
        (sedd, SEDD_SMALL, SpecialTokenIds(mask=50257)),
        (bert, BERT_BASE, SpecialTokenIds(pad=0)),
        (bert, {**BERT_BASE, "mask_token_id": 103}, SpecialTokenIds(mask=103, pad=0)),
        (modernbert, MODERNBERT_BASE, SpecialTokenIds(eos=50282, pad=50283, bos=50281)),
    ],
)
def test_special_ids(family, fields, special):
    assert family.read_spec(Config(fields)).special == (special or SpecialTokenIds(mask=7, eos=5, pad=126081))


@pytest.mark.parametrize(
    ("family", "fields", "change"),
    [
        (llada, LLADA_8B, {"block_type": "sequential"}),
        (llada, LLADA_8B, {"layer_norm_type": "default"}),
        (llada, LLADA_8B, {"activation_type": "swiglu"}),
        (llada, LLADA_8B, {"alibi": True}),
        (llada, LLADA_8B, {"rope": False}),
        (llada, LLADA_8B, {"attention_layer_norm": True}),
        (llada, LLADA_8B, {"include_bias": True}),
        (llada, LLADA_8B, {"scale_logits": True}),
        (llada, LLADA_8B, {"input_emb_norm": True}),
        (dream, DREAM_7B, {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
        (dream, DREAM_7B, {"use_sliding_window": True}),
        (dream, DREAM_7B, {"use_mrope": True}),
        (dream, DREAM_7B, {"hidden_act": "gelu"}),
        (dream, DREAM_7B, {"head_dim": 64}),
        (sdar, SDAR_8B, {"attention_bias": True}),
        (sdar, SDAR_8B, {"rope_scaling": {"type": "yarn"}}),
        (fast_dllm, FAST_DLLM_1_5B, {"layer_types": ["sliding_attention"] * 28}),
        (llada_moe, LLADA_MOE_7B, {"moe_layer_freq": [1] * 3}),
        (llada_moe, LLADA_MOE_7B, {"clip_qkv": -1}),
        (llada2, LLADA2_MINI, {"use_bias": True}),
        (llada2, LLADA2_MINI, {"use_qk_norm": False}),
        (llada2, LLADA2_MINI, {"score_function": "softmax"}),
        (llada2, LLADA2_MINI, {"using_split_qkv_in_self_attention": True}),
        (illada, ILLADA_8B, {"layer_norm_eps": 1e-5}),
        (illada, ILLADA_8B, {"mlp_bias": True}),
        (sedd, SEDD_SMALL, {"graph": {"type": "uniform"}}),
        (sedd, SEDD_SMALL, {"noise": {"type": "geometric"}}),
        (sedd, SEDD_SMALL, {"model": {"type": "unet"}}),
        (bert, BERT_BASE, {"position_embedding_type": "relative_key"}),
        (bert, BERT_BASE, {"hidden_act": "relu"}),
        (bert, BERT_BASE, {"hidden_act": ["gelu"]}),
        (bert, BERT_BASE, {"is_decoder": True}),
        (modernbert, MODERNBERT_BASE, {"hidden_activation": "quick_gelu"}),
        (modernbert, MODERNBERT_BASE, {"layer_types": ["sliding_attention"] * 22}),
        (modernbert, MODERNBERT_BASE, {"layer_types": "full_attention"}),
        (modernbert, MODERNBERT_BASE, {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}),
        (modernbert, MODERNBERT_BASE, {"rope_parameters": {"rope_theta": 10000.0}}),
    ],
)
def test_what_we_do_not_build_is_refused(family, fields, change: dict[str, Any]):
    field = "full_attention" if "rope_parameters" in change else next(iter(change))
    with pytest.raises(FormatError, match=field) as raised:
        family.read_spec(Config({**fields, **change}, "here/config.json"))
    message = str(raised.value)
    assert message.startswith("here/config.json")
    assert "\n" not in message


def test_older_and_newer_activations():
    assert bert.read_spec(Config({**BERT_BASE, "hidden_act": "gelu_new"})).transformer.activation == "gelu_tanh"
    assert bert.read_spec(Config({**BERT_BASE, "hidden_act": None})).transformer.activation == "gelu"
    silu = modernbert.read_spec(Config({**MODERNBERT_BASE, "classifier_activation": "silu"})).transformer
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


def test_every_family_is_registered_once():
    assert {family.NAME for family in FAMILIES} == {*NAMES, "mini"}
    assert len(FAMILIES) == len(NAMES) + 1
    for family in FAMILIES:
        assert not family.recognises(Config({}))
        assert not family.recognises(Config({"model_type": "gpt2", "model": {}, "graph": {}}))
