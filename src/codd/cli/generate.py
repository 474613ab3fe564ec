"""``codd generate``: answer prompts."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from codd.cli import console, constraint, sampling
from codd.cli.sampling import Answer
from codd.decoding import Model, Options, Step
from codd.decoding.prompts import Prompt
from codd.decoding.sequence import options_for
from codd.errors import InvalidInput
from codd.validation import build

NAME = "generate"
HELP = """\
Answers prompts, or continues them: those given as arguments, or those of a file, or what comes through a
pipe as one prompt. A file has one prompt a line; if its lines are JSON objects, each has "prompt" (a text),
"messages" (a conversation) or "ids" (tokens, for models without a tokenizer). A prompt may have masks,
which are filled; --gen-length 0 writes nothing after it.

Prints the texts, with a blank line between two of them, and on stderr what they cost: tokens, network
evaluations, seconds, and in how many of the steps the circuit acted. With --json one object a prompt, each on a line
of its own: prompt, text, ids, tokens, steps, circuit_steps, seconds, settings."""


class Message(BaseModel, strict=True):
    """A message of a conversation; other fields of it are nobody's business here."""

    role: str
    content: str


FIELDS = {"prompt": str, "messages": Annotated[list[Message], Field(min_length=1)], "ids": list[int]}
"""What an object of a line may hold."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Prompts, a model, and how it is to write."""
    parser.usage = "codd generate [options] [PROMPT ...]"
    parser.epilog = """\
examples:
  codd generate "Mia has 84 stamps and gives away half of them. How many are left?"
  codd generate --no-chat --temperature 0.8 --seed 3 "It was a dark night, and"
  codd generate --file prompts.jsonl --tokens-per-step 4 --json > answers.jsonl
  echo "What is 7 + 8?" | codd generate --circuit null
  codd generate --json-schema answer.json "Mia has 84 stamps and gives away half of them. How many are left?"
  codd generate "Mia has 84 stamps and gives away half of them. How many are left?" --after "#### " --regex "[0-9]+"""
    parser.add_argument("prompt", metavar="PROMPT", nargs="*", help="what to answer; default: what is piped in")
    parser.add_argument("--file", metavar="PATH", help="prompts, one a line, as text or JSON; - for stdin")
    parser.add_argument("--batch", type=int, metavar="N", default=8, help="prompts at a time (default: 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt, one a line")
    sampling.add_arguments(parser)
    constraint.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answer them, some at a time."""
    options = sampling.options_from(args).changed(constraint=constraint.from_arguments(args))
    if args.batch < 1:
        raise InvalidInput(f"--batch must be at least 1, found {args.batch}.")
    prompts = read_prompts(args)
    model = sampling.model_from(args)
    options = options_for(model.backbone, options)
    ids = model.encode(prompts, gen_length=options.gen_length, chat=args.chat)
    model.start(ids, options)  # an error in the last prompt comes first
    found: list[Answer] = []
    seconds = 0.0
    for first in range(0, len(ids), args.batch):
        part = slice(first, first + args.batch)
        new = _answer(model, ids[part], options, f"prompt {first + 1} to {min(part.stop, len(ids))} of {len(ids)}")
        for prompt, answer in zip(prompts[part], new, strict=True):
            _print(prompt, answer, options, args, blank=bool(found))
            found.append(answer)
        seconds += max(answer.seconds for answer in new)
    if not args.json:
        console.err().print(sampling.summary(found, model, seconds), style="dim", soft_wrap=True)
    return 0


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """From the arguments, a file or a pipe."""
    if args.prompt and args.file is not None:
        raise InvalidInput("prompts were given as arguments and with --file: leave one of them out.")
    if args.prompt:
        return list(args.prompt)
    if args.file is not None:
        found = list(_of_lines(_read(args.file), args.file))
    elif sys.stdin.isatty():
        raise InvalidInput('there is no prompt: codd generate "PROMPT", --file PATH, or pipe a text in.')
    else:
        text = _read("-").rstrip("\n")
        found = [text] if text.strip() else []
    if not found:
        raise InvalidInput(f"{args.file or 'stdin'}: there is no prompt in it.")
    return found


def _read(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: is not UTF-8 text (byte {error.start}).") from None


def _of_lines(text: str, name: str) -> Iterator[Prompt]:
    """One prompt a line; whether they are JSON is decided by the first."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    as_json = bool(lines) and (name.endswith(".jsonl") or _is_record(lines[0][1]))
    for number, line in lines:
        yield _of_json(line, f"{name}, line {number}") if as_json else line.removesuffix("\r")


def _is_record(line: str) -> bool:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and any(field in found for field in FIELDS)


def _of_json(line: str, where: str) -> Prompt:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where}: is not JSON ({error}).") from None
    for field, kind in FIELDS.items():
        if isinstance(found, dict) and field in found:
            build(kind, found[field], f'{where}: "{field}"')
            prompt: Prompt = found[field]
            return prompt
    raise InvalidInput(f'{where}: expected an object with "prompt", "messages" or "ids".')


def _answer(model: Model, ids: Sequence[Sequence[int]], options: Options, label: str) -> list[Answer]:
    """With a bar that counts tokens."""
    masks = sum(options.gen_length + sum(token == model.mask_id for token in prompt) for prompt in ids)
    with console.bar(label, masks) as bar:

        def watch(step: Step) -> None:
            bar.advance(len(step.positions))

        return sampling.answer(model, ids, options, watch)


def _print(prompt: Prompt, answer: Answer, options: Options, args: argparse.Namespace, *, blank: bool) -> None:
    if args.json:
        print(json.dumps(_record(prompt, answer, options, args), allow_nan=False), flush=True)
        return
    text = " ".join(map(str, answer.ids)) if answer.text is None else sampling.printable(answer.text)
    print(f"\n{text}" if blank else text, flush=True)


def _record(prompt: Prompt, answer: Answer, options: Options, args: argparse.Namespace) -> dict[str, Any]:
    chosen = {name: getattr(args, name) for name in ("model", "adapter", "quantize", "circuit", "chat")}
    return {"prompt": prompt, **vars(answer), "settings": chosen | options.as_json()}
