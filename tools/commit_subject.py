"""A commit's subject begins with its area: `launch: ranks get their cores`. For pre-commit's commit-msg hook.

python tools/commit_subject.py FILE    # the message; exit code 1, and one line, if it does not
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_AREA = r"[a-z0-9][a-z0-9._/-]*( [a-z0-9._/-]+){0,2}"
_SUBJECT = re.compile(rf"{_AREA}(, {_AREA})*: \S")
_MADE_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")


def problem(message: str) -> str | None:
    """What is wrong with a message, or None. Lines that begin with # are git's."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = next((line for line in lines if line.strip()), "")
    if subject.startswith(_MADE_BY_GIT) or _SUBJECT.match(subject):
        return None
    return f"{subject!r} does not begin with its area; accepted: `area: what it does`, as in `launch: ...`"


def main() -> int:
    said = problem(Path(sys.argv[1]).read_text(errors="replace"))
    if said:
        sys.stderr.write(f"commit subject: {said}\n")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
