"""What is no single job's in the environment of a pack's process. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from hpcsched.contract import variables
from hpcsched.contract.ranks import tells_rank

_KEPT = frozenset({variables.RUN_ID, variables.NODE, variables.CUDA_DEVICES})
"""Of what a job is told, what its host is told too: who ends what a run has left behind looks for these, and
which GPU it is to use."""


def common(environ: Mapping[str, str]) -> dict[str, str]:
    """What is no single job's in an environment: a host has this, and takes members in that have the same."""
    return {
        name: value
        for name, value in environ.items()
        # LC_CTYPE is set by an interpreter that starts from nothing, not by one that was forked.
        if name in _KEPT or not (name.startswith(variables.PREFIX) or tells_rank(name) or name == "LC_CTYPE")
    }
