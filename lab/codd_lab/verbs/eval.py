"""``codd eval``: tasks, likelihoods and cost, each circuit beside its control."""

import argparse
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codd.backbones.loading import DTYPES
from codd.cli import add_ray_argument, console, sampling, tables
from codd.cli.lists import add_list
from codd.decoding.options import PACES
from codd.distributed import DistributedContext, distributed
from codd.errors import InvalidInput
from codd.folders import exclusive
from codd_lab.tasks import configs
from codd_lab.tasks.configs import EvalConfig
from codd_lab.verbs import eval_studies

if TYPE_CHECKING:
    from codd.decoding import Model
    from codd_lab.report.comparisons import Comparison
    from codd_lab.runs import Result, Run
    from codd_lab.tasks.runner import EvalSession

NAME = "eval"
RESUMES = True
HELP = """\
Evaluates a model on tasks, with every circuit that is named, and beside each trained circuit the null circuit under
identical settings. Tasks go through EleutherAI's lm-eval: gsm8k, minerva_math500, gpqa_main_generative_n_shot and
mbpp_instruct by the paper's protocol, or any other of its tasks; our own are word_problems (generated from seeds that
no training saw), puzzles for parallel decoding (lines_copy, lines_reverse, lines_sort, lines_shuffle, lines_insert,
lines_remove, lines_replace, the last three also as lines_insert_any and so on, latin_square, sudoku) and books_text,
wikitext_text (passages to be continued, scored by --judge). --task-file asks questions of your own: lines of JSON with
"question" and "answer". Our own and yours need no lm-eval. Options of the loop may have several values with commas
between them: all combinations are run. --steps, --threshold and --entropy-budget are alternatives. Data comes from the
hub, or without a network from files under --data. Programs that a model writes run in a process that can touch nothing.

OUT_DIR keeps every sample with settings, seeds, machine and versions. Start it again to go on after an interruption:
what was answered is not asked again. Under torchrun or accelerate launch, the processes share the problems.

Prints a table for each task: right answers, the difference to the null circuit with a bootstrap interval and McNemar's
exact test, network calls, TPF (tokens per forward, that is per network call) and seconds. Below it are AUP (accuracy
under parallelism), where several budgets were run, and the spread over prompt templates. `codd report OUT_DIR` makes a
page of it."""
COUNT = console.number(int, 1)
STAGES = ("all", "prepare", "answer", "score")
FIXED = ("ban", "seed", "stop", "tokens_per_step")
AXES = tuple(name for name in sampling.SAMPLING if name not in (*PACES, *FIXED))


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags: tasks and studies, model, decoding options."""
    parser.epilog = """\
