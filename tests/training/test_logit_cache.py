import dataclasses
import json
import shutil
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from codd import files, folders
from codd.backbones.loading import load_checkpoint
from codd.circuits import HMM, Evidence
from codd.data.packing import PackedSequences, widen
from codd.data.windows import WindowBatch, WindowRecipe, predict_windows
from codd.errors import Diverged, FormatError, InvalidInput
from codd.training.logit_cache import build as build_module
from codd.training.logit_cache import storage
from codd.training.logit_cache.build import draw_shard, windows_per_row
from codd.training.logit_cache.cached_windows import keep_top_k
from codd.training.logit_cache.reader import LogitCache
from tests.support import FIXTURES
from tests.support.small_caches import (
    CPU,
    MASK,
    VOCAB,
    WINDOW,
    made,
    network,
    rows_at,
    rows_of,
    settings_of,
    shards,
    steps,
)
from tests.support.small_runs import files_of_at_most


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return made(tmp_path_factory.mktemp("caches") / "whole").folder


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def dense(settings, shard: int) -> tuple[WindowBatch, torch.Tensor]:
    """What a shard's windows are when the network is asked directly, and their levels."""
    drawn = draw_shard(rows_at(settings)(shard), settings, shard)
    windows = predict_windows(network(settings.vocab_size), settings.mask_id, drawn, WINDOW)
    use = drawn.valid.flatten()
    assert windows.logits is not None
    assert windows.features is not None
    kept = WindowBatch(windows.tokens[use], windows.masked[use], windows.logits[use], features=windows.features[use])
    return kept, drawn.level.flatten()[use]


def log_likelihood(circuit: HMM, windows: WindowBatch) -> torch.Tensor:
    known = Evidence(tokens=windows.tokens, observed=~windows.masked, logits=windows.logits, sparse=windows.sparse)
    return circuit.conditional_log_prob(windows.tokens, known)


def windows_of(cache: LogitCache, numbers: range | None = None) -> WindowBatch:
    """Some windows of a cache, or all."""
    return cache.load().windows(torch.tensor(numbers or range(len(cache))))


def same(one: WindowBatch, two: WindowBatch) -> None:
    for name in ("tokens", "masked", "features", "level"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    for name in ("ids", "log_weights", "log_tail"):
        assert torch.equal(getattr(one.sparse, name)[one.masked], getattr(two.sparse, name)[two.masked]), name


# What is kept of a distribution.


@pytest.mark.parametrize("k", [1, 2, 5, 12])
def test_a_list_holds_the_truth_the_likeliest_others_and_the_mass_of_the_rest(k):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, 12, generator=generator)
    truth = torch.randint(12, (50,), generator=generator)
    lists = keep_top_k(logits, truth, k)
    for row in range(50):
        probs = logits[row].double().softmax(-1)
        others = sorted((v for v in range(12) if v != truth[row]), key=lambda v: -probs[v])
        listed = [int(truth[row]), *others[: k - 1]]
        assert widen(lists.ids)[row].tolist() == listed
        assert lists.truth[row] == pytest.approx(float(probs[truth[row]].log()), abs=1e-5)
        assert lists.log_probs[row].tolist() == pytest.approx(probs[listed].log().tolist(), rel=1e-3, abs=1e-3)
        assert float(lists.tail[row].exp()) == pytest.approx(1 - float(probs[listed].sum()), abs=1e-5)


def test_logits_that_are_no_numbers_show_in_the_truth():
    logits = torch.zeros(3, 5)
    logits[1, 4], logits[2, 0] = torch.nan, torch.inf
    assert keep_top_k(logits, torch.tensor([1, 1, 1]), 2).truth.isnan().tolist() == [False, True, True]


# Windows, as they come back.


