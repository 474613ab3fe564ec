"""Decisions: the joint distribution of fields against all strings of tokens, and the call that it takes."""

from itertools import accumulate
from math import prod

import pytest
import torch
from jaxtyping import config

import codd
from codd.circuits import HMM, Circuit, leaf, mixture, product
from codd.constraints import After, Choice, JsonSchema, Regex, Vocabulary
from codd.constraints.forms import CompiledForm, Form
from codd.decoding.decisions import Decider, decision
from codd.errors import InvalidCircuit, InvalidConstraint, InvalidInput
from tests.support.tiny_models import EOS, MASK, PAD, VOCAB, modulated, tiny

WRITTEN = [b"a", b"b", b"ab", b"c", b"ca", b"x", b"y", b"xy", b":", b"\n", b" ", b" a", b" x", b"-"]
VOCABULARY = Vocabulary((*WRITTEN, *[b""] * (VOCAB - len(WRITTEN))))
PROMPT = [3, 8, 5, 17]
HIDDEN = HMM.random(4, VOCAB, seed=1, scale=2.0)
CIRCUITS = {
    "none": None,
    "null": HMM.neutral(1, VOCAB),
    "hmm": HIDDEN,
    "modulated": modulated(HIDDEN, scale=0.5, features=16),
}
FORMS = {
    "places certain": Form({"f": Choice(["a", "ab", "c"]), "g": Regex("[xy]")}, "-{f}:{g}\n"),
    "the last differs in length": Form({"f": Choice(["a", "ab", "c"]), "g": Choice(["x", "xyx", "y"])}, "{f}:{g}"),
    "the first differs in length": Form({"f": Choice(["a", "abc"]), "g": Regex("[xy]")}, "{f}:{g}\n"),
    "side by side": Form({"f": Choice(["a", "c"]), "g": Choice(["x", "xy"]), "h": Regex("[ab]")}, "{f}{g}:{h}"),
    "spaces": Form({"f": Choice(["a", "x"]), "g": Choice(["a", "xy"])}, "- {f}: {g}"),
    "lines": Form({"a": Choice(["x", "y"]), "b": Choice(["c", "cab"])}),
}


def assignments(form: Form) -> dict[bytes, tuple[str, ...]]:
    """The values of every text of the form."""
    texts: dict[bytes, tuple[str, ...]] = {form.texts[0].encode(): ()}
    for values, behind in zip(form.values.values(), form.texts[1:], strict=True):
        texts = {
            text + value.encode() + behind.encode(): (*chosen, value)
            for text, chosen in texts.items()
            for value in values
        }
    return texts


