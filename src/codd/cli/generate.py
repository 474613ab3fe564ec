"""``codd generate``: answer prompts."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from codd import files
from codd.cli import console, sampling
from codd.cli.sampling import Answer
from codd.constraints import After, Choice, JsonSchema, Regex, Template
from codd.constraints.languages import Language
from codd.decoding import Options
from codd.decoding.options import Constraint
from codd.decoding.prompts import Prompt
from codd.decoding.sequence import options_for
from codd.errors import FormatError, InvalidInput
from codd.validation import build

NAME = "generate"
HELP = """\
Answers prompts, or continues them: those given as arguments, those of a file, or what comes through a pipe as one
prompt. A file has one prompt per line; if its lines are JSON objects, each has "prompt" (a text), "messages" (a
conversation) or "ids" (tokens, for models without a tokenizer). A prompt may hold masks, as `codd info` names them
(<|mask|> in the bundled model): they are filled. --gen-length 0 writes nothing after the prompt.

Prints the texts, with a blank line between two of them, and on stderr what they cost: tokens, network
evaluations, seconds, and in how many of the steps the circuit acted. With --json one object per prompt and line:
prompt, text, ids, tokens, steps, circuit_steps, seconds, settings."""


class Message(BaseModel, strict=True):
    """A message of a conversation; other fields are ignored."""

    role: str
    content: str


FIELDS = {"prompt": str, "messages": Annotated[list[Message], Field(min_length=1)], "ids": list[int]}
"""What the object on a line may hold."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Prompts, a model, and how it is to write."""
    parser.usage = "codd generate [options] [PROMPT ...]"
    parser.epilog = """\
examples:
  codd generate "Mia has 84 stamps. She gives away 12 of them. How many stamps are left?"
  codd generate --no-chat --temperature 1 --steps 16 --seed 3 "It was a dark night, and"
  codd generate --no-chat --gen-length 0 --steps 2 "They walked<|mask|><|mask|><|mask|> the river."
  codd generate --file prompts.jsonl --steps 16 --json --output answers.jsonl
  echo "Mia has 84 stamps. She gives away 12 of them. How many stamps are left?" | codd generate --circuit null
  codd generate "Mia has 84 stamps. She gives away 12 of them. How many are left?" --after "#### " --regex '[0-9]+'"""
    parser.add_argument("prompt", metavar="PROMPT", nargs="*", help="what to answer; default: what is piped in")
    parser.add_argument("--file", metavar="PATH", help="prompts, one a line, as text or JSON; - for stdin")
    parser.add_argument(
        "--batch", type=console.number(int, 1), metavar="N", default=8, help="prompts at a time (default: 8)"
    )
    parser.add_argument("--limit", type=console.number(int, 1), metavar="N", help="answer the first N prompts only")
    parser.add_argument("--output", metavar="PATH", type=Path, help="write the answers to a file instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt and line")
    sampling.add_arguments(parser)
    _add_constraints(parser)


def run(args: argparse.Namespace) -> int:
    """Answer them, some at a time."""
    options = sampling.options_from(args).changed(constraint=_constraint(args))
    prompts = read_prompts(args)[: args.limit]
    model = sampling.model_from(args)
    options = options_for(model.backbone, options)
    ids = model.encode(prompts, gen_length=options.gen_length, chat=args.chat)
    model.start(ids, options)  # an error in the last prompt comes first
    found: list[Answer] = []
    begun = time.perf_counter()
    masks = len(ids) * options.gen_length + sum(token == model.mask_id for prompt in ids for token in prompt)
    with (
        nullcontext(sys.stdout) if args.output is None else args.output.open("w", encoding="utf-8") as out,
        console.bar(f"{len(ids)} prompt{'s' * (len(ids) != 1)}", masks) as bar,
    ):
        for first in range(0, len(ids), args.batch):
            part = slice(first, first + args.batch)
            new = sampling.answer(model, ids[part], options, lambda step: bar.advance(len(step.positions)))
            for prompt, answer in zip(prompts[part], new, strict=True):
                print(_shown(prompt, answer, options, args, blank=bool(found)), file=out, flush=True)
                found.append(answer)
    if not args.json:
        seconds = time.perf_counter() - begun
        console.err().print(sampling.summary(found, model, seconds), style="dim", soft_wrap=True)
    return 0


def _add_constraints(parser: argparse.ArgumentParser) -> None:
    """At most one of them."""
    group = parser.add_argument_group("constraint", "what the text is; exact, whatever the sampler and the order")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--regex", metavar="PATTERN", help="a text that Python's re.fullmatch matches")
    one.add_argument("--json-schema", metavar="SCHEMA", help="JSON that is valid under a schema: a file, or its text")
    one.add_argument("--choice", action="append", metavar="TEXT", help="one of some texts: give it once for each")
    one.add_argument("--template", metavar="TEXT", help="fixed text with slots, as in 'Name: [MASK:8], age: [MASK:2]'")
    group.add_argument("--after", metavar="TEXT", help="free text first, then this, then what the constraint says")


def _constraint(args: argparse.Namespace) -> Constraint | None:
    """The one that was given, if any."""
    found: Constraint | None = None
    if args.regex is not None:
        found = Regex(args.regex)
    elif args.json_schema is not None:
        found = JsonSchema(_schema(args.json_schema))
    elif args.choice is not None:
        found = Choice(args.choice)
    elif args.template is not None:
        found = Template(args.template)
    if args.after is None:
        return found
    if not isinstance(found, Language):
        raise InvalidInput("--after goes with --regex, --json-schema or --choice, which says what follows it.")
    return After(args.after, found)


def _schema(given: str) -> str:
    """The schema itself begins with a brace; anything else is the name of a file."""
    if given.lstrip().startswith(("{", "true", "false")):
        return given
    try:
        return files.read_text(Path(given))
    except FormatError as error:
        raise InvalidInput(f"--json-schema {error} Give a file, or the schema.") from error


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
    as_json = bool(lines) and name.endswith(".jsonl")
    if lines and not as_json:
        with suppress(FormatError):
            first = files.parse_json(name, lines[0][1])
            as_json = isinstance(first, dict) and any(field in first for field in FIELDS)
    for number, line in lines:
        yield _of_json(line, f"{name}, line {number}") if as_json else line.removesuffix("\r")


def _of_json(line: str, where: str) -> Prompt:
    found = files.parse_json(f"{where}:", line)
    for field, kind in FIELDS.items():
        if isinstance(found, dict) and field in found:
            build(kind, found[field], f'{where}: "{field}"')
            prompt: Prompt = found[field]
            return prompt
    raise InvalidInput(f'{where}: expected an object with "prompt", "messages" or "ids".')


def _shown(prompt: Prompt, answer: Answer, options: Options, args: argparse.Namespace, *, blank: bool) -> str:
    if args.json:
        chosen = {name: getattr(args, name) for name in ("model", "adapter", "quantize", "circuit", "chat")}
        record = {"prompt": prompt, **vars(answer), "settings": chosen | options.as_json()}
        return json.dumps(record, allow_nan=False)
    text = " ".join(map(str, answer.ids)) if answer.text is None else sampling.printable(answer.text)
    return f"\n{text}" if blank else text
