r"""Languages that a text must be in, and the automata over tokens that know them.

>>> from codd.constraints import Regex, Vocabulary
>>> letters = Vocabulary((b"1", b"12", b"-", b"a"))  # of a tokenizer: Vocabulary.of(model.tokenizer)
>>> date = Regex(r"\d\d-\d\d").compile(letters)
>>> date.accepts([1, 2, 0, 0]), date.accepts([1, 2, 0])
(True, False)
"""

from codd.constraints.automaton import Automaton as Automaton
from codd.constraints.languages import After as After
from codd.constraints.languages import Choice as Choice
from codd.constraints.languages import JsonSchema as JsonSchema
from codd.constraints.languages import Language as Language
from codd.constraints.languages import Regex as Regex
from codd.constraints.templates import Template as Template
from codd.constraints.vocabulary import Vocabulary as Vocabulary
