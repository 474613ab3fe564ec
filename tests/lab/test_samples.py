import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from codd.backbones import Backbone, mini
from codd.backbones.causal import CausalModel, load_causal
from codd.data.sources import Source, read_chunks
from codd.errors import FormatError, InvalidInput, MissingDependency
from codd_lab.samples import BATCH, documents, main, marks_of, sample, texts
from tests.lab.test_published_causal import WORDS
from tests.lab.test_published_causal import gpt2 as tiny_gpt2
from tests.support.checkpoints import random_network
from tests.support.small_runs import CPU, small_tokenizer
from tests.support.tiny_models import biased

TOKENIZER = small_tokenizer()
OTHER = small_tokenizer(300)
PROMPT = "Tom has 12 apples."


def network(*, causal: bool = True, **changes) -> Backbone:
    special = {"mask_token_id": TOKENIZER.mask_id, "pad_token_id": TOKENIZER.pad_id, "eos_token_id": TOKENIZER.eos_id}
    sizes = {"vocab_size": TOKENIZER.vocab_size, "layers": 2, "heads": 4, "mlp_width": 24, "max_length": 48}
    return random_network(seed=1, std=0.4, **{**sizes, **special, "causal": causal, **changes})


def model(made: Backbone | None = None) -> CausalModel:
    return CausalModel(made or network(), TOKENIZER, 48)


def test_samples_have_the_models_probabilities():
    drawn = sample(model(), [5], 4000, 2, torch.Generator().manual_seed(0))
    assert drawn.shape == (4000, 2)
    logits = network()(torch.tensor([[5]]))[0, 0].index_fill(0, torch.tensor(marks_of(model()).never), -torch.inf)
    probs = logits.softmax(-1)
    counts = torch.bincount(drawn[:, 0], minlength=len(probs))
    assert ((counts / 4000 - probs).abs() < 5 * (probs / 4000).sqrt() + 1e-3).all()
    # The second token is drawn given the first.
    first = int(counts.argmax())
    after = drawn[drawn[:, 0] == first, 1]
    given = network()(torch.tensor([[5, first]]))[0, 1].index_fill(0, torch.tensor(marks_of(model()).never), -torch.inf)
    best = int(given.argmax())
    expected = float(given.softmax(-1)[best])
    assert float((after == best).float().mean()) == pytest.approx(expected, abs=5 * (expected / len(after)) ** 0.5)


def test_what_is_no_text_is_never_drawn():
    likely = torch.zeros(TOKENIZER.vocab_size)
    likely[[TOKENIZER.mask_id, TOKENIZER.pad_id, 7]] = 99.0
    drawn = sample(model(biased(network(), likely)), [5], 50, 20, torch.Generator().manual_seed(0))
    assert set(drawn.flatten().tolist()) == {7}


def drawn(count: int = 6, length: int = 24, seed: int = 0, prompt: str = "") -> list[str]:
    return list(texts(model(), count=count, length=length, seed=seed, prompt=prompt))


def test_a_sample_is_a_function_of_its_number():
    everything = drawn(count=BATCH + 3)
    assert everything[: len(drawn(count=5))] == drawn(count=5)
    assert drawn(seed=1) != drawn()
    assert len(set(everything)) > BATCH


def test_a_prompt_begins_every_sample():
    assert sum(text.startswith(PROMPT) for text in drawn(prompt=PROMPT)) == 6
    with pytest.raises(InvalidInput, match=r"the prompt has \d+ tokens and leaves no room in 24. Shorten it"):
        drawn(prompt=PROMPT * 9)


def test_where_a_text_ends_another_begins():
    ids = [*TOKENIZER.encode("one"), TOKENIZER.eos_id, TOKENIZER.eos_id, *TOKENIZER.encode("two")]
    assert documents(ids, TOKENIZER.eos_id) == [TOKENIZER.encode("one"), [], TOKENIZER.encode("two")]


def test_a_model_without_a_beginning_needs_a_prompt():
    with pytest.raises(InvalidInput, match="no token to begin a text with"):
        list(texts(model(network(eos_token_id=None)), count=1, length=9, seed=0))


def test_the_command_writes_what_recipes_read(tmp_path, monkeypatch):
    mini.save(network(), tmp_path / "model")
    TOKENIZER.save(tmp_path / "model")
    given = ["--count", "3", "--length", "24", "--device", "cpu", "--out", str(tmp_path / "samples.jsonl")]
    monkeypatch.setattr("sys.argv", ["samples", str(tmp_path / "model"), *given])
    main()
    source = Source("text", "samples", path="samples.jsonl", fields=("text",))
    assert [chunk.text for chunk in read_chunks(source, tmp_path)] == drawn(count=3)


def test_our_own_models_are_loaded(tmp_path):
    mini.save(network(), tmp_path)
    with pytest.raises(FormatError, match="has no tokenizer files"):
        list(texts(load_causal(tmp_path, CPU), count=1, length=9, seed=0))
    TOKENIZER.save(tmp_path)
    found, marks = load_causal(tmp_path, CPU), marks_of(model())
    assert (marks.begin, marks.eos, found.max_length) == (TOKENIZER.eos_id, TOKENIZER.eos_id, 48)
    assert set(marks.never) == {TOKENIZER.mask_id, TOKENIZER.pad_id}
    assert list(texts(found, count=6, length=24, seed=0)) == drawn()


def test_models_that_cannot_be_drawn_from(tmp_path):
    with pytest.raises(FormatError, match="there is no such folder"):
        load_causal(tmp_path / "no", CPU)
    mini.save(network(causal=False), tmp_path / "denoiser")
    with pytest.raises(InvalidInput, match=r"is a denoiser \(mini\), expected a causal model"):
        load_causal(tmp_path / "denoiser", CPU)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    if importlib.util.find_spec("transformers") is None:
        with pytest.raises(MissingDependency, match=r"pip install transformers"):
            load_causal(tmp_path / "gpt2", CPU)


@pytest.fixture
def gpt2(tmp_path):
    return tiny_gpt2(tmp_path, WORDS)


def test_weights_that_are_missing_are_no_noise_to_draw_from(gpt2):
    tensors = load_file(gpt2 / "model.safetensors")
    del tensors["transformer.h.0.mlp.c_fc.weight"]
    save_file(tensors, gpt2 / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=r"1 weights are missing, transformer.h.0.mlp.c_fc.weight for one"):
        load_causal(gpt2, CPU)


def test_a_model_of_transformers(gpt2):
    found = load_causal(gpt2, CPU)
    assert list(texts(found, count=4, length=600, seed=0)) == list(texts(found, count=4, length=512, seed=0))
