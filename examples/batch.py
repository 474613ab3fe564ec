"""Answer a file of questions, one per line, and write one JSON object per line.

python examples/batch.py questions.txt answers.jsonl
"""

import json
import sys
from pathlib import Path

import codd

source, target = map(Path, sys.argv[1:])
questions = [line for line in source.read_text().splitlines() if line.strip()]
model = codd.load()
with target.open("w") as file:
    for first in range(0, len(questions), 8):
        part = questions[first : first + 8]
        out = model.generate(part)
        for question, text, steps in zip(part, out.texts or [], out.steps, strict=True):
            file.write(json.dumps({"question": question, "answer": text, "calls": steps}) + "\n")
        print(f"{first + len(part)} of {len(questions)}", file=sys.stderr)
