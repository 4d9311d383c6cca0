"""Versions of the contract, and which get along."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.contract.version import Version, fits
from hpcsched.errors import BadInput

versions = st.builds(Version, st.integers(0, 10**8), st.integers(0, 10**8))


@given(versions)
def test_a_version_is_read_as_it_is_written(version: Version) -> None:
    assert Version.parse(str(version)) == version
    assert fits(version, version) is None


@given(versions, versions)
def test_fitting_is_mutual(one: Version, other: Version) -> None:
    assert (fits(one, other) is None) == (fits(other, one) is None)


@pytest.mark.parametrize(
    ("theirs", "ours", "why"),
    [
        ("1.2", "1.2", None),
        ("1.1", "1.2", None),
        ("1.3", "1.2", None),
        ("1.0", "1.2", "version 1.0 of the contract is there; 1.1 to 1.3 is needed"),
        ("1.4", "1.2", "version 1.4 of the contract is there; 1.1 to 1.3 is needed"),
        ("2.0", "1.0", "version 2.0 of the contract is there; 1.0 to 1.1 is needed"),
        ("0.0", "1.0", "version 0.0 of the contract is there; 1.0 to 1.1 is needed"),
    ],
)
def test_the_same_major_number_fits_and_the_next_minor_one(theirs: str, ours: str, why: str | None) -> None:
    assert fits(Version.parse(theirs), Version.parse(ours)) == why


@pytest.mark.parametrize(
    "text", ["", "1", "1.", "1.0.0", "v1.0", "01.0", "1.-1", "1.0\n", "\u0661.\u0660", "9" * 5000]
)
def test_what_is_no_version_is_bad_input(text: str) -> None:
    with pytest.raises(BadInput, match=r"is no version of the contract, such as 1\.1"):
        Version.parse(text)
