"""What is written under fixed settings stays what it was: ids kept in `fixtures/fixed_ids.json`.

The settings are those of ``benchmarks/fixed_ids.py``: every sampler, order, pace and preset, the model's own, its
static and the null circuit, and infilling. No near tie is among them: float64 and float32, with and without AVX and the
compiled loops, give the same ids.
"""

import json

import pytest

import fixed_ids
from tests.support import FIXTURES

KEPT = json.loads((FIXTURES / "fixed_ids.json").read_text())


@pytest.mark.numerics
def test_the_ids_are_what_they_were():
    written = fixed_ids.written(None, "cpu", gen_length=32, questions=1, settings=fixed_ids.SETTINGS)
    assert written.keys() == KEPT.keys()
    assert [name for name, ids in written.items() if ids != KEPT[name]] == []
