import argparse
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

import codd
from codd.circuits import Head, HeadConfig, Modulated
from codd.cli import console, generate, main, sampling
from codd.decoding import Options
from codd.decoding.options import ALIASES, OPTIONS, UNTYPED
from codd.errors import CircuitSteppedAside, InvalidInput
from tests.support import FIXTURES, cli

TINY = FIXTURES / "decode_llada"
QUESTION = "Mia has 3 apples and buys 4 more. How many apples does she have?"
FEW = ("--gen-length", "8", "--steps", "2")


@pytest.fixture(scope="module")
def bundled():
    return codd.load(device="cpu")


@pytest.fixture
def loaded(bundled, monkeypatch):
    """Loads the bundled model once for all tests, and says what was asked for."""
    seen = []
    monkeypatch.setattr(sampling, "load", lambda *given, **named: seen.append((given, named)) or bundled)
    return seen


@pytest.fixture
def piped(monkeypatch):
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    generate.configure(parser)
    return parser.parse_args(arguments)


def records(capsys, *arguments: str) -> list[dict]:
    assert main(["generate", "--json", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return [json.loads(line) for line in printed.out.splitlines()]


def error_of(capsys, *arguments: str) -> str:
    return cli.refused(capsys, "generate", *arguments).removeprefix("codd: ")


def typed(name: str) -> tuple[str, object]:
    """A value of an option, as text and as it is."""
    info = OPTIONS[name]
    if info.kind == "choice":
        return info.choices[-1], ALIASES.get(info.choices[-1], info.choices[-1])
    values: dict[str, tuple[str, object]] = {"ids": ("3,5", (3, 5)), "number": ("0.5", 0.5)}
    return values.get(info.kind, ("4", 4))


@pytest.mark.parametrize("name", sorted({*OPTIONS} - {*UNTYPED, "stop"}))
def test_every_option_reaches_the_loop(name):
    text, value = typed(name)
    needed = {"remasking": ["--preset", "reference"]}.get(name, [])
    found = sampling.options_from(parsed(f"--{name.replace('_', '-')}", text, *needed))
    assert getattr(found, name) == value != getattr(Options(), name)


def test_options_that_are_not_names():
    assert sampling.options_from(parsed()) == Options()
    assert not sampling.options_from(parsed("--no-stop")).stop
    assert sampling.options_from(parsed("--tokens-per-step", "5")).steps == 26
    assert sampling.options_from(parsed("--max-new-tokens", "64")).gen_length == 64
    assert sampling.options_from(parsed("--tokens-per-step", "4", "--gen-length", "10")).steps == 3
    assert [parsed(*given).chat for given in ((), ("--chat",), ("--no-chat",))] == [None, True, False]


def test_the_model_that_was_asked_for(loaded):
    sampling.model_from(parsed("--model", "m", "--circuit", "c", "--device", "cpu", "--dtype", "bfloat16"))
    sampling.model_from(parsed("--circuit", "none", "--adapter", "a", "--quantize", "int8"))
    silent = {"device": None, "dtype": None, "adapter": None, "quantize": None}
    assert loaded == [
        (("m", "c"), silent | {"device": "cpu", "dtype": "bfloat16"}),
        ((None, None), silent | {"adapter": "a", "quantize": "int8"}),
    ]


def test_a_text(loaded, bundled, capsys):
    assert main(["generate", QUESTION, *FEW]) == 0
    printed = capsys.readouterr()
    expected = bundled.generate(QUESTION, gen_length=8, steps=2)
    assert printed.out == expected.texts[0] + "\n"
    assert printed.err.startswith("8 tokens, 2 network evaluations, ")
    assert printed.err.count("\n") == 1


def test_json_has_all_that_happened(loaded, bundled, capsys):
    [found] = records(capsys, "--no-chat", "It was", "--temperature", "1", "--seed", "3", *FEW)
    expected = bundled.generate("It was", chat=False, gen_length=8, steps=2, temperature=1.0, seed=3)
    assert found["prompt"] == "It was"
    assert found["text"] == expected.texts[0]
    assert found["ids"] == expected.completions[0].tolist()
    assert (found["tokens"], found["steps"]) == (8, 2)
    assert found["seconds"] > 0
    assert found["settings"].items() >= {"seed": 3, "temperature": 1.0, "chat": False, "circuit": "trained"}.items()


def test_masks_in_a_prompt_are_filled(loaded, bundled, capsys):
    mask = bundled.tokenizer.mask_token
    [found] = records(capsys, f"San{mask} is a city.", "--gen-length", "0")
    assert found["text"].startswith("San")
    assert found["text"].endswith(" is a city.")
    assert (found["tokens"], found["steps"]) == (1, 1)
    assert bundled.mask_id not in found["ids"]


def test_the_bar_leaves_stdout_alone(loaded, bundled, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert main(["generate", QUESTION, *FEW]) == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out
    assert "1 prompt" in printed.err


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        ("one\n\n two {\r\n", ["one", " two {"]),
        ('{"x": 1}\n', ['{"x": 1}']),
        (
            '{"prompt": "one"}\n{"messages": [{"role": "user", "content": "two"}]}\n{"ids": [1, 2]}\n',
            ["one", [{"role": "user", "content": "two"}], [1, 2]],
        ),
    ],
)
def test_prompts_of_a_file_and_of_a_pipe(content, prompts, tmp_path, piped):
    path = tmp_path / "prompts.txt"
    path.write_bytes(content.encode())
    assert generate.read_prompts(parsed("--file", str(path))) == prompts
    piped(content)
    assert generate.read_prompts(parsed("--file", "-")) == prompts
    piped(content)
    assert generate.read_prompts(parsed()) == [content.rstrip("\n")]  # without --file a pipe is one prompt


@pytest.mark.parametrize("line", ["no json", "[1]", "{}", '{"prompt": 3}', '{"ids": ["x"]}', '{"messages": []}'])
def test_lines_that_are_no_prompts(line, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "one"}}\n{line}\n')
    assert f"{path}, line 2: " in error_of(capsys, "--file", str(path))


