"""From files of sequences to a circuit, by the command line and by the example, on a tiny BERT over residues."""

import importlib.util
import json
import lzma
from pathlib import Path

import pytest
import torch

import codd
from codd.cli import main
from codd.data.sources import Source, find_sources
from codd.data.tokenization import PackingConfig, load_source
from codd.data.windows import CPU
from codd.errors import FormatError, TextsLeftOut
from codd.training.circuit.validation import held_out_blocks
from codd.training.logit_cache.reader import LogitCache
from tests.support import ROOT
from tests.support.cli import printed_json, refused

RESIDUES, SPECIAL = "ACDEFGHIKLMNPQRSTVWY", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WIDTH, WINDOW = 16, 8
PAIRED = dict(zip("ACDEFGHIKL", "MNPQRSTVWY", strict=True))


def sequence(number: int, length: int) -> str:
    """Each second residue is fixed by the one before it: what a joint distribution can know, and a tilt cannot."""
    drawn = torch.randint(10, (length,), generator=torch.Generator().manual_seed(number)).tolist()
    return "".join("ACDEFGHIKL"[x] + PAIRED["ACDEFGHIKL"[x]] for x in drawn)[:length]


ROWS = [(sequence(n, 20 + n % 9), 6 + 2 * (n % 4)) for n in range(60)]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A checkpoint as it is published, a pickle with a head of another task, and sequences in every format."""
    root = tmp_path_factory.mktemp("sequences")
    folder = root / "download"
    folder.mkdir()
    sizes = {"vocab_size": 25, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": WIDTH, "max_position_embeddings": 200}
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["Tiny"], **sizes}))
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *RESIDUES]))
    torch.save(weights(), folder / "pytorch_model.bin")
    for name, rows in (("train.tsv", ROWS), ("held.tsv", [(sequence(n, 24), 8) for n in range(200, 206)])):
        (root / name).write_text("".join(f"{text}\t{begin}\n" for text, begin in rows))
    (root / "lines.txt").write_text("\n".join(text for text, _ in ROWS) + "\n\n")
    records = (f">sp|{n} any name\n{text[:9]}\n{text[9:]}\n" for n, (text, _) in enumerate(ROWS))
    (root / "records.fasta.xz").write_bytes(lzma.compress("".join(records).encode()))
    return root


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"bert.embeddings.word_embeddings": (25, WIDTH), "bert.embeddings.position_embeddings": (200, WIDTH)}
    shapes |= {"bert.embeddings.token_type_embeddings": (2, WIDTH)}
    layer = "bert.encoder.layer.0."
    names = [layer + f"attention.self.{x}" for x in ("query", "key", "value")]
    names += [layer + x for x in ("attention.output.dense", "intermediate.dense", "output.dense")]
    linear = [*names, "cls.predictions.transform.dense", "cls.species", "bert.pooler.dense"]
    norms = ["bert.embeddings", layer + "attention.output", layer + "output", "cls.predictions.transform"]
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    for name in linear:
        tensors |= {f"{name}.weight": torch.randn(WIDTH, WIDTH, generator=generator) * 0.3}
        tensors |= {f"{name}.bias": torch.zeros(WIDTH)}
    for name in norms:
        tensors |= {f"{name}.LayerNorm.weight": torch.ones(WIDTH), f"{name}.LayerNorm.bias": torch.zeros(WIDTH)}
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    return tensors | {"cls.predictions.bias": torch.zeros(25)}


@pytest.fixture(scope="module")
def model(root) -> Path:
    assert main(["convert", str(root / "download"), str(root / "model")]) == 0
    return root / "model"


@pytest.fixture(scope="module")
def tokenizer(model):
    return codd.load(model).tokenizer


def test_a_pickled_checkpoint_is_converted_and_no_code_of_it_runs(root, model, tmp_path, capsys):
    loaded = codd.load(model)
    assert torch.equal(
        loaded.backbone.network.embedding.tokens.weight, weights()["bert.embeddings.word_embeddings.weight"]
    )
    assert "holds model.safetensors already" in refused(capsys, "convert", root / "download", model)
    assert printed_json(capsys, "convert", root / "download", model, "--force")["tensors"] == len(weights())
    assert "has no pytorch_model.bin" in refused(capsys, "convert", tmp_path, tmp_path / "out")
    torch.save({"a": Path("x")}, tmp_path / "pytorch_model.bin")
    assert "cannot be read as plain tensors" in refused(capsys, "convert", tmp_path, tmp_path / "out")
    torch.save([torch.ones(1)], tmp_path / "pytorch_model.bin")
    assert "other things than named tensors" in refused(capsys, "convert", tmp_path, tmp_path / "out")


@pytest.mark.parametrize("path", ["train.tsv", "lines.txt", "records.fasta.xz"])
@pytest.mark.parametrize("begin", [None, 3, 40])
def test_the_same_rows_from_every_format(path, begin, root, tokenizer):
    source = Source("sequences", "s", path=path, begin=begin)
    rows = load_source(source, root, tokenizer, PackingConfig(64, WINDOW, 0), None).rows
    for (text, _), tokens, segments, scored in zip(ROWS, *rows, strict=True):
        ids = [2, *tokenizer.encode(text), 3]
        assert tokens.tolist() == ids + [0] * (len(tokens) - len(ids))
        assert segments.sum() == len(ids)
        first = 0 if begin is None else min(begin, len(text) - WINDOW)
        last = len(text) if begin is None else first + WINDOW
        assert scored.nonzero()[0].tolist() == list(range(1 + first, 1 + last))


def test_what_is_right_of_a_window_is_given_as_well(root, tokenizer):
    source = Source("sequences", "s", path="train.tsv", begin_column=2)
    rows = load_source(source, root, tokenizer, PackingConfig(64, WINDOW, 0), None).rows
    shown = (blocks := held_out_blocks(rows, WINDOW, 0, absolute=False)).shown(WINDOW, tokenizer.mask_id)
    for (text, begin), start, ids, valid in zip(ROWS, blocks.starts.tolist(), shown, blocks.valid, strict=True):
        assert start == 1 + min(begin, len(text) - WINDOW)
        seen = text[: start - 1] + "[MASK]" * WINDOW + text[start - 1 + WINDOW :]
        assert ids[valid].tolist() == [2, *tokenizer.encode(seen), 3]
    assert torch.equal(blocks.ids[:, 0], torch.full((len(ROWS),), 2, device=CPU))


@pytest.mark.parametrize(
    ("content", "fields", "words"),
    [
        ("ACDEFGHIKL\t2\nACDBFGHIKL\t2\n", {"begin_column": 2}, "'ACDBFGHIKL' holds what is not a token"),
        ("ACDEFGHIKL\tx\n", {"begin_column": 2}, "entry 1: column 2 should say where the window begins, found 'x'"),
        ("ACDEFGHIKL\n", {"begin_column": 2}, "column 2 should say where the window begins, found ''"),
        ("ACDEFG\n" * 3, {}, "3 of 3 sequences have fewer tokens than a window, 8, or more than row_length, 64"),
        ("", {}, "nothing is left"),
    ],
)
def test_refused_sequences(content, fields, words, tmp_path, tokenizer):
    (tmp_path / "a.tsv").write_text(content)
    with pytest.raises(FormatError) as error:
        load_source(
            Source("sequences", "a", path="a.tsv", **fields), tmp_path, tokenizer, PackingConfig(64, 8, 0), None
        )
    assert words in str(error.value)


def test_a_sequence_without_a_window_is_left_out_with_a_warning(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("ACDEF\nACDEFGHIKL\n" + 70 * "A")
    with pytest.warns(TextsLeftOut, match="2 of 3 sequences have fewer tokens than a window"):
        found = load_source(Source("sequences", "a", "a.txt"), tmp_path, tokenizer, PackingConfig(64, 8, 0), None)
    assert len(found) == 1
    with pytest.raises(FormatError, match="begin_column is for"):
        load_source(
            Source("sequences", "a", "a.txt", begin_column=2), tmp_path, tokenizer, PackingConfig(64, 8, 0), None
        )


def test_files_say_themselves_whether_they_hold_sequences(root):
    paths = [root / name for name in ("train.tsv", "lines.txt", "records.fasta.xz")]
    assert [source.kind for source in find_sources(paths, None)] == ["sequences", "text", "sequences"]
    assert {source.kind for source in find_sources(paths, None, sequences=True)} == {"sequences"}


@pytest.fixture(scope="module")
def trained(root, model) -> Path:
    """The three commands, and the recipe that ships."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        data = ["--data", "train.tsv", "--begin-column", "2", "--window", str(WINDOW), "--top-k", "25"]
        more = ["--windows", "160", "--features", "--minimum", "0.3"]
        assert main(["cache", "--backbone", "model", *data, *more, "--out", "cache"]) == 0
        held = "validation=[{kind: sequences, name: held, path: held.tsv, begin_column: 2}]"
        changes = ["cache=cache", f"windows.length={WINDOW}", "circuit.num_states=12", "steps=150", held]
        sets = [part for change in changes for part in ("--set", change)]
        assert main(["train", "sequences", *sets, "--out", "run"]) == 0
    return root / "run"


