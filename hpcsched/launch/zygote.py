"""Warm processes: a zygote that has imported torch forks workers, which need not do it again.

Such a process is like one started from nothing, or it is not taken: the zygote was given an environment
and cores as workers are, so that all that libraries make of these when they are loaded is the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcsched.contract import variables
from hpcsched.contract.ranks import tells_rank
from hpcsched.contract.zygote import READY, Request, decode_answer
from hpcsched.errors import BadInput
from hpcsched.launch.spawn import Start, ignoring, spawn, standing_in

TRAINING, KEEPER = PROGRAMS = ("hpcsched.worker", "hpcsched.worker.keeper")
"""What is run from the zygote, as modules."""

ZYGOTE = "hpcsched.worker.zygote"

ANSWER_WITHIN_S = 2.0
"""How long a launch waits for the zygote before it goes without."""

STANDBYS = 4
"""What is usual, where there are as many devices: each takes some 100 MB."""

MOST_STARTS = 4
"""Of a zygote that always ends, or does not answer."""

FORGIVEN_AFTER_S = 3600.0
"""One that has served for so long has not failed at its start: the starts before it count no more."""

_EARLY = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TMP", "TEMP"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "OPENBLAS", "BLIS_", "NUMEXPR", "NPY_", "NUMPY"),
    *("TORCH", "PYTORCH", "ATEN_", "TRITON", "CUDA", "CUBLAS", "CUDNN", "NVIDIA_", "NCCL", "GLOO", "UCX_"),
    *("HIP_", "HSA_", "ROC", "MIOPEN", variables.RUN_ID),
)
"""Variables that may be read when libraries are loaded; and the run's, by which orphans are found."""

_LATE = frozenset({"CUDA_VISIBLE_DEVICES", "TORCH_NCCL_ASYNC_ERROR_HANDLING"})
"""Read once, when a GPU is used first. A zygote that was not given them does not use it, nor do its
standbys: they may come with the task. One that was given them is for tasks with the same."""

_NO_ZYGOTE = frozenset({"OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"})
"""These place threads on cores at the moment a library is loaded: on the zygote's."""

_PR_SET_CHILD_SUBREAPER = 36


MOST_ENVIRONMENTS = 4
"""So many interpreters have a zygote at a time: each takes some 200 MB, and its standbys as much more."""


class WarmPools:
    """Warm processes of each interpreter that is in use; those used last are kept.

    See `WarmProcesses` for the arguments.
    """

    def __init__(
        self, *, standbys: int, rooms: Sequence[frozenset[int]], shielded: frozenset[signal.Signals]
    ) -> None:
        self._standbys, self._rooms, self._shielded = standbys, rooms, shielded
        self._pools: OrderedDict[str, WarmProcesses] = OrderedDict()
        self._stamps: dict[str, int] = {}

    def of(self, python: str, stamp: int = 0) -> WarmProcesses:
        """Those of this interpreter; new ones when its stamp is new, as it imports something else then.

        A stamp of 0 is not known.
        """
        if stamp and self._stamps.setdefault(python, stamp) != stamp:
            self._stamps[python] = stamp
            if python in self._pools:
                self._pools.pop(python).close()
        if python not in self._pools:
            self._pools[python] = WarmProcesses(
                python, standbys=self._standbys, rooms=self._rooms, shielded=self._shielded
            )
        self._pools.move_to_end(python)
        if len(self._pools) > MOST_ENVIRONMENTS:
            self._pools.popitem(last=False)[1].close()
        return self._pools[python]

    def close(self) -> None:
        """End all zygotes and what waits in them."""
        for pool in self._pools.values():
            pool.close()


