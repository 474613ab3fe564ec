"""``codd eval``: tasks, likelihoods and cost, each circuit beside its control."""

import argparse
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codd.cli import console, eval_studies, runs, sampling, tables
from codd.decoding.options import PACES
from codd.errors import InvalidInput
from codd.evaluation.tasks import cells
from codd.evaluation.tasks.cells import Cell
from codd.training.outputs import alone_in
from codd.training.workers import Workers, workers

if TYPE_CHECKING:
    from codd.decoding import Model
    from codd.evaluation.report.findings import Comparison
    from codd.evaluation.runs import Run
    from codd.evaluation.tasks.grid import Setting

NAME = "eval"
HELP = """\
Evaluates a model on tasks, with every circuit that is named, and beside each trained circuit the null circuit under
identical settings. Tasks go through EleutherAI's lm-eval: gsm8k, minerva_math500, gpqa_main_generative_n_shot and
mbpp_instruct by the paper's protocol, or any other of its tasks; our own are word_problems (generated from seeds that
no training saw) and books_text, wikitext_text (passages to be continued, scored by --judge). Options of the loop may
have several values with commas between them: all combinations are run. --steps, --threshold and --entropy-budget are
alternatives. Data comes from the hub, or without a network from files under --data. Programs that a model writes run
in a process that can touch nothing.

OUT_DIR keeps every sample with settings, seeds, machine and versions. Start it again to go on after an interruption:
what was answered is not asked again. Under torchrun or accelerate launch, the processes share the problems.

Prints a table for each task: right answers, the difference to the null circuit with a bootstrap interval and McNemar's
exact test, network calls, seconds. `codd report OUT_DIR` makes a page of it."""
STAGES = ("all", "prepare", "answer", "score")
TUNED = ("circuit_temperature", "activation")
FIXED = ("ban", "seed", "stop", "tokens_per_step")
AXES = tuple(name for name in sampling.SAMPLING if name not in (*PACES, *FIXED))


def configure(parser: argparse.ArgumentParser) -> None:
    """What is asked, of which model, how."""
    parser.epilog = """\
examples:
  codd eval --tasks word_problems --problems 50 --steps 8,16 --out runs/first
  codd eval --tasks gsm8k,word_problems --steps 16,32,64 --circuit trained,null,none --data ../data --out runs/mini
  codd eval --tasks word_problems --steps 16,32 --threshold 0.7,0.9 --out runs/frontier
  codd eval --tasks books_text --temperature 1 --steps 16,32,64 --judge smollm2 --data ../data --out runs/text
  codd eval --tasks word_problems --steps 16 --circuit-temperature 1,0.5,0.2 --activation none,0.7,0.4 --tune 200 \\
            --out runs/ablation
  codd eval --studies gap,continuations,cost --data ../data --out runs/likelihood
  torchrun --nproc-per-node 8 -m codd eval --model GSAI-ML/LLaDA-8B-Instruct --circuit FOLDER --tasks gsm8k --out OUT"""
    parser.add_argument("--out", metavar="OUT_DIR", type=Path, required=True, help="the run: new, or one to go on with")
    parser.add_argument("--tasks", type=_words, default=[], metavar="NAME,..", help="what is asked")
    parser.add_argument(
        "--studies", type=_words, default=[], metavar="NAME,..", help=f"of {', '.join(eval_studies.STUDIES)}"
    )
    parser.add_argument("--judge", metavar="NAME", help="scores continued text: smollm2, a folder or a hub id")
    parser.add_argument("--causal", metavar="PATH", help="a causal codd model of the same tokenizer, for DCD")
    parser.add_argument("--problems", type=_count, metavar="N", help="of each task, or texts of a study (default: all)")
    parser.add_argument("--split", default="test", choices=("test", "validation"), help="default: test")
    parser.add_argument("--tune", type=_count, metavar="N", help=_TUNE)
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="where data files are (default: the hub)")
    parser.add_argument("--batch", type=_count, default=8, metavar="N", help="prompts at a time (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: 0)")
    parser.add_argument(
        "--no-control", dest="control", action="store_false", help="no null circuit beside trained ones"
    )
    parser.add_argument("--stage", choices=STAGES, default="all", help=_STAGE)
    parser.add_argument("--run-unconfined-code", action="store_true", help="where programs cannot be confined")
    parser.add_argument("--json", action="store_true", help="print the comparisons as one JSON object")
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="PATH", help="a folder or hub id (default: the bundled model)")
    sampling.add_adapter_argument(group)
    group.add_argument("--circuit", type=_words, default=["trained"], metavar="NAME,..", help=_CIRCUIT)
    group.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    group.add_argument("--dtype", metavar="TYPE", help=f"{', '.join(sampling.DTYPES)} (default: float32 on a CPU)")
    sampling.add_quantize_argument(group)
    group = parser.add_argument_group("sampling, several values with commas between them")
    for name in (*PACES, *AXES):
        _, metavar, text = sampling.SAMPLING[name]
        group.add_argument(f"--{name.replace('_', '-')}", type=_values(name), metavar=f"{metavar},..", help=text)
    group.add_argument(
        "--no-stop", action="store_true", help="keep what follows the end of text, as the published implementation does"
    )


