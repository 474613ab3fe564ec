"""Imports: errors -> files -> constraints -> {circuits, backbones} -> coupling -> {decoding, training} -> the faces."""

import ast
from pathlib import Path

import codd

ROOT = Path(codd.__file__).parent
LEVELS = [
    {"_threads", "errors"},
    {"files"},
    {"constraints"},
    {"circuits", "backbones"},
    {"coupling"},
    {"decoding", "training"},
    {"evaluation"},
    {"serving"},
    {"cli"},  # one of its verbs starts the server
]
LEVEL = {room: depth for depth, rooms in enumerate(LEVELS) for room in rooms}
FACES = {"__init__", "__main__"}  # the public face and the entry point may import any room


def rooms_imported(path: Path) -> set[str]:
    """The rooms of codd that a file imports, at any depth of nesting, relative imports included."""
    package = ("codd", *path.relative_to(ROOT).parent.parts)
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
    return found


def test_every_room_is_in_the_plan():
    rooms = {p.name.removesuffix(".py") for p in ROOT.iterdir() if p.name != "__pycache__" and p.name != "py.typed"}
    assert rooms - FACES <= set(LEVEL)


def test_imports_point_one_way():
    wrong = []
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room in FACES:
            continue
        for other in rooms_imported(path) - {room}:
            if other not in LEVEL or LEVEL[other] >= LEVEL[room]:
                wrong.append(f"{path.relative_to(ROOT)} imports codd.{other}")
    assert not wrong, "\n".join(wrong)


def test_the_checker_sees_a_forbidden_import(tmp_path):
    file = ROOT / "circuits" / "hmm.py"
    assert "errors" in rooms_imported(file)
    assert "cli" not in rooms_imported(file)
