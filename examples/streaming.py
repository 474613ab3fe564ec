"""Watch an answer resolve, one line per network call: ``python examples/streaming.py``."""

import codd

model = codd.load()
question = "Mia has 84 stamps. She gives away 12 of them. How many stamps are left?"
[prompt] = model.encode([question], gen_length=32)
for step in model.denoise([prompt], gen_length=32):
    ids = [token for token in step.ids[len(prompt) :].tolist() if token not in model.stop_ids]
    pieces = ["_" if token == model.mask_id else model.tokenizer.decode([token]) for token in ids]
    print(f"call {step.number + 1}: {''.join(pieces)!r}")