def test_a_circuit_is_worth_more_than_its_control(trained, root):
    summary = json.loads((trained / "summary.json").read_text())
    row = summary["scores"]["held@1"]
    assert row["after"] > row["control"] + 0.2
    assert row["after"] > row["network"] + 0.2
    assert codd.load_circuit(trained / "control").num_states == 1
    assert summary["samples"] is None
    assert (trained / "circuit").is_dir()


def test_a_complete_cache_gives_the_logits_themselves(trained, root):
    cache = LogitCache.open(root / "cache")
    index = torch.arange(8)
    dense = cache.load().windows(index)
    lists = cache.load()
    object.__setattr__(lists, "complete", False)
    sparse = lists.windows(index)
    assert dense.sparse is None
    circuit = codd.HMM.random(4, 25, seed=0)
    scores = [circuit.conditional_log_prob(x.tokens, x.evidence()) for x in (dense, sparse)]
    assert torch.allclose(*scores, atol=1e-4)  # half precision of the lists, and a tail that is nothing
    assert torch.allclose(dense.factorized_log_prob(), sparse.factorized_log_prob(), atol=1e-2)


def test_the_example_designs_loops_that_keep_the_constraint(trained, model, root, tmp_path):
    spec = importlib.util.spec_from_file_location("antibodies", ROOT / "examples" / "antibodies" / "antibodies.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    codd.HMM.random(4, 25, seed=0, scale=1.0).save(tmp_path / "circuit")
    out = tmp_path / "designs.json"
    scored = ["--data", str(root / "scored.tsv"), "--out", str(tmp_path / "scores.json"), "--count", "2"]
    (root / "scored.tsv").write_text("".join(f"{sequence(n, 40)}\t3\n" for n in range(2)))
    both = ["--circuit", str(tmp_path / "circuit"), str(trained / "control")]
    example.main(["score", "--model", str(model), *both, *scored])
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert list(scores) == ["0.25", "0.5", "1.0"]
    for row in scores.values():
        assert all(low <= mean <= high < 1 for mean, low, high in row.values())
        assert f"{tmp_path.name} - tilt - one_at_a_time" in row
        assert row["control - tilt - one_at_a_time"][0] == pytest.approx(row["network"][0] - row["one_at_a_time"][0])
    counts = ["--designs", "4", "--judged", "1", "--calls", "1", "8"]
    example.main(["design", "--model", str(model), "--circuit", str(tmp_path / "circuit"), "--out", str(out), *counts])
    found = json.loads(out.read_text())
    assert [(x["circuit"], x["calls"]) for x in found[1:]] == [(c, n) for n in (1, 8) for c in ("trained", "null")]
    rows = example.read(example.HERE / "held-out.tsv.xz")[:4]
    for line in found[1:]:
        assert line["constraint_kept"] == 1
        assert line["likelihood"] < 0
        for (_, _, length), window in zip(rows, line["windows"], strict=True):
            assert len(window) == example.WINDOW
            assert window[0] + window[length - 1] == "CW"
            assert window.count("C") == 1
    assert found[0]["right_ending"] > 0.5  # the sequences themselves end like their J genes
    assert out.with_suffix(".svg").read_text().startswith("<?xml")