def test_windows_come_back_as_the_network_saw_them(whole):
    cache, begin = LogitCache.open(whole), 0
    for shard, record in enumerate(cache.shards):
        wanted, level = dense(cache.settings, shard)
        found = windows_of(cache, range(begin, begin + record.windows))
        begin += record.windows
        assert torch.equal(found.tokens, wanted.tokens)
        assert torch.equal(found.masked, wanted.masked)
        torch.testing.assert_close(found.level, level)
        torch.testing.assert_close(found.features, wanted.features, atol=2e-3, rtol=1e-3)
        log_probs = wanted.logits.log_softmax(-1)
        truth = log_probs.gather(-1, wanted.tokens[..., None])[..., 0]
        torch.testing.assert_close(found.sparse.log_weights[..., 0][found.masked], truth[wanted.masked])
        kept = log_probs.gather(-1, found.sparse.ids)
        torch.testing.assert_close(found.sparse.log_weights[found.masked], kept[found.masked], atol=2e-3, rtol=1e-3)
        assert (found.sparse.log_weights.exp().sum(-1) + found.sparse.log_tail.exp())[found.masked].allclose(
            torch.ones(int(found.masked.sum())), atol=2e-3
        )
    assert begin == len(cache) > 20
    assert cache.counts()["masked"] < len(cache) * WINDOW


@pytest.mark.parametrize("start", ["neutral", "random"])
def test_the_likelihood_from_a_cache_is_the_dense_one_within_the_tolerance(tmp_path, start):
    circuit = HMM.neutral(4, VOCAB) if start == "neutral" else HMM.random(12, VOCAB, scale=2.0)
    tolerance = 3e-3
    settings = settings_of(top_k=None, tolerance=tolerance)
    cache = made(tmp_path, settings, circuit=circuit)
    changes = dict(cache.index.measured)
    assert changes[cache.index.top_k] < tolerance
    assert all(change >= tolerance for k, change in changes.items() if k < cache.index.top_k)
    if start == "random":
        assert cache.index.top_k > 16
    moved, tokens, begin = 0.0, 0, 0
    for shard, record in enumerate(cache.shards):
        wanted = log_likelihood(circuit, dense(settings, shard)[0])
        found = log_likelihood(circuit, windows_of(cache, range(begin, begin + record.windows)))
        begin, tokens = begin + record.windows, tokens + record.masked
        moved += float((found - wanted).abs().sum())
    assert moved / tokens < 2 * tolerance  # it was measured on some of these windows
    if start == "neutral":
        assert moved / tokens < 1e-4  # which needs no more than the truth, and a mass of one


def test_a_part_of_a_cache(whole):
    cache = LogitCache.open(whole)
    everything, first = cache.load(), cache.shards[0].windows
    for part in (range(2, 5), range(first - 1, first + 2), range(first, len(cache)), range(1, len(cache) - 1)):
        loaded = cache.load(CPU, part)
        assert len(loaded) == len(part)
        same(loaded.windows(torch.arange(len(part))), everything.windows(torch.tensor(part)))
        assert len(loaded.lists.truth) == int(loaded.masked.sum())


def test_a_large_vocabulary(tmp_path):
    size = 70_000
    settings = settings_of(vocab_size=size, shards=1, shard_rows=3)
    cache = made(tmp_path, settings, circuit=HMM.neutral(1, size))
    wanted, _ = dense(settings, 0)
    found = windows_of(cache)
    assert torch.equal(found.tokens, wanted.tokens)
    assert int(found.tokens.max()) > 2**16
    assert int(found.sparse.ids.max()) > 2**16
    with safe_open(tmp_path / "shard-00000.safetensors", "pt") as file:
        assert file.get_slice("ids").get_dtype() == "I32"


# Files.


