import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from backbones import answer_likelihood, batch_maker, text_likelihood, written
from codd.backbones import Backbone, Tokenizer, mini
from codd.backbones.config import Config
from codd.backbones.transformer import initialise
from codd.data.packing import PackedSequences
from codd.data.sources import Source
from codd.errors import FormatError, TextsLeftOut
from codd_lab.pretraining.bpe import train_bpe
from codd_lab.problems import problems

DOCUMENTS = [
    "Ana has 12 apples and a café — she sells 7 of them. How many are left?",
    "Ben walks 5 miles on Monday, and twice as far on Tuesday: 5 * 2 = 10 miles. " * 3,
]
PAIRS = [
    ("How many apples are left?", "12 - 7 = 5 apples.\n#### 5"),
    ("How far?", "It is 5 * 2 = 10 miles (très).\n#### 10"),
    ("Why?", ""),
]
TOO_LONG = ("How many? " * 20, "3")
TEXTS = Source("text", "documents", path="documents.jsonl", fields=("text",))
ANSWERS = Source("qa", "pairs", path="pairs.jsonl")
ROW = 60
"""So short that no answer has room for more than its first block of 32 tokens, and no row for two texts."""


@functools.cache
def tokenizer() -> Tokenizer:
    return train_bpe([f"{p.question}\n{p.solution}" for p in problems(100)], vocab_size=400)


def tiny(*, causal: bool = False, uniform: bool = False, std: float = 0.4, **changes) -> Backbone:
    sizes = {
        "vocab_size": tokenizer().vocab_size,
        "width": 16,
        "layers": 1,
        "heads": 2,
        "mlp_width": 16,
        "causal": causal,
    }
    special = {f"{name}_token_id": getattr(tokenizer(), f"{name}_id") for name in ("mask", "eos", "pad")}
    built = mini.build(Config({**sizes, **special, **changes}, "a test"))
    initialise(built.network, generator=torch.Generator().manual_seed(2), std=std)
    built.eval().requires_grad_(False)
    if uniform:
        built.network.embedding.tokens.weight.zero_()  # the head is tied to it
    return built


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write(tmp_path / "documents.jsonl", [{"text": text} for text in DOCUMENTS])
    write(tmp_path / "pairs.jsonl", [{"question": question, "answer": answer} for question, answer in PAIRS])
    return tmp_path


