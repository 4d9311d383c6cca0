"""An attempt that is under way in a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from hpcsched.planning.jobs.course import Course


@dataclass(slots=True)
class UnderWay:
    """One attempt under way: its course, when it began, and which scheduled event of its end still counts.

    While it is being resized in place, `course` ends where it stands still for that, and `whole` is as it
    would be without. `factor` is the share of its own speed that it has, as others share its GPUs; the course
    is as if it had always had that. `leaves`: it has been asked to, or told to end.
    """

    attempt: int
    launched: float
    course: Course
    ticket: int
    whole: Course | None = None
    factor: float = 1.0
    leaves: bool = False
