"""What ships beside the package is found whatever way it was installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsched import shipped


@pytest.mark.parametrize(
    ("package", "files"),
    [
        ("apps/lib/python3.12/site-packages", "apps/share/hpcsched"),
        ("usr/local/lib/python3.12/dist-packages", "usr/local/share/hpcsched"),
        ("target", "target/share/hpcsched"),
        ("checkout", "checkout"),
    ],
)
def test_files_are_found_beside_the_package_or_in_its_prefix(
    package: str, files: str, tmp_path: Path
) -> None:
    place = tmp_path / files / "site-config" / "ours.toml"
    place.parent.mkdir(parents=True)
    place.touch()
    found = [folder / "site-config" / "ours.toml" for folder in shipped._folders(tmp_path / package)]
    assert [path for path in found if path.exists()] == [place]


def test_no_folder_above_a_checkout_is_searched() -> None:
    folders = shipped._folders(Path("/tmp/somebody/hpcsched"))
    assert all(folder.is_relative_to("/tmp/somebody/hpcsched") for folder in folders)
