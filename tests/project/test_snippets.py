"""Python and shell snippets of the documents run, or say in their first line what they need that tests lack.

The snippets of a page share their names and a folder, in which lies what the page supposes that its reader has. Those
that do not run ("# needs a GPU", "# downloads 16 GB", "# a study: hours") are checked for their syntax, and every
command in them is parsed by the program that it is for.
"""

import argparse
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import codd
from codd.backbones import adapters
from codd.cli import load, main
from codd.training.circuit.joint import trainable
from codd_lab import samples
from tests.support import ROOT

PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/**/*.md")))]
LANGUAGES = {"python", "bash", "yaml", "json", "text", ""}
FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
REASON = re.compile(r"# (needs|downloads|a study:) \w")
COMMAND = re.compile(r"^ *(\$ |codd |make |python |pip |uv |import |from \w+ import )", re.MULTILINE)
INDENTED = re.compile(r"^ {4,}(\$|codd|make|python|pip|uv|curl|torchrun|import) ", re.MULTILINE)
UNCHECKED = {"curl", "hf", "pip", "uv", "git", "mkdir", "for", "export", "docker", "kubectl"}
"""Programs whose command lines are left to the shell."""
HERE = "http://127.0.0.1:8000"
SHORTER = {
    "README.md": {
        "generate(question)": "generate(question, gen_length=64)",
        "--data . --out runs/mine": "--data . --out runs/mine --set steps=1 --set row_length=64 --set batch_windows=8"
        " --set bank.windows=8 --set bank.rows_at_once=1 --set ratios=[0.05] --set validate_every=1",
        "--gen-length 32 --steps 8": "--gen-length 4 --steps 1",
    },
    "docs/index.md": {
        "codd generate": "codd generate --gen-length 8",
        "generate(question)": "generate(question, gen_length=64)",
    },
    "docs/decoding.md": {
        "model.generate(question)": "model.generate(question, gen_length=8)",
        "codd.Options(gen_length=64": "codd.Options(gen_length=8",
    },
    "docs/evaluation.md": {"--problems 50 --steps 8,16": "--problems 1 --steps 4 --circuit null"},
    "docs/settings.md": {"gen_length=32": "gen_length=4"},
    "docs/structured.md": {
        ',4}"))).texts': ',4}")), gen_length=16).texts',
        '"less than 40"])).texts': '"less than 40"]), gen_length=16).texts',
        "JsonSchema(schema)).texts": "JsonSchema(schema), gen_length=16).texts",
    },
    "docs/training.md": {
        "--data . --out runs/mine": "--data . --out runs/mine --set steps=1 --set row_length=64 --set batch_windows=8"
        " --set bank.windows=8 --set bank.rows_at_once=1 --set ratios=[0.05] --set validate_every=1",
        "--windows 200 --out": "--windows 8 --top-k 16 --out",
    },
    "docs/tutorials/checkpoint.md": {"pretrain tiny --out": "pretrain tiny --set steps=2 --out"},
    "docs/tutorials/circuit.md": {
        "steps: 100": "steps: 2",
        "batch_windows: 32": "batch_windows: 8",
        "row_length: 128": "row_length: 64",
        "{windows: 512, rows_at_once: 16}": "{windows: 8, rows_at_once: 1}",
        "rows: 8": "rows: 1",
        "ratios: [1.0]": "ratios: [0.05]",
        "ratios=(1.0,)": "ratios=(0.05,)",
        "--gen-length 32 --steps 8": "--gen-length 4 --steps 1",
        "gen_length=32, steps=8": "gen_length=4, steps=1",
    },
}
"""What is replaced, so that a page's snippets take a second."""
PRINTED = {
    "README.md": ["#### 336", "San Diego 0.5", "San York 0.0"],
    "docs/index.md": ["#### 336", "trained\n[8]\nOn Friday the shop", "null\n[8]\nOn number for Friday"],
    "docs/how.md": ["San Diego 0.5", "San York 0.0"],
    "docs/tutorials/circuit.md": ["mine {", "null {"],
    "docs/tutorials/serving.md": ['{"scarves"'],
    "docs/tutorials/structured.md": ["{'thursday': '26', 'more': '284', 'friday': '310', 'total': '336'}", "\n336\n"],
}
"""What pages say that their Python prints."""


class Snippet(NamedTuple):
    """A fenced block."""

    language: str
    title: str | None
    """The name of the file that it is."""
    code: str
    line: int

    @property
    def runs(self) -> bool:
        return self.language in ("python", "bash") and not REASON.match(self.code)


def snippets(page: str) -> list[Snippet]:
    text = (ROOT / page).read_text()
    for old, new in SHORTER.get(page, {}).items():
        assert old in text, f"{page} does not say {old!r} any more"
        text = text.replace(old, new)
    return [Snippet(*found.groups(), text.count("\n", 0, found.start(3))) for found in FENCE.finditer(text)]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of `codd serve`."""
    command = [sys.executable, "-m", "codd", "serve", "--port", "0", "--json", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        try:
            assert process.stdout is not None
            yield str(json.loads(process.stdout.readline())["url"]).rstrip("/")
        finally:
            process.kill()


@pytest.fixture
def reader(tmp_path, monkeypatch) -> None:
    """The reader's folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("docs", "README.md", "CONTRIBUTING.md"):
        Path(name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "tests/fixtures/hmm/hmm_n12.jpc", "model.jpc")


@pytest.fixture
def own_adapters(reader) -> None:
    model = codd.load(circuit=None)
    trainable(model.backbone, "lora", 2, 0)
    for name in ("math", "code"):
        adapters.save(model.backbone, Path("adapters") / name, "bundled")


