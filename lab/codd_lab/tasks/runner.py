"""Run configurations: resumable, divided over processes, and in stages for machines without harness or network."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from codd import validation
from codd.circuits import ProbabilisticCircuit
from codd.data.text_files import json_lines
from codd.decoding import Model, Options
from codd.distributed import DistributedContext
from codd.errors import InvalidInput
from codd.evaluation.answering import Answerer, Item, Line, Request
from codd.files import read_json, sha256
from codd_lab.provenance import provenance
from codd_lab.runs import Log, Result, Run, Scored, write_json, write_lines
from codd_lab.tasks import questions
from codd_lab.tasks.catalogue import HARNESS_SEEDS, OWN_LENGTH, PAPER_LENGTH, converses, system_of, task_of
from codd_lab.tasks.configs import NONE, TRAINED, EvalConfig
from codd_lab.tasks.sandbox import Limits

CIRCUIT = "circuit.json"
"""The file with the fingerprint of the circuit that a configuration was begun with."""
ANSWERED = "answered.json"
"""The file with settings and provenance of the machine that answered, where another one scores."""


Advance = Callable[[int], None]
"""Called with the number of requests done since the last call."""


def quietly(count: int) -> None:
    """A progress callback that does nothing."""


class LoggedAnswerer(Answerer):
    """Answers requests in batches, and skips those that the log has answers to."""

    def __init__(
        self,
        model: Model,
        options: Options,
        *,
        seed: int,
        batch: int,
        log: Log,
        advance: Advance,
        read_only: bool,
    ):
        """``log`` holds earlier answers and gets the new ones; ``read_only``: raise InvalidInput if one is missing."""
        super().__init__(model, options, seed=seed, batch=batch)
        self.log, self.advance, self.read_only = log, advance, read_only

    def in_batches(self, asked: Mapping[str, Item], work: Callable[[Sequence[Item]], list[Line]]) -> dict[str, Line]:
        """The lines that the log has, and new ones for the rest, a batch at a time; each batch is logged at once."""
        known = {key: line for key in asked if (line := self.log.get(key))}
        self.advance(len(known))
        todo = {key: item for key, item in asked.items() if key not in known}
        if todo and self.read_only:
            raise InvalidInput(
                f"{len(todo)} of {len(asked)} answers are not there yet. Answer them first (codd eval --stage answer), "
                "on the device of the configuration; after a change of data or chat template prepare them again."
            )
        return known | super().in_batches(todo, work)

    def answered(self, lines: Mapping[str, Line]) -> None:
        """Log a batch at once."""
        self.log.add([*lines.values()])
        self.advance(len(lines))


@dataclass(frozen=True)
class EvalSession:
    """What all configurations of a run share: folder, model, processes, data, batch size, limits of programs."""

    run: Run
    model: Model
    context: DistributedContext
    data: Path | None = None
    batch: int = 8
    limits: Limits = field(default_factory=Limits)
    read_only: bool = False
    """Score what the log has, and raise InvalidInput where an answer is missing."""

    _models: dict[str, Model] = field(default_factory=dict)
    """The model with each circuit, made once, since it owns compiled kernels and graphs."""
    _fingerprints: dict[str, str] = field(default_factory=dict)

    def model_for(self, config: EvalConfig) -> Model:
        """The model with the configuration's circuit; InvalidInput if its folder was begun with another one."""
        if config.circuit not in self._models:
            model = self.model.with_circuit(circuit_name(config.circuit))
            if config.circuit == TRAINED and model.circuit is None:
                raise InvalidInput(
                    "this checkpoint has no circuit: give the folder of one with --circuit, or null, or none."
                )
            self._models[config.circuit], self._fingerprints[config.circuit] = model, fingerprint(model.circuit)
        self._check_circuit(config)
        return self._models[config.circuit]

    def _check_circuit(self, config: EvalConfig) -> None:
        """Refuse a circuit that was trained anew under its old name: answers of the two must not be mixed."""
        path, now = self.run.config_folder(config) / CIRCUIT, self._fingerprints[config.circuit]
        if not path.exists():  # by every process: they need not share a disk
            write_json(path, now)
        if read_json(path) != now:
            raise InvalidInput(
                f"{path.parent}: was begun with another circuit of the name {config.circuit!r}: give another --out, or "
                "remove that folder."
            )


def fingerprint(circuit: ProbabilisticCircuit | None) -> str:
    """A digest of the files that the circuit would be saved as, to tell circuits of one name apart."""
    if circuit is None:
        return "none"
    with TemporaryDirectory() as folder:
        circuit.save(folder)
        return " ".join(sha256(path)[:16] for path in sorted(Path(folder).iterdir()))


def default_length(task: str, model: Model) -> int:
    """Tokens of an answer: the paper's length, or a shorter one where the model has no room for it."""
    known, limit = task_of(task), model.backbone.max_length
    wanted = PAPER_LENGTH if known is None else known.gen_length
    return wanted if limit is None or wanted <= limit // 2 else OWN_LENGTH


def circuit_name(circuit: str) -> str | None:
    """The name that `Model.with_circuit` takes: None for the network alone."""
    return None if circuit == NONE else circuit


