"""What an adapter_config.json says of a module, by PEFT's rules."""

import itertools
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

from codd import files
from codd.backbones.config import Config
from codd.errors import FormatError

_MATCH = """
import json, re, sys
pattern, names = json.load(sys.stdin)
found = {name: re.match(pattern, name) for name in names}
json.dump({name: x.groupdict().get("layer", "") for name, x in found.items() if x}, sys.stdout)
"""
_SIMPLE = re.compile(r"(?:[\w^$-]|\\?\.|\[[^]\\[]*\])*")
"""Patterns in which nothing is repeated and nothing branches."""
LONGEST = 10_000
"""Characters of a regular expression."""
PATIENCE = 10
"""Seconds for all regular expressions of an adapter."""


class Rules:
    """PEFT's rules: which modules an adapter has low-rank parts for, and of which rank and scaling."""

    def __init__(self, config: Config, modules: Iterable[str]):
        """``config``: an adapter_config.json; ``modules``: the names of the base network's modules."""
        self.config, self.modules = config, sorted(modules)
        self._lists: dict[str, frozenset[str]] = {}
        self._matchers: dict[str, Callable[[str], str | None]] = {}
        self._spent = 0.0

    def targets(self, module: str) -> bool:
        """Whether the adapter has a low-rank addition for a module."""
        saved = self._strings("modules_to_save")
        whole = any(self._match("modules_to_save", r"(^|.*\.)@($|\..*)", name, module) is not None for name in saved)
        if whole or self._named("exclude_modules", module):
            return False
        wanted, layers = self.config.get("target_modules"), self.config.get("layers_to_transform")
        if wanted is None or (isinstance(wanted, str) and wanted.lower() == "all-linear"):  # the file says which
            return True
        if not self._named("target_modules", module):
            return False
        if isinstance(wanted, str) or layers in (None, []) or module in self._lists["target_modules"]:
            return True
        start, patterns = r"(?:^|.*?\.)", self._strings("layers_pattern")
        if not patterns:
            start, patterns = r".*?\.", ["[^.]*"]
        numbers = (self._match("layers_pattern", start + r"@\.(?P<layer>\d+)\.", name, module) for name in patterns)
        layer = next((int(number) for number in numbers if number), None)
        return layer in (layers if isinstance(layers, list) else [layers])

    def rank_and_scaling(self, module: str) -> tuple[int, float]:
        """The rank of a module's low-rank addition, and the factor that it is scaled with."""
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
        if field not in self._lists:
            self._lists[field] = frozenset(self._strings(field))
        ends = itertools.accumulate(reversed(module.split(".")), lambda end, name: f"{name}.{end}")
        return not self._lists[field].isdisjoint(ends)

    def _strings(self, field: str) -> list[str]:
        value = self.config.get(field) or []
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise FormatError(f"{self.config.where}: {field} must be a list of names, found {value!r:.200}.")
        return names

    def _match(self, field: str, around: str, own: str, module: str) -> str | None:
        """What a pattern calls ``layer`` in a module's name ("" if nothing); None if it does not match.

        ``own`` is the adapter's part of it, which stands for the @ in ``around``.
        """
        pattern, begun = around.replace("@", own), time.monotonic()
        try:
            if pattern not in self._matchers:
                self._matchers[pattern] = self._matcher(pattern, own)
            layer = self._matchers[pattern](module)
        except (re.error, OverflowError, RecursionError) as error:
            raise self._wrong(field, own, f"which is no regular expression ({files.brief(error)})") from error
        except subprocess.SubprocessError as error:
            raise self._wrong(field, own, f"which takes more than {PATIENCE} s") from error
        self._spent += time.monotonic() - begun
        if self._spent > PATIENCE:
            raise self._wrong(field, own, f"and more, which together take more than {PATIENCE} s")
        return layer

    def _matcher(self, pattern: str, own: str) -> Callable[[str], str | None]:
        """What finds a pattern in a name. A stranger's can take for ever: another process tries it, and is ended."""
        if len(own) > LONGEST:
            raise re.error(f"more than {LONGEST} characters")
        compiled = re.compile(pattern)
        if _SIMPLE.fullmatch(own):
            return lambda name: match.groupdict().get("layer", "") if (match := compiled.match(name)) else None
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCH],
            input=json.dumps([pattern, self.modules]),
            capture_output=True,
            timeout=max(PATIENCE - self._spent, 0),
            check=True,
            encoding="utf-8",
        )
        layers: dict[str, str] = json.loads(done.stdout)
        return layers.get

    def _wrong(self, field: str, own: str, why: str) -> FormatError:
        return FormatError(f"{self.config.where}: {field} has {own!r:.100}, {why}. Correct it or use another adapter.")
