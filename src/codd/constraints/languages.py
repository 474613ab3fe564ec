"""Languages that a text can be asked to be in: regular expressions, JSON schemas, choices."""

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from codd.constraints import cache, syntax
from codd.constraints.automaton import Automaton
from codd.constraints.compilation import over_tokens
from codd.constraints.determinism import MAX_COPIES, MAX_STATES, TooLarge, byte_dfa, combined, too_large
from codd.constraints.expressions import ANY, Either, Expression, Repeat, size, text, then
from codd.constraints.json_schema import Schemas
from codd.constraints.json_values import Values
from codd.constraints.tables import DFA
from codd.constraints.vocabulary import Vocabulary
from codd.errors import EmptyLanguage, InvalidConstraint, shown

_MAX_SCHEMA = 1_000_000  # characters
_MAX_TRIGGER = 1_000  # characters: what is written before it is compared with all of its beginnings


class Language(ABC):
    """A set of texts. Equal ones are equal, and can be keys."""

    @abstractmethod
    def expression(self) -> Expression:
        """The language as a regular expression: a tree of `Chars`, `Then`, `Either`, `Repeat` and `Graph`."""

    def dfa(self, max_states: int) -> DFA:
        """The texts as an automaton over the bytes of UTF-8."""
        return byte_dfa(self.expression(), max_states)

    def compile(self, vocabulary: Vocabulary, *, max_states: int = MAX_STATES) -> Automaton:
        """The smallest automaton over a vocabulary's tokens: it accepts every way to write every text of the language.

        Kept in memory and in the user's cache folder. Time and memory are bounded: a language that needs more than
        ``max_states`` states, or too much work to find that out, is an InvalidConstraint; one without texts, or none
        that these tokens can write, an EmptyLanguage.
        """
        automaton = cache.compiled(self, vocabulary, lambda: self._compile(vocabulary, max_states))
        if automaton.num_states > max_states:
            raise too_large("states", max_states)
        return automaton

    def _compile(self, vocabulary: Vocabulary, max_states: int) -> Automaton:
        try:
            return over_tokens(self.dfa(max_states), vocabulary, max_states)
        except EmptyLanguage as error:
            raise EmptyLanguage(f"{shown(self)}: no sequence of these tokens writes a text of it.") from error
        except RecursionError as error:
            raise InvalidConstraint(f"{shown(self)}: is nested too deep.") from error


@dataclass(frozen=True)
class Regex(Language):
    r"""The texts that ``re.fullmatch(pattern, text)`` matches.

    \d, \w and \s are ASCII here, which takes far fewer states, and \D, \W and \S leave out what Unicode counts to the
    former: all texts match with ``re.ASCII`` and without. With ``unicode`` they are as ``re`` has them. Lookaround,
    backreferences, word boundaries, atomic groups and possessive repetitions are errors.

    >>> Regex(r"\d{4}-\d{2}-\d{2}")
    Regex(pattern='\\d{4}-\\d{2}-\\d{2}', unicode=False)
    """

    pattern: str
    unicode: bool = False

    def __post_init__(self) -> None:
        """InvalidConstraint for a pattern that is wrong or not supported."""
        try:
            self.expression()
        except RecursionError as error:
            raise InvalidConstraint(f"{shown(self)}: is nested too deep.") from error

    def expression(self) -> Expression:
        """The pattern as a tree; InvalidConstraint for one that is wrong or not supported."""
        return syntax.parse(self.pattern, self.unicode)


@dataclass(frozen=True, init=False)
class Choice(Language):
    """One of some texts, exactly.

    >>> Choice(["yes", "no"])
    Choice(texts=('yes', 'no'))
    """

    texts: tuple[str, ...]

    def __init__(self, texts: Iterable[str]):
        """``texts``: at least one; InvalidConstraint otherwise, or for a string with half a surrogate pair."""
        listed = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else []
        if not listed or not all(isinstance(option, str) for option in listed):
            raise InvalidConstraint(f"a choice is a list of texts, at least one of them, found {shown(texts)}.")
        syntax.check_text("".join(listed))
        if sum(map(len, listed)) > MAX_COPIES:
            raise too_large("characters", MAX_COPIES)
        object.__setattr__(self, "texts", tuple(listed))

    def expression(self) -> Expression:
        """The texts as alternatives."""
        return Either(tuple(text(option) for option in self.texts))


