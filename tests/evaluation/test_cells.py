import json

import pytest

from codd.decoding.options import DEFAULT_GREEDY, DEFAULT_SAMPLED, DEFAULT_THRESHOLD, Options
from codd.errors import FormatError, InvalidInput
from codd.evaluation.tasks.cells import NULL, Cell, grid


def test_every_trained_circuit_gets_its_control():
    found = grid(["gsm8k"], ["trained"], {}, {"steps": [16, 32]})
    assert [(cell.circuit, cell.options) for cell in found] == [
        ("trained", {"sampler": "any_order", "steps": 16}),
        ("null", {"sampler": "any_order", "steps": 16}),
        ("trained", {"sampler": "any_order", "steps": 32}),
        ("null", {"sampler": "any_order", "steps": 32}),
    ]
    assert [cell.circuit for cell in grid(["gsm8k"], ["none"], {}, {})] == ["none"]
    assert [cell.circuit for cell in grid(["gsm8k"], ["trained"], {}, {}, control=False)] == ["trained"]


def test_paces_are_alternatives_and_axes_are_multiplied():
    axes = {"sampler": ["latent", "any_order"], "temperature": [0.0, 1.0]}
    found = grid(["a", "b"], ["null"], axes, {"steps": [8], "threshold": [0.5, 0.9]})
    assert len(found) == 2 * 2 * (3 + 1)  # one latent path has no threshold
    assert len({cell.slug for cell in found}) == len(found)
    assert all(("steps" in cell.options) != ("threshold" in cell.options) for cell in found)


def test_one_latent_path_is_left_out_where_it_cannot_be_told_the_pace():
    found = grid(["a"], ["none", "trained"], {"sampler": ["latent", "any_order"]}, {"steps": [8], "threshold": [0.9]})
    ways = [(cell.circuit, cell.options.get("sampler"), cell.pace) for cell in found]
    assert ("trained", "any_order", "threshold 0.9") in ways
    assert ("trained", "latent", "8 steps") in ways
    assert ("trained", "latent", "threshold 0.9") not in ways
    assert [pace for circuit, _, pace in ways if circuit == "none"] == ["8 steps", "threshold 0.9"]
    with pytest.raises(InvalidInput, match="or give steps"):
        grid(["a"], ["trained"], {"sampler": ["latent"]}, {"threshold": [0.9]})


def test_a_cell_names_the_defaults_that_it_was_run_with():
    found = grid(["a"], ["trained", "none"], {"temperature": [0.0, 0.7]}, {}, control=False)
    assert [cell.options for cell in found] == [
        {"temperature": 0.0, "sampler": "any_order", **DEFAULT_GREEDY},
        {"temperature": 0.0, **DEFAULT_GREEDY},
        {"temperature": 0.7, "sampler": "any_order", **DEFAULT_SAMPLED},
        {"temperature": 0.7, **DEFAULT_SAMPLED},
    ]
    for cell in found:
        assert cell.decoding == Options.of(temperature=cell.options["temperature"])
        assert cell.pace.replace(" ", "_") in cell.slug


def test_what_only_circuits_heed_makes_no_cells_of_the_network_alone():
    axes = {"sampler": ["latent", "any_order"], "activation": [None, 0.5]}
    found = grid(["a"], ["none", "null"], axes, {"steps": [8]})
    assert [cell.circuit for cell in found].count("none") == 1
    assert [cell.circuit for cell in found].count("null") == 4


def test_a_cell_survives_a_file():
    cell = Cell("gsm8k", "runs/a circuit", {"steps": 8, "activation": None}, problems=50, seed=3)
    again = Cell.from_json(json.loads(json.dumps(cell.as_json())))
    assert again == cell
    assert again.slug == cell.slug
    assert hash(again) == hash(cell)
    assert "/" not in cell.slug
    assert " " not in cell.slug
    with pytest.raises(FormatError, match="a cell: unknown field colour"):
        Cell.from_json({"task": "a", "colour": 1})


@pytest.mark.parametrize("name", ["../../evil", "/a", "a/b", "..", ".", "", "-a", "a\\b", "a\0b", "\ud800", "n" * 5000])
def test_names_that_are_paths_are_refused(name):
    for told in ({"task": name}, {"task": "gsm8k", "split": name}):
        with pytest.raises(InvalidInput, match="can be no folder's name"):
            Cell(**told)
        with pytest.raises(FormatError, match=r"cell\.json: is not a cell of an evaluation .*can be no folder's name"):
            Cell.from_json(told, "cell.json")


def test_a_change_of_anything_is_another_cell():
    cell = Cell("gsm8k", options={"steps": 8})
    others = [
        Cell("mbpp", options={"steps": 8}),
        Cell("gsm8k", NULL, {"steps": 8}),
        Cell("gsm8k", options={"steps": 9}),
        Cell("gsm8k", options={"steps": 8}, seed=1),
        Cell("gsm8k", options={"steps": 8}, device="cuda"),
        Cell("gsm8k", options={"steps": 8}, split="validation"),
        Cell("gsm8k", options={"steps": 8}, problems=5),
    ]
    assert len({cell.slug, *(other.slug for other in others)}) == 8
    assert cell.family == others[1]


def test_options_are_checked_before_anything_is_computed():
    with pytest.raises(InvalidInput, match="steps must be"):
        Cell("gsm8k", options={"steps": 0})
    with pytest.raises(InvalidInput, match="no option 'stpes'"):
        Cell("gsm8k", options={"stpes": 8})
    with pytest.raises(InvalidInput, match="a seed of its own"):
        Cell("gsm8k", options={"seed": 8})


@pytest.mark.parametrize(
    ("options", "pace"),
    [
        ({}, f"threshold {DEFAULT_THRESHOLD:g}"),
        ({"sampler": "latent"}, "32 steps"),
        ({"steps": 8}, "8 steps"),
        ({"threshold": 0.9}, "threshold 0.9"),
    ],
)
def test_the_pace_in_words(options, pace):
    assert Cell("a", options=options).pace == pace
