"""Running cells: resumable, divided over processes, and in stages for machines that lack the harness or the network."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from codd.circuits import ProbabilisticCircuit
from codd.decoding import Model, Options
from codd.errors import InvalidInput
from codd.evaluation.provenance import provenance
from codd.evaluation.runs import Log, Result, Run, write_json, write_lines
from codd.evaluation.tasks.answering import Advance, Answerer, Request
from codd.evaluation.tasks.catalogue import OWN_LENGTH, PAPER_LENGTH, task_of
from codd.evaluation.tasks.cells import NONE, TRAINED, Cell
from codd.evaluation.tasks.sandbox import Limits
from codd.files import sha256
from codd.training import typed
from codd.training.text_files import json_lines, read_json
from codd.training.workers import Workers

CIRCUIT = "circuit.json"
"""A fingerprint of the circuit that a cell was begun with."""
ANSWERED = "answered.json"
"""Who answered, where it was not the process that scores."""


def quietly(count: int) -> None:
    """No progress to show."""


@dataclass(frozen=True)
class Setting:
    """What all cells of a run share."""

    run: Run
    model: Model
    group: Workers
    data: Path | None = None
    batch: int = 8
    limits: Limits = field(default_factory=Limits)

    _models: dict[str, Model] = field(default_factory=dict)
    """With each circuit once: kernels and graphs are kept with them."""
    _prints: dict[str, str] = field(default_factory=dict)

    def model_for(self, cell: Cell) -> Model:
        """With the cell's circuit, which must be the one that the cell's folder was begun with."""
        if cell.circuit not in self._models:
            found = self.model.with_circuit(circuit_name(cell.circuit))
            if cell.circuit == TRAINED and found.circuit is None:
                raise InvalidInput(
                    "this checkpoint has no circuit: give the folder of one with --circuit, or null, or none."
                )
            self._models[cell.circuit], self._prints[cell.circuit] = found, fingerprint(found.circuit)
        self._claim(cell)
        return self._models[cell.circuit]

    def _claim(self, cell: Cell) -> None:
        """A circuit that was trained anew under the same name must not be mixed with the old one's answers."""
        path, now = self.run.cell_folder(cell) / CIRCUIT, self._prints[cell.circuit]
        if not path.exists():  # by every process: they need not share a disk
            write_json(path, now)
        if read_json(path) != now:
            raise InvalidInput(
                f"{path.parent}: was begun with another circuit of the name {cell.circuit!r}: give another --out, or "
                "remove that folder."
            )


def fingerprint(circuit: ProbabilisticCircuit | None) -> str:
    """What tells circuits of one name apart: a digest of what would be saved of it."""
    if circuit is None:
        return "none"
    with TemporaryDirectory() as folder:
        circuit.save(folder)
        return " ".join(sha256(path)[:16] for path in sorted(Path(folder).iterdir()))


def default_length(task: str, model: Model) -> int:
    """The paper's length, or a shorter one where the model has no room for it."""
    known, limit = task_of(task), model.backbone.max_length
    wanted = PAPER_LENGTH if known is None else known.gen_length
    return wanted if limit is None or wanted <= limit // 2 else OWN_LENGTH


def circuit_name(circuit: str) -> str | None:
    """As `Model.with_circuit` takes it."""
    return None if circuit == NONE else circuit


def run_cell(cell: Cell, setting: Setting, advance: Advance = quietly) -> Result | None:
    """Evaluate a cell, or give what was found before; None on the processes that do not lead."""
    from codd.evaluation.tasks.harness import CoddLM
    from codd.evaluation.tasks.scoring import evaluated, result_of

    model = setting.model_for(cell)
    done = setting.run.result(cell)
    if setting.group.told(done is not None):
        return done
    folder = setting.run.cell_folder(cell)
    log = Log(folder, setting.group.rank)
    setting.group.wait()  # all have read the log before anyone writes to it
    lm = CoddLM(
        model,
        batch_size=setting.batch,
        seed=cell.seed,
        log=log,
        group=setting.group,
        advance=advance,
        closed=cell.device != model.backbone.device.type,
        **cell.options,
    )
    found = evaluated(lm, cell, setting.data, setting.limits)
    costs = lm.gather_object(lm.costs)
    if found is None or costs is None:
        return None
    made = _made(cell, setting)
    if (path := folder / ANSWERED).exists():
        said = typed.build(Mapping[str, Mapping[str, Any]], read_json(path), str(path))
        made |= {name: said[name] for name in made if name in said}
    all_costs = {key: line for each in costs for key, line in each.items()}
    result, samples = result_of(cell, lm, found, all_costs, folder=folder, **made)
    setting.run.write_result(result, samples)
    return result


def _made(cell: Cell, setting: Setting) -> dict[str, Any]:
    data = None if setting.data is None else str(setting.data)
    return {
        "settings": {"batch": setting.batch, "data": data},
        "provenance": provenance(setting.model.backbone.device, cell.dtype),
    }


def prepare_cell(cell: Cell, setting: Setting) -> None:
    """Write down what a cell asks, so that a machine without the harness can answer."""
    from codd.evaluation.tasks.scoring import requests_of

    setting.run.cell_folder(cell)
    path = _requests_path(cell, setting.run)
    if not path.exists():
        write_lines(path, [asdict(request) for request in requests_of(cell, setting.model, setting.data)])


def answer_cell(cell: Cell, setting: Setting, advance: Advance = quietly) -> None:
    """Answer what was prepared; processes share the problems, and what is answered already is not asked again."""
    path = _requests_path(cell, setting.run)
    if not path.exists():
        raise InvalidInput(f"{path}: there is no such file; codd eval --stage prepare writes it.")
    if cell.device != setting.model.backbone.device.type:
        raise InvalidInput(f"{cell.slug} was prepared for {cell.device}: give --device {cell.device}.")
    requests = [typed.build(Request, line, where) for where, line in json_lines(path)]
    requests = requests[setting.group.rank :: setting.group.count]
    model, folder = setting.model_for(cell), setting.run.cell_folder(cell)
    log = Log(folder, setting.group.rank)
    setting.group.wait()
    options = Options.of(**cell.options)
    Answerer(model, options, seed=cell.seed, batch=setting.batch, log=log, advance=advance).answers(requests)
    if setting.group.leads:
        write_json(folder / ANSWERED, _made(cell, setting))


def _requests_path(cell: Cell, run: Run) -> Path:
    """The same for all cells that ask the same."""
    asked = f"{cell.task}-{cell.split}-{cell.problems or 'all'}"
    return run.folder / "requests" / f"{asked}.jsonl"
