"""Infill the third loop of antibodies with a published masked model and a circuit trained for it in seconds.

``python examples/antibodies/antibodies.py fetch`` brings the checkpoint, ``... design`` samples. README.md has all.
"""

import argparse
import itertools
import json
import lzma
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import codd
from codd.cli import main as codd_main
from codd.constraints import Regex
from codd.coupling.gap import Blocks, evaluate_blocks, joined, masked_counts, reveal_order
from codd.data.sources import Source
from codd.data.tokenization import PackingConfig, load_source

HERE = Path(__file__).parent
WINDOW, CIRCUITS = 32, ("circuit", "control")
ANY, LOOP = "[ACDEFGHIKLMNPQRSTVWY]", "[ADEFGHIKLMNPQRSTVWY]"
"""A residue, and one that is no cysteine: a free cysteine binds where it should not."""
J_ENDINGS = {"QH-Q-L", "DL-R-L", "DI-Q-M", "DY-Q-L", "DP-Q-L", "DV-Q-T", "DV-K-T"}
"""Of the human J genes: two residues before the tryptophan W of ``WG.GT.``, and what stands for the two dots."""


Row = tuple[str, int, int]
"""A sequence, where its window begins, and the length of the loop with its anchors."""


def fetch(model: Path) -> None:
    """Download AntiBERTy (97 MB, MIT licence), and convert its checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", name, "antiberty==0.1.3"]
        subprocess.run(command, check=True)
        [wheel] = folder.glob("*.whl")
        checkpoint = folder / "checkpoint"
        checkpoint.mkdir()
        with zipfile.ZipFile(wheel) as files:
            trained = "antiberty/trained_models/"
            for path in ("vocab.txt", "AntiBERTy_md_smooth/config.json", "AntiBERTy_md_smooth/pytorch_model.bin"):
                with files.open(trained + path) as source, (checkpoint / Path(path).name).open("wb") as target:
                    shutil.copyfileobj(source, target)
        if codd_main(["convert", str(checkpoint), str(model)]):
            raise SystemExit("the checkpoint could not be converted")


def read(path: Path) -> list[Row]:
    """Sequences that have all of the window, with the place of its first residue and the length of the loop.

    The window begins with the cysteine before the loop. It holds the loop, the ``WG.GT.`` behind it, and what follows.
    """
    rows = []
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
        for line in file:
            sequence, begin, length = line.split("\t")
            if int(begin) + WINDOW <= len(sequence) and int(length) + 5 <= WINDOW:
                rows.append((sequence, int(begin), int(length)))
    return rows


def language(length: int) -> Regex:
    """A loop of this length between its anchors C and W, without a free cysteine, and the motif behind it."""
    return Regex(f"C{LOOP}{{{length - 2}}}WG{ANY}GT{ANY}{LOOP}{{{WINDOW - length - 5}}}")


@torch.no_grad()
def design(model: codd.Model, rows: list[Row], calls: int, seed: int = 0) -> tuple[list[str], float]:
    """A new window for each row, in this many network calls, and the seconds that they took.

    Every call draws all residues that are still masked from their joint distribution, given the constraint, and keeps
    some of them, at random places. With the null circuit the joint is the network's own; the constraint holds as well.
    """
    by_length = defaultdict(list)
    for number, (_, _, length) in enumerate(rows):
        by_length[length].append(number)
    circuit = model.circuit or codd.HMM.neutral(num_states=1, vocab_size=model.backbone.vocab_size)
    generator, made, begun = torch.Generator().manual_seed(seed), [""] * len(rows), time.perf_counter()
    for length, numbers in by_length.items():
        automaton = language(length).compile(model.vocabulary)
        prompts = [masked(model, *rows[number][:2]) for number in numbers]
        ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        places = ids.eq(model.mask_id).nonzero()[:, 1].view(-1, WINDOW)
        for left in range(calls, 0, -1):
            window = ids.gather(1, places)
            hidden = window.eq(model.mask_id)
            logits = model.backbone(ids, ids != 0).gather(
                1, places[..., None].expand(-1, -1, model.backbone.vocab_size)
            )
            logits[..., model.mask_id] = -torch.inf
            joint = codd.Coupled(circuit, logits=logits, tokens=window, masked=hidden, constraint=automaton)
            drawn = joint.sample(generator=generator).tokens
            order = torch.where(hidden, torch.rand(window.shape, generator=generator), 2).argsort(1).argsort(1)
            keep = hidden & (order < math.ceil(int(hidden[0].sum()) / left))
            ids.scatter_(1, places, torch.where(keep, drawn, window))
        for number, row in zip(numbers, ids.gather(1, places), strict=True):
            made[number] = model.tokenizer.decode(row)
    return made, time.perf_counter() - begun


def masked(model: codd.Model, sequence: str, begin: int) -> list[int]:
    """The ids of a sequence with masks in the window."""
    text = sequence[:begin] + model.tokenizer.mask_token * WINDOW + sequence[begin + WINDOW :]
    return model.tokenizer.encode(text, add_special_tokens=True)


@torch.no_grad()
def one_at_a_time(model: codd.Model, sequence: str, begin: int, window: str, order: torch.Tensor) -> float:
    """Log-likelihood per residue of a window that the network by itself writes in this order, a residue per call."""
    truth = model.tokenizer.encode(window)
    ids = torch.tensor([masked(model, sequence, begin)])
    first = ids[0].tolist().index(model.mask_id)
    total = 0.0
    for place in order.tolist():
        logits = model.backbone(ids)[0, first + place].float()
        logits[model.mask_id] = -torch.inf
        total += float(logits.log_softmax(-1)[truth[place]])
        ids[0, first + place] = truth[place]
    return total / WINDOW


def j_ending(window: str, length: int) -> str:
    """What a window says of its J gene, as in `J_ENDINGS`."""
    return f"{window[length - 3 : length - 1]}-{window[length + 1]}-{window[length + 4]}"


def measures(rows: list[Row], windows: list[str]) -> dict[str, float]:
    """Shares of windows that keep the constraint, end like a J gene, and are like no other; and their diversity."""
    kept = [bool(re.fullmatch(language(row[2]).pattern, w)) for row, w in zip(rows, windows, strict=True)]
    right = [j_ending(w, row[2]) in J_ENDINGS for row, w in zip(rows, windows, strict=True)]
    pairs = list(itertools.combinations(windows[:200], 2))
    different = sum(a != b for pair in pairs for a, b in zip(*pair, strict=True)) / max(1, len(pairs) * WINDOW)
    counts = {"constraint_kept": kept, "right_ending": right}
    shares = {name: sum(values) / len(values) for name, values in counts.items()}
    return {**shares, "distinct": len(set(windows)) / len(windows), "differing_residues": different}


def study(model: codd.Model, rows: list[Row], all_calls: list[int], judged: int) -> list[dict[str, Any]]:
    """Designs with the circuit and with the null circuit, in equal calls; the first ``judged`` of each are scored."""
    found = [{"calls": 0, "circuit": "natural", **measures(rows, natural := [s[b : b + WINDOW] for s, b, _ in rows])}]
    found[0] |= {"windows": natural, "likelihood": judge(model, rows[:judged], natural)}
    for calls, name in itertools.product(all_calls, ("trained", "null")):
        drawing = model if name == "trained" else model.with_circuit("null")
        windows, seconds = design(drawing, rows, calls)
        line = {"calls": calls, "circuit": name, "seconds_per_design": seconds / len(rows), **measures(rows, windows)}
        line |= {"likelihood": judge(model, rows[:judged], windows), "windows": windows}
        found.append(line)
        print({key: value for key, value in line.items() if key != "windows"}, flush=True)
    return found


def judge(model: codd.Model, rows: list[Row], windows: list[str]) -> float | None:
    """The mean log-likelihood per residue of some windows, read one at a time in an order drawn from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    scores = [
        one_at_a_time(model, sequence, begin, window, torch.randperm(WINDOW, generator=generator))
        for (sequence, begin, _), window in zip(rows, windows, strict=False)
    ]
    return sum(scores) / len(scores) if scores else None


