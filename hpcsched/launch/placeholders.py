"""The placeholders of a command, `{gpus}` and the like (`core.processes`), replaced on its host."""

from __future__ import annotations

from collections.abc import Mapping

from hpcsched.contract import variables
from hpcsched.core.processes import substituted
from hpcsched.launch.base import LaunchPlan, RankPlacement, Rendezvous


def fill_placeholders(
    plan: LaunchPlan, placement: RankPlacement, where: Rendezvous
) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """The command and variables of one host's plan, with placeholders replaced; the ranks meet at `where`.

    `plan.devices` are the host's own. `{world_size}` counts processes where the job says how many, else GPUs,
    as a launcher starts a rank on each. Variables of the contract stay as they are, but for the job's
    arguments.
    """
    gpus = len(plan.devices)
    each = plan.processes if not plan.per_rank and plan.processes > 1 else gpus
    values = {
        "gpus": gpus,
        "nodes": placement.nodes,
        "world_size": (plan.per_rank and placement.world_size) or each * placement.nodes,
        "node_rank": placement.node_rank,
        "master_addr": where.address,
    }

    def value_of(name: str) -> object:
        return where.port if name == "master_port" else values[name]

    ours = {name for name in plan.env if name.startswith(variables.PREFIX)} - {variables.ARGS}
    env = {name: text if name in ours else substituted(text, value_of) for name, text in plan.env.items()}
    return tuple(substituted(word, value_of) for word in plan.argv), env
