"""Files that come with hpcsched beside the package: profiles, and settings of sites."""

from __future__ import annotations

from pathlib import Path


def shipped(folder: str, suffix: str) -> dict[str, Path]:
    """Those of a folder of the repository, such as `profiles`: by bare name, in alphabetical order."""
    found: dict[str, Path] = {}
    for place in _folders(Path(__file__).resolve().parents[1]):
        for path in (place / folder).glob(f"*{suffix}"):
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def _folders(beside: Path) -> list[Path]:
    """Where they may be, if the package is in the folder `beside`.

    An editable install reads the repository, `pip install --target` keeps them beside the package, and every
    other installation in its prefix: `beside` is PREFIX/lib/python3.X/site-packages. That is not always the
    prefix of the Python that runs: with EasyBuild, Spack and `pip install --user` it is a folder of its own.
    """
    share = Path("share", "hpcsched")
    places = [beside, beside / share]
    if beside.name in ("site-packages", "dist-packages"):
        places.append(beside.parents[2] / share)
    return places
