"""Job files: what users write about their jobs, read and checked."""

from hpcsched.jobfile.check import check_fits, check_names
from hpcsched.jobfile.keys import ENVIRONMENTS, KINDS, MOST_PROCESSES, MOST_STEPS, NAME, Job
from hpcsched.jobfile.needs import KEYS as NEEDS
from hpcsched.jobfile.read import JobFile, load, parse, spec_of

__all__ = [
    "ENVIRONMENTS",
    "KINDS",
    "MOST_PROCESSES",
    "MOST_STEPS",
    "NAME",
    "NEEDS",
    "Job",
    "JobFile",
    "check_fits",
    "check_names",
    "load",
    "parse",
    "spec_of",
]
