"""The C loops against NumPy's, and what happens without a compiler."""

import itertools
import platform
import re
import shutil

import pytest
import torch

from codd.circuits import HMM, Evidence
from codd.circuits.ops import native
from codd.circuits.ops.chain import eager as chain
from codd.circuits.ops.path import eager as path
from codd.circuits.ops.scaled import exponentials

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="this machine has no C compiler")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """The library is looked for anew, whatever CODD_NATIVE says outside, and again after the test."""
    library = native.library
    library.cache_clear()
    monkeypatch.setenv("CODD_NATIVE", "1")
    yield monkeypatch
    library.cache_clear()


def leaf_of(batch: int, length: int, states: int):
    return exponentials(3 * torch.randn(batch, length, states, generator=torch.Generator().manual_seed(2)))


@needs_compiler
@pytest.mark.parametrize("absorb", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("batch", "length", "states"), [(1, 1, 1), (3, 2, 5), (8, 9, 32), (13, 17, 77), (4, 6, 64)])
def test_messages_are_those_of_numpy(batch, length, states, reverse, absorb, fresh):
    hmm, leaf = HMM.random(states, 7, seed=1), leaf_of(batch, length, states)
    start = None if reverse else hmm.log_initial
    assert native.library() is not None
    got = chain.messages(hmm.transition, start, leaf, reverse, absorb)
    fresh.setattr(native, "library", lambda: None)
    want = chain.messages(hmm.transition, start, leaf, reverse, absorb)
    torch.testing.assert_close(got.log(), want.log(), rtol=1e-5, atol=1e-5)


def begun(matrix: torch.Tensor, length: int, batch: int, reverse: bool, keep: bool, seed: int) -> native.ChainPass:
    """A pass over leaf values of its own; what is not written is NaN."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(length, batch, len(matrix), generator=generator)
    first = None if reverse else torch.rand(len(matrix), generator=generator)
    made = native.ChainPass.prepared(matrix, first, values, torch.ones(length, batch, 1), reverse, keep, 4)
    assert made is not None
    made.products.fill_(torch.nan)
    return made


SHAPES = [
    [(9, 1)],
    [(1, 1), (2, 1)],
    [(7, 1), (12, 1), (3, 1)],
    [(5, 1), (5, 2), (9, 3), (1, 1)],
    [(t, 1) for t in (4, 13, 8, 1, 9, 9, 2, 6, 11)],
    [(6, 13), (17, 8), (3, 4), (8, 1)],
]
"""Lengths and batches of passes that are run together: 1 to 9 and more rows, and fewer as the short ones end."""


@needs_compiler
@pytest.mark.parametrize("states", [1, 5, 32, 77, 96])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_a_pass_is_the_same_to_the_bit_alone_and_in_a_batch(shapes, states):
    matrix = torch.rand(states, states, generator=torch.Generator().manual_seed(3)) / states

    def all_of_them() -> list[native.ChainPass]:
        kinds = itertools.cycle([(False, True), (True, True), (True, False), (False, False)])
        return [begun(matrix, *shape, *kind, i) for i, (shape, kind) in enumerate(zip(shapes, kinds, strict=False))]

    alone, batched = all_of_them(), all_of_them()
    for one in alone:
        native.run_passes([one])
    native.run_passes(batched)
    for a, b in zip(alone, batched, strict=True):
        assert not a.products.isnan().any()
        assert torch.equal(a.products, b.products)
        assert torch.equal(a.norms, b.norms)
        assert torch.equal(a.messages, b.messages)


@needs_compiler
@pytest.mark.parametrize("batch", [2, 3, 5, 8, 11])
def test_a_row_of_a_batch_is_the_same_to_the_bit_as_by_itself(batch):
    matrix = torch.rand(77, 77, generator=torch.Generator().manual_seed(3)) / 77
    whole = begun(matrix, 9, batch, True, True, 1)
    native.run_passes([whole])
    for b in range(batch):
        values, norms = whole.values[:, b : b + 1].contiguous(), torch.ones(9, 1, 1)
        one = native.ChainPass.prepared(matrix, None, values, norms, True, True, 4)
        assert one is not None
        native.run_passes([one])
        assert torch.equal(one.products, whole.products[:, b : b + 1])


@needs_compiler
@pytest.mark.parametrize(("batch", "length", "states"), [(1, 1, 1), (3, 4, 5), (9, 12, 77)])
def test_paths_are_those_of_numpy(batch, length, states, fresh):
    hmm, leaf = HMM.random(states, 7, seed=1), leaf_of(batch, length, states)
    target = chain.messages(hmm.transition, None, leaf, True, absorb=True)
    uniforms = torch.rand(4, batch, length, generator=torch.Generator().manual_seed(5))
    got = path.sample_path(hmm.transition, hmm.log_initial, target, uniforms)
    fresh.setattr(native, "library", lambda: None)
    assert torch.equal(got, path.sample_path(hmm.transition, hmm.log_initial, target, uniforms))


@needs_compiler
def test_weights_that_all_but_vanish_are_left_to_logarithms():
    faint = torch.full((1, 1, 4), 1e-35)
    limits = torch.full((1, 1, 1), 0.5)
    assert native.path(torch.eye(4), torch.ones(4), faint, limits, 1e-30) is None
    assert native.path(torch.eye(4), torch.ones(4), faint, limits, 1e-36) is not None


@pytest.mark.parametrize("reason", ["switched off", "no compiler", "a compiler that fails", "nothing to run"])
def test_without_a_library_the_answers_are_the_same(reason, fresh, tmp_path, caplog):
    hmm = HMM.random(12, 30, seed=1)
    ev = Evidence(logits=torch.randn(3, 6, 30, generator=torch.Generator().manual_seed(0)))
    want = hmm.log_partition(ev), hmm.posterior(ev), hmm.sample(ev, generator=torch.Generator().manual_seed(1)).latents
    native.library.cache_clear()
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    if reason == "switched off":
        fresh.setenv("CODD_NATIVE", "0")
    elif reason == "no compiler":
        fresh.delenv("CC", raising=False)
        fresh.setattr(native.shutil, "which", lambda name: None)
    else:
        fresh.setenv("CC", "false" if reason == "a compiler that fails" else str(tmp_path / "missing"))
    assert native.library() is None
    got = hmm.log_partition(ev), hmm.posterior(ev), hmm.sample(ev, generator=torch.Generator().manual_seed(1)).latents
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert not list(tmp_path.rglob("*.so"))
    # One line, however often the library is asked for, unless it is not wanted.
    told = [record.getMessage() for record in caplog.records if record.name == native.__name__]
    assert len(told) == (reason != "switched off")
    for line in told:
        assert "install a C compiler" in line
        assert "CODD_NATIVE=0" in line
        assert "\n" not in line


@needs_compiler
def test_a_cache_that_cannot_be_written_is_no_obstacle(fresh, tmp_path):
    (tmp_path / "codd").write_text("a file where the folder should be")
    (tmp_path / "temporary").mkdir()
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh.setattr(native.tempfile, "tempdir", str(tmp_path / "temporary"))
    assert native.library() is not None
    assert not list((tmp_path / "temporary").iterdir())


@pytest.fixture
def cache(fresh, tmp_path):
    """An empty cache of its own, and the libraries in it."""
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda: sorted((tmp_path / "cache" / "codd").iterdir())


def library_again():
    native.library.cache_clear()
    return native.library()


@needs_compiler
def test_the_library_is_compiled_once(cache):
    assert native.library() is not None
    (built,) = cache()
    stamp = built.stat().st_mtime_ns
    assert library_again() is not None
    assert [path.stat().st_mtime_ns for path in cache()] == [stamp]


def compiler_that_says(folder, option: str, answer: str) -> str:
    """A compiler like this machine's but for what it answers to one option."""
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\ncase "$*" in *{option}*) echo "{answer}"; exit;; esac\nexec cc "$@"\n')
    script.chmod(0o755)
    return str(script)


