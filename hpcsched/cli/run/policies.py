"""The policies meant, each with its options: by flag, job file, settings, or the run so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from hpcsched import config
from hpcsched.cli.common import parse_options
from hpcsched.errors import ConfigError
from hpcsched.jobfile import JobFile
from hpcsched.policy import POLICIES, make_policy
from hpcsched.store.rundir import RunDir

DEFAULT = "marble"
ALL = ", ".join(f"{name} (default)" if name == DEFAULT else name for name in POLICIES)
"""All policies, for help texts."""


class Once(click.Option):
    """An option that is refused when it is given twice: click would take the last one without a word."""

    accepted = "one"

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        self.multiple = True  # so that the parser keeps all
        super().add_to_parser(parser, ctx)
        self.multiple = False

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> Any:
        value, source = super().consume_value(ctx, opts)
        if isinstance(value, list):
            if len(value) > 1:
                got = " and ".join(map(repr, value))
                raise ConfigError(where=self.opts[0], got=got, accepted=self.accepted)
            value = value[0]
        return value, source


class OnceWithCommas(Once):
    """The same for an option whose one value can name several things."""

    accepted = "one list, with commas"


def complete(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Policies for a shell to complete: the last of a list with commas."""
    before, comma, last = begun.rpartition(",")
    return [f"{before}{comma}{name}" for name in POLICIES if name.startswith(last)]


def names_in(text: str, *, where: str = "--policy") -> list[str]:
    """The policies in a list with commas; raises ConfigError for one that there is not."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        make_policy(name, where=where)
    return names


def check_file(file: JobFile, path: Path) -> None:
    """Refuse what a job file's [policy] says wrongly, whether or not it counts this time."""
    if file.policy or file.policy_options:
        make_policy(file.policy or DEFAULT, file.policy_options, where=f"{path}: policy")


def of_run(rundir: RunDir) -> tuple[str, Mapping[str, Any]] | None:
    """The policy that a run had last, with its options; None before it began."""
    from hpcsched.store.replay import last_start

    start = last_start(rundir.journal) if rundir.begun else None
    return (start.policy, start.policy_options) if start else None


def for_run(
    ctx: click.Context,
    policy: str | None,
    pairs: Sequence[str],
    file: JobFile | None,
    own: tuple[str, Mapping[str, Any]] | None,
) -> tuple[str | None, dict[str, Any]]:
    """Policy and options of a run: flag and environment, job file, settings; nothing there: its own so far.

    A run keeps its options too then, and gets those given on top. `file` is checked already.
    """
    settings: config.Settings = ctx.obj
    from_settings = _from_settings(ctx)
    name, given = policy, parse_options(pairs)
    if file and file.policy and (policy is None or from_settings):
        name, from_settings = file.policy, False
    below: Mapping[str, Any] = settings.values.get("policy_option", {})
    if name is None and own:
        name, below = own
    else:
        if from_settings and name:
            make_policy(name, where=f"{settings.origins['policy']}: policy")
        elif name:
            make_policy(name)
        if below:
            make_policy(name or DEFAULT, below, where=_place_of_options(settings))
    in_file = file is not None and (file.policy or DEFAULT) == (name or DEFAULT)
    make_policy(name or DEFAULT, given)
    options = {**below, **(file.policy_options if file and in_file else {}), **given}
    if name:
        settings.rules.check("policy", name, where="the policy of this run")
    if options:
        settings.rules.check("policy_option", options, where="the options of its policy")
    return name, options


def for_simulation(
    ctx: click.Context, policy: str | None, pairs: Sequence[str], own: tuple[str | None, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The policies to simulate, each with its options; `own` are those that the source of the jobs names.

    An option that is given goes to all policies that know it.
    """
    settings: config.Settings = ctx.obj
    text, where = policy, "--policy"
    if _from_settings(ctx):
        where = f"{settings.origins['policy']}: policy"
        text = own[0] or policy
    names = names_in(text or own[0] or DEFAULT, where=where)
    given, configured = parse_options(pairs), settings.values.get("policy_option", {})
    known: dict[str, Mapping[str, Any]] = {n: getattr(POLICIES[n], "OPTIONS", {}) for n in names}
    for key in given:
        if len(names) > 1 and not any(key in options for options in known.values()):
            accepted = "; ".join(f"{name}: {', '.join(known[name]) or 'none'}" for name in names)
            got = "no policy given has this option"
            raise ConfigError(where="--policy-option", key=key, got=got, accepted=accepted)
    chosen = {}
    for name in names:
        below = {key: value for key, value in configured.items() if key in known[name]}
        mine = given if len(names) == 1 else {k: v for k, v in given.items() if k in known[name]}
        make_policy(name, below, where=_place_of_options(settings) if below else "")
        make_policy(name, mine)
        chosen[name] = {**below, **(own[1] if (own[0] or DEFAULT) == name else {}), **mine}
    return chosen


def _from_settings(ctx: click.Context) -> bool:
    return ctx.get_parameter_source("policy") is click.core.ParameterSource.DEFAULT_MAP


def _place_of_options(settings: config.Settings) -> str:
    return f"{settings.origins['policy_option']}: policy_option"
