"""Ways of making steps that only GPUs have (placeholder)."""

from __future__ import annotations

from hpcsched.worker.packed.failures import Refused
from hpcsched.worker.packed.modes import Batches, Loop


class Streams(Loop):
    def __init__(self, members):
        raise Refused("needs a GPU")


class Graph(Loop):
    def __init__(self, members, batches):
        raise Refused("needs a GPU")
