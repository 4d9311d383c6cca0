"""Recipes of package managers for the distributions in a folder: conda, Spack and EasyBuild.

    python packaging/recipes.py [DIST]

Fills packaging/recipes/*.in with the version, what pyproject.toml asks for, and the hashes of the archives in
DIST (dist by default); the results are in DIST/recipes. `make dist` does so.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hpcsched import __version__  # noqa: E402

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = {extra: PROJECT["optional-dependencies"][extra] for extra in ("report", "plan")}
"""Those that a site may want. torch is a package of its own everywhere, chosen by the site's GPUs."""

SPACK = "spack/spack_repo/hpcsched"
PLACES = {
    "recipe.yaml": "conda/recipe.yaml",
    "package.py": f"{SPACK}/packages/hpcsched/package.py",
    "hpcsched.eb": f"easybuild/hpcsched-{__version__}-GCCcore-13.3.0.eb",
}


def filled(sdist_sha256: str, wheel_sha256: str) -> dict[str, str]:
    """Each recipe's file, relative to the folder of recipes, with its text."""
    words = {
        "VERSION": __version__,
        "DESCRIPTION": PROJECT["description"],
        "PYTHON": PROJECT["requires-python"].removeprefix(">="),
        "SDIST_SHA256": sdist_sha256,
        "WHEEL_SHA256": wheel_sha256,
        "SETUPTOOLS": at_least(PYPROJECT["build-system"]["requires"][0])[1],
        **_conda(),
        **_spack(),
    }
    found = {f"{SPACK}/repo.yaml": "repo:\n  namespace: hpcsched\n  api: v2.0\n"}
    for name, place in PLACES.items():
        text = (ROOT / "packaging" / "recipes" / f"{name}.in").read_text()
        found[place] = re.sub(r"@([A-Z_0-9]+)@", lambda match: words[match[1]], text)
    return found


def at_least(requirement: str) -> tuple[str, str]:
    """The name and the lowest version of such as `click>=8.1`; these recipes know no other form."""
    match = re.fullmatch(r"([A-Za-z0-9-]+)>=([0-9.]+)", requirement)
    if match is None:
        raise SystemExit(f"{requirement}: packaging/recipes.py only knows NAME>=VERSION")
    return match[1].lower(), match[2]


def _conda() -> dict[str, str]:
    needed = [at_least(line) for line in PROJECT["dependencies"]]
    optional = {name: lowest for lines in EXTRAS.values() for name, lowest in map(at_least, lines)}
    return {
        "CONDA_RUN": "\n".join(f"    - {name} >={lowest}" for name, lowest in needed),
        "CONDA_CONSTRAINTS": "\n".join(f"    - {_CONDA.get(n, n)} >={v}" for n, v in optional.items()),
    }


_CONDA = {"matplotlib": "matplotlib-base"}
"""Names that differ from those in pyproject.toml."""


def _spack() -> dict[str, str]:
    lines = [f'depends_on("py-{name}@{v}:")' for name, v in map(at_least, PROJECT["dependencies"])]
    for extra, asked in EXTRAS.items():
        lines += [f'depends_on("py-{name}@{v}:", when="+{extra}")' for name, v in map(at_least, asked)]
    return {"SPACK_DEPENDENCIES": "\n".join(f"        {line}" for line in lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Recipes of package managers for the built distributions.")
    parser.add_argument(
        "dist", nargs="?", type=Path, default=Path("dist"), help="where these are; dist by default"
    )
    dist = parser.parse_args().dist
    archives = f"hpcsched-{__version__}.tar.gz", f"hpcsched-{__version__}-py3-none-any.whl"
    hashes = [hashlib.sha256((dist / name).read_bytes()).hexdigest() for name in archives]
    shutil.rmtree(dist / "recipes", ignore_errors=True)
    for name, text in filled(*hashes).items():
        place = dist / "recipes" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


if __name__ == "__main__":
    main()
