import io
import json
import sys

import pytest
import torch
from rich.console import Console

import codd
from codd.backbones.loading import BUNDLED
from codd.cli import chat, main, sampling
from codd.cli.chat import Conversation, frame
from codd.decoding import Options, Step
from codd.errors import InvalidInput
from tests.support import FIXTURES
from tests.support.cli import refused

FEW = ("--gen-length", "8", "--steps", "2")
MASK, EOS = 1, 2
FOUR = Options(steps=4)
END = "/help lists the commands; Ctrl-D ends."


@pytest.fixture(scope="module")
def bundled():
    return codd.load(device="cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return codd.Tokenizer.from_folder(BUNDLED)


@pytest.fixture
def ask(bundled, monkeypatch, capsys):
    """Runs the verb on piped lines."""
    monkeypatch.setattr(sampling, "load", lambda *given, **named: bundled)
    monkeypatch.setattr(sampling, "about", lambda args: None)  # as for a model that knows conversations

    def run(lines: str, *arguments: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        assert main(["chat", *FEW, *arguments]) == code
        return tuple(capsys.readouterr())

    return run


def step_of(ids: list[int], positions: list[int], scores: list[float], **changes) -> Step:
    given = {"sequence": 0, "number": 1, "mask_ratio": 0.5, "circuit": True, "window": (2, 8)}
    given |= {"finished": False, "settled": 2}
    whole = torch.tensor(ids)
    places = torch.tensor(positions, dtype=torch.long)
    values = torch.tensor(scores, dtype=torch.float32)
    return Step(positions=places, tokens=whole[places], scores=values, ids=whole, **(given | changes))


def styles(text) -> dict[str, str]:
    return {text.plain[span.start : span.end]: str(span.style) for span in text.spans}


def test_a_frame_shows_masks_fresh_tokens_and_old_ones(tokenizer, bundled):
    words = tokenizer.encode(" river moon stone house")
    assert len(words) == 4
    river, moon, stone, house = words
    step = step_of([9, 9, river, MASK, MASK, moon, stone, house], [5, 6, 7], [0.95, 0.6, 0.1])
    shown = frame(bundled, FOUR, step, 2, 1.25)
    answer, status = shown.plain.split("\n\n")
    assert answer == " river" + chat.BLOCK * 2 + " moon stone house"
    assert status == "step 2 of 4, 4 tokens, 2 masked, circuit on, 1.2 s"
    found = styles(shown)
    assert found[chat.BLOCK] == chat.MASK
    assert [found[word] for word in (" moon", " stone", " house")] == [chat.SURE, chat.FAIR, chat.UNSURE]
    assert " river" not in found


def test_a_frame_ends_where_the_text_does(tokenizer, bundled):
    [river] = tokenizer.encode(" river")
    step = step_of([9, 9, MASK, river, EOS, river, MASK], [3], [0.5], circuit=False, number=0)
    shown = frame(bundled, Options(), step, 2, 1.25).plain
    assert shown.startswith(f"{chat.BLOCK} river\n\nstep 1, ")
    assert "circuit off" in shown
    everything = frame(bundled, Options(stop=False), step, 2, 1.25).plain
    assert everything.startswith(f"{chat.BLOCK} river river{chat.BLOCK}\n")


def test_the_status_fits_a_terminal(bundled):
    step = step_of([9, 9, *[MASK] * 128], [], [], number=127, mask_ratio=1.0, circuit=False)
    shown = frame(bundled, Options(steps=128), step, 2, 999.9)
    assert shown == frame(bundled, Options(steps=128), step, 2, 999.9)
    assert len(shown.plain.split("\n")[-1]) < 80


def test_a_character_of_several_tokens_is_whole(tokenizer):
    text = "a \N{SNOWMAN} b"
    ids = tokenizer.encode(text)
    found = chat.pieces(tokenizer, ids)
    assert len(found) == len(ids)
    assert "".join(found) == text
    assert "" in found
    assert all(chat.BROKEN not in piece for piece in found)


def test_piped_questions_get_plain_answers(ask, bundled):
    out, err = ask("What is 7 + 8?\n\nAnd 2?\n")
    first = bundled.generate("What is 7 + 8?", gen_length=8, steps=2).texts[0]
    assert out.startswith(first + "\n")
    assert "\x1b" not in out
    assert err == ""


def test_the_conversation_is_remembered_and_reset(ask, bundled):
    out, _ = ask("What is 7 + 8?\nAnd 2?\n/reset\nAnd 2?\n", "--json")
    first, second, third = (json.loads(line) for line in out.splitlines())
    said = [
        {"role": "user", "content": "What is 7 + 8?"},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "And 2?"},
    ]
    assert second["text"] == bundled.generate([said], gen_length=8, steps=2).texts[0]
    assert third["text"] == bundled.generate("And 2?", gen_length=8, steps=2).texts[0]
    assert first["question"] == "What is 7 + 8?"
    assert (first["steps"], first["dropped"]) == (2, 0)
    assert first["settings"]["gen_length"] == 8


def test_the_bundled_model_is_asked_single_questions(ask, monkeypatch):
    monkeypatch.setattr(sampling, "about", lambda args: sampling.ABOUT)
    first, second = (json.loads(line) for line in ask("And 2?\nAnd 2?\n", "--json")[0].splitlines())
    assert first["text"] == second["text"]


def test_commands(ask):
    lines = "/help\n/set steps 3\n/set gen-length 4\n/set tokens_per_step 2\n/set\nhello\n/quit\nhello\n"
    out, err = ask(lines, "--json")
    [found] = (json.loads(line) for line in out.splitlines())
    assert found["settings"].items() >= {"gen_length": 4, "steps": 2}.items()
    assert chat.COMMANDS in err
    assert "gen_length 4, " in err


@pytest.mark.parametrize("line", ["/nothing", "/set top_p", "/set top_p x", "/set nothing 1", "/set gen_length -1"])
def test_commands_that_are_none(ask, line):
    out, err = ask(f"{line}\nhello\n", code=1)
    assert out == ""
    assert err.startswith("codd: ")
    assert err.count("\n") == 1


def test_a_wrong_setting_changes_nothing(bundled):
    conversation = Conversation(bundled, True, {"top_p": 0.5})
    with pytest.raises(InvalidInput):
        chat.command("/set temperature -2", conversation, print)
    assert conversation.chosen == {"top_p": 0.5}
    chat.command("/set top-p none", conversation, print)
    assert conversation.chosen == {}


def test_the_oldest_exchanges_are_forgotten(bundled, ask):
    conversation = Conversation(bundled, True, {}, exchanges=[("old " * 150, "answer"), ("new", "answer")])
    ids, dropped = conversation.encode("word " * 150, gen_length=128)
    assert dropped == 1
    assert conversation.exchanges == [("new", "answer")]
    assert len(ids) + 128 <= bundled.backbone.max_length
    question = "word " * 150 + "\n"
    out, err = ask(question + question + question)
    assert len(out) > 0
    assert err.count("forgot the oldest 1 exchange.") == 1


def test_a_question_that_is_too_long(ask):
    _, err = ask("word " * 400 + "\n", code=1)
    assert "but this model was made for 384" in err


def test_without_a_template_the_text_goes_on(ask, bundled):
    out, _ = ask("It was\nand then\n", "--no-chat", "--json")
    first, second = (json.loads(line) for line in out.splitlines())
    assert first["text"] == bundled.generate("It was", chat=False, gen_length=8, steps=2).texts[0]
    whole = f"It was{first['text']}\nand then"
    assert second["text"] == bundled.generate(whole, chat=False, gen_length=8, steps=2).texts[0]


def test_a_model_without_a_tokenizer(capsys):
    assert "has no tokenizer" in refused(capsys, "chat", "--model", FIXTURES / "decode_llada")


def shown_on_a_terminal(conversation: Conversation, lines) -> str:
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, width=80, color_system="standard", highlight=False)
    chat.converse(conversation, lines, terminal)
    return written.getvalue()


