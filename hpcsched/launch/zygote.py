"""The agent's side of zygotes: processes that have imported torch and fork workers, which start warm.

Such a worker is like one started from nothing, or it is not used: the zygote has a worker's environment and
cores, so that libraries find the same when they are loaded.
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
from hpcsched.contract.visibility import CUDA
from hpcsched.contract.zygote import READY, Request, decode_answer
from hpcsched.errors import BadInput
from hpcsched.launch.spawn import ProcessStart, ignoring_signals, in_directory, spawn

TRAINING, KEEPER = PROGRAMS = ("hpcsched.worker", "hpcsched.worker.keeper")
"""The modules that are run from the zygote."""

ZYGOTE_MODULE = "hpcsched.worker.zygote"

ANSWER_TIMEOUT_S = 2.0
"""Time that a launch waits for the zygote before it does without (chosen)."""

DEFAULT_STANDBYS = 4
"""Standbys of a host by default, at most one a device (chosen): each takes some 100 MB."""

MAX_STARTS = 4
"""Starts of a zygote that always ends, or does not answer (chosen)."""

FORGIVEN_AFTER_S = 3600.0
"""Age at which a zygote has not failed at its start: earlier starts count no more (chosen)."""

_EARLY = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TMP", "TEMP"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "OPENBLAS", "BLIS_", "NUMEXPR", "NPY_", "NUMPY"),
    *("TORCH", "PYTORCH", "ATEN_", "TRITON", "CUDA", "CUBLAS", "CUDNN", "NVIDIA_", "NCCL", "GLOO", "UCX_"),
    *("HIP_", "HSA_", "ROC", "MIOPEN", variables.RUN_ID),
)
"""Variables that may be read when libraries are loaded; and the run's, by which orphans are found."""

_LATE = frozenset({CUDA.variable, *CUDA.hidden(), "TORCH_NCCL_ASYNC_ERROR_HANDLING"})
"""Read once, when a GPU is used first. A zygote that was not given them does not use it, nor do its
standbys: they may come with the task. One that was given them is for tasks with the same."""

_NO_ZYGOTE = frozenset({"OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"})
"""These place threads on cores at the moment a library is loaded: on the zygote's."""

_PR_SET_CHILD_SUBREAPER = 36


MAX_ZYGOTES = 4
"""The most zygotes at a time (chosen): each takes some 200 MB, and its standbys as much more."""


class Zygotes:
    """The zygotes of the interpreters that were used last.

    See `Zygote` for the arguments.
    """

    def __init__(
        self, *, standbys: int, core_sets: Sequence[frozenset[int]], shielded: frozenset[signal.Signals]
    ) -> None:
        self._standbys, self._core_sets, self._shielded = standbys, core_sets, shielded
        self._zygotes: OrderedDict[str, Zygote] = OrderedDict()
        self._stamps: dict[str, int] = {}

    def of(self, python: str, stamp: int = 0) -> Zygote:
        """The zygote of an interpreter; a new one when its `Interpreter.stamp` (0: not known) is new."""
        if stamp and self._stamps.setdefault(python, stamp) != stamp:
            self._stamps[python] = stamp
            if python in self._zygotes:
                self._zygotes.pop(python).close()
        if python not in self._zygotes:
            self._zygotes[python] = Zygote(
                python, standbys=self._standbys, core_sets=self._core_sets, shielded=self._shielded
            )
        self._zygotes.move_to_end(python)
        if len(self._zygotes) > MAX_ZYGOTES:
            self._zygotes.popitem(last=False)[1].close()
        return self._zygotes[python]

    def close(self) -> None:
        """End all zygotes and their standbys."""
        for zygote in self._zygotes.values():
            zygote.close()


