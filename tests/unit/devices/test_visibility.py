"""Names that show and hide GPUs stand in one place."""

from __future__ import annotations

import re
from pathlib import Path

import hpcsched
from hpcsched.contract.visibility import CUDA, OF_BATCH_STEPS

PACKAGE = Path(hpcsched.__file__).parent
PLACE = PACKAGE / "contract" / "visibility.py"
LITERALS = re.compile(
    r"[\"'](?:\w+_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|PCI_BUS_ID|GPU_DEVICE_ORDINAL|MIG-|/dev/(?:nvidia|kfd|dri))"
)


def test_no_other_module_has_the_names() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        if path != PLACE
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if LITERALS.search(line)
    }
    assert not found


def test_the_search_finds_them() -> None:
    assert len(LITERALS.findall(PLACE.read_text())) >= 6


def test_a_uuid_is_told_by_its_beginning() -> None:
    names = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-5a", "3", "4-7,12-15,20-23")
    assert [CUDA.short(name) for name in names] == ["GPU-8932f937", "MIG-5a", "3", "4-7,12-15,20-23"]


def test_what_hides_gpus() -> None:
    assert CUDA.hidden()[CUDA.variable] in CUDA.none
    assert CUDA.hidden()["HIP_VISIBLE_DEVICES"] == "-1", "HIP takes an empty list for all"
    assert CUDA.variable in OF_BATCH_STEPS
