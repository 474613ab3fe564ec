"""Files that a stranger may have made are opened in one place, which takes regular files alone (`codd.files`)."""

import ast
from pathlib import Path

import codd

PACKAGE = Path(codd.__file__).parent
READERS = {"open", "read_text", "read_bytes", "safe_open", "load_file", "fromfile", "memmap"}
"""Functions and methods that open what stands at a path."""
LOADERS = {"np", "numpy", "torch", "json", "pickle"}
"""Modules whose ``load`` does."""
GUARDED = {"files", "text_files"}
ALLOWED = {
    "files.py": {"open_regular", "open_safetensors", "write_weights", "write_text", "sync_folder"},
    "folders.py": {"_lock"},
    "training/run.py": {"logged"},  # appends to its own log, which was read and written anew before
    "training/curve.py": {"write_curve"},
    "data/tokenization.py": {"_read_arrays"},  # after their digests were compared
    "cli/__init__.py": {"_discard_stdout"},
    "cli/convert.py": {"_convert_checkpoint"},  # what `files.open_regular` has opened, as plain tensors
    "cli/generate.py": {"run", "_read"},  # what the user names may be a pipe
    "cli/serve.py": {"_key"},
    "serving/compiler_process.py": {"_address_space"},
}


def opened(tree: ast.AST, function: str = "") -> list[str]:
    """The functions that open a path by themselves."""
    found = []
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else function
        if isinstance(node, ast.Call):
            called = node.func
            owner = called.value.id if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) else ""
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            ours = owner in GUARDED or owner[:1].isupper() or owner.startswith("_")
            imported = not owner and name in ("read_text", "read_bytes") and isinstance(called, ast.Name)
            if (name in READERS and not ours and not imported) or (name == "load" and owner in LOADERS):
                found.append(inside)
        found += opened(node, inside)
    return found


def test_no_other_function_opens_a_path():
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if functions := set(opened(ast.parse(path.read_text()))):
            found[str(path.relative_to(PACKAGE))] = functions
    assert found == ALLOWED, "read these through codd.files, or leave them out of the list"


def test_the_search_finds_what_it_looks_for():
    text = "def f(p):\n    p.read_text()\ndef g(p):\n    with open(p): np.load(p)\ndef h(p):\n    files.read_text(p)"
    assert opened(ast.parse(text)) == ["f", "g", "g"]
