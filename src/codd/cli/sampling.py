"""What the verbs that write text share: their arguments, and one run of the loop with what it cost."""

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from codd.backbones.loading import DTYPES
from codd.cli import console, lists
from codd.decoding import Model, Options, Step, load
from codd.decoding.options import DEFAULTS, OPTIONS, PACES, default_in_words
from codd.errors import InvalidInput

ABOUT = (
    "A small model (27 million parameters) for grade-school word problems and, without its chat template, English "
    "prose; no assistant. The final answer of a problem stands after ####."
)
"""What to expect of the bundled model; of others nobody knows."""


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in lists.split(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token ids with commas between them, found {text!r}") from None


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"expected on or off, found {text!r}")
    return text == "on"


_PARSERS: dict[str, Callable[[str], Any]] = {
    "count": int,
    "number": float,
    "choice": str,
    "ids": _ids,
    "stop": _switch,
    "seed": int,
    "verifier": str,
}
SAMPLING = {
    name: (_PARSERS[info.kind], info.metavar, info.help.replace("null:", "none:"))
    for name, info in OPTIONS.items()
    if info.kind in _PARSERS
}
"""Every option that can be typed as text, and one that means ``steps``: its parser, its metavar and its help."""
SAMPLING["tokens_per_step"] = int, "N", "instead of --steps: this many tokens in each"
SAMPLING["stop"] = _switch, "on|off", "end at the end-of-text token"
ALIASES = {"gen_length": ("--max-new-tokens",)}
"""Names that other tools give to an option's flag."""


def add_arguments(parser: argparse.ArgumentParser, *, chat: bool = True) -> None:
    """Which model, whether it converses (if that is for the verb to say), and all options of the loop."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="PATH", help="a folder or hub id (default: the bundled model)")
    add_adapter_argument(group)
    add_circuit_argument(group)
    group.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    group.add_argument("--dtype", metavar="TYPE", help=f"{', '.join(DTYPES)} (default: float32 on a CPU)")
    add_quantize_argument(group)
    if chat:
        group.add_argument(
            "--chat",
            action=argparse.BooleanOptionalAction,
            help="whether a prompt is a question for the chat template (default: if the model has one)",
        )
    group = parser.add_argument_group("sampling")
    pace = group.add_mutually_exclusive_group()
    for name, (parse, metavar, text) in SAMPLING.items():
        where = pace if name in (*PACES, "tokens_per_step") else group
        if name == "stop":
            where = group.add_mutually_exclusive_group()
            where.add_argument("--no-stop", dest="stop", action="store_false", default=None, help=f"do not {text}")
            where.add_argument(
                "--stop", action="append", metavar="TEXT", help="also end before this text; may be given several times"
            )
        else:
            described = text if name == "tokens_per_step" else f"{text} (default: {default_in_words(name)})"
            action = lists.Extend if parse is _ids else "store"
            flags = f"--{name.replace('_', '-')}", *ALIASES.get(name, ())
            where.add_argument(*flags, action=action, type=parse, metavar=metavar, help=described)


def add_adapter_argument(parser: argparse._ActionsContainer) -> None:
    """Which adapter of the model."""
    parser.add_argument("--adapter", metavar="PATH", help="a LoRA adapter of PEFT for the model: a folder or hub id")


def add_quantize_argument(parser: argparse._ActionsContainer) -> None:
    """Whether the model's weights are rounded."""
    parser.add_argument(
        "--quantize", choices=("int8",), help="8-bit weights: less time and memory, a little less precise"
    )


