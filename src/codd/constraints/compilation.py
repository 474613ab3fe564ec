"""From an automaton over bytes to one over tokens."""

import numpy as np

from codd.constraints.automaton import Automaton, from_dfa
from codd.constraints.determinism import too_large
from codd.constraints.tables import DFA, Table, unique_rows
from codd.constraints.vocabulary import Vocabulary

_MAX_ENTRIES = 16_000_000  # of the functions below: 64 MB, and as much for their names


def over_tokens(dfa: DFA, vocabulary: Vocabulary, max_states: int) -> Automaton:
    """The smallest automaton over the tokens of a vocabulary, whose texts are those of an automaton over bytes.

    Every sequence of tokens that writes such a text is accepted. EmptyLanguage if there is none.
    """
    if len(dfa.table) > max_states and vocabulary.has_all_bytes:  # which tell all states apart
        raise too_large("states", max_states)
    if vocabulary.strips_space:
        dfa = _after_a_space(dfa)
    columns, classes = _token_columns(dfa.table, vocabulary)
    automaton = from_dfa(DFA(columns.T, dfa.start, dfa.accepting), classes)
    if automaton.num_states > max_states:
        raise too_large("states", max_states)
    return automaton


def _after_a_space(dfa: DFA) -> DFA:
    """The same texts, where one space that a text begins with does not count."""
    begin = dfa.table[dfa.start].copy()
    begin[ord(" ")] = dfa.start
    accepting = np.append(dfa.accepting, dfa.accepting[dfa.start])
    return DFA(np.vstack([dfa.table, begin]), len(dfa.table), accepting)


def _token_columns(table: Table, vocabulary: Vocabulary) -> tuple[Table, np.ndarray]:
    """The distinct columns (C, S) of the tokens, and the column (V,) of each.

    A token is a function from states to states, the composition of its bytes. All tokens take their bytes in step, and
    one composition is made for all that have the same function so far and the same byte next: there are far fewer
    functions than tokens.
    """
    states = len(table)
    steps, _, kind = unique_rows(np.vstack([table, np.full(256, -1, dtype=np.int32)]).T)
    steps[steps < 0] = states  # the last state: no way on
    nowhere = np.full(states + 1, states, dtype=np.int32)
    functions = [nowhere, np.arange(states + 1, dtype=np.int32)]
    number = {function.tobytes(): i for i, function in enumerate(functions)}
    data, begin, length = vocabulary.characters
    current = np.where(length > 0, 1, 0)  # a token that writes nothing leads nowhere
    alive, depth = np.flatnonzero(current), 0
    while len(alive):
        pairs, which = np.unique(current[alive] * len(steps) + kind[data[begin[alive] + depth]], return_inverse=True)
        made = np.empty(len(pairs), dtype=np.int64)
        for i, pair in enumerate(pairs.tolist()):
            before, step = divmod(pair, len(steps))
            function = steps[step][functions[before]]
            made[i] = number.setdefault(function.tobytes(), len(functions))
            if made[i] == len(functions):
                functions.append(function)
                if len(functions) * states > _MAX_ENTRIES:
                    raise too_large("entries in its table", _MAX_ENTRIES)
        current[alive] = made[which]
        depth += 1
        alive = alive[(current[alive] > 0) & (length[alive] > depth)]
    used, classes = np.unique(current, return_inverse=True)
    columns = np.stack([functions[i][:-1] for i in used])
    columns[columns == states] = -1
    return columns, classes
