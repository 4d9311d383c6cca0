"""Compaction of a long run's journal: what it tells becomes a checkpoint, its records go into the archive.

A process of its own (`python -m hpcsched.store.compaction JOURNAL [archive]`) writes the checkpoint and a
part of the archive, and leaves the journal as it is. Whoever writes the journal begins it anew then, by one
rename: a crash anywhere leaves a run that opens, and what was written before is a short cut, or a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from hpcsched import mechanisms
from hpcsched.core.transitions.decisions import PolicyMaker
from hpcsched.errors import HpcschedError, StoreError
from hpcsched.store import archive, checkpoint, journal
from hpcsched.store.graph import NotPlain
from hpcsched.store.replay import replay

COMPACTED_BYTES = 2**23
"""Bytes of records in a journal from which on it is compacted (chosen): of ten thousand jobs, and a second to
replay."""

_PR_SET_PDEATHSIG = 1
_NICEST = 19


def prepare(path: Path, make_policy: PolicyMaker, *, archives: bool) -> None:
    """Write the checkpoint of all records of a journal, and if it `archives` put them into the archive; the
    journal may be written meanwhile. Raises StoreError, and NotPlain where another package has added to the
    core."""
    replayed = replay(path, make_policy)
    contents = journal.Contents(path)
    mark = contents.mark(replayed.records, replayed.length)
    place = contents.place_of(mark)
    if place is None or mark.records == contents.begin.records:
        return  # it was begun anew meanwhile
    body = checkpoint.encode(replayed.machine, make_policy, replayed.commands, again=True)
    if archives:
        archive.write_part(path, mark, contents.data[contents.first : place])
    archive.make(path)
    checkpoint.write(archive.folder_of(path) / archive.CHECKPOINT, body, mark)


def finish(path: Path, writer: journal.Journal) -> bool:
    """Begin a journal anew if there is a checkpoint of its records, which are archived; whether it was.

    Raises StoreError: all is as it was then.
    """
    found = checkpoint.read(archive.folder_of(path) / archive.CHECKPOINT)
    if found is None:
        return False
    contents = journal.Contents(path)
    place = contents.place_of(found.mark)
    if place is None or place == contents.first:
        return False
    try:
        archive.read_part(path, contents.begin, found.mark)
    except archive.Unreadable:
        archive.write_part(path, found.mark, contents.data[contents.first : place])
    writer.begin_anew([*contents.archived, found.mark], place)
    return True


def tidy(path: Path) -> None:
    """Remove what is in the archive and no part of it, as of a process that was killed. Nobody compacts."""
    folder = archive.folder_of(path)
    with contextlib.suppress(OSError, StoreError):
        if not folder.is_dir():
            return
        kept = {archive.part_path(path, end) for end in journal.Contents(path).archived}
        for file in (*folder.glob(".*.tmp"), *folder.glob("*.jsonl.gz")):
            if file not in kept:
                file.unlink()


def main(path: Path, *words: str) -> int:
    """Prepare the compaction of a journal, and be no burden to anybody; the exit code."""
    from hpcsched.policy import make_policy

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    os.nice(_NICEST)
    mechanisms.load()
    try:
        prepare(path, make_policy, archives="archive" in words)
    except (HpcschedError, NotPlain, MemoryError):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
