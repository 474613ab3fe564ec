"""Fixed text with named fields, each of which takes one of a list of values: every assignment is one text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter

import numpy as np
from numpy.typing import NDArray

from codd.constraints.automaton import Automaton
from codd.constraints.determinism import MAX_STATES, too_large
from codd.constraints.languages import After, Choice, Language
from codd.constraints.tables import DFA, trimmed
from codd.constraints.vocabulary import Vocabulary
from codd.errors import InvalidConstraint, shown

MOST_VALUES, MOST_BYTES = 1000, 1000
"""Values of a field, and bytes of a value."""
_Edges = dict[int, int]  # from a token to the next state


@dataclass(frozen=True, init=False)
class Form:
    r"""Fixed text with fields.

    >>> from codd.constraints import Regex
    >>> Form({"score": Regex("[1-3]")}, "Score: {score}.").values
    {'score': ('1', '2', '3')}
    """

    texts: tuple[str, ...]
    """Text before, between and after the fields."""
    values: dict[str, tuple[str, ...]]
    """The values of each field, in the order of the text."""

    def __init__(self, fields: Mapping[str, Language], template: str | None = None):
        """List the values of all fields.

        Args:
            fields: the language of each field: a `Choice`, or a `Regex` or `JsonSchema` that has few texts.
            template: the text, with each field's name once in braces; None: a line ``name: value`` per field.

        Raises:
            InvalidConstraint: fields and template do not fit each other, or a field has too many values.
        """
        if not isinstance(fields, Mapping) or not fields or not all(isinstance(name, str) for name in fields):
            raise InvalidConstraint(f"fields maps names to languages, at least one, found {shown(fields)}.")
        if template is None:
            names, texts = list(fields), [*("\n" * (i > 0) + f"{name}: " for i, name in enumerate(fields)), ""]
        else:
            names, texts = _parsed(template)
            if sorted(names) != sorted(fields):
                raise InvalidConstraint(f"a template has each of {', '.join(fields)} once in braces, found {names}.")
        object.__setattr__(self, "texts", tuple(texts))
        object.__setattr__(self, "values", {name: _values(name, fields[name]) for name in names})

    def compile(
        self,
        vocabulary: Vocabulary,
        stop_ids: Iterable[int],
        pad_ids: Iterable[int] = (),
        *,
        max_states: int = MAX_STATES,
    ) -> "CompiledForm":
        """The form over a vocabulary's tokens: fixed text in the tokenizer's own, values in any that write them.

        Args:
            vocabulary: what each token writes.
            stop_ids: tokens that may follow a text.
            pad_ids: tokens that may follow these.
            max_states: the most states of the automaton.

        Raises:
            InvalidConstraint: tokens cannot write the form, or cannot tell where a value ends.
        """
        graph = _Graph(vocabulary, list(stop_ids), list(pad_ids), max_states)
        graph.write(self.texts[0].removesuffix(" "), first=True)
        for i, values in enumerate(self.values.values(), 1):
            space = " " * self.texts[i - 1].endswith(" ")  # tokens of words begin with the space before them
            graph.choose([space + value for value in values])
            last = i == len(self.values)
            graph.write(self.texts[i] if last else self.texts[i].removesuffix(" "), last=last)
        return graph.compiled()


@dataclass(frozen=True, eq=False)
class CompiledForm:
    """An automaton that remembers, at one place of each field, which value it has read."""

    automaton: Automaton
    given: tuple[int | None, ...]
    """The longest text: fixed tokens whose place is the same in every text, None for all other positions."""
    read: tuple[NDArray[np.int64], ...]
    """By field and value: a state that is passed once if the field has this value and something follows it."""
    ends: NDArray[np.int64]
    """By value of the last field: the state at the end of a text that ends with it."""


class _Graph:
    """The automaton of a form while it is written from left to right: the edges of each state."""

    def __init__(self, vocabulary: Vocabulary, stops: list[int], pads: list[int], max_states: int):
        self._vocabulary, self._stops, self._max_states = vocabulary, stops, max_states
        self._writers: dict[bytes, list[int]] = {}
        for id, token in enumerate(vocabulary.tokens):
            self._writers.setdefault(token, []).append(id)
        self._longest = max(map(len, self._writers))
        done: _Edges = dict.fromkeys([*stops, *pads], 1)  # state 1: behind the first end token
        self._edges: list[_Edges] = [{}, done]
        self._accepting = [1]
        self._at = self._edges[0]
        """The edges of what is written next."""
        self._values, self._leaves = [""], [0]
        """The values of the field just written, and the state at the end of each."""
        self._given: list[int | None] = []
        self._certain = True
        self._read: list[list[int]] = []

    def _state(self, edges: _Edges) -> int:
        if len(self._edges) == self._max_states:
            raise too_large("states", self._max_states)
        self._edges.append(edges)
        return len(self._edges) - 1

    def _spelt(self, text: str) -> list[int]:
        """The tokenizer's ids for what comes next: only where a text begins can a space be lost."""
        first = not self._given
        vocabulary = self._vocabulary if first else replace(self._vocabulary, strips_space=False)
        return vocabulary.spell(text, first=first) if text else []

    def write(self, text: str, *, first: bool = False, last: bool = False) -> None:
        """Fixed text behind the values of a field."""
        ids = self._spelt(text)
        self._given += ids if self._certain else [None] * len(ids)
        ends = self._leaves
        if not first:
            self._at = self._edges[1] if last and not ids else {}
            self._read.append(marks := self._behind(ids[:1] or (self._stops if last else []), last))
            ends = [*ends, *marks] if not ids else marks
        for token in ids if first else ids[1:]:
            edges: _Edges = {}
            ends = [self._state(edges)]
            self._at[token], self._at = ends[0], edges
        if last:
            self._accepting += ends
            self._at.update(dict.fromkeys(self._stops, 1))

    def _behind(self, heads: list[int], last: bool) -> list[int]:
        """A state for each value, reached by what follows it; they all go on alike."""
        marks = []
        for value, leaf in zip(self._values, self._leaves, strict=True):
            edges = self._edges[leaf]
            if any(head in edges for head in heads) or (edges and not heads and not last):
                raise InvalidConstraint(
                    f"the value {value.strip(' ')!r:.40} begins another one, and what follows does not tell them "
                    "apart: put another text behind the field."
                )
            if heads or last:
                marks.append(self._state(self._at))
                edges.update(dict.fromkeys(heads, marks[-1]))
            else:
                self._edges[leaf] = self._at
                marks.append(leaf)
        return marks

    def choose(self, values: Sequence[str]) -> None:
        """Any of some texts, in any tokens that write it."""
        spaces = (b"", b" ") if not self._given and self._vocabulary.strips_space else (b"",)
        lengths = {len(self._spelt(value)) for value in values}
        nodes, root = {b"": -1}, self._at
        for text in map(str.encode, values):
            for end in range(1, len(text) + 1):
                if text[:end] not in nodes:
                    nodes[text[:end]] = self._state({})
                for begin in range(max(end - self._longest, 0), end):
                    edges = self._edges[nodes[text[:begin]]] if begin else root
                    for space in spaces if begin == 0 else (b"",):
                        tokens = self._writers.get(space + text[begin:end], [])
                        edges.update(dict.fromkeys(tokens, nodes[text[:end]]))
        self._values, self._leaves = list(values), [nodes[value.encode()] for value in values]
        self._given += [None] * max(lengths)
        self._certain = self._certain and len(lengths) == 1

    def compiled(self) -> CompiledForm:
        """The automaton, and where it says what was read."""
        if not self._certain and not self._stops:
            raise InvalidConstraint(
                "the values of a field differ in their number of tokens, which needs a token that ends a text: this "
                "model has none, so give values of as many tokens each."
            )
        tokens = sorted({token for edges in self._edges for token in edges})
        classes = np.zeros(len(self._vocabulary), dtype=np.int64)
        classes[tokens] = np.arange(1, len(tokens) + 1)
        table = np.full((len(self._edges), len(tokens) + 1), -1, dtype=np.int64)
        for state, edges in enumerate(self._edges):
            table[state, classes[list(edges)]] = list(edges.values())
        automaton = Automaton.from_classes(table, classes, accepting=sorted(set(self._accepting)))
        return CompiledForm(automaton, tuple(self._given), tuple(map(np.array, self._read)), np.array(self._leaves))


