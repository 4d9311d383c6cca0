"""Fixtures of the tests under the stand-in of LSF."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lsfsite import Site
from lsfstandin import Cluster


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """Makes a cluster of these hosts and settings, and a user's directory there."""
    clusters: list[Cluster] = []
    folders: list[str] = []

    def make(*hosts: str, **settings: Any) -> Site:
        folders.append(tempfile.mkdtemp(prefix="lsf-"))  # short: it holds a socket
        clusters.append(Cluster(Path(folders[-1]), hosts, **settings))
        return Site(clusters[-1], tmp_path)

    yield make
    for cluster in clusters:
        cluster.close()
    for folder in folders:
        shutil.rmtree(folder)
