"""The removal of what runs that are over have left on disk: of that which `leftovers` has found only."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from hpcsched.errors import StoreError
from hpcsched.store import registry
from hpcsched.store.files import write_atomically
from hpcsched.store.leftovers import ASIDE, Item, Kind, LeftRun, Mark, What, is_a_copy, read_mark, sign_of
from hpcsched.store.run_folders import work_in
from hpcsched.store.rundir import CLEANED, RunDir, RunDirError, RunLock


def remove(run: LeftRun, what: What) -> int:
    """Remove this of a run; returns the bytes. What is interrupted is gone on with by the next call.

    Raises StoreError; RunDirError where an agent has come since `run` was looked at, or comes meanwhile.
    """
    root = run.rundir.root
    lock = RunLock(run.rundir)
    try:
        if sign_of(run.rundir) != run.sign:
            raise RunDirError(f"{root} has changed meanwhile: look at it again")
        items = run.removed_by(what)
        inbox = next((item for item in items if item.parts == ("inbox",)), None)
        if inbox:
            _take_inbox(run)
            items = [replace(item, parts=(ASIDE,)) if item is inbox else item for item in items]
        mark = Mark(what=what, at=time.time(), done=False)
        write_atomically(root / CLEANED, msgspec.json.encode(mark), durable=True)
        freed = 0
        for item in items:
            if item.parts in ((CLEANED,), ("agent.lock",)):
                continue
            if read_mark(run.rundir) != mark:  # where locks do not reach across hosts
                raise RunDirError(f"{root}: an agent has begun there meanwhile; what is left stays")
            freed += _remove(item)
        _tidy(run)
        if what is What.ALL and not run.foreign:
            _forget(run)
        else:
            mark.done = True
            write_atomically(root / CLEANED, msgspec.json.encode(mark))
    finally:
        lock.release()
    return freed


def cleaned(directory: Path, run_id: str) -> What | None:
    """What is gone of a run that was in this directory; None: nothing that is known of."""
    rundir = RunDir(directory)
    mark, record = read_mark(rundir), rundir.read_record()
    if record is not None and record.id == run_id:
        return mark.what if mark else None
    return What.ALL if directory.parent.is_dir() else None  # else it may not be mounted here


def _take_inbox(run: LeftRun) -> None:
    """Put the inbox aside: who submits from now on is told that it cannot be written.

    Raises RunDirError where work has come since the run was looked at; all is then as it was.
    """
    rundir, aside = run.rundir, run.rundir.root / ASIDE
    try:
        if aside.exists():  # of a removal that was interrupted
            _remove(Item(rundir.root, (ASIDE,), Kind.RECORD, 0))
        rundir.inbox.rename(aside)
        if not run.waited and work_in(aside):
            aside.rename(rundir.inbox)
            raise RunDirError(f"{rundir.root}: jobs wait there meanwhile")
    except OSError as error:
        raise StoreError(f"cannot remove {rundir.inbox}: {error.strerror}") from error


def _remove(item: Item) -> int:
    """Remove it, by real folders only; returns its bytes. Raises StoreError."""
    path = Path(item.base, *item.parts)
    try:
        with _opened(item.base, item.parts[:-1]) as folder:
            about = os.stat(item.parts[-1], dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(about.st_mode):
                shutil.rmtree(item.parts[-1], dir_fd=folder)
            else:
                os.unlink(item.parts[-1], dir_fd=folder)
    except FileNotFoundError:
        if os.path.lexists(path):  # somebody else removes there too
            raise StoreError(f"cannot remove all of {path}; `hpcsched clean` goes on") from None
        return 0
    except RecursionError:
        raise StoreError(f"cannot remove {path}: too many folders in folders") from None
    except OSError as error:
        raise StoreError(f"cannot remove {path}: {error.strerror}; `hpcsched clean` goes on") from error
    return item.bytes


@contextlib.contextmanager
def _opened(base: Path, parts: tuple[str, ...]) -> Iterator[int]:
    """A descriptor of the folder below `base`; no step to it leads through a symbolic link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(base, flags)
    try:
        for part in parts:
            below = os.open(part, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def _tidy(run: LeftRun) -> None:
    """Remove the folders that are empty now, of jobs and of checkpoints."""
    for base, parts in sorted(run.folders, key=lambda folder: -len(folder[1])):
        with contextlib.suppress(OSError), _opened(base, parts[:-1]) as above:
            os.rmdir(parts[-1], dir_fd=above)


def _forget(run: LeftRun) -> None:
    """Remove what is left of a run of which nothing is to be left."""
    root = run.rundir.root
    with contextlib.suppress(OSError):
        (root / CLEANED).unlink()
        (root / "agent.lock").unlink(missing_ok=True)
        root.rmdir()
    if run.run_id and not root.exists() and not is_a_copy(run):
        registry.forget(run.run_id)
