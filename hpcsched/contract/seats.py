"""Seats: the processes of a job on CPU cores, by rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpcsched.contract import codec
from hpcsched.errors import BadInput


@dataclass(frozen=True)
class Seat:
    """One process of a job on CPU cores: a parameter server or a worker, and what it may use (NEARCHUS,
    section IV: a training node and its part of the DT-config).

    `share` is how many cores' time it may use, `cores` which ones of its `host` (empty: any).
    """

    server: bool
    share: float
    host: str = ""
    cores: tuple[int, ...] = ()


def to_table(seats: Sequence[Seat]) -> list[dict[str, Any]]:
    """Their JSON form."""
    return [{**asdict(seat), "cores": list(seat.cores)} for seat in seats]


def of_table(value: Any) -> tuple[Seat, ...]:
    """Seats in their JSON form; raises BadInput."""
    return codec.a_list(value, "seats", _seat)


def _seat(value: Any, where: str) -> Seat:
    table = codec.an_object(value, where)
    share = codec.number(table, "share")
    if share < 0:
        raise BadInput(f"share {share:g}, not 0 or more cores")
    return Seat(
        server=codec.flag(table, "server"),
        share=share,
        host=codec.text(table, "host", ""),
        cores=codec.part(table, "cores", _cores, ()),
    )


def _cores(value: Any) -> tuple[int, ...]:
    return codec.a_list(value, "cores", codec.a_whole)
