"""How the exit codes of programs are said: one form in sentences, one in columns."""

from __future__ import annotations

_SIGNALS = (
    *("HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE"),
    *("ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ"),
    *("VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS"),
)
"""Names of Linux's signals, from 1: those of the host that runs the jobs, whichever tells of them."""


def said_exit(code: int) -> str:
    """An exit code in a sentence: "exit code 1", or "signal 9 (SIGKILL)" where it tells of a signal, which is
    128 + N as shells have it, or -N as Python has it."""
    number = _signal_of(code)
    name = f" (SIG{_SIGNALS[number - 1]})" if number <= len(_SIGNALS) else ""
    return f"signal {number}{name}" if number else f"exit code {code}"


def exit_pair(code: int) -> str:
    """An exit code in a column, as sacct has it: "1:0", or "0:9" where it tells of a signal."""
    number = _signal_of(code)
    return f"0:{number}" if number else f"{code}:0"


def _signal_of(code: int) -> int:
    number = -code if code < 0 else code - 128
    return number if 1 <= number <= (64 if code < 0 else len(_SIGNALS)) else 0
