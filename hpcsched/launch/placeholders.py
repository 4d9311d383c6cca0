"""What a command is told of its GPUs and hosts through `{gpus}` and the like (`core.processes`)."""

from __future__ import annotations

from collections.abc import Mapping

from hpcsched.contract import variables
from hpcsched.core.processes import substituted
from hpcsched.launch.base import LaunchPlan, Place


def filled_in(
    plan: LaunchPlan, place: Place, *, address: str, port: int
) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """A plan's command and variables on one host, whose own devices it has, with placeholders replaced.

    The hosts of an attempt have equally many. `world_size` counts processes where the job says how many;
    else GPUs, as a launcher starts a rank on each. Variables of the contract stay as they are, but for the
    job's arguments.
    """
    gpus = len(plan.devices)
    each = plan.processes if not plan.per_rank and plan.processes > 1 else gpus
    values = {
        "gpus": gpus,
        "nodes": place.nodes,
        "world_size": each * place.nodes,
        "node_rank": place.node_rank,
        "master_addr": address,
        "master_port": port,
    }
    ours = {name for name in plan.env if name.startswith(variables.PREFIX)} - {variables.ARGS}
    env = {name: text if name in ours else substituted(text, values) for name, text in plan.env.items()}
    return tuple(substituted(word, values) for word in plan.argv), env
