"""Random texts of automata; the languages themselves are those of the benchmark."""

import random

import torch

from codd.constraints import Automaton


def walk(automaton: Automaton, rng: random.Random, most: int = 60) -> list[int]:
    """Random tokens that the automaton accepts, ``most`` of them at most unless the shortest text has more."""
    possible = automaton.possible(most)[:, automaton.start]
    while not possible.any():
        most *= 2
        possible = automaton.possible(most)[:, automaton.start]
    count = rng.choice(torch.nonzero(possible).flatten().tolist())
    rows, state, tokens = automaton.possible(count), automaton.start, []
    for left in reversed(range(count)):
        following = automaton.table[state]
        fitting = torch.nonzero((following >= 0) & rows[left][following.clamp(min=0)]).flatten().tolist()
        column = rng.choice(fitting)
        members = torch.nonzero(automaton.classes == column).flatten().tolist()
        tokens.append(rng.choice(members))
        state = int(following[column])
    return tokens