def _parsed(template: str) -> tuple[list[str], list[str]]:
    """The names in braces, and the texts around them."""
    names, texts = [], [""]
    try:
        for text, name, spec, conversion in Formatter().parse(template):
            texts[-1] += text
            if name is not None:
                if spec or conversion:
                    raise ValueError(f"a field is a name in braces, found {{{name}...}}")
                names.append(name)
                texts.append("")
    except (ValueError, TypeError) as error:
        raise InvalidConstraint(f"template {shown(template)}: {error}; braces of the text are doubled.") from None
    return names, texts


def _values(name: str, language: Language) -> tuple[str, ...]:
    """The texts of a field; InvalidConstraint for too many, or an empty one."""
    if not isinstance(language, Language) or isinstance(language, After):
        raise InvalidConstraint(f"field {name!r}: a Choice, Regex or JsonSchema, found {shown(language)}.")
    if isinstance(language, Choice):
        values = list(dict.fromkeys(language.texts))
    else:
        dfa = trimmed(language.dfa(MAX_STATES))
        values = [] if dfa is None else [text.decode() for text in _listed(name, dfa)]
    if not all(values) or not values:
        raise InvalidConstraint(f"field {name!r}: {'one value is the empty text' if values else 'there is no value'}.")
    if len(values) > MOST_VALUES or max(map(len, values)) > MOST_BYTES:
        raise _too_many(name)
    return tuple(values)


def _listed(name: str, dfa: DFA) -> list[bytes]:
    """All texts that an automaton over bytes accepts, shorter ones first."""
    found, level = [], [(b"", dfa.start)]
    while level:
        found += [text for text, state in level if dfa.accepting[state]]
        if len(found) + len(level) > 2 * MOST_VALUES or len(level[0][0]) > MOST_BYTES:
            raise _too_many(name)
        level = [
            (text + bytes([byte]), int(dfa.table[state, byte]))
            for text, state in level
            for byte in np.flatnonzero(dfa.table[state] >= 0).tolist()
        ]
    return found


def _too_many(name: str) -> InvalidConstraint:
    return InvalidConstraint(
        f"field {name!r} has more than {MOST_VALUES} values, or some of more than {MOST_BYTES} bytes: bound what its "
        "language repeats."
    )
