import functools
import json
import lzma
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from codd.backbones import Tokenizer, load_checkpoint
from codd.backbones.causal import CausalModel
from codd.circuits import HMM
from codd.coupling.gap import BlockScores, block_scores, summary
from codd.decoding import Model
from codd.errors import FormatError, InvalidInput
from codd_lab.likelihood.corpora import BlockSpec, draw_blocks
from codd_lab.likelihood.studies import (
    closed_interval,
    continuation_study,
    mask_ratio_study,
    mean_interval,
    shared_length,
)
from tests.support.checkpoints import random_network
from tests.support.small_denoisers import network

TEXT = "the old man went down to the sea and looked at the ships that came from far away ."
LENGTH, ROW = 8, 48


@functools.cache
def tokenizer() -> Tokenizer:
    found = load_checkpoint(device="cpu").tokenizer
    assert found is not None
    return found


def model() -> Model:
    words = tokenizer()
    assert words.mask_id is not None
    return Model(network(vocab=words.vocab_size, mask=words.mask_id), None, words, words.mask_id)


def circuits() -> dict[str, HMM]:
    size = tokenizer().vocab_size
    made = HMM.random(3, size, 0, scale=2.0)
    trained = HMM(made.log_initial, made.log_transition, made.log_emission, window=LENGTH)
    return {"trained": trained, "null": HMM.neutral(1, size)}


def causal() -> CausalModel:
    return CausalModel(network(causal=True, vocab=tokenizer().vocab_size, mask=int(tokenizer().mask_id or 0)))


