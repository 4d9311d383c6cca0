"""Batch scripts for Slurm, LSF and SGE: what `hpcsched script` prints. Pure: values in, text out."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcsched.durations import clock

SIGNAL_EARLY_S = 60.0
"""How much sooner than the agent's own clock the batch system warns: Slurm may be late by seconds, LSF counts
whole minutes. (Slurm may also warn a minute early: that costs a minute of work, no more.)"""

REQUEUE_CODE = 99
"""The exit code that has LSF put a job back into its queue: -Q announces it, hpcsched ends with it.
SGE has no other."""


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """The content of a batch script. Paths are absolute; each of `sets` has its run directory in `dirs`.

    `again` is what happens when time is up and work is left: requeue, chain (a follow-up job) or once.
    `told` are the settings for the header: (name, value, where from). `bin_dir` is where the command
    `hpcsched` is, `bin_first` whether it goes before the rest of PATH; `run_options` are more words for
    `run`. `command`: words after `hpcsched`, instead of a run of the sets. `output_dir` is where the batch
    job's output goes (None: `workdir`).
    """

    name: str
    sets: Sequence[Path]
    dirs: Sequence[Path]
    workdir: Path
    nodes: int
    gpus: int
    again: str
    margin_s: float
    max_restarts: int
    time_s: float | None = None
    cpus: int | None = None
    cpus_per_gpu: int | None = None
    mem: str | None = None
    mem_per_gpu: str | None = None
    partition: str | None = None
    account: str | None = None
    mail: str | None = None
    max_concurrent: int | None = None
    chain_script: Path | None = None
    gpu_option: str | None = None
    host_option: str | None = None
    pe: str | None = None
    modules: Sequence[str] = ()
    setup: Sequence[str] = ()
    directives: Sequence[str] = ()
    run_options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    bin_dir: Path | None = None
    bin_first: bool = False
    made_by: str = "hpcsched script"
    told: Sequence[tuple[str, str, str]] = ()
    command: Sequence[str] = ()
    gpu_type: str | None = None
    output_dir: Path | None = None

    @property
    def warning_s(self) -> float:
        """Seconds before the end at which the batch system sends its signal."""
        return self.margin_s + SIGNAL_EARLY_S

    @property
    def host_cpus(self) -> int:
        """CPUs on each host."""
        return self.cpus or max(1, self.gpus * (self.cpus_per_gpu or 1))


def slurm(wrapper: Wrapper) -> str:
    """The script for sbatch."""
    w, several = wrapper, len(wrapper.sets) > 1
    folder = str(w.output_dir or w.workdir).replace("%", "%%")
    number = "%A_%a" if several else "%j"
    lines = [
        f"--job-name={_value(w.name)}",
        f"--output={_value(f'{folder}/{w.name}-{number}.out')}",
        "--open-mode=append",
        f"--nodes={w.nodes}",
        "--ntasks-per-node=1",
    ]
    if w.gpus and w.gpu_option != "none":
        by_host = w.gpu_option == "gpus-per-node"
        gpus = f"{w.gpu_type}:{w.gpus}" if w.gpu_type else str(w.gpus)
        lines.append(f"--gpus-per-node={gpus}" if by_host else f"--gres=gpu:{gpus}")
    if w.cpus or w.cpus_per_gpu:
        lines.append(f"--cpus-per-task={w.host_cpus}")
    lines += [f"--mem={w.mem}"] if w.mem else [f"--mem-per-gpu={w.mem_per_gpu}"] if w.mem_per_gpu else []
    if w.time_s is not None:
        lines.append(f"--time={clock(w.time_s)}")
    if several:
        limit = f"%{w.max_concurrent}" if w.max_concurrent else ""
        lines.append(f"--array=0-{len(w.sets) - 1}{limit}")
    lines += [f"--{key}={_value(v)}" for key, v in (("partition", w.partition), ("account", w.account)) if v]
    if w.mail:
        lines += [f"--mail-user={_value(w.mail)}", "--mail-type=END,FAIL,REQUEUE"]
    lines.append("--requeue" if w.again == "requeue" else "--no-requeue")
    if w.nodes > 1:
        lines.append("--no-kill")  # a node that is found down ends what ran there, not the batch job
    lines.append(f"--signal=B:USR2@{math.ceil(w.warning_s)}")
    return _script(w, "SBATCH", [*lines, *w.directives], index="SLURM_ARRAY_TASK_ID")


def lsf(wrapper: Wrapper) -> str:
    """The script for bsub (bsub < FILE)."""
    w, several = wrapper, len(wrapper.sets) > 1
    limit = f"%{w.max_concurrent}" if w.max_concurrent else ""
    name = f"{w.name}[1-{len(w.sets)}]{limit}" if several else w.name
    number = "%J_%I" if several else "%J"
    lines = [f"-J {_value(name, always=several)}", f"-o {_value(f'{w.workdir}/{w.name}-{number}.out')}"]
    if w.host_option == "nnodes":
        lines.append(f"-nnodes {w.nodes}")
    else:
        lines += [f"-n {w.nodes * w.host_cpus}", f'-R "span[ptile={w.host_cpus}]"']
    if w.gpus and w.gpu_option != "none":
        # By default LSF may put other jobs onto the same GPUs.
        lines.append(f'-gpu "num={w.gpus}:j_exclusive=yes"')
    if w.time_s is not None:
        lines.append(f"-W {math.ceil(w.time_s / 60)}")
    lines.append(f"-wt '{math.ceil(w.warning_s / 60)}' -wa 'USR2'")
    lines += [f"{key} {_value(value)}" for key, value in (("-q", w.partition), ("-P", w.account)) if value]
    if w.mail:
        lines.append(f"-u {_value(w.mail)} -N")
    if w.again == "requeue":
        lines += [f'-Q "{REQUEUE_CODE}"', "-r"]
    return _script(w, "BSUB", [*lines, *w.directives], index="LSB_JOBINDEX-1")


def sge(wrapper: Wrapper) -> str:
    """The script for qsub."""
    w, several = wrapper, len(wrapper.sets) > 1
    number = "$JOB_ID.$TASK_ID" if several else "$JOB_ID"
    lines = [
        f"-N {_value(w.name)}",
        f"-wd {_value(str(w.workdir))}",
        f"-o {_value(f'{w.workdir}/{w.name}-{number}.out', more='$')}",
        "-j y",
        "-S /bin/bash",
    ]
    if (slots := w.nodes * w.host_cpus) > 1 or w.pe:
        lines.append(f"-pe {_value(w.pe or 'smp')} {slots}")
    if w.gpus and w.gpu_option != "none":
        lines.append(f"-l gpu={w.gpus}")
    if w.time_s is not None:
        lines.append(f"-l h_rt={math.ceil(w.time_s)}")
    if several:
        lines.append(f"-t 1-{len(w.sets)}" + (f" -tc {w.max_concurrent}" if w.max_concurrent else ""))
    lines += [f"{key} {_value(value)}" for key, value in (("-q", w.partition), ("-P", w.account)) if value]
    if w.mail:
        lines.append(f"-M {_value(w.mail)} -m ea")
    # qdel and the time limit warn, by SIGUSR2, as long before SIGKILL as the queue's `notify` says.
    lines += ["-notify", "-r y" if w.again == "requeue" else "-r n"]
    return _script(w, "$", [*lines, *w.directives], index="SGE_TASK_ID-1")


WRITERS = {"slurm": slurm, "lsf": lsf, "sge": sge}


def run_words(wrapper: Wrapper) -> list[str]:
    """The words of `hpcsched run` after the job file and --dir."""
    w = wrapper
    words = ["--resume"]
    if w.again != "once":
        words += [f"--{w.again}", "--max-restarts", str(w.max_restarts)]
    if w.chain_script:
        words += ["--chain-script", str(w.chain_script)]
    return [*words, "--margin", f"{w.margin_s:g}", *w.run_options]


def _script(w: Wrapper, mark: str, directives: Iterable[str], *, index: str) -> str:
    # A login shell knows the command `module`.
    lines = ["#!/bin/bash -l" if w.modules or w.setup else "#!/bin/bash"]
    lines += [f"#{mark} {line}" for line in directives]
    lines += [
        "#",
        "# Made by (the settings, and where each comes from, are below):",
        f"#   {_one_line(w.made_by)}",
    ]
    lines += [f"#   {name} = {_one_line(value)}  ({_one_line(origin)})" for name, value, origin in w.told]
    lines += ["", f"cd {shlex.quote(str(w.workdir))} || exit 2"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in w.environment.items()]
    lines += [f"module load {shlex.quote(module)}" for module in w.modules]
    lines += w.setup
    if w.bin_dir:  # after the modules, which may bring a Python of their own
        folder = shlex.quote(str(w.bin_dir))
        lines.append(f'export PATH={folder}:"$PATH"' if w.bin_first else f'export PATH="$PATH":{folder}')
    lines.append("")
    if w.command:
        what = shlex.join(w.command)
    elif len(w.sets) > 1:
        lines += ["sets=(", *(f"    {shlex.quote(str(path))}" for path in w.sets), ")"]
        lines += ["dirs=(", *(f"    {shlex.quote(str(path))}" for path in w.dirs), ")"]
        what = f'run "${{sets[{index}]}}" --dir "${{dirs[{index}]}}" {shlex.join(run_words(w))}'
    else:
        what = shlex.join(["run", str(w.sets[0]), "--dir", str(w.dirs[0]), *run_words(w)])
    # A shell that waited for its child would keep the batch system's signals to itself.
    lines += [
        "trap '' USR2  # a warning that comes while hpcsched is still starting must not end it",
        "# exec: the batch system's signals must reach hpcsched, not a shell.",
        f"exec hpcsched {what}",
    ]
    return "\n".join(lines) + "\n"


def _value(text: str, *, always: bool = False, more: str = "") -> str:
    """A directive's value, in double quotes if it has other characters than words have, and `more`."""
    if re.fullmatch(rf"[\w@%+=:,./\[\]{more}-]+", text) and not always:
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _one_line(text: str) -> str:
    return " ".join(text.split("\n"))
