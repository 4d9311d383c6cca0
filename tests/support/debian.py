"""Programs of Debian's packages that tests run: installed where that is allowed, else the test is skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection

import pytest


def need(programs: Collection[str], packages: Collection[str]) -> None:
    """Have these programs in PATH; skips, with a word, where they cannot be had."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    if all(shutil.which(name, path=path) for name in programs):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip(f"no {', '.join(sorted(programs))} here: install {', '.join(packages)}")
    install = ("apt-get", "-y", "install", "--no-install-recommends", *packages)
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (install, ("apt-get", "update"), install):
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
        if command is install and ended.returncode == 0:
            return
    why = (ended.stderr.strip().splitlines() or ["?"])[-1]
    pytest.skip(f"{', '.join(packages)} cannot be installed: {why}")
