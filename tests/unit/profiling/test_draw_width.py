"""A profile's curve fits its terminal."""

from __future__ import annotations

import pytest

from hpcsched.profiling.draw import curve_of
from hpcsched.store.profiles import load_profiles


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_longer_than_the_terminal(width: int) -> None:
    for profile in load_profiles("marble-summit"):
        lines = curve_of(profile, width).splitlines()
        assert max(map(len, lines[1:])) <= width
        bars = [line.count("#") for line in lines if "<- optimal" in line]
        assert bars and (bars[0] == 40) == (width > 80)