class Zygote:
    """The zygote of an interpreter, `python`: started when it is first of use, and again when it has ended.

    `standbys`: the number of forked processes that wait for their task. `core_sets`: the sets of cores that
    workers get, all of one size; () if workers are not pinned.
    """

    def __init__(
        self,
        python: str,
        *,
        standbys: int,
        core_sets: Sequence[frozenset[int]],
        shielded: frozenset[signal.Signals],
    ) -> None:
        self._python = python
        self._standbys, self._core_sets, self._shielded = standbys, tuple(core_sets), shielded
        self._socket: socket.socket | None = None
        self._pid = 0
        self._starts = 0
        self._begun_at = 0.0
        self._early: dict[str, str] = {}
        self.ready = False
        """Whether there is a zygote that has said that it can fork."""

    def spawn(self, start: ProcessStart, early: Mapping[str, str]) -> tuple[int, int] | None:
        """A forked process: its pid, and a descriptor to write a byte to for it to begin; None: not possible.

        It ends without having begun if that is closed first. `early`: the environment that a zygote for such
        processes needs.
        """
        self.look()
        with contextlib.suppress(OSError):  # such as no descriptor left
            if (
                self._socket
                and self.ready
                and self._fits(start)
                and (found := self._ask(self._socket, start))
            ):
                return found
            if self._socket is None:
                self._begin(early)
        return None

    def look(self) -> None:
        """Note whether the zygote has become ready, or has ended. Never blocks."""
        while self._socket is not None:
            try:
                said = self._socket.recv(64)
            except BlockingIOError:
                return
            except OSError:
                said = b""
            if not said:
                self._end()
            elif said == READY:
                self.ready = True

    def close(self) -> None:
        """End the zygote and its standbys; processes that have begun live on."""
        self._end()
        self._starts = MAX_STARTS

    def _fits(self, start: ProcessStart) -> bool:
        """Whether the zygote has loaded its libraries as this process would."""
        cores = len(start.cores or ())
        alike = start.argv[2] != TRAINING or cores == (len(self._core_sets[0]) if self._core_sets else 0)
        wanted = _early(start.env)
        late = {name for name in _LATE if name in wanted and name not in self._early}
        return alike and {name: value for name, value in wanted.items() if name not in late} == self._early

    def _begin(self, env: Mapping[str, str]) -> None:
        relative = [p for p in env.get("PYTHONPATH", "/").split(os.pathsep) if not p.startswith("/")]
        if self._starts == MAX_STARTS or relative or _NO_ZYGOTE & env.keys():
            return
        self._starts += 1
        core_sets = [",".join(map(str, sorted(cores))) for cores in self._core_sets]
        with contextlib.ExitStack() as stack:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(theirs.close)
            unused = stack.enter_context(contextlib.ExitStack())
            unused.callback(ours.close)
            nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, nowhere)
            start = ProcessStart(
                program=self._python,
                argv=(
                    self._python,
                    "-m",
                    ZYGOTE_MODULE,
                    str(self._standbys),
                    str(ANSWER_TIMEOUT_S),
                    *core_sets,
                ),
                env=env,
                cwd=Path("/"),  # nothing is to be imported from where the agent happens to be
                output=nowhere,
                inherited={variables.ZYGOTE_FD: theirs.fileno()},
                cores=self._core_sets[0] if self._core_sets else None,
            )
            stack.enter_context(in_directory(start.cwd))
            stack.enter_context(ignoring_signals(self._shielded))
            self._pid = spawn(start, self._shielded)
            unused.pop_all()
        ours.setblocking(False)
        self._socket, self._early, self.ready = ours, _early(env), False
        self._begun_at = time.monotonic()

    def _ask(self, channel: socket.socket, start: ProcessStart) -> tuple[int, int] | None:
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
        channel.settimeout(ANSWER_TIMEOUT_S)
        try:
            _take_orphans(True)
            try:
                socket.send_fds(
                    channel, [request.encode()], [start.output, permit, *start.inherited.values()]
                )
                pid = decode_answer(channel.recv(64))
            finally:
                _take_orphans(False)
        except (OSError, BadInput) as error:
            if isinstance(error, OSError) and error.errno == errno.EMSGSIZE:  # a long environment: never sent
                channel.setblocking(False)
            else:
                self._end()  # whoever it may yet fork for this finds nobody who lets it begin
            pid = None
        else:
            channel.setblocking(False)
        finally:
            os.close(permit)
        if not pid:
            os.close(go)
            return None
        return pid, go

    def _end(self) -> None:
        if self._socket is None:
            return
        if self.ready and time.monotonic() - self._begun_at >= FORGIVEN_AFTER_S:
            self._starts = 0
        self._socket.close()
        self._socket, self.ready = None, False
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_EARLY) and not tells_rank(name)}


def _take_orphans(wanted: bool) -> None:
    """Set whether orphans among our descendants become our children (PR_SET_CHILD_SUBREAPER)."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)
