"""The variables by which a process finds its GPUs and their driver; whether a program has changed them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

from hpcsched.contract.variables import DRIVER_VARIABLES

_PREFIXES = ("CUDA_", "NVIDIA_", "LD_")


def finds_driver(name: str) -> bool:
    """Whether a variable may hide GPUs, or their driver, from a process."""
    return name.startswith(_PREFIXES)


def checksums(environ: Mapping[str, str]) -> dict[str, int]:
    """Those in an environment: a library path may be too long to be told twice."""
    return {
        name: zlib.crc32(value.encode(errors="surrogateescape"))
        for name, value in sorted(environ.items())
        if finds_driver(name)
    }


def told(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that says which of these an attempt was given, each with a checksum of its value, as
    JSON."""
    return {DRIVER_VARIABLES: json.dumps(checksums(environ))}


def changed(environ: Mapping[str, str]) -> list[str]:
    """Names of those that are not as they were given; of all where nobody says, or says what makes no sense,
    how they were."""
    try:
        given = dict(json.loads(environ.get(DRIVER_VARIABLES, "")))
    except (ValueError, TypeError, RecursionError):
        given = {}
    now = checksums(environ)
    return sorted(str(name) for name in {*given, *now} if given.get(name) != now.get(name))