_TUNE = (
    "choose circuit_temperature and activation on N problems of the validation split, for each circuit and for the "
    "control by itself, and report the choice on test"
)
_STAGE = (
    "for machines without a network: prepare writes what is asked of --device, answer answers it there (no lm-eval and "
    "no data needed), score takes the answers up; default: all at once"
)
_CIRCUIT = "trained (the model's own), static, null, none, or folders (default: trained)"


def run(args: argparse.Namespace) -> int:
    """Tasks, then studies, then the judge, then the table."""
    _check(args)
    from codd.evaluation.runs import Run

    with workers("cpu" if args.stage in ("prepare", "score") else args.device) as group:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # machines need not share a disk
            Run(args.out, create=args.stage in ("all", "prepare"))
        group.wait()
        found = Run(args.out)
        with alone_in(args.out) if group.leads else nullcontext():
            if args.tasks or args.studies or args.stage in ("answer", "score"):
                _measure(args, found, group)
            if group.leads and args.stage in ("all", "score"):
                _judge(args, found)
                _print(args, found)
    return 0


def _measure(args: argparse.Namespace, found: "Run", group: Workers) -> None:
    model = _model(args, group)
    if args.tasks or args.stage in ("answer", "score"):
        _tasks(args, found, model, group)
    if group.leads and args.studies:
        _studies(args, found, model)


def _check(args: argparse.Namespace) -> None:
    unknown = [name for name in args.studies if name not in eval_studies.STUDIES]
    if unknown:
        raise InvalidInput(f"there is no study {unknown[0]!r}; there are {', '.join(eval_studies.STUDIES)}.")
    if args.dtype is not None and args.dtype not in sampling.DTYPES:
        raise InvalidInput(f"--dtype must be one of {', '.join(sampling.DTYPES)}, found {args.dtype!r}.")
    if not (args.tasks or args.studies or args.judge or args.stage in ("answer", "score")):
        raise InvalidInput("there is nothing to do: name --tasks, --studies, or a --judge for texts of OUT_DIR.")
    if args.data is not None and not args.data.is_dir():
        raise InvalidInput(f"--data {args.data}: there is no such folder.")


def _model(args: argparse.Namespace, group: Workers) -> "Model":
    import torch

    from codd.decoding import load

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    with runs.spinner(group, f"loading {args.model or 'the bundled model'}"):
        where = str(group.device)
        return load(args.model, None, device=where, dtype=dtype, adapter=args.adapter, quantize=args.quantize)


def _name(args: argparse.Namespace) -> str | None:
    """What a cell says of the model."""
    more = [each for each in (args.adapter, args.quantize) if each is not None]
    return " + ".join([args.model or "bundled", *more]) if more else args.model


def _tasks(args: argparse.Namespace, found: "Run", model: "Model", group: Workers) -> None:
    from codd.evaluation.tasks.grid import Setting, answer_cell, prepare_cell, run_cell
    from codd.evaluation.tasks.sandbox import Limits

    limits = Limits(confined=not args.run_unconfined_code)
    setting = Setting(found, model, group, args.data, args.batch, limits)
    if args.stage in ("answer", "score"):
        asked = [cell for cell in found.cells() if cell.model == _name(args)]
        return _each(asked, setting, args.stage, answer_cell if args.stage == "answer" else run_cell)
    wanted = _grid(args, model)
    if group.leads and "latent" in (args.sampler or ()) and (args.threshold or args.entropy_budget):
        runs.say("sampler latent is left out but by steps: given one latent path every token looks sure.")
    if args.stage == "prepare":
        return _each(wanted, setting, "preparing", lambda cell, where, _: prepare_cell(cell, where))
    if args.tune is None:
        return _each(wanted, setting, "", run_cell)
    _each(wanted, setting, "validation", run_cell)
    from codd.evaluation.tasks.tuning import chosen

    group.wait()
    tested = chosen([result for cell in wanted if (result := found.result(cell))], TUNED, problems=args.problems)
    return _each(tested, setting, "test", run_cell)


def _each(
    wanted: Sequence[Cell],
    setting: "Setting",
    label: str,
    work: Callable[[Cell, "Setting", Callable[[int], None]], Any],
) -> None:
    """One cell after another, with a bar each where someone watches."""
    for number, cell in enumerate(wanted):
        name = f"{label} {number + 1}/{len(wanted)} {cell.slug}".strip()
        total = cell.problems or 0
        if not setting.group.leads:
            work(cell, setting, lambda count: None)
            continue
        with sampling.bar(name, math.ceil(total / setting.group.count)) as advance, sampling.one_line_warnings():
            work(cell, setting, advance)


