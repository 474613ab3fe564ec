import json

import pytest

from codd.decoding.options import DEFAULT_GREEDY, DEFAULT_SAMPLED, DEFAULT_THRESHOLD, Options
from codd.errors import FormatError, InvalidInput
from codd_lab.tasks.configs import NULL, EvalConfig, grid


def test_every_trained_circuit_gets_its_control():
    found = grid(["gsm8k"], ["trained"], {}, {"steps": [16, 32]})
    assert [(config.circuit, config.options) for config in found] == [
        ("trained", {"sampler": "any_order", "steps": 16}),
        ("null", {"sampler": "any_order", "steps": 16}),
        ("trained", {"sampler": "any_order", "steps": 32}),
        ("null", {"sampler": "any_order", "steps": 32}),
    ]
    assert [config.circuit for config in grid(["gsm8k"], ["none"], {}, {})] == ["none"]
    assert [config.circuit for config in grid(["gsm8k"], ["trained"], {}, {}, control=False)] == ["trained"]


def test_budgets_are_alternatives_and_axes_are_multiplied():
    axes = {"sampler": ["latent", "any_order"], "temperature": [0.0, 1.0]}
    found = grid(["a", "b"], ["null"], axes, {"steps": [8], "threshold": [0.5, 0.9]})
    assert len(found) == 2 * 2 * (3 + 1)  # one latent path has no threshold
    assert len({config.slug for config in found}) == len(found)
    assert all(("steps" in config.options) != ("threshold" in config.options) for config in found)


def test_one_latent_path_is_left_out_where_it_cannot_have_the_budget():
    found = grid(["a"], ["none", "trained"], {"sampler": ["latent", "any_order"]}, {"steps": [8], "threshold": [0.9]})
    listed = [(config.circuit, config.options.get("sampler"), config.budget) for config in found]
    assert ("trained", "any_order", "threshold 0.9") in listed
    assert ("trained", "latent", "8 steps") in listed
    assert ("trained", "latent", "threshold 0.9") not in listed
    assert [budget for circuit, _, budget in listed if circuit == "none"] == ["8 steps", "threshold 0.9"]
    with pytest.raises(InvalidInput, match="or give steps"):
        grid(["a"], ["trained"], {"sampler": ["latent"]}, {"threshold": [0.9]})


def test_a_config_names_the_defaults_that_it_was_run_with():
    found = grid(["a"], ["trained", "none"], {"temperature": [0.0, 0.7]}, {}, control=False)
    assert [config.options for config in found] == [
        {"temperature": 0.0, "sampler": "any_order", **DEFAULT_GREEDY},
        {"temperature": 0.0, **DEFAULT_GREEDY},
        {"temperature": 0.7, "sampler": "any_order", **DEFAULT_SAMPLED},
        {"temperature": 0.7, **DEFAULT_SAMPLED},
    ]
    for config in found:
        assert config.decoding == Options.of(temperature=config.options["temperature"])
        assert config.budget.replace(" ", "_") in config.slug


def test_what_only_circuits_heed_makes_no_configs_of_the_network_alone():
    axes = {"sampler": ["latent", "any_order"], "activation": [None, 0.5]}
    found = grid(["a"], ["none", "null"], axes, {"steps": [8]})
    assert [config.circuit for config in found].count("none") == 1
    assert [config.circuit for config in found].count("null") == 4


def test_a_config_survives_a_file():
    config = EvalConfig("gsm8k", "runs/a circuit", {"steps": 8, "activation": None}, problems=50, seed=3)
    again = EvalConfig.from_json(json.loads(json.dumps(config.as_json())))
    assert again == config
    assert again.slug == config.slug
    assert hash(again) == hash(config)
    assert "/" not in config.slug
    assert " " not in config.slug
    with pytest.raises(FormatError, match="a configuration: unknown field colour"):
        EvalConfig.from_json({"task": "a", "colour": 1})


@pytest.mark.parametrize("name", ["../../evil", "/a", "a/b", "..", ".", "", "-a", "a\\b", "a\0b", "\ud800", "n" * 5000])
def test_names_that_are_paths_are_refused(name):
    for told in ({"task": name}, {"task": "gsm8k", "split": name}):
        with pytest.raises(InvalidInput, match="can be no folder's name"):
            EvalConfig(**told)
        with pytest.raises(FormatError, match=r"cell\.json: the (task|split) .* can be no folder's name"):
            EvalConfig.from_json(told, "cell.json")


def test_a_change_of_anything_is_another_config():
    config = EvalConfig("gsm8k", options={"steps": 8})
    others = [
        EvalConfig("mbpp", options={"steps": 8}),
        EvalConfig("gsm8k", NULL, {"steps": 8}),
        EvalConfig("gsm8k", options={"steps": 9}),
        EvalConfig("gsm8k", options={"steps": 8}, seed=1),
        EvalConfig("gsm8k", options={"steps": 8}, device="cuda"),
        EvalConfig("gsm8k", options={"steps": 8}, split="validation"),
        EvalConfig("gsm8k", options={"steps": 8}, problems=5),
    ]
    assert len({config.slug, *(other.slug for other in others)}) == 8
    assert config.with_circuit(NULL) == others[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"steps": 0}, "steps must be"), ({"stpes": 8}, "no option 'stpes'"), ({"seed": 8}, "a seed of its own")],
)
def test_options_are_checked_before_anything_is_computed(options, message):
    with pytest.raises(InvalidInput, match=message):
        EvalConfig("gsm8k", options=options)


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({}, f"sliding threshold {DEFAULT_THRESHOLD:g}"),
        ({"temperature": 1.0}, "sliding threshold 0.97 and at least 5"),
        ({"sampler": "latent"}, "32 steps"),
        ({"steps": 8}, "8 steps"),
        ({"threshold": 0.9}, "threshold 0.9"),
    ],
)
def test_the_budget_in_words(options, budget):
    assert EvalConfig("a", options=options).budget == budget