def test_nothing_to_answer(piped, monkeypatch, capsys, tmp_path):
    piped(" \n")
    assert "there is no prompt" in error_of(capsys)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert "there is no prompt" in error_of(capsys)
    (tmp_path / "bytes").write_bytes(b"\xff")
    assert "is not UTF-8" in error_of(capsys, "--file", str(tmp_path / "bytes"))


def test_too_long_a_prompt_is_found_before_anything_is_written(loaded, capsys):
    assert "prompt 1 has" in error_of(capsys, "one", "word " * 400, "--batch", "1")


@pytest.fixture
def ids_file(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(f'{{"ids": {ids}}}\n' for ids in ([1, 2, 3], [4], [5, 6])))
    return str(path)


def test_the_first_prompts_into_a_file(ids_file, tmp_path, capsys):
    arguments = ("--model", str(TINY), "--file", ids_file, "--gen-length", "6", "--steps", "3")
    found = records(capsys, *arguments)
    out = tmp_path / "answers.jsonl"
    assert records(capsys, *arguments, "--limit", "2", "--output", str(out)) == []
    assert [json.loads(line)["ids"] for line in out.read_text().splitlines()] == [entry["ids"] for entry in found[:2]]


def test_a_model_without_a_tokenizer_takes_ids(ids_file, capsys):
    arguments = ("--model", str(TINY), "--file", ids_file, "--gen-length", "6", "--steps", "3")
    found = records(capsys, *arguments, "--batch", "2")
    assert [entry["prompt"] for entry in found] == [[1, 2, 3], [4], [5, 6]]
    assert all(entry["text"] is None and entry["circuit_steps"] == 0 for entry in found)
    single = records(capsys, *arguments, "--batch", "1", "--circuit", "none")
    assert [entry["ids"] for entry in found] == [entry["ids"] for entry in single]
    assert main(["generate", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.out.split("\n\n")[0] == " ".join(map(str, found[0]["ids"]))
    assert printed.err.endswith(", no circuit\n")
    assert "has no tokenizer" in error_of(capsys, "--model", str(TINY), "a text")


def test_the_null_circuit_acts_and_changes_nothing(ids_file, capsys):
    arguments = ("--model", str(TINY), "--file", ids_file, "--gen-length", "6", "--steps", "3")
    alone, null = records(capsys, *arguments), records(capsys, *arguments, "--circuit", "null")
    assert [entry["ids"] for entry in alone] == [entry["ids"] for entry in null]
    assert all(entry["circuit_steps"] == entry["steps"] for entry in null)
    assert main(["generate", *arguments, "--circuit", "null"]) == 0
    assert "circuit on in 9 of 9 steps" in capsys.readouterr().err


def test_the_circuits_that_belong_to_a_model(ids_file, tmp_path, capsys):
    folder = Path(shutil.copytree(TINY, tmp_path / "model"))
    arguments = ("--model", str(folder), "--file", ids_file, "--gen-length", "6", "--steps", "2")
    assert "has no folder circuit-static/" in error_of(capsys, *arguments, "--circuit", "static")
    config = codd.load(TINY, None, device="cpu").backbone.config
    hmm, head = codd.HMM.random(4, config.vocab_size, scale=3.0), Head(HeadConfig(config.width, 4))
    torch.nn.init.normal_(head.latents.weight, generator=torch.Generator().manual_seed(0))
    Modulated(hmm, head).save(folder / "circuit")
    hmm.save(folder / "circuit-static")
    ways = [(), ("--circuit", str(folder / "circuit")), ("--circuit", "static"), ("--circuit", "none")]
    found = [records(capsys, *arguments, *way) for way in ways]
    assert [[entry["circuit_steps"] for entry in entries] for entries in found] == [[2] * 3] * 3 + [[0] * 3]
    written = [[entry["ids"] for entry in entries] for entries in found]
    assert written[0] == written[1] != written[2] != written[3]
    assert found[2][0]["settings"]["circuit"] == "static"


def test_the_warning_of_the_loop_is_one_line(capsys):
    import warnings

    with console.one_line_warnings():
        warnings.warn("a\nb", CircuitSteppedAside, stacklevel=1)
    assert capsys.readouterr().err == "codd: a b\n"


def test_control_characters_are_not_sent_to_a_terminal():
    assert sampling.printable("a\x1b[31m\n\tb\x07 c") == "a\\x1b[31m\n\tb\\x07 c"


def test_options_typed_in_a_conversation():
    assert sampling.parse_option("top_p", "0.5") == 0.5
    assert sampling.parse_option("top_p", "none") is None
    assert sampling.parse_option("stop", "off") is False
    for name, text in (("top_p", "x"), ("stop", "x"), ("nothing", "1"), ("ban", "x")):
        with pytest.raises(InvalidInput):
            sampling.parse_option(name, text)


def test_an_answer_ends_before_a_text(capsys):
    question = ["generate", QUESTION, "--gen-length", "32", "--threshold", "0.9", "--sampler", "any_order", "--json"]
    assert main(question) == 0
    whole = json.loads(capsys.readouterr().out)
    stop = whole["text"].split()[2]
    assert main([*question, "--stop", "never", "--stop", stop]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == whole["text"][: whole["text"].index(stop)]
    assert found["settings"]["stop"] == ["never", stop]
