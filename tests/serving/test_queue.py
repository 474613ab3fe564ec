"""The fair queue."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from codd.serving.requests import FairQueue, QueuedRequest


@dataclass(eq=False)
class One(QueuedRequest):
    client: str
    name: int = 0


def drained(queue: FairQueue[One]) -> list[One]:
    return [one for _ in range(len(queue)) if (one := queue.pop()) is not None]


def test_clients_take_turns_and_each_keeps_its_order():
    queue: FairQueue[One] = FairQueue(10)
    for number in range(4):
        queue.push(One("many", number))
    queue.push(One("few", 0))
    assert [(one.client, one.name) for one in drained(queue)] == [
        ("many", 0), ("few", 0), ("many", 1), ("many", 2), ("many", 3),
    ]  # fmt: skip
    assert queue.pop() is None


@given(st.lists(st.sampled_from("abcd"), max_size=20))
def test_what_is_ahead_is_what_goes_before_if_nobody_else_comes(clients):
    queue: FairQueue[One] = FairQueue(100)
    for client in clients[:-1]:
        queue.push(One(client))
    if clients:
        last = One(clients[-1])
        ahead = queue.push(last)
        assert drained(queue).index(last) == ahead


@given(st.lists(st.sampled_from("abcd"), max_size=20))
def test_iterating_is_in_the_order_of_going(clients):
    queue: FairQueue[One] = FairQueue(100)
    for client in clients:
        queue.push(One(client))
    assert list(queue) == drained(queue)


def test_who_is_overtaken_keeps_its_place():
    queue: FairQueue[One] = FairQueue(10)
    waits, passes, other = One("a", 0), One("a", 1), One("b", 0)
    for one in (waits, passes, other):
        queue.push(one)
    queue.take(passes)
    assert list(queue) == [waits, other]
    queue.push(One("a", 2))
    queue.take(waits)
    assert [one.client for one in queue] == ["b", "a"]


def test_those_who_leave_are_gone_and_make_room():
    queue: FairQueue[One] = FairQueue(2)
    first, second = One("a"), One("a")
    queue.push(first)
    queue.push(second)
    assert queue.free == 0
    queue.remove(first)
    assert (queue.free, list(queue)) == (1, [second])
    queue.remove(second)
    assert len(queue) == 0
    assert queue.pop() is None