def score(
    model: codd.Model, path: Path, circuits: list[Path], count: int, ratios: tuple[float, ...]
) -> dict[float, Any]:
    """Log-likelihoods per residue of the windows of some sequences, with 95% bootstrap intervals over sequences.

    All outside of a window is given, on both sides. ``tilt`` is what the circuit named control gains over the network.
    """
    blocks, counts = windows_of(model, path, count), masked_counts(ratios, WINDOW)
    model.backbone.batch_invariant = False
    named = {folder.parent.name if folder.name == "circuit" else folder.name: folder for folder in circuits}
    loaded = {name: codd.load_circuit(folder) for name, folder in named.items()}
    scores = [
        {n: part[n].scores(model.backbone, loaded, model.mask_id) for n in part}
        for part in evaluate_blocks(model.backbone, blocks, set(counts.values()), model.mask_id)
    ]
    found = {}
    for ratio, masked in counts.items():
        at = joined([part[masked] for part in scores])
        columns = {"network": at.factorized, **at.coupled, "one_at_a_time": at.sequential}
        if "control" in columns:
            tilt = columns["control"] - columns["network"]
            columns |= {f"{name} - tilt - one_at_a_time": at.coupled[name] - tilt - at.sequential for name in loaded}
        found[ratio] = {name: interval(values / masked) for name, values in columns.items()}
        print(ratio, json.dumps(found[ratio]), flush=True)
    return found


