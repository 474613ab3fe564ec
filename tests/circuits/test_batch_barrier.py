"""Message passing on several cores and batched across threads: who waits for whom, and that nobody waits for ever."""

from threading import Thread

import pytest
import torch

from codd.circuits.ops import batch_barrier, native
from codd.circuits.ops.batch_barrier import BatchBarrier

pytestmark = pytest.mark.skipif(native.library() is None, reason="without a compiled library nothing is shared")
MATRICES = [torch.rand(40, 40, generator=torch.Generator().manual_seed(i)) / 40 for i in range(2)]


def begun(seed: int, length: int = 6, matrix: int = 0) -> native.ChainPass:
    values = torch.rand(length, 1, 40, generator=torch.Generator().manual_seed(seed))
    made = native.ChainPass.prepared(MATRICES[matrix], None, values, torch.ones(length, 1, 1), False, True, 4)
    assert made is not None
    return made


def products_alone(seed: int, **kind: int) -> torch.Tensor:
    one = begun(seed, **kind)
    native.run_passes([one])
    return one.products


@pytest.fixture
def seen(monkeypatch):
    """How many passes each call of C ran."""
    counts, real = [], native.run_passes

    def noted(passes):
        counts.append(len(passes))
        real(passes)

    monkeypatch.setattr(native, "run_passes", noted)
    return counts


def run(jobs) -> list[BaseException | None]:
    """Each in a thread of one barrier; what they raised."""
    together, found = BatchBarrier(len(jobs)), [None] * len(jobs)

    def member(number):
        try:
            together.run(jobs[number])
        except BaseException as error:
            found[number] = error

    threads = [Thread(target=member, args=(number,), daemon=True) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "someone waits for ever"
    return found


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_tasks_hold_every_pass_once_and_one_matrix_each(cores):
    passes = [begun(i, 3 + i, i % 2) for i in range(7)]
    tasks = batch_barrier._tasks(passes, cores)
    assert len(tasks) == max(2, cores // 2 * 2)
    assert all(len({one.matrix.data_ptr() for one in task}) == 1 for task in tasks)
    assert sorted(id(one) for task in tasks for one in task) == sorted(map(id, passes))


@pytest.mark.parametrize("worth", [0, 2**40])
def test_two_cores_do_what_one_does(worth, monkeypatch):
    monkeypatch.setattr(batch_barrier, "WORTH", worth)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    passes = [begun(1), begun(2, matrix=1)]
    batch_barrier.run_passes(passes)
    assert torch.equal(passes[0].products, products_alone(1))
    assert torch.equal(passes[1].products, products_alone(2, matrix=1))


def test_members_are_batched_as_long_as_they_stay(seen):
    """Of three members one runs one pass, one two, one three: 3 passes at once, then 2, then 1."""
    done = {}

    def job(number):
        def run_some():
            for turn in range(number + 1):
                one = begun(10 * number + turn)
                batch_barrier.run_passes([one])
                done[number, turn] = one.products

        return run_some

    assert run([job(number) for number in range(3)]) == [None] * 3
    assert sorted(seen) == [1, 2, 3]
    for (number, turn), products in done.items():
        assert torch.equal(products, products_alone(10 * number + turn))


def test_one_member_works_at_a_time():
    inside, most = [], []

    def job():
        for _ in range(20):
            inside.append(1)
            most.append(len(inside))
            inside.pop()
            batch_barrier.run_passes([begun(1)])

    assert run([job] * 4) == [None] * 4
    assert max(most) == 1


def test_who_fails_is_not_waited_for():
    done = []

    def good():
        for _ in range(3):
            batch_barrier.run_passes([one := begun(1)])
        done.append(one.products)

    def bad():
        batch_barrier.run_passes([begun(2)])
        raise ValueError("mine alone")

    found = run([good, bad, good])
    assert [type(error) for error in found] == [type(None), ValueError, type(None)]
    assert all(torch.equal(products, products_alone(1)) for products in done)


@pytest.mark.parametrize("worth", [0, 2**40])
def test_a_pass_that_fails_fails_for_all_who_wait_for_it(worth, monkeypatch):
    def broken(passes):
        raise MemoryError("no room")

    monkeypatch.setattr(native, "run_passes", broken)
    monkeypatch.setattr(batch_barrier, "WORTH", worth)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    found = run([lambda: batch_barrier.run_passes([begun(1)])] * 3)
    assert [type(error) for error in found] == [MemoryError] * 3


def test_outside_of_a_barrier_nobody_is_waited_for(seen):
    run([lambda: batch_barrier.run_passes([begun(1)])] * 2)
    batch_barrier.run_passes([begun(1)])
    assert seen[-1] == 1


def test_no_passes_are_no_reason_to_wait(seen):
    batch_barrier.run_passes([])
    assert run([lambda: batch_barrier.run_passes([])] * 2) == [None] * 2
    assert not any(seen)
