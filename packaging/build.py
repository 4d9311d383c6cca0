"""Build the distributions, sdist and wheel of each, all from this tree.

    python packaging/build.py [--out DIR] [hpcsched] [hpcsched-worker] [hydra-hpcsched-launcher]

The interpreter needs `build` and `setuptools`, which are among the development dependencies: nothing is
fetched. The same tree gives the same wheels, bit for bit: what is in them is as old as the release that
CITATION.cff names, or SOURCE_DATE_EPOCH (seconds, Unix).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import closure

WORKER = "hpcsched-worker"
HYDRA = "hydra-hpcsched-launcher"
DISTRIBUTIONS = ("hpcsched", WORKER, HYDRA)


def stage(folder: Path, root: Path = closure.ROOT) -> None:
    """Lay the source tree of hpcsched-worker into an empty folder."""
    for name in [*closure.files(root), *map(Path, closure.DATA)]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, folder / name)
    for name in ("packaging/worker/pyproject.toml", "packaging/worker/README.md", "LICENSE"):
        shutil.copyfile(root / name, folder / Path(name).name)


def stage_hydra(folder: Path, root: Path = closure.ROOT) -> None:
    """Lay the source tree of hydra-hpcsched-launcher into an empty folder."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(root / "packaging/hydra", folder, ignore=ignored, dirs_exist_ok=True)
    shutil.copyfile(root / "LICENSE", folder / "LICENSE")


def build(source: Path, out: Path) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    env = {"SOURCE_DATE_EPOCH": str(released()), **os.environ}
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)


def released(root: Path = closure.ROOT) -> int:
    """When this version was released (Unix time of that day, UTC)."""
    said = re.search(r"^date-released: ([0-9-]+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    assert said is not None
    return int(datetime.fromisoformat(f"{said[1]}T00:00:00+00:00").timestamp())


def main() -> None:
    parser = argparse.ArgumentParser(description="Build sdist and wheel of the distributions.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(DISTRIBUTIONS)}; all if none"
    )
    parser.add_argument("--out", type=Path, default=Path("dist"), help="where to; dist by default")
    given = parser.parse_args()
    if unknown := set(given.names) - {*DISTRIBUTIONS}:
        parser.error(
            f"no such distribution: {', '.join(sorted(unknown))}; there are {', '.join(DISTRIBUTIONS)}"
        )
    os.umask(0o022)  # archives say who may read their files
    for name in given.names or DISTRIBUTIONS:
        if name in (WORKER, HYDRA):
            with tempfile.TemporaryDirectory() as folder:
                (stage if name == WORKER else stage_hydra)(Path(folder))
                build(Path(folder), given.out.resolve())
        else:
            build(closure.ROOT, given.out.resolve())


if __name__ == "__main__":
    main()
