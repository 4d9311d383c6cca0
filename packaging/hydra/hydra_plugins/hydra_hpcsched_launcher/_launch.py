"""One batch of a sweep: its jobs are named, submitted, waited for, and told to Hydra."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict

from hpcsched import Job
from hpcsched.errors import HpcschedError
from hydra_plugins.hydra_hpcsched_launcher._job import HydraJob
from hydra_plugins.hydra_hpcsched_launcher._run import SweepRun

if TYPE_CHECKING:
    from hydra_plugins.hydra_hpcsched_launcher.hpcsched_launcher import HpcschedLauncher

log = logging.getLogger(__name__)


def launch(
    launcher: HpcschedLauncher, run: SweepRun, job_overrides: Sequence[Sequence[str]], first: int
) -> list[JobReturn]:
    """Run a batch, of which `first` is the number of the first job; what each job has come to.

    Raises HpcschedError for what the run does not take, and where its agent is gone.
    """
    setup_globals()
    master = launcher.config
    configure_log(master.hydra.hydra_logging, master.hydra.verbose)
    Path(str(master.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    numbers = range(first, first + len(job_overrides))
    configs = [
        _composed(launcher, overrides, number)
        for number, overrides in zip(numbers, job_overrides, strict=True)
    ]
    keys = job_keys(launcher.keys)
    program = HydraJob(
        stem(keys.pop("name", None) or master.hydra.job.name), launcher.hydra_context, launcher.task_function
    )
    jobs = run.run.map(program, configs, labels=labels(job_overrides, first), **keys)
    log.info(f"hpcsched: {len(jobs)} job{'s' if len(jobs) > 1 else ''} in {run.run.dir}")
    for number, overrides in zip(numbers, job_overrides, strict=True):
        log.info(f"\t#{number} : {' '.join(filter_overrides(overrides))}")
    number_of = {job.name: number for number, job in zip(numbers, jobs, strict=True)}

    def tell(name: str, state: str, output: str) -> None:
        log.info(f"\t#{number_of[name]} : {state}" + ("" if state == "COMPLETED" else f", see {output}"))

    try:
        run.wait(jobs, tell)
    except HpcschedError:
        raise
    except BaseException:  # such as Ctrl-C
        with contextlib.suppress(HpcschedError):
            log.info(f"hpcsched: cancelled {run.run.cancel(jobs)} of {len(jobs)} jobs")
        raise
    return [_returned(job, config) for job, config in zip(jobs, configs, strict=True)]


def job_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a job file among the launcher's arguments, as plain Python; null and {} are left out."""
    plain: dict[str, Any] = {
        key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for key, value in given.items()
    }
    keys = {key: value for key, value in plain.items() if value is not None and value != {}}
    if "env" in keys:
        keys["env"] = {name: str(value) for name, value in keys["env"].items()}
    return keys


def labels(job_overrides: Sequence[Sequence[str]], first: int) -> list[str]:
    """What tells the jobs of a batch apart in their names: the job's number, and those of its overrides that
    not all jobs of the batch have."""
    shown = [[*filter_overrides(overrides)] for overrides in job_overrides]
    common = set(shown[0]).intersection(*shown[1:]) if len(shown) > 1 else set()
    return [
        "-".join([str(number), *(_bare(one) for one in overrides if one not in common)])
        for number, overrides in enumerate(shown, first)
    ]


def stem(name: str) -> str:
    """A name for the jobs of a batch; there is room behind it for the number and overrides."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)[:30]


def _bare(override: str) -> str:
    """An override with nothing but what a name may have: `+model.lr='a b'` is model.lr-a-b."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", override).strip("-")


def _composed(launcher: HpcschedLauncher, overrides: Sequence[str], number: int) -> DictConfig:
    """The configuration of one job, as Hydra's own launcher has it."""
    config = launcher.hydra_context.config_loader.load_sweep_config(launcher.config, list(overrides))
    with open_dict(config):
        config.hydra.job.id = str(number)
        config.hydra.job.num = number
    return config


def _returned(job: Job, config: DictConfig) -> JobReturn:
    """What an ended job has returned or raised.

    A program that has ended its process with exit code 0 has returned nothing: None.
    """
    status, value = JobStatus.COMPLETED, None
    try:
        result = job.result()
        if isinstance(result, JobReturn):
            return result
    except Exception as error:  # whatever the program raises
        status, value = JobStatus.FAILED, error.with_traceback(None)
    return JobReturn(
        overrides=list(config.hydra.overrides.task),
        cfg=OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]),
        hydra_cfg=OmegaConf.masked_copy(config, "hydra"),
        task_name=config.hydra.job.name,
        status=status,
        _return_value=value,
    )
