"""Who comes next: clients in turn, each client's requests in the order they came, and no more than can be promised."""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar, runtime_checkable


@runtime_checkable
class Waits(Protocol):
    """What can stand in a queue."""

    client: Hashable
    """Whose it is."""


Waiting = TypeVar("Waiting", bound=Waits)


class FairQueue(Generic[Waiting]):
    """A bounded queue in which a client with a hundred requests delays one with a single request by one, not a hundred.

    Not safe for threads: whoever shares it holds a lock.
    """

    def __init__(self, bound: int):
        """At most so many wait."""
        self.bound = bound
        self._lines: OrderedDict[Hashable, deque[Waiting]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        """How many wait."""
        return self._size

    def __iter__(self) -> Iterator[Waiting]:
        """All of them, client by client."""
        for line in self._lines.values():
            yield from line

    @property
    def room(self) -> int:
        """How many more may come."""
        return self.bound - self._size

    def push(self, one: Waiting) -> int:
        """Stand at the end of the client's line; how many will go before, as things are."""
        line = self._lines.setdefault(one.client, deque())
        # In each round one of every client goes: of the others as many as there are rounds before, and of those whose
        # turn comes earlier in a round, one more.
        clients = list(self._lines)
        place = clients.index(one.client)
        ahead = sum(min(len(self._lines[c]), len(line) + (i < place)) for i, c in enumerate(clients))
        line.append(one)
        self._size += 1
        return ahead

    def pop(self) -> Waiting | None:
        """The next one; its client goes to the end of the round."""
        if not self._size:
            return None
        client, line = next(iter(self._lines.items()))
        one = line.popleft()
        self._size -= 1
        if line:
            self._lines.move_to_end(client)
        else:
            del self._lines[client]
        return one

    def remove(self, one: Waiting) -> None:
        """It waits no longer."""
        line = self._lines[one.client]
        line.remove(one)
        self._size -= 1
        if not line:
            del self._lines[one.client]
