"""Imports: errors, files, constraints and processes, circuits and backbones, coupling and data, decoding, training."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import codd
from tests.support import ROOT

PACKAGE = Path(codd.__file__).parent
LEVELS = [
    {"_threads", "errors"},
    {"files", "folders", "validation"},
    {"constraints", "distributed"},
    {"circuits", "backbones"},
    {"coupling", "data"},
    {"decoding"},
    {"training", "evaluation"},  # neither knows the other: what both need is in data
    {"serving"},
    {"integrations"},  # one of them runs the server on Ray
    {"__init__"},  # the public face, which may import any room
    {"cli"},  # one of its verbs starts the server
]
LEVEL = {room: depth for depth, rooms in enumerate(LEVELS) for room in rooms}
FACES = {"__init__", "__main__"}  # the public face and the entry point may import any room


def rooms_imported(path: Path) -> set[str]:
    """The rooms of codd that a file imports, at any depth of nesting, relative imports included."""
    package = ("codd", *path.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, [base, node.module or ""]))
            names = [module] if module != "codd" else [f"codd.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("codd.")}
        if "codd" in names:
            found.add("__init__")
    return found


def test_every_room_is_in_the_plan():
    rooms = {p.name.removesuffix(".py") for p in PACKAGE.iterdir() if p.name != "__pycache__" and p.name != "py.typed"}
    assert rooms - FACES <= set(LEVEL)


def test_imports_point_one_way():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room in FACES:
            continue
        for other in rooms_imported(path) - {room}:
            if other not in LEVEL or LEVEL[other] >= LEVEL[room]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports codd.{other}")
    assert not wrong, "\n".join(wrong)


def test_the_library_knows_nothing_of_the_lab():
    assert not [
        path for path in PACKAGE.rglob("*.py") if re.search(r"^\s*(from|import) codd_lab\b", path.read_text(), re.M)
    ]


def test_the_picture_shows_these_levels():
    picture = (ROOT / "docs" / "figures" / "rooms.svg").read_text()
    rows: dict[int, set[str]] = {}
    for height, room in re.findall(r'<text [^>]*y="(\d+)">(\w+)</text>', picture):
        rows.setdefault(int(height), set()).add(room)
    levels = [level - FACES for level in LEVELS if level - FACES]
    assert [rows[height] for height in sorted(rows, reverse=True)] == levels, "mend docs/figures/rooms.svg"


@pytest.mark.parametrize(("room", "other"), [("evaluation", "training"), ("training", "evaluation")])
def test_neither_loads_the_other(room, other):
    """Not by an import within a function either, of their own or of what they use: all their modules are loaded."""
    paths = sorted((PACKAGE / room).rglob("*.py"))
    assert len(paths) > 5
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__") for path in paths
    ]
    modules = [name for name in modules if name != "codd.evaluation.harness"]  # it needs lm-eval
    code = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
    code += f"print(sorted(name for name in sys.modules if name.startswith('codd.{other}')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"


def test_the_checker_sees_a_forbidden_import(tmp_path):
    file = PACKAGE / "circuits" / "hmm.py"
    assert "errors" in rooms_imported(file)
    assert "cli" not in rooms_imported(file)
