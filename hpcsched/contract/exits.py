"""Exit codes: 0 is done, these say more, and any other code is a failure."""

from __future__ import annotations

SUSPENDED = 75
"""A program has saved and left (EX_TEMPFAIL)."""

WRONG_CONTRACT = 76
"""A worker and the agent that has started it do not fit: see `contract.version` (EX_PROTOCOL)."""

CANNOT_SAVE = 74
"""A program was asked to save, and could not (EX_IOERR)."""

NO_GPU = 69
"""A program cannot use the GPU that it was given (EX_UNAVAILABLE)."""

REFUSED = 2
"""A program's arguments or surroundings are wrong: they are the same the next time."""

WORK_LEFT = 75
"""Of `hpcsched run` itself: it has stopped, and its run can be gone on with (EX_TEMPFAIL)."""
