"""The scheduler in diffusers' own LLaDA2Pipeline: what it writes, and that the circuit is in it."""

from types import SimpleNamespace

import pytest
import torch

from codd.errors import InvalidInput, MissingDependency
from tests.support.tiny_networks import EOS, MASK, SIZE, VOCAB, circuit, our_own, tiny

diffusers = pytest.importorskip("diffusers")

from codd.integrations.diffusers import CoDDScheduler  # noqa: E402 where diffusers is

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


class Network(torch.nn.Module):
    """A backbone of ours behind the call that the pipeline makes."""

    dtype, device = torch.float32, torch.device("cpu")

    def forward(self, ids, attention_mask=None, position_ids=None):
        return SimpleNamespace(logits=tiny()(ids))


@pytest.fixture
def saved(tmp_path) -> str:
    return str(circuit().save(tmp_path / "circuit"))


def generate(scheduler, prompts=(PROMPT,), gen_length=14, **options) -> list[list[int]]:
    pipe = diffusers.LLaDA2Pipeline(model=Network(), scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    options = {"threshold": 0.4, "editing_threshold": None, "num_inference_steps": SIZE, **options}
    out = pipe(
        input_ids=torch.tensor(prompts),
        gen_length=gen_length,
        block_length=SIZE,
        mask_token_id=MASK,
        eos_token_id=EOS,
        eos_early_stop=False,
        output_type="seq",
        **options,
    )
    return out.sequences.tolist()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("threshold", [0.2, 0.4, 0.9])
def test_the_pipeline_writes_what_our_own_loop_writes(saved, threshold, alone):
    """With as many steps as tokens the schedule asks for one, as a threshold does."""
    hmm = None if alone else circuit()
    scheduler = CoDDScheduler(circuit=None if alone else saved, block_length=SIZE)
    expected = our_own(PROMPT, 14, hmm, threshold=threshold)[-1]
    assert generate(scheduler, threshold=threshold) == [expected[len(PROMPT) :]]


def test_the_circuit_matters(saved):
    assert generate(CoDDScheduler(circuit=saved, block_length=SIZE)) != generate(CoDDScheduler(block_length=SIZE))


@pytest.mark.parametrize("sampler", ["any_order", "latent", "factorized"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_few_steps_leave_no_masks(saved, steps, sampler):
    scheduler = CoDDScheduler(circuit=saved, sampler=sampler, block_length=SIZE)
    for threshold in (0.95, 2.0):
        [ids] = generate(scheduler, num_inference_steps=steps, threshold=threshold)
        assert MASK not in ids


def test_rows_of_a_batch_are_what_they_are_alone(saved):
    other = [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    scheduler = CoDDScheduler(circuit=saved, block_length=SIZE)
    assert generate(scheduler, (PROMPT, other)) == [generate(scheduler, (each,))[0] for each in (PROMPT, other)]


def test_draws_come_from_the_generator(saved):
    scheduler = CoDDScheduler(circuit=saved, block_length=SIZE)
    first, again, other = (
        generate(scheduler, temperature=1.0, threshold=2.0, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    )
    assert first == again != other


def test_editing_replaces_what_the_network_changed_its_mind_about():
    scheduler = CoDDScheduler(block_length=SIZE)
    scheduler.set_timesteps(4, block_length=SIZE)
    sample = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    logits = torch.full((1, SIZE, VOCAB), -10.0)
    logits[0, torch.arange(SIZE), sample[0]] = 10.0
    logits[0, 6, 11] = 30.0  # both would be another token, but the first of them is the prompt's
    logits[0, 0, 11] = 30.0
    prompt = torch.arange(SIZE) < 2
    out = scheduler.step(logits, 0, sample, mask_token_id=MASK, editing_threshold=0.5, prompt_mask=prompt)
    assert out.prev_sample.tolist() == [[1, 2, 3, 4, 5, 6, 11, 8]]
    assert out.editing_transfer_index.nonzero().tolist() == [[0, 6]]
    assert not out.transfer_index.any()
    kept = scheduler.step(logits, 0, sample, mask_token_id=MASK, return_dict=False)
    assert kept[0].tolist() == sample.tolist()


def test_the_configuration_is_saved_and_read(saved, tmp_path):
    scheduler = CoDDScheduler(circuit=saved, threshold=0.8, block_length=SIZE)
    scheduler.save_config(tmp_path / "scheduler")
    again = CoDDScheduler.from_pretrained(tmp_path / "scheduler")
    assert again.config.circuit == saved
    assert generate(again) == generate(scheduler)


def test_networks_without_masks_are_refused():
    with pytest.raises(InvalidInput, match="mask_token_id"):
        CoDDScheduler().step(torch.zeros(1, SIZE, VOCAB), 0, torch.zeros(1, SIZE, dtype=torch.long))


def test_without_diffusers(monkeypatch):
    import importlib
    import sys

    import codd.integrations.diffusers as module

    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MissingDependency, match=r"codd-lm\[diffusers\]"):
        importlib.reload(module)
    monkeypatch.undo()
    importlib.reload(module)