@dataclass(frozen=True, init=False)
class JsonSchema(Language):
    """JSON texts that are valid under a schema, compact, with at most one space after each comma and colon.

    Objects have the properties that the schema names, in its order, and no others unless ``additional`` is set. What
    the schema leaves open nests three deep, and a definition contains itself at most three times, or less where the
    automaton would be too large.

    >>> JsonSchema({"properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}).schema["required"]
    ['age']
    """

    source: str
    """The schema as a JSON string: hashable, and compared by content."""
    strict: bool = False
    additional: bool = False

    def __init__(self, schema: dict[str, Any] | bool | str, *, strict: bool = False, additional: bool = False):
        """Read a schema.

        Args:
            schema: a dict or bool, or its JSON text.
            strict: refuse keywords and formats that are not known, which otherwise are ignored with a warning.
            additional: allow properties that the schema does not name wherever it does not forbid them, after those
                that it names.

        Raises:
            InvalidConstraint: if it is wrong, too large, or asks for what is not supported.
        """
        too_long = InvalidConstraint(f"a JSON schema has at most {_MAX_SCHEMA:,} characters.")
        if isinstance(schema, str) and len(schema) > _MAX_SCHEMA:
            raise too_long
        try:
            source = _as_json(json.loads(schema) if isinstance(schema, str) else schema)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidConstraint(f"the schema is no JSON: {error}.") from error
        if len(source) > _MAX_SCHEMA:
            raise too_long
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "strict", strict)
        object.__setattr__(self, "additional", additional)
        try:
            ignored = _read(source, additional, 0).ignored
        except RecursionError as error:
            raise InvalidConstraint("the JSON schema is nested too deep, or joins too many schemas.") from error
        if ignored and strict:
            raise InvalidConstraint(f"JSON schema, {ignored[0]}: not supported, and strict refuses to ignore it.")
        if ignored:
            more = f" and {len(ignored) - 5} more" if len(ignored) > 5 else ""
            warnings.warn(f"JSON schema: not followed are {', '.join(ignored[:5])}{more}.", stacklevel=2)

    @property
    def schema(self) -> Any:
        """The schema as Python values: a dict or a bool."""
        return json.loads(self.source)

    def expression(self) -> Expression:
        """The JSON texts that are valid under the schema, as a tree."""
        return _read(self.source, self.additional, 0).expression

    def dfa(self, max_states: int) -> DFA:
        """The texts as an automaton over the bytes of UTF-8; less deep where they would be too many.

        Where no value is left without properties that the schema does not name, they are allowed.
        """
        found: DFA | TooLarge | None = None
        positions = 0
        for attempt in range(len(_ATTEMPTS)):
            expression = _read(self.source, self.additional, attempt).expression
            if found is not None and size(expression) == positions:
                continue  # there is nothing more to leave out
            positions = size(expression)
            try:
                found = byte_dfa(expression, max_states)
            except TooLarge as error:
                found = error
                continue
            except EmptyLanguage:
                if self.additional:
                    raise
                return byte_dfa(_read(self.source, self.additional, attempt, True).expression, max_states)
            if len(found.table) <= max_states:
                break
        if isinstance(found, TooLarge):
            raise found
        assert found is not None
        return found


_ATTEMPTS = ((3, 3, 10**6), (2, 2, 200), (1, 0, 60))
"""How often a definition contains itself, how deep arrays and objects nest that the schema leaves open, and how long
strings and arrays with a maximum are: less of it where the automaton would be too large."""


def _as_json(schema: Any) -> str:
    """A schema as JSON, cut where it becomes too long: a part that a dict holds many times is written each time."""
    pieces, left = [], _MAX_SCHEMA
    for piece in json.JSONEncoder(ensure_ascii=False, allow_nan=False).iterencode(schema):
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            break
    return "".join(pieces)


class _Schema(NamedTuple):
    expression: Expression
    ignored: tuple[str, ...]


@lru_cache(maxsize=8)
def _read(source: str, additional: bool, attempt: int, opened: bool = False) -> _Schema:
    """A schema as an expression, at the largest depths that are not too large; attempts before are left out.

    ``opened``: objects are not closed, though nothing else that the schema does not name is allowed.
    """
    refs, depth, longest = _ATTEMPTS[attempt]
    schemas = Schemas(json.loads(source), refs)
    values = Values(schemas, additional=additional or opened, every_type=additional, any_depth=depth, longest=longest)
    root = schemas.part(json.loads(source), "#")
    try:
        expression = values.of(schemas.formulas.literal("holds", root))
    except TooLarge:
        if attempt == len(_ATTEMPTS) - 1:
            raise
        return _read(source, additional, attempt + 1, opened)
    narrowed = ("uniqueItems (at most one item that the schema does not state)",) if values.narrowed else ()
    return _Schema(expression, (*schemas.ignored, *narrowed))


@dataclass(frozen=True)
class After(Language):
    """Free text, then a trigger, then a text of a language: thinking first, the answer after ``####``.

    The language begins where the trigger first ends. With ``until`` that text follows it, and after it anything. Both
    have at most 1,000 characters.

    >>> After("#### ", Regex(r"-?[0-9]+")).trigger
    '#### '
    """

    trigger: str
    language: Language
    until: str | None = None

    def __post_init__(self) -> None:
        """InvalidConstraint for a trigger that is no text, or empty."""
        for name, given in (("trigger", self.trigger), ("until", self.until)):
            if (given is None and name == "trigger") or (given is not None and not (isinstance(given, str) and given)):
                raise InvalidConstraint(f"{name} is a text that is not empty, found {shown(given)}.")
            if given is not None and len(given) > _MAX_TRIGGER:
                raise InvalidConstraint(f"{name} has at most {_MAX_TRIGGER:,} characters, found {len(given):,}.")
        if not isinstance(self.language, Language):
            raise InvalidConstraint(f"after a trigger: a Regex, JsonSchema or Choice, found {shown(self.language)}.")

    def expression(self) -> Expression:
        """Texts that end where the trigger first does, and then the language's."""
        anything, trigger = Repeat(ANY, 0, None), text(self.trigger)
        again = then(anything, trigger, Repeat(ANY, 1, None))
        thought = combined([then(anything, trigger), again], lambda matched: not matched[1])
        rest = () if self.until is None else (self.until, anything)
        return then(thought, self.language.expression(), *rest)
