"""Every error that codd raises on purpose: what was expected, what was found, what to do."""

from collections.abc import Sequence

_LONGEST = 80


def shown(value: object) -> str:
    """A value as messages show it, whatever it is: not longer than a line."""
    try:
        text = repr(value)
    except Exception:  # Python writes no number of more than 4,300 digits, and an object may refuse to
        text = "a number of thousands of digits" if isinstance(value, int) else f"a broken {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


class CoddError(Exception):
    """The root of the hierarchy: catch it to catch everything that codd raises on purpose."""


class InvalidCircuit(CoddError, ValueError):
    """A circuit that is not smooth, decomposable or normalised, or whose parameters do not fit together."""


class InvalidEvidence(CoddError, ValueError):
    """Evidence whose shapes, types, devices or values a query cannot use."""


class ImpossibleEvidence(CoddError, ValueError):
    """Sampling was asked for evidence that has probability zero under the circuit."""

    def __init__(self, sequences: Sequence[int]):
        """Name the sequences of the batch (by index) that have probability zero."""
        self.sequences = tuple(sequences)
        shown = ", ".join(map(str, self.sequences[:8])) + (", ..." if len(self.sequences) > 8 else "")
        super().__init__(
            f"the evidence has probability zero in sequence(s) {shown} of the batch, so there is nothing to sample: "
            "an observed token has no emission, or the potentials exclude every token or latent that the circuit "
            "allows. Check log_partition(evidence) for -inf first, or soften the potentials."
        )


class InvalidInput(CoddError, ValueError):
    """Something given to a model or a recipe that it cannot use."""


class InvalidConstraint(CoddError, ValueError):
    """A pattern, schema or automaton that is wrong, not supported, or too large."""


class EmptyLanguage(InvalidConstraint):
    """A constraint that no sequence of tokens fulfils."""


class FormatError(CoddError, ValueError):
    """A file or folder that is truncated, foreign, or not what its name says."""


class UnsafePickle(FormatError):
    """A pickle that asks for something other than plain arrays; nothing of it was run."""


class Diverged(CoddError, ArithmeticError):
    """A training run whose loss is not a finite number any more."""


class MissingDependency(CoddError, ImportError):
    """An optional package is needed; the message says which extra brings it."""


class CircuitSteppedAside(UserWarning):
    """The circuit excludes what is already written, so a step was made without it."""


class TextsLeftOut(UserWarning):
    """Some questions are, with their answers, longer than a row, and were left out of the training data."""
