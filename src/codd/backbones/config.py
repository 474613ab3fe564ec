"""Reading a config.json: the fields that a family needs, with errors that name the field."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from codd.backbones.transformer import Activation
from codd.errors import FormatError
from codd.files import read_json_object

CONFIG = "config.json"
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Names of activation functions on the hub, and ours."""


class Config:
    """The fields of a config.json, read with checks; every check fails with a FormatError that names file and field."""

    def __init__(self, fields: Mapping[str, Any], where: str = CONFIG):
        """``where`` (the file, and the section in it) begins every error."""
        self.fields, self.where = fields, where

    @classmethod
    def read(cls, folder: Path) -> "Config":
        """Read the config.json of a checkpoint's folder; FormatError if there is none or it is damaged."""
        path = folder / CONFIG
        if not path.exists():
            raise FormatError(f"{path}: is missing, so that this is not a checkpoint. Give its folder.")
        return cls(read_json_object(path), str(path))

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value of a field; ``default`` where it is absent."""
        return self.fields.get(name, default)

    def kinds(self) -> list[Any]:
        """What the file says that it is of, the surest first: its classes, those of its modules, its model_type.

        The model_type may be that of another family whose layout it shares. SEDD's training configuration has sections.
        """
        modules = self.get("auto_map")
        mapped = modules.values() if isinstance(modules, dict) else ()
        nested = isinstance(self.get("graph"), dict) and isinstance(self.get("model"), dict) and "tokens" in self.fields
        model_type = self.get("model_type", "sedd" if nested else None)
        return [*self.names("architectures"), *(str(each).rpartition(".")[2] for each in mapped), model_type]

    def kind(self, known: Sequence[str]) -> Any:
        """The first of `kinds` that is known; None if none is."""
        return next((kind for kind in self.kinds() if kind in known), None)

    def section(self, name: str) -> "Config":
        """The fields of a nested object."""
        value = self.fields.get(name)
        if not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return Config(value, f"{self.where} ({name})")

    def count(self, name: str, default: int | None = None, *, least: int = 1, most: int = 2**28) -> int:
        """A whole number from ``least`` on; ``default`` where it is absent or null."""
        value = self._stated(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(name, f"a whole number from {least} to {most}", value)
        return value

    def layers(self, name: str) -> int:
        """A number of layers, at most 10,000: a damaged file must not make us write out a billion key names."""
        return self.count(name, most=10_000)

    def layer_flags(self, name: str, layers: int) -> tuple[bool, ...]:
        """One number for each of the layers, 0 for those that are not meant; all are where it is absent or null."""
        value = self._stated(name, [1] * layers)
        if isinstance(value, int) and not isinstance(value, bool):
            value = [value] * layers
        if not isinstance(value, list) or len(value) != layers or any(flag not in (0, 1) for flag in value):
            raise self._wrong(name, f"a list of {layers} times 0 or 1", value)
        return tuple(map(bool, value))

    def rotary_width(self) -> int | None:
        """How many columns of a head are rotated, by the share that is stated; None: all."""
        heads, share = self.count("num_attention_heads"), self.number("partial_rotary_factor", 1.0)
        width = int(self.count("head_dim", self.count("hidden_size") // heads) * share)
        return None if share == 1 else width

    def number(self, name: str, default: float | None = None) -> float:
        """A number above zero; ``default`` where it is absent or null."""
        value = self._stated(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self._wrong(name, "a number above zero", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; ``default`` where it is absent or null."""
        value = self._stated(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def token(self, name: str) -> int | None:
        """The id of a special token (the first, if the field lists several); None where it is absent or null."""
        return next(iter(self.tokens(name)), None)

    def tokens(self, name: str) -> list[int]:
        """The ids of special tokens, from one or a list of them; none where it is absent or null."""
        value = self.fields.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < 2**31 for each in ids):
            raise self._wrong(name, "the id of a token", value)
        return ids

    def names(self, name: str) -> list[str]:
        """A list of names; an empty one where it is absent or null."""
        value = self._stated(name, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(name, "a list of names", value)
        return value

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers; an empty one where it is absent or null."""
        value = self._stated(name, [])
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise self._wrong(name, "a list of whole numbers", value)
        return value

    def activation(self, name: str, default: str) -> Activation:
        """An activation function by its name on the hub; ``default`` where it is absent or null."""
        self.only(name, list(ACTIVATIONS))
        return ACTIVATIONS[self._stated(name, default)]

    def only(self, name: str, allowed: Sequence[Any]) -> None:
        """Refuse a value that would make another network than the one we build; absent and null pass."""
        value = self.fields.get(name)
        if value is not None and value not in allowed:
            raise self._wrong(name, " or ".join(map(json.dumps, allowed)), value, "codd builds no other kind")

    def absent(self, *names: str) -> None:
        """Refuse fields, unless null or false, that would make another network than the one we build."""
        for name in names:
            self.only(name, [False])

    def _stated(self, name: str, default: Any) -> Any:
        value = self.fields.get(name)
        return default if value is None else value

    def _wrong(
        self, name: str, wanted: str, value: Any, advice: str = "correct it or download the file again"
    ) -> FormatError:
        return FormatError(f"{self.where}: {name} must be {wanted}, found {reprlib.repr(value)}; {advice}.")
