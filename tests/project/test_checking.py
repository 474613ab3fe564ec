"""Shapes in signatures are checked while testing: in the first calls of a function in every test."""

import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from codd.circuits import HMM
from tests.support import checking

beartype = pytest.importorskip("beartype")  # not on every machine with a GPU


def test_the_library_is_checked():
    with pytest.raises(jaxtyping.TypeCheckError, match="log_prob"):
        HMM.random(3, 4).log_prob(torch.zeros(2, 3, 1, dtype=torch.int64))


def test_the_first_calls_of_a_test_are_checked():
    @checking.first_calls(typechecker=beartype.beartype)
    def total(x: Float[Tensor, "a b"]) -> Float[Tensor, ""]:
        return x.sum()

    for _ in range(2):
        with pytest.raises(jaxtyping.TypeCheckError):
            total(torch.zeros(3))
        for _ in range(checking.CALLS):
            total(torch.zeros(3, 2))
        assert total(torch.zeros(3)) == 0
        checking.next_test()


def test_of_functions_within_functions_the_first_of_a_test_is_checked():
    def within():
        @checking.first_calls(typechecker=beartype.beartype)
        def total(x: Float[Tensor, "a b"]) -> Float[Tensor, ""]:
            return x.sum()

        return total

    for _ in range(2):
        with pytest.raises(jaxtyping.TypeCheckError):
            within()(torch.zeros(3))
        assert within()(torch.zeros(3)) == 0
        checking.next_test()
