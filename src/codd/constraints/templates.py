"""Fixed text with slots."""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from codd.constraints import cache, syntax
from codd.constraints.automaton import Automaton, from_dfa
from codd.constraints.determinism import MAX_COPIES, MAX_STATES, too_large
from codd.constraints.languages import Language, Regex
from codd.constraints.tables import DFA, unique_rows
from codd.constraints.vocabulary import Vocabulary
from codd.errors import InvalidConstraint, shown

_SLOT = re.compile(r"\[MASK:(\d{1,6})\]")
_LINE = Regex(r"[^\n]+")

_Place = tuple[int, int, int]  # part, state in it, tokens that the slot may still have


@dataclass(frozen=True, init=False)
class Template:
    """Fixed text with slots: ``[MASK:8]`` stands for at most eight tokens of a language of its own.

    Fixed text is written in the tokenizer's own tokens. Slots may be shorter than they could: what comes after moves
    up, and the text ends early. A slot without a pattern holds a text of one line that is not empty.

    >>> Template("Name: [MASK:8], age: [MASK:2]", patterns={1: Regex(r"\\d+")}).slots
    (8, 2)
    """

    texts: tuple[str, ...]
    """Text before, between and after the slots."""
    slots: tuple[int, ...]
    """The largest number of tokens of each slot."""
    languages: tuple[Language, ...]
    """The language of each slot."""

    def __init__(
        self, template: str, patterns: Sequence[Language | str | None] | Mapping[int, Language | str | None] = ()
    ):
        """``patterns``: by the number of their slot, from 0, or in order: languages or regexes (None: one line)."""
        if not isinstance(template, str) or isinstance(patterns, str) or not isinstance(patterns, Sequence | Mapping):
            raise InvalidConstraint(
                f"a template is a text and a list of languages, found {shown(template)}, {shown(patterns)}."
            )
        syntax.check_text(template)
        if len(template) > MAX_COPIES:
            raise too_large("characters", MAX_COPIES)
        pieces = _SLOT.split(template)
        slots = tuple(int(count) for count in pieces[1::2])
        given = dict(patterns) if isinstance(patterns, Mapping) else dict(enumerate(patterns))
        if unknown := [slot for slot in given if slot not in range(len(slots))]:
            raise InvalidConstraint(f"there is a pattern for slot {unknown[0]!r}, but the template has {len(slots)}.")
        if not slots or not all(slots):
            raise InvalidConstraint(f"a template has slots, [MASK:n] of n tokens, at least 1; found {shown(template)}.")
        object.__setattr__(self, "texts", tuple(pieces[::2]))
        object.__setattr__(self, "slots", slots)
        listed = [given.get(slot) for slot in range(len(slots))]
        languages = [_LINE if one is None else Regex(one) if isinstance(one, str) else one for one in listed]
        for one in languages:
            if not isinstance(one, Language):
                raise InvalidConstraint(f"the pattern of a slot is a language or a regex, found {shown(one)}.")
        object.__setattr__(self, "languages", tuple(languages))

    def compile(self, vocabulary: Vocabulary, *, max_states: int = MAX_STATES) -> Automaton:
        """The smallest automaton of the template's texts; InvalidConstraint if it needs more than ``max_states``."""
        fixed = [vocabulary.spell(text, first=not i) if text else [] for i, text in enumerate(self.texts)]
        automaton = cache.compiled((self, fixed), vocabulary, lambda: self._compile(fixed, vocabulary, max_states))
        if automaton.num_states > max_states:
            raise too_large("states", max_states)
        return automaton

    def _compile(self, fixed: list[list[int]], vocabulary: Vocabulary, max_states: int) -> Automaton:
        """The subset construction over classes of tokens: where a slot ends is seen only later."""
        parts = _Parts(self, fixed, vocabulary, max_states)
        first = frozenset(parts.entered(0))
        number, queue, rows, accepting = {first: 0}, deque([first]), [], []
        while queue:
            places = queue.popleft()
            row = np.full(len(parts.tokens), -1, dtype=np.int32)
            for column in range(len(parts.tokens)):
                following = frozenset(place for at in places for place in parts.after(at, column))
                if not following:
                    continue
                if following not in number:
                    number[following] = len(number)
                    queue.append(following)
                row[column] = number[following]
            if len(number) > max_states:
                raise too_large("states", max_states)
            rows.append(row)
            accepting.append(any(part == parts.count for part, _, _ in places))
        return from_dfa(DFA(np.array(rows), 0, np.array(accepting)), parts.classes)


class _Parts:
    """A template's parts, fixed texts and slots by turns, as one nondeterministic automaton over classes of tokens."""

    def __init__(self, template: Template, fixed: list[list[int]], vocabulary: Vocabulary, max_states: int):
        inside = replace(vocabulary, strips_space=False)  # only where a text begins can a space be lost
        self._slots = [
            language.compile(inside if i or fixed[0] else vocabulary, max_states=max_states)
            for i, language in enumerate(template.languages)
        ]
        self._most = template.slots
        self.count = len(fixed) + len(self._slots)
        alone = np.zeros(len(vocabulary), dtype=np.int32)
        spelt = sorted({id for ids in fixed for id in ids})
        alone[spelt] = np.arange(1, len(spelt) + 1)
        columns = [alone, *(slot.classes.numpy().astype(np.int32) for slot in self._slots)]
        _, self.tokens, self.classes = unique_rows(np.column_stack(columns))
        self._tables = [slot.table[:, slot.classes[self.tokens]].tolist() for slot in self._slots]
        self._ends = [slot.accepting.tolist() for slot in self._slots]
        self._spelt = [[int(self.classes[id]) for id in ids] for ids in fixed]

    def entered(self, part: int) -> list[_Place]:
        """Where one is at the beginning of a part; past the last one, at the end."""
        if part == self.count:
            return [(part, 0, 0)]
        if part % 2 == 0:
            return [(part, 0, 0)] if self._spelt[part // 2] else self.entered(part + 1)
        return self._in_slot(part, self._slots[part // 2].start, self._most[part // 2])

    def _in_slot(self, part: int, state: int, left: int) -> list[_Place]:
        ended = self.entered(part + 1) if self._ends[part // 2][state] else []
        return [(part, state, left), *ended] if left else ended

    def after(self, place: _Place, column: int) -> list[_Place]:
        """Where one may be after a token of a class."""
        part, state, left = place
        if part == self.count:
            return []
        if part % 2:
            following = self._tables[part // 2][state][column]
            return self._in_slot(part, following, left - 1) if following >= 0 else []
        ids = self._spelt[part // 2]
        if ids[state] != column:
            return []
        return [(part, state + 1, 0)] if state + 1 < len(ids) else self.entered(part + 1)