class WarmProcesses:
    """Our side of the zygote of an interpreter, `python`: started when first of use, and again when it has
    ended.

    `standbys`: how many forked processes it keeps that only wait for their task. `rooms`: sets of cores that
    workers get, all of one size; () if workers are not pinned.
    """

    def __init__(
        self,
        python: str,
        *,
        standbys: int,
        rooms: Sequence[frozenset[int]],
        shielded: frozenset[signal.Signals],
    ) -> None:
        self._python = python
        self._standbys, self._rooms, self._shielded = standbys, tuple(rooms), shielded
        self._line: socket.socket | None = None
        self._pid = 0
        self._starts = 0
        self._begun_at = 0.0
        self._early: dict[str, str] = {}
        self.ready = False
        """Whether there is a zygote that has said that it can fork."""

    def spawn(self, start: Start, early: Mapping[str, str]) -> tuple[int, int] | None:
        """A process that is as `start` says: its pid, and a descriptor to write a byte to for it to begin.

        It ends without having begun if that is closed first. `early`: the environment that a zygote for such
        processes needs. None: it must be started from nothing.
        """
        self.look()
        with contextlib.suppress(OSError):  # such as no descriptor left
            if self._line and self.ready and self._fits(start) and (found := self._ask(self._line, start)):
                return found
            if self._line is None:
                self._begin(early)
        return None

    def look(self) -> None:
        """Note whether the zygote has become ready, or has ended. Never blocks."""
        while self._line is not None:
            try:
                said = self._line.recv(64)
            except BlockingIOError:
                return
            except OSError:
                said = b""
            if not said:
                self._end()
            elif said == READY:
                self.ready = True

    def close(self) -> None:
        """End the zygote and what waits in it; what it has launched lives on."""
        self._end()
        self._starts = MOST_STARTS

    def _fits(self, start: Start) -> bool:
        """Whether what the zygote has loaded is as if this process had done so."""
        cores = len(start.cores or ())
        alike = start.argv[2] != TRAINING or cores == (len(self._rooms[0]) if self._rooms else 0)
        wanted = _early(start.env)
        late = {name for name in _LATE if name in wanted and name not in self._early}
        return alike and {name: value for name, value in wanted.items() if name not in late} == self._early

    def _begin(self, env: Mapping[str, str]) -> None:
        relative = [p for p in env.get("PYTHONPATH", "/").split(os.pathsep) if not p.startswith("/")]
        if self._starts == MOST_STARTS or relative or _NO_ZYGOTE & env.keys():
            return
        self._starts += 1
        rooms = [",".join(map(str, sorted(room))) for room in self._rooms]
        with contextlib.ExitStack() as stack:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(theirs.close)
            unused = stack.enter_context(contextlib.ExitStack())
            unused.callback(ours.close)
            nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, nowhere)
            start = Start(
                program=self._python,
                argv=(self._python, "-m", ZYGOTE, str(self._standbys), str(ANSWER_WITHIN_S), *rooms),
                env=env,
                cwd=Path("/"),  # nothing is to be imported from where the agent happens to be
                output=nowhere,
                inherited={variables.ZYGOTE_FD: theirs.fileno()},
                cores=self._rooms[0] if self._rooms else None,
            )
            stack.enter_context(standing_in(start.cwd))
            stack.enter_context(ignoring(self._shielded))
            self._pid = spawn(start, self._shielded)
            unused.pop_all()
        ours.setblocking(False)
        self._line, self._early, self.ready = ours, _early(env), False
        self._begun_at = time.monotonic()

    def _ask(self, line: socket.socket, start: Start) -> tuple[int, int] | None:
        request = Request(
            argv=start.argv,
            env=start.env,
            cwd=str(start.cwd),
            cores=tuple(sorted(start.cores)) if start.cores else None,
            inherited=tuple(start.inherited),
            # One that has computed something has threads, and could not pass torch on to its pack's process.
            hurry=start.argv[2] == TRAINING and variables.PACK not in start.env,
        )
        permit, go = os.pipe2(os.O_CLOEXEC)
        line.settimeout(ANSWER_WITHIN_S)
        try:
            _take_orphans(True)
            try:
                socket.send_fds(line, [request.encode()], [start.output, permit, *start.inherited.values()])
                pid = decode_answer(line.recv(64))
            finally:
                _take_orphans(False)
        except (OSError, BadInput) as error:
            if isinstance(error, OSError) and error.errno == errno.EMSGSIZE:  # a long environment: never sent
                line.setblocking(False)
            else:
                self._end()  # whoever it may yet fork for this finds nobody who lets it begin
            pid = None
        else:
            line.setblocking(False)
        finally:
            os.close(permit)
        if not pid:
            os.close(go)
            return None
        return pid, go

    def _end(self) -> None:
        if self._line is None:
            return
        if self.ready and time.monotonic() - self._begun_at >= FORGIVEN_AFTER_S:
            self._starts = 0
        self._line.close()
        self._line, self.ready = None, False
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_EARLY) and not tells_rank(name)}


def _take_orphans(wanted: bool) -> None:
    """Whether processes below us that lose their parent become ours."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)
