"""What `generate` gives and takes beyond the text: options as an object, scores, stop strings, the network's seam."""

import copy
from collections.abc import Sequence

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

import codd
from codd.decoding.loop import denoise
from codd.decoding.options import DEFAULT_COUNTED, DEFAULT_GREEDY, DEFAULT_SAMPLED, DEFAULT_THRESHOLD, DEFAULTS, Options
from codd.decoding.runner import FullRecompute, HiddenStateRequest
from codd.decoding.sequence import StopCondition, first_stop
from codd.errors import InvalidInput
from tests.support.tiny_models import EOS, MASK, VOCAB, detouring, modulated, random_hmm, tiny

SIZES = {"gen_length": 12, "block_length": 6}
PROMPTS = [[1, 2, 3], [4]]


def model(circuit: codd.circuits.ProbabilisticCircuit | None = None, *, reads: bool = False) -> codd.Model:
    return codd.Model(tiny(), circuit, words() if reads else None, MASK)


def words() -> codd.Tokenizer:
    """A vocabulary of as many words as the tiny network has tokens."""
    names = {MASK: "[MASK]", EOS: "[EOS]"}
    backend = tokenizers.Tokenizer(models.WordLevel({names.get(i, f"w{i}"): i for i in range(VOCAB)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return codd.Tokenizer(backend, special={"mask_token": "[MASK]", "eos_token": "[EOS]"})


def ids(generation: codd.Generation) -> list[list[int]]:
    return [sequence.tolist() for sequence in generation.sequences]


class TestOptionsObject:
    def test_an_object_and_keywords_say_the_same(self):
        given = Options(**SIZES, steps=4, sampler="any_order", temperature=0.8)
        found = model(random_hmm()).generate(PROMPTS, given, seed=3)
        wanted = model(random_hmm()).generate(PROMPTS, **SIZES, steps=4, sampler="any_order", temperature=0.8, seed=3)
        assert ids(found) == ids(wanted)
        assert ids(model(random_hmm()).generate(PROMPTS, given)) == ids(
            model(random_hmm()).generate(PROMPTS, options=given)
        )
        stream = list(model(random_hmm()).denoise(PROMPTS, given, seed=3))
        assert stream[-1].ids.tolist() in ids(wanted)

    def test_a_keyword_for_the_pace_takes_the_place_of_the_objects(self):
        counted = Options(steps=4)
        assert counted.changed(threshold=0.5).steps is None
        assert counted.changed(threshold=0.5).changed(steps=2).threshold is None
        assert Options(threshold=0.5).steps is None
        assert counted.changed(threshold=None, temperature=1.0) == Options(steps=4, temperature=1.0)
        assert Options(threshold=0.5).changed(threshold=None) == DEFAULTS
        assert Options(threshold=0.5).changed(steps=None) == Options(steps=None)
        assert Options(threshold=0.5).changed(entropy_budget=1.0).threshold is None
        assert Options(steps=None).changed(temperature=1.0).steps is None
        assert Options().changed(gen_length=7).commit_rule == DEFAULTS.commit_rule
        with pytest.raises(InvalidInput, match="drop steps to commit by threshold"):
            counted.changed(threshold=0.5, steps=3)

    @pytest.mark.parametrize(
        ("given", "pace"),
        [
            ({}, DEFAULT_GREEDY),
            ({"sampler": "factorized"}, DEFAULT_GREEDY),
            ({"mode": "full", "remasking": "random", "activation": 0.5}, {"threshold": DEFAULT_THRESHOLD}),
            ({"editing_threshold": 0.9}, {"threshold": DEFAULT_THRESHOLD}),
            ({"min_tokens": 2}, {**DEFAULT_GREEDY, "min_tokens": 2}),
            ({"blocks": "fixed", "temperature": 0.7}, {"threshold": 0.97, "min_tokens": 5}),
            ({"threshold": None, "entropy_budget": None}, DEFAULT_GREEDY),
            ({"temperature": 0.7}, DEFAULT_SAMPLED),
            ({"sampler": "latent"}, DEFAULT_COUNTED),
            ({"sampler": "latent", "temperature": 0.7}, DEFAULT_COUNTED),
            ({"preset": "reference"}, DEFAULT_COUNTED),
            ({"preset": "reference", "temperature": 0.7}, DEFAULT_COUNTED),
            ({"steps": 5, "temperature": 0.7}, {"steps": 5}),
            ({"steps": None}, {"steps": None}),
            ({"threshold": 0.5, "temperature": 0.7}, {"threshold": 0.5}),
            ({"entropy_budget": 0.5}, {"entropy_budget": 0.5}),
        ],
    )
    def test_a_pace_that_nobody_gave_follows_the_other_options(self, given, pace):
        options = Options(**given)
        assert options.commit_rule == pace
        assert options.as_json().items() >= pace.items()
        assert options.sampler == given.get("sampler", "latent" if "preset" in given else "any_order")
        said = Options(**options.as_json())  # a record of a run makes the same run
        assert (said, said.commit_rule) == (options.changed(ban=[]), pace)
        for start in (Options(), Options(temperature=0.3), Options(preset="reference"), Options(sampler="latent")):
            told = {"temperature": 0.0, "preset": None, "sampler": options.sampler, **given}
            assert start.changed(**told).commit_rule == pace
        assert Options().changed(**given) == options  # the sampler that nobody gave follows the preset, too
        assert Options(preset="reference").changed(**{"preset": None, **given}) == options

    def test_a_default_that_is_given_stays_and_is_equal_otherwise(self):
        said = Options(**DEFAULT_GREEDY, sampler="any_order")
        assert said == Options()
        assert hash(said) == hash(Options())
        assert said.changed(temperature=0.7).commit_rule == DEFAULT_GREEDY
        assert said.changed(temperature=0.7) != Options().changed(temperature=0.7)
        with pytest.raises(InvalidInput, match="knows no sampler"):
            said.changed(preset="reference", steps=4)
        assert Options(threshold=0.9).changed(sampler="latent", steps=4).commit_rule == {"steps": 4}


class TestStop:
    @pytest.mark.parametrize("way", [{"steps": None}, {"steps": 4}, {"mode": "full", "steps": 6}])
    def test_a_text_is_cut_before_a_stop_string_and_ends_there(self, way):
        whole = model(reads=True).generate(["w1 w2 w3"], chat=False, **SIZES, **way, stop=False)
        text = whole.texts[0].split()
        assert len(text) > 4
        stop = " ".join(text[3:5])  # two tokens
        found = model(reads=True).generate(["w1 w2 w3"], chat=False, **SIZES, **way, stop=["never", stop])
        assert found.texts[0] == whole.texts[0][: whole.texts[0].index(stop)]
        expected = next(n for n in range(1, 99) if stop in " ".join(text[:n]))
        assert ids(found)[0] == ids(whole)[0][: 3 + expected]
        assert len(found.scores[0]) == expected
        assert found.steps[0] <= whole.steps[0]
        assert (whole.finish_reasons, found.finish_reasons) == (["length"], ["stop"])

    def test_one_text_is_a_list_of_one_and_the_end_of_text_still_ends(self):
        options = {"chat": False, **SIZES, "steps": None}
        assert Options(stop="w3").stop_strings == Options(stop=["w3"]).stop_strings == ("w3",)
        ended = model(reads=True).generate(["w1 w2"], **options)
        assert ids(model(reads=True).generate(["w1 w2"], **options, stop="never")) == ids(ended)
        assert Options(stop="x").stops
        assert not Options(stop=False).stops
        assert not Options(stop=True, preset="reference").stops

    def test_only_what_is_settled_counts(self):
        stop = StopCondition(frozenset({9}), ("b c",), lambda ids: " ".join("abcdefghij"[i] for i in ids))
        assert stop.end_of([0, 5, MASK, 9], 1, MASK) is None
        assert stop.end_of([0, 5, 9, MASK], 1, MASK) == 3
        assert stop.end_of([9, 5, 1, 2, 3, 9], 1, MASK) == 4
        assert stop.end_of([0, 1, MASK, 2], 1, MASK) is None
        assert stop.end_of([1, 2, 5], 2, MASK) is None  # the prompt may hold it
        assert StopCondition().end_of([9, 9], 0, MASK) is None

    def test_the_string_that_is_complete_first_counts(self):
        assert first_stop("abcdef", ["bcde", "cd"]) == 2
        assert first_stop("abcdef", ["x"]) is None
        assert first_stop("abab", ["ab"], 1) == 2


def test_a_person_can_read_what_was_generated():
    """One line per prompt: long texts are cut short, ids stand where there is no tokenizer."""
    found = model(random_hmm(), reads=True).generate(["w1 w2", "w3"], chat=False, gen_length=60, steps=4, stop=False)
    first, *lines = repr(found).splitlines()
    assert first == "Generation of 2 prompts:"
    for number, (line, text) in enumerate(zip(lines, found.texts, strict=True)):
        assert line.startswith(f"  {number}: '{text[:20]}")
        assert len(line) < len(text)
        assert line.endswith("(60 tokens written, finish reason length, 4 network calls, the circuit in 4)")
    alone = model().generate([[1, 2]], gen_length=3, steps=1)
    assert f"  0: {alone.completions[0].tolist()} (3 tokens" in repr(alone)


class OnlyWhatIsNeeded(FullRecompute):
    """A runner that gives no state beside those that were requested, as one with a cache may."""

    shortest = 99

    def __call__(self, requests: Sequence[HiddenStateRequest]) -> list[torch.Tensor]:
        self.shortest = min(self.shortest, *(end - begin for begin, end in (request.span for request in requests)))
        return super().__call__(requests)


CIRCUITS = {
    "network": None,
    "fixed": random_hmm(length=6),
    "conditioned": modulated(random_hmm(length=6), scale=0.5),
    "gated": modulated(detouring(), inner_states=4, scale=0.5),
}


@pytest.mark.parametrize(
    ("way", "circuit"),
    [
        ({"steps": 4}, "network"),
        ({"steps": 4}, "conditioned"),
        ({"steps": 4, "mode": "full"}, "fixed"),
        ({"steps": 4, "mode": "full"}, "conditioned"),
        ({"steps": 4, "cfg_scale": 1.0}, "network"),
        ({"steps": 4, "cfg_scale": 1.0}, "gated"),
        ({"threshold": 0.2, "sampler": "any_order"}, "fixed"),
        ({"threshold": 0.2, "sampler": "any_order"}, "conditioned"),
        ({"steps": 4, "preset": "reference"}, "conditioned"),
        ({"steps": 4, "preset": "reference", "mode": "full"}, "gated"),
    ],
    ids=str,
)
def test_a_step_asks_for_the_states_that_it_uses(way, circuit):
    own = model(CIRCUITS[circuit])
    runner = OnlyWhatIsNeeded(own.backbone)
    prompts = [[1, 2, 3], [4]] if way.get("preset") else [[1, MASK, 3, 2, 2, 2, 2], [4]]
    steps = list(denoise(runner, own.start(prompts, Options(**SIZES, **way))))
    wanted = list(own.denoise(prompts, **SIZES, **way))
    assert [step.ids.tolist() for step in steps] == [step.ids.tolist() for step in wanted]
    assert runner.shortest <= 6 or way.get("mode") == "full"


def test_a_bar_over_all_prompts(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    model().generate(PROMPTS, **SIZES)
    assert capsys.readouterr().err == ""
    model().generate(PROMPTS, **SIZES, progress=True)
    shown = capsys.readouterr().err
    assert "2 prompts" in shown
    assert "100%" in shown


def test_the_fields_names_of_options_and_of_moving_a_model():
    assert ids(model().generate(PROMPTS, max_new_tokens=5)) == ids(model().generate(PROMPTS, gen_length=5))
    moved = codd.Model(copy.deepcopy(tiny()), random_hmm(), words(), MASK)
    assert moved.tokenizer is not None
    assert moved.tokenizer("w3 w1") == moved.tokenizer.encode("w3 w1") == [3, 1]
    wanted = ids(moved.generate(PROMPTS, **SIZES, steps=4))
    for places, dtype in (
        ((torch.float64,), torch.float64),
        (("cpu",), torch.float64),
        (("cpu", "float32"), torch.float32),
    ):
        assert moved.to(*places) is moved
        assert moved.backbone(torch.tensor([[1, 2]])).dtype == dtype
        assert moved.circuit is not None
        assert moved.circuit.device.type == "cpu"
        assert ids(moved.generate(PROMPTS, **SIZES, steps=4)) == wanted
