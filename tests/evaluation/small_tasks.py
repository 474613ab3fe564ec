"""Made-up problems in the published formats, and the bundled model asked for very little."""

import csv
import json
import lzma
from pathlib import Path

import torch

import codd
from codd.evaluation.runs import Run
from codd.evaluation.tasks.cells import Cell
from codd.evaluation.tasks.grid import Setting
from codd.training.workers import Workers

TINY = {"gen_length": 16, "block_length": 16, "steps": 2}
ASKED = 4


def data(root: Path) -> Path:
    """Five problems of every published task, so that a limit of four leaves one out."""
    lines = {
        "gsm8k/test.jsonl": [
            {"question": f"What is {n} plus {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(5)
        ],
        "gsm8k/train.jsonl": [{"question": f"What is {n}?", "answer": f"#### {n}"} for n in range(5)],
        "math/math500.jsonl": [
            {"problem": f"What is ${n}^2$?", "solution": f"It is $\\boxed{{{n * n}}}$.", "subject": "x"}
            for n in range(5)
        ],
        "mbpp/mbpp.jsonl": [
            {
                "task_id": 11 + n,
                "text": f"Write a function to add {n}.",
                "code": f"def add(x):\n    return x + {n}",
                "test_list": [f"assert add({k}) == {k + n}" for k in range(3)],
                "test_setup_code": "",
                "challenge_test_list": [],
            }
            for n in range(5)
        ],
    }
    for name, rows in lines.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "gpqa").mkdir()
    names = ["Question", "Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3))]
    with (root / "gpqa" / "gpqa_main.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({"Question": f"Which is {n}?", **{k: f"{n} {k}" for k in names[1:]}} for n in range(5))
    sentences = [
        f"It was day {n}, and the ship with its {n} sails went over the grey sea to the north. " for n in range(60)
    ]
    books = [{"text": "\n\n".join(" ".join(sentences[i : i + 30]) for i in range(0, 50, 2))} for _ in range(2)]
    (root / "books").mkdir()
    with lzma.open(root / "books" / "test.jsonl.xz", "wt") as file:
        file.writelines(json.dumps(book) + "\n" for book in books)
    return root


def setting(folder: Path, root: Path | None, batch: int = 4) -> Setting:
    alone = Workers(0, 1, torch.device("cpu"))
    return Setting(Run(folder, create=True), codd.load(circuit=None, device="cpu"), alone, root, batch)


def cell(task: str, circuit: str = "none", **options) -> Cell:
    return Cell(task, circuit, {**TINY, **options}, problems=ASKED)