def test_what_a_shard_holds(whole):
    names = [storage.shard_name(number) for number in range(3)]
    records = [storage.record_name(number) for number in range(3)]
    assert [path.name for path in sorted(whole.iterdir())] == sorted(["index.json", *names, *records])
    cache = LogitCache.open(whole)
    assert cache.counts()["bytes"] == sum((whole / name).stat().st_size for name in names)
    windows, masked = cache.shards[0].windows, cache.shards[0].masked
    with safe_open(whole / names[0], "pt") as file:
        kinds = {name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
    assert kinds == {
        "tokens": ("U16", [windows, WINDOW]),
        "masked": ("BOOL", [windows, WINDOW]),
        "level": ("F32", [windows]),
        "ids": ("U16", [masked, 16]),
        "log_probs": ("F16", [masked, 16]),
        "truth": ("F32", [masked]),
        "tail": ("F32", [masked]),
        "features": ("F16", [windows, WINDOW, 16]),
    }


def test_the_same_settings_give_the_same_bytes(whole, tmp_path):
    made(tmp_path / "again")
    assert shards(tmp_path / "again") == shards(whole)
    made(tmp_path / "other", settings_of(seed=1))
    assert all(one != two for one, two in zip(shards(tmp_path / "other").values(), shards(whole).values(), strict=True))


def test_a_finished_cache_is_not_made_again(copy):
    before = {path: path.stat().st_mtime_ns for path in copy.iterdir() if path.suffix == ".safetensors"}
    assert all(step.note is None and step.windows == 0 for step in steps(copy, settings_of()))
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize("how", ["flipped", "cut", "gone", "empty"])
def test_only_a_damaged_shard_is_made_again(whole, copy, how):
    path, before = copy / "shard-00001.safetensors", {p: p.stat().st_mtime_ns for p in copy.glob("shard-*")}
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 1
    path.write_bytes({"flipped": content, "cut": content[:-5], "gone": b"", "empty": b""}[how])
    if how == "gone":
        path.unlink()
    with pytest.raises(FormatError, match=r"shard-00001.safetensors: (is damaged|cannot be read).* no other"):
        LogitCache.open(copy).load()
    notes = [step.note for step in steps(copy, settings_of()) if step.note]
    assert len(notes) == 1
    assert notes[0].startswith(str(path))
    assert notes[0].endswith("it is made again")
    assert shards(copy) == shards(whole)
    assert {p for p in before if p.stat().st_mtime_ns != before[p]} == {path, path.with_suffix(".json")}
    assert len(LogitCache.open(copy).load()) == len(LogitCache.open(copy))


def test_a_run_that_stopped_between_a_shard_and_its_record(whole, tmp_path, monkeypatch):
    write, calls = storage.write_shard, []

    def killed(folder, number, entries, settings):
        record = write(folder, number, entries, settings)
        calls.append(number)
        if number == 1:
            (folder / storage.record_name(1)).unlink()
            (folder / ".shard-00002.safetensors.12ab.tmp").write_bytes(b"half of")
            raise KeyboardInterrupt
        return record

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_shard", killed)
        with pytest.raises(KeyboardInterrupt):
            steps(tmp_path, settings_of())
    with pytest.raises(FormatError, match="is an unfinished cache, 1 of 3 shards are there"):
        LogitCache.open(tmp_path)
    steps(tmp_path, settings_of())
    assert calls == [0, 1]
    assert shards(tmp_path) == shards(whole)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"sha256": 1}'])
def test_a_record_that_says_nothing_is_no_record(whole, copy, content):
    (copy / "shard-00002.json").write_bytes(content)
    steps(copy, settings_of())
    assert shards(copy) == shards(whole)


def test_other_settings_need_a_fresh_start(copy):
    before = shards(copy)
    other = settings_of(seed=4, top_k=17)
    with pytest.raises(InvalidInput, match=r"other settings \(top_k was 16, is 17, seed was 0, is 4\).*--fresh"):
        steps(copy, other)
    assert shards(copy) == before
    (copy / "mine.txt").write_text("mine")
    steps(copy, other, fresh=True)
    assert LogitCache.open(copy).settings == other
    assert (copy / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("fresh", [True, False])
def test_a_folder_that_holds_something_else_is_left_alone(tmp_path, fresh):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(InvalidInput, match="holds something else than a cache"):
        steps(tmp_path, settings_of(), fresh=fresh)
    (tmp_path / "index.json").write_text('{"pages": 3}')
    with pytest.raises(FormatError, match=r"index.json: is not the index of a cache"):
        steps(tmp_path, settings_of(), fresh=fresh)
    with pytest.raises(InvalidInput, match="is a file"):
        steps(tmp_path / "thesis.tex", settings_of(), fresh=fresh)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "thesis.tex"]
    with folders.exclusive(tmp_path / "cache"), pytest.raises(InvalidInput, match="is writing into this folder"):
        steps(tmp_path / "cache", settings_of(), fresh=fresh)


