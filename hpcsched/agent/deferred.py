"""Orders that wait until they can be carried out, in order for each receiver."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Order = TypeVar("Order")
Result = TypeVar("Result")


class Deferred(Generic[Order, Result]):
    """The orders that cannot be carried out yet, and those that came for the same receiver meanwhile.

    `carry_out` may put an order off again: the later ones of its receiver then wait too.
    """

    def __init__(self, carry_out: Callable[[Order], Result]) -> None:
        self._carry_out = carry_out
        self._waiting: dict[Hashable, list[Order]] = {}

    def put_off(self, receiver: Hashable, order: Order) -> None:
        """Have an order wait, and with it all later ones for this receiver."""
        self._waiting.setdefault(receiver, []).append(order)

    def takes(self, receiver: Hashable, order: Order) -> bool:
        """Have the order wait if another one for this receiver does; returns whether it waits."""
        if receiver not in self._waiting:
            return False
        self._waiting[receiver].append(order)
        return True

    def drop(self, receiver: Hashable) -> Order | None:
        """Carry out no order of this receiver any more; the first of them, None if none waits."""
        return next(iter(self._waiting.pop(receiver, ())), None)

    def clear(self) -> list[Order]:
        """Carry none out any more; the first order of each receiver."""
        firsts = list(self)
        self._waiting.clear()
        return firsts

    def again(self) -> Iterator[Result]:
        """Try all orders once more; the results of those that are carried out."""
        for receiver in list(self._waiting):
            for order in self._waiting.pop(receiver):
                if not self.takes(receiver, order):
                    yield self._carry_out(order)

    def __iter__(self) -> Iterator[Order]:
        """The first orders, one for each receiver."""
        return iter([orders[0] for orders in self._waiting.values()])

    def __contains__(self, receiver: Hashable) -> bool:
        """Whether an order of this receiver waits."""
        return receiver in self._waiting

    def __bool__(self) -> bool:
        return bool(self._waiting)