def add_circuit_argument(parser: argparse._ActionsContainer) -> None:
    """Which circuit; for verbs that choose the rest themselves."""
    parser.add_argument(
        "--circuit",
        metavar="PATH",
        default="trained",
        help="a folder or hub id, static for the model's own that the network does not modulate, null for the one that "
        "changes nothing, or none (default: the model's own, if any)",
    )


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the loop that were typed."""
    return {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}


def options_from(args: argparse.Namespace) -> Options:
    """What the arguments say, checked."""
    return options_of(given(args))


def options_of(chosen: Mapping[str, Any]) -> Options:
    """From the names in `SAMPLING`; tokens in a step become steps."""
    chosen = dict(chosen)
    at_once = chosen.pop("tokens_per_step", None)
    if at_once is not None:
        if at_once < 1:
            raise InvalidInput(f"tokens_per_step must be a whole number of at least 1, found {at_once}.")
        gen_length = chosen.get("gen_length", DEFAULTS.gen_length)
        if gen_length == 0:
            raise InvalidInput("tokens_per_step divides gen_length, which is 0: give steps instead.")
        chosen["steps"] = max(1, math.ceil(gen_length / at_once))
    return Options.of(**chosen)


def parse_option(name: str, text: str) -> Any:
    """A value for one of `SAMPLING`, as it is typed in a conversation; None for "none"."""
    if name not in SAMPLING:
        raise InvalidInput(f"there is no option {name!r}; there are {', '.join(SAMPLING)}.")
    if text == "none":
        return None
    try:
        return SAMPLING[name][0](text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise InvalidInput(f"{name}: {error}.") from None


def model_from(args: argparse.Namespace) -> Model:
    """The model that was asked for, with its circuit."""
    return load(
        args.model,
        circuit_from(args),
        device=args.device,
        dtype=args.dtype,
        adapter=args.adapter,
        quantize=args.quantize,
    )


def about(args: argparse.Namespace) -> str | None:
    """What to expect of the model that was asked for, if that is known."""
    return ABOUT if args.model is None and args.adapter is None else None


def circuit_from(args: argparse.Namespace) -> str | None:
    """As `codd.load` takes it."""
    return None if args.circuit == "none" else str(args.circuit)


@dataclass(frozen=True)
class Answer:
    """What became of one prompt, and what it cost."""

    ids: list[int]
    """The continuation; where the prompt had masks, all of it."""
    text: str | None
    """None if the model has no tokenizer."""
    tokens: int
    """How many were written."""
    steps: int
    """Evaluations of the network."""
    circuit_steps: int
    """In how many of them the circuit acted."""
    seconds: float


def answer(
    model: Model, prompts: Sequence[Sequence[int]], options: Options, watch: Callable[[Step], None] = lambda step: None
) -> list[Answer]:
    """Run the loop on prompts of ids and count; ``watch`` sees every step."""
    begun = time.perf_counter()
    sequences = [torch.tensor(list(prompt), dtype=torch.long) for prompt in prompts]
    seconds = [0.0] * len(prompts)
    steps: list[list[bool]] = [[] for _ in prompts]
    with console.one_line_warnings():
        for step in model.denoise([list(prompt) for prompt in prompts], options):
            sequences[step.sequence] = step.ids
            steps[step.sequence].append(step.circuit)
            seconds[step.sequence] = time.perf_counter() - begun
            watch(step)
    found = []
    for prompt, sequence, acted, took in zip(prompts, sequences, steps, seconds, strict=True):
        masks = sum(token == model.mask_id for token in prompt)
        ids = sequence.tolist() if masks else sequence[len(prompt) :].tolist()
        text = None if model.tokenizer is None else model.text(sequence, prompt, options.stop_strings)
        written = masks + len(sequence) - len(prompt)
        found.append(Answer(ids, text, written, len(acted), sum(acted), took))
    return found


def summary(answers: Sequence[Answer], model: Model, seconds: float) -> str:
    """One line: tokens, evaluations, seconds, and how often the circuit acted."""
    steps, acted = sum(a.steps for a in answers), sum(a.circuit_steps for a in answers)
    circuit = "no circuit" if model.circuit is None else f"circuit on in {acted} of {steps} steps"
    tokens = sum(a.tokens for a in answers)
    return f"{tokens} tokens, {steps} network evaluations, {seconds:.1f} s, {circuit}"


def printable(text: str) -> str:
    """Text with its lines, but without control characters: a model may write anything."""
    return "".join(c if c.isprintable() or c in "\n\t" else console.one_line(f"{c}x")[:-1] for c in text)
