"""Dialects: how frameworks are asked to save, where they save, and how they are told to go on.

A dialect is data about a framework (`speaks = "transformers"`), found in its source; what it says of one
command is a `core.model.Restart`. Nothing of a framework or of a user's program is imported or run.
"""

from hpcsched.dialects.checkpoint import all_done, step_of
from hpcsched.dialects.pattern import number_pattern, step_pattern
from hpcsched.dialects.progress import Reader, Report, matching, progress_of
from hpcsched.dialects.table import NAMES, recognise, restart_of, what_was_recognised, why_not

__all__ = [
    "NAMES",
    "Reader",
    "Report",
    "all_done",
    "matching",
    "progress_of",
    "recognise",
    "restart_of",
    "step_of",
    "number_pattern",
    "step_pattern",
    "what_was_recognised",
    "why_not",
]
