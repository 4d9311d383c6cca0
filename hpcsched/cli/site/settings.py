"""`hpcsched config show`: the settings in force, and where each comes from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from hpcsched import config, trust
from hpcsched.cli.common import json_option, say_json
from hpcsched.redaction import REMOVED

DEFAULTS: dict[str, Any] = {
    "dir": "./hpcsched-run",
    "devices": "auto",
    "device_type": "what is found",
    "policy": "marble",
    "policy_option": {},
    "profiles": [],
    "database": "the user's data directory",
    "grace": 30.0,
    "monitor": 5.0,
    "batch": "auto",
    "launcher": "auto",
    "hosts": "the allocation's",
    "interface": "the one that leads to the other hosts",
    "margin": 60.0,
    "requeue": False,
    "chain": False,
    "chain_script": "the batch job's own",
    "max_restarts": 20,
    "checkpoints": "the run directory",
    "pyslurm": "auto",
    "warm": "auto",
    "cpus_per_gpu": 8,
    "release_idle_nodes": "never",
    "joinable": False,
    "notify": "failure,drain,disk,end, with a command or a webhook",
    "notify_command": "none",
    "notify_webhook": "none",
    "mps": True,
    "poll": 60.0,
    "records": "none",
    "share": "nobody",
    "python": "the first in PATH with hpcsched-worker and torch, else hpcsched's own",
}


@click.group("config")
def config_group() -> None:
    """Settings and where they come from."""


@config_group.command()
@click.option("--origin", is_flag=True, help="Say where each setting comes from.")
@json_option
@click.pass_context
def show(ctx: click.Context, origin: bool, as_json: bool) -> None:
    """The settings in force: environment, project, user and site files, defaults, in this order.

    Those of the table [script] are listed as script.KEY, as far as a file sets them.
    """
    settings: config.Settings = ctx.find_root().obj
    for line in (*settings.passed_over, *settings.gave_way.values()):
        click.echo(f"hpcsched: {line}", err=True)
    found = rows(settings)
    if as_json:
        page = {"schema": 1, "settings": {k: {"value": v, "origin": s} for k, v, s in found}}
        say_json(page)
        return
    for key, value, source in found:
        click.echo(f"{key} = {shown(value)}" + (f"    # {source}" if origin else ""))


def rows(settings: config.Settings) -> list[tuple[str, Any, str]]:
    """Each setting in force with its value, and where that comes from."""
    found: list[tuple[str, Any, str]] = []
    for key, default in DEFAULTS.items():
        variable = config.environment_name(key)
        if key in settings.rules.locked:
            value = settings.values.get(key, default)
            source = f"locked by {settings.rules.locked[key]}"
        elif settings.origins.get(key) in ("--dir", "HPCSCHED_DIR"):
            value, source = settings.values[key], settings.origins[key]
        elif os.environ.get(variable) and key not in config.FILE_ONLY:
            value, source = os.environ[variable], variable
        elif key in settings.values:
            value, source = settings.values[key], settings.origins[key]
        else:
            value, source = settings.rules.nearest(key, default), "default"
        if limit := settings.rules.limits.get(key):
            source += f"; {limit}, by {limit.file}"
        found.append((key, REMOVED if key == "notify_webhook" and value != default else value, source))
    script = settings.values.get("script", {})
    return found + [(f"script.{key}", script[key], settings.origins[f"script.{key}"]) for key in script]


@config_group.command("trust")
@click.argument("file", default=config.PROJECT)
def trust_file(file: str) -> None:
    """Obey a project's settings FILE (./hpcsched.toml) although others can write it.

    As it is now: read it first, it may hold shell lines. Once it changes it has to be accepted again.
    """
    path = Path(file).absolute()
    content, why = trust.read(path)
    name = str(path) if str(path).isprintable() else repr(str(path))
    if not why:
        click.echo(f"hpcsched: {name} is obeyed anyway: only you can write it", err=True)
        return
    trust.accept(path, content, os.environ)
    click.echo(f"hpcsched: {name} is obeyed from now on, as it is now ({why})", err=True)


def shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
