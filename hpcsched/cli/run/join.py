"""`hpcsched join`: the hosts of this allocation work for a run in another one."""

from __future__ import annotations

import os
import signal

import click

from hpcsched.cli.common import allocation_options, dir_option, find_run, option, say, seconds

_TIME = "Leave after so long at the latest, such as 90m or 2h; default: when the allocation ends."
_WAIT = "Longest wait for the run's agent, such as 10m (10m)."


@click.command
@dir_option
@option("--time", "-t", "lasts_s", metavar="T", type=seconds, help=_TIME)
@option("--wait", "wait_s", metavar="T", type=seconds, default="10m", help=_WAIT)
@option("--devices", metavar="SPEC", help="Devices here; default: as the run's agent opens its own.")
@allocation_options
@option("--pyslurm", metavar="W", default="auto", help="auto, or off: Slurm's commands only.")
@click.pass_context
def join(
    ctx: click.Context,
    dir_: str | None,
    lasts_s: float | None,
    wait_s: float,
    devices: str | None,
    batch: str,
    hosts: str | None,
    launcher: str,
    pyslurm: str,
) -> int:
    """Lend the hosts of this allocation to a run that was started with `run --joinable` in another one.

    Its jobs start here too. Before this allocation ends they save, and go on elsewhere; then this command
    ends. So it does when the run is over. Ctrl-C has them leave now.
    """
    from hpcsched.agent.join import JoinRequest
    from hpcsched.agent.join import join as lend
    from hpcsched.batch import open_batch

    for number in (signal.SIGUSR1, signal.SIGUSR2):  # warnings of the batch system, before they are heard
        signal.signal(number, signal.SIG_IGN)
    if lasts_s is not None and lasts_s <= 0:
        raise click.UsageError("--time is how long the hosts stay: more than 0")
    rundir = find_run(ctx, dir_)
    names = hosts.split(",") if isinstance(hosts, str) else list(hosts or ())
    system = open_batch(batch, environ=os.environ, hosts=names, launcher=launcher, pyslurm=pyslurm)
    words = [f"--batch={batch}", f"--launcher={launcher}", f"--pyslurm={pyslurm}"]
    words += [f"--hosts={','.join(names)}"] * bool(names)
    order = JoinRequest(
        dir=rundir.root, devices=devices, lasts_s=lasts_s, wait_s=wait_s, batch_words=tuple(words)
    )
    return lend(order, batch=system, tell=lambda line: say(f"hpcsched: {line}", err=True))
