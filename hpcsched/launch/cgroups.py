"""The cgroups that this process is in, and the one (v2) in which it may make others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def own_cgroups(root: Path = Path("/")) -> list[Path]:
    """The folders of our cgroup and of those above it, the nearest first; none where there is no cgroup v2.

    `root`: the folder of /proc and /sys.
    """
    return _places(root, lambda kinds: kinds == [""], lambda mount: " - cgroup2 " in mount)


def own_cgroup_v1(root: Path, controller: str) -> Path | None:
    """The folder of our cgroup with this controller in a cgroup v1; None where there is none."""

    def has_it(mount: str) -> bool:
        kind, _, rest = mount.partition(" - ")[2].partition(" ")
        return kind == "cgroup" and controller in rest.split(" ")[-1].split(",")

    return next(iter(_places(root, lambda kinds: controller in kinds, has_it)), None)


def _places(root: Path, is_own: Callable[[list[str]], bool], is_mount: Callable[[str], bool]) -> list[Path]:
    """The folders from our cgroup up to the top of its hierarchy: that with these controllers, so mounted."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    parts = [line.split(":", 2) for line in lines if line.count(":") > 1]
    own = next((Path(path) for _, kinds, path in parts if is_own(kinds.split(","))), None)
    mount = next((line.split() for line in mounts if is_mount(line)), None)
    if own is None or mount is None or not own.is_relative_to(mount[3]) or ".." in own.parts:
        return []
    top = root / mount[4].lstrip("/")
    here = top / own.relative_to(mount[3])
    places = [here, *here.parents]
    return places[: places.index(top) + 1]


def delegated_cgroup(root: Path = Path("/"), controller: str = "cpu") -> Path | None:
    """The nearest of our cgroups in which we may make others with this controller; None without one.

    It may be written to, and has the controller enabled for its children.
    """
    for place in own_cgroups(root):
        with contextlib.suppress(OSError):
            enabled = (place / "cgroup.subtree_control").read_text().split()
            # To move a process is to write to the cgroup above both where it is and where it goes.
            writable = os.access(place, os.W_OK) and os.access(place / "cgroup.procs", os.W_OK)
            if controller in enabled and writable:
                return place
    return None
