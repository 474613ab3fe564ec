import functools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from codd.backbones import Backbone, load_checkpoint, mini
from codd.backbones.config import Config
from codd.backbones.transformer import initialise
from codd.decoding.loop import Step, denoise, pad_left
from codd.errors import InvalidInput

FIXTURES = Path(__file__).parents[1] / "fixtures"
VOCAB, MASK, PAD = 23, 21, 22
CASES = {
    case["name"]: case
    for case in json.loads((FIXTURES / "decode_llada" / "cases.json").read_text())
    if case["remasking"] == "low_confidence" and case["cfg_scale"] == 0
}


@functools.cache
def fixture(name: str) -> Backbone:
    return load_checkpoint(FIXTURES / name, device="cpu").backbone


@functools.cache
def tiny(pad: int | None = PAD) -> Backbone:
    """Random weights, large enough that tokens and confidences vary."""
    sizes = {"vocab_size": VOCAB, "width": 16, "layers": 1, "heads": 2, "mlp_width": 16}
    built = mini.build(Config({**sizes, "mask_token_id": MASK, "pad_token_id": pad}, "a test"))
    initialise(built.network, generator=torch.Generator().manual_seed(3), std=0.5)
    return built.eval().requires_grad_(False)


class Biased(Backbone):
    """The same network, with something added to its logits."""

    bias: Tensor

    def logits(self, states: Tensor, ids: Tensor) -> Tensor:
        return super().logits(states, ids) + self.bias


def biased(backbone: Backbone, bias: Tensor) -> Biased:
    changed = Biased(backbone.plan, backbone.network)
    changed.bias = bias
    return changed


def run(backbone: Backbone, prompts: list[list[int]], **options) -> list[Step]:
    return list(denoise(backbone, prompts, mask_id=options.pop("mask_id", MASK), **options))


def filled_in(steps: list[Step]) -> Tensor:
    """Of every position, the number of the step that filled it; -1: none did."""
    committed = torch.stack([step.committed for step in steps])
    assert (committed.sum(0) <= 1).all()
    return torch.where(committed.any(0), committed.int().argmax(0), -1)


def test_there_are_cases_of_the_reference():
    assert set(CASES) == {"case0", "case1", "case6"}


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_reproduced_step_by_step(name):
    case = CASES[name]
    wanted = {
        key.removeprefix(f"{name}."): tensor.long()
        for key, tensor in load_file(FIXTURES / "decode_llada" / "cases.safetensors").items()
        if key.startswith(f"{name}.")
    }
    steps = run(
        fixture("decode_llada"),
        [wanted["prompt_ids"].tolist()],
        mask_id=case["mask_id"],
        gen_length=case["gen_length"],
        block_length=case["block_length"],
        steps=case["steps"],
    )
    assert len(steps) == case["steps"]
    assert torch.equal(filled_in(steps)[0], wanted["commit_step"])
    assert torch.equal(torch.cat([step.sequences for step in steps]), wanted["states"][1:])
    assert torch.equal(steps[-1].sequences[0], wanted["output_ids"])


prompts_of_any_length = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=5), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(
    prompts=prompts_of_any_length,
    blocks=st.integers(1, 3),
    block_length=st.integers(1, 7),
    steps_a_block=st.integers(1, 9),
)
def test_the_schedule(prompts, blocks, block_length, steps_a_block):
    steps = run(
        tiny(), prompts, gen_length=blocks * block_length, block_length=block_length, steps=blocks * steps_a_block
    )
    assert len(steps) == blocks * steps_a_block
    longest = max(map(len, prompts))
    before, _ = pad_left(prompts, PAD, torch.device("cpu"))
    sequences = torch.cat((before, torch.full((len(prompts), blocks * block_length), MASK)), dim=1)
    for number, step in enumerate(steps):
        block, inside = divmod(number, steps_a_block)
        begin = longest + block * block_length
        # What changes is what was committed: masks of this block, so many in every row.
        assert torch.equal(step.sequences != sequences, step.committed)
        assert (sequences[step.committed] == MASK).all()
        assert not step.committed[:, :begin].any()
        assert not step.committed[:, begin + block_length :].any()
        count = block_length // steps_a_block + (inside < block_length % steps_a_block)
        assert (step.committed.sum(1) == count).all()
        assert torch.equal(step.confidence > 0, sequences == MASK)
        sequences = step.sequences
    assert torch.equal(sequences[:, :longest], before)
    assert (sequences[:, longest:] != MASK).all()


