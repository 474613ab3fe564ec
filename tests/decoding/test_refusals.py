"""What the room refuses, in one table of (call, words): the error says what was wrong, and what to give instead."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import codd
from codd.circuits import HMM, Head, HeadConfig, Modulated
from codd.constraints import Automaton, Regex
from codd.decoding import Options
from codd.decoding.inspect import LONGEST, MOST, inspect
from codd.decoding.prompts import encode_prompts
from codd.errors import CoddError, InvalidInput
from tests.support import FIXTURES
from tests.support.tiny_models import EOS, MASK, VOCAB, biased, fixture, random_hmm, tiny

BERT, BERT_VOCAB = FIXTURES / "bert", 120
REFERENCE = {"preset": "reference"}
PAIRS = Automaton([[1] * 20 + [-1] * 3, [2] * 20 + [-1] * 3, [-1] * VOCAB], accepting=[2])
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one")

OPTIONS: dict[str, tuple[object, ...]] = {
    "gen_length": (-1, 1.5, True, "8", 10**400, None),
    "block_length": (0, -4, 2.0, 2**31, None),
    "steps": (0, -1, 1.5),
    "mode": ("sideways", "", torch.zeros(2)),
    "remasking": ("confidence", "topprob", "origin", []),
    "sampler": ("gibbs", None),
    "tempering": ("other",),
    "outside": ("forget",),
    "preset": ("upstream",),
    "temperature": (-0.1, math.inf, math.nan, 10**400, 10**5000, 1e39, "hot"),
    "seed": (10**5000, 1.5, None),
    "ban": ([10**5000], 3, iter((1, 2))),
    "top_p": (-0.1, 1.1, math.nan, "most"),
    "top_k": (0, -1, 2.5),
    "cfg_scale": (-2.0, -0.5, math.inf, 1e10, math.nan),
    "circuit_temperature": (0.0, -1.0, 3e-39, 1e39, math.inf, math.nan),
    "activation": (-0.1, math.nan),
    "activation_scope": ("block",),
    "activation_targets": (0,),
    "threshold": (-0.1, 1.5, math.nan),
    "entropy_budget": (-1.0, math.nan),
    "min_tokens": (0, 1.5, None),
    "blocks": ("overlapping", None),
    "hooks": (len, 5, ["no function"]),
    "stop": ("", [1], None),
    "editing_threshold": (-0.1, 1.1),
    "max_post_steps": (-1, 10**4, None),
}
"""Values out of their range: the error names the option."""
TOGETHER: list[dict[str, Any]] = [
    {"entropy_budget": 1.0, "threshold": 0.5},
    {"steps": 8, "threshold": 0.5},
    {"steps": 8, "entropy_budget": 0.5},
    *({name: 0.5, "sampler": "latent"} for name in ("threshold", "entropy_budget")),
    *({**rule, "steps": 8} for rule in ({"min_tokens": 2}, {"blocks": "sliding"})),
    *({"blocks": "sliding", **other} for other in ({"mode": "full"}, {"editing_threshold": 0.5})),
    {"stop": "x", "constraint": PAIRS},
    *(
        {**given, **REFERENCE}
        for given in (
            {"temperature": 1e-30},
            {"steps": 10**6},
            {"threshold": 0.5, "entropy_budget": 0.5},
            {"entropy_budget": 0.5},
            {"sampler": "any_order"},
            {"tempering": "paper"},
            {"outside": "defer"},
            {"activation_scope": "sequence"},
            {"activation_targets": 2},
            {"min_tokens": 2},
            {"blocks": "sliding"},
        )
    ),
]
"""Options that contradict each other: the error names the first of them."""


SPECULATIVE: dict[str, object] = {
    **{"threshold": 0.9, "steps": 4, "hooks": [lambda logits, *_: logits], "cfg_scale": 1.0, "editing_threshold": 0.9},
    **{"sampler": "latent", "remasking": "entropy", "gen_length": 0, "constraint": PAIRS},
}
"""What does not go with drafts that a causal model checks."""


def option(**given: object) -> tuple[Callable[[], object], str]:
    return lambda: Options.of(**given), rf"\b{next(iter(given))}\b"


def options(words: str, *given: object, **more: object) -> tuple[Callable[[], object], str]:
    return lambda: Options.of(*given, **more), words


def decoding(
    words: str, prompts: object = ((1, 2),), *, circuit: object = None, network: Any = tiny, **told: Any
) -> tuple[Callable[[], object], str]:
    """A run of a tiny network."""

    def call() -> object:
        backbone = network()
        mask = MASK if backbone.special.mask is None else backbone.special.mask
        given = [list(each) for each in prompts] if isinstance(prompts, tuple) else prompts
        return codd.Model(backbone, circuit, None, mask).generate(given, **{"gen_length": 4, **told})

    return call, words


def looking(
    words: str, *, backbone: Any = None, circuit: object = None, **given: Any
) -> tuple[Callable[[], object], str]:
    """An inspection of eight masks after five tokens."""
    told = {"ids": [3, 1, 4, 1, 5, *[MASK] * 8], "window": (5, 13), "options": Options(), **given}
    return lambda: inspect(codd.Model(backbone or tiny(), circuit, None, MASK), **told), words


def loading(words: str, **given: Any) -> tuple[Callable[[], object], str]:
    return lambda: codd.load(BERT, **{"circuit": None, "device": "cpu", **given}), words


def encoding(wrong: object, words: str = "prompt") -> tuple[Callable[[], object], str]:
    return lambda: encode_prompts(wrong, fixture_tokenizer(), chat=None), words


def fixture_tokenizer() -> codd.Tokenizer:
    tokenizer = codd.load(device="cpu").tokenizer
    assert tokenizer is not None
    return tokenizer


def blocks() -> codd.backbones.Backbone:
    return tiny(block_size=4)


def llada() -> codd.backbones.Backbone:
    return fixture("decode_llada")


def modulated_over(vocab: int, width: int) -> Modulated:
    return Modulated(HMM.random(3, vocab), Head(HeadConfig(width, 3)))


REFUSED: list[tuple[Callable[[], object], str]] = [
    *(option(**{name: value}) for name, values in OPTIONS.items() for value in values),
    *(option(**given) for given in TOGETHER),
    options(r"no option 'temprature': did you mean 'temperature'\?", temprature=1),
    options(r"no option 'gen_lenght': did you mean 'gen_length'\?", gen_lenght=1),
    options(r"no option 'max_tokens': did you mean 'max_new_tokens'\?", max_tokens=1),
    options("no option 'alg': there are gen_length.*circuit_temperature.*seed", alg=1),
    options("gen_length and max_new_tokens are one option: give one", gen_length=7, max_new_tokens=7),
    options("max_new_tokens and gen_length are one option: give one", max_new_tokens=7, gen_length=7),
    *(
        options(rf"^{name}=.* does not go with mode=", mode="speculative", **{name: value})
        for name, value in SPECULATIVE.items()
    ),
    # runs
    decoding("3 steps are not enough for 4 blocks", gen_length=16, block_length=4, steps=3),
    *(decoding("ban", ban=ban) for ban in ([VOCAB], [-1], range(VOCAB))),
    *(
        decoding("a hook returned logits of torch", hooks=[lambda logits, *_, way=way: getattr(logits, way)()])
        for way in ("long", "bool", "to_sparse", "cfloat")
    ),
    decoding(r"a hook returned logits of shape \(2,\)", hooks=[lambda logits, *_: logits[:2, 0]]),
    decoding("a hook returned NoneType", hooks=[lambda *_: None]),
    decoding("2 seeds for 1 prompts", seed=[3, 4]),
    decoding(r"prompt 1 has 60 tokens; .* makes 68, .* made for 64\. Shorten", ((1,), (1,) * 60), gen_length=8),
    *(decoding(f"has the id {wrong}, but the model has {VOCAB} tokens", ((1, wrong),)) for wrong in (VOCAB, -1)),
    decoding("block_length is 6, but the circuit has only 5", circuit=random_hmm(3, length=5), block_length=6),
    decoding("no tokenizer", stop="w1"),
    *(decoding("Options", options=wrong) for wrong in ({"steps": 3}, "fast", 3)),
    *(decoding("prompts", wrong) for wrong in (None, 3, b"text", {"role": "user", "content": "x"})),
    # block-causal networks, and caches
    decoding('mode="full".*blocks?.*mode="block" is for it', network=blocks, mode="full"),
    decoding(r"block_length is 3.*4 tokens.*codd\.load\(block_size=", network=blocks, block_length=3),
    decoding(r"block_length is 8.*codd\.load\(block_size=", network=blocks, block_length=8),
    decoding("mini has no published loop with block-causal attention", network=blocks, **REFERENCE),
    decoding("block_length is 4, but the circuit has only 2", network=blocks, circuit=random_hmm(length=2)),
    decoding("blocks='sliding': mini sees nothing after a block", network=blocks, blocks="sliding", threshold=0.5),
    decoding("cache='dual': mdlm is told the share of masks", network=lambda: fixture("mdlm"), cache="dual"),
    # the published loop of LLaDA
    *(
        decoding("multiple", network=llada, gen_length=length, block_length=size, steps=steps, **REFERENCE)
        for length, size, steps in ((10, 4, 4), (12, 4, 4), (12, 4, 2), (4, 8, 2))
    ),
    decoding("the circuit's 8, not 4", network=llada, circuit=HMM.random(3, 96, length=8), block_length=4, **REFERENCE),
    *(decoding("remasking", network=llada, remasking=rule, **REFERENCE) for rule in ("topprob", "origin")),
    # constraints
    decoding("fits into 1 tokens: raise gen_length", constraint=PAIRS, gen_length=1),
    decoding("a constraint is about one or the other", ((1, MASK),), constraint=PAIRS),
    decoding("fits the given tokens and the masks", ((MASK, EOS, MASK),), constraint=PAIRS, gen_length=0),
    decoding("does not go with preset", constraint=PAIRS, **REFERENCE),
    decoding("does not go with editing_threshold", constraint=PAIRS, editing_threshold=0.9),
    decoding(
        "Check the hooks", constraint=PAIRS, gen_length=2, hooks=[lambda logits, *_: torch.full_like(logits, -math.inf)]
    ),
    decoding("over 2 tokens, the model over 23", constraint=Automaton([[0, 0]], accepting=[0])),
    decoding("no tokenizer", constraint=Regex("a+")),
    # inspection
    looking(rf"^ids must be whole numbers in 0..{VOCAB - 1}, found {VOCAB}\.$", ids=[VOCAB, MASK]),
    looking("^ids must be whole numbers", ids=[-1, MASK]),
    looking("^ids must be whole numbers in .* found 'a'", ids=["a", MASK]),
    looking("^ids has 65 tokens, but this model was made for 64", ids=[MASK] * 65),
    looking(r"^window must be \[begin, end\] with 0 <= begin < end <= 13", window=(6, 5)),
    *(looking("^window must be", window=window) for window in ((6, 6), (-1, 6), (5, 6, 7), (5, 6.5))),
    looking(r"^window must be .* found \[5, 14\]", window=(5, 14)),
    looking(r"^window \[0, 5\] holds no mask", window=(0, 5)),
    looking("^window must be of at most 6 positions, found 8", circuit=random_hmm(length=6)),
    looking(
        f"^window must be of at most {LONGEST} positions, found {LONGEST + 1}",
        backbone=tiny(max_length=LONGEST + 10),
        ids=[MASK] * (LONGEST + 2),
        window=(0, LONGEST + 1),
    ),
    looking(f"^candidates must be a whole number from 1 to {MOST}, found 0", candidates=0),
    looking("^candidates must be", candidates=MOST + 1),
    looking("^written must hold positions in 0..12, found 13", written=[13]),
    looking(f"^ban holds {VOCAB}", options=Options(ban=(VOCAB,))),
    looking("^ids: at position 5 the logits are NaN", backbone=biased(tiny(), torch.full((VOCAB,), math.nan))),
    (
        lambda: inspect(codd.Model(tiny(), None, None, None), [MASK], (0, 1), options=Options()),
        "does not say which token is the mask",
    ),
    # prompts
    encoding([1, 2]),
    encoding([[1.5]]),
    encoding([["one"]]),
    encoding([torch.tensor([1.5])]),
    encoding([None]),
    (lambda: encode_prompts("one", None, chat=None), "no tokenizer"),
    # loading
    *(loading("dtype must be a floating-point type", dtype=dtype) for dtype in ("int8", "nonsense", torch.int32, 32)),
    loading("circuit must be a folder, a hub id, a circuit or None, found 5", circuit=5),
    loading("over 121 tokens, the model over", circuit=modulated_over(BERT_VOCAB + 1, 16)),
    *(loading(f"mask_id {mask_id} is not one of the 120 tokens", mask_id=mask_id) for mask_id in (BERT_VOCAB, -1)),
    loading("there is no device 'toaster'", device="toaster"),
    loading("nowhere", circuit="./nowhere"),
]


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_refused_says_why(call, words):
    with pytest.raises(CoddError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


@NO_CUDA
@pytest.mark.usefixtures("as_users_run_it")
def test_a_device_that_is_not_there():
    with pytest.raises(InvalidInput, match="no CUDA device"):
        codd.load(BERT, None, device="cuda")
