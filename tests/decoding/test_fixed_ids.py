"""What is written under fixed settings stays what it was: ids kept in `fixtures/fixed_ids.json`.

The settings are those of ``benchmarks/fixed_ids.py``: every sampler, order, pace and preset, the model's own, its static
and the null circuit, and infilling. The ids were the same in float32 with and without AVX and the compiled loops.
"""

import json

import fixed_ids
import pytest

from tests.support import FIXTURES

KEPT = json.loads((FIXTURES / "fixed_ids.json").read_text())


@pytest.mark.numerics
def test_the_ids_are_what_they_were():
    written = fixed_ids.written(None, "cpu", gen_length=32, questions=1, settings=fixed_ids.SETTINGS)
    assert written.keys() == KEPT.keys()
    assert [name for name, ids in written.items() if ids != KEPT[name]] == []