examples:
  codd eval --tasks word_problems --problems 50 --steps 8,16 --out runs/first
  codd eval --task-file my.jsonl --answer-rule last-number --steps 16 --out runs/my
  codd eval --tasks word_problems --templates default,plain,step-by-step,terse --steps 16 --out runs/templates
  codd eval --tasks gsm8k,word_problems --steps 16,32,64 --circuit trained,null,none --data ../data --out runs/mini
  codd eval --tasks word_problems --steps 16,32 --threshold 0.7,0.9 --out runs/frontier
  codd eval --tasks books_text --temperature 1 --steps 16,32,64 --judge smollm2 --data ../data --out runs/text
  codd eval --tasks word_problems --steps 16 --circuit-temperature 1,0.5,0.2 --activation none,0.7,0.4 --tune 200 \\
            --out runs/ablation
  codd eval --studies gap,continuations,cost --data ../data --out runs/likelihood
  codd eval --studies continuations --model louaaron/sedd-small --circuit FOLDER --causal openai-community/gpt2 \\
            --text wiki.valid.txt --out runs/sedd
  torchrun --nproc-per-node 8 -m codd eval --model GSAI-ML/LLaDA-8B-Instruct --circuit FOLDER --tasks gsm8k --out OUT"""
    parser.add_argument(
        "--out", "--output", metavar="OUT_DIR", type=Path, required=True, help="the run: new, or one to go on with"
    )
    add_list(parser, "--tasks", default=[], metavar="NAME", help="what is asked")
    parser.add_argument("--task-file", type=Path, action="append", default=[], metavar="FILE", help=_TASK_FILE)
    parser.add_argument("--answer-rule", metavar="RULE", help=_ANSWER_RULE)
    add_list(parser, "--templates", metavar="NAME", help=_TEMPLATES)
    add_list(parser, "--studies", default=[], metavar="NAME", help=f"of {', '.join(eval_studies.STUDIES)}")
    parser.add_argument("--judge", metavar="NAME", help="scores continued text: smollm2, a folder or a hub id")
    parser.add_argument("--causal", metavar="PATH", help=_CAUSAL)
    add_list(parser, "--text", metavar="NAME", help=_TEXT)
    parser.add_argument(
        "--problems", "--limit", type=COUNT, metavar="N", help="of each task, or texts of a study (default: all)"
    )
    parser.add_argument("--split", default="test", choices=("test", "validation"), help="default: test")
    parser.add_argument("--tune", type=COUNT, metavar="N", help=_TUNE)
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="where data files are (default: the hub)")
    parser.add_argument("--batch", type=COUNT, default=8, metavar="N", help="prompts at a time (default: 8)")
    parser.add_argument("--seed", type=console.seed, default=0, help="of all that is drawn (default: 0)")
    parser.add_argument(
        "--no-control", dest="control", action="store_false", help="no null circuit beside trained ones"
    )
    parser.add_argument("--stage", choices=STAGES, default="all", help=_STAGE)
    parser.add_argument("--run-unconfined-code", action="store_true", help="where programs cannot be confined")
    parser.add_argument("--json", action="store_true", help="print the comparisons as one JSON object")
    add_ray_argument(parser)
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="PATH", help="a folder or hub id (default: the bundled model)")
    sampling.add_adapter_argument(group)
    add_list(group, "--circuit", default=["trained"], metavar="NAME", help=_CIRCUIT)
    group.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    group.add_argument("--dtype", metavar="TYPE", help=f"{', '.join(DTYPES)} (default: float32 on a CPU)")
    sampling.add_quantize_argument(group)
    group = parser.add_argument_group("sampling, several values with commas between them")
    for name in (*PACES, *AXES):
        _, metavar, text = sampling.SAMPLING[name]
        add_list(group, f"--{name.replace('_', '-')}", _value_of(name), metavar=metavar, help=text)
    group.add_argument(
        "--no-stop", action="store_true", help="keep what follows the end of text, as the published implementation does"
    )


_TUNE = (
    "choose circuit_temperature and activation on N problems of the validation split, for each circuit and for the "
    "control by itself, and report the choice on test"
)
_TASK_FILE = "a task of your own: a .jsonl file with question and answer on each line; may be given several times"
_ANSWER_RULE = (
    "how answers to --task-file are read: last-number, letter, exact or regex:PATTERN (default: the first of them that "
    "fits all right answers)"
)
_TEMPLATES = (
    "prompt templates, each with every circuit: default (the task's own prompt), plain, step-by-step, terse, or .yaml "
    "and .json files of yours: a list of sections with name, text ({question} is the question's place) and system"
)
_STAGE = (
    "for machines without a network: prepare writes what is asked of --device, answer answers it there (no lm-eval and "
    "no data needed), score takes the answers up; default: all at once"
)
_CAUSAL = "a causal model of the same tokens for DCD: ours, or any of transformers (GPT-2 beside SEDD and MDLM)"
_TEXT = (
    "what likelihood studies read: corpora under --data, files of your own, or datasets of the hub, "
    "owner/name[:config][:split] (default: all that fit the study)"
)
_CIRCUIT = "trained (the model's own), static, null, none, or folders (default: trained)"


def run(args: argparse.Namespace) -> int:
    """Run tasks, studies and the judge, then print the table."""
    _check(args)
    from codd_lab.runs import Run

    device = "cpu" if args.stage in ("prepare", "score") else args.device
    with distributed(device) as context:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # machines need not share a disk
            Run(args.out, create=args.stage in ("all", "prepare"))
        context.barrier()
        run_folder = Run(args.out)
        with exclusive(args.out) if context.is_main else nullcontext():
            asks = args.tasks or args.task_file or args.stage in ("answer", "score")
            if asks or args.studies:
                model = _model(args, context)
                if asks:
                    _tasks(args, run_folder, model, context)
                if context.is_main and args.studies:
                    _studies(args, run_folder, model)
            if context.is_main and args.stage in ("all", "score"):
                _judge(args, run_folder)
                _print(args, run_folder)
    return 0


def _check(args: argparse.Namespace) -> None:
    unknown = [name for name in args.studies if name not in eval_studies.STUDIES]
    if unknown:
        raise InvalidInput(f"there is no study {unknown[0]!r}; there are {', '.join(eval_studies.STUDIES)}.")
    if not (args.tasks or args.task_file or args.studies or args.judge or args.stage in ("answer", "score")):
        raise InvalidInput(
            "there is nothing to do: name --tasks, --task-file, --studies, or a --judge for texts of OUT_DIR."
        )
    if args.answer_rule is not None and not args.task_file:
        raise InvalidInput("--answer-rule is for a --task-file: tasks with a name have rules of their own.")
    if args.templates is not None and not (args.tasks or args.task_file):
        raise InvalidInput("--templates are for questions: name --tasks or a --task-file.")
    if args.data is not None and not args.data.is_dir():
        raise InvalidInput(f"--data {args.data}: there is no such folder.")


def _model(args: argparse.Namespace, context: DistributedContext) -> "Model":
    from codd.decoding import load

    with console.working(f"loading {args.model or 'the bundled model'}", shown=context.is_main):
        told = {"dtype": args.dtype, "adapter": args.adapter, "quantize": args.quantize}
        return load(args.model, None, device=str(context.device), **told)


def _name(args: argparse.Namespace) -> str | None:
    """The name of the model in a configuration, with adapter and quantization."""
    more = [each for each in (args.adapter, args.quantize) if each is not None]
    return " + ".join([args.model or "bundled", *more]) if more else args.model


def _tasks(args: argparse.Namespace, run: "Run", model: "Model", context: DistributedContext) -> None:
    from codd_lab.tasks.runner import EvalSession, answer_config, prepare_config, run_config
    from codd_lab.tasks.sandbox import Limits

    limits = Limits(confined=not args.run_unconfined_code)
    session = EvalSession(run, model, context, args.data, args.batch, limits, read_only=args.stage == "score")
    if args.stage in ("answer", "score"):
        asked = [config for config in run.configs() if config.model == _name(args)]
        return _each(asked, session, args.stage, answer_config if args.stage == "answer" else run_config)
    wanted = _grid(args, model, run)
    if context.is_main and "latent" in (args.sampler or ()) and (args.threshold or args.entropy_budget):
        console.say("sampler latent is left out but by steps: given one latent path every token looks sure.")
    if args.stage == "prepare":
        return _each(wanted, session, "preparing", lambda config, where, _: prepare_config(config, where))
    if args.tune is None:
        return _each(wanted, session, "", run_config)
    _each(wanted, session, "validation", run_config)
    from codd_lab.tasks.tuning import chosen

    context.barrier()
    tested = chosen([result for config in wanted if (result := run.result(config))], problems=args.problems)
    return _each(tested, session, "test", run_config)


def _each(
    wanted: Sequence[EvalConfig],
    session: "EvalSession",
    label: str,
    work: Callable[[EvalConfig, "EvalSession", Callable[[int], None]], Any],
) -> None:
    """Run configurations one after the other, each with a progress bar on the main process."""
    for number, config in enumerate(wanted):
        name = f"{label} {number + 1}/{len(wanted)} {config.slug}".strip()
        total = config.problems or 0
        if not session.context.is_main:
            work(config, session, lambda count: None)
            continue
        with console.bar(name, math.ceil(total / session.context.world_size)) as bar, console.one_line_warnings():
            work(config, session, bar.advance)


def _grid(args: argparse.Namespace, model: "Model", run: "Run") -> list[EvalConfig]:
    """The configurations of the command line; with --tune those of the validation split."""
    from codd_lab.tasks.questions import add_task_file, templates_for
    from codd_lab.tasks.runner import default_length

    axes = {name: getattr(args, name) for name in AXES if getattr(args, name) is not None}
    budgets = {name: getattr(args, name) for name in PACES if getattr(args, name) is not None}
    grid = functools.partial(
        configs.grid,
        circuits=args.circuit,
        axes=axes | ({"stop": [False]} if args.no_stop else {}),
        budgets=budgets,
        control=args.control,
        problems=args.problems if args.tune is None else args.tune,
        split=args.split if args.tune is None else "validation",
        seed=args.seed,
        model=_name(args),
        dtype=model.backbone.precision,
        device=args.device.split(":")[0] if args.device else model.backbone.device.type,
    )
    asked: list[tuple[str, dict[str, Any]]] = [(task, {}) for task in dict.fromkeys(args.tasks)]
    asked += [(path.stem, add_task_file(path, args.answer_rule, run)) for path in args.task_file]
    return [
        dataclasses.replace(config, options={"gen_length": default_length(task, model), **config.options})
        for task, told in asked
        for template in templates_for(args.templates, run, task, told.get("answer_rule"))
        for config in grid([task], template=template, **told)
    ]


def _studies(args: argparse.Namespace, run: "Run", model: "Model") -> None:
    for study in args.studies:
        if (run.folder / "studies" / f"{study}.json").exists():
            console.say(f"{study}: is there already ({run.folder / 'studies'}); remove the file to measure it again")
            continue
        with console.bar(study) as bar:

            def progress(part: str, done: int, total: int, bar: console.Bar = bar, study: str = study) -> None:
                bar.update(done, f"{study}: {part}", total)

            run.write_study(study, eval_studies.STUDIES[study](args, model, progress))


def _judge(args: argparse.Namespace, run: "Run") -> None:
    """Score continued texts with --judge; without one, say how many wait for it."""
    from codd_lab.text.verdicts import judge_run, to_be_judged

    waiting = [result for result in to_be_judged(run) if result.judged is None]
    if args.judge is None:
        if waiting:
            console.say(
                f"{len(waiting)} configurations of continued text wait for a judge: "
                f"codd eval --judge smollm2 --out {args.out}"
            )
        return
    from codd_lab.text.judge import load_judge

    with console.working(f"loading {args.judge}"):
        judge = load_judge(args.judge, device=args.device)
    with console.bar(f"judged by {judge.name}", len(to_be_judged(run, judge.name))) as bar:
        judge_run(run, judge, lambda done, total: bar.advance())


def _print(args: argparse.Namespace, run: "Run") -> None:
    from codd_lab.report.render import make_report

    report = make_report(run, samples=0)
    if args.json:
        from codd_lab import measures
        from codd_lab.measures import template_spreads

        results = run.results()
        over = [spread.as_json() for spread in template_spreads(results)]
        more = {"measures": measures.summary(results), **({"templates": over} if over else {})}
        console.as_json({"run": str(args.out), **report.as_json(), **more})
        return
    tables.show(_tables(run))
    for sentence in report.findings[:1]:
        console.out().print(console.one_line(sentence))
    console.fields(f"run: {args.out}", {"page": f"codd report {args.out}"})


def _tables(run: "Run") -> list[tables.Section]:
    """A table for each task and split, as wide as a terminal; the report has the rest."""
    from codd_lab.measures import tokens_per_forward
    from codd_lab.report.comparisons import against_control
    from codd_lab.report.labels import by_task, label, varying
    from codd_lab.report.quality import quality_of

    shown, everything = [], run.results()
    for split in dict.fromkeys(result.config.split for result in everything):
        for task, results in by_task(result for result in everything if result.config.split == split).items():
            quality, names = quality_of(results), varying(result.config for result in results)
            if quality is None:
                continue
            rows = []
            for result in results:
                estimate, pair = quality.of(result), against_control(result, results)
                row = [
                    label(result.config, names),
                    "-" if estimate is None else f"{estimate.value:.3g}",
                    "-" if pair is None else _difference(pair),
                    f"{result.calls:.1f}",
                    f"{tokens_per_forward(result.samples):.2f}",
                    f"{result.seconds:.2g}",
                ]
                rows.append(row)
            header = ["configuration", quality.title, "to the null circuit", "calls", "TPF", "seconds"]
            name = task if split == "test" else f"{task} ({split})"
            after = [*_areas(results), *_over_templates(results)]
            shown.append(tables.Section(f"{name}, {results[0].problems} problems", [], header, rows, after))
    return shown


def _areas(results: Sequence["Result"]) -> list[str]:
    """A line with AUP for every circuit that was run at several budgets."""
    from codd_lab.measures import parallelism
    from codd_lab.report.labels import label, varying

    ways = [way for way in parallelism(results) if len(way.points) > 1]
    names = varying(way.config for way in ways)
    return [
        f"{label(way.config, names, with_budget=False)}: AUP {way.aup:.1f} of {len(way.points)} budgets"
        + ("" if way.null is None else f", {way.null:.1f} with the null circuit")
        for way in ways
    ]


def _over_templates(results: Sequence["Result"]) -> list[str]:
    """A line for every configuration that was run under several prompt templates."""
    from codd_lab.measures import template_spreads
    from codd_lab.report.labels import label, varying

    spreads = template_spreads(results)
    names = varying(spread.config for spread in spreads)
    words = ": mean {mean:.1f}, {low:.1f} to {high:.1f}"
    return [
        f"{label(spread.config, names)}, over {len(spread.accuracies)} templates{words.format(**spread.figures)}"
        + ("" if spread.verdict == "-" else f"; {spread.verdict}")
        for spread in spreads
    ]


def _difference(pair: "Comparison") -> str:
    from codd_lab.report.labels import p_value

    digits = 1 if pair.unit == "points" else 3
    chance = "" if pair.p is None else f", {p_value(pair.p)}"
    return f"{pair.difference:+.{digits}f} ({pair.low:+.{digits}f} to {pair.high:+.{digits}f}){chance}"


def _value_of(name: str) -> Callable[[str], Any]:
    """A parser of one option's values."""

    def parse(text: str) -> Any:
        try:
            return sampling.parse_option(name, text)
        except InvalidInput as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse
