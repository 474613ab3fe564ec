"""Causal models, ours and those of transformers, read on where they stopped, and again from where they are set back."""

import pytest
import torch

from codd.backbones.causal import CausalModel, CausalReader, check_same_tokens
from codd.errors import InvalidInput
from tests.support.small_denoisers import network

VOCAB = 7


def gpt2():
    transformers = pytest.importorskip("transformers", reason="it is no dependency")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **special, initializer_range=0.5)).eval()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("made", [lambda: network(causal=True), gpt2], ids=["ours", "transformers"])
@torch.no_grad()
def test_reading_on_is_reading_all(made, rows):
    model = made()
    ids = torch.randint(VOCAB, (rows, 12), generator=torch.Generator().manual_seed(0))
    wanted = model(ids) if model.__class__.__name__ == "Backbone" else model(input_ids=ids).logits
    reader = CausalReader(model, rows, 12)
    torch.testing.assert_close(reader.read(ids[:, :5])[:, -1], wanted[:, 4], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(reader.read(ids[:, 5:7], 2), wanted[:, 5:7], atol=1e-4, rtol=1e-4)
    reader.read((ids[:, 7:] + 1) % VOCAB)
    reader.rewind(7)
    assert reader.length == 7
    torch.testing.assert_close(reader.read(ids[:, 7:], 5), wanted[:, 7:], atol=1e-4, rtol=1e-4)
    assert CausalModel(model).vocab_size == VOCAB


def test_tables_may_differ_by_the_mask_and_padding():
    check_same_tokens(6, None, VOCAB, 6, None)
    check_same_tokens(9, None, VOCAB, 5, None)
    with pytest.raises(InvalidInput, match="the causal model has 6 tokens, the network 7, 6 for one beyond them"):
        check_same_tokens(6, None, VOCAB, 5, None)
