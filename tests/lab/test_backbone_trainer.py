import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from codd.backbones.loading import load_checkpoint
from codd.cli import main
from codd.distributed import DistributedContext
from codd.errors import Diverged, FormatError, InvalidInput
from codd.training.checkpoints import checkpoints, read_checkpoint
from codd.training.run import Trainer
from codd_lab.pretraining.data import BackboneData, prepare
from codd_lab.pretraining.loss import loss_sum
from codd_lab.pretraining.recipe import OptimizerRecipe, Recipe, read_recipe
from codd_lab.pretraining.trainer import BackboneTrainer, batch_maker, learning_rate, train
from tests.support import PROBLEMS
from tests.support.small_runs import CPU, TINY
from tests.support.two_processes import run_in_two_processes

ALONE = DistributedContext(0, 1, CPU)
STEPS = 12
CLOCK = ("tokens_per_second", "seconds")
CHANGES = [
    f"steps={STEPS}",
    "batch_rows=4",
    "log_every=1",
    "validate_every=4",
    "checkpoint_every=2",
    f"data=[{{kind: qa, name: problems, path: {PROBLEMS}/train.jsonl, count: 60}}]",
    f"validation=[{{kind: qa, name: problems, path: {PROBLEMS}/test.jsonl, count: 8}}]",
]
ARGUMENTS = ["pretrain", str(TINY), "--device", "cpu", *(f"--set={change}" for change in CHANGES)]
pytestmark = pytest.mark.usefixtures("one_thread")  # here as in the processes that are started: the same bits


def small(*changes: str) -> Recipe:
    return read_recipe(TINY, [*CHANGES, *changes])


def run(recipe: Recipe, out: Path, *, steps: int | None = None) -> BackboneData:
    """Train to the end, or stop after some steps as if the process had died."""
    data = prepare(recipe, Path(), out, ALONE)
    loop = train(recipe, data, out, ALONE)
    for done, _ in enumerate(loop, start=1):
        if done == steps:
            break
    loop.close()
    return data


def weights_of(out: Path) -> bytes:
    return (out / "model" / "model.safetensors").read_bytes()


