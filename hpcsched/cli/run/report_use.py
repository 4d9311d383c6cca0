"""What `hpcsched report` draws of the devices of a run: how busy they were, by host."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

import click

from hpcsched.core.machine import Machine
from hpcsched.errors import StoreError
from hpcsched.store.device_use import read_use
from hpcsched.store.rundir import RunDir

MOST_HOSTS = 16
"""Hosts that are drawn: the first; of more the figure would be longer than a page."""


def drawn(rundir: RunDir, machine: Machine, folder: Path, *, span_s: float) -> tuple[str | None, int]:
    """The figure as an SVG document, which is left in the folder (None: nothing was measured), and how many
    hosts are left out."""
    from hpcsched.report.use import Point, use_svg

    try:
        uses = read_use(rundir.device_use)
    except StoreError as error:
        click.echo(f"hpcsched: {error}: left out", err=True)
        return None, 0
    begins = [life.at for life in machine.run.lives]
    lives = [{device.index: device.host for device in devices} for devices in machine.hosts.devices]
    hosts: dict[str, list[Point]] = {}
    for use in uses:
        if use.at > span_s:
            continue  # no part of this run
        of = lives[max(0, bisect_right(begins, use.at) - 1)]
        by_host: dict[str, list[tuple[float | None, float | None]]] = {}
        for gpu, seen in use.gpus.items():
            if gpu in of:
                by_host.setdefault(of[gpu], []).append(seen)
        for host, all_of_it in by_host.items():
            busy = [share for share, _ in all_of_it if share is not None]
            memory = [mib for _, mib in all_of_it if mib is not None]
            hosts.setdefault(host, []).append(Point(use.at, busy, memory))
    hosts = {host: hosts[host] for host in sorted(hosts) if any(p.busy or p.memory_mib for p in hosts[host])}
    if not hosts:
        return None, 0
    path = folder / "device-use.svg"
    use_svg({host: hosts[host] for host in list(hosts)[:MOST_HOSTS]}, path, span_s=span_s)
    return path.read_text(encoding="utf-8"), max(0, len(hosts) - MOST_HOSTS)
