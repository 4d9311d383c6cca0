"""`hpcsched profile list, show, import, export`: the profiles that are kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcsched.core.profile import Profile
from hpcsched.errors import ConfigError
from hpcsched.printing import suggestion
from hpcsched.store.profiles import format_profiles, load_profiles, save_profiles

if TYPE_CHECKING:
    from hpcsched.store.database import Database

database_option = click.option(
    "--database",
    type=click.Path(path_type=Path),
    envvar="HPCSCHED_DATABASE",
    help="The database file; default: hpcsched.db in your data directory.",
)
_from = click.option(
    "--from",
    "source",
    metavar="FILE",
    help="Profiles file (or shipped one, by name), instead of the database.",
)
json_profiles_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the profiles as JSON, ready for import."
)


@click.command(name="list")
@_from
@database_option
@json_profiles_option
def list_(source: str | None, database: Path | None, as_json: bool) -> None:
    """List the profiles, the newest first."""
    from hpcsched.profiling.draw import table_of

    found, _ = _known(source, database)
    click.echo(format_profiles(found) if as_json else table_of(found), nl=False)


@click.command()
@click.argument("model")
@_from
@database_option
@json_profiles_option
def show(model: str, source: str | None, database: Path | None, as_json: bool) -> None:
    """Draw a model's curve, with its optimum, spread, costs and origin."""
    known, where = _known(source, database)
    found = [p for p in known if p.model == model]
    if not found:
        names = list(dict.fromkeys(p.model for p in known))
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise ConfigError(
            where=where,
            got=f"no profile of {model!r}{suggestion(model, names)}",
            accepted=listed or "nothing: it is empty; measure or import",
        )
    print_profiles(found, as_json)


@click.command(name="import")
@click.argument("file")
@database_option
def import_(file: str, database: Path | None) -> None:
    """Put the profiles of a JSON file (or a shipped one, by name) into the database."""
    found = load_profiles(file)
    with profile_database(database) as db:
        db.record_profiles(found)
        click.echo(f"{len(found)} profile{'s' * (len(found) != 1)} of {file} put into {db.path}", err=True)


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="A file, instead of standard output.")
@database_option
def export(models: tuple[str, ...], output: Path | None, database: Path | None) -> None:
    """Print the profiles as JSON: all, or those of the models named."""
    known, where = _known(None, database)
    for model in models:
        if all(p.model != model for p in known):
            raise ConfigError(
                where=where, got=f"no profile of {model!r}", accepted="see hpcsched profile list"
            )
    found = [p for p in known if not models or p.model in models]
    if output is None:
        click.echo(format_profiles(found), nl=False)
    else:
        save_profiles(output, found)


@contextmanager
def profile_database(path: Path | None) -> Iterator[Database]:
    """The database at this path, or in the user's data directory."""
    from hpcsched.store.database import Database, default_path

    with Database(path or default_path()) as db:
        yield db


def _known(source: str | None, database: Path | None) -> tuple[tuple[Profile, ...], str]:
    """The profiles of a file, or else of the database, and where they are."""
    if source is not None:
        return load_profiles(source), source
    with profile_database(database) as db:
        return db.profiles(), str(db.path)


def print_profiles(found: Sequence[Profile], as_json: bool) -> None:
    """Print their curves, or all of them as JSON."""
    from hpcsched.profiling.draw import curve_of

    width = shutil.get_terminal_size().columns
    curves = "\n".join(curve_of(profile, width) for profile in found)
    click.echo(format_profiles(found) if as_json else curves, nl=False)
