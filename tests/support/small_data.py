"""Made-up problems in the published formats."""

import csv
import json
import lzma
from pathlib import Path


def data(root: Path, problems: int = 5) -> Path:
    """So many problems of every published task."""
    lines = {
        "gsm8k/test.jsonl": [
            {"question": f"What is {n} plus {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(problems)
        ],
        "gsm8k/train.jsonl": [{"question": f"What is {n}?", "answer": f"#### {n}"} for n in range(problems)],
        "math/math500.jsonl": [
            {"problem": f"What is ${n}/7$?", "solution": f"It is $\\boxed{{\\frac{{{n}}}{{7}}}}$.", "subject": "x"}
            for n in range(problems)
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
            for n in range(problems)
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
        writer.writerows({"Question": f"Which is {n}?", **{k: f"{n} {k}" for k in names[1:]}} for n in range(problems))
    sentences = [
        f"It was day {n}, and the ship with its {n} sails went over the grey sea to the north. " for n in range(60)
    ]
    books = [{"text": "\n\n".join(" ".join(sentences[i : i + 30]) for i in range(0, 50, 2))} for _ in range(2)]
    (root / "books").mkdir()
    with lzma.open(root / "books" / "test.jsonl.xz", "wt") as file:
        file.writelines(json.dumps(book) + "\n" for book in books)
    return root
