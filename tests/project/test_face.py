"""The public face, in a fresh interpreter: this one has loaded everything already."""

import importlib.metadata
import pickle
import subprocess
import sys

import pytest

import codd
from codd import circuits

HEAVY = "{'pydantic', 'torch', 'numpy', 'rich', 'safetensors', 'jaxtyping'}"
NAMES = {
    *("HMM", "Circuit", "Evidence", "Modulated", "SparsePotentials", "load_circuit", "Coupled", "Tokenizer"),
    *("Model", "Options", "Generation", "Decision", "Step", "load"),
}
SUBMODULES = {"backbones", "circuits", "constraints", "coupling", "decoding", "errors", "evaluation", "training"}


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
        *(([v, "--help"], 0) for v in ("bench", "convert", "report")),
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


def test_names_in_a_fresh_interpreter():
    """One interpreter for all of it, since loading PyTorch takes seconds."""
    program = f"""if True:
        import os, pickle, sys
        os.environ.pop("GOMP_SPINCOUNT", None), os.environ.pop("OMP_WAIT_POLICY", None)
        import codd
        assert os.environ["GOMP_SPINCOUNT"] == "3000"  # OpenMP reads it when PyTorch is loaded, which is not yet
        assert "torch" not in sys.modules
        assert pickle.loads({pickle.dumps(codd.Options)!r}) is codd.Options
        assert "torch" in sys.modules
        assert pickle.loads(pickle.dumps(codd.HMM)) is codd.HMM
        assert codd.files.__name__ == "codd.files"  # submodules that are not listed resolve, too
        assert codd.circuits.storage.__name__ == "codd.circuits.storage"
        from codd import *
        print(sorted({NAMES | SUBMODULES!r} - set(globals())))
    """
    assert fresh(program) == "[]\n"