def resealed(text: str, name: str, value: object) -> str:
    """An index that someone changed, with a checksum that fits."""
    fields = {**json.loads(text), name: value}
    del fields["sha256"]
    return json.dumps({**fields, "sha256": files.sha256_of_json(fields)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"seed": 0', '"seed": 1'), "does not have its checksum"),
        (lambda text: text[:100], "is not JSON"),
        (lambda text: text.replace('"version": 3', '"version": 2'), "is of version 2, this codd reads 3"),
        (lambda text: text.replace('"mask_id": 0,', ""), "does not have its checksum"),
        (lambda text: text.replace('"sha256"', '"sha1"'), "does not have its checksum"),
        (lambda text: resealed(text, "measured", 5), "measured must be a list, found 5"),
        (lambda text: resealed(text, "top_k", 10**30), "top_k must be below 2"),
        (lambda text: resealed(text, "measured", [{}]), "lacks the field k, change"),
    ],
)
def test_a_changed_index_is_noticed(copy, change, message):
    (copy / "index.json").write_text(change((copy / "index.json").read_text()))
    with pytest.raises(FormatError, match=message):
        LogitCache.open(copy)


def test_folders_without_a_cache(tmp_path):
    with pytest.raises(FormatError, match=r"there is no cache. Make one with `codd cache"):
        LogitCache.open(tmp_path)
    with storage.claimed(tmp_path, fresh=False), pytest.raises(FormatError, match="is an unfinished cache"):
        LogitCache.open(tmp_path)


# Failures.


def causal():
    found = deepcopy(network())
    found.network.config = dataclasses.replace(found.config, causal=True)
    return found


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda at: steps(at, settings_of(), circuit=HMM.neutral(2, 91)), InvalidInput, "is over 91 tokens, the backb"),
        (lambda at: steps(at, settings_of(top_k=91)), InvalidInput, "top_k must be from 1 to the 90 tokens, found 91"),
        (
            lambda at: steps(at, settings_of(), backbone=causal()),
            InvalidInput,
            "is a causal model; a cache needs",
        ),
        (lambda at: steps(at, settings_of(), backbone=broken_for(MASK)), Diverged, "not numbers in shard 0"),
        (
            lambda at: made(at, settings_of(top_k=None, tolerance=1e-9), circuit=HMM.random(12, VOCAB, scale=2.0)),
            InvalidInput,
            "even lists of all 90 tokens change .* more than the tolerance 1e-09",
        ),
        (lambda at: window_count(30), InvalidInput, "6 rows hold no window of 30 tokens with a masked one"),
        (lambda at: window_count(50), InvalidInput, "rows of 40 tokens hold no window of 50"),
        *(
            (lambda at, part=part: made(at).load(CPU, part), InvalidInput, "part must be a range inside")
            for part in (range(0), range(0, 10_000), range(0, 10, 2), range(5, 3))
        ),
    ],
)
def test_what_gives_no_cache_is_refused(tmp_path, call, kind, words):
    with pytest.raises(kind, match=words):
        call(tmp_path)


def window_count(length: int) -> float:
    settings = settings_of(window=WindowRecipe(length))
    return windows_per_row(rows_at(settings)(0), settings)


def broken_for(token: int):
    """A network that gives no numbers where this token is seen."""
    backbone = deepcopy(network())  # the other tests keep theirs
    backbone.network.embedding.tokens.weight.data[token] = torch.nan
    return backbone


