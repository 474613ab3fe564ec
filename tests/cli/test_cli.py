import argparse
import io
import os
import subprocess
import sys
import types

import pytest

from codd import cli
from codd.cli import console, main
from codd.errors import CoddError
from tests.support import FIXTURES


@pytest.fixture
def verb(monkeypatch):
    """Registers a verb that calls a function."""

    def register(action, name="fake"):
        module = types.ModuleType(f"codd.cli.{name}")
        vars(module).update(NAME=name, HELP="a fake", configure=lambda parser: None, run=lambda args: action())
        monkeypatch.setitem(cli.VERBS, name, "a fake")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return name

    return register


def fails(error: BaseException):
    def action():
        raise error

    return action


def test_help_lists_every_verb(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, line in cli.VERBS.items():
        assert f"  {name}" in printed
        assert line in printed


WORDS = {
    "cache": ("--top-k", "--tolerance", "--features", "--fresh", "torchrun"),
    "train": ("codd train docs/tutorials/mine.yaml", "torchrun", "--set", "--fresh", "--data", "metrics.jsonl"),
}


@pytest.mark.parametrize("name", cli.VERBS)
def test_help_of_every_verb_teaches(name, capsys):
    verb = cli.load(name)
    assert name == verb.NAME
    assert main([name, "--help"]) == 0
    printed = capsys.readouterr().out
    assert f"usage: codd {name}" in printed
    assert verb.HELP in printed
    assert "Print" in verb.HELP or "prints" in verb.HELP
    assert f"\nexamples:\n  codd {name}" in printed
    assert "--debug" in printed
    assert "--json" in printed
    assert not [word for word in WORDS.get(name, ()) if word not in " ".join(printed.split())]


def test_version(capsys):
    assert main(["--version"]) == 0
    name, number = capsys.readouterr().out.split()
    assert name == "codd"
    assert number[0].isdigit()


def test_no_verb_shows_the_help_but_is_no_success(capsys):
    assert main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "verbs:" in printed.err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CoddError("what, why, fix"), 1, "codd: what, why, fix\n"),
        (
            CoddError("a long line " * 30 + "\n and another"),
            1,
            "codd: " + "a long line " * 29 + "a long line and another\n",
        ),
        (FileNotFoundError(2, "No such file or directory", "a/b"), 1, "codd: a/b: No such file or directory\n"),
        (OSError("odd"), 1, "codd: odd\n"),
        (OSError(), 1, "codd: OSError\n"),
        (KeyboardInterrupt(), 130, "codd: interrupted\n"),
        (
            KeyError("x"),
            70,
            "codd: this is a bug in codd (KeyError: 'x'); run it again with --debug for the traceback\n",
        ),
    ],
)
def test_errors_are_one_line_with_a_code(verb, capsys, error, code, message):
    assert main([verb(fails(error))]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == message


@pytest.mark.parametrize(("more", "words"), [([], ""), (["--fresh"], " without --fresh")])
def test_an_interrupted_command_says_how_to_go_on(verb, monkeypatch, capsys, more, words):
    name = verb(fails(KeyboardInterrupt()))
    module = sys.modules[f"codd.cli.{name}"]
    monkeypatch.setattr(module, "configure", lambda parser: parser.add_argument("--fresh", action="store_true"))
    monkeypatch.setattr(module, "RESUMES", True, raising=False)
    assert main([name, *more]) == 130
    assert capsys.readouterr().err == f"codd: interrupted: run the same command{words} to go on\n"


@pytest.mark.parametrize("arguments", [["--debug", "fake"], ["fake", "--debug"]])
@pytest.mark.parametrize(("error", "code"), [(CoddError("wrong"), 1), (ZeroDivisionError("nought"), 70)])
def test_debug_shows_the_traceback(verb, capsys, arguments, error, code):
    verb(fails(error))
    assert main(arguments) == code
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback (most recent call last):\n")
    assert "in action" in printed
    assert printed.splitlines()[-1].startswith("codd: ")


def test_the_code_of_a_verb_is_returned(verb):
    assert main([verb(lambda: 5)]) == 5


def test_arguments_reach_the_verb(verb, monkeypatch):
    name = verb(lambda: 0)
    seen = []

    def configure(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("path")
        parser.add_argument("--json", action="store_true")

    monkeypatch.setattr(sys.modules[f"codd.cli.{name}"], "configure", configure)
    monkeypatch.setattr(sys.modules[f"codd.cli.{name}"], "run", lambda args: seen.append(args) or 0)
    monkeypatch.setattr(sys, "argv", ["codd", name, "--json", "--", "-odd-name"])
    assert main() == 0
    assert (seen[0].path, seen[0].json, seen[0].debug) == ("-odd-name", True, False)


@pytest.mark.parametrize("options", [[], ["--json"]])  # rich's own way to end, and ours
def test_a_closed_pipe_is_quiet(options):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        source = FIXTURES / "hmm" / "hmm_n16.jpc"
        done = subprocess.run(
            [sys.executable, "-m", "codd", "info", str(source), *options],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_a_broken_pipe_is_no_success(verb, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_discard_stdout", lambda: None)
    assert main([verb(fails(BrokenPipeError()))]) == 1
    assert capsys.readouterr().err == ""


def test_colour_is_for_terminals_and_not_with_no_color(capsys, monkeypatch):
    def shown(**environment: str) -> tuple[str, str]:
        with monkeypatch.context() as patch:
            for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
                patch.delenv(name, raising=False)
            for name, value in {"TERM": "xterm", **environment}.items():
                patch.setenv(name, value)
            console.error("x")
            console.fields("t", {"a": 1}, {"a": " too many"})
        return tuple(capsys.readouterr())

    plain = ("t\n  a  1 too many\n", "codd: x\n")
    assert shown() == plain
    assert shown(FORCE_COLOR="1", NO_COLOR="1") == plain
    out, err = shown(FORCE_COLOR="1")
    assert err == "\x1b[31mcodd: x\x1b[0m\n"
    assert "\x1b[31m1 too many\x1b[0m" in out


def test_control_characters_of_names_are_not_sent_to_the_terminal():
    assert console.one_line("a\x1b[31mb\nc\x07 \udc80") == "a\\x1b[31mb c\\x07 \\udc80"
    assert console.one_line("päper  [bold]") == "päper  [bold]"


def test_a_stream_that_cannot_show_a_name_does_not_fail(verb, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main([verb(lambda: console.fields("ü", {"a": 1}) or 0)]) == 0
    assert written.getvalue() == b"\\xfc\n  a  1\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB (1,000 bytes)"), (12_345_678, "12.3 MB (12,345,678 bytes)")],
)
def test_sizes(count, text):
    assert console.size(count) == text
