"""Whether two commits write the same: ids of fixed prompts under fixed settings, and where they differ.

    python benchmarks/fixed_ids.py --out before.json                        # at the one commit
    python benchmarks/fixed_ids.py --out after.json --compare before.json   # at the other, on the same machine

Every sampler, order, pace and preset is among the settings, with the model's own, its static and the null circuit, and
infilling. On another processor rounding may settle near ties otherwise. Exits with 2 if anything differs.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import codd
from codd.errors import CircuitSteppedAside

QUESTIONS = (
    "Mia has 84 stamps. She gives half of them to Tom. How many does she keep?",
    "What is 7 + 8?",
    "A farmer has 12 cows and buys 9 more. Then he sells 5. How many cows does he have?",
    "Tom reads 14 pages a day for 6 days. How many pages does he read?",
)
INFILLING = "The <|mask|><|mask|><|mask|> dog ran to the <|mask|><|mask|> house."
SETTINGS: tuple[dict[str, Any], ...] = (
    {"steps": 32, "sampler": "latent"},
    {"steps": 8, "sampler": "latent"},
    {"steps": 8, "sampler": "any_order"},
    {"threshold": 0.9, "sampler": "any_order"},
    {"threshold": 0.9, "sampler": "factorized"},
    {"threshold": 0.9, "sampler": "any_order", "remasking": "random"},
    {"steps": 16, "sampler": "factorized"},
    {"steps": 16, "sampler": "latent", "temperature": 0.7, "seed": 3},
    {"steps": 16, "sampler": "any_order", "temperature": 0.7, "seed": 4, "top_p": 0.9},
    {"steps": 8, "sampler": "latent", "mode": "full"},
    {"steps": 8, "sampler": "any_order", "mode": "full", "outside": "defer"},
    {"entropy_budget": 0.5, "sampler": "any_order"},
    {"entropy_budget": 1.0, "sampler": "factorized", "mode": "full"},
    {"steps": 16, "sampler": "latent", "cfg_scale": 1.0},
    {"steps": 16, "sampler": "latent", "remasking": "margin"},
    {"steps": 16, "sampler": "any_order", "remasking": "entropy"},
    {"steps": 16, "sampler": "latent", "remasking": "random", "seed": 9},
    {"steps": 16, "sampler": "latent", "circuit_temperature": 0.5, "tempering": "paper", "temperature": 0.5},
    {"steps": 16, "sampler": "latent", "activation": 0.6, "top_k": 5, "temperature": 1.0},
    {"steps": 32, "sampler": "latent", "preset": "reference"},
    {"steps": 16, "sampler": "latent", "preset": "reference", "mode": "full", "remasking": "entropy"},
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint (default: the bundled model)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gen-length", type=int, default=64, help="a multiple of 32 (default: 64)")
    parser.add_argument("--questions", type=int, default=2, help="for each of the settings, 1 to 4 (default: 2)")
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="only so many of the last ones")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--compare", type=Path, metavar="FILE.json", help="written by another commit")
    args = parser.parse_args()
    found = written(args.model, args.device, args.gen_length, args.questions, SETTINGS[-args.settings :])
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.compare is None:
        print(f"{args.out}: {len(found)} settings")
        return 0
    before = json.loads(args.compare.read_text())
    different = [name for name, ids in found.items() if before.get(name) != ids]
    print(f"{len(found) - len(different)} of {len(found)} equal", *different, sep="\n")
    return 2 if different else 0


def written(
    source: str | None, device: str, gen_length: int, questions: int, settings: tuple[dict[str, Any], ...]
) -> dict[str, list[list[int]]]:
    """The ids of some questions under each of the settings, and of the other circuits, by name."""
    warnings.simplefilter("ignore", CircuitSteppedAside)
    model = codd.load(source, device=device)
    found = {}
    for number, each in enumerate(settings):
        asked = [QUESTIONS[(number + i) % len(QUESTIONS)] for i in range(questions)]
        found[json.dumps(each)] = _ids(model.generate(asked, gen_length=gen_length, **each))
    found["infilling"] = _ids(model.generate([INFILLING], gen_length=0, steps=3, sampler="latent", chat=False))
    for name in ("static", "null"):
        other = model.with_circuit(name)
        asked = list(QUESTIONS[:questions])
        found[name] = _ids(other.generate(asked, gen_length=gen_length, steps=8, sampler="any_order"))
    return found


def _ids(generation: codd.Generation) -> list[list[int]]:
    return [ids.tolist() for ids in generation.sequences]


if __name__ == "__main__":
    sys.exit(main())
