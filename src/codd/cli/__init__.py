"""The command line: ``codd VERB``. One module a verb; this one finds it, runs it, and turns errors into exit codes.

Nothing here imports torch, so that ``codd --help`` and usage errors answer at once. The module of a verb has ``NAME``,
``HELP`` (what the verb does and what it prints), ``configure(parser)``, which adds arguments and examples, and
``run(args)``, which returns the exit code; ``RESUMES`` where the same command goes on with what was interrupted. Ours
are ``codd/cli/NAME.py`` with a line in `VERBS`; another package adds one by an entry point ``NAME = "its.module"`` in
the group `GROUP`.
"""

import argparse
import difflib
import importlib
import io
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any, NoReturn

import codd
from codd.cli import console, lists
from codd.errors import CoddError, InvalidInput, MissingDependency

VERBS = {
    "demo": "what the circuit gains, counted on this machine, in under a minute and without a network",
    "generate": "answer prompts, or continue them",
    "chat": "a conversation in which answers resolve in place",
    "cache": "ask a backbone once about many windows, and keep what it says for training circuits",
    "train": "train a circuit for a backbone from a recipe",
    "serve": "a model over HTTP for OpenAI clients, with a playground in which sentences resolve",
    "convert": "turn a PyJuice file (.jpc) into a codd circuit, running nothing of it",
    "info": "describe a model, a circuit, a hub id or a .jpc file",
}
LAB = {
    "eval": "tasks, likelihoods and cost, with every circuit beside its control",
    "report": "one page of an evaluation: tables, figures, and whether a gain survives the control",
    "pretrain": "train a network from a recipe",
    "bench": "what the circuit adds to a denoising step on this machine",
}
"""Verbs of the distribution codd-lab."""
GROUP = "codd.verbs"
"""Entry points of verbs that other packages bring."""

FAILED, USAGE, BUG, INTERRUPTED = 1, 2, 70, 130
"""Exit codes. 70 is EX_SOFTWARE of sysexits.h; 130 is what a shell reports for Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0 on success only."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A name that the terminal cannot show is no reason to fail. Python does the same for stderr by itself.
            sys.stdout.reconfigure(errors="backslashreplace")
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()  # here, where a closed pipe can still be handled
    except BrokenPipeError:
        _discard_stdout()
        return FAILED
    return code


def load(name: str) -> Any:
    """The module of a verb, of ours or of another package; InvalidInput says what to install for a missing one."""
    for entry in () if name in VERBS else metadata.entry_points(group=GROUP, name=name):
        return entry.load()
    if name in LAB:
        raise InvalidInput(f"codd {name} is of codd-lab: pip install codd-lab, or in a checkout pip install . ./lab.")
    return importlib.import_module(f"codd.cli.{name}")


def _run(argv: Sequence[str]) -> int:
    debug, verb = "--debug" in argv, None  # until they are parsed
    try:
        top = _parser()
        if not argv:
            top.print_help(sys.stderr)
            return USAGE
        first = top.parse_args(argv)
        verb = load(first.verb)
        args = _verb_parser(verb).parse_args(first.arguments)
        debug = first.debug or args.debug
        code = _run_on_ray(args, argv)
        return verb.run(args) if code is None else code
    except SystemExit as stop:  # argparse after --help, --version (0) and usage errors (2); rich at a closed pipe (1)
        return stop.code if isinstance(stop.code, int) else FAILED
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        again = ": run the same command" + " without --fresh" * ("--fresh" in argv) + " to go on"
        return _fail("interrupted" + again * hasattr(verb, "RESUMES"), INTERRUPTED, debug)
    except (CoddError, OSError) as error:
        return _fail(_describe(error), FAILED, debug)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        hint = "please report it with the traceback above" if debug else "run it again with --debug for the traceback"
        return _fail(f"this is a bug in codd ({found}); {hint}", BUG, debug)


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the arguments, and what was probably meant."""

    def error(self, message: str) -> NoReturn:
        """End with `USAGE`."""
        meant = ""
        if wrong := re.fullmatch(r"unrecognized arguments: (--[^ =]+).*", message, re.DOTALL):
            meant = did_you_mean(wrong[1], self._option_string_actions)
        elif wrong := re.match(r"argument VERB: invalid choice: '([^']*)'", message):
            message = f"there is no verb '{wrong[1]}'"
            meant = did_you_mean(wrong[1], (*VERBS, *LAB, *_installed()))
        self.exit(USAGE, f"codd: {console.one_line(message)}{meant}; see {self.prog} --help\n")


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """A question about the known name that is most like the wrong one; empty if none is."""
    near = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.7)
    return f" (did you mean {near[0]}?)" if near else ""


def _parser() -> argparse.ArgumentParser:
    """The first of two parsers: which verb. Its arguments are left to a parser that only that verb fills."""
    of_others = {name: f"of {package}" for name, package in _installed().items() if name not in {*VERBS, *LAB}}
    listed = {"verbs": VERBS, "verbs of codd-lab, the research tools": LAB, "verbs of other packages": of_others}
    width = max(len(name) for verbs in listed.values() for name in verbs)
    verbs = "\n\n".join(
        "\n".join([f"{title}:", *(f"  {name:<{width}}  {line}" for name, line in group.items())])
        for title, group in listed.items()
        if group
    )
    parser = _Parser(
        prog="codd",
        usage="codd [-h] [--version] [--debug] VERB ...",
        description="A joint output distribution for any diffusion language model: exact probabilistic circuits,\n"
        "multiplied into the network's factorized logits.",
        epilog=f"{verbs}\n\n{lists.ABOUT}\n\n"
        "`codd VERB --help` explains a verb and gives an example; start with `codd demo`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    version = f"codd {codd.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version and exit")
    _add_debug(parser)
    parser.add_argument("verb", choices=[*VERBS, *LAB, *of_others], metavar="VERB", help="what to do, see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _installed() -> dict[str, str]:
    """The verbs that other packages bring, each with the distribution that it comes from."""
    return {each.name: each.dist.name if each.dist else each.module for each in metadata.entry_points(group=GROUP)}


def _verb_parser(verb: Any) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"codd {verb.NAME}",
        description=verb.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.configure(parser)
    _add_debug(parser)
    return parser


def _add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def add_ray_argument(parser: argparse.ArgumentParser) -> None:
    """``--ray N`` of verbs whose processes divide their work by rank: Ray starts them instead of torchrun."""
    text = "N processes of a Ray cluster share the work, as torchrun's would"
    parser.add_argument("--ray", type=console.number(int, 1), metavar="N", help=text)


def _run_on_ray(args: argparse.Namespace, argv: Sequence[str]) -> int | None:
    """Run a command as ``--ray`` says, and its exit code; None if it was not given, or if Ray started this process."""
    processes = getattr(args, "ray", None)
    if processes is None or "RANK" in os.environ:
        return None
    try:
        from codd.integrations import ray_ranks
    except ImportError as error:
        raise MissingDependency(f"--ray needs {error.name}: pip install 'codd-lm[ray]'.") from None
    return ray_ranks.run(main, argv, processes)


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    console.error(message)
    return code


def _describe(error: CoddError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error) or type(error).__name__


def _discard_stdout() -> None:
    """Whoever read our output has gone; without this, Python complains when it flushes at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # not a real file, as in tests
        sys.stdout = io.StringIO()
