import json
import math
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers

import codd
from codd.backbones import load_checkpoint
from codd.circuits import Head, HeadConfig, Modulated
from codd.errors import FormatError, InvalidInput
from tests.support import FIXTURES

OWN_MASKS = {
    "illada": 5,
    "illada_sharded": 5,
    "stable_diffcoder_sharded": 5,
    "decode_stable_diffcoder": 5,
    "mdlm": 101,
    "mdlm_timecond": 63,
    "sedd": 101,
}
"""Where the code that was published with a family knows the mask, not the config."""
FAMILIES = sorted(path.parent.name for path in FIXTURES.glob("*/config.json") if path.parent.name != "graph")
BERT, BERT_VOCAB = FIXTURES / "bert", 120


def words(count: int, mask: int) -> codd.Tokenizer:
    """A vocabulary of so many words, one of which is the mask."""
    vocabulary = {"[MASK]" if id == mask else f"w{id}": id for id in range(count)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return codd.Tokenizer(backend, special={"mask_token": "[MASK]"})


def with_tokenizer(name: str, folder: Path, tokenizer: codd.Tokenizer) -> Path:
    copy = Path(shutil.copytree(FIXTURES / name, folder / name))
    tokenizer.save(copy)
    return copy


def circuit_over(vocab_size: int, seed: int = 0) -> codd.HMM:
    return codd.HMM.random(num_states=3, vocab_size=vocab_size, seed=seed)


def assert_same(found: codd.HMM | None, wanted: codd.HMM) -> None:
    assert isinstance(found, codd.HMM)
    assert torch.equal(found.log_initial, wanted.log_initial)
    assert torch.equal(found.log_emission, wanted.log_emission)
    assert torch.equal(found.log_transition, wanted.log_transition)


def mask_said(name: str, vocab_size: int) -> int | None:
    """The mask of a fixture's config, which in some is none of their tokens."""
    said = json.loads((FIXTURES / name / "config.json").read_text()).get("mask_token_id", OWN_MASKS.get(name))
    return said if said is not None and said < vocab_size else None


@pytest.mark.parametrize("name", FAMILIES)
def test_every_fixture_loads_without_circuit_or_tokenizer_and_works_with_ids(name):
    model = codd.load(str(FIXTURES / name), circuit=None)
    assert model.circuit is None
    assert model.tokenizer is None
    assert model.mask_id == mask_said(name, model.backbone.vocab_size)
    mask = 7 if model.mask_id is None else model.mask_id
    works = codd.load(FIXTURES / name, circuit="null", mask_id=mask)
    found = works.generate([[1, 2, 3], [4]], gen_length=4, block_length=4, steps=2, stop=False)
    assert found.texts is None
    assert found.steps == [2, 2]
    assert [len(ids) for ids in found.sequences] == [7, 5]
    assert found.sequences[0][:3].tolist() == [1, 2, 3]
    assert not any(mask in ids.tolist() for ids in found.completions)
    plain = load_checkpoint(FIXTURES / name, device=model.backbone.device).backbone
    ids = torch.tensor([[1, 2, mask, 4]], device=model.backbone.device)
    logits = model.backbone(ids)
    assert logits.shape == (1, 4, model.backbone.vocab_size)
    assert torch.equal(logits, plain(ids))


class TestCircuit:
    @pytest.mark.parametrize("name", ["llada_mha", "bert", "sedd"])
    def test_null_is_neutral_over_the_models_vocabulary(self, name):
        model = codd.load(FIXTURES / name, circuit="null", device="cpu")
        assert model.circuit is not None
        assert model.circuit.vocab_size == model.backbone.vocab_size
        lost = -model.circuit.log_prob(torch.tensor([[0, 3, model.backbone.vocab_size - 1, 1], [5, 5, 5, 5]]))
        torch.testing.assert_close(lost, torch.full((2,), 4 * math.log(model.backbone.vocab_size)))

    def test_a_folder_an_object_or_what_lies_beside_the_weights(self, tmp_path):
        folder = Path(shutil.copytree(BERT, tmp_path / "bert"))
        assert codd.load(folder).circuit is None
        beside, other = circuit_over(BERT_VOCAB), circuit_over(BERT_VOCAB, seed=1)
        beside.save(folder / "circuit")
        other.save(tmp_path / "other")
        for given in ((), ("trained",)):
            assert_same(codd.load(folder, *given, device="cpu").circuit, beside)
        assert codd.load(folder, None).circuit is None
        for given in (other, tmp_path / "other", str(tmp_path / "other")):
            assert_same(codd.load(folder, given, device="cpu").circuit, other)

    @pytest.mark.parametrize("way", ["object", "folder", "trained"])
    def test_of_another_model(self, way, tmp_path):
        folder = Path(shutil.copytree(BERT, tmp_path / "bert"))
        width, hmm = codd.load(BERT, None, device="cpu").backbone.config.width, circuit_over(BERT_VOCAB)
        fitting, deaf = (Modulated(hmm, Head(HeadConfig(size, 3))) for size in (width, 2 * width))
        words = f"states of {2 * width} numbers, those of the model have {width}: "
        for wrong, message in ((circuit_over(BERT_VOCAB + 1), "over 121 tokens, the model over 120"), (deaf, words)):
            wrong.save(folder / "circuit")
            given = {"object": wrong, "folder": folder / "circuit", "trained": "trained"}[way]
            with pytest.raises(InvalidInput, match=message):
                codd.load(folder, given)
        fitting.save(folder / "circuit")
        found = codd.load(folder, "trained", device="cpu").circuit
        assert isinstance(found, Modulated)
        assert_same(found.hmm, hmm)
        assert isinstance(codd.load(BERT, fitting).circuit, Modulated)

    def test_static_is_the_other_one_beside_the_weights(self, tmp_path, monkeypatch):
        folder = Path(shutil.copytree(BERT, tmp_path / "bert"))
        circuit_over(BERT_VOCAB).save(folder / "circuit")
        with pytest.raises(InvalidInput, match=r"bert: has no folder circuit-static/, .* no circuit 'static'"):
            codd.load(folder, "static")
        static = circuit_over(BERT_VOCAB, seed=1)
        static.save(folder / "circuit-static")
        assert_same(codd.load(folder, "static", device="cpu").circuit, static)
        mine = circuit_over(BERT_VOCAB, seed=2)
        mine.save(tmp_path / "static")
        monkeypatch.chdir(tmp_path)  # a folder of that name is meant by its path
        assert_same(codd.load(folder, "static", device="cpu").circuit, static)
        assert_same(codd.load(folder, "./static", device="cpu").circuit, mine)
        assert_same(codd.load(folder, Path("static"), device="cpu").circuit, mine)

    def test_padded_embeddings_count(self):
        """The logits of this checkpoint have 160 columns, of which its tokenizer would use 131."""
        assert codd.load(FIXTURES / "llada_mha", circuit_over(160)).circuit is not None
        with pytest.raises(InvalidInput, match="over 131 tokens, the model over 160"):
            codd.load(FIXTURES / "llada_mha", circuit_over(131))

    def test_a_broken_one_beside_the_weights_is_an_error_and_not_none(self, tmp_path):
        folder = Path(shutil.copytree(BERT, tmp_path / "bert"))
        (folder / "circuit").mkdir()
        with pytest.raises(FormatError, match="circuit"):
            codd.load(folder)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_it_follows_the_model_to_its_device(self):
        assert codd.load(BERT, "null", device="cuda").circuit.device.type == "cuda"


class TestMask:
    def test_the_callers_comes_first(self, tmp_path):
        assert codd.load(FIXTURES / "llada_mha", None, mask_id=5).mask_id == 5
        assert codd.load(BERT, None, mask_id=103).mask_id == 103
        both = with_tokenizer("decode_llada", tmp_path, words(96, mask=40))
        assert codd.load(both, None, mask_id=0).mask_id == 0

    def test_then_the_configs(self, tmp_path):
        model = codd.load(with_tokenizer("decode_llada", tmp_path, words(96, mask=40)), None)
        assert model.tokenizer is not None
        assert (model.tokenizer.mask_id, model.mask_id) == (40, 95)

    @pytest.mark.parametrize("name", ["bert", "modernbert"])
    def test_then_the_tokenizers(self, name, tmp_path):
        model = codd.load(with_tokenizer(name, tmp_path, words(BERT_VOCAB, mask=103)), None)
        assert model.mask_id == 103
        assert model.backbone.special.mask is None
        assert model.tokenizer is not None
        assert model.tokenizer.encode("w5 [MASK] w7") == [5, 103, 7]

    def test_a_tokenizer_without_one_leaves_it_open(self, tmp_path):
        backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        model = codd.load(with_tokenizer("bert", tmp_path, codd.Tokenizer(backend)), None)
        assert model.tokenizer is not None
        assert model.mask_id is None

    def test_the_tokenizers_must_be_one_of_the_model(self, tmp_path):
        folder = with_tokenizer("bert", tmp_path, words(BERT_VOCAB + 30, mask=BERT_VOCAB + 20))
        with pytest.raises(InvalidInput, match="mask_id 140"):
            codd.load(folder, None)


class TestPlace:
    def test_float32_is_the_default_on_a_cpu(self):
        model = codd.load(FIXTURES / "llada_gqa_sharded", None, device="cpu")  # stored in bfloat16
        assert model.backbone.dtype == torch.float32
        assert model.backbone.device.type == "cpu"

    def test_dtype(self):
        ids = torch.tensor([[1, 2, 110, 4]])
        single = codd.load(FIXTURES / "llada_gqa_sharded", None, device="cpu").backbone(ids)
        double = codd.load(FIXTURES / "llada_gqa_sharded", None, device=torch.device("cpu"), dtype="float64")
        assert {parameter.dtype for parameter in double.backbone.parameters()} == {torch.float64}
        found = double.backbone(ids)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, single.double(), rtol=0, atol=1e-4)


def test_check_refuses_weights_that_are_not_numbers(tmp_path):
    folder = Path(shutil.copytree(BERT, tmp_path / "bert"))
    tensors = load_file(folder / "model.safetensors")
    tensors["cls.predictions.bias"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    assert codd.load(folder, None, device="cpu", check=False).backbone(torch.tensor([[1]])).isnan().any()
    with pytest.raises(FormatError, match=r"cls\.predictions\.bias"):
        codd.load(folder, None)


def test_an_unknown_family(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    with pytest.raises(FormatError, match="abacus"):
        codd.load(tmp_path)


def test_a_model_cannot_be_changed_by_accident():
    model = codd.load(BERT, None)
    with pytest.raises(AttributeError):
        model.mask_id = 3
