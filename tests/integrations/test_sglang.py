"""The plug-in of SGLang writes what our own loop writes, token by token, from the same logits."""

import importlib.metadata

import pytest
import torch

from codd.circuits import HMM, Head, HeadConfig, Modulated
from codd.decoding.samplers import Noise
from codd.errors import InvalidInput
from codd.integrations import sglang as plugin
from tests.support import sglang_contract
from tests.support.sglang_contract import DllmConfig, ForwardBatch
from tests.support.tiny_networks import MASK, SIZE, VOCAB, circuit, our_own, tiny

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [5, 4, 3]]
WAYS = [
    {"threshold": 0.3},
    {"threshold": 0.9},
    {"steps": 3},
    {"steps": 4, "sampler": "latent"},
    {"steps": 2, "remasking": "margin"},
    {"steps": 3, "remasking": "left_to_right"},
    {"threshold": 0.3, "sampler": "factorized"},
    {"entropy_budget": 1.5},
    {"threshold": 0.4, "editing_threshold": 0.3, "max_post_steps": 4},
    {"steps": 3, "circuit_temperature": 0.5, "ban": (2, 3)},
    {"threshold": 0.5, "temperature": 0.8},
]


@pytest.fixture
def engine(monkeypatch):
    """SGLang's algorithms by name, the plug-in's among them."""
    installed = sglang_contract.install(monkeypatch)
    plugin.register()
    return installed.algorithms


@pytest.fixture(autouse=True)
def _same_draws(monkeypatch):
    """Our own loop draws numbers for all positions of a text, an engine's block for its own: make them all alike."""
    monkeypatch.setattr(Noise, "drawn", classmethod(lambda cls, size, generator: cls(*torch.full((3, size), 0.37))))


@pytest.fixture
def saved(tmp_path) -> str:
    return str(circuit().save(tmp_path / "circuit"))


