"""``codd chat``: a conversation in which answers resolve in place."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, takewhile
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
    sampling.options_of(chosen)
    model = sampling.model_from(args)
    if model.tokenizer is None:
        raise InvalidInput("this checkpoint has no tokenizer, so it cannot converse: codd generate takes ids.")
    chat = can_chat(model.tokenizer) if args.chat is None else args.chat
    about = sampling.about(args)
    single = chat and about is not None
    conversation = Conversation(model, chat, single, f"{about} {SINGLE}" if single else about)
    if args.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        _piped(conversation, chosen, sys.stdin, as_json=args.json)
    else:
        talk(conversation, chosen, _typed(), console.out())
    return 0


@dataclass
class Conversation:
    """What was said, as the model is to see it."""

    model: Model
    chat: bool
    """Whether it goes through the chat template, or is one text."""
    single: bool = False
    """Whether every question is asked without those before it."""
    about: str | None = None
    """What to expect of the model, for those who are new to it."""
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


def talk(conversation: Conversation, chosen: dict[str, Any], lines: Iterable[str], terminal: Console) -> None:
    """On a terminal."""
    if conversation.about is not None:
        terminal.print(conversation.about, style="dim")
    terminal.print("/help lists the commands; Ctrl-D ends.", style="dim")
    for line in takewhile(_goes_on, lines):
        try:
            if not command(line, conversation, chosen, lambda text: terminal.print(text, style="dim", soft_wrap=True)):
                _show(conversation, line, sampling.options_of(chosen), terminal)
        except KeyboardInterrupt:
            terminal.print("stopped; the conversation goes on without this question.", style="dim")
        except CoddError as error:
            terminal.print(console.one_line(error), style="red", soft_wrap=True)


def _show(conversation: Conversation, question: str, options: Options, terminal: Console) -> None:
    model, begun = conversation.model, time.perf_counter()
    with Live(console=terminal, auto_refresh=False, transient=True) as live:

        def watch(step: Step, prompt_length: int) -> None:
            live.update(frame(model, options, step, prompt_length, time.perf_counter() - begun), refresh=True)

        found, dropped = conversation.ask(question, options, watch)
    terminal.print(Text(sampling.printable(found.text or "")))
    terminal.print(sampling.summary([found], model, found.seconds), style="dim", soft_wrap=True)
    if dropped:
        terminal.print(_notice(dropped), style="dim", soft_wrap=True)


def _piped(conversation: Conversation, chosen: dict[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """Without a terminal: nothing but answers on stdout."""
    for line in takewhile(_goes_on, lines):
        question = line.rstrip("\r\n")
        if command(question, conversation, chosen, _say):
            continue
        options = options_for(conversation.model.backbone, sampling.options_of(chosen))
        found, dropped = conversation.ask(question, options, lambda step, prompt_length: None)
        if as_json:
            record = {"question": question, **vars(found), "dropped": dropped}
            print(json.dumps({**record, "settings": options.as_json()}, allow_nan=False), flush=True)
            continue
        print(sampling.printable(found.text or ""), flush=True)
        if dropped:
            _say(_notice(dropped))


def _say(text: str) -> None:
    console.err().print(text, style="dim", soft_wrap=True)


def _notice(dropped: int) -> str:
    return f"the model has no room for all that was said: forgot the oldest {dropped} exchange{'s' * (dropped != 1)}."


def _goes_on(line: str) -> bool:
    return line.split()[:1] != ["/quit"]


def command(line: str, conversation: Conversation, chosen: dict[str, Any], say: Callable[[str], None]) -> bool:
    """Run a line with a slash, and skip an empty one; False if it is a question."""
    words = line.split()
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
