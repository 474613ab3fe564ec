"""The bundled model in ``codd demo``: what happens when it writes several tokens at a time."""

import time
from typing import Any

import torch

from codd.cli.tables import Cell, Section
from codd.decoding import Model
from codd.decoding.loop import denoise
from codd.training.problems import extract_answer

QUESTION = (
    "Mia has 84 stamps. Her brother has half as many stamps as Mia. They put all their stamps together and divide "
    "them equally among 6 albums. How many stamps are in each album?"
)
ANSWER = 21
GEN_LENGTH = 64
AT_ONCE = (1, 4, 8, 16)
BLANK = "[MASK]"
SENTENCE = f"They were married in{BLANK}{BLANK}, and went to Paris for their honeymoon."
CANDIDATES = 4


def answers(model: Model) -> list[dict[str, Any]]:
    """The same question, with more and more tokens in a step of the network."""
    assert model.tokenizer is not None
    assert model.mask_id is not None
    prompt = model.tokenizer.encode_chat(QUESTION)
    found = []
    for tokens in AT_ONCE:
        begun = time.perf_counter()
        steps = list(
            denoise(model.backbone, [prompt], mask_id=model.mask_id, gen_length=GEN_LENGTH, steps=GEN_LENGTH // tokens)
        )
        text = model.tokenizer.decode(steps[-1].sequences[0, -GEN_LENGTH:])
        found.append(
            {
                "tokens_per_step": tokens,
                "network_evaluations": len(steps),
                "seconds": time.perf_counter() - begun,
                "text": text,
                "answer": extract_answer(text),
            }
        )
    return found


@torch.no_grad()
def blanks(model: Model) -> list[list[dict[str, Any]]]:
    """The most probable words for each masked place, as the network gives them: each place by itself."""
    assert model.tokenizer is not None
    assert model.mask_id is not None
    ids: list[int] = []
    for part in SENTENCE.split(BLANK):
        ids += [*model.tokenizer.encode(part), model.mask_id]
    ids.pop()
    logits = model.backbone(torch.tensor([ids], device=model.backbone.device))[0].float()
    logits[:, model.mask_id] = -torch.inf
    places = [place for place, token in enumerate(ids) if token == model.mask_id]
    found = []
    for place in places:
        probabilities, tokens = logits[place].softmax(-1).topk(CANDIDATES)
        words = [model.tokenizer.decode([token]).strip() for token in tokens.tolist()]
        found.append([{"word": w, "probability": p} for w, p in zip(words, probabilities.tolist(), strict=True)])
    return found


def sections(results: dict[str, Any]) -> list[Section]:
    """What people are shown."""
    found, words = results["answers"], results["blanks"]
    written = Section(
        title="The bundled model writes",
        before=[QUESTION, *(f"  {line}" for line in found[0]["text"].splitlines())],
        header=["tokens a step", "evaluations", "seconds", f"answer ({ANSWER})"],
        rows=[_row(entry) for entry in found],
        after=["Fewer steps are faster, but tokens that are written in one step do not know of each other:"]
        + [f"  {line}" for line in found[-1]["text"].splitlines()[:2]],
    )
    places = Section(
        title=SENTENCE.replace(BLANK, f" {BLANK}"),
        before=[
            "The model's probabilities for the two places, each by itself: it cannot say",
            "which pairs belong together. A circuit can.",
        ],
        header=["", *(f"no. {i + 1}" for i in range(CANDIDATES))],
        rows=[
            [Cell(f"place {i + 1}"), *(Cell(f"{entry['word']} {entry['probability']:.0%}") for entry in place)]
            for i, place in enumerate(words)
        ],
    )
    return [written, places]


def _row(entry: dict[str, Any]) -> list[Cell]:
    right = entry["answer"] == ANSWER
    shown = "none" if entry["answer"] is None else str(entry["answer"])
    return [
        Cell(str(entry["tokens_per_step"])),
        Cell(str(entry["network_evaluations"])),
        Cell(f"{entry['seconds']:.1f}"),
        Cell(shown, "good" if right else "bad"),
    ]
