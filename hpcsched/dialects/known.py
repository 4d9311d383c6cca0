"""What is known of how each framework saves: data, from the sources of the versions in docs/dialects.md."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hpcsched.core.model import Restart

_ALL = (
    Restart(speaks="accelerate", signal="", complete="random_states_0.pkl"),
    # Outside Slurm, SIGUSR1 ends it at once; in Slurm, it would requeue the whole batch job.
    Restart(speaks="lightning", signal=""),
    Restart(speaks="nanogpt", signal="", resume_args=("--init_from=resume",)),
    Restart(speaks="nemo", signal="SIGTERM"),
    # A checkpoint has another name until it is whole.
    Restart(speaks="orbax", signal=""),
    # It passes SIGTERM by. SIGUSR1, as its older versions had it, may be caught by NCCL.
    Restart(speaks="submitit", signal="SIGUSR2", saved_codes=(144,)),
    Restart(speaks="torchrun-snapshot", signal=""),
    Restart(speaks="transformers", signal="", complete="trainer_state.json"),
)

KNOWN: Mapping[str, Restart] = MappingProxyType({one.speaks: one for one in _ALL})
"""Each dialect as far as it is the same for all programs. `signal` of those that can be told to save on one
("transformers", "lightning") is found in the program."""

NAMES: tuple[str, ...] = tuple(sorted(KNOWN))
"""What `speaks` may say, besides "none"."""