def windows_of(model: codd.Model, path: Path, count: int) -> Blocks:
    """The windows of the first ``count`` sequences of a file, and the order in which their residues are revealed."""
    source = Source("sequences", "scored", path=str(path.resolve()), begin_column=2, count=count)
    rows = load_source(source, Path(), model.tokenizer, PackingConfig(1024, WINDOW, 0), None).rows
    ids, segments, scored = rows.tensors(torch.device("cpu"))
    starts = scored.long().argmax(1)
    return Blocks(ids, starts, reveal_order(len(ids), WINDOW, 0), segments > 0, ~scored)


def interval(values: torch.Tensor) -> list[float]:
    """The mean, and where 95% of the means of 2,000 samples with replacement lie."""
    picks = torch.randint(len(values), (2000, len(values)), generator=torch.Generator().manual_seed(0))
    low, high = values[picks].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    return [float(values.mean()), low, high]


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """Three figures over the number of calls, with the circuit and without."""
    from matplotlib.figure import Figure

    panels = {"right_ending": "share with a J gene's ending", "likelihood": "log-likelihood per residue"}
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, (key, label) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for name, text in (("trained", "with the circuit"), ("null", "network alone")):
            points = [(x["calls"], x[key]) for x in found if x["circuit"] == name and x[key] is not None]
            axes.plot(*zip(*points, strict=True), marker="o", label=text)
        if found[0][key] is not None:
            axes.axhline(found[0][key], color="grey", linestyle=":", label="the sequences themselves")
        axes.set(xscale="log", xlabel="network calls for 32 residues", ylabel=label)
        axes.set_xticks(sorted({x["calls"] for x in found if x["calls"]}), minor=False)
        axes.get_xaxis().set_major_formatter("{x:.0f}")
        axes.minorticks_off()
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["fetch", "score", "design"])
    parser.add_argument("--model", type=Path, default=Path("antiberty"), help="the folder of the checkpoint")
    parser.add_argument("--circuit", type=Path, nargs="+", default=[Path(f"runs/antibodies/{x}") for x in CIRCUITS])
    parser.add_argument("--data", type=Path, default=HERE / "held-out.tsv.xz")
    parser.add_argument("--count", type=int, default=16, help="sequences that are scored")
    parser.add_argument("--designs", type=int, default=24, help="of each number of calls, with and without the circuit")
    parser.add_argument("--judged", type=int, default=4, help="how many of them are read one residue at a time")
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--out", type=Path, help="default: runs/antibodies/scores.json or designs.json")
    args = parser.parse_args(arguments)
    if args.what == "fetch":
        fetch(args.model)
        return
    model = codd.load(args.model, circuit=args.circuit[0])
    out = args.out or Path("runs/antibodies") / f"{args.what}s.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    if args.what == "score":
        found: Any = score(model, args.data, args.circuit, args.count, (0.25, 0.5, 1.0))
    else:
        found = study(model, read(args.data)[: args.designs], args.calls, args.judged)
        plot(found, out.with_suffix(".svg"))
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(out)


if __name__ == "__main__":
    main()