def context_of(prompt: list[int]) -> list[int]:
    """The blocks before the one in which a prompt ends."""
    return prompt[: len(prompt) // SIZE * SIZE]


def blocks_of(prompts: list[list[int]]) -> torch.Tensor:
    """The block in which each prompt ends, masks after it."""
    tails = [prompt[len(context_of(prompt)) :] for prompt in prompts]
    return torch.tensor([[*tail, *[MASK] * (SIZE - len(tail))] for tail in tails])


def model_runner(prompts: list[list[int]]):
    """From the ids of blocks to their logits, given the tokens before them."""

    def logits(ids: torch.Tensor) -> torch.Tensor:
        rows = [
            torch.cat((torch.tensor(context_of(p), dtype=torch.long), block))
            for p, block in zip(prompts, ids.view(-1, SIZE), strict=True)
        ]
        return torch.cat([tiny()(row[None])[0, -SIZE:] for row in rows])

    return logits


def expected(prompt: list[int], hmm: HMM | None, options: dict) -> list[list[int]]:
    return [ids[-SIZE:] for ids in our_own(prompt, SIZE - len(prompt) % SIZE, hmm, **options)]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_it_writes_what_our_own_loop_writes(engine, saved, options, alone):
    hmm = None if alone else circuit()
    settings = {**options, "circuit": None if alone else saved, "block_size": SIZE}
    ids = blocks_of(PROMPTS)
    batch = ForwardBatch(ids.view(-1), len(PROMPTS), ids != MASK)
    assert engine["CoDD"](DllmConfig(settings, SIZE, MASK)).run(model_runner(PROMPTS), batch)
    assert batch.input_ids.view(-1, SIZE).tolist() == [expected(prompt, hmm, options)[-1] for prompt in PROMPTS]
    assert batch.input_ids.data_ptr() == ids.data_ptr()  # a captured graph reads it there


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_step_by_step_with_states_that_the_engine_carries(engine, saved, options):
    algorithm = engine["CoDD"](DllmConfig({**options, "circuit": saved}, SIZE, MASK, first_done_first_out_mode=True))
    for prompt in PROMPTS:
        ids = blocks_of([prompt])
        batch, carried = ForwardBatch(ids.view(-1), 1, ids != MASK), None
        for step in expected(prompt, circuit(), options):
            done, carried = algorithm.run(model_runner([prompt]), batch, carried)
            assert (done, batch.input_ids.tolist()) == ([False], step)
        assert algorithm.run(model_runner([prompt]), batch, carried)[0] == [True]
        assert batch.input_ids.tolist() == step


def test_blocks_that_are_given_whole_are_done_at_once(engine, saved):
    algorithm = engine["CoDD"](DllmConfig({"circuit": saved}, SIZE, MASK))
    ids = torch.arange(SIZE)
    batch = ForwardBatch(ids, 1)
    assert algorithm.step(batch, torch.zeros(SIZE, VOCAB), algorithm.init_step_state(batch)) == [True]
    assert ids.tolist() == list(range(SIZE))


def test_masks_of_the_prompt_stay(engine, saved):
    """SGLang says which positions are the prompt's: a mask that a user wrote is none of ours."""
    algorithm = engine["CoDD"](DllmConfig({"threshold": 0.5}, SIZE, MASK))
    ids = torch.tensor([1, MASK, 2, 3, MASK, MASK, MASK, MASK])
    prompt = torch.tensor([True] * 4 + [False] * 4)[None]
    batch = ForwardBatch(ids, 1, prompt)
    logits = torch.randn(SIZE, VOCAB, generator=torch.Generator().manual_seed(0))
    assert algorithm.run(lambda _: logits, batch)
    assert ids[:4].tolist() == [1, MASK, 2, 3]
    assert MASK not in ids[4:].tolist()


@pytest.mark.parametrize("fdfo", [False, True])
def test_a_block_that_fails_leaves_the_others_alone(engine, saved, caplog, fdfo):
    """SGLang has nothing by which an algorithm fails one request; an exception would end the whole server."""
    broken, options = 1, {"threshold": 0.3}
    algorithm = engine["CoDD"](DllmConfig({**options, "circuit": saved}, SIZE, MASK, first_done_first_out_mode=fdfo))
    ids, whole = blocks_of(PROMPTS), model_runner(PROMPTS)
    given = ids != MASK
    batch, carried = ForwardBatch(ids.view(-1), len(PROMPTS), given), None

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        logits = whole(input_ids).view(len(PROMPTS), SIZE, VOCAB)
        logits[broken, -1] = torch.nan
        return logits.view(-1, VOCAB)

    if fdfo:
        done = [False, False]
        while not all(done):
            now, carried = algorithm.run(forward, batch, carried)
            done = [a or b for a, b in zip(done, now, strict=True)]
    else:
        assert algorithm.run(forward, batch)
    fine, failed = ids.tolist()
    assert fine == expected(PROMPTS[0], circuit(), options)[-1]
    assert MASK not in failed
    assert failed[: int(given[broken].sum())] == PROMPTS[broken]
    [record] = caplog.records
    assert "block 1 of 2" in record.getMessage()
    assert "NaN" in record.getMessage()


def test_padded_vocabularies_and_those_of_other_models(engine, saved):
    algorithm = engine["CoDD"](DllmConfig({"circuit": saved, "steps": 1}, SIZE, MASK))
    logits = torch.randn(SIZE, VOCAB, generator=torch.Generator().manual_seed(0))
    padded = torch.cat((logits, torch.full((SIZE, 5), 100.0)), dim=1)
    rows = []
    for each in (logits, padded):
        ids = torch.full((SIZE,), MASK)
        assert algorithm.run(lambda _, each=each: each, ForwardBatch(ids, 1))
        rows.append(ids.tolist())
    assert rows[0] == rows[1]
    with pytest.raises(InvalidInput, match="of two models"):
        algorithm.run(lambda _: logits[:, :-1], ForwardBatch(torch.full((SIZE,), MASK), 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"treshold": 0.5}, "treshold"),
        ({"mode": "full"}, "another engine runs the network"),
        ({"threshold": 2.0}, "threshold"),
    ],
)
def test_settings_that_cannot_be(engine, settings, message):
    with pytest.raises(InvalidInput, match=message):
        engine["CoDD"](DllmConfig(settings, SIZE, MASK))


def test_modulated_circuits_are_refused(engine, tmp_path):
    Modulated(circuit(), Head(HeadConfig(16, circuit().num_states), 0)).save(tmp_path / "modulated")
    with pytest.raises(InvalidInput, match="hidden states"):
        engine["CoDD"](DllmConfig({"circuit": str(tmp_path / "modulated")}, SIZE, MASK))


def test_sglang_finds_the_plugin():
    [entry] = importlib.metadata.entry_points(group="sglang.srt.plugins", name="codd")
    assert entry.load() is plugin.register


def test_the_module_exports_its_algorithm(engine):
    assert plugin.Algorithm.__name__ == "CoDD"
