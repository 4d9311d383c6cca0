"""`hpcsched tune`: a search for hyperparameters as a run of jobs."""

from __future__ import annotations

import contextlib
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hpcsched.accounts import user_name
from hpcsched.cli.common import Renamed, check_chart, find_run, goes_on, say
from hpcsched.cli.option_groups import GroupedOptions
from hpcsched.cli.run import notifying, staying
from hpcsched.cli.run.environments import OPTIONS, environment_options
from hpcsched.cli.run.notifying import notify_options
from hpcsched.cli.run.run import conduct, run
from hpcsched.cli.run.search_display import SearchDisplay
from hpcsched.cli.run.search_result import SearchResult, keep_trials, search_result
from hpcsched.core.machine import Machine
from hpcsched.errors import ConfigError, StoreError
from hpcsched.patience import kind_of, patiently
from hpcsched.store.files import write_atomically
from hpcsched.store.run_folders import KEPT_SEARCH, SEARCH_COMMAND
from hpcsched.store.rundir import RunDir
from hpcsched.store.trials import ProgramTrials
from hpcsched.tuning import Search, parse_search, read_search, source_of
from hpcsched.tuning.command import RESULTS
from hpcsched.tuning.feeding import Feeder, Trials, check_results
from hpcsched.tuning.search import PACKINGS, check_packing, example_of


@click.command(cls=GroupedOptions)
@click.argument("search", type=click.Path(path_type=Path))
@click.option("--packing", type=click.Choice(PACKINGS), help="Packing, instead of what the file says.")
@click.option(
    "--compare",
    cls=Renamed,
    older="--against",
    type=click.Choice(PACKINGS),
    help="At the end, search once more with this packing.",
)
@click.option(
    "--learning-curves",
    cls=Renamed,
    older="--svg",
    type=click.Path(path_type=Path),
    metavar="F.svg",
    help="Draw the trials' learning curves at the end.",
)
@click.pass_context
@environment_options
@notify_options
def tune(
    ctx: click.Context,
    /,
    search: Path,
    packing: str | None,
    compare: str | None,
    learning_curves: Path | None,
    **options: Any,
) -> int:
    """Search the space in SEARCH.toml by Hyperband or ASHA: options of a program, or arguments of a trainer.

    Each trial of a rung is a job of the run (status, logs and explain know it); a search that was stopped or
    killed goes on with --resume. See docs/tuning.md.
    """
    if learning_curves is not None:
        check_chart(learning_curves, "--learning-curves")
    asked = read_search(search)
    asked = replace(asked, packing=packing or asked.packing)
    check_packing(asked, packing, where="--packing")
    check_packing(asked, compare, where="--compare")
    compare = compare or asked.against
    resume = goes_on(options)
    root = find_run(ctx, options["dir_"], begins=not resume).root
    options["dir_"] = str(root)
    once_more = {**options, "dir_": f"{root}-{compare}"}
    if compare == asked.packing:
        accepted = f"another packing than {asked.packing}, which it is to be compared with"
        raise ConfigError(where="--compare", got=compare, accepted=accepted)
    if compare and not resume and RunDir(Path(once_more["dir_"])).begun:
        got, accepted = f"{once_more['dir_']} holds a run already", "--resume, or another --dir"
        raise ConfigError(where="--compare", got=got, accepted=accepted)
    words = [f"--packing {packing}"] * bool(packing) + [f"--compare {compare}"] * (compare != asked.against)
    command = " ".join((f"tune {search}", *words))
    code, found = _search(ctx, asked, search, options, curves=learning_curves, command=command, root=root)
    if compare and found and code == 0:
        if not options["quiet"]:
            say(f"hpcsched: the same search once more, with packing {compare}, to compare", err=True)
        asked = replace(asked, packing=compare)
        code, other = _search(ctx, asked, search, once_more, curves=None, command=command, root=root)
        if other and code == 0:
            found.compare(other)
    if found:
        say(json.dumps(found.page) if options["as_json"] else found.text, lines=True)
    return code


_NOT_OF_A_SEARCH = (
    "words",
    "name",
    "each",
    "array",
    "at_once",
    "retry",
    "compare",
    "gantt",
    *OPTIONS,
    *staying.OPTIONS,
    *notifying.OPTIONS,
)
tune.params += [parameter for parameter in run.params if parameter.name not in _NOT_OF_A_SEARCH]


def _search(
    ctx: click.Context,
    asked: Search,
    file: Path,
    options: dict[str, Any],
    *,
    curves: Path | None,
    command: str,
    root: Path,
) -> tuple[int, SearchResult | None]:
    """One search as a run; its exit code, and what has come of it, if it came to its end."""
    kept = find_run(ctx, options["dir_"]).root / KEPT_SEARCH
    if options["resume"] and kind_of(kept) is not None:
        _check_same(asked, kept, file)
    if (short := asked.shortage()) and not options["quiet"]:
        say(f"hpcsched: {short}", err=True)
    source, text = source_of(asked), patiently(lambda: file.read_text(encoding="utf-8"))
    program = ProgramTrials(asked, find_run(ctx, options["dir_"]).root) if asked.command else None
    trials = program or Trials()
    like = example_of(asked)
    results: list[SearchResult] = []

    def display(machine: Machine) -> SearchDisplay:
        with contextlib.suppress(OSError, StoreError):  # whatever is wrong there, the journal will tell
            if kind_of(kept) is None:
                write_atomically(kept, text.encode(), patient=True)
                whole = command.replace(f"tune {file}", f"tune {shlex.quote(str(file.absolute()))}", 1)
                again = f"hpcsched {whole} --resume --dir {shlex.quote(str(root))}"
                write_atomically(kept.with_name(SEARCH_COMMAND), again.encode(), patient=True)
        return SearchDisplay(machine, source, trials, quiet=options["quiet"])

    def report(life: Any) -> int:
        found = search_result(life, source, trials, curves=curves)
        if found is None:
            say("hpcsched: no trial has completed", err=True)
            return 1
        results.append(found)
        return 0

    code = conduct(
        ctx,
        jobs=None,
        source=Feeder(
            source,
            workdir=Path.cwd(),
            user=user_name(),
            trials=trials,
            folder_of=program.make_folder if program else None,
        ),
        like=like,
        display=display,
        check=lambda machine: check_results(source, machine, trials),
        report=report,
        keep=lambda life, store: keep_trials(life, source, trials, store),
        command=command,
        root=root,
        compare=(),
        gantt=None,
        **{**options, "environment": like.environment or options["environment"]},
    )
    return code, results[0] if results else None


def _check_same(asked: Search, kept: Path, file: Path) -> None:
    """Refuse to go on with a search that has become another one: its trials would not be the same."""
    before = parse_search(patiently(lambda: kept.read_text(encoding="utf-8")), where=str(kept))
    # A pattern that found nothing may be mended; what another one has found decides already.
    read = asked.command and ProgramTrials(asked, kept.parent).any_read()
    for key in (
        *(RESULTS if read else ()),
        "trainer",
        "command",
        "metric",
        "mode",
        "method",
        "R",
        "eta",
        "unit",
        "seed",
        "trials",
        "budget",
        "args",
        "space",
    ):
        if getattr(asked, key) != getattr(before, key):
            raise ConfigError(
                where=str(file),
                key=key,
                got="not what it was when this search began",
                accepted=f"what {kept} says, or another --dir for a new search",
            )
