"""The host of a node agent: its name and address, the GPUs granted there, orphans of an earlier life."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, MutableMapping

from hpcsched.agent.node import guard
from hpcsched.contract.visibility import CUDA
from hpcsched.errors import ConfigError
from hpcsched.launch.orphans import end_processes, find_orphans
from hpcsched.launch.remote.keys import Join


def own_name(join: Join, given: str | None, environ: Mapping[str, str], hostname: str) -> str:
    """This host's name in the run. Raises ConfigError if it is none of the hosts in the join file."""
    names = [given] if given else [environ.get("SLURMD_NODENAME", ""), hostname]
    for name in filter(None, names):
        if name in join.hosts:
            return join.names.get(name, name)
        short = [host for host in join.hosts if host.split(".")[0] == name.split(".")[0]]
        if len(short) == 1:
            return join.names.get(short[0], short[0])
    raise ConfigError(where="--name", got=f"{names[-1]!r}", accepted=f"one of {', '.join(join.hosts)}")


def address_towards(endpoint: str) -> str:
    """This host's IP address on the route to the head; its host name if there is no route."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))  # sends nothing: it only chooses a route
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def show_granted(join: Join, name: str, environ: MutableMapping[str, str]) -> None:
    """Show the GPUs granted here to this process, unless it is told which: ssh does not pass that on."""
    if name in join.gpus:
        environ.setdefault(CUDA.variable, ",".join(join.gpus[name]))


def end_orphans(join: Join, found: Callable[[], None]) -> None:
    """End the processes that an earlier life left here; those of other agents of this life stay, and so does
    what runs on for those of a head before.

    `found` is called first if there are any, as that takes time. Raises ConfigError if some cannot be ended.
    """
    all_ours = find_orphans(join.run_id, [])
    orphans = set(all_ours) - guard.marked(all_ours, join.spared, life=join.life)
    if not orphans:
        return
    found()
    left = end_processes(orphans, join.grace_s)
    if left:
        pids = ", ".join(str(pid) for pid, _ in left)
        raise ConfigError(
            where=socket.gethostname(),
            got=f"processes of an earlier life of the run cannot be ended: {pids}",
            accepted="a host whose devices are free",
        )
