"""`hpcsched profile`: measure how training programs scale, and look after the results."""

from __future__ import annotations

import click

from hpcsched.cli.profile.layers import layers
from hpcsched.cli.profile.packing import pack
from hpcsched.cli.profile.scaling import run
from hpcsched.cli.profile.stored import export, import_, list_, show
from hpcsched.cli.profile.vsw import vsw


@click.group()
def profile() -> None:
    """Measure scalability; keep it in a database, and move it in and out as JSON."""


for command in (run, layers, pack, vsw, list_, show, import_, export):
    profile.add_command(command)
