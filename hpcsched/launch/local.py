"""The launcher of this host: one process for each rank, each the leader of its own session.

In its own session a SIGTSTP that comes before the program's handler is discarded instead of stopping it, and
its process group holds its children too.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from hpcsched.contract import driver, files, variables
from hpcsched.contract.environment import Environment
from hpcsched.contract.visibility import CUDA
from hpcsched.core.mechanisms.cpu.cores import ON_CORES, cores_of
from hpcsched.core.model import Device
from hpcsched.core.processes import KnownLauncher, launcher_of
from hpcsched.errors import BadEnvironment, LaunchError
from hpcsched.launch.base import LaunchPlan, RankPlacement
from hpcsched.launch.containers.choose import contained
from hpcsched.launch.cpu_shares import CpuShares
from hpcsched.launch.environment import (
    Rank,
    descriptor_identities,
    divided_threads,
    inherited,
    launcher_variables,
    rank_variables,
)
from hpcsched.launch.interpreters import Interpreter, Interpreters
from hpcsched.launch.mps import MpsClients, as_client
from hpcsched.launch.orphans import MARKS, kill_marked
from hpcsched.launch.own_gpus import has_parts, own_device, refuse_other_gpus
from hpcsched.launch.placeholders import fill_placeholders
from hpcsched.launch.ports import Ports
from hpcsched.launch.proc import StartTimes, clock_ticks
from hpcsched.launch.shared_memory import Keepers, KeeperTask, SharedMemoryStore
from hpcsched.launch.spawn import (
    FoundPrograms,
    ProcessStart,
    ignoring_signals,
    in_directory,
    set_idle_priority,
    spawn,
)
from hpcsched.launch.surroundings import Surroundings, shown
from hpcsched.launch.workers import RANK_0_FDS, LocalWorkers
from hpcsched.launch.zygote import KEEPER, PROGRAMS, Zygotes
from hpcsched.patience import TRANSIENT
from hpcsched.watchers import let_read

_NOT_A_KEEPERS = (*RANK_0_FDS, variables.ARENA_FD, variables.JOINING, variables.LANE, variables.PACK)
"""Variables of ranks that their keeper does not get."""

_OF_OUR_BATCH_JOB = (variables.NODE, "SLURM_JOB_ID", "LSB_JOBID", "LSB_JOBINDEX", "JOB_ID", "SGE_TASK_ID")
"""Variables of our batch job: another one, submitted by an attempt, inherits MARKS but not these."""


class LocalLauncher:
    """Starts workers as children of this process.

    Args:
        cpus: the cores to pin a device's rank to, or None (`Devices.cpus`).
        gpu_cores: those for jobs that say how many they need for each GPU (see `CoreSets`).
        device_env, numbered: the variables that show devices to a program (see `Devices`).
        shielded: signals that a batch system sends to all of a job's processes, and that only we
            understand. Workers ignore them, and so does what they start, unless they say otherwise
            themselves; but for SIGTERM, by which we and many programs end processes of ours and theirs.
        environ: what workers inherit below the plan's variables, less what is not a worker's (see
            `environment.inherited`); default: this process's, as it is now.
        devices: those that workers will be started on.
        standbys: how many warm processes of an interpreter wait for tasks (see `Zygote`), at most one
            a device; None: every process is started from nothing.

    Where a plan's directory is not the agent's own, the agent stands in it for the fraction of a
    millisecond that the spawn takes: no other thread may use relative paths meanwhile.
    """

    def __init__(
        self,
        *,
        cpus: Callable[[Device], frozenset[int] | None] = lambda device: None,
        gpu_cores: Sequence[int] = (),
        device_env: Callable[[Sequence[Device]], Mapping[str, str]] = lambda devices: {},
        numbered: Callable[[Sequence[Device]], Mapping[str, str]] = lambda devices: {},
        shielded: frozenset[signal.Signals] = frozenset(),
        environ: Mapping[str, str] | None = None,
        devices: Sequence[Device] = (),
        standbys: int | None = None,
    ) -> None:
        self._shielded = shielded - {signal.SIGTERM}
        self._cpus, self._device_env, self._numbered = cpus, device_env, numbered
        self._environ = inherited(os.environ if environ is None else environ)
        if signal.SIGINT in shielded:  # torchrun takes it over, ignored or not, and would end its ranks
            self._environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGHUP,SIGQUIT")
        self.interpreters = Interpreters(self._environ)
        """The interpreters of the jobs that are started here."""
        self._ports, self._start_times, self._programs = Ports(), StartTimes(), FoundPrograms()
        self._shared_memory = SharedMemoryStore()
        self._cpu_shares = CpuShares()
        self._surroundings = Surroundings(self._environ, gpu_cores)
        self._mps = MpsClients()
        self._keepers = Keepers(self._begin_keeper)
        self._usual, core_sets = self._usual_devices(devices)
        self._zygotes = None
        if standbys is not None:
            standbys = min(standbys, len(devices))
            self._zygotes = Zygotes(standbys=standbys, core_sets=core_sets, shielded=self._shielded)
        _keep_descriptors_to_ourselves()

    def launch(self, plan: LaunchPlan, placement: RankPlacement | None = None) -> LocalWorkers:
        """Start all ranks of this host, or none; see `KnownLauncher.launch`.

        The numbers of `placement` are among all ranks of the attempt; without it, the plan's count.
        """
        placement = placement or RankPlacement(first_rank=plan.first_rank, world_size=plan.world_size)
        workers = LocalWorkers(plan, placement, self._ports.take)
        try:
            with _errors_as_launch_errors(plan):
                self._start(plan, placement, workers)
        except BaseException as error:
            workers.abandon()
            if isinstance(error, LaunchError):
                _write_output(plan.output, f"hpcsched: {error}\n")
            raise
        return workers

    def ready_for(self, plan: LaunchPlan) -> bool:
        """Whether the plan's interpreter needs no check, or has been checked."""
        who = (plan.job_id, plan.attempt)
        asked = (plan.module or plan.arena) and not plan.container
        known = not asked or self.interpreters.ready(plan.environment, who)
        return self._surroundings.ready_for(plan) and known

    def give_up(self, job_id: int, attempt: int) -> None:
        """End what was begun for an attempt that was not ready, and is not to be started any more."""
        self._surroundings.give_up(job_id, attempt)

    def forget(self, job_id: int) -> None:
        """Free the shared memory of a job: it has no next attempt."""
        self._surroundings.forget(job_id)
        self._shared_memory.forget(job_id)

    def keeping(self) -> set[int]:
        """Ids of the jobs whose state of a quick suspend is not durable yet; to be called repeatedly."""
        self._surroundings.sample()
        return self._keepers.keeping()

    def wait_kept(self, timeout_s: float) -> set[int]:
        """Wait until all of these states are durable, or the time is over; ids of the jobs that are left."""
        return self._keepers.wait(timeout_s)

    def close(self) -> None:
        """End zygotes and free shared memory. Workers live on, and so do keepers that have started."""
        if self._zygotes:
            self._zygotes.close()
        self._keepers.close()
        self._cpu_shares.close()
        self.interpreters.close()
        self._surroundings.close()
        self._mps.close()
        self._shared_memory.close()

    # -- starting --------------------------------------------------------------------------------------

    def _start(self, plan: LaunchPlan, placement: RankPlacement, workers: LocalWorkers) -> None:
        argv, told_by_job = fill_placeholders(plan, placement, workers)
        interpreter = self._interpreter_of(plan)
        if plan.module and (python := interpreter or plan.container):
            argv = (python.python, "-m", plan.module)
        around = self._surroundings.environ(plan)
        env = {
            **around,
            **self._shown(plan, around),
            **told_by_job,
            **Environment(
                notify_pid=os.getpid(),
                launched_at=time.monotonic(),
                joining=None if plan.joins is None else True,
            ).to_environ(),
        }
        if interpreter:
            env = interpreter.activated(env)
        groups = [(device,) for device in plan.devices] if plan.per_rank else [plan.devices] * plan.processes
        world_size = placement.world_size or len(groups)
        own_part = plan.per_rank and has_parts(plan.devices)
        refuse_other_gpus(plan, argv, env)
        if not plan.parallel:
            env = {**self._launcher_told(plan, placement, workers), **env}
        if variables.CUDA_DEVICES in env:
            env |= driver.told(env)
        self._mps.watch(workers, env)
        workers.environ = env
        program = ""
        if plan.container is None:
            program = self._programs.find(argv[0] if argv else "", plan.cwd, env.get("PATH", os.defpath))
        program, argv = as_client(plan, program, argv, env)
        descriptors, keeper = {}, self._keeper_of(plan)
        if keeper:
            descriptors[variables.ARENA_FD] = self._shared_memory.take(plan.job_id)
            workers.at_end.append(lambda: self._shared_memory.leave(plan.job_id))
        output = _open_output(plan.output)
        starts = []
        try:
            if not plan.new:
                workers.remove_attempt_files()
            os.write(output, self._surroundings.said(plan))
            cores = self._surroundings.cores(plan, groups, self._cores, workers)
            for local, devices in enumerate(groups):
                rank = Rank(
                    rank=placement.first_rank + local,
                    world_size=world_size,
                    local_rank=0 if own_part else local,  # as torchrun --virtual-local-rank has it
                    local_world_size=len(groups),
                    node_rank=placement.node_rank,
                    nodes=placement.nodes,
                )
                told = rank_variables(rank, env, workers) if plan.parallel else {}
                if own_part:
                    told |= own_device(self._device_env(devices), env)
                given = {
                    **(workers.pipes(control=plan.per_rank or plan.arena) if rank.rank == 0 else {}),
                    **descriptors,
                }
                starts.append(
                    ProcessStart(
                        program=program,
                        argv=argv,
                        env={**env, **told, **descriptor_identities(given)},
                        cwd=plan.cwd,
                        output=output,
                        inherited=given,
                        cores=cores[local],
                        idle=plan.idle,
                    )
                )
            if plan.container:
                starts, workers.leaders_pass_signals = contained(starts, plan, around)
            if keeper and placement.first_rank == 0:
                if not plan.new:
                    (plan.folder / files.held(plan.attempt)).unlink(missing_ok=True)  # of an earlier life
                workers.on_held = lambda attempt: self._keep(plan, starts[0], keeper, attempt)
            if not plan.module and plan.joins is None and env.keys() >= MARKS:
                marks = {name: env[name] for name in (*MARKS, *_OF_OUR_BATCH_JOB) if name in env}
                workers.kill_left.append(lambda: kill_marked(marks))
            stamp = interpreter.stamp if interpreter else 0
            # A warm process has loaded its libraries before the modules said where they are.
            cold = plan.container or (plan.needs and plan.needs.modules)
            self._spawn(starts, workers, module="" if cold else plan.module, stamp=stamp)
        finally:
            os.close(output)
            workers.close_theirs()
        if plan.share is not None and plan.share < len(starts[0].cores or ()):
            self._hold(plan.share, workers)
        self._surroundings.hold_memory(plan, workers)
        workers.go()

    def _interpreter_of(self, plan: LaunchPlan) -> Interpreter | None:
        if plan.container:
            return None  # it has a Python of its own
        find = self.interpreters.trainers if plan.module else self.interpreters.programs
        return find(plan.environment)

    @staticmethod
    def _launcher_told(plan: LaunchPlan, placement: RankPlacement, workers: LocalWorkers) -> dict[str, str]:
        node, nodes = placement.node_rank, placement.nodes
        launcher, gpus = launcher_of(plan.argv), len(plan.devices)
        return launcher_variables(launcher, gpus=gpus, node_rank=node, nodes=nodes, where=workers)

    def _spawn(
        self, starts: Sequence[ProcessStart], workers: LocalWorkers, *, module: str, stamp: int = 0
    ) -> None:
        """Start processes from the zygote of their interpreter as far as it can, the others from nothing."""
        begun = 0
        if self._zygotes and module in PROGRAMS:
            zygote = self._zygotes.of(starts[0].argv[0], stamp)
            for start in starts:
                found = zygote.spawn(start, self._usual_environment(start))
                if found is None:
                    break
                if start.idle:
                    set_idle_priority(found[0])  # it has not begun yet
                workers.add(*found)
                begun += 1
        if begun < len(starts):
            with in_directory(starts[0].cwd), ignoring_signals(self._shielded):
                for start in starts[begun:]:
                    since = clock_ticks()
                    pid = spawn(start, self._shielded)
                    if start.idle:  # before the program has had time to start threads, which inherit it
                        set_idle_priority(pid)
                    workers.add(pid, began=partial(self._start_times.of, since=since))

    def _hold(self, share: float, workers: LocalWorkers) -> None:
        """Hold the workers, and what they start, to a CPU share; not while they save and leave."""
        for process in workers.processes:
            let_go = self._cpu_shares.hold(process, share)
            workers.before_leaving.append(let_go)
            workers.at_end.append(let_go)

    def _shown(self, plan: LaunchPlan, around: Mapping[str, str]) -> Mapping[str, str]:
        """The variables that show the devices to a program, over those that it inherits; on CPU cores it sees
        none, and a training finds its threads itself."""
        if all(device.kind == ON_CORES for device in plan.devices):
            threads = str(math.ceil(plan.share or 1))
            return {**CUDA.hidden(), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        told = shown(plan.devices, self._device_env(plan.devices), around)
        told = self._surroundings.with_threads(plan, told)
        if launcher_of(plan.argv) is KnownLauncher.DEEPSPEED:  # it calls int() on each name
            told = {**told, **self._numbered(plan.devices)}
        if plan.per_rank or launcher_of(plan.argv):
            return told  # a launcher's ranks are on one each, too
        cores = self._cores(plan.devices)
        return divided_threads(told, devices=len(plan.devices), processes=plan.processes, cores=cores)

    def _cores(self, devices: Sequence[Device]) -> frozenset[int] | None:
        sets = [frozenset(cores_of(d)) if d.kind == ON_CORES else self._cpus(d) for d in devices]
        return None if None in sets else frozenset().union(*(cores for cores in sets if cores)) or None

    def _usual_devices(self, devices: Sequence[Device]) -> tuple[tuple[Device, ...], list[frozenset[int]]]:
        """The devices whose ranks have as many cores as most have, and these cores."""
        cores = {device: self._cores([device]) or frozenset() for device in devices}
        sizes = Counter(map(len, cores.values()))
        usual = tuple(device for device in devices if len(cores[device]) == sizes.most_common(1)[0][0])
        return usual, [cores[device] for device in usual if cores[device]]

    def _usual_environment(self, start: ProcessStart) -> dict[str, str]:
        """The environment of a zygote: the variables that all workers of this run have in common, but for the
        GPUs: the driver would take its first answer for good."""
        run = {name: value for name, value in start.env.items() if name == variables.RUN_ID}
        usual = self._usual[:1]
        common = {**self._environ, **shown(usual, self._device_env(usual), self._environ), **run}
        if common.pop(variables.CUDA_DEVICES, None):
            common.pop(CUDA.variable, None)
        return common

    # -- keeping ---------------------------------------------------------------------------------------

    def _keeper_of(self, plan: LaunchPlan) -> str:
        """The interpreter of the keeper of a job's shared memory; "": none, so there is no shared memory."""
        with contextlib.suppress(BadEnvironment):
            return self.interpreters.trainers(plan.environment).python if plan.arena else ""
        return ""

    def _keep(self, plan: LaunchPlan, first: ProcessStart, python: str, attempt: int) -> None:
        """Have a keeper make durable the state that an attempt has left in shared memory."""
        env = {name: value for name, value in first.env.items() if name not in _NOT_A_KEEPERS}
        arena = self._shared_memory.take(plan.job_id)
        self._shared_memory.leave(plan.job_id)
        self._keepers.keep(
            KeeperTask(
                job_id=plan.job_id,
                attempt=attempt,
                folder=plan.folder,
                cwd=plan.cwd,
                output=plan.output,
                env={**env, **Environment(attempt=attempt).to_environ()},
                arena=os.dup(arena),
                python=python,
            )
        )

    def _begin_keeper(self, keep: KeeperTask) -> tuple[int, int]:
        """Start a keeper; its pid and pidfd. It runs on all of the agent's cores, not on one device's."""
        workers = LocalWorkers()
        output = _open_output(keep.output)
        try:
            start = ProcessStart(
                program=keep.argv[0],
                argv=keep.argv,
                env={**keep.env, **Environment(notify_pid=os.getpid()).to_environ()},
                cwd=keep.cwd,
                output=output,
                inherited={variables.ARENA_FD: keep.arena},
                cores=frozenset(os.sched_getaffinity(0)),
            )
            self._spawn([start], workers, module=KEEPER)
            workers.go()
            return workers.processes[0][0], os.dup(workers.pidfds[0])
        except BaseException:
            workers.abandon()
            raise
        finally:
            os.close(output)
            workers.close()


def _keep_descriptors_to_ourselves() -> None:
    """Keep descriptors that this process was started with, such as a wrapper's lock file, from workers."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are all that is needed
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the listing's own, closed by now
                os.set_inheritable(int(name), False)


def _open_output(path: Path) -> int:
    """Open an output for programs, whatever kind of file it is; never waits for the reader of a pipe."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, flags, 0o600)
        let_read(descriptor, path.parent)
    except OSError as error:
        if error.errno == errno.ENXIO and path.is_fifo():
            error.strerror = "a pipe that nobody reads"
        raise
    os.set_blocking(descriptor, True)
    return descriptor


def _write_output(path: Path, line: str) -> None:
    """Have the job's own output say a line too, where that can be."""
    with contextlib.suppress(OSError):
        output = _open_output(path)
        try:
            os.write(output, line.encode(errors="replace"))
        finally:
            os.close(output)


@contextlib.contextmanager
def _errors_as_launch_errors(plan: LaunchPlan) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or (plan.argv[0] if plan.argv else "")
        why = error.strerror or str(error)
        if error.errno == errno.ENOEXEC:
            why += " (a script needs a first line like #!/bin/sh)"
        raise LaunchError(f"{os.fsdecode(where)}: {why}", transient=error.errno in TRANSIENT) from error
    except ValueError as error:  # a NUL byte, an empty argument list
        raise LaunchError(f"job {plan.job_id}: {error}", transient=False) from error
