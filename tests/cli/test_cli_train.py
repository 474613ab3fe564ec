import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

import codd
from codd import folders
from codd.backbones import adapters, load_checkpoint, mini
from codd.circuits import HMM, Modulated, load_circuit
from codd.cli import main
from codd.cli.train import gaps_in_words
from codd.training.checkpoints import checkpoints
from codd.training.circuit.joint import trainable
from codd_lab.problems import problems
from tests.support.checkpoints import save_network
from tests.support.cli import kill_codd
from tests.support.small_runs import small_tokenizer
from tests.support.two_processes import run_in_two_processes

pytestmark = pytest.mark.usefixtures("one_thread")  # here as in the processes that are started: the same bits
CLOCK = ("windows_per_second", "seconds")
RECIPE = """\
name: small
backbone: mini
data: [{kind: qa, name: questions, path: train.jsonl}]
validation: [{kind: qa, name: held, path: train.jsonl, rows: 3}]
steps: 4
batch_windows: 16
windows: {length: 8, per_row: 4}
bank: {windows: 32, rows_at_once: 4}
circuit: {num_states: 8}
optimizer: {lr: 0.05, head_lr: 0.01, warmup: 2}
ratios: [0.5, 1.0]
log_every: 2
validate_every: 2
checkpoint_every: 2
"""
SOFT = ["--set=head.latents=true", "--set=head.dropout=0.2"]
CACHED = ["--set=data=[]", "--set=validation=[]"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A network, questions, a recipe and caches."""
    root = tmp_path_factory.mktemp("root")
    save_network(root / "mini", small_tokenizer())
    save_network(root / "other", small_tokenizer(410))
    lines = [json.dumps({"question": p.question, "answer": p.solution}) for p in problems(20)]
    (root / "train.jsonl").write_text("\n".join(lines) + "\n")
    (root / "small.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        small = ["--data", "train.jsonl", "--window", "8", "--row-length", "384", "--windows", "40", "--top-k", "16"]
        for name, more in (("plain", []), ("full", ["--features"])):
            assert main(["cache", "--backbone=mini", "--out", name, "--device=cpu", *small, *more]) == 0
    return root


@pytest.fixture(autouse=True)
def here(root, monkeypatch):
    monkeypatch.chdir(root)


def arguments(out: Path, *more: str, recipe: str | Path = "small.yaml") -> list[str]:
    return ["train", str(recipe), "--out", str(out), "--device", "cpu", *more]


def train(out: Path, *more: str, recipe: str | Path = "small.yaml") -> int:
    return main(arguments(out, *more, recipe=recipe))


def refused(capsys, out: Path, *more: str, recipe: str | Path = "small.yaml") -> str:
    capsys.readouterr()
    assert train(out, *more, recipe=recipe) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    last = printed.err.splitlines()[-1]
    assert last.startswith("codd: ")
    assert "bug in codd" not in last
    assert printed.err.count("codd: ") == 1
    return last


def metrics_of(out: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in CLOCK} for line in lines]


def test_the_gap_closed_is_that_of_the_largest_ratio():
    shares = {"books@0.5": 0.2, "books@1": 0.614, "own@0.5": 0.1}
    figures = {f"held_out/{name}/gap_closed": share for name, share in shares.items()}
    figures |= {f"held_out/{name}/log_likelihood": -1.0 for name in (*shares, "own@1")}
    assert gaps_in_words(figures) == "books: 61% (-1.000 nats per token), own: no gap to close (-1.000 nats per token)"


def test_text_and_what_is_written(tmp_path, capsys):
    out = tmp_path / "new" / "run"
    assert train(out) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"trained: {out / 'circuit'}\n")
    assert f"codd info {out / 'circuit'}" in printed.out
    for shown in ("Held-out text: log-likelihood in nats per token", "held@0.5", "held@1", "Sampled in 4 calls"):
        assert shown in printed.out
    lines = printed.err.splitlines()
    assert lines[0] == "small: a static circuit, 8 states, 4 steps of 16 windows, on cpu"
    said = "gap closed on held-out text held: no gap to close"  # of a random network
    assert [line.partition(" (")[0] for line in lines[1:]] == [f"step {step}: {said}" for step in (0, 2, 4)]
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [line["step"] for line in metrics_of(out)] == [0, 2, 4]
    model = codd.load("mini", circuit=out / "circuit", device="cpu")
    assert isinstance(model.circuit, HMM)
    assert model.circuit.window == 8
    assert model.generate("How many?", gen_length=8, steps=2).texts
    before = (out / "circuit" / "circuit.safetensors").read_bytes()
    assert train(out) == 0
    assert capsys.readouterr().out == printed.out  # a finished run says so again, with its figures
    assert (out / "circuit" / "circuit.safetensors").read_bytes() == before
    assert "is of another recipe (seed differ)" in refused(capsys, out, "--seed=1")
    assert (out / "circuit" / "circuit.safetensors").read_bytes() == before
    assert train(out, "--seed=1", "--fresh") == 0
    assert (out / "circuit" / "circuit.safetensors").read_bytes() != before


def test_modulated_circuits_decode_like_any_other(tmp_path, capsys):
    assert train(tmp_path, *SOFT, "--set=head.inner_states=3", "--set=head.hidden=5", "--json", "--seed", "5") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["recipe"], found["step"], found["out"]) == ("small", 4, str(tmp_path))
    assert found["settings"]["seed"] == 5
    assert found["loss"] > 0
    model = codd.load("mini", circuit=tmp_path / "circuit", device="cpu")
    assert isinstance(model.circuit, Modulated)
    assert "latents and steps by 16" in repr(model.circuit)
    assert model.generate("How many?", gen_length=8, steps=2).texts
    assert main(["info", str(tmp_path / "circuit")]) == 0


def test_joint_training_writes_a_model_with_its_circuit(tmp_path, capsys):
    assert train(tmp_path, "--set=joint.weights=lora", "--set=joint.lr=0.01") == 0
    assert capsys.readouterr().out.startswith(f"trained: {tmp_path / 'model'}\n")
    model = codd.load(tmp_path / "model", device="cpu")
    assert isinstance(model.circuit, HMM)
    asked = {"gen_length": 8, "steps": 2}
    expected = model.generate("How many?", **asked)
    assert main(["info", str(tmp_path / "adapter"), "--json", "--check"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["kind"], said["base"], said["rank"], said["checked"]) == ("adapter", "mini", 8, True)
    adapter = ["--adapter", str(tmp_path / "adapter"), "--circuit", str(tmp_path / "adapter" / "circuit")]
    few = ["--gen-length", "8", "--steps", "2", "--device", "cpu", "--json"]
    assert main(["generate", "How many?", "--model", "mini", *adapter, *few]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == expected.texts[0]
    assert found["settings"]["adapter"] == str(tmp_path / "adapter")


@pytest.mark.parametrize("rule", ["adam", "ratio", "baum-welch"])
def test_every_rule_learns_from_a_cache(tmp_path, rule, monkeypatch):
    monkeypatch.setattr("codd.training.circuit.trainer.write_curve", lambda *_: None)  # it takes longer than the run
    more = [f"--set=optimizer.rule={rule}", "--set=steps=12", "--set=cache=plain"]
    assert train(tmp_path, *CACHED, *more) == 0
    losses = [line["loss"] for line in metrics_of(tmp_path)]
    assert losses[-1] < losses[0]
    assert isinstance(load_circuit(tmp_path / "circuit"), HMM)


def test_a_cache_is_of_the_adapter_that_the_recipe_names(tmp_path, capsys, monkeypatch):
    for number, name in enumerate(("a", "b")):
        network = load_checkpoint("mini", device="cpu").backbone
        for parameter in trainable(network, "lora", 2, 0).values():
            parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(number))
        adapters.save(network, tmp_path / name, "mini")
    made = ["--data=train.jsonl", "--window=8", "--windows=40", "--top-k=16", f"--adapter={tmp_path / 'a'}"]
    assert main(["cache", "--backbone=mini", f"--out={tmp_path / 'cache'}", "--device=cpu", *made]) == 0
    adapted = [*CACHED, f"--set=cache={tmp_path / 'cache'}"]
    (tmp_path / "a").rename(tmp_path / "moved")  # the weights count, not the folder's name
    assert train(tmp_path / "right", *adapted, f"--set=adapter={tmp_path / 'moved'}") == 0
    assert train(tmp_path / "plain", *CACHED, "--set=cache=plain") == 0
    likelihoods = [metrics_of(tmp_path / name)[-1]["factorized"] for name in ("right", "plain")]
    assert abs(likelihoods[0] - likelihoods[1]) > 0.01  # the network was asked with its adapter
    begin, end = "was made with an adapter (digest ", "set adapter to that of the cache, or make the cache again "
    message = refused(capsys, tmp_path / "out", *adapted)
    assert begin in message
    assert f"the recipe's adapter is none: {end}without --adapter." in message
    other = f"--set=adapter={tmp_path / 'b'}"
    message = refused(capsys, tmp_path / "out", *adapted, other)
    assert begin in message
    assert f"the recipe's adapter is {tmp_path / 'b'}: {end}with --adapter {tmp_path / 'b'}." in message
    assert "plain: was made without an adapter, the rec" in refused(
        capsys, tmp_path / "out", *CACHED, "--set=cache=plain", other
    )


def test_a_cache_is_of_the_network_that_the_recipe_names(tmp_path, capsys):
    """One of the same sizes, as an instruct model has of its base, is told from it by its weights."""
    shutil.copytree("mini", tmp_path / "same")
    shutil.copytree("mini", tmp_path / "other")
    tuned = load_checkpoint("mini", device="cpu").backbone
    next(tuned.parameters()).data.mul_(1.01)
    mini.save(tuned, tmp_path / "other")
    cached = ["--set=data=[]", "--set=cache=plain"]
    assert train(tmp_path / "out", *cached, f"--set=backbone={tmp_path / 'same'}") == 0
    message = refused(capsys, tmp_path / "no", *cached, f"--set=backbone={tmp_path / 'other'}")
    assert "plain: was made by another network (" in message
    assert f") than {tmp_path / 'other'}: set backbone to that of the cache, make the cache again with" in message
    assert train(tmp_path / "alone", *CACHED, "--set=cache=plain", f"--set=backbone={tmp_path / 'other'}") == 0


def test_caches_with_and_without_features(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("codd.training.circuit.trainer.write_curve", lambda *_: None)
    assert train(tmp_path / "a", *CACHED, "--set=cache=full", *SOFT) == 0
    assert isinstance(load_circuit(tmp_path / "a" / "circuit"), Modulated)
    assert train(tmp_path / "b", "--set=data=[]", "--set=cache=full", *SOFT) == 0
    assert "held_out/held@1/log_likelihood" in metrics_of(tmp_path / "b")[-1]
    for more in (CACHED, ["--set=data=[]"]):
        message = refused(capsys, tmp_path / "c", *more, "--set=cache=plain", *SOFT)
        assert "a head listens to hidden states, which this cache has not: make it with --features" in message
    start = f"--set=start={tmp_path / 'a' / 'circuit'}"
    message = refused(capsys, tmp_path / "d", *CACHED, "--set=cache=plain", start)
    assert "listens to hidden states of 16 numbers, there are 0" in message
    message = refused(capsys, tmp_path / "e", "--set=data=[]", "--set=cache=plain", "--set=backbone=other")
    assert "cache: plain is over 400 tokens, the backbone other over 410" in message
    message = refused(capsys, tmp_path / "f", *CACHED, "--set=cache=plain", "--set=windows.length=16")
    assert "plain: has windows of 8 tokens, the recipe of 16: set windows.length" in message
    assert "nowhere" in refused(capsys, tmp_path / "g", *CACHED, "--set=cache=nowhere")


def test_kill_9_and_resume_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("codd.training.circuit.trainer.write_curve", lambda *_: None)
    # So many steps that the end is far when the first checkpoint is seen; logs and checkpoints are out of step.
    many = [*SOFT, "--set=steps=40", "--set=log_every=5", "--set=validate_every=20", "--set=checkpoint_every=3"]
    out = tmp_path / "killed"
    kill_codd(arguments(out, *many), lambda: checkpoints(out / "checkpoints"))
    assert not (out / "curve.png").exists()
    for each in (out, tmp_path / "whole"):
        assert train(each, *many) == 0
    one, two = ((each / "circuit" / "circuit.safetensors").read_bytes() for each in (out, tmp_path / "whole"))
    assert one == two
    assert metrics_of(out) == metrics_of(tmp_path / "whole")


def test_a_second_process_is_kept_out_of_the_folder(tmp_path, capsys):
    with folders.exclusive(tmp_path):
        for more in ([], ["--fresh"]):
            message = refused(capsys, tmp_path, *more)
            assert f"{tmp_path}: the process {os.getpid()} is writing into this folder" in message
        assert os.listdir(tmp_path) == [folders.LOCK]


def test_two_processes_speak_with_one_voice(tmp_path):
    stdout, stderr = run_in_two_processes(*arguments(tmp_path / "two", "--set=validation=[]"))
    assert stdout.count("trained: ") == 1
    assert stderr.count("2 processes") == 1
    assert train(tmp_path / "one", "--set=validation=[]") == 0
    one, two = (load_circuit(tmp_path / name / "circuit") for name in ("one", "two"))
    assert isinstance(one, HMM)
    assert isinstance(two, HMM)
    torch.testing.assert_close(one.log_emission.exp(), two.log_emission.exp(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seed=-1"], "seed must be at least 0, found -1"),
        (["--device=tpu9"], "there is no device 'tpu9'"),
        (["--set=backbone=nowhere"], "nowhere: there is no such folder"),
        (["--set=start=nowhere"], "nowhere: there is no such folder"),
        (["--set=row_length=16"], "row_length is 16 tokens"),
        (["--set=windows.length=380"], "rows has the 380 tokens of a window"),
        (["--set=data=[{kind: qa, name: q, path: no.jsonl}]"], "no.jsonl: there is no such file (source q)"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, more, message):
    valid = [] if "row_length" in more[0] else ["--set=validation=[]"]
    assert message in refused(capsys, tmp_path / "out", *valid, *more)
    kept = any(word in more[0] for word in ("start", "windows.length"))  # what was read of the data
    assert (tmp_path / "out").exists() == kept


def test_questions_that_are_longer_than_a_row_are_counted_once(tmp_path, capsys):
    assert train(tmp_path / "out", "--set=row_length=200") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    begin = r"codd: source (\w+): \d+ of 20 questions with their answers are longer than row_length, 200 tokens"
    assert sorted(re.match(begin, line)[1] for line in said) == ["held", "questions"]
    assert train(tmp_path / "out", "--set=row_length=200") == 0  # from the rows that were kept
    assert "left out" not in capsys.readouterr().err


def test_held_out_text_without_a_block_is_refused(tmp_path, capsys):
    (tmp_path / "long.txt").write_text((Path("train.jsonl").read_text() + "\n") * 3)
    data = f"--set=data=[{{kind: text, name: mine, path: {tmp_path}/long.txt}}]"
    message = refused(capsys, tmp_path / "out", "--set=windows.length=380", data)
    assert "no block of 380 tokens fits the held-out text. Give longer texts." in message


def test_out_that_holds_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    for more in ([], ["--fresh"]):
        assert "holds something else than a run" in refused(capsys, tmp_path, *more)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
