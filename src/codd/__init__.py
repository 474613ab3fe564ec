"""codd: a joint output distribution for any diffusion language model.

The face is lazy (PEP 562): ``import codd`` takes milliseconds, and PyTorch is loaded with the first name that needs it.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from codd import _threads as _threads  # now: what it sets must be set before PyTorch is loaded

if TYPE_CHECKING:
    from codd import backbones as backbones
    from codd import circuits as circuits
    from codd import constraints as constraints
    from codd import coupling as coupling
    from codd import decoding as decoding
    from codd import errors as errors
    from codd import evaluation as evaluation
    from codd import training as training
    from codd.backbones import Tokenizer as Tokenizer
    from codd.circuits import HMM as HMM
    from codd.circuits import Circuit as Circuit
    from codd.circuits import Evidence as Evidence
    from codd.circuits import Modulated as Modulated
    from codd.circuits import SparsePotentials as SparsePotentials
    from codd.circuits import load_circuit as load_circuit
    from codd.coupling import Coupled as Coupled
    from codd.decoding import Decision as Decision
    from codd.decoding import Generation as Generation
    from codd.decoding import Model as Model
    from codd.decoding import Options as Options
    from codd.decoding import Step as Step
    from codd.decoding import load as load

    __version__: str

_MODULES = {
    "HMM": "codd.circuits",
    "Circuit": "codd.circuits",
    "Coupled": "codd.coupling",
    "Evidence": "codd.circuits",
    "Decision": "codd.decoding",
    "Generation": "codd.decoding",
    "Model": "codd.decoding",
    "Modulated": "codd.circuits",
    "Options": "codd.decoding",
    "SparsePotentials": "codd.circuits",
    "Step": "codd.decoding",
    "Tokenizer": "codd.backbones",
    "load": "codd.decoding",
    "load_circuit": "codd.circuits",
}
"""Each public class and function, and the module that it comes from."""
_SUBMODULES = ("backbones", "circuits", "constraints", "coupling", "decoding", "errors", "evaluation", "training")

__all__ = [*_MODULES, *_SUBMODULES]


def __getattr__(name: str) -> Any:
    """Import what a name stands for, the first time that it is used; submodules that are not listed resolve, too."""
    value: Any
    if name == "__version__":
        value = _version()
    elif name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    else:
        value = _submodule(name)
    globals()[name] = value
    return value


def _version() -> str:
    """Of the installed package; "unknown" in a checkout that is only on the path."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and seldom wanted

    try:
        return version("codd-lm")
    except PackageNotFoundError:
        return "unknown"


def _submodule(name: str) -> Any:
    if not name.startswith("_"):
        try:
            return import_module(f"codd.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"codd.{name}":  # it exists, and needs something that does not
                raise
    raise AttributeError(f"module 'codd' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
