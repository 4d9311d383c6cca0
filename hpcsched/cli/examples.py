"""What stands at the end of each command's `--help`: command lines to begin with."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("hpcsched demo", "hpcsched demo --dir /tmp/demo"),
    "run": (
        "hpcsched run jobs.toml",
        "hpcsched run --each lr=1e-3,1e-2 -- python train.py --lr {lr}",
        "hpcsched run --stay --idle-timeout 30m --detach",
        "hpcsched run jobs.toml --notify-command 'mail -s hpcsched me@example.org'",
        "hpcsched run --resume",
    ),
    "submit": (
        "hpcsched submit jobs.toml",
        "hpcsched submit --gpus 2 -- python train.py --lr 1e-3",
        "hpcsched submit --time 2h --mem 16G -c 4 --chdir run1 -- python train.py",
        "hpcsched submit --array 0-15%4 -- python train.py --fold {index}",
        "hpcsched submit --trainer mymodels:Net --args lr=0.1 --steps 2000",
        "hpcsched submit --after train -- python test.py",
    ),
    "status": (
        "hpcsched status",
        "hpcsched status --states all",
        "hpcsched status --sort -M -o '%i %j %t %M %R'",
        "hpcsched status --stats-only",
        "hpcsched status --all",
    ),
    "top": ("hpcsched top", "hpcsched top -n 1"),
    "explain": ("hpcsched explain", "hpcsched explain train"),
    "cancel": ("hpcsched cancel --signal USR1 train", "hpcsched cancel train", "hpcsched cancel 3-7,9"),
    "hold": ("hpcsched hold train", "hpcsched hold 3-7"),
    "release": ("hpcsched release train",),
    "suspend": ("hpcsched suspend train",),
    "resume": ("hpcsched resume train",),
    "retry": ("hpcsched retry --failed", "hpcsched retry train --from-scratch"),
    "join": (
        "hpcsched join --dir RUN",
        "hpcsched join --dir RUN --time 2h",
    ),
    "pool": ("hpcsched pool start pool.toml --dry-run", "hpcsched pool status pool.toml"),
    "pool start": (
        "hpcsched pool start pool.toml --dry-run",
        "hpcsched pool start pool.toml --detach",
        "hpcsched pool start pool.toml --once",
    ),
    "pool status": ("hpcsched pool status pool.toml", "hpcsched pool status --json"),
    "pool enter": ("hpcsched pool enter --dir runs/a -- --margin 90",),
    "pool pause": ("hpcsched pool pause pool.toml",),
    "pool resume": ("hpcsched pool resume pool.toml",),
    "pool stop": ("hpcsched pool stop pool.toml", "hpcsched pool stop pool.toml --now"),
    "drain": ("hpcsched drain", "hpcsched drain --no-wait"),
    "logs": ("hpcsched logs train -f", "hpcsched logs 3 -n 20"),
    "metrics": (
        "hpcsched metrics train",
        "hpcsched metrics train -m val_loss -n 10",
        "hpcsched metrics sweep --sort loss",
        "hpcsched metrics train --csv",
    ),
    "wait": ("hpcsched wait", "hpcsched wait train --timeout 3600"),
    "history": (
        "hpcsched history",
        "hpcsched history --all -n 20 --states failed",
        "hpcsched history -P --noheader -o jobid,exit,maxrss",
    ),
    "report": (
        "hpcsched report",
        "hpcsched report -o run.html",
        "hpcsched report hpcsched-run hpcsched-run-2 -o both.html",
        "hpcsched report --serve",
    ),
    "efficiency": (
        "hpcsched efficiency",
        "hpcsched efficiency train --json",
        "hpcsched efficiency --records /srv/hpcsched-records --by account,month --csv",
    ),
    "clean": (
        "hpcsched clean",
        "hpcsched clean --older-than 30d",
        "hpcsched clean --only-checkpoints hpcsched-run-2",
    ),
    "profile": ("hpcsched profile list",),
    "profile run": (
        "hpcsched profile run jobs.toml --job train",
        "hpcsched profile run --model train --progress-pattern 'step (\\d+)' -- python train.py",
    ),
    "profile layers": ("hpcsched profile layers mymodels:Net",),
    "profile pack": ("hpcsched profile pack jobs.toml --counts 1,2,4",),
    "profile vsw": ("hpcsched profile vsw --trainer mymodels:Net -o costs.json",),
    "profile list": ("hpcsched profile list", "hpcsched profile list --from marble-summit"),
    "profile show": ("hpcsched profile show ResNet-50 --from marble-summit",),
    "profile import": ("hpcsched profile import profiles.json",),
    "profile export": ("hpcsched profile export train -o train.json",),
    "simulate": (
        "hpcsched simulate jobs.toml --gpus-per-node 4",
        "hpcsched simulate jobs.toml --gpus-per-node 4 --policy marble,planner --gantt plan.svg",
        "hpcsched simulate jobs.toml --allocation 4@0+4h --allocation 2x8@1h+2h",
        'hpcsched simulate jobs.toml --device-type A100 --allocation 4@0 --allocation "8:NVIDIA H200@0"',
    ),
    "advise": (
        "hpcsched advise jobs.toml",
        "hpcsched advise jobs.toml --partition gpu,short --gpus 1-8 --max-gpu-hours 40",
        "hpcsched advise jobs.toml --wait 30 --svg advice.svg",
        "hpcsched advise jobs.toml --json",
    ),
    "plan": ("hpcsched plan burst vgg16-a100 --gpus 8 --global-batch 32",),
    "plan burst": ("hpcsched plan burst vgg16-a100 --gpus 8 --global-batch 32",),
    "plan pack": ("hpcsched plan pack costs.json",),
    "plan ps": ("hpcsched plan ps nearchus-a --cpus 8",),
    "plan vsw": ("hpcsched plan vsw costs.json --global-batch 256",),
    "tune": (
        "hpcsched tune search.toml",
        "hpcsched tune search.toml --devices cpu:2 --learning-curves curves.svg",
        "hpcsched tune search.toml --resume",
    ),
    "script": (
        "hpcsched script slurm jobs.toml --time 4h --gpus-per-node 4 -o job.sbatch",
        "hpcsched script lsf jobs.toml --time 4h --gpus-per-node 4 -o job.lsf",
        "hpcsched script slurm jobs.toml --advice advice.json -o job.sbatch",
        "hpcsched script sge jobs.toml --time 4h --gpus-per-node 4 --cpus-per-gpu 4 -o job.sge",
    ),
    "doctor": ("hpcsched doctor", "hpcsched doctor --bundle"),
    "journal": ("hpcsched journal check",),
    "journal check": ("hpcsched journal check", "hpcsched journal check --dir hpcsched-run-2"),
    "journal repair": ("hpcsched journal repair",),
    "completion": ('eval "$(hpcsched completion bash)"',),
    "config": ("hpcsched config show --origin",),
    "config show": ("hpcsched config show --origin",),
    "config trust": ("hpcsched config trust", "hpcsched config trust ../project/hpcsched.toml"),
}
"""By the command's path. Each must parse: a test tries them."""


def of(path: str) -> str:
    """The end of a command's help; empty if it has no examples."""
    lines = EXAMPLES.get(path, ())
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
