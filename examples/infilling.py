"""Fill the masks of a sentence in few network calls, with the circuit and without: ``python examples/infilling.py``."""

import codd

model = codd.load()  # or codd.load("folder or hub id")
mask = model.tokenizer.mask_token
sentence = f"They walked{5 * mask} the river, and in the evening{6 * mask} the fire."
for name in ("trained", "null"):
    out = model.with_circuit(name).generate(sentence, chat=False, gen_length=0, steps=2, temperature=1.0, seed=0)
    print(f"{name}, {out.steps[0]} calls: {out.texts[0]}")
