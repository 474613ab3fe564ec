"""Schemas from the wild with their instances, of JSONSchemaBench and MaskBench (MIT)."""

import json
import warnings
from pathlib import Path

import pytest

from codd.constraints import JsonSchema
from json_schemas import in_order, read

ROWS = list(read(Path(__file__).parents[1] / "fixtures" / "json_schemas.jsonl", 1))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_instances_of_schemas_from_the_wild(row, single_bytes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        closed, opened = (JsonSchema(row["schema"], additional=more).compile(single_bytes) for more in (False, True))
    for test in row["tests"]:
        text = json.dumps(in_order(test["data"], [row["schema"]], row["schema"]), ensure_ascii=False).encode()
        assert opened.accepts(list(text)) == test["valid"], text
        assert test["valid"] or not closed.accepts(list(text)), text
