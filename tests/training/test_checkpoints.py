import os

import pytest
import torch

from codd.errors import FormatError
from codd.training.checkpoints import NOTES, STATE, checkpoints, read_checkpoint, write_checkpoint


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"weights.a": torch.full((3, 2), value), "optimizer.a.step": torch.tensor(value)}


def write(root, step: int, keep: int = 2):
    return write_checkpoint(root, step, tensors(step), {"digest": "d"}, keep=keep)


def names(root) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_is_written_is_read(tmp_path):
    folder = write(tmp_path / "new" / "folder", 5)
    kept, notes = read_checkpoint(folder, "cpu")
    assert notes == {"step": 5, "digest": "d"}
    assert kept.keys() == tensors(5).keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in tensors(5).items())


@pytest.mark.parametrize(("keep", "left"), [(1, [30]), (2, [20, 30]), (9, [5, 10, 20, 30])])
def test_the_last_few_stay(tmp_path, keep, left):
    for step in (5, 10, 20, 30):
        write(tmp_path, step, keep)
    assert names(tmp_path) == [f"step-{step:07d}" for step in left]
    assert [path.name for path in checkpoints(tmp_path)] == names(tmp_path)


def test_the_newest_is_last_whatever_the_digits(tmp_path):
    for step in (99_999_999, 5, 100_000_000):
        write(tmp_path, step, keep=3)
    assert [int(path.name[5:]) for path in checkpoints(tmp_path)] == [5, 99_999_999, 100_000_000]


def test_what_a_kill_left_half_written_is_passed_over_and_removed(tmp_path):
    write(tmp_path, 10)
    partial = tmp_path / ".step-0000020.123"
    partial.mkdir()
    (partial / STATE).write_bytes(b"half")
    (tmp_path / "step-notes").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-0000010"]
    write(tmp_path, 20)
    assert names(tmp_path) == ["step-0000010", "step-0000020", "step-notes"]


def test_a_checkpoint_that_is_there_already_is_replaced(tmp_path):
    write(tmp_path, 10)
    folder = write_checkpoint(tmp_path, 10, tensors(3.0), {}, keep=2)
    assert read_checkpoint(folder, "cpu")[0]["weights.a"][0, 0] == 3
    assert names(tmp_path) == ["step-0000010"]


def flipped(content: bytes) -> bytes:
    """One bit of the last number is another."""
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / STATE).unlink(),
        lambda folder: (folder / NOTES).unlink(),
        lambda folder: (folder / STATE).write_bytes(flipped((folder / STATE).read_bytes())),
        lambda folder: (folder / NOTES).write_text((folder / NOTES).read_text().replace('"step": 10', '"step": 90')),
        lambda folder: (folder / NOTES).write_text("[" * 100_000),
        *(lambda folder, name=name: ((folder / name).unlink(), os.mkfifo(folder / name)) for name in (NOTES, STATE)),
        lambda folder: ((folder / STATE).unlink(), (folder / STATE).symlink_to("/dev/zero")),
    ],
    ids=map(str, range(8)),
)
def test_a_damaged_checkpoint(tmp_path, damage):
    """Other damage: tests/project/test_mutated_files.py."""
    folder = write(tmp_path, 10)
    damage(folder)
    with pytest.raises(FormatError, match=r"step-0000010: cannot be read \(.*\)\. Remove it to go on from") as caught:
        read_checkpoint(folder, "cpu")
    assert "\n" not in str(caught.value)
