"""A bounded queue that is fair between clients: round-robin over clients, first in first out within each."""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from itertools import zip_longest
from typing import Generic, TypeVar

from codd.serving.requests import QueuedRequest

Item = TypeVar("Item", bound=QueuedRequest)


class FairQueue(Generic[Item]):
    """A bounded queue in which a client with a hundred requests delays one with a single request by one, not a hundred.

    Not thread-safe: callers hold a lock. Nothing stops a caller from pushing beyond ``capacity``: check ``free`` first.
    """

    def __init__(self, capacity: int):
        """``capacity``: how many items may wait."""
        self.capacity = capacity
        self._by_client: OrderedDict[Hashable, deque[Item]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        """How many items wait."""
        return self._size

    def __iter__(self) -> Iterator[Item]:
        """All items, in the order in which they go if no more are pushed."""
        for turns in zip_longest(*self._by_client.values()):
            yield from (item for item in turns if item is not None)

    @property
    def free(self) -> int:
        """How many more items fit; negative if the queue holds more than its capacity."""
        return self.capacity - self._size

    def push(self, item: Item) -> int:
        """Append an item behind its client's others. Returns how many items are ahead of it if no more are pushed."""
        items = self._by_client.setdefault(item.client, deque())
        # Each round pops one item of every client. So of another client go as many as there are full rounds before this
        # item, and one more if that client comes earlier in the round.
        clients = list(self._by_client)
        place = clients.index(item.client)
        ahead = sum(min(len(self._by_client[c]), len(items) + (i < place)) for i, c in enumerate(clients))
        items.append(item)
        self._size += 1
        return ahead

    def pop(self) -> Item | None:
        """Remove and return the next item; None if the queue is empty."""
        item = next(iter(self), None)
        if item is not None:
            self.take(item)
        return item

    def take(self, item: Item) -> None:
        """Remove an item whose turn it is, and move its client to the end of the round.

        Unless it overtakes others of its client, which do not lose their place to it.
        """
        first = self._by_client[item.client][0] is item
        self.remove(item)
        if first and item.client in self._by_client:
            self._by_client.move_to_end(item.client)

    def remove(self, item: Item) -> None:
        """Take an item out of the queue, wherever it is; KeyError or ValueError if it is not in it."""
        items = self._by_client[item.client]
        items.remove(item)
        self._size -= 1
        if not items:
            del self._by_client[item.client]
