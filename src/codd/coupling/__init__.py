"""The product of a network's factorized output and a circuit: a joint distribution over the masked tokens."""

from codd.coupling.coupled import Coupled as Coupled
