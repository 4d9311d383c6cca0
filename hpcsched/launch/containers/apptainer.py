"""Apptainer, and Singularity from which it comes.

The runtime stays as the parent of the program: it passes signals on and ends with the program's exit code.
Descriptors, the host's process ids and its environment are seen inside. Of variables that the image sets too
the image's counts, unless they are called APPTAINERENV_<NAME> outside (user guide, "Environment and
Metadata").
"""

from __future__ import annotations

from pathlib import PurePath

from hpcsched.launch.containers.base import Inside, Outside


class Apptainer:
    """`apptainer exec`: an image file (.sif), a folder, or an address such as docker://."""

    programs = ("apptainer", "singularity")
    passes_signals = True

    def start(self, inside: Inside, program: str) -> Outside:
        """See `base.Runtime`."""
        prefix = "SINGULARITYENV_" if PurePath(program).name == "singularity" else "APPTAINERENV_"
        argv = [program, "exec", "--pwd", inside.cwd]
        argv += [word for mount in inside.mounts for word in ("--bind", ":".join(mount))]
        argv += ["--nv"] if inside.gpus else []
        argv += [*inside.container.options, inside.container.image, *inside.argv]
        held = {f"{prefix}{name}": inside.env[name] for name in inside.told if name in inside.env}
        return Outside(argv=tuple(argv), env={**inside.env, **held})
