"""Studies of denoisers in published layouts (SEDD, MDLM) beside a causal model of transformers, on own text."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers
from torch import Tensor

import codd
from codd.backbones import Tokenizer
from codd.backbones.causal import CausalModel, load_causal
from codd.cli import main
from codd.errors import InvalidInput
from codd_lab.likelihood.copula import dcd_scores
from codd_lab.likelihood.corpora import draw_continuations
from codd_lab.likelihood.studies import continuation_study, mask_ratio_study
from codd_lab.runs import Run
from tests.support import FIXTURES

CPU = torch.device("cpu")
TOKENS, MASK = 101, 101
"""Of the SEDD and MDLM fixtures: the mask stands behind the tokens, as with GPT-2's 50,257."""
WORDS = ["<|endoftext|>", *(f"w{number}" for number in range(1, TOKENS))]


def gpt2(folder: Path, words: list[str]) -> Path:
    """A tiny GPT-2 and its tokenizer, as transformers writes them."""
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    written = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=words[0])
    written.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(words), n_positions=512, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def causal_folder(tmp_path_factory) -> Path:
    return gpt2(tmp_path_factory.mktemp("gpt2"), WORDS)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "mine.txt"
    draw = torch.Generator().manual_seed(0)
    path.write_text(" ".join(f"w{int(n)}" for n in torch.randint(1, TOKENS, (900,), generator=draw)))
    return path


def loaded(name: str) -> codd.Model:
    return codd.load(FIXTURES / name, None, device="cpu")


def alone(folder: Path, ids: Tensor, context: int) -> float:
    """Per token after the context, by transformers itself."""
    import transformers

    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    with torch.no_grad():
        log_p = model(ids).logits.double().log_softmax(-1)
    return float(log_p[:, context - 1 : -1].gather(-1, ids[:, context:, None]).mean())


@pytest.mark.parametrize("name", ["sedd", "mdlm"])
def test_continuations_beside_gpt2(name, causal_folder, text):
    """The denoiser has no tokenizer files, as it is published: the causal model's reads the text."""
    model, causal = loaded(name), load_causal(causal_folder, CPU)
    assert (model.backbone.vocab_size, model.mask_id, causal.vocab_size) == (TOKENS + 1, MASK, TOKENS)
    circuits = {"null": codd.HMM.neutral(1, TOKENS + 1)}
    settings = {"corpora": [str(text)], "texts": 4, "contexts": (4, 12), "continuation": 32, "sequential": False}
    study = continuation_study(model, circuits, causal, None, **settings)
    assert json.loads(json.dumps(study, allow_nan=False)) == study
    assert causal.tokenizer is not None
    ids = draw_continuations(str(text), None, causal.tokenizer, length=12 + 32, texts=4)
    assert int(ids.max()) < TOKENS
    for entry in study["data"][str(text)]["contexts"]:
        scores, context = entry["scores"], entry["context"]
        assert scores["dcd"]["mean"] == pytest.approx(alone(causal_folder, ids[:, 12 - context :], context), abs=1e-4)
        assert scores["circuit:null"]["mean"] == pytest.approx(scores["factorized"]["mean"], abs=1e-4)
        assert scores["factorized"]["mean"] != pytest.approx(scores["dcd"]["mean"], abs=1e-2)


def test_the_command_line_reads_a_text_of_ones_own(causal_folder, text, tmp_path):
    out = tmp_path / "run"
    asked = ["--studies", "gap,continuations", "--model", str(FIXTURES / "mdlm"), "--circuit", "null"]
    given = ["--causal", str(causal_folder), "--text", str(text), "--problems", "1", "--device", "cpu"]
    assert main(["eval", *asked, *given, "--out", str(out)]) == 0
    studies = Run(out).studies()
    assert set(studies) == {"gap", "continuations"}
    for study in studies.values():
        assert list(study["data"]) == [str(text)]
        assert study["settings"]["dcd"]


def test_a_padded_table_is_cut(causal_folder, text):
    """Columns beyond the denoiser's tokens do not count, whatever they hold."""
    model, ids = loaded("mdlm"), torch.arange(1, 61).view(2, 30)
    causal = load_causal(causal_folder, CPU)

    class Padded:
        config, device = SimpleNamespace(vocab_size=TOKENS + 9), CPU

        def __call__(self, **given: object) -> SimpleNamespace:
            out = causal.network(**given)
            more = torch.full((*out.logits.shape[:2], 9), 50.0)
            more[..., :1] = -torch.inf  # what stands where the denoiser has its mask
            return SimpleNamespace(logits=torch.cat((out.logits, more), -1), hidden_states=out.hidden_states)

    settings = {"mask_id": MASK, "block_length": 8, "ratios": (0.5, 1.0)}
    starts = torch.tensor([4, 20])
    exact = dcd_scores(model.backbone, causal, ids, starts, **settings)
    padded = dcd_scores(model.backbone, CausalModel(Padded()), ids, starts, **settings)
    for ratio in exact:
        torch.testing.assert_close(padded[ratio], exact[ratio])


def test_other_tokens_are_refused(tmp_path, text, causal_folder):
    other = gpt2(tmp_path / "other", [WORDS[0], *reversed(WORDS[1:])])
    mine = load_causal(causal_folder, CPU).tokenizer
    model = codd.Model(loaded("sedd").backbone, None, mine, MASK)
    with pytest.raises(InvalidInput, match=r"the causal model reads other tokens: .* is .* for the network") as caught:
        continuation_study(model, {}, load_causal(other, CPU), None, corpora=[str(text)])
    assert "\n" not in str(caught.value)


def test_texts_longer_than_the_causal_model(text, causal_folder):
    with pytest.raises(InvalidInput, match="made for 512 tokens, found texts of 632"):
        continuation_study(
            loaded("mdlm"), {}, load_causal(causal_folder, CPU), None, corpora=[str(text)], contexts=(600,), texts=1,
            continuation=32, sequential=False,
        )  # fmt: skip


def test_a_file_of_questions_and_answers(tmp_path, causal_folder):
    path = tmp_path / "mine.jsonl"
    pairs = [{"question": "w1 w2 w3", "answer": " ".join(f"w{n}" for n in range(k, k + 9))} for k in range(1, 7)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    found = load_causal(causal_folder, CPU).tokenizer
    assert found is not None
    template = "{{messages[0].content}}"
    words = Tokenizer(found.backend, special=found.special_tokens, chat_template=template)
    model = codd.Model(loaded("mdlm").backbone, None, words, MASK)
    hmm = codd.HMM.neutral(1, TOKENS + 1)
    circuit = codd.HMM(hmm.log_initial, hmm.log_transition, hmm.log_emission, window=4)
    settings = {"corpora": [str(path)], "blocks": 5, "ratios": (1.0,), "row_length": 32, "sequential": False}
    study = mask_ratio_study(model, {"null": circuit}, None, None, **settings)
    assert study["data"][str(path)]["blocks"] == 5
    with pytest.raises(InvalidInput, match="is not a corpus of this study; there are wikitext103, books, and files of"):
        continuation_study(model, {}, None, None, corpora=[str(path)])
