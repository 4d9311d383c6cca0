"""Checks of jobs together: names, waits in a circle, and whether there are so many GPUs."""

from __future__ import annotations

import graphlib
from collections.abc import Collection, Iterable, Sequence, Set

from hpcsched.contract import schema
from hpcsched.core.model import JobSpec
from hpcsched.core.nouns import GPU


def check_names(
    specs: Sequence[JobSpec], *, where: str, known: Collection[str] = (), again: bool = False
) -> None:
    """Refuse duplicate names, unknown names in `after`, and cycles. `known` are the run's jobs so far;
    `again`: jobs may be among them."""
    known = known if isinstance(known, Set) else frozenset(known)  # not copied: there may be very many
    names = set[str]()
    for spec in specs:
        if spec.name in names or (spec.name in known and not again):
            got = "in the run already" if spec.name in known else "given twice"
            schema.refuse(where, f"job {spec.name}.name", got, "a name that no other job has")
        names.add(spec.name)
    for spec in specs:
        for other in spec.after:
            if other not in names and other not in known:
                accepted = ", ".join(sorted((names | known) - {spec.name})[:8]) or "names of other jobs"
                schema.refuse(where, f"job {spec.name}.after", f"{other!r} is no job", accepted)
    try:
        graphlib.TopologicalSorter({s.name: s.after for s in specs}).prepare()
    except graphlib.CycleError as error:
        circle = " after ".join(reversed(error.args[1]))
        schema.refuse(where, "after", f"a cycle: {circle}", "jobs that do not wait for each other")


def check_fits(
    specs: Iterable[JobSpec],
    *,
    gpus: int,
    hosts: int,
    where: str,
    noun: str = GPU,
    here: str = "so many are here",
) -> None:
    """Refuse jobs that ask for more GPUs (people call each a `noun`) or hosts than there are; `here` are the
    words for that."""
    for spec in specs:
        if spec.gpus_min > gpus:
            schema.refuse(
                where,
                f"job {spec.name}.gpus",
                f"{spec.gpus_min} {noun}s",
                f"at most {gpus}: {here}",
            )
        if spec.nodes > hosts:
            schema.refuse(where, f"job {spec.name}.nodes", f"{spec.nodes} hosts", f"at most {hosts}: {here}")
