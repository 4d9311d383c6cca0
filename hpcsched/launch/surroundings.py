"""What a job's needs mean on this host: its cores, its memory, its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hpcsched.contract import variables
from hpcsched.core.mechanisms.cpu.cores import ON_CORES
from hpcsched.core.model import Device
from hpcsched.launch.base import LaunchPlan
from hpcsched.launch.core_sets import CoreSets
from hpcsched.launch.environment import THREAD_VARIABLES
from hpcsched.launch.memory import KernelOom, MemoryLimits
from hpcsched.launch.modules import Loaded, Modules, laid_over
from hpcsched.launch.orphans import MARKS
from hpcsched.launch.workers import LocalWorkers

_SLOT = "cpu"
"""The kind of a CPU slot, whose cores are its own."""


def shown(
    devices: Sequence[Device], told: Mapping[str, str], inherited: Mapping[str, str]
) -> Mapping[str, str]:
    """The variables that show devices (`told`): on GPUs, numbers of threads that are set already go first."""
    own = inherited if all(device.kind != _SLOT for device in devices) else {}
    return {name: told[name] for name in told if name not in THREAD_VARIABLES or name not in own}


class Surroundings:
    """Gives the workers of one launcher what their jobs' needs say.

    `environ`: what workers inherit. `gpu_cores`: see `CoreSets`.
    """

    def __init__(self, environ: Mapping[str, str], gpu_cores: Sequence[int]) -> None:
        self._environ, self._cores = environ, CoreSets(gpu_cores)
        self._pins = bool(gpu_cores)
        self._modules = Modules(environ)
        self._loaded: dict[int, Loaded] = {}
        """By job what came of loading its modules, for ranks that join it."""
        self._memory = MemoryLimits()
        self._kernel = KernelOom()

    def sample(self) -> None:
        """To be called about once a second."""
        self._kernel.sample()

    def close(self) -> None:
        """Watch no memory any longer, and end what still loads modules."""
        self._memory.close()
        self._modules.close()

    # -- modules ---------------------------------------------------------------------------------------

    def ready_for(self, plan: LaunchPlan) -> bool:
        """Whether the job's modules are loaded; if not, that is begun."""
        modules = plan.needs.modules if plan.needs else ()
        known = not modules or (plan.joins is not None and plan.job_id in self._loaded)
        return known or self._modules.ready(modules, (plan.job_id, plan.attempt), _marks(plan))

    def give_up(self, job_id: int, attempt: int) -> None:
        """An attempt is not started any more: what loads modules for it alone is ended."""
        self._modules.give_up((job_id, attempt))

    def environ(self, plan: LaunchPlan) -> Mapping[str, str]:
        """What the job inherits, its modules loaded. Raises BadEnvironment."""
        modules = plan.needs.modules if plan.needs else ()
        if not modules:
            return self._environ
        if plan.joins is None or plan.job_id not in self._loaded:
            who = (plan.job_id, plan.attempt)
            self._loaded[plan.job_id] = self._modules.loaded(modules, who, _marks(plan))
        return laid_over(self._environ, self._loaded[plan.job_id].changes)

    def said(self, plan: LaunchPlan) -> bytes:
        """What the modules have said while they were loaded for this launch, in whole lines."""
        found = self._loaded.get(plan.job_id) if plan.joins is None and plan.needs else None
        return found.said.rstrip() + b"\n" if found and found.said.strip() else b""

    def forget(self, job_id: int) -> None:
        """A job has no next attempt."""
        self._loaded.pop(job_id, None)

    # -- cores -----------------------------------------------------------------------------------------

    def _each(self, plan: LaunchPlan) -> int | None:
        """The cores that the job has for each GPU; None where that is not for us to say."""
        each = plan.needs.cpus_per_gpu if plan.needs else None
        own = any(device.kind in (_SLOT, ON_CORES) for device in plan.devices)
        return each if each and self._pins and not own else None

    def with_threads(self, plan: LaunchPlan, shown: Mapping[str, str]) -> Mapping[str, str]:
        """The variables that show devices to a program, with as many threads as its rank has cores."""
        each = self._each(plan)
        threads = {name: str(each) for name in THREAD_VARIABLES if name in shown}
        return shown if each is None else {**shown, **threads}

    def cores(
        self,
        plan: LaunchPlan,
        groups: Sequence[tuple[Device, ...]],
        usual: Callable[[Sequence[Device]], frozenset[int] | None],
        workers: LocalWorkers,
    ) -> list[frozenset[int] | None]:
        """The cores that each process of an attempt is pinned to, until all have ended. `groups`: the devices
        of each. `usual`: the cores near devices, which a job has that does not say how many it needs."""
        each = self._each(plan)
        if each is None:
            return [usual(devices) for devices in groups]
        one_for_all = not plan.per_rank  # each process sees all GPUs, and has the cores for all
        sets = [
            self._cores.take(each * len(devices), usual(devices))
            for devices in (groups[:1] if one_for_all else groups)
        ]
        for taken in sets:
            workers.at_end.append(lambda taken=taken: self._cores.give_back(taken))  # type: ignore[misc]
        return [*sets] * len(groups) if one_for_all else [*sets]

    # -- memory ----------------------------------------------------------------------------------------

    def hold_memory(self, plan: LaunchPlan, workers: LocalWorkers) -> None:
        """Hold the workers, which have not begun or only just, to their job's memory; and see to it that an
        end for lack of memory has a name."""
        limit_mib, job_id = (plan.needs.memory_mib if plan.needs else None), plan.job_id
        if limit_mib is not None:
            processes = workers.processes
            # A share of cores is a cgroup of its own, and a process is in one.
            env, cgroup = workers.environ, plan.share is None
            marks = {name: env[name] for name in MARKS} if env.keys() >= MARKS else None
            self._memory.hold(job_id, processes, limit_mib, cgroup=cgroup, marks=marks)
            workers.at_end.append(lambda: self._memory.release(job_id, processes))

        def why(killed: bool) -> tuple[str, bool]:
            if limit_mib is not None and (words := self._memory.exceeded(job_id)):
                return words, True
            words = "the kernel's OOM killer has ended it: this host, or this batch job on it, had none left"
            return (words if killed and self._kernel.struck() else ""), False

        workers.on_failed = why


def _marks(plan: LaunchPlan) -> Mapping[str, str]:
    """The variable by which what loads modules is known to be the run's: several jobs may wait for it."""
    return {name: plan.env[name] for name in (variables.RUN_ID,) if name in plan.env}