@needs_compiler
@pytest.mark.parametrize("other", ["processor", "compiler", "instructions", "source"])
def test_a_build_of_another_machine_is_not_loaded(other, cache, fresh, tmp_path):
    """A home folder is shared between machines, or copied: what another one has built lies there, under its name."""
    assert native.library() is not None
    (foreign,) = cache()
    foreign.unlink()  # it is loaded: not to be written over
    foreign.write_bytes(b"instructions that this machine does not have")
    if other == "processor":
        fresh.setattr(native, "_processor", lambda: b"x86_64, another model")
    elif other == "compiler":
        fresh.setenv("CC", compiler_that_says(tmp_path, "--version", "cc 99"))
    elif other == "instructions":
        fresh.setenv("CC", compiler_that_says(tmp_path, "-dM", "#define __AVX1024__ 1"))
    else:
        changed = tmp_path / "native.c"
        changed.write_text(native._SOURCE.read_text() + "/* another release */\n")
        fresh.setattr(native, "_SOURCE", changed)
    assert library_again() is not None
    (own,) = set(cache()) - {foreign}
    assert own.stat().st_size > 1000


@needs_compiler
def test_a_damaged_build_is_made_anew(cache, tmp_path):
    folder = tmp_path / "cache" / "codd"
    folder.mkdir(parents=True)
    (folder / f"native-{native._key(native._compiler())}.so").write_bytes(b"half")
    assert native.library() is not None
    assert [path.stat().st_size > 1000 for path in cache()] == [True]


def test_the_processor_is_named_by_model_and_instruction_sets():
    named = native._processor().decode()
    assert platform.machine() in named
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        assert re.search(r"^model\s*:", named, re.M)
        assert re.search(r"^flags\s*:.* sse2 ", named, re.M)
    assert "MHz" not in named  # which changes from moment to moment


@needs_compiler
def test_the_compiler_may_be_named_with_arguments(cache, fresh):
    fresh.setenv("CC", "cc -pipe")
    assert native.library() is not None
    assert len(cache()) == 1
