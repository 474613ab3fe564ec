import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import codd
from codd import files
from codd.circuits import HMM, Modulated, load_circuit
from codd.data.packing import PackedSequences
from codd.data.tokenization import PackingConfig, load_source
from codd.data.windows import WindowBatch
from codd.distributed import DistributedContext
from codd.errors import Diverged, FormatError, InvalidInput
from codd.training import run as run_module
from codd.training.checkpoints import checkpoints, read_checkpoint, write_checkpoint
from codd.training.circuit import trainer
from codd.training.circuit.data import TrainingData
from codd.training.circuit.validation import HeldOut
from codd.training.run import VALIDATION_SEED, Clock, check_recipe
from tests.support import PYTHONPATH, small_circuits
from tests.support.checkpoints import save_network
from tests.support.small_circuits import (
    ALONE,
    ANEMONE,
    CPU,
    HEAD,
    PUBLISHED,
    STEPS,
    circuit_of,
    make_root,
    metrics_of,
    run,
    save_published,
    small,
)
from tests.support.small_runs import files_of_at_most, small_tokenizer

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
KINDS = {"static": [], "modulated": HEAD, "anemone": ANEMONE}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return make_root(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def whole(root, tmp_path_factory) -> dict[str, Path]:
    """Uninterrupted runs."""
    outs = {kind: tmp_path_factory.mktemp("whole") / kind for kind in KINDS}
    for kind, out in outs.items():
        run(small(root, *KINDS[kind]), out)
    return outs


def same_as(whole: Path, out: Path) -> None:
    assert circuit_of(out) == circuit_of(whole)
    assert metrics_of(out) == metrics_of(whole)
    one, two = (checkpoints(each / "checkpoints")[-1] / "state.safetensors" for each in (whole, out))
    assert one.name == two.name
    assert one.read_bytes() == two.read_bytes()


@pytest.fixture(scope="module", autouse=True)
def no_picture():
    """It takes longer than such a run; the command's tests look at it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "write_curve", lambda metrics, out: out.write_bytes(metrics.read_bytes()))
        yield


# What a run does and writes.


@pytest.mark.parametrize("kind", list(KINDS))
def test_learns_and_keeps_what_it_learnt(whole, root, kind):
    out = whole[kind]
    lines = metrics_of(out)
    assert [line["step"] for line in lines] == [0, 3, 4, 6, 8]
    assert set(lines[1]) == {"step", "loss", "factorized", "rate"}
    scores = {f"held_out/held@{ratio}/log_likelihood" for ratio in ("0.5", "1")}
    # The network is random: where all is masked, one token at a time is no better, and there is no gap to close.
    assert set(lines[2]) == {"step", "held_out/held@0.5/gap_closed"} | scores
    assert set(lines[0]) >= {"step"} | scores  # before the first step
    assert lines[-1]["loss"] < lines[1]["loss"] or kind == "anemone"
    assert isinstance(load_circuit(out / "circuit"), Modulated if kind == "modulated" else HMM)
    assert [path.name for path in checkpoints(out / "checkpoints")] == ["step-0000006", "step-0000008"]
    assert (out / "curve.png").read_bytes() == (out / "metrics.jsonl").read_bytes()  # drawn from all of them
    assert not list(out.rglob(".*"))


def test_the_circuit_is_the_one_of_the_best_validation(root, tmp_path):
    recipe = small(root, "optimizer.lr=5", "optimizer.warmup=0", "validate_every=1", "steps=4")
    found = run(recipe, tmp_path)
    scores = [sum(v for k, v in p.metrics.items() if k.endswith("likelihood")) / 2 for p in found[1:]]
    assert max(scores) > scores[-1]  # or this test shows nothing
    data = TrainingData(recipe, Path(), tmp_path, ALONE)
    kept = data.held_out()["held"].scores(load_circuit(tmp_path / "circuit"))
    assert sum(score["coupled"] for score in kept.values()) / 2 == pytest.approx(max(scores), abs=1e-6)


def test_without_held_out_text_the_circuit_is_the_last(root, tmp_path):
    recipe = small(root, "validation=[]")
    run(recipe, tmp_path, steps=5)
    before = circuit_of(tmp_path)  # of step 4
    run(recipe, tmp_path)
    assert circuit_of(tmp_path) != before
    last = load_file(tmp_path / "checkpoints" / f"step-{STEPS:07d}" / "state.safetensors")
    torch.testing.assert_close(
        load_circuit(tmp_path / "circuit").log_emission, last["factors.emission_logits"].log_softmax(-1)
    )
    assert "held_out" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_circuit_is_trained_on(whole, root, tmp_path):
    first = metrics_of(whole["static"])[-1]
    start = f"start={whole['static'] / 'circuit'}"
    run(small(root, start), tmp_path / "static")
    assert metrics_of(tmp_path / "static")[1]["loss"] < metrics_of(whole["static"])[1]["loss"]
    run(small(root, start, *HEAD), tmp_path / "headed")
    headed = load_circuit(tmp_path / "headed" / "circuit")
    assert isinstance(headed, Modulated)
    assert headed.head.config.hidden == 6
    run(small(root, f"start={tmp_path / 'headed' / 'circuit'}"), tmp_path / "again")
    assert isinstance(load_circuit(tmp_path / "again" / "circuit"), Modulated)
    assert metrics_of(tmp_path / "again")[1]["loss"] < first["loss"]


@pytest.mark.parametrize("kind", ["static", "modulated"])
def test_the_most_used_states_of_a_circuit_are_trained_on(whole, root, tmp_path, kind):
    recipe = small(root, f"start={whole[kind] / 'circuit'}", "keep_states=5")
    run(recipe, tmp_path / "kept")
    made = load_circuit(tmp_path / "kept" / "circuit")
    assert (made.num_latents, type(made)) == (5, Modulated if kind == "modulated" else HMM)
    assert metrics_of(tmp_path / "kept")[1]["loss"] < metrics_of(whole[kind])[1]["loss"]
    run(recipe, tmp_path / "stopped", steps=5)
    run(recipe, tmp_path / "stopped")
    same_as(tmp_path / "kept", tmp_path / "stopped")


# Going on.


@pytest.mark.parametrize(("kind", "steps"), [("static", 1), ("modulated", 5), ("modulated", STEPS), ("anemone", 5)])
def test_a_run_that_stopped_anywhere_ends_the_same(whole, root, tmp_path, kind, steps):
    recipe = small(root, *KINDS[kind])
    run(recipe, tmp_path, steps=steps)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # the kill came while this line was written
    run(recipe, tmp_path)
    same_as(whole[kind], tmp_path)


@pytest.mark.parametrize("written", [True, False])
def test_a_run_that_stopped_beside_a_checkpoint_ends_the_same(whole, root, tmp_path, monkeypatch, written):
    def dies(folder, step, *arguments, **options):
        if step < 4 or written:
            write_checkpoint(folder, step, *arguments, **options)
        if step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "write_checkpoint", dies)
        with pytest.raises(KeyboardInterrupt):
            run(small(root, *HEAD), tmp_path)
    run(small(root, *HEAD), tmp_path)
    same_as(whole["modulated"], tmp_path)


@pytest.mark.parametrize("weights", ["lora", "all"])
def test_a_joint_run_ends_the_same(root, tmp_path, weights):
    changes = [f"joint.weights={weights}", "joint.rank=2", "joint.lr=0.01"]
    run(small(root, *changes), tmp_path / "whole")
    run(small(root, *changes), tmp_path / "stopped", steps=5)
    run(small(root, *changes), tmp_path / "stopped")
    for name in ("model.safetensors", "circuit/circuit.safetensors"):
        assert (tmp_path / "whole/model" / name).read_bytes() == (tmp_path / "stopped/model" / name).read_bytes()
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "stopped")


@pytest.mark.parametrize("weights", ["lora", "all"])
def test_a_joint_run_is_scored_as_what_it_writes(root, tmp_path, weights):
    recipe = small(root, f"joint.weights={weights}", "joint.rank=2", "joint.lr=0.03", *HEAD)
    data = TrainingData(recipe, Path(), tmp_path, ALONE)
    before = {name: x.clone() for name, x in codd.load(root / "mini").backbone.state_dict().items()}
    run(recipe, tmp_path, data=data)
    model = codd.load(tmp_path / "model", device="cpu")
    assert isinstance(model.circuit, Modulated)
    changed = {n for n, x in model.backbone.state_dict().items() if not torch.allclose(x, before[n], atol=1e-4)}
    assert changed == set(before) if weights == "all" else 0 < len(changed) < len(before)
    rows = PackedSequences(*(x for x in _validation_rows(recipe, tmp_path)))
    again = HeldOut.prepare(model.backbone, model.mask_id or 0, rows, 8, recipe.ratios, VALIDATION_SEED)
    last = metrics_of(tmp_path)[-1]
    for ratio, score in again.scores(model.circuit).items():
        assert last[f"held_out/held@{ratio:g}/log_likelihood"] == pytest.approx(score["coupled"], abs=1e-5)
        closed = last.get(f"held_out/held@{ratio:g}/gap_closed", math.nan)
        assert closed == pytest.approx(score["gap_closed"], rel=1e-3, nan_ok=True)
    assert not (tmp_path / "circuit").exists()  # it would be of no network on the disk


@pytest.mark.parametrize("family", ["mini", *PUBLISHED])
def test_a_run_with_low_rank_additions_writes_an_adapter(root, tmp_path, family):
    base = root / "mini" if family == "mini" else save_published(tmp_path / family, family)
    recipe = small(root, f"backbone={base}", "joint.weights=lora", "joint.rank=2", "joint.lr=0.03")
    data = TrainingData(recipe, Path(), tmp_path, ALONE)
    run(recipe, tmp_path, data=data)
    assert (tmp_path / "model").exists() == (family == "mini")
    written = {"adapter": tmp_path / "adapter", "circuit": tmp_path / "adapter" / "circuit", "device": "cpu"}
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    plain = codd.load(base, device="cpu").backbone(ids)
    assert data.spec.backbone is not None
    trained = data.spec.backbone(ids).detach()
    assert (trained - plain).abs().max() > 0.01
    for merge in (True, False):
        model = codd.load(base, merge=merge, **written)
        torch.testing.assert_close(model.backbone(ids), trained, atol=1e-4, rtol=1e-4)
        assert model.circuit is not None
    if family != "mini":
        with pytest.raises(InvalidInput, match=r"with joint\.weights lora, which writes an adapter"):
            TrainingData(small(root, f"backbone={base}", "joint.weights=all"), Path(), tmp_path, ALONE)


def test_a_circuit_of_a_backbone_with_an_adapter(root, tmp_path):
    """Trained on what the backbone says with the adapter merged, as a checkpoint that has it merged says it."""
    run(small(root, "joint.weights=lora", "joint.rank=2", "joint.lr=0.3"), tmp_path / "joint")
    run(small(root, f"adapter={tmp_path / 'joint' / 'adapter'}"), tmp_path / "adapted")
    run(small(root, f"backbone={tmp_path / 'joint' / 'model'}"), tmp_path / "merged")
    run(small(root), tmp_path / "plain")
    found = {name: metrics_of(tmp_path / name)[-1]["factorized"] for name in ("adapted", "merged", "plain")}
    assert found["adapted"] == pytest.approx(found["merged"], abs=1e-4)
    assert abs(found["plain"] - found["merged"]) > 0.01
    model = codd.load(root / "mini", adapter=tmp_path / "joint/adapter", circuit=tmp_path / "adapted/circuit")
    assert model.circuit is not None


def _validation_rows(recipe, out: Path) -> PackedSequences:
    from codd.backbones import load_checkpoint

    tokenizer = load_checkpoint(recipe.backbone, device="cpu").tokenizer
    layout = PackingConfig(recipe.row_length, 8, recipe.seed, tails=tuple(recipe.tails))
    return load_source(recipe.validation[0], Path(), tokenizer, layout, None).take(0, 4)


def test_a_finished_run_trains_no_more(whole, root):
    before = circuit_of(whole["static"]), (whole["static"] / "metrics.jsonl").read_bytes()
    assert run(small(root), whole["static"]) == []
    assert (circuit_of(whole["static"]), (whole["static"] / "metrics.jsonl").read_bytes()) == before


@pytest.mark.parametrize(
    ("change", "named"), [("seed=1", "seed"), ("steps=9", "steps"), ("circuit.num_states=16", "circuit")]
)
def test_another_recipe_is_refused(whole, root, change, named):
    for refuse in (lambda r: run(r, whole["static"]), lambda r: check_recipe(r, whole["static"])):
        with pytest.raises(InvalidInput, match=rf"is of another recipe \({named} differ\). Give another --out"):
            refuse(small(root, change))


def test_a_checkpoint_that_was_changed_is_refused(root, tmp_path):
    run(small(root), tmp_path, steps=2)
    folder = checkpoints(tmp_path / "checkpoints")[-1]
    kept, notes = read_checkpoint(folder, "cpu")
    del kept["run.best"]
    write_checkpoint(tmp_path / "checkpoints", 2, kept, notes, keep=1)
    with pytest.raises(FormatError, match=r"does not fit this recipe \(KeyError: 'run.best'\)"):
        run(small(root), tmp_path)


# Ends.


def test_seconds_end_a_run_as_steps_do(root, tmp_path):
    recipe = small(root, "seconds=0.3", "steps=100000", "log_every=99999", "checkpoint_every=99999")
    steps = run(recipe, tmp_path)[-1].step
    assert 1 <= steps < 100000
    last = metrics_of(tmp_path)[-1]
    assert last["step"] == steps
    assert {"loss", "held_out/held@1/log_likelihood"} <= set(last)
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == [f"step-{steps:07d}"]
    assert isinstance(load_circuit(tmp_path / "circuit"), HMM)
    assert run(recipe, tmp_path) == []


def test_the_clock_stands_still_while_nothing_is_trained():
    clock = Clock(STEPS, 1000.0, ALONE)
    clock.restore({"step": 3, "seconds": 500.0, "since": (3, 400.0)})
    with clock.paused():
        stopped = clock.elapsed()
        assert clock.elapsed() == stopped
    assert clock.elapsed() > stopped >= 500
    assert clock.progress(STEPS // 4) == pytest.approx(0.5, abs=0.1)
    assert clock.progress(STEPS) == 1
    assert clock.read(5, "windows", 8)["windows_per_second"] == pytest.approx(2 * 8 / 100, rel=0.01)


# What goes wrong.


@pytest.mark.parametrize("changes", [[], HEAD, ["circuit.emission_rank=3"]])
def test_a_huge_rate_is_noticed_before_anything_is_overwritten(root, tmp_path, changes):
    huge = ["optimizer.lr=1e30", "optimizer.head_lr=1e30", "checkpoint_every=1", "log_every=99"]
    with pytest.raises(Diverged, match=r"the training has diverged. Lower optimizer.lr .* are whole\.") as error:
        run(small(root, *changes, *huge), tmp_path)
    assert "\n" not in str(error.value)
    for folder in checkpoints(tmp_path / "checkpoints"):
        assert not any(bool(x.isnan().any()) for x in load_file(folder / "state.safetensors").values())


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_that_diverges_leaves_its_last_checkpoint_and_circuit(whole, root, tmp_path, kind):
    recipe = small(root, *KINDS[kind], "checkpoint_every=1", "validate_every=1", "keep=1", "log_every=99")
    data = TrainingData(recipe, Path(), tmp_path, ALONE)
    run(recipe, tmp_path, steps=4, data=data)
    before = circuit_of(tmp_path)

    def poisoned(step: int) -> WindowBatch:
        found = data.draw(step)
        assert found.logits is not None
        return found._replace(logits=found.logits * float("nan")) if step == 4 else found

    other = copy.copy(data)
    other.draw = poisoned
    with pytest.raises(Diverged, match=r"step 5: .* the training has diverged"):
        run(recipe, tmp_path, data=other)
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-0000004"]
    assert circuit_of(tmp_path) == before
    assert run(recipe, tmp_path, data=data)[0].step == 5


def damage(folder: Path, value: float) -> Path:
    from safetensors.torch import save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name, x in tensors.items() if "mlp" in name and x.ndim == 2)
    tensors[name].fill_(value)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sha256": files.sha256(path)}))
    return folder


@pytest.mark.parametrize("more", [[], ["validation=[]"], ["joint.weights=all"]])
@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [(float("nan"), FormatError, "has NaN or infinite values"), (3e38, Diverged, "is not numbers")],
)
def test_a_network_that_gives_no_numbers_is_said_before_training(root, tmp_path, value, kind, message, more):
    folder = damage(save_network(tmp_path / "broken", small_tokenizer()), value)
    recipe = small(root, f"backbone={folder}", *more)
    with pytest.raises(kind, match=message):
        run(recipe, tmp_path / "out")
    assert not (tmp_path / "out" / "circuit").exists()


LONG = ["windows.length=190", "row_length=200", "validation=[]"]


@pytest.mark.filterwarnings("ignore::codd.errors.TextsLeftOut")
@pytest.mark.parametrize(
    ("changes", "processes", "words"),
    [
        (["dtype=bfloat16"], 1, "dtype bfloat16 is for GPUs, this is cpu: --set dtype=float32"),
        ([], 3, "3 processes cannot share 8 strata: use 1, 2, 4 or 8"),
        (LONG, 1, "none of the texts in its .* rows has the 190 tokens of a window"),
        ([*LONG, "joint.weights=lora"], 1, "none of the texts in its .* rows has the 190 tokens of a window"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_at_once(root, tmp_path, changes, processes, words):
    with pytest.raises(InvalidInput, match=words):
        TrainingData(small(root, *changes), Path(), tmp_path, DistributedContext(0, processes, CPU))


def test_a_full_disk_loses_nothing_that_was_finished(whole, root, tmp_path):
    recipe = small(root, *HEAD)
    run(recipe, tmp_path, steps=5)
    before = circuit_of(tmp_path)
    data = TrainingData(recipe, Path(), tmp_path, ALONE)
    with files_of_at_most(len(before) // 2), pytest.raises(OSError, match=r"state.safetensors: could not be written"):
        run(recipe, tmp_path, data=data)
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-0000002", "step-0000004"]
    assert circuit_of(tmp_path) == before
    assert not list((tmp_path / "checkpoints").glob(".*"))  # the disk is full enough
    run(recipe, tmp_path)
    same_as(whole["modulated"], tmp_path)


# Several processes.


def test_two_processes_train_what_one_trains(whole, root, tmp_path):
    """Also a run that two began and one goes on with; and no process waits for another that has ended."""
    head = [
        "head.latents=true",
        "head.inner_states=3",
        "optimizer.lr=0.01",
    ]  # without dropout, which no two processes do alike
    jobs = {"anemone": (ANEMONE, 99), "head": (head, 99), "elastic": (head, 5)}
    kept = [f"start={whole['static'] / 'circuit'}", "keep_states=5", "optimizer.lr=0.01"]
    lora = [f"backbone={save_published(tmp_path / 'llada', 'llada')}", "joint.weights=lora", "joint.rank=2"]
    jobs |= {
        "kept": (kept, 99),
        "joint": (["joint.weights=all"], 99),
        "lora": (lora, 99),
        "seconds": (["seconds=0.2", "steps=10000"], 99999),
    }
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, "-m", small_circuits.__name__, str(root), str(tmp_path), json.dumps(jobs)],
        env={**ENVIRONMENT, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    run(small(root, *head), tmp_path / "one")
    run(small(root, *head), tmp_path / "elastic")
    run(small(root, *kept), tmp_path / "one-kept")
    run(small(root, "joint.weights=all"), tmp_path / "one-joint")
    run(small(root, *lora), tmp_path / "one-lora")
    assert (tmp_path / "lora" / "adapter" / "circuit").is_dir()
    pairs = {"anemone": whole["anemone"], "head": tmp_path / "one", "elastic": tmp_path / "one"}
    pairs |= {name: tmp_path / f"one-{name}" for name in ("kept", "joint", "lora")}
    for name, one in pairs.items():
        file = f"checkpoints/step-{STEPS:07d}/state.safetensors"
        mine, theirs = load_file(one / file), load_file(tmp_path / name / file)
        assert mine.keys() == theirs.keys()
        for key in mine:
            if key.startswith(("table.", "factors.", "head.", "backbone.")):
                # Summed in another order, and divided by their size in Adam, gradients give slightly other steps.
                torch.testing.assert_close(mine[key], theirs[key], rtol=0, atol=1e-4)
        for line, other in zip(metrics_of(one), metrics_of(tmp_path / name), strict=True):
            same = [key for key in line if "gap_closed" not in key]  # a quotient of small numbers in a random network
            assert [line[key] for key in same] == pytest.approx([other[key] for key in same], rel=1e-4, abs=1e-4)
    assert (tmp_path / "seconds.0").read_text() == (tmp_path / "seconds.1").read_text()
