"""What is experimental: the one table behind the marks in `--help`, docs/stability.md and the tests.

A feature is experimental until it has run on what it is for. When it has, its entry goes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MARK = "[experimental]"


class Feature(NamedTuple):
    """`name` and `why` stand in docs/stability.md, `pages` (of the documentation) link to it.

    In help texts each of `words`, and the text of each of `commands`, is followed by the mark.
    """

    name: str
    why: str
    pages: tuple[str, ...]
    words: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


EXPERIMENTAL = (
    Feature(
        "GPUs",
        "NVML, CUDA and NCCL are tested against stand-ins",
        pages=("install.md", "resizing.md"),
        words=("cuda[:N]",),
    ),
    Feature("MIG", "no GPU with instances has been at hand", pages=("install.md",)),
    Feature(
        "Background jobs on GPUs",
        "the modes `streams`, `green` and `mps` are tested with stand-ins; not experimental on CPU slots",
        pages=("lanes.md",),
    ),
    Feature(
        "Burst parallelism on GPUs",
        "plans are carried out with gloo on CPU slots; NCCL has not been used",
        pages=("burst.md", "layer-profiles.md"),
        commands=("profile layers",),
    ),
    Feature(
        "Packing on GPUs",
        "the modes `streams` and `graph` are tested with stand-ins; not experimental on CPU slots",
        pages=("packing.md", "packing-profiles.md"),
        commands=("profile pack",),
    ),
    Feature(
        "Sharing GPUs",
        "tested with stand-ins, MPS and MIG instances too; not experimental on CPU slots",
        pages=("sharing.md",),
    ),
    Feature(
        "Adaptive batches on GPUs",
        "several workers at once on a GPU are tested with stand-ins",
        pages=("adaptive-batches.md", "worker-profiles.md"),
        commands=("profile vsw",),
    ),
    Feature(
        "LSF",
        "written from its documentation and tested under a stand-in, with `blaunch` and `jsrun`",
        pages=("lsf.md",),
        words=("LSF", "lsf", "blaunch", "jsrun"),
    ),
    Feature(
        "SGE",
        "tried on Son of Grid Engine 8.1.9, on two virtual hosts with pretended GPUs",
        pages=("sge.md",),
        words=("SGE", "sge", "qrsh"),
    ),
    Feature(
        "Batch systems of other packages",
        "the entry point `hpcsched.batch` is tested with a stand-in; nobody has written one yet",
        pages=("sge.md",),
    ),
    Feature(
        "Nodes given back",
        "tried on Slurm 22.05 with virtual nodes and no accounting database; never on an LSF",
        pages=("slurm.md",),
        words=("are given back",),
    ),
    Feature(
        "Hosts that come and go",
        "tried on one machine and on a small Slurm, not yet on a large one",
        pages=("several-hosts.md",),
        words=("`hpcsched join`",),
        commands=("join",),
    ),
    Feature(
        "Allocations as needed",
        "tried on a small Slurm with stand-ins for trainings, not yet on a large one",
        pages=("pool.md",),
        commands=("pool",),
    ),
    Feature(
        "Saving from outside",
        "`suspend_command` and `resume_command` are tested with programs that stand for CRIU and DMTCP",
        pages=("troubleshooting.md",),
    ),
)

_WORDS = tuple(word for feature in EXPERIMENTAL for word in feature.words)
# As a word of its own, and not inside a name such as n1,lsf-test or lsf.sub.
_WORD = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, _WORDS))})(?![\w/-]|\.\w|\s\[exp)")


def marked(text: str, *, command: str = "") -> str:
    """A help text with the mark behind what is experimental in it, or at its end where `command` (as in
    `profile pack`) is so itself."""
    text = _WORD.sub(rf"\1 {MARK}", text)
    if any(command in feature.commands for feature in EXPERIMENTAL) and not text.endswith(MARK):
        text = f"{text.rstrip()} {MARK}"
    return text
