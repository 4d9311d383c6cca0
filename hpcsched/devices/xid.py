"""NVIDIA's Xid errors: whether a GPU, or only a program on it, cannot go on.

Numbers and groups are those of "Analyzing Xid Errors with the Xid Catalog" in NVIDIA's documentation of Xid
errors (the column of the immediate action); the applications' ones also those that NVIDIA's device plugin for
Kubernetes passes over. From driver R570 on the driver itself says what a GPU needs (its *recovery action*,
which Xid 154 tells the change of), and that counts for all numbers that stand in no group here.
"""

from __future__ import annotations

from enum import Enum

FATAL_XIDS = {
    46: "GPU stopped processing",
    62: "micro-controller halted",
    64: "a memory row could not be remapped",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    110: "security fault",
    119: "GSP does not answer",
    120: "GSP error",
    136: "link training failed",
    140: "unrecovered memory error",
    143: "GPU initialisation failed",
    151: "key rotation error",
    158: "fatal timeout of the GPU",
}
"""The GPU has to be reset, or the host to be restarted, before anything runs on it again."""

APPLICATION_XIDS = frozenset(
    {
        *(8, 13, 31, 32, 43, 45, 69, 80),  # faults of a channel: engine exception, page fault, its clean-up
        *(39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)),  # copy engines
        *(65, 68, 82, 83, 84, 86, 88, 89, *range(96, 106), 139),  # video, JPEG and optical flow engines
        60,  # a video processor's
        94,  # a memory error that was contained: its program ends, and the page is taken out of use
        109,  # a context switch took too long; from R570 on the driver says where that needs a reset
    }
)
"""The program ends with an error; what starts there next is well."""

INFORMATIONAL_XIDS = frozenset(
    {
        63,  # a memory row was remapped: the repair itself
        *(66, 67, 93, 106, 107, 141, 152, 153, 157, 160, 161),
        92,  # many single-bit errors, all of which were corrected
        *(108, 137),  # a peer's access over NVLink was refused: a sequel of that peer's own error
        121,  # an error of the link between CPU and GPU that was corrected
        154,  # the recovery action has changed, which we ask the driver for
    }
)
"""Nothing is lost by these: they tell of a repair, or of another error."""


class Xid(Enum):
    """What an Xid says about the GPU."""

    FATAL = "fatal"
    HARMLESS = "harmless"
    DRIVER_KNOWS = "driver knows"
    """The number alone does not tell: errors of memory (48) and links (74, 144 to 150), and new numbers."""


def judged(number: int) -> Xid:
    """What an Xid of that number says."""
    if number in FATAL_XIDS:
        return Xid.FATAL
    return Xid.HARMLESS if number in APPLICATION_XIDS | INFORMATIONAL_XIDS else Xid.DRIVER_KNOWS


def in_words(number: int) -> str:
    """The Xid for people."""
    return f"Xid {number}" + (f" ({FATAL_XIDS[number]})" if number in FATAL_XIDS else "")
