"""What an adapter_config.json says of a module, by PEFT's rules."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable

from codd import files
from codd.backbones.config import Config
from codd.errors import FormatError

_MATCH = """
import json, re, sys
pattern, names = json.load(sys.stdin)
found = {name: re.match(pattern, name) for name in names}
json.dump({name: x.groupdict().get("layer", "") for name, x in found.items() if x}, sys.stdout)
"""
_SIMPLE = re.compile(r"(?:\w|-|\\?\.|\[[^]\\[]*\])*")
"""Patterns that repeat nothing."""
PATIENCE = 10
"""Seconds for a regular expression of an adapter."""


class Rules:
    """PEFT's rules: which modules an adapter has low-rank parts for, and of which rank and scaling."""

    def __init__(self, config: Config, modules: Iterable[str]):
        """Of an adapter_config.json, for modules of the base."""
        self.config, self.modules = config, sorted(modules)
        self._found: dict[str, dict[str, str]] = {}

    def targets(self, module: str) -> bool:
        """Whether there is a part for a module."""
        saved = self._strings("modules_to_save")
        whole = any(self._match("modules_to_save", r"(^|.*\.)@($|\..*)", name, module) is not None for name in saved)
        if whole or self._named("exclude_modules", module):
            return False
        wanted, layers = self.config.get("target_modules"), self.config.get("layers_to_transform")
        if wanted is None or str(wanted).lower() == "all-linear":  # the file says which these are
            return True
        if not self._named("target_modules", module):
            return False
        if isinstance(wanted, str) or module in wanted or layers in (None, []):
            return True
        start, patterns = r"(?:^|.*?\.)", self._strings("layers_pattern")
        if not patterns:
            start, patterns = r".*?\.", ["[^.]*"]
        numbers = (self._match("layers_pattern", start + r"@\.(?P<layer>\d+)\.", name, module) for name in patterns)
        found = next((int(number) for number in numbers if number), None)
        return found in (layers if isinstance(layers, list) else [layers])

    def rank_and_scaling(self, module: str) -> tuple[int, float]:
        """Of a module's part."""
        rank = self._setting("rank_pattern", "r", module).count("r", 8)
        alpha = self._setting("alpha_pattern", "lora_alpha", module).number("lora_alpha", 8.0)
        return rank, alpha / (math.sqrt(rank) if self.config.flag("use_rslora", False) else rank)

    def _setting(self, patterns: str, name: str, module: str) -> Config:
        """Where a setting stands: in the first pattern that matches a module's name or its end, or outside of them."""
        for pattern, value in (self.config.section(patterns).fields if self.config.get(patterns) else {}).items():
            if self._match(patterns, r"(.*\.)?(@)$", pattern, module) is not None:
                return Config({name: value}, f"{self.config.where} ({patterns})")
        return self.config

    def _named(self, field: str, module: str) -> bool:
        """Whether a field lists a module's name or its end; or is a regular expression for all of it."""
        if isinstance(pattern := self.config.get(field), str):
            return self._match(field, r"(?:@)\Z", pattern, module) is not None
        names = self._strings(field)
        return module in names or module.endswith(tuple(f".{name}" for name in names))

    def _strings(self, field: str) -> list[str]:
        value = self.config.get(field) or []
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise FormatError(f"{self.config.where}: {field} must be a list of names, found {value!r:.200}.")
        return found

    def _match(self, field: str, around: str, own: str, module: str) -> str | None:
        """What a pattern calls ``layer`` in a module's name ("" if nothing); None if it does not match.

        ``own`` is the adapter's part of it, which stands for the @ in ``around``.
        """
        pattern = around.replace("@", own)
        if pattern not in self._found:
            try:
                self._found[pattern] = self._match_all(pattern, simple=_SIMPLE.fullmatch(own) is not None)
            except (re.error, OverflowError, RecursionError, subprocess.SubprocessError) as error:
                raise FormatError(
                    f"{self.config.where}: {field} has {own!r:.100}, which is no regular expression, or takes more "
                    f"than {PATIENCE} s ({files.brief(error)}). Correct it or use another adapter."
                ) from error
        return self._found[pattern].get(module)

    def _match_all(self, pattern: str, simple: bool) -> dict[str, str]:
        """All modules that match. A stranger's pattern can take for ever: another process tries it, and is ended."""
        found = re.compile(pattern)
        if simple:
            matched = {name: found.match(name) for name in self.modules}
            return {name: match.groupdict().get("layer", "") for name, match in matched.items() if match}
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCH],
            input=json.dumps([pattern, self.modules]),
            capture_output=True,
            timeout=PATIENCE,
            check=True,
            encoding="utf-8",
        )
        said: dict[str, str] = json.loads(done.stdout)
        return said