def _grid(args: argparse.Namespace, model: "Model") -> list[Cell]:
    """What was asked for; with --tune on the validation split."""
    from codd.evaluation.tasks.grid import default_length

    axes = {name: getattr(args, name) for name in AXES if getattr(args, name) is not None}
    paces = {name: getattr(args, name) for name in PACES if getattr(args, name) is not None}
    found = cells.grid(
        args.tasks,
        args.circuit,
        axes | ({"stop": [False]} if args.no_stop else {}),
        paces,
        control=args.control,
        problems=args.problems if args.tune is None else args.tune,
        split=args.split if args.tune is None else "validation",
        seed=args.seed,
        model=_name(args),
        dtype=model.backbone.precision,
        device=args.device.split(":")[0] if args.device else model.backbone.device.type,
    )
    return [
        dataclasses.replace(cell, options={"gen_length": default_length(cell.task, model), **cell.options})
        for cell in found
    ]


def _studies(args: argparse.Namespace, found: "Run", model: "Model") -> None:
    for study in args.studies:
        if (found.folder / "studies" / f"{study}.json").exists():
            runs.say(f"{study}: is there already ({found.folder / 'studies'}); remove the file to measure it again")
            continue
        with eval_studies.parts_bar(study) as told:
            found.write_study(study, eval_studies.STUDIES[study](args, model, told))


def _judge(args: argparse.Namespace, found: "Run") -> None:
    """Texts that nobody has judged yet are named, so that a table without them does not surprise."""
    from codd.evaluation.text.verdicts import judge_run, to_be_judged

    waiting = [result for result in to_be_judged(found) if result.judged is None]
    if args.judge is None:
        if waiting:
            runs.say(
                f"{len(waiting)} cells of continued text wait for a judge: codd eval --judge smollm2 --out {args.out}"
            )
        return
    from codd.evaluation.text.judge import load_judge

    with console.working(f"loading {args.judge}"):
        judge = load_judge(args.judge, device=args.device)
    with sampling.bar(f"judged by {judge.name}", len(to_be_judged(found, judge.name))) as advance:
        judge_run(found, judge, lambda done, total: advance(1))


def _print(args: argparse.Namespace, found: "Run") -> None:
    from codd.evaluation.report.making import make_report

    report = make_report(found, samples=0)
    if args.json:
        console.as_json({"run": str(args.out), **report.as_json()})
        return
    tables.show(_tables(found))
    for sentence in report.findings[:1]:
        console.out().print(console.one_line(sentence))
    console.fields(f"run: {args.out}", {"page": f"codd report {args.out}"})


def _tables(found: "Run") -> list[tables.Section]:
    """Of each task and split what a terminal has room for; the report has the rest."""
    from codd.evaluation.report.findings import against_control
    from codd.evaluation.report.ways import by_task, quality_of, varying, way

    shown, everything = [], found.results()
    for split in dict.fromkeys(result.cell.split for result in everything):
        for task, results in by_task(result for result in everything if result.cell.split == split).items():
            quality, names = quality_of(results), varying(result.cell for result in results)
            if quality is None:
                continue
            rows = []
            for result in results:
                estimate, pair = quality.of(result), against_control(result, results)
                cells_of = [
                    way(result.cell, names),
                    "-" if estimate is None else f"{estimate.value:.3g}",
                    "-" if pair is None else _difference(pair),
                    f"{result.calls:.1f}",
                    f"{result.seconds:.2g}",
                ]
                rows.append([tables.Cell(text) for text in cells_of])
            header = ["way", quality.title, "to the null circuit", "calls", "seconds"]
            name = task if split == "test" else f"{task} ({split})"
            shown.append(tables.Section(f"{name}, {results[0].problems} problems", [], header, rows))
    return shown


def _difference(pair: "Comparison") -> str:
    from codd.evaluation.report.findings import chance_of

    digits = 1 if pair.unit == "points" else 3
    chance = "" if pair.p is None else f", {chance_of(pair.p)}"
    return f"{pair.difference:+.{digits}f} ({pair.low:+.{digits}f} to {pair.high:+.{digits}f}){chance}"


def _words(text: str) -> list[str]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise argparse.ArgumentTypeError("expected at least one name")
    return found


def _values(name: str) -> Callable[[str], list[Any]]:
    """Several values of one option."""

    def parse(text: str) -> list[Any]:
        try:
            return [sampling.parse_option(name, word) for word in _words(text)]
        except InvalidInput as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, found {text}")
    return count
