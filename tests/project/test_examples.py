"""The scripts of examples/ do what their docstrings say."""

import json
import runpy
import sys

from tests.support import ROOT

EXTRACT = ROOT / "examples" / "extract.py"


def extracted(monkeypatch, capsys, *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", [str(EXTRACT), *map(str, arguments)])
    runpy.run_path(str(EXTRACT), run_name="__main__")
    return str(capsys.readouterr().out)


def test_fields_are_those_of_the_text(tmp_path, monkeypatch, capsys):
    texts = tmp_path / "notes.txt"
    texts.write_text("\nLuis buys 3 lamps for $25 each and 12 candles for $4 each. How much does he pay in total?\n")
    [line] = extracted(monkeypatch, capsys, texts, "--json", "--gen-length", 64).splitlines()
    found = json.loads(line)
    numbers = {name: value for name, value in found.items() if isinstance(value, int)}
    assert numbers == {"pieces_1": 3, "price_1": 25, "pieces_2": 12, "price_2": 4, "total": 123}
    assert {found["item_1"], found["item_2"]} <= set(texts.read_text().split())


def test_a_schema_and_a_table(tmp_path, monkeypatch, capsys):
    texts, schema = tmp_path / "notes.txt", tmp_path / "schema.json"
    texts.write_text("Mia has 8 pens.\n")
    schema.write_text(json.dumps({"properties": {"pens": {"enum": [7]}}, "required": ["pens"], "type": "object"}))
    printed = extracted(monkeypatch, capsys, texts, "--schema", schema, "--gen-length", 16)
    assert "pens" in printed
    assert "7" in printed
