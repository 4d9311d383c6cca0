"""The parts of the core, put together: each is handed those that it needs."""

from __future__ import annotations

from dataclasses import dataclass

from hpcsched.core.mechanisms.own_gpus import OwnGpus
from hpcsched.core.resources.ledger import Ledger
from hpcsched.core.resources.rooms import Rooms
from hpcsched.core.run import Run
from hpcsched.core.transitions.attempts import Attempts
from hpcsched.core.transitions.deadline import Deadline
from hpcsched.core.transitions.decisions import Decisions, PolicyMaker
from hpcsched.core.transitions.endings import Endings
from hpcsched.core.transitions.estimates import Estimates
from hpcsched.core.transitions.host_ends import HostEnds
from hpcsched.core.transitions.outcome import Outcome
from hpcsched.core.transitions.waiting import Waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What all of the core goes by, and what a mechanism is made of."""

    run: Run
    out: Outcome
    ledger: Ledger
    rooms: Rooms
    own: OwnGpus
    estimates: Estimates
    waiting: Waiting
    ends: HostEnds
    deadline: Deadline
    attempts: Attempts
    endings: Endings
    decisions: Decisions


def make_parts(make_policy: PolicyMaker, *, stories: bool) -> Parts:
    """The parts of a run that has not begun; `ledger.install` is still to be called."""
    run, ledger = Run(), Ledger()
    out = Outcome(run, stories=stories)
    estimates = Estimates(run, out, ledger)
    ends = HostEnds(run, ledger, estimates)
    rooms = Rooms(run, ledger, estimates, ends.too_short)
    own = OwnGpus(run, out, ledger, rooms)
    waiting = Waiting(run, out, ledger)
    deadline = Deadline(run, out, ledger, estimates, waiting)
    attempts = Attempts(run, out, ledger, estimates=estimates, waiting=waiting, deadline=deadline, ends=ends)
    return Parts(
        run=run,
        out=out,
        ledger=ledger,
        rooms=rooms,
        own=own,
        estimates=estimates,
        waiting=waiting,
        ends=ends,
        deadline=deadline,
        attempts=attempts,
        endings=Endings(run, out, ledger, estimates=estimates, waiting=waiting, attempts=attempts),
        decisions=Decisions(
            run,
            out,
            ledger,
            own=own,
            rooms=rooms,
            make_policy=make_policy,
            estimates=estimates,
            waiting=waiting,
            deadline=deadline,
            ends=ends,
            attempts=attempts,
        ),
    )
