"""`hpcsched plan`: the planners on their own."""

from __future__ import annotations

import click

from hpcsched.cli.plan.burst import burst
from hpcsched.cli.plan.packing import pack
from hpcsched.cli.plan.ps import ps
from hpcsched.cli.plan.vsw import vsw


@click.group()
def plan() -> None:
    """The planners on their own: what they would do, without running anything."""


for command in (burst, pack, ps, vsw):
    plan.add_command(command)
