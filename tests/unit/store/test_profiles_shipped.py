"""The data files that come with hpcsched: readable, explained, and true to the rules of a profile."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest
from places import ROOT

from hpcsched.store.profiles import choose, load_profiles

FILES = sorted((ROOT / "profiles").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_file_is_found_by_name_and_explained(path: Path) -> None:
    profiles = load_profiles(path.stem)
    assert profiles == load_profiles(path)
    assert f"`{path.name}`" in (ROOT / "profiles" / "README.md").read_text()
    for profile in profiles:
        assert profile.note and profile.source in ("published", "fitted")
        assert choose(profiles, profile.model, profile.device) == profile


def test_the_readme_counts_the_profiles() -> None:
    text = (ROOT / "profiles" / "README.md").read_text()
    counts = Counter({path.stem: len(load_profiles(path)) for path in FILES})
    assert f"| {counts['gavel-v100']}, {counts['gavel-p100']}, {counts['gavel-k80']} |" in text
    for name in ("marble-summit", "pollux-t4", "tf-benchmarks-2017"):
        assert f"`{name}.json` | {counts[name]} |" in text


def test_marble_has_the_optimal_counts_of_the_paper() -> None:
    found = {p.model: p.optimal(6) for p in load_profiles("marble-summit")}
    assert found == {"ResNet-50": 3, "Inception-v3": 4, "VGG-16": 5, "ResNet-101": 3}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "jobscripts" / "marble").glob("*.toml")), ids=lambda p: p.stem
)
def test_the_job_sets_use_the_marble_profiles(path: Path) -> None:
    models = {p.model for p in load_profiles("marble-summit")}
    whole = tomllib.loads(path.read_text())
    jobs = whole["job"]
    assert whole["schema"] == 1 and len(jobs) == len({job["name"] for job in jobs}) == 3
    assert all(job["model"] in models and job["replay"] and job["steps"] > 0 for job in jobs)