def test_on_a_terminal_the_answer_resolves_in_place(bundled):
    conversation = Conversation(bundled, True, {"gen_length": 8, "steps": 2})
    shown = shown_on_a_terminal(conversation, ["What is 7 + 8?", "/set top_p 7", "/quit", "never"])
    assert chat.BLOCK in shown
    assert "\x1b[2K" in shown
    assert "step 1 of 2, " in shown
    assert " network evaluation" in shown
    assert "top_p must be a number of at least 0 and at most 1" in shown
    assert [asked for asked, _ in conversation.exchanges] == ["What is 7 + 8?"]


@pytest.mark.parametrize(("arguments", "known"), [((), True), (("--model", "elsewhere"), False)])
def test_a_greeting_says_what_to_expect_if_that_is_known(bundled, monkeypatch, arguments, known):
    written = io.StringIO()
    monkeypatch.setattr(sampling, "load", lambda *given, **named: bundled)
    monkeypatch.setattr(chat.console, "out", lambda: Console(file=written, width=80))
    monkeypatch.setattr(chat, "_typed", lambda: iter(()))
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert main(["chat", *arguments]) == 0
    greeting = " ".join(written.getvalue().split())
    assert greeting == (f"{sampling.ABOUT} {chat.SINGLE} {END}" if known else END)


def test_an_interrupt_stops_the_answer_only(bundled, monkeypatch):
    conversation = Conversation(bundled, True, {"gen_length": 8, "steps": 2})
    steps = []

    def interrupt(model: codd.Model, options: Options, step: Step, *rest):
        steps.append(step)
        if len(steps) == 1:
            raise KeyboardInterrupt
        return frame(model, options, step, *rest)

    monkeypatch.setattr(chat, "frame", interrupt)
    shown = shown_on_a_terminal(conversation, ["one", "two"])
    assert "stopped" in shown
    assert [asked for asked, _ in conversation.exchanges] == ["two"]


def test_lines_are_typed_until_the_end(monkeypatch, capsys):
    typed = iter(["one", KeyboardInterrupt, "two", EOFError])

    def line(prompt: str) -> str:
        found = next(typed)
        if isinstance(found, str):
            return found
        raise found

    monkeypatch.setattr("builtins.input", line)
    assert list(chat._typed()) == ["one", "two"]
