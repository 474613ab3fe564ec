"""Causal models that the package transformers loads: text is drawn from them, judged by them, and scored beside DCD."""

import contextlib
import importlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from codd import files
from codd.errors import FormatError, MissingDependency


@contextmanager
def transformers_for(folder: Path) -> Iterator[Any]:
    """The package transformers, to load files of a folder with; what it raises becomes an error of ours."""
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingDependency(
            f"{folder}: is no model of ours; any other needs the package transformers: pip install codd-lab"
        ) from error
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars know no other switch
            yield library
    except ImportError as error:
        raise MissingDependency(f"{folder}: {files.brief(error)} pip install codd-lab") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise FormatError(f"{folder}: transformers cannot load it ({files.brief(error)}).") from error


def load_causal_lm(folder: Path, *, dtype: torch.dtype | str = torch.float32, gguf_file: str | None = None) -> Any:
    """A causal language model with its head, for inference, on the CPU; no code of the folder runs.

    ``dtype`` "auto" is that of the files, which are safetensors unless a ``gguf_file`` of the folder is named. Weights
    that the files lack are a FormatError, not noise.
    """
    kind = {"use_safetensors": True} if gguf_file is None else {"gguf_file": gguf_file}
    with transformers_for(folder) as library:
        model, report = library.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, local_files_only=True, trust_remote_code=False, **kind
        )
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise FormatError(f"{folder}: {len(missing)} weights are missing, {missing[0]} for one. Download it again.")
    return model.eval().requires_grad_(False)
