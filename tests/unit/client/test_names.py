"""Names that are made for jobs."""

from __future__ import annotations

import re

import pytest

from hpcsched.client.names import of_array
from hpcsched.errors import ConfigError


def test_labels_are_cut_off_as_long_as_names_stay_different() -> None:
    assert of_array("n" * 62, ["1", "2"], where="map") == ["n" * 62 + "-1", "n" * 62 + "-2"]
    assert of_array("n" * 61, ["a1", "a/2", "a2"], where="map")[1:] == ["n" * 61 + "-a-", "n" * 61 + "-a2"]


@pytest.mark.parametrize(
    ("name", "labels", "accepted"),
    [
        ("n" * 63, ["1", "2"], "at most 62 characters"),
        ("n" * 99, ["1", "2"], "at most 62 characters"),
        ("n" * 62, [str(number) for number in range(1, 13)], "at most 61 characters"),
        ("n", ["a" * 70, "a" * 71], "labels that differ in their first characters"),
    ],
)
def test_a_name_that_leaves_no_room_for_labels_is_too_long(
    name: str, labels: list[str], accepted: str
) -> None:
    said = f"map: name: too long with {len(name)} characters.*accepted: {re.escape(accepted)}$"
    with pytest.raises(ConfigError, match=said):
        of_array(name, labels, where="map")
