"""``codd chat``: a conversation in which answers resolve in place."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from codd.backbones import Tokenizer
from codd.cli import console, sampling
from codd.cli.sampling import Answer
from codd.decoding import Model, Options, Step
from codd.decoding.options import PACES
from codd.decoding.prompts import Prompt, can_chat
from codd.decoding.sequence import options_for
from codd.errors import CoddError, InvalidInput

NAME = "chat"
HELP = """\
A conversation with a model. On a terminal its answer resolves in place: masks are blocks, the tokens of the latest step
are coloured by their probability (green from 90%, yellow from 50%, red below), and a line below shows the progress.
The conversation goes through the model's chat template; a model without one continues the text. What is too long for
the model is forgotten, the oldest first. The bundled model was trained on single word problems, so every question is
asked by itself; the final answer stands after ####.

Prints each answer. Questions may be piped in, one per line; then the answers alone are printed, without control codes,
or with --json one object per line. /help lists the commands; Ctrl-C stops an answer, Ctrl-D ends the conversation."""
SINGLE = "Each question is asked by itself: this model was trained on single questions."
COMMANDS = """\
/set NAME VALUE  change an option of sampling, as in `codd generate --help`; "none" for its default
/set             show the options
/reset           forget the conversation
/help            this list
/quit            end (or Ctrl-D); Ctrl-C stops an answer"""
PROMPT = "> "
MASK, SURE, FAIR, UNSURE = "dim", "bold green", "bold yellow", "bold red"
BLOCK = "\N{LIGHT SHADE}"
BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What a token decodes to that holds a part of a character only."""


