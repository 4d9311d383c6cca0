"""Enroot: every step of it is an exec, so that in the end the process is the program itself.

Of the host's environment the program has what `--env` names, and no more (`enroot start`, "Usage"). The
image's own start script runs first, in the root folder.
"""

from __future__ import annotations

import re

from hpcsched.errors import LaunchError
from hpcsched.launch.containers.base import Inside, Outside

_NAME = re.compile(r"[A-Za-z_]\w*")


class Enroot:
    """`enroot start`: a container by its name, or an image file (.sqsh)."""

    programs = ("enroot",)
    passes_signals = True

    def start(self, inside: Inside, program: str) -> Outside:
        """See `base.Runtime`."""
        argv = [program, "start"]
        for outside, at, mode in inside.mounts:
            if any(letter in outside + at for letter in ": \t\n"):
                raise LaunchError(f"enroot cannot mount {outside!r}: no spaces and colons", transient=False)
            argv += ["--mount", f"{outside}:{at}:none:x-create=auto,rbind,{mode}"]
        for name in sorted(name for name in inside.told if _NAME.fullmatch(name)):
            argv += ["--env", name]
        argv += [*inside.container.options, inside.container.image]
        argv += ["sh", "-c", 'cd "$0" && exec "$@"', inside.cwd, *inside.argv]
        return Outside(argv=tuple(argv), env=inside.env)
