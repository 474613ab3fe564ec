"""The public face, in a fresh interpreter: this one has loaded everything already."""

import importlib.metadata
import pickle
import subprocess
import sys

import pytest

import codd
from codd import circuits

HEAVY = "{'torch', 'numpy', 'rich', 'safetensors', 'jaxtyping'}"
NAMES = {
    *("HMM", "Circuit", "Evidence", "Modulated", "SparsePotentials", "load_circuit", "Coupled", "Tokenizer"),
    *("Model", "Options", "Generation", "Step", "load"),
}
SUBMODULES = {"backbones", "circuits", "coupling", "decoding", "errors", "evaluation", "training"}


def fresh(program: str) -> str:
    """What a program prints in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_codd_loads_nothing_heavy():
    program = f"import sys, codd, codd.errors; dir(codd); codd.__version__; print({HEAVY} & set(sys.modules))"
    assert fresh(program) == "set()\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["nonsense"], 2),
        ([], 2),
        *(([v, "--help"], 0) for v in ("convert", "report")),
    ],
)
def test_the_command_line_answers_without_pytorch(arguments, code):
    program = f"""if True:
        import sys
        from codd.cli import main
        assert main({arguments}) == {code}
        print({HEAVY} & set(sys.modules))
    """
    assert fresh(program).splitlines()[-1] == "set()"


def test_pytorch_finds_the_spin_count_of_its_threads():
    """OpenMP reads it when PyTorch is loaded, which a lazy name does later than the import of codd."""
    program = """if True:
        import os, sys
        os.environ.pop("GOMP_SPINCOUNT", None), os.environ.pop("OMP_WAIT_POLICY", None)
        import codd
        assert "torch" not in sys.modules
        print(os.environ["GOMP_SPINCOUNT"])
        codd.HMM
        assert "torch" in sys.modules
    """
    assert fresh(program) == "3000\n"


def test_every_public_name_resolves_and_is_listed():
    for name in NAMES | SUBMODULES:
        assert getattr(codd, name).__name__ == (f"codd.{name}" if name in SUBMODULES else name)
    assert {*NAMES, *SUBMODULES, "__version__"} <= set(dir(codd))
    assert set(codd.__all__) == NAMES | SUBMODULES


def test_a_checkout_that_is_not_installed_has_no_version(monkeypatch):
    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    monkeypatch.delitem(vars(codd), "__version__", raising=False)  # it may have been looked up already
    assert codd.__version__ == "unknown"
    del vars(codd)["__version__"]


def test_a_name_is_the_object_of_its_module():
    assert codd.HMM is circuits.HMM
    assert codd.Options is codd.decoding.Options
    assert codd.__version__[0].isdigit()


def test_submodules_that_are_not_listed_resolve_too():
    program = "import codd; print(codd.files.__name__, codd.serving.__name__, codd.circuits.storage.__name__)"
    assert fresh(program) == "codd.files codd.serving codd.circuits.storage\n"


@pytest.mark.parametrize("name", ["hmm", "_private", "__wrapped__"])
def test_an_unknown_name_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=f"^module 'codd' has no attribute '{name}'$"):
        getattr(codd, name)
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from 'codd'"):
        exec(f"from codd import {name}")


def test_a_submodule_that_cannot_be_imported_says_why(monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.setattr(codd, "__path__", [*codd.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        _ = codd.broken


def test_a_star_brings_everything():
    program = f"from codd import *; print(sorted({NAMES | SUBMODULES!r} - set(globals())))"
    assert fresh(program) == "[]\n"


def test_classes_can_be_pickled_by_reference():
    assert pickle.loads(pickle.dumps(codd.HMM)) is codd.HMM
    pickled = pickle.dumps(codd.Options)
    program = f"import pickle, codd; print(pickle.loads({pickled!r}) is codd.Options)"
    assert fresh(program) == "True\n"