def test_logits_that_are_no_numbers_name_the_shard_and_lose_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "SAMPLE", 1)  # else the measurement sees them first
    settings, token = settings_of(), 5
    given = rows_at(settings)

    def without(shard: int) -> PackedSequences:
        """Rows of which only one, of the second shard, has the token."""
        tokens, segments, scored = given(shard)
        tokens = np.where(tokens == token, 6, tokens)
        if shard == 1:
            row = next(r for r in range(6) if r > 1 and not scored[r].all())
            tokens[row, np.flatnonzero(~scored[row])[0]] = token
        return PackedSequences(tokens.astype(np.uint16), segments, scored)

    backbone = broken_for(token)
    # The tied head gives NaN for this token everywhere: shift the blame to what is seen alone.
    backbone.network.head.weight = torch.nn.Parameter(network().network.embedding.tokens.weight.clone(), False)
    with pytest.raises(Diverged, match=r"not numbers in shard 1: .*Finished shards are kept"):
        steps(tmp_path, settings, backbone=backbone, rows=without)
    assert list(shards(tmp_path)) == ["shard-00000.json", "shard-00000.safetensors"]


def test_a_full_disk_says_how_to_go_on(tmp_path):
    settings = settings_of()
    given = rows_at(settings)

    def growing(shard: int) -> PackedSequences:
        """The first shard is small."""
        return PackedSequences(*(x[: 2 if shard == 0 else None] for x in given(shard)))

    steps(tmp_path / "whole", settings, rows=growing)
    sizes = [record.bytes for record in LogitCache.open(tmp_path / "whole").shards]
    out = tmp_path / "out"
    with (
        files_of_at_most((sizes[0] + sizes[1]) // 2),
        pytest.raises(
            OSError, match=r"shard-00001.safetensors: could not be written \(.*os error \d+.*\)\. 1 of 3 shards"
        ),
    ):
        steps(out, settings, rows=growing)
    assert not list(out.glob(".*"))
    before = (out / "shard-00000.safetensors").stat().st_mtime_ns
    steps(out, settings, rows=growing)
    assert shards(out) == shards(tmp_path / "whole")
    assert (out / "shard-00000.safetensors").stat().st_mtime_ns == before


def test_a_shard_without_windows_is_no_harm(tmp_path):
    settings = settings_of()
    given = rows_at(settings)

    def some(shard: int) -> PackedSequences:
        rows = given(shard)
        return rows._replace(scored=np.zeros_like(rows.scored)) if shard == 1 else rows

    steps(tmp_path, settings, rows=some)
    cache = LogitCache.open(tmp_path)
    assert cache.shards[1].windows == 0
    wanted = torch.cat([dense(settings, shard)[0].tokens for shard in (0, 2)])
    assert torch.equal(windows_of(cache).tokens, wanted)


# Other families.


@pytest.mark.parametrize("name", ["llada_mha", "dream_tied", "mdlm", "mdlm_timecond", "sedd", "bert"])
def test_other_families_are_asked_in_their_own_way(name, tmp_path):
    backbone = load_checkpoint(FIXTURES / name, device="cpu").backbone
    mask = backbone.vocab_size - 1 if backbone.special.mask is None else backbone.special.mask
    size = min(backbone.vocab_size, mask)
    rows = rows_of(size, texts=1, mask=0, length=36)
    assert rows.rows.segments.max() == 1
    settings = settings_of(vocab_size=backbone.vocab_size, mask_id=mask, shards=1, shard_rows=8, top_k=20)
    drawn = draw_shard(rows.take(0, 8), settings, 0)
    steps(tmp_path, settings, backbone=backbone, rows=rows_at(settings, rows))
    cache = LogitCache.open(tmp_path)
    windows, at = windows_of(cache), 0
    for row in range(len(drawn.level)):
        tokens, segments, hidden = (x[row] for x in drawn[:3])
        text = segments > 0
        alone = backbone(torch.where(hidden, mask, tokens)[None, text])[0]
        alone[:, mask] = -torch.inf
        log_probs = alone.float().log_softmax(-1)
        for begin in drawn.first[row][drawn.valid[row]].tolist():
            here, masked = slice(begin, begin + WINDOW), hidden[begin : begin + WINDOW]
            assert torch.equal(windows.masked[at], masked)
            truth = log_probs[here].gather(-1, tokens[here, None])[:, 0]
            found = windows.sparse.log_weights[at, :, 0]
            torch.testing.assert_close(found[masked], truth[masked], atol=1e-4, rtol=1e-4)
            at += 1
    assert at == len(cache) > 5