def configure(parser: argparse.ArgumentParser) -> None:
    """A model, and how it is to write."""
    parser.usage = "codd chat [options]"
    parser.epilog = """\
examples:
  codd chat
  codd chat --steps 16
  echo 'Mia has 84 stamps. She gives away 12 of them. How many stamps are left?' | codd chat --json"""
    parser.add_argument("--json", action="store_true", help="print one JSON object per answer and line")
    sampling.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until there is nothing more to say."""
    chosen = sampling.given(args)
    sampling.options_of(chosen)  # whether that makes sense
    model = sampling.model_from(args)
    if model.tokenizer is None:
        raise InvalidInput("this checkpoint has no tokenizer, so it cannot converse: codd generate takes ids.")
    chat = can_chat(model.tokenizer) if args.chat is None else args.chat
    about = sampling.about(args)
    single = chat and about is not None
    conversation = Conversation(model, chat, chosen, single)
    if args.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        converse(conversation, sys.stdin, None, as_json=args.json)
        return 0
    terminal = console.out()
    if about is not None:
        terminal.print(f"{about} {SINGLE}" if single else about, style="dim")
    terminal.print("/help lists the commands; Ctrl-D ends.", style="dim")
    converse(conversation, _typed(), terminal)
    return 0


@dataclass
class Conversation:
    """What was said, as the model is to see it."""

    model: Model
    chat: bool
    """Whether it goes through the chat template, or is one text."""
    chosen: dict[str, Any]
    """The options that were typed, as `sampling.options_of` takes them."""
    single: bool = False
    """Whether every question is asked without those before it."""
    exchanges: list[tuple[str, str]] = field(default_factory=list)

    def prompt(self, question: str) -> Prompt:
        """All that was said, and the question."""
        if not self.chat:
            return "\n".join([*(asked + answer for asked, answer in self.exchanges), question])
        said = [
            {"role": role, "content": content}
            for exchange in self.exchanges
            for role, content in zip(("user", "assistant"), exchange, strict=True)
        ]
        return [*said, {"role": "user", "content": question}]

    def encode(self, question: str, gen_length: int) -> tuple[list[int], int]:
        """The ids of a prompt that the model has room for, and how many of the oldest exchanges were dropped for it."""
        limit, dropped = self.model.backbone.max_length, 0
        while True:
            [ids] = self.model.encode([self.prompt(question)], gen_length=gen_length, chat=self.chat)
            if limit is None or len(ids) + gen_length <= limit or not self.exchanges:
                return ids, dropped
            self.exchanges.pop(0)
            dropped += 1

    def ask(self, question: str, options: Options, watch: Callable[[Step, int], None]) -> tuple[Answer, int]:
        """Answer and remember; ``watch`` sees every step and the length of the prompt."""
        ids, dropped = self.encode(question, options.gen_length)
        [found] = sampling.answer(self.model, [ids], options, lambda step: watch(step, len(ids)))
        if not self.single:
            self.exchanges.append((question, found.text or ""))
        return found, dropped


def frame(model: Model, options: Options, step: Step, prompt_length: int, seconds: float) -> Text:
    """The answer after a step, and its progress."""
    assert model.tokenizer is not None
    ids = step.ids[prompt_length:].tolist()
    stop_ids = model.stop_ids if options.stops else ()
    end = next((place for place, token in enumerate(ids) if token in stop_ids), len(ids))
    writes = (step.positions, step.scores), (step.edits.positions, step.edits.scores)
    fresh = {
        place: score for places, scores in writes for place, score in zip(places.tolist(), scores.tolist(), strict=True)
    }
    shown, place = Text(), prompt_length
    for masked, run in groupby(ids[:end], lambda token: token == model.mask_id):
        tokens = list(run)
        for piece in [BLOCK] * len(tokens) if masked else pieces(model.tokenizer, tokens):
            tone = MASK if masked else _tone(fresh[place]) if place in fresh else ""
            shown.append(sampling.printable(piece), style=tone)
            place += 1
    # Short enough for 80 columns: a line that wraps would jump.
    done, left = step.number + 1, ids.count(model.mask_id)
    of = f" of {min(options.steps, options.gen_length)}" if options.fixed_count and options.steps else ""
    circuit = f"circuit {'on' if step.circuit else 'off'}"
    status = f"step {done}{of}, {len(ids) - left} tokens, {left} masked, {circuit}, {seconds:.1f} s"
    return shown.append(f"\n\n{status}", style="dim")


def _tone(probability: float) -> str:
    return SURE if probability >= 0.9 else FAIR if probability >= 0.5 else UNSURE


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """What each token adds to the text. A character of several tokens comes with the last of them."""
    found: list[str] = []
    done = ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end])
        if text.endswith(BROKEN) and end < len(ids):
            found.append("")
            continue
        found.append(text[len(done) :])
        done = text
    return found


def converse(
    conversation: Conversation, lines: Iterable[str], terminal: Console | None, *, as_json: bool = False
) -> None:
    """Answer the lines: in place on a terminal; without one, nothing but answers goes to stdout."""
    say = partial((terminal or console.err()).print, style="dim", soft_wrap=True)
    for line in lines:
        question = line.rstrip("\r\n")
        if question.split()[:1] == ["/quit"]:
            return
        try:
            if not command(question, conversation, say):
                _answer(conversation, question, terminal, say, as_json=as_json)
        except (CoddError, KeyboardInterrupt) as error:
            if terminal is None:
                raise
            if isinstance(error, CoddError):
                terminal.print(console.one_line(error), style="red", soft_wrap=True)
            else:
                say("stopped; the conversation goes on without this question.")


def _answer(
    conversation: Conversation, question: str, terminal: Console | None, say: Callable[[str], None], *, as_json: bool
) -> None:
    model, options, begun = conversation.model, sampling.options_of(conversation.chosen), time.perf_counter()
    with Live(console=terminal, auto_refresh=False, transient=True) if terminal else contextlib.nullcontext() as live:

        def watch(step: Step, prompt_length: int) -> None:
            if live is not None:
                live.update(frame(model, options, step, prompt_length, time.perf_counter() - begun), refresh=True)

        found, dropped = conversation.ask(question, options, watch)
    if as_json:
        settings = options_for(model.backbone, options).as_json()
        record = {"question": question, **vars(found), "dropped": dropped, "settings": settings}
        print(json.dumps(record, allow_nan=False), flush=True)
        return
    if terminal is None:
        print(sampling.printable(found.text or ""), flush=True)
    else:
        terminal.print(Text(sampling.printable(found.text or "")))
        say(sampling.summary([found], model, found.seconds))
    if dropped:
        more = "s" * (dropped != 1)
        say(f"the model has no room for all that was said: forgot the oldest {dropped} exchange{more}.")


def command(line: str, conversation: Conversation, say: Callable[[str], None]) -> bool:
    """Run a line with a slash, and skip an empty one; False if it is a question."""
    words, chosen = line.split(), conversation.chosen
    if not words or not words[0].startswith("/"):
        return not words
    if words == ["/reset"]:
        conversation.exchanges.clear()
        say("the conversation begins anew.")
    elif words == ["/set"]:
        settings = sampling.options_of(chosen).as_json()
        say(", ".join(f"{name} {value}" for name, value in settings.items()))
    elif words[0] == "/set" and len(words) == 3:
        name = words[1].replace("-", "_")
        value = sampling.parse_option(name, words[2])
        paces = (*PACES, "tokens_per_step")  # a new one takes the old one's place
        replaced = paces if name in paces and value is not None else (name,)
        changed = {key: old for key, old in chosen.items() if key not in replaced}
        changed |= {} if value is None else {name: value}
        sampling.options_of(changed)  # whether that makes sense
        chosen.clear()
        chosen.update(changed)
        say(f"{words[1]} is {words[2]}.")
    elif words == ["/help"]:
        say(COMMANDS)
    else:
        raise InvalidInput(f"there is no command {line.strip()!r}; /help lists those that there are.")
    return True


def _typed() -> Iterator[str]:
    """Lines from the keyboard, until Ctrl-D. Ctrl-C throws away the line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() its history and editing keys
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