def write(path: Path, entries: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def lost_from_left_to_right(backbone: Backbone, ids: Sequence[int], first: int) -> float:
    """-log p of the tokens from the first on, each given all before it."""
    lost = 0.0
    for at in range(first, len(ids)):
        logits = backbone(torch.tensor([ids[:at]]))[0, -1].double()
        lost += float(logits.logsumexp(0) - logits[ids[at]])
    return lost


def rows_of_text(length: int) -> list[list[int]]:
    stream = [id for text in DOCUMENTS for id in (*tokenizer().encode(text), tokenizer().eos_id)]
    return [stream[begin : begin + length] for begin in range(0, len(stream) - length + 1, length)]


def size_of(ids: Sequence[int]) -> int:
    return len(tokenizer().decode(ids).encode())


def filled(answer: str, length: int = 32) -> list[int]:
    """An answer, and end marks to the end of its block."""
    ids = tokenizer().encode(answer)
    assert len(ids) < length
    return ids + [tokenizer().eos_id] * (length - len(ids))


class TestText:
    @pytest.mark.parametrize("length", [16, 50])
    def test_of_a_causal_model_is_exact(self, length, data):
        """The first token of each row, which nothing precedes, is given and does not count."""
        backbone, rows = tiny(causal=True), rows_of_text(length)
        found = text_likelihood(backbone, tokenizer(), TEXTS, data, row_length=length, draws=9)
        assert (found.tokens, found.rows, found.draws) == ((length - 1) * len(rows), len(rows), 1)
        lost = sum(lost_from_left_to_right(backbone, row, 1) for row in rows)
        assert found.nats_per_token == pytest.approx(lost / found.tokens, rel=1e-5)
        size = sum(size_of(row[1:]) for row in rows)
        assert found.bits_per_byte == pytest.approx(lost / math.log(2) / size, rel=1e-5)

    def test_of_a_uniform_model(self, data):
        """In expectation log V; the noise of so many draws is about one percent."""
        found = text_likelihood(tiny(uniform=True), tokenizer(), TEXTS, data, row_length=16, draws=200)
        assert found.draws == 200
        assert found.nats_per_token == pytest.approx(math.log(tokenizer().vocab_size), rel=0.05)

    def test_of_a_diffusion_model_is_the_mean_over_the_orders(self, data):
        """Rows of two tokens: one is found first, then the other with its help."""
        backbone, mask = tiny(std=0.8), tokenizer().mask_id
        orders = []
        for truth in rows_of_text(2):
            for first in (0, 1):
                ids = [mask, mask]
                for at in (first, 1 - first):
                    logits = backbone(torch.tensor([ids]))[0, at].double()
                    orders.append(float(logits.logsumexp(0) - logits[truth[at]]))
                    ids[at] = truth[at]
        mean = sum(orders) / len(orders)
        found = text_likelihood(backbone, tokenizer(), TEXTS, data, row_length=2, draws=150)
        assert abs(mean - math.log(tokenizer().vocab_size)) > 0.2
        assert found.nats_per_token == pytest.approx(mean, rel=0.04)

    def test_too_little_text(self, data):
        with pytest.raises(FormatError, match=r"documents: \d+ tokens do not fill a row of 5000"):
            text_likelihood(tiny(), tokenizer(), TEXTS, data, row_length=5000, draws=1)


class TestAnswers:
    def test_of_a_causal_model_is_exact(self, data):
        backbone = tiny(causal=True)
        found = answer_likelihood(backbone, tokenizer(), ANSWERS, data, row_length=ROW, draws=9)
        lost = 0.0
        for question, answer in PAIRS:
            prompt = tokenizer().encode_chat(question)
            lost += lost_from_left_to_right(backbone, prompt + filled(answer), len(prompt))
        answers = [answer for _, answer in PAIRS]
        assert found.tokens == sum(len(tokenizer().encode(answer)) + 1 for answer in answers)
        assert (found.rows, found.draws) == (len(PAIRS), 1)
        assert found.nats_per_token == pytest.approx(lost / found.tokens, rel=1e-5)
        size = sum(len(answer.encode()) for answer in answers)
        assert found.bits_per_byte == pytest.approx(lost / math.log(2) / size, rel=1e-5)

    def test_end_marks_that_fill_a_block_cost_but_are_no_tokens(self, data):
        found = answer_likelihood(tiny(uniform=True), tokenizer(), ANSWERS, data, row_length=ROW, draws=400)
        own = sum(len(tokenizer().encode(answer)) + 1 for _, answer in PAIRS)
        assert found.tokens == own < 0.7 * 32 * len(PAIRS)
        wanted = math.log(tokenizer().vocab_size) * 32 * len(PAIRS)
        assert found.nats_per_token == pytest.approx(wanted / own, rel=0.05)
        size = sum(len(answer.encode()) for _, answer in PAIRS)
        assert found.bits_per_byte == pytest.approx(found.nats_per_token * own / math.log(2) / size, rel=1e-9)

    @pytest.mark.parametrize("causal", [False, True])
    def test_what_does_not_fit_a_row_is_counted_nowhere(self, causal, data):
        backbone = tiny(causal=causal)
        without = answer_likelihood(backbone, tokenizer(), ANSWERS, data, row_length=ROW, draws=3)
        just = ("Why?", "7" * (ROW - len(tokenizer().encode_chat("Why?"))))  # no room for an end mark
        write(data / "pairs.jsonl", [{"question": q, "answer": a} for q, a in (*PAIRS, TOO_LONG, just)])
        assert len(tokenizer().encode_chat(TOO_LONG[0])) > ROW
        assert len(tokenizer().encode(just[1])) == len(just[1])
        with pytest.warns(TextsLeftOut, match="2 of 5"):
            assert answer_likelihood(backbone, tokenizer(), ANSWERS, data, row_length=ROW, draws=3) == without


def test_noise_is_uniform_and_every_token_at_stake():
    rows = PackedSequences(np.full((40, 96), 7, np.uint16), np.ones((40, 96), np.uint8), np.ones((40, 96), np.bool_))
    batch = batch_maker(tiny(), tokenizer())(rows, torch.Generator().manual_seed(0))
    assert float(batch.total) == 40 * 96
    assert torch.equal(batch.weights > 0, batch.ids == tokenizer().mask_id)


def test_a_causal_model_writes_from_left_to_right():
    backbone, asked = tiny(causal=True), list(problems(3, split="test", seed=8))
    found = []
    for problem in asked:
        ids = tokenizer().encode_chat(problem.question)
        for _ in range(20):
            ids.append(int(backbone(torch.tensor([ids]))[0, -1].argmax()))
        found.append(ids[-20:])
    later = {id for row in found for id in row} - {row[0] for row in found}
    end = min(sorted(later), key=lambda id: sum(row.index(id) if id in row else 20 for row in found))
    cut = [row[: row.index(end)] if end in row else row for row in found]
    assert any(0 < len(short) < 20 for short in cut)
    ended = tiny(causal=True, eos_token_id=end)  # a token that it does write
    assert written(ended, tokenizer(), asked, gen_length=20, steps=20) == [tokenizer().decode(row) for row in cut]