def run_config(config: EvalConfig, session: EvalSession, advance: Advance = quietly) -> Result | None:
    """Evaluate a configuration, or read its result if it is done; None on all processes but the main one."""
    model = session.model_for(config)
    done = session.run.result(config)
    if session.context.broadcast(done is not None):
        return done
    folder = session.run.config_folder(config)
    answerer = _answerer(config, session, model, advance, read_only=session.read_only or _elsewhere(config, model))
    run, context, data = session.run, session.context, session.data
    if questions.is_own(config):
        scored = questions.evaluate(config, answerer, context, run, data)
    else:
        from codd_lab.tasks import scoring

        scored = scoring.evaluate(config, answerer, context, data, session.limits)
    if scored is None:
        return None
    record = _record(config, session)
    if (path := folder / ANSWERED).exists():
        answered = validation.build(Mapping[str, Mapping[str, Any]], read_json(path), str(path))
        record |= {name: answered[name] for name in record if name in answered}
    result = _result(config, scored, folder, record)
    run.write_result(result, scored.samples)
    return result


def _result(config: EvalConfig, scored: Scored, folder: Path, record: Mapping[str, Any]) -> Result:
    samples = scored.samples
    correct = [sample.correct for sample in samples if sample.correct is not None]
    return Result(
        config=config,
        metric=scored.metric,
        accuracy=fmean(correct) if correct else None,
        metrics=scored.metrics,
        problems=len(samples),
        calls=fmean(sample.calls for sample in samples),
        tokens=fmean(sample.tokens for sample in samples),
        seconds=median(sample.seconds for sample in samples),
        settings=record["settings"],
        provenance=record["provenance"],
        folder=folder,
    )


def _elsewhere(config: EvalConfig, model: Model) -> bool:
    """Whether another kind of device is to answer."""
    return config.device != model.backbone.device.type


def _answerer(
    config: EvalConfig, session: EvalSession, model: Model, advance: Advance, *, read_only: bool = False
) -> Answerer:
    log = Log(session.run.config_folder(config), session.context.rank)
    session.context.barrier()  # all have read the log before anyone writes to it
    return LoggedAnswerer(
        model, config.decoding, seed=config.seed, batch=session.batch, log=log, advance=advance, read_only=read_only
    )


def _record(config: EvalConfig, session: EvalSession) -> dict[str, Any]:
    """What is needed to repeat the answers: batch size, data, options in full, prompt parts, provenance."""
    model = session.model
    assert model.tokenizer is not None
    settings: dict[str, Any] = {
        "batch": session.batch,
        "data": None if session.data is None else str(session.data),
        "options": {**config.decoding.as_json(), "seed": config.seed},
        "system": system_of(config),
        "chat": converses(model, config.task),
        "chat_template": model.tokenizer.chat_template,
    }
    if not questions.is_own(config):
        settings["harness_seeds"] = HARNESS_SEEDS
    return {"settings": settings, "provenance": provenance(model.backbone.device, config.dtype)}


def prepare_config(config: EvalConfig, session: EvalSession) -> None:
    """Write the requests of a configuration to a file, so that a machine without the harness can answer them."""
    session.run.config_folder(config)
    path = _requests_path(config, session)
    if not path.exists():
        write_lines(path, [asdict(request) for request in _requests(config, session)])


def _requests(config: EvalConfig, session: EvalSession) -> list[Request]:
    if questions.is_own(config):
        return questions.requests_of(config, session.model, session.run, session.data)
    from codd_lab.tasks import scoring

    return scoring.requests_of(config, session.model, session.data)


def answer_config(config: EvalConfig, session: EvalSession, advance: Advance = quietly) -> None:
    """Answer the requests of the file; processes share them, and those that the log has answers to are skipped."""
    path, model = _requests_path(config, session), session.model
    if not path.exists():
        raise InvalidInput(f"{path}: there is no such file; codd eval --stage prepare with this model writes it.")
    if _elsewhere(config, model):
        raise InvalidInput(f"{config.slug} was prepared for {config.device}: give --device {config.device}.")
    requests: list[Request] = [validation.build(Request, line, where) for where, line in json_lines(path)]
    answerer = _answerer(config, session, session.model_for(config), advance)
    answerer.answers(requests[session.context.rank :: session.context.world_size])
    if session.context.is_main:
        write_json(session.run.config_folder(config) / ANSWERED, _record(config, session))


def _requests_path(config: EvalConfig, session: EvalSession) -> Path:
    """One file for all configurations with the same prompts: one task, prompt template and chat template."""
    tokenizer = session.model.tokenizer
    if tokenizer is None:
        raise InvalidInput("this checkpoint has no tokenizer: tasks ask in text.")
    chat = [tokenizer.chat_template, tokenizer.special_tokens] if converses(session.model, config.task) else None
    wording = chat if config.template is None else [chat, asdict(config.template)]
    digest = hashlib.sha256(json.dumps(wording, sort_keys=True).encode()).hexdigest()[:8]
    parts = [config.task, config.questions, config.split, config.problems or "all", digest]
    return session.run.folder / "requests" / f"{'-'.join(str(part) for part in parts if part)}.jsonl"