@settings(max_examples=20, deadline=None)
@given(prompts=prompts_of_any_length, steps_a_block=st.integers(1, 6))
def test_a_step_takes_the_best_tokens_of_the_surest_positions(prompts, steps_a_block):
    backbone = tiny()
    ids, valid = pad_left(prompts, PAD, torch.device("cpu"))
    ids = torch.cat((ids, torch.full((len(ids), 12), MASK)), dim=1)
    valid = torch.cat((valid, torch.ones(len(ids), 12, dtype=torch.bool)), dim=1)
    for step in run(backbone, prompts, gen_length=12, block_length=6, steps=2 * steps_a_block):
        logits = backbone(ids, valid).double()
        logits[..., MASK] = -torch.inf
        scores, masked = logits.softmax(-1), ids == MASK
        best, close = scores.amax(-1), {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(step.confidence[masked].double(), best[masked], **close)
        written = scores.gather(-1, step.sequences[..., None])[..., 0]
        torch.testing.assert_close(written[step.committed], best[step.committed], **close)
        for row in range(len(ids)):
            taken = step.committed[row].nonzero().flatten().tolist()
            if taken:
                at = ids.shape[1] - (12 if taken[0] < ids.shape[1] - 6 else 6)
                left = [i for i in range(at, at + 6) if masked[row, i] and i not in taken]
                surest = step.confidence[row]
                assert all(surest[i] >= surest[j] for i in taken for j in left)
        ids = step.sequences


@pytest.mark.parametrize("steps", [8, 4, 3, 2, 10])
def test_of_equals_the_leftmost_go_first(steps):
    network = mini.build(Config({"vocab_size": 9, "width": 8, "layers": 1, "heads": 2, "mlp_width": 8}, "a test"))
    network.network.requires_grad_(False).embedding.tokens.weight.zero_()  # the head is tied to it: uniform output
    found = run(network, [[1, 2], [3]], mask_id=8, gen_length=8, block_length=8, steps=steps)
    torch.testing.assert_close(found[0].confidence[:, 2:], torch.full((2, 8), 1 / 8))
    order = filled_in(found)[:, 2:]
    assert (order.diff(dim=1) >= 0).all()
    assert (order >= 0).all()


def test_the_mask_is_never_written_however_much_the_network_wants_it():
    bias = torch.zeros(VOCAB)
    bias[MASK] = 100.0
    wanting = biased(tiny(), bias)
    assert (wanting(torch.full((1, 9), MASK)).argmax(-1) == MASK).all()
    prompts = [[1, 2, 3], [4]]
    with_bias = run(wanting, prompts, gen_length=12, block_length=4, steps=6)
    without = run(tiny(), prompts, gen_length=12, block_length=4, steps=6)
    assert not (with_bias[-1].sequences[:, 3:] == MASK).any()
    assert torch.equal(with_bias[-1].sequences, without[-1].sequences)


SEEDS = {"decode_llada": 14, "decode_dream": 17, "mdlm": 1, "mini": 0}
"""Of the prompts: ones for which no two confidences are so close that rounding decides."""


@pytest.mark.parametrize("name", SEEDS)
def test_a_batch_of_unequal_prompts_gives_what_each_gives_alone(name):
    backbone = tiny() if name == "mini" else fixture(name)
    generator = torch.Generator().manual_seed(SEEDS[name])
    prompts = [torch.randint(VOCAB - 2, (length,), generator=generator).tolist() for length in (3, 8, 1, 5)]
    options = {"mask_id": backbone.special.mask, "gen_length": 12, "block_length": 6, "steps": 6}
    together = run(backbone, prompts, **options)
    rows = [run(backbone, [prompt], **options) for prompt in prompts]
    for row, (prompt, alone) in enumerate(zip(prompts, rows, strict=True)):
        own = slice(8 - len(prompt), None)
        assert torch.equal(together[-1].sequences[row, own], alone[-1].sequences[0])
        assert torch.equal(filled_in(together)[row, own], filled_in(alone)[0])
    assert len({tuple(alone[-1].sequences[0, -12:].tolist()) for alone in rows}) > 1


def test_nothing_need_be_asked():
    empty = run(tiny(), [[], []], gen_length=4, block_length=2)
    one = run(tiny(), [[], [5]], gen_length=4, block_length=2)
    assert empty[-1].sequences.shape == (2, 4)
    assert torch.equal(empty[-1].sequences[0], one[-1].sequences[0, 1:])
    assert one[-1].sequences[0, 0] == PAD


def test_one_token_a_step_is_the_default():
    steps = run(tiny(), [[1]], gen_length=6, block_length=3)
    assert [int(step.committed.sum()) for step in steps] == [1] * 6


def test_steps_are_a_stream_and_need_no_gradient():
    stream = denoise(tiny(), [[1]], mask_id=MASK, gen_length=4, block_length=4)
    first = next(stream)
    assert int((first.sequences == MASK).sum()) == 3
    kept = first.sequences.clone()
    with torch.enable_grad():
        rest = list(stream)
    assert len(rest) == 3
    assert torch.equal(first.sequences, kept)
    assert not any(step.confidence.requires_grad for step in rest)


@pytest.mark.parametrize(
    ("gen_length", "block_length", "steps"),
    [(10, 4, 10), (8, 4, 3), (8, 4, 1), (8, 4, 0), (8, 4, -2), (0, 4, 4), (8, 0, 8), (4, 8, 4), (-8, -4, 2)],
)
def test_settings_that_do_not_divide(gen_length, block_length, steps):
    with pytest.raises(InvalidInput, match=f"gen_length {gen_length} .* block_length {block_length}.* steps {steps} "):
        run(tiny(), [[1]], gen_length=gen_length, block_length=block_length, steps=steps)


def test_a_prompt_that_the_model_cannot_read():
    with pytest.raises(InvalidInput, match=f"id {VOCAB} is not in the vocabulary"):
        run(tiny(), [[1, VOCAB]], gen_length=4, block_length=4)


def test_pad_left():
    ids, valid = pad_left([[1, 2, 3], [], [4]], 9, torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 3], [9, 9, 9], [9, 9, 4]]
    assert valid.tolist() == [[True] * 3, [False] * 3, [False, False, True]]
    ids, valid = pad_left([], 9, torch.device("cpu"))
    assert ids.shape == valid.shape == (0, 0)


def test_a_checkpoint_without_padding_token_is_padded_with_something_unseen():
    short, long = [5], [1, 2, 3, 4]
    padded = run(tiny(pad=None), [short, long], gen_length=6, block_length=6)
    alone = run(tiny(), [short], gen_length=6, block_length=6)
    assert torch.equal(padded[-1].sequences[0, 3:], alone[-1].sequences[0])