def metrics_of(out: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in CLOCK} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run from beginning to end."""
    out = tmp_path_factory.mktemp("whole")
    run(small(), out)
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> BackboneData:
    return prepare(small(), Path(), tmp_path_factory.mktemp("data"), ALONE)


def same_as(whole: Path, out: Path) -> None:
    assert weights_of(out) == weights_of(whole)
    assert metrics_of(out) == metrics_of(whole)
    for name in (f"checkpoints/step-{STEPS:07d}/state.safetensors", "model-int8/model.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


def test_the_loss_falls(tmp_path):
    recipe = small("steps=20", "checkpoint_every=99", "validate_every=99")
    data = prepare(recipe, Path(), tmp_path, ALONE)
    untrained = BackboneTrainer(recipe, data, tmp_path, ALONE).validate(1)["validation/problems"]
    assert untrained == pytest.approx(math.log(400), rel=0.2)
    *_, last = train(recipe, data, tmp_path, ALONE)
    assert last.step == 20
    assert last.metrics["validation/problems"] < untrained - 1.0


def test_what_a_run_writes(whole):
    assert {path.name for path in whole.iterdir()} == {
        *("checkpoints", "data", "metrics.jsonl", "model", "model-int8", "tokenizer")
    }
    assert [path.name for path in checkpoints(whole / "checkpoints")] == ["step-0000010", "step-0000012"]
    lines = metrics_of(whole)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "validation/problems" in line] == [4, 8, 12]
    assert all({"loss", "gradient_norm", "lr"} <= line.keys() for line in lines)
    notes = json.loads((whole / "checkpoints" / "step-0000012" / "state.json").read_text())
    assert notes["digest"] == small().digest()
    assert notes["recipe"] == json.loads(json.dumps(dataclasses.asdict(small())))


@pytest.mark.parametrize("steps", [1, 5])
def test_a_run_that_stopped_anywhere_ends_the_same(whole, tmp_path, steps):
    run(small(), tmp_path, steps=steps)
    assert not (tmp_path / "model").exists()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # the kill came while this line was written
    run(small(), tmp_path)
    same_as(whole, tmp_path)


def test_a_finished_run_is_only_exported_again(whole, tmp_path):
    run(small("steps=2"), tmp_path)
    before = weights_of(tmp_path), (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "model" / "model.safetensors").unlink()
    assert list(train(small("steps=2"), prepare(small("steps=2"), Path(), tmp_path, ALONE), tmp_path, ALONE)) == []
    assert (weights_of(tmp_path), (tmp_path / "metrics.jsonl").read_bytes()) == before


def test_before_the_first_checkpoint_the_recipe_may_change(tmp_path):
    assert prepare(small(), Path(), tmp_path, ALONE).tokenizer.vocab_size == 400
    assert prepare(small("tokenizer.vocab_size=420"), Path(), tmp_path, ALONE).tokenizer.vocab_size == 420


def test_a_tokenizer_from_a_folder(whole, tmp_path):
    recipe = small(f"tokenizer.path={whole / 'tokenizer'}")
    assert prepare(recipe, Path(), tmp_path, ALONE).tokenizer.vocab_size == 400
    assert not (tmp_path / "tokenizer").exists()
    assert prepare(small("tokenizer.path=bundled"), Path(), tmp_path, ALONE).tokenizer.vocab_size == 8192
    with pytest.raises(FormatError, match="there is no tokenizer in this folder"):
        prepare(small(f"tokenizer.path={tmp_path}"), Path(), tmp_path, ALONE)


def test_adding_up_gradients_is_one_pass(data, tmp_path):
    found = []
    for name, micro in (("one", "null"), ("several", "3")):
        recipe = small("steps=3", "checkpoint_every=99", f"micro_rows={micro}")
        list(train(recipe, data, tmp_path / name, ALONE))
        found.append((metrics_of(tmp_path / name), load_file(tmp_path / name / "model" / "model.safetensors")))
    (metrics, weights), (other_metrics, other_weights) = found
    for one, other in zip(metrics, other_metrics, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, other_weights[name], rtol=1e-4, atol=1e-5)


def test_two_processes_train_what_one_trains(tmp_path):
    changes = ["--set=steps=4", "--set=checkpoint_every=99"]
    stdout, stderr = run_in_two_processes(*ARGUMENTS, *changes, "--out", str(tmp_path / "two"))
    assert stdout.count("trained: ") == 1
    assert stderr.count("2 processes") == 1
    assert main([*ARGUMENTS, *changes, "--out", str(tmp_path / "one")]) == 0
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=0, atol=1e-5)
    for line, other in zip(metrics_of(tmp_path / "one"), metrics_of(tmp_path / "two"), strict=True):
        assert line == pytest.approx(other, rel=1e-4)


def test_rows_that_the_processes_cannot_share_are_refused_at_once(tmp_path):
    assert [[*DistributedContext(rank, 3, CPU).shard(6, "rows")] for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(InvalidInput, match="3 processes cannot share 4 rows of a batch: batch_rows must be a multiple"):
        prepare(small(), Path(), tmp_path, DistributedContext(0, 3, CPU))
    assert not list(tmp_path.iterdir())


def test_the_first_step_is_adamw_on_the_mean_loss(data, tmp_path):
    recipe = small("steps=1")
    list(train(recipe, data, tmp_path, ALONE))
    kept, _ = read_checkpoint(tmp_path / "checkpoints" / "step-0000001", "cpu")
    state = BackboneTrainer(recipe, data, tmp_path, ALONE)
    batch = batch_maker(recipe, data.tokenizer)(data.training.batch_at(0), torch.Generator().manual_seed(0))
    loss = loss_sum(state.network, batch) / batch.total
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in state.network.parameters()))
    (line,) = metrics_of(tmp_path)
    assert line["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert line["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    rate, decay = line["lr"], recipe.optimizer.weight_decay
    for name, parameter in state.network.named_parameters():
        gradient = parameter.grad * min(1.0, recipe.optimizer.clip / norm)
        shrunk = parameter.detach() * (1 - rate * decay * (parameter.ndim >= 2))
        # At the first step AdamW's moments are the gradient and its square.
        expected = shrunk - rate * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(kept[f"weights.{name}"], expected, rtol=1e-4, atol=1e-5)


def test_the_average_follows_the_weights(data, tmp_path):
    recipe = small("steps=6", "checkpoint_every=1", "keep=9", "optimizer.ema=0.3")
    list(train(recipe, data, tmp_path, ALONE))
    states = [read_checkpoint(folder, "cpu")[0] for folder in checkpoints(tmp_path / "checkpoints")]
    first = BackboneTrainer(recipe, data, tmp_path, ALONE)
    for name in first.average:
        average = first.average[name]
        for step, state in enumerate(states):
            share = 1 - min(0.3, (1 + step) / (10 + step))
            average = (1 - share) * average + share * state[f"weights.{name}"]
            torch.testing.assert_close(state[f"average.{name}"], average)


def test_learning_rates():
    linear = OptimizerRecipe(lr=2.0, warmup=4, decay="linear", final_lr=0.1)
    rates = [learning_rate(step, 14, linear) for step in range(15)]
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates[4:] == pytest.approx([2.0 - 0.18 * done for done in range(11)])
    cosine = dataclasses.replace(linear, decay="cosine")
    assert [learning_rate(step, 14, cosine) for step in (3, 4, 9, 14)] == pytest.approx([2.0, 2.0, 1.1, 0.2])
    assert learning_rate(0, 5, OptimizerRecipe(lr=1.0, warmup=0)) == 1.0
    assert [learning_rate(step, 2, linear) for step in (0, 1)] == pytest.approx([0.5, 1.0])


def test_the_learning_rate_of_a_run(whole):
    recipe = small()
    expected = [learning_rate(step, STEPS, recipe.optimizer) for step in range(STEPS)]
    assert [line["lr"] for line in metrics_of(whole)] == pytest.approx(expected)


@torch.no_grad()
def test_the_exported_models_load_and_agree(whole):
    plain, compact = (load_checkpoint(whole / name, device="cpu", check=True) for name in ("model", "model-int8"))
    averaged, _ = read_checkpoint(whole / "checkpoints" / f"step-{STEPS:07d}", "cpu")
    for name, parameter in plain.backbone.network.named_parameters():
        assert torch.equal(parameter, averaged[f"average.{name}"])
        assert not torch.equal(parameter, averaged[f"weights.{name}"])
    assert plain.tokenizer is not None
    text = "How many apples are there?"
    ids = plain.tokenizer.encode_chat(text)
    assert compact.tokenizer is not None
    assert compact.tokenizer.encode_chat(text) == ids
    logits, approximate = (
        each.backbone.network.logits(each.backbone.network.states(torch.tensor([ids]), torch.arange(len(ids))[None]))
        for each in (plain, compact)
    )
    difference = float((logits - approximate).abs().max())
    assert 0 < difference < 0.03 * float(logits.abs().max())
    config = json.loads((whole / "model" / "config.json").read_text())
    assert (config["recipe"], config["steps"]) == ("tiny", STEPS)
    assert config["recipe_digest"] == small().digest()
    assert plain.backbone.special.mask == plain.tokenizer.mask_id


def test_a_causal_model(tmp_path):
    run(small("objective=causal", "steps=2"), tmp_path)
    found = load_checkpoint(tmp_path / "model", device="cpu")
    assert found.backbone.config.causal
    assert metrics_of(tmp_path)[-1]["validation/problems"] < math.log(400) + 0.2


def test_validation_leaves_the_weights_alone(data, tmp_path):
    recipe = small()
    state = BackboneTrainer(recipe, data, tmp_path, ALONE)
    assert isinstance(state, Trainer)
    with torch.no_grad():
        for average in state.average.values():
            average.zero_()
    before = [parameter.detach().clone() for parameter in state.network.parameters()]
    found = state.validate(3)
    # The average is what is validated: a network of zeros says nothing. Weights 1 / t add up to the count on average.
    assert found["validation/problems"] == pytest.approx(math.log(400), rel=0.2)
    assert found == state.validate(4)
    assert all(torch.equal(a, b) for a, b in zip(before, state.network.parameters(), strict=True))


def test_validation_has_masks_of_its_own(data, tmp_path):
    # The same in every run, and uniform noise only: neither the step nor the recipe's noise in blocks has a say.
    one, two = small(), small("noise.block_share=1.0", "optimizer.lr=1")
    found = BackboneTrainer(one, data, tmp_path, ALONE).validate(1)
    assert BackboneTrainer(two, data, tmp_path, ALONE).validate(7) == found


@pytest.mark.parametrize(("every", "what"), [(1, "is (nan|-?inf)"), (99, "the loss is (nan|inf)")])
def test_a_run_that_diverges_stops_before_it_writes_a_checkpoint(tmp_path, every, what):
    changes = ["optimizer.lr=1e30", "optimizer.warmup=1", f"checkpoint_every={every}", "validation=[]"]
    with pytest.raises(Diverged, match=rf"{what} after step \d+: .*Lower optimizer.lr"):
        run(small(*changes), tmp_path)
    for folder in checkpoints(tmp_path / "checkpoints"):
        kept, _ = read_checkpoint(folder, "cpu")
        assert all(bool(torch.isfinite(value).all()) for name, value in kept.items() if name.startswith("weights."))
