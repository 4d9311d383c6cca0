"""What an agent asks of a program's rank 0, besides signals: JSON objects, one a line, on its control
pipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

from hpcsched.contract import codec
from hpcsched.contract.seats import Seat, of_table, to_table
from hpcsched.errors import BadInput


@dataclass(frozen=True)
class Suspend:
    """Save and leave, as the signal says that follows. `quick`: the devices are wanted at once, so the state
    may be left in shared memory."""

    quick: bool = False

    def facts(self) -> Any:
        """What stands behind its key."""
        return {"quick": self.quick}

    @classmethod
    def of(cls, facts: Any) -> Suspend:
        """The order; raises BadInput."""
        return cls(codec.flag(codec.an_object(facts, "suspend"), "quick", False))


@dataclass(frozen=True)
class Resize:
    """Become attempt `attempt` with `world_size` ranks.

    The ranks `keep` stay and are numbered from 0 in that order, rank 0 first; the others leave. The rest of
    `world_size` join: they are started beside us, all on this host if `one_host`. `seats` are those of all
    ranks from then on, where the ranks share CPU cores. `where`: "address:port" to which those who join come.
    """

    attempt: int
    world_size: int
    keep: tuple[int, ...]
    one_host: bool
    seats: tuple[Seat, ...] = ()
    where: str | None = None

    @property
    def joining(self) -> int:
        """How many ranks join."""
        return self.world_size - len(self.keep)

    def facts(self) -> Any:
        """What stands behind its key."""
        return {
            "attempt": self.attempt,
            "world_size": self.world_size,
            "keep": list(self.keep),
            "one_host": self.one_host,
            "where": self.where,
            **({"seats": to_table(self.seats)} if self.seats else {}),
        }

    @classmethod
    def of(cls, facts: Any) -> Resize:
        """The order; raises BadInput."""
        table = codec.an_object(facts, "resize")
        order = cls(
            attempt=codec.whole(table, "attempt", least=1),
            world_size=codec.whole(table, "world_size", least=1),
            keep=codec.part(table, "keep", _ranks),
            one_host=codec.flag(table, "one_host"),
            seats=codec.part(table, "seats", of_table, ()),
            where=codec.text(table, "where", None),
        )
        if order.keep[:1] != (0,) or len(set(order.keep)) != len(order.keep) or order.joining < 0:
            raise BadInput("keep: ranks of which 0 is the first, each once, at most world_size, are expected")
        return order


@dataclass(frozen=True)
class Forget:
    """Do not become `attempt` any more."""

    attempt: int

    def facts(self) -> Any:
        """What stands behind its key."""
        return {"attempt": self.attempt}

    @classmethod
    def of(cls, facts: Any) -> Forget:
        """The order; raises BadInput."""
        return cls(codec.whole(codec.an_object(facts, "forget"), "attempt"))


@dataclass(frozen=True)
class Pace:
    """Work for this share of the time: 0 is a pause, 1 as usual."""

    share: float

    def facts(self) -> Any:
        """What stands behind its key."""
        return self.share

    @classmethod
    def of(cls, facts: Any) -> Pace:
        """The order; raises BadInput."""
        share = codec.finite(facts, "pace")
        if not 0 <= share <= 1:
            raise BadInput(f"pace {share:g}, not a share of the time, 0 to 1")
        return cls(share)

    def encode(self) -> str:
        """The value of the variable that tells another process of the same attempt (`variables.PACE`)."""
        return repr(float(self.share))

    @classmethod
    def decode(cls, text: str) -> Pace:
        """What the variable says; raises BadInput."""
        return cls.of(codec.parsed(text.encode(errors="replace")))


Order = Union[Suspend, Resize, Forget, Pace]

_KINDS = {"suspend": Suspend, "resize": Resize, "forget": Forget, "pace": Pace}
_KEYS: dict[type, str] = {kind: key for key, kind in _KINDS.items()}


def encode(*orders: Order) -> bytes:
    """Orders in one line, in which each kind may stand once."""
    return codec.line({_KEYS[type(order)]: order.facts() for order in orders})


def decode(data: bytes) -> Sequence[Order]:
    """The orders of a line; those that are not known are passed over. Raises BadInput."""
    table = codec.document(data, most_bytes=codec.LINE_BYTES)
    return [_KINDS[key].of(facts) for key, facts in table.items() if key in _KINDS]  # type: ignore[attr-defined]


def _ranks(value: Any) -> tuple[int, ...]:
    return codec.a_list(value, "keep", codec.a_whole)
