"""What of a Slurm job cannot be used, or not as elsewhere, in words; nothing here runs a command."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

COMMANDS = ("squeue", "scontrol", "sbatch", "srun")
"""The commands of Slurm that are used from inside a job."""

HET_CHAIN = (
    "the options of a heterogeneous job's components cannot be said again for a follow-up job:"
    " use --requeue, or --chain-script FILE"
)
NO_REQUEUE = "Slurm does not requeue this job: submit it with #SBATCH --requeue, or use --chain"


def refused(fields: Mapping[str, str], missing: Collection[str], *, het: bool) -> dict[str, str]:
    """How a job cannot come back ("requeue", "chain"), and why.

    `fields` are those of the job as Slurm shows it, `missing` the commands that are not there, `het` is
    whether it is heterogeneous.
    """
    found = {"requeue": NO_REQUEUE} if fields.get("Requeue") == "0" else {}
    found |= {"chain": HET_CHAIN} if het else {}
    needed = (("requeue", "scontrol"), ("chain", "sbatch"), ("chain", "scontrol"))
    return found | {how: f"there is no {command} here" for how, command in needed if command in missing}


def notes(
    fields: Mapping[str, str],
    missing: Collection[str],
    environ: Mapping[str, str],
    *,
    end_known: bool,
) -> Iterator[str]:
    """Sentences on the job; `fields` and `missing` as for `refused`.

    `end_known`: whether its end is, by whatever told it.
    """
    gone = [command for command in COMMANDS if command in missing]
    if gone:
        what = []
        if {"squeue", "scontrol"} & set(gone):
            first = "the end is as SLURM_JOB_END_TIME had it at the start, and" if end_known else "the end is"
            what.append(f"{first} announced by the warning signal alone")
        what += ["no coming back by --requeue or --chain"] if {"scontrol", "sbatch"} & set(gone) else []
        what += ["other hosts only by --launcher ssh"] if "srun" in gone else []
        yield f"no {', '.join(gone)} here (a container?): {'; '.join(what)}"
    if environ.get("SLURM_PACK_SIZE", "1") != "1" and "SLURM_HET_SIZE" not in environ:
        yield "of this heterogeneous job only component 0 is used: others need Slurm 20.11 or later"
    if "FedOrigin" in fields:
        cluster = environ.get("SLURM_CLUSTER_NAME", "NAME")
        yield (
            "this job belongs to a federation: put back into its queue, it may start on a cluster that does"
            f" not see these files; submitted with --clusters={cluster} it stays here, as with --chain"
        )