@pytest.fixture
def data(tmp_path) -> Path:
    """A few short texts of each kind."""
    generator = np.random.default_rng(0)
    prose = [" ".join(generator.choice(TEXT.split(), 300)) for _ in range(3)]
    for folder in ("books", "wikitext103", "gsm8k"):
        (tmp_path / folder).mkdir()
    with lzma.open(tmp_path / "books/test.jsonl.xz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in prose)
    with lzma.open(tmp_path / "wikitext103/test.txt.xz", "wt") as file:
        file.write("\n".join(prose))
    pairs = [{"question": f"what is {n} and 1?", "answer": f"{n} and 1 is {n + 1}." * n} for n in range(1, 6)]
    (tmp_path / "gsm8k/test.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return tmp_path


def small(data: Path, **changes):
    settings = {"corpora": ("books",), "blocks": 5, "ratios": (0.1, 0.5, 1.0), "row_length": ROW}
    return mask_ratio_study(model(), circuits(), causal(), data, **{**settings, **changes})


def test_mask_ratios_are_scored_on_the_blocks_that_are_drawn(data):
    study = small(data)
    assert json.loads(json.dumps(study, allow_nan=False)) == study
    found = study["data"]["books"]
    assert found["blocks"] == 5
    ((ids, starts),) = draw_blocks("books", data, tokenizer(), BlockSpec(LENGTH, 5, ROW, 0))
    ratios = (0.1, 0.5, 1.0)
    scores = block_scores(
        model().backbone,
        circuits(),
        ids,
        starts,
        mask_id=int(tokenizer().mask_id or 0),
        block_length=LENGTH,
        ratios=ratios,
        seed=7919 * ROW,
    )
    for entry, ratio, masked in zip(found["ratios"], ratios, (1, 4, 8), strict=True):
        assert (entry["ratio"], entry["tokens"]) == (ratio, 5 * masked)
        figures = summary(scores[ratio], scores[ratio].coupled["trained"])
        ways = {"factorized": "factorized", "sequential": "sequential", "circuit:trained": "coupled"}
        for way, name in ways.items():
            got = entry["scores"][way]
            assert got["mean"] == pytest.approx(figures[name], rel=1e-5)
            assert got["low"] <= got["mean"] <= got["high"]
        null = entry["scores"]["circuit:null"]["mean"]
        assert null == pytest.approx(entry["scores"]["factorized"]["mean"], abs=1e-4)
        assert entry["scores"]["dcd"]["mean"] < 0
        closed = entry["gap_closed"]["trained"]
        if math.isnan(figures["gap_closed"]):
            assert closed == {"mean": None, "low": None, "high": None}
        else:
            assert closed["mean"] == pytest.approx(figures["gap_closed"], rel=1e-3)


def test_every_corpus_can_be_measured_and_the_seed_fixes_it(data, monkeypatch):
    monkeypatch.setattr("codd_lab.likelihood.corpora.NUM_PROBLEMS", 20)  # thousands take a minute
    corpora = ("gsm8k", "gsm8k-padded", "wikitext103", "problems")
    settings = {"corpora": corpora, "blocks": 3, "ratios": (1.0,), "row_length": 160, "sequential": False}
    study, again, other = (small(data, **settings, seed=seed) for seed in (1, 1, 2))
    assert study == again
    assert study["data"] != other["data"]
    assert list(study["data"]) == list(corpora)
    for found in study["data"].values():
        (entry,) = found["ratios"]
        assert found["blocks"] == 3
        assert set(entry["scores"]) == {"factorized", "circuit:trained", "circuit:null", "dcd"}
        assert entry["gap_closed"] == {}
    assert study["settings"]["corpora"] == list(corpora)
    assert study["settings"]["dcd"]
    assert not study["settings"]["sequential"]


def test_answers_are_drawn_on_the_grid_behind_the_question(data):
    end = tokenizer().eos_id
    groups = draw_blocks("gsm8k", data, tokenizer(), BlockSpec(LENGTH, 5, 160, 0))
    assert sum(len(ids) for ids, _ in groups) == 5
    lengths = {ids.shape[1] for ids, _ in groups}
    assert len(lengths) > 1
    for ids, starts in groups:
        assert ((ids.shape[1] - starts) % LENGTH == 0).all()
        assert (ids[:, -1] == end).all()
    ((padded, _),) = draw_blocks("gsm8k-padded", data, tokenizer(), BlockSpec(LENGTH, 5, 160, 0))
    assert padded.shape == (5, 160)
    assert (padded[:, -1] == end).all()


def continued(data: Path, **changes):
    settings = {"corpora": ("books", "wikitext103"), "texts": 3, "contexts": (4, 12), "continuation": 2 * LENGTH}
    return continuation_study(model(), circuits(), causal(), data, **{**settings, **changes})


def test_what_is_no_number_becomes_none():
    values = torch.tensor([-1.0, -math.inf], dtype=torch.float64)
    nothing = {"mean": None, "low": None, "high": None}
    assert mean_interval(values, 2, 0) == nothing
    zeros = torch.zeros(2, dtype=torch.float64)
    scores = BlockScores(2, zeros - 2, {}, zeros - 1)
    assert closed_interval(scores, values, 0) == nothing
    assert closed_interval(scores, zeros - 1.5, 0) == {"mean": 0.5, "low": 0.5, "high": 0.5}
    some = BlockScores(2, zeros - 2, {}, torch.tensor([-2.0, -1.0], dtype=torch.float64))  # a block without a gap
    assert closed_interval(some, zeros - 1.5, 0) == {"mean": 1.0, "low": None, "high": None}


def test_intervals_narrow_with_more_texts():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    widths = []
    for count in (25, 400):
        found = mean_interval(values[:count], 1, 0)
        assert found["low"] is not None
        assert found["high"] is not None
        widths.append(found["high"] - found["low"])
    assert widths[1] == pytest.approx(2 * 1.96 / math.sqrt(400), rel=0.2)
    assert widths[0] > 3 * widths[1]


def test_circuits_are_for_blocks_of_one_length():
    size = tokenizer().vocab_size
    assert shared_length(circuits()) == LENGTH
    assert shared_length({"null": HMM.neutral(1, size)}) == shared_length({}) == 32
    with pytest.raises(InvalidInput, match="blocks of different lengths"):
        shared_length({**circuits(), "other": HMM.random(2, size, length=5)})


@pytest.mark.parametrize(
    ("study", "changes", "error", "message"),
    [
        (small, {"corpora": ("novels",)}, InvalidInput, "'novels' is not a corpus of this study"),
        (continued, {"corpora": ("gsm8k",)}, InvalidInput, "there are wikitext103, books"),
        (small, {"blocks": 0}, InvalidInput, "at least one text"),
        (continued, {"contexts": ()}, InvalidInput, "contexts must be one token or more"),
        (continued, {"continuation": 0}, InvalidInput, "0 tokens is no whole number of blocks of 8"),
        (continued, {"continuation": 12}, InvalidInput, "12 tokens is no whole number of blocks of 8"),
        (continued, {"contexts": (5000,)}, FormatError, "hold no text of 5016 without an end"),
        (small, {"row_length": 9}, FormatError, "hold no block of 8 behind 2 tokens"),
        (small, {"corpora": ("gsm8k",), "row_length": 9}, FormatError, "no question with its answer fits 9 tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(data, study, changes, error, message):
    with pytest.raises(error, match=message) as caught:
        study(data, **changes)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(data):
    (data / "wikitext103/test.txt.xz").unlink()
    with pytest.raises(FormatError, match=r"wikitext103/test.txt.xz: there is no such file"):
        continued(data)


def test_a_model_must_say_its_mask_and_read_text(data):
    for given, message in (
        (Model(model().backbone, None, tokenizer(), None), "which token is the mask"),
        (Model(model().backbone, None, None, 1), "no tokenizer files"),
    ):
        with pytest.raises(InvalidInput, match=message):
            mask_ratio_study(given, {}, None, data)


def block_causal(size: int) -> Model:
    words = tokenizer()
    built = random_network(vocab_size=words.vocab_size, max_length=512, mask_token_id=words.mask_id, block_size=size)
    return Model(built, None, words, words.mask_id)


@pytest.mark.parametrize("corpus", ["books", "gsm8k"])
def test_blocks_are_drawn_on_the_grid_of_a_block_causal_network(data, corpus):
    groups = draw_blocks(corpus, data, tokenizer(), BlockSpec(LENGTH, 5, 160, 0, on_grid=True))
    assert sum(len(ids) for ids, _ in groups) == 5
    for ids, starts in groups:
        assert (starts % LENGTH == 0).all()
        assert (starts + LENGTH <= ids.shape[1]).all()
    settings = {"corpora": (corpus,), "blocks": 5, "ratios": (1.0,), "row_length": 160, "sequential": False}
    study = mask_ratio_study(block_causal(LENGTH), circuits(), None, data, **settings)
    assert study["data"][corpus]["blocks"] == 5
    with pytest.raises(InvalidInput, match="reads blocks of 3 tokens, of which one of 8 is no part"):
        mask_ratio_study(block_causal(3), circuits(), None, data, **settings)


def test_contexts_are_those_on_the_grid(data):
    settings = {"corpora": ("books",), "texts": 1, "continuation": LENGTH, "sequential": False}
    study = continuation_study(block_causal(LENGTH), circuits(), None, data, **settings)
    assert study["settings"]["contexts"] == [32, 64, 96, 128, 192, 256]
    with pytest.raises(InvalidInput, match="a block starts at 20, off the grid"):
        continuation_study(block_causal(LENGTH), circuits(), None, data, **settings, contexts=(20, 32))
