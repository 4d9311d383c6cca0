"""A process that is to run in a container: which runtime, and what the host starts for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpcsched.contract import variables
from hpcsched.contract.visibility import CUDA
from hpcsched.core.model import Container
from hpcsched.errors import BadEnvironment
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.containers.apptainer import Apptainer
from hpcsched.launch.containers.base import Inside, Runtime
from hpcsched.launch.containers.bubblewrap import Bubblewrap
from hpcsched.launch.containers.enroot import Enroot
from hpcsched.launch.containers.pyxis import Pyxis
from hpcsched.launch.spawn import ProcessStart
from hpcsched.ownership import make_private

RUNTIMES: Mapping[str, Runtime] = {
    "apptainer": Apptainer(),
    "enroot": Enroot(),
    "pyxis": Pyxis(),
    "bubblewrap": Bubblewrap(),
}


def check_image(container: Container) -> None:
    """Raises BadEnvironment where an image that is a file or a folder is not there."""
    if container.image.startswith("/") and not Path(container.image).exists():
        raise BadEnvironment(f"container {container.image}: not there")


def runtime_of(container: Container, path: str) -> tuple[Runtime, str]:
    """The runtime of a container, and its program. Raises BadEnvironment.

    A folder may be of two: it is Apptainer's if that is in `path`.
    """
    check_image(container)
    if container.runtime != "auto":
        names = [container.runtime]
    elif container.image.endswith((".sqsh", ".squashfs")):
        names = ["enroot"]
    elif Path(container.image).is_dir():
        names = ["apptainer", "bubblewrap"]
    else:
        names = ["apptainer"]
    for name in names:
        for program in RUNTIMES[name].programs:
            if found := shutil.which(program, path=path):
                return RUNTIMES[name], found
    wanted = " or ".join(program for name in names for program in RUNTIMES[name].programs)
    raise BadEnvironment(f"container {container.image}: no {wanted} in PATH={path}")


def contained(
    starts: Sequence[ProcessStart], plan: LaunchPlan, inherited: Mapping[str, str]
) -> tuple[list[ProcessStart], bool]:
    """What the host starts so that `starts` run in the plan's container, and whether signals to that reach
    them.

    `inherited` is what processes have of the agent's environment; what they have beyond that holds against
    the image's own variables. Raises LaunchError, OSError.
    """
    container = plan.container
    assert container is not None
    runtime, program = runtime_of(container, inherited.get("PATH", os.defpath))
    return [_one(start, plan, container, runtime, program, inherited) for start in starts], (
        runtime.passes_signals
    )


def _one(
    start: ProcessStart,
    plan: LaunchPlan,
    container: Container,
    runtime: Runtime,
    program: str,
    inherited: Mapping[str, str],
) -> ProcessStart:
    gpus = any(device.handle.startswith((CUDA.whole, CUDA.part)) for device in plan.devices)
    # All of the host are put in; which of them the program uses, CUDA's own variable says.
    env = {**dict(CUDA.hook if gpus else ()), **start.env}
    told = {name for name, value in env.items() if inherited.get(name) != value}
    folders = [str(plan.folder.parent.parent)]
    if checkpoints := env.get(variables.CHECKPOINT_DIR):
        make_private(Path(checkpoints))  # what is mounted has to be there
        folders.append(checkpoints)
    inside = Inside(
        container=container,
        argv=start.argv,
        env=env,
        told=frozenset({*told, *start.inherited} - {"HOME"}),
        cwd=str(start.cwd),
        folders=tuple(folders),
        gpus=gpus,
    )
    outside = runtime.start(inside, program)
    return replace(start, program=program, argv=outside.argv, env=dict(outside.env))
