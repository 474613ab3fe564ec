"""What a run was worth: held-out text before and after it, and text that is sampled in few calls; kept in a file."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from codd import files
from codd.circuits import HMM, Modulated, ProbabilisticCircuit, load_circuit
from codd.coupling.gap import SMALLEST_GAP, gap_closed
from codd.decoding.model import Model
from codd.errors import FormatError
from codd.training.circuit.data import TrainingData
from codd.training.circuit.trainer import cosine_rate
from codd.training.circuit.updaters import make_updater
from codd.training.circuit.validation import HeldOut
from codd.training.circuit_recipe import HeadRecipe, RuleRecipe
from codd.training.run import METRICS, read_metrics

SUMMARY, CONTROL = "summary.json", "control"
CONTROL_RATE = 0.05
CALLS, TEMPERATURE, SEED, PROMPT = 4, 1.0, 0, 48
"""How text is sampled: network calls per block, temperature, seed, and at most this many tokens of prompt."""

Summary = dict[str, Any]
"""``digest`` of the recipe; folders of the circuits ``start`` (or None) and ``circuit``, the trained one; ``scores`` by
text and ratio: ``network``, ``before``, ``control`` (a circuit of one state, else None), ``after`` and
``one_at_a_time``, log-likelihoods in nats per token, and ``gap_closed_`` with each of those three circuits;
``samples``: ``prompt`` and what each circuit makes of it, None where text on both sides is given."""


def read_summary(out: Path, digest: str) -> Summary | None:
    """The summary of a run of this recipe that has ended; None if there is none, or it is damaged."""
    with contextlib.suppress(FormatError):
        summary = files.read_sealed(out / SUMMARY)
        return summary if summary.get("digest") == digest else None
    return None


def summarize(data: TrainingData, digest: str, circuit: Path, out: Path) -> Summary:
    """Score and sample once more, with the circuit that the run wrote, and keep what was found beside the metrics."""
    trained = load_circuit(circuit, device=data.spec.device)
    held_out = data.held_out()
    control = _control(data) if data.recipe.control else None
    if control is not None:
        control.save(out / CONTROL)
    infilled = any(source.kind == "sequences" for source in data.recipe.validation)
    summary = {
        "digest": digest,
        "start": data.recipe.start,
        "circuit": str(circuit),
        "scores": _scores(held_out, trained, control, next(iter(read_metrics(out / METRICS)), {})),
        "samples": None if data.tokenizer is None or not held_out or infilled else _samples(data, held_out, trained),
    }
    with files.replacing(out, SUMMARY) as (path,):
        files.write_sealed(path, summary)
    return summary


def _control(data: TrainingData) -> HMM | Modulated:
    """A static circuit of one state, trained on the windows of the same steps."""
    table = dataclasses.replace(data.recipe.circuit, num_states=1, transition_rank=None, emission_rank=None)
    recipe = dataclasses.replace(
        data.recipe,
        start=None,
        keep_states=None,
        circuit=table,
        head=HeadRecipe(),
        optimizer=RuleRecipe(lr=CONTROL_RATE),
    )
    alone = dataclasses.replace(data.spec.context, rank=0, world_size=1)  # the others are done
    updater = make_updater(recipe, data.spec._replace(context=alone))
    for step in range(recipe.steps):
        rate = cosine_rate(step, step / recipe.steps, recipe.optimizer.warmup)
        updater.update(data.draw(step), rate)
    return updater.circuit()


def _scores(
    held_out: Mapping[str, HeldOut],
    trained: ProbabilisticCircuit,
    control: ProbabilisticCircuit | None,
    first: Mapping[str, Any],
) -> dict[str, dict[str, float | None]]:
    """By text and ratio; ``first`` is the line of metrics from before the first step."""
    found: dict[str, dict[str, float | None]] = {}
    for name, text in held_out.items():
        tilted = {} if control is None else text.scores(control)
        for ratio, score in text.scores(trained).items():
            network, last = score["factorized"], score["sequential"]
            circuits = {
                "before": first.get(f"held_out/{name}@{ratio:g}/log_likelihood", math.nan),
                "control": tilted[ratio]["coupled"] if tilted else math.nan,
                "after": score["coupled"],
            }
            shares = {f"gap_closed_{circuit}": gap_closed(network, x, last) for circuit, x in circuits.items()}
            row = {"network": network, **circuits, "one_at_a_time": last, **shares}
            found[f"{name}@{ratio:g}"] = {key: x if math.isfinite(x) else None for key, x in row.items()}
    return found


def warnings(summary: Summary) -> Iterator[str]:
    """In plain words, where the trained circuit is worse than none, or than the one that it started from."""
    others = {"network": "no circuit", "control": "a circuit of one state, which is no joint"}
    if summary["start"] is not None:
        others["before"] = f"the circuit that it started from ({summary['start']})"
    for name, row in summary["scores"].items():
        for key, what in others.items():
            after, other = row["after"], row[key]
            if other is not None and (after is None or after < other - SMALLEST_GAP):
                found = "impossible" if after is None else f"{after:.3f} nats per token"
                yield f"on {name} the trained circuit is worse than {what}: {found} against {other:.3f}."


def _samples(data: TrainingData, held_out: Mapping[str, HeldOut], trained: ProbabilisticCircuit) -> dict[str, str]:
    """A block after the beginning of a held-out text: by the network alone, and with the circuits before and after."""
    text, tokenizer = next(iter(held_out.values())), data.tokenizer
    assert tokenizer is not None
    row = int((text.blocks.starts >= min(PROMPT, int(text.blocks.starts.max()))).nonzero()[0])
    begin = int(text.blocks.starts[row])
    prompt = text.blocks.ids[row, max(0, begin - PROMPT) : begin].tolist()
    size = text.blocks.order.shape[1]
    circuits = {"network": None, "after": trained}
    if data.recipe.start is not None:
        circuits["before"] = load_circuit(data.recipe.start, device=data.spec.device)
    made = {"prompt": tokenizer.decode(prompt)}
    for name, circuit in circuits.items():
        model = Model(text.backbone, circuit, tokenizer, text.mask_id)
        out = model.generate(
            [prompt], gen_length=size, block_length=size, steps=CALLS, temperature=TEMPERATURE, seed=SEED
        )
        made[name] = (out.texts or [""])[0]
    return made
