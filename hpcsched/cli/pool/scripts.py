"""Batch scripts of a pool's allocations. They are all alike: who comes first leads the run."""

from __future__ import annotations

from hpcsched.cli.site import batch_scripts
from hpcsched.cli.site.script import command_dir
from hpcsched.pool.poolfile import Pool, Template
from hpcsched.pool.record import PoolFiles


def script_of(pool: Pool, template: Template, name: str) -> str:
    """The script for sbatch."""
    more, margin_s = dict(template.more), pool.run.get("margin", 60.0)
    directives = list(more.pop("directives", ()))
    if constraint := more.pop("constraint", None):
        directives.append(f'--constraint="{constraint}"')
    wrapper = batch_scripts.Wrapper(
        name=name,
        sets=(),
        dirs=(),
        command=_enter(pool),
        workdir=pool.dir,
        output_dir=PoolFiles(pool.dir).output,
        nodes=template.nodes,
        gpus=template.gpus_per_node,
        again="once",
        margin_s=margin_s,
        max_restarts=0,
        time_s=template.limit_s,
        partition=template.partition or None,
        directives=directives,
        made_by=f"hpcsched pool start {pool.where}",
        **more,
        **command_dir(),
    )
    return batch_scripts.slurm(wrapper)


def _enter(pool: Pool) -> list[str]:
    idle_min = f"{pool.idle_s / 60:g}"
    words = ["pool", "enter", "--dir", str(pool.dir), "--", "--release-idle-nodes", idle_min]
    for key, value in pool.run.items():
        option = "--" + key.replace("_", "-")
        if key == "policy_option":
            for name, what in value.items():
                words += [option, f"{name}={str(what).lower() if isinstance(what, bool) else what}"]
        elif isinstance(value, list):
            for one in value:
                words += [option, one]
        else:
            words += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    return words