@pytest.fixture
def own_texts(reader) -> None:
    Path("mine.txt").write_text("".join(path.read_text() for path in sorted(Path("docs").glob("*.md"))))
    shutil.copy("CONTRIBUTING.md", "held-out.txt")


SUPPOSED = {"adapter=": "own_adapters", "quantize=": "int8_cpu", "docs/tutorials/mine.yaml": "own_texts"}
"""What a snippet with such a text supposes: fixtures, of which those that this machine cannot have skip the rest."""


def run_command(line: str, request: pytest.FixtureRequest) -> None:
    program, *arguments = shlex.split(line.removeprefix(".venv/bin/"), comments=True)
    if (program, *arguments) == ("codd", "serve"):
        request.getfixturevalue("server")
    elif program == "codd":
        assert main(arguments) == 0
    elif program == "make":  # it installs, and tests: it is only asked what it would do
        subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    elif arguments[:2] == ["-m", "codd_lab.problems"]:
        subprocess.run([sys.executable, *arguments], check=True)
    elif program in ("cat", "cp"):
        subprocess.run(["bash", "-c", line], check=True)
    else:
        assert program == "curl", f"{line}: the tests do not know how to run this"
        if shutil.which("curl") is None:
            pytest.skip("there is no curl on the path")
        done = subprocess.run(["curl", "--fail", *shlex.split(line)[1:]], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.usefixtures("reader")
def test_snippets_run(page, request, capsys):
    names: dict[str, object] = {}
    for snippet in snippets(page):
        if snippet.title:
            Path(snippet.title).write_text(snippet.code)
        if not snippet.runs:
            continue
        for text, fixture in SUPPOSED.items():
            if text in snippet.code:
                request.getfixturevalue(fixture)
        code = snippet.code
        if HERE in code:
            code = code.replace(HERE, request.getfixturevalue("server"))
        if snippet.language == "python":
            exec(compile("\n" * snippet.line + code, str(ROOT / page), "exec"), names)
        else:
            for line in code.replace("\\\n", " ").splitlines():
                run_command(line, request)
    printed = capsys.readouterr().out
    assert not [text for text in PRINTED.get(page, []) if text not in printed]


class Parsed(Exception):
    """A command line was understood."""


def commands(code: str) -> Iterator[list[str]]:
    """The words of each command, without what sets its environment."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        if words:
            yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


PARSE = argparse.ArgumentParser.parse_args


def parse_and_stop(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> None:
    PARSE(parser, arguments)
    raise Parsed


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command with the parser of its program; SystemExit if that refuses it."""
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
    match words:
        case ["codd", verb, *arguments]:
            parser = argparse.ArgumentParser(f"codd {verb}", allow_abbrev=False)
            load(verb).configure(parser)
            parser.parse_args(arguments)
        case ["python", script, *arguments] if script.startswith(("benchmarks/", "examples/")):
            with monkeypatch.context() as patch:
                patch.syspath_prepend(ROOT / Path(script).parent)
                module = importlib.import_module(Path(script).stem)
                patch.setattr(sys, "argv", [script, *arguments])
                patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
                with pytest.raises(Parsed):
                    module.main()
        case ["python", "-m", "pytest", *arguments]:
            assert not [path for path in arguments if path.startswith("tests/") and not (ROOT / path).exists()]
        case ["make", *targets]:
            subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        case ["python", "-m", "codd_lab.samples", *arguments]:
            with monkeypatch.context() as patch:
                patch.setattr(sys, "argv", ["samples", *arguments])
                patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
                with pytest.raises(Parsed):
                    samples.main()
        case ["python", "-m", "sglang.launch_server" | "codd.evaluation.harness", *_]:  # parsers of others
            return
        case ["python", "-c", program, *_]:
            compile(program, "-c", "exec")
        case [program, *_]:
            assert program in UNCHECKED, f"{shlex.join(words)}: the tests do not know this program"


@pytest.mark.parametrize("page", PAGES)
def test_snippets_that_do_not_run_are_commands_that_exist(page, monkeypatch):
    for snippet in snippets(page):
        if snippet.language == "python":
            compile(snippet.code, page, "exec")
        elif snippet.language == "bash" and not snippet.runs:
            subprocess.run(["bash", "-n"], input=snippet.code, text=True, check=True)
            for words in commands(snippet.code):
                check_command(words, monkeypatch)


@pytest.mark.parametrize("command", ["codd no", "codd eval --no-such", "python benchmarks/seconds.py --no-such"])
def test_a_command_that_does_not_exist_is_found(command, monkeypatch):
    with pytest.raises((SystemExit, ModuleNotFoundError)):
        check_command(command.split(), monkeypatch)


@pytest.mark.parametrize("page", PAGES)
def test_a_file_beside_its_page_is_what_the_page_shows(page):
    for language, title, code in FENCE.findall((ROOT / page).read_text()):
        if title and (file := (ROOT / page).parent / title).exists():
            assert language
            assert file.read_text() == code


@pytest.mark.parametrize("page", PAGES)
def test_what_is_no_snippet_holds_no_commands(page):
    assert {snippet.language for snippet in snippets(page)} <= LANGUAGES
    assert not [snippet.code for snippet in snippets(page) if not snippet.language and COMMAND.search(snippet.code)]
    assert not INDENTED.search(FENCE.sub("", (ROOT / page).read_text())), "give the code a fence and its language"


def test_commands_of_results_stand_at_the_end_of_their_page():
    for path in (ROOT / "docs" / "results").glob("[!i]*.md"):
        text, _, end = path.read_text().partition("\n## Commands\n\n```bash\n")
        assert "```bash" not in text, path.name
        assert REASON.match(end), path.name
        assert end.endswith("```\n"), path.name
