"""Lookup of the profiles for a run or a simulation: files given, else this user's measurements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import click

from hpcsched.core.processes import Program
from hpcsched.core.profile import Profile
from hpcsched.core.shared_use import SharedUse
from hpcsched.errors import StoreError
from hpcsched.patience import kind_of
from hpcsched.store.profiles import choose_all, load_profiles


def profile_finder(
    files: Sequence[str], database: Path
) -> Callable[[Collection[str], str], tuple[Profile, ...]]:
    """A function that gives the profiles of models for a device type: from the files, else the database.

    Files are read at once, so that a bad one is refused before anything starts.
    """
    given = [profile for name in files for profile in load_profiles(name)]

    def find(models: Collection[str], device: str) -> tuple[Profile, ...]:
        found = choose_all(given, models, device)
        missing = set(models) - {p.model for p in found}
        if missing and _there(database):
            found += choose_all(_measured(database), sorted(missing), device)
        return tuple(sorted(found, key=lambda p: (p.model, p.nodes)))

    return find


def parallel_programs(database: Path, models: Collection[str]) -> tuple[Program, ...]:
    """The programs of some models that have said in an earlier run that they are parallel."""
    if not _there(database):
        return ()
    from hpcsched.store.database import Database

    try:
        with Database(database) as opened:
            return tuple(sorted(program for program in opened.parallel() if program[0] in models))
    except StoreError as error:
        click.echo(f"hpcsched: {error}; going on without what it says of programs", err=True)
        return ()


def shared_uses(database: Path, device: str) -> tuple[SharedUse, ...]:
    """What earlier runs have seen of models that share devices of this type."""
    if not _there(database):
        return ()
    from hpcsched.store.database import Database

    try:
        with Database(database) as opened:
            return opened.shared(device)
    except StoreError as error:
        click.echo(f"hpcsched: {error}; going on without what it says of sharing", err=True)
        return ()


def layer_profile(database: Path, model: str, device: str) -> dict[str, Any] | None:
    """The newest layer profile of a model on this type of device in the database."""
    if not _there(database):
        return None
    from hpcsched.store.database import Database

    try:
        with Database(database) as opened:
            return next(iter(opened.layers(model, device)), None)
    except StoreError as error:
        click.echo(f"hpcsched: {error}; going on without the layer profiles in it", err=True)
        return None


def _there(database: Path) -> bool:
    """Whether there is a database; one whose file system does not say is none, and that is told."""
    try:
        return kind_of(database) is not None
    except OSError as error:
        click.echo(f"hpcsched: {database}: {error.strerror}; going on without what is in it", err=True)
        return False


def _measured(database: Path) -> tuple[Profile, ...]:
    from hpcsched.store.database import Database

    try:
        with Database(database) as opened:
            # What was learnt on one count only does not say how a model scales.
            return tuple(p for p in opened.profiles() if p.source != "learned" or len(p.throughput) > 1)
    except StoreError as error:
        # The run matters more than the profiles: without them it learns.
        click.echo(f"hpcsched: {error}; going on without the profiles in it", err=True)
        return ()
