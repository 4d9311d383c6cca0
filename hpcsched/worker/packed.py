"""Several trainings as one on a device: `load` brings one there, `pack` lets them share it, `free` takes one
out (pack, section 2.2).

    first, second = (load(Digits().build(args)) for args in configurations)
    together = pack([first, second])
    while first.session.step < 100:
        together.step()
    checkpoint = free(first, together)       # the other one goes on
"""

from __future__ import annotations

from hpcsched.worker.packing.api import free, load, pack
from hpcsched.worker.packing.engine import OutOfMemory, Pack
from hpcsched.worker.packing.failures import Failed
from hpcsched.worker.packing.member import Member

__all__ = ["Failed", "Member", "OutOfMemory", "Pack", "free", "load", "pack"]
