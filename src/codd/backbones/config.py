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
"""The hub's names."""


class Config:
    """The object in a config.json, and where it came from."""

    def __init__(self, fields: Mapping[str, Any], where: str = CONFIG):
        """``where`` begins every error."""
        self.fields, self.where = fields, where

    @classmethod
    def read(cls, folder: Path) -> "Config":
        """Of a checkpoint's folder."""
        path = folder / CONFIG
        if not path.exists():
            raise FormatError(f"{path}: is missing, so that this is not a checkpoint. Give its folder.")
        return cls(read_json_object(path), str(path))

    def get(self, name: str, default: Any = None) -> Any:
        """A field that may be absent."""
        return self.fields.get(name, default)

    def section(self, name: str) -> "Config":
        """An object inside this one."""
        found = self.fields.get(name)
        if not isinstance(found, dict):
            raise self._wrong(name, "an object", found)
        return Config(found, f"{self.where} ({name})")

    def count(self, name: str, default: int | None = None, *, most: int = 2**28) -> int:
        """A whole number above zero; ``default`` where it is absent or null."""
        found = self._given(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or not 0 < found <= most:
            raise self._wrong(name, f"a whole number from 1 to {most}", found)
        return found

    def layers(self, name: str) -> int:
        """How many layers there are. A damaged file must not make us write out a billion of them."""
        return self.count(name, most=10_000)

    def number(self, name: str, default: float | None = None) -> float:
        """A number above zero; ``default`` where it is absent or null."""
        found = self._given(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < 1e30:
            raise self._wrong(name, "a number above zero", found)
        return float(found)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; ``default`` where it is absent or null."""
        found = self._given(name, default)
        if not isinstance(found, bool):
            raise self._wrong(name, "true or false", found)
        return found

    def token(self, name: str) -> int | None:
        """The id of a special token; of several, the first. None where it is absent or null."""
        found = self.fields.get(name)
        if isinstance(found, list) and found:
            found = found[0]
        if found is not None and (isinstance(found, bool) or not isinstance(found, int) or found < 0):
            raise self._wrong(name, "the id of a token", found)
        return found

    def activation(self, name: str, default: str) -> Activation:
        """A nonlinearity by its name on the hub; ``default`` where it is absent or null."""
        self.only(name, list(ACTIVATIONS))
        return ACTIVATIONS[self._given(name, default)]

    def only(self, name: str, allowed: Sequence[Any]) -> None:
        """Refuse a value that would make another network than the one we build; absent and null pass."""
        found = self.fields.get(name)
        if found is not None and found not in allowed:
            raise self._wrong(name, " or ".join(map(json.dumps, allowed)), found, "codd builds no other kind")

    def absent(self, *names: str) -> None:
        """Refuse fields, unless null, that would make another network than the one we build."""
        for name in names:
            self.only(name, [None])

    def _given(self, name: str, default: Any) -> Any:
        found = self.fields.get(name)
        return default if found is None else found

    def _wrong(
        self, name: str, wanted: str, found: Any, advice: str = "correct it or download the file again"
    ) -> FormatError:
        return FormatError(f"{self.where}: {name} must be {wanted}, found {reprlib.repr(found)}; {advice}.")