def strings(form: Form, compiled: CompiledForm) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Every sequence of tokens that fills the block with a text and what ends it, by trying all tokens in turn."""
    texts = assignments(form)
    found: list[tuple[tuple[int, ...], bytes, bool]] = [((), b"", False)]
    for given in compiled.given:
        grown = []
        for ids, text, ended in found:
            for token, written in enumerate(VOCABULARY.tokens):
                ends = token == EOS or (token == PAD and ended)
                if given not in (None, token) or (ended and not ends) or (not written and not ends):
                    continue
                if (ends and text in texts) or any(each.startswith(text + written) for each in texts if written):
                    grown.append(((*ids, token), text + written, ends))
        found = grown
    return {ids: texts[text] for ids, text, _ in found if text in texts}


def truth(form: Form, compiled: CompiledForm, circuit: object) -> dict[tuple[str, ...], float]:
    """The joint distribution from the probability of every string, without an automaton."""
    by_string = strings(form, compiled)
    window = [MASK if token is None else token for token in compiled.given]
    ids = torch.tensor([PROMPT + window])
    positions = torch.arange(len(PROMPT), ids.shape[1])[None]
    logits, states = tiny().masked_logits(ids, positions, mask_id=MASK)
    tokens = torch.tensor([window])
    joint = codd.Coupled(
        HMM.neutral(1, VOCAB) if circuit is None else circuit,  # type: ignore[arg-type]
        logits=logits,
        tokens=tokens,
        masked=tokens == MASK,
        features=states,
    )
    weights = torch.stack([joint.log_prob(torch.tensor([each]))[0] for each in by_string]).double().softmax(0)
    out: dict[tuple[str, ...], float] = {}
    for values, weight in zip(by_string.values(), weights.tolist(), strict=True):
        out[values] = out.get(values, 0.0) + weight
    return out


def decided(form: Form, circuit: object, top: int = 100) -> codd.Decision:
    decider = Decider(tiny(), circuit, form.compile(VOCABULARY, [EOS], [PAD]), PROMPT, MASK)  # type: ignore[arg-type]
    return decision(decider, form.values, list(form.values), top)


@pytest.mark.parametrize("circuit", CIRCUITS)
@pytest.mark.parametrize("name", FORMS)
def test_the_joint_is_that_of_all_strings(name, circuit):
    form, circuit = FORMS[name], CIRCUITS[circuit]
    expected = truth(form, form.compile(VOCABULARY, [EOS], [PAD]), circuit)
    found = decided(form, circuit)
    assert expected.keys() == found.joint.keys()
    assert len(expected) == prod(map(len, form.values.values()))
    assert found.joint == pytest.approx(expected, abs=1e-5)
    assert list(found.joint.values()) == sorted(found.joint.values(), reverse=True)
    for number, (field, marginal) in enumerate(found.marginals.items()):
        sums = {value: sum(p for each, p in expected.items() if each[number] == value) for value in form.values[field]}
        assert marginal == pytest.approx(sums, abs=1e-5)
    best = max(expected, key=expected.__getitem__)
    assert tuple(found.best.values()) == best
    assert (found.probability, found.mass) == pytest.approx((expected[best], 1.0), abs=1e-5)


def test_the_first_assignments_are_the_most_probable_ones():
    form = FORMS["side by side"]
    whole, some = decided(form, HIDDEN), decided(form, HIDDEN, top=3)
    assert list(some.joint) == list(whole.joint)[:3]
    assert some.joint == pytest.approx({each: whole.joint[each] for each in some.joint}, abs=1e-6)
    assert some.mass == pytest.approx(list(accumulate(whole.joint.values()))[2], abs=1e-6)
    assert some.mass < 0.999
    assert some.marginals == whole.marginals


def test_the_null_circuit_gives_independent_fields_and_another_does_not():
    form = FORMS["places certain"]
    for circuit, independent in ((None, True), (CIRCUITS["null"], True), (HIDDEN, False)):
        found = decided(form, circuit)
        products = {(f, g): found.marginals["f"][f] * found.marginals["g"][g] for f, g in found.joint}
        assert (found.joint == pytest.approx(products, abs=1e-5)) is independent


@pytest.fixture(scope="module")
def bundled() -> codd.Model:
    return codd.load()


def test_one_call_whatever_is_asked(bundled, monkeypatch):
    calls, states = [], type(bundled.backbone).states
    monkeypatch.setattr(
        type(bundled.backbone),
        "states",
        lambda self, ids, *rest, **more: calls.append(1) or states(self, ids, *rest, **more),
    )
    fields = {
        "team": Choice(["billing", "sales"]),
        "score": Regex("[1-3]"),
        "urgent": JsonSchema({"enum": [True, False]}),
    }
    found = bundled.decide("My invoice is wrong.", fields)
    assert len(calls) == 1
    assert len(found.joint) == 12
    assert list(found.best) == list(found.marginals) == list(fields)
    assert found.mass == pytest.approx(1.0, abs=1e-5)
    turned = bundled.decide(
        "My invoice is wrong.", dict(reversed(fields.items())), template="{team}, {score}, {urgent}"
    )
    assert list(turned.best) == ["urgent", "score", "team"]
    assert turned.joint.keys() == {each[::-1] for each in found.joint}


FLAT = Circuit(mixture([product([leaf(t, probs=[1 / VOCAB] * VOCAB) for t in range(4)])], weights=[1.0]))
LONG = Choice(["".join("ab"[i >> bit & 1] for bit in range(12)) for i in range(1100)])


FIELD = {"f": Choice(["a", "b"])}


@pytest.mark.parametrize(
    ("words", "fields", "template", "told"),
    [
        ("at least one", {}, None, {}),
        ("maps names to languages", [Choice(["a"])], None, {}),
        ("field 'f': a Choice, Regex or JsonSchema", {"f": After("a", Regex("b"))}, None, {}),
        ("one value is the empty text", {"f": Choice(["a", ""])}, None, {}),
        ("more than 1000 values", {"f": Regex("a+")}, None, {}),
        ("more than 1000 values", {"f": LONG}, None, {}),
        ("each of f once", FIELD, "{g}", {}),
        ("each of f once", FIELD, "{f}{f}", {}),
        ("braces of the text are doubled", FIELD, "{f", {}),
        ("a field is a name in braces", FIELD, "{f:3}", {}),
        ("'a' begins another one", {"f": Choice(["a", "ab"]), "g": Choice(["x"])}, "{f}{g}", {}),
        ("'a' begins another one", {"f": Choice(["a", "a:x"]), "g": Choice(["x"])}, "{f}:{g}", {}),
        ("no tokens of this vocabulary write", {"f": Choice(["z"])}, "{f}", {}),
        ("a token that ends a text", {"f": Choice(["a", "abab"])}, "{f}", {}),
        ("take up to 41 tokens, but one block has room for 32", FIELD, "-" * 40 + "{f}", {}),
        ("room for 4", FIELD, "{f}----", {"block_size": 8}),
        ("the prompt has masks", FIELD, "{f}", {"prompt": [*PROMPT, MASK]}),
        ("top must be at least 1", FIELD, "{f}", {"top": 0}),
        ("was made for 64", FIELD, "{f}", {"prompt": [1] * 64}),
        ("no tokenizer", FIELD, "{f}", {"prompt": "text", "vocabulary": None}),
        ("a constraint needs an HMM", FIELD, "{f}:-x", {"circuit": FLAT}),
    ],
)
def test_what_cannot_be_decided_is_refused(words, fields, template, told, monkeypatch):
    monkeypatch.setattr(config, "jaxtyping_disable", True)  # as users run it
    model = codd.Model(tiny(block_size=told.get("block_size")), told.get("circuit", HIDDEN), None, MASK)
    if "vocabulary" not in told:
        model.__dict__["vocabulary"] = VOCABULARY
    error = InvalidInput if told.keys() & {"prompt", "top"} else InvalidConstraint
    with pytest.raises(InvalidCircuit if "circuit" in told else error, match=words):
        model.decide(told.get("prompt", PROMPT), fields, template=template, top=told.get("top", 100))
