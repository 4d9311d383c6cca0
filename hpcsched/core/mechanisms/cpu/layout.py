"""Seats in words and in sums: how many servers and workers a job on CPU cores has, on how many cores."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from hpcsched.contract.seats import Seat


def cores_of(seats: Sequence[Seat]) -> float:
    """The cores of all seats together."""
    return sum(seat.share for seat in seats)


def counted(seats: Sequence[Seat]) -> tuple[int, int]:
    """How many servers and workers there are."""
    servers = sum(seat.server for seat in seats)
    return servers, len(seats) - servers


def said_seats(seats: Sequence[Seat]) -> str:
    """The configuration in the paper's terms, with the mean share of each kind; `program`: one that is
    neither."""
    kinds = [
        ("server", [s.share for s in seats if s.server]),
        ("worker", [s.share for s in seats if not s.server]),
    ]
    if len(seats) == 1:
        return f"1 program x {seats[0].share:.4g}"
    return " + ".join(
        f"{len(shares)} {name}{'s' * (len(shares) != 1)} x {round(fmean(shares), 2):.4g}"
        for name, shares in kinds
        if shares
    )
