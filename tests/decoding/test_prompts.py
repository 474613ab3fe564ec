import torch

import codd
from codd.decoding.prompts import encode_prompts

MODEL = codd.load(device="cpu")
TOKENIZER = MODEL.tokenizer
assert TOKENIZER is not None
assert MODEL.mask_id is not None


def encode(prompts, chat=None, whole=False):
    return encode_prompts(prompts, TOKENIZER, chat=chat, whole=whole)


def test_a_text_is_a_question_unless_told_otherwise():
    assert encode("one") == [TOKENIZER.encode_chat("one")]
    assert encode(["one", "two"]) == [TOKENIZER.encode_chat("one"), TOKENIZER.encode_chat("two")]
    assert encode("one", chat=False) == [TOKENIZER.encode("one")]


def test_a_text_with_masks_is_filled_and_not_answered():
    [ids] = encode("one<|mask|> two")
    assert ids == [*TOKENIZER.encode("one"), MODEL.mask_id, *TOKENIZER.encode(" two")]
    assert encode("one<|mask|> two", chat=True) != [ids]


def test_a_conversation_or_several():
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert encode(said) == [TOKENIZER.encode_chat(said)]
    assert encode([said, said[:1]]) == [TOKENIZER.encode_chat(said), TOKENIZER.encode_chat("one")]


def test_ids_in_any_form():
    assert encode([[1, 2], [3]]) == [[1, 2], [3]]
    assert encode([torch.tensor([1, 2]), []]) == [[1, 2], []]
    assert encode(torch.tensor([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert encode(torch.tensor([1, 2])) == [[1, 2]]


def test_texts_are_continuations_or_the_whole_if_masks_were_filled():
    asked = MODEL.encode(["What is 7 + 8?"])[0]
    found = MODEL.generate([asked], gen_length=8, steps=1)
    assert found.texts == [TOKENIZER.decode(found.sequences[0][len(asked) :])]
    assert found.completions[0].tolist() == found.sequences[0][len(asked) :].tolist()
    filled = MODEL.generate("They were married in<|mask|><|mask|>, he said.", gen_length=0)
    assert filled.texts is not None
    assert filled.texts[0].startswith("They were married in")
    assert filled.texts[0].endswith(", he said.")
    assert filled.steps == [2]


def test_an_answer_ends_at_the_end_of_text_of_the_model():
    assert MODEL.stop_ids == {MODEL.backbone.special.eos}
    found = MODEL.generate("Mia has 8 stamps and buys 4. How many has she?", gen_length=64, steps=32)
    assert found.sequences[0][-1] == MODEL.backbone.special.eos
    assert found.steps[0] < 32
