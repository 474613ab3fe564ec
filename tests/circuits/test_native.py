"""The C loops against NumPy's, and what happens without a compiler."""

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
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("batch", "length", "states"), [(1, 1, 1), (3, 2, 5), (8, 9, 32), (13, 17, 77), (4, 6, 64)])
def test_messages_are_those_of_numpy(batch, length, states, reverse, fresh):
    hmm, leaf = HMM.random(states, 7, seed=1), leaf_of(batch, length, states)
    start = None if reverse else hmm.log_initial
    assert native.library() is not None
    got = chain.messages(hmm.transition, start, leaf, reverse, compiled=True)
    fresh.setattr(native, "library", lambda: None)
    want = chain.messages(hmm.transition, start, leaf, reverse)
    torch.testing.assert_close(got.log(), want.log(), rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("states", [1, 32, 77, 96])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (5, 12), (11, 7), (18, 3)])
def test_a_row_of_a_batch_is_the_same_to_the_bit_as_by_itself(batch, length, states, reverse, fresh):
    empty_like = torch.empty_like
    fresh.setattr(torch, "empty_like", lambda x: empty_like(x).fill_(torch.nan))  # what is not written shows
    generator = torch.Generator().manual_seed(3)
    matrix = torch.rand(states, states, generator=generator) / states
    leaf, first = torch.rand(length, batch, states, generator=generator), torch.rand(states, generator=generator)
    scale = torch.randn(length, batch, generator=generator)

    def passed(*rows):
        done = native.chain_pass(matrix, None if reverse else first, *rows, reverse, 4)
        assert done is not None
        return done

    whole = passed(leaf, scale)
    assert not any(x.isnan().any() for x in whole)
    for b in range(batch):
        alone = passed(leaf[:, b : b + 1].contiguous(), scale[:, b : b + 1])
        for one, all_ in zip(alone, whole, strict=True):
            assert torch.equal(one, all_[:, b : b + 1])


@needs_compiler
@pytest.mark.parametrize(("batch", "length", "states"), [(1, 1, 1), (3, 2, 5), (8, 9, 32), (13, 17, 77)])
def test_all_of_a_chain_in_one_call(batch, length, states, fresh):
    hmm, leaf = HMM.random(states, 7, seed=1), leaf_of(batch, length, states).values.transpose(0, 1).contiguous()
    tables = hmm.transition.linear[0], hmm.transition.transposed[0], hmm.log_initial.exp(), leaf.view(-1, states)
    numbers = torch.arange(length * batch).view(length, batch)
    log_z, posterior = native.smooth(*tables, numbers, True, 1e-36, 1e-30)
    ev = Evidence(latent_log_potentials=leaf.transpose(0, 1).double().log())
    truth = hmm.to(dtype=torch.float64)
    torch.testing.assert_close(log_z, truth.log_partition(ev), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(posterior.transpose(0, 1).double(), truth.posterior(ev).exp(), rtol=1e-4, atol=1e-7)
    assert torch.equal(native.smooth(*tables, numbers, False, 1e-36, 1e-30)[0], log_z)
    for b in range(batch):  # a sequence does not depend on the others, to the bit
        alone = native.smooth(*tables, numbers[:, b : b + 1], True, 1e-36, 1e-30)
        assert torch.equal(alone[0], log_z[b : b + 1])
        assert torch.equal(alone[1], posterior[:, b : b + 1])
    assert native.smooth(*tables, numbers, True, 2.0, 1e-30) is None  # too small to be sure
    assert native.smooth(*tables, numbers, True, 0.0, float(states + 1)) is None
    fresh.setattr(native, "MAX_PRODUCT", 0)  # too many products for one core
    assert native.smooth(*tables, numbers, True, 1e-36, 1e-30) is None


@needs_compiler
@pytest.mark.parametrize(("batch", "length", "states"), [(1, 1, 1), (3, 4, 5), (9, 12, 77)])
def test_paths_are_those_of_numpy(batch, length, states, fresh):
    hmm, leaf = HMM.random(states, 7, seed=1), leaf_of(batch, length, states)
    target = chain.messages(hmm.transition, None, leaf, True) * leaf
    uniforms = torch.rand(4, batch, length, generator=torch.Generator().manual_seed(5))
    got = path.sample_path(hmm.transition, hmm.log_initial, target, uniforms, compiled=True)
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
@pytest.mark.parametrize("other", ["compiler", "instructions", "source"])
def test_a_build_of_another_machine_is_not_loaded(other, cache, fresh, tmp_path):
    """A home folder is shared between machines, or copied: what another one has built lies there, under its name."""
    assert native.library() is not None
    (foreign,) = cache()
    foreign.unlink()  # it is loaded: not to be written over
    foreign.write_bytes(b"instructions that this machine does not have")
    if other == "compiler":
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
