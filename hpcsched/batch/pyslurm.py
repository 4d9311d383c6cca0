"""Slurm by the pyslurm package, where one is installed that was built for this very Slurm."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from typing import Any

from hpcsched.batch import slurm_text as says
from hpcsched.batch.base import JobLife
from hpcsched.batch.command import Run, run_command
from hpcsched.batch.slurm import SUSPENDED, Slurm, one_line, refused
from hpcsched.errors import BatchError


class PySlurm(Slurm):
    """Asks slurmctld through pyslurm (its API of 25.11) instead of by starting commands.

    What pyslurm has no reliable call for (submitting with a script's #SBATCH lines, steps, counts of GPUs by
    host) is done as `Slurm` does it. Check `usable` first.

    A call is not bounded by COMMAND_TIMEOUT_S but by MessageTimeout in the site's slurm.conf (10 s unless
    set), and libslurm holds Python's lock meanwhile: no thread of ours could cut it short.

    Args:
        module: stands in for the imported package (tests).
        others: as for `Slurm`.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        run: Run = run_command,
        launcher: str = "srun",
        hostname: str | None = None,
        module: Any = None,
    ) -> None:
        super().__init__(environ, run=run, launcher=launcher, hostname=hostname)
        self._imported = module

    def usable(self) -> str | None:
        """Why pyslurm cannot be used here, in one line; None when it can.

        The first import happens in a process of its own: libslurm ends the process that loads it, without
        an exception, when it finds no slurm.conf it can read.
        """
        if self._imported is not None:
            found = str(self._imported.__version__)
        else:
            if importlib.util.find_spec("pyslurm") is None:
                return "pyslurm is not installed"
            script = "import pyslurm; print(pyslurm.__version__); pyslurm.Job, pyslurm.JobSubmitDescription"
            try:
                tried = self._run((sys.executable, "-c", script), environ=self._environ)
            except BatchError as error:
                return f"pyslurm cannot be imported: {error}"
            if tried.code != 0:
                last = tried.err.strip().splitlines()[-1:] or [tried.complaint()]
                return f"pyslurm cannot be imported: {last[0]}"
            found = tried.out.strip()
        try:
            slurm = super().version().removeprefix("Slurm ")
        except BatchError as error:
            return str(error)
        if _release(found) != _release(slurm) or _release(found) is None:
            return f"pyslurm {found} was made for another release than the Slurm here, {slurm}"
        return None

    def end_time(self) -> float | None:
        job_id = self._job_id()
        try:
            end = self._module.Job.load(int(job_id)).end_time
        except self._module.RPCError as error:
            raise BatchError(f"Slurm does not tell of job {job_id}: {error}") from None
        return None if end is None else float(end)

    def life(self, job_id: str) -> JobLife:
        if not job_id.isdigit():
            return super().life(job_id)
        try:
            return says.life_of(self._module.Job.load(int(job_id)).state)
        except self._module.RPCError as error:
            forgotten = "invalid job id specified" in str(error).lower()
            return JobLife.ENDED if forgotten else JobLife.UNKNOWN

    def requeue(self) -> int:
        job_id = self._job_id()
        try:
            self._module.Job(int(job_id)).requeue()
        except self._module.RPCError as error:
            raise refused(job_id, str(error)) from None
        return SUSPENDED

    def comment(self, text: str) -> None:
        job_id = self._job_id()
        changes = self._module.JobSubmitDescription(comment=one_line(text))
        try:
            self._module.Job(int(job_id)).modify(changes)
        except self._module.RPCError as error:
            raise BatchError(f"Slurm does not take a comment on job {job_id}: {error}") from None

    def version(self) -> str:
        return f"{super().version()}, pyslurm {self._module.__version__}"

    @property
    def _module(self) -> Any:
        if self._imported is None:
            self._imported = importlib.import_module("pyslurm")
        return self._imported


def _release(version: str) -> tuple[int, int] | None:
    """(25, 11) of "25.11.2"; Slurm writes 22.05 what pyslurm writes 22.5."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None
