"""Environment modules (Lmod, Environment Modules): the variables that `module load` sets for a job.

`module` is a function of the shell. A bash loads the modules and tells its environment, once for each launch;
what that changes is laid over what the job inherits.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from hpcsched.errors import BadEnvironment
from hpcsched.launch.bounded_run import MAX_OUTPUT_BYTES, Stopped, run_bounded
from hpcsched.printing import printable
from hpcsched.threads import started

WITHIN_S = 60.0
"""Time that modules may take to load (chosen): their files lie on a busy shared filesystem."""

FRESH_S = 5.0
"""Time that an answer counts for those that have waited for it (chosen)."""

CLOSED_WITHIN_S = 6.0
"""Time that the end of what still loads may take (chosen): it is killed, but a filesystem may hold it."""

NO_MARKS: Mapping[str, str] = {}

_NO_MODULE, _NOT_LOADED = 97, 98
_MOST_SAID_BYTES = 2**14
"""The part of what they say that is kept, from its end (chosen)."""
_MARK = b"hpcsched: the environment follows\0"
_UNCHANGED = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})
SITES = (
    "/etc/profile.d/modules.sh",
    "/etc/profile.d/lmod.sh",
    "/etc/profile.d/z00_lmod.sh",
    "/usr/share/modules/init/bash",
    "/usr/share/lmod/lmod/init/bash",
)
"""Files that define `module`, where neither the environment nor $MODULESHOME does."""

_SCRIPT = f"""
have() {{ type module >/dev/null 2>&1; }}
sites=$1
shift
have || for init in "${{MODULESHOME:-}}/init/bash" "${{LMOD_PKG:-}}/init/bash" $sites; do
  if [ -r "$init" ]; then . "$init" >/dev/null; have && break; fi
done
have || exit {_NO_MODULE}
loaded() {{  # by another name, where it is an alias of what was loaded before
  [ "${{LOADEDMODULES:-}}" != "$before" ] && return 0
  case ":${{LOADEDMODULES:-}}:" in *":$name:"* | *":$name/"*) return 0 ;; esac
  module is-loaded "$name" >/dev/null 2>&1
}}
for name in "$@"; do
  before=${{LOADEDMODULES:-}}
  module load "$name" >/dev/null && loaded || {{ printf %s "$name"; exit {_NOT_LOADED}; }}
done
printf '%s\\0' "hpcsched: the environment follows"
env -0
"""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came of loading modules: the variables that differ (None: unset), and what was said meanwhile."""

    changes: Mapping[str, str | None]
    said: bytes = b""


def load_modules(
    names: tuple[str, ...],
    environ: Mapping[str, str],
    *,
    within_s: float = WITHIN_S,
    sites: Sequence[str] = SITES,
    stop: threading.Event | None = None,
) -> Loaded:
    """Load these modules, in order, into `environ`.

    Raises BadEnvironment, in one line. Once `stop` is set it is given up: all that it has started is killed.
    """
    what = f"modules = [{', '.join(names)}]"
    try:
        argv = ["bash", "--norc", "--noprofile", "-c", _SCRIPT, "modules", " ".join(sites), *names]
        code, out, err = run_bounded(argv, environ=environ, within_s=within_s, stop=stop)
    except Stopped:
        raise BadEnvironment(f"{what}: given up while they were loaded", transient=True) from None
    except TimeoutError:
        raise BadEnvironment(f"{what}: not loaded within {within_s:g} s", transient=True) from None
    except (OSError, ValueError) as error:
        raise BadEnvironment(f"{what}: bash cannot be started: {printable(str(error))}") from None
    if code == _NO_MODULE:
        known = f"neither $MODULESHOME/init/bash nor one of {', '.join(sites[:2])} defines it"
        raise BadEnvironment(f"{what}: there is no `module` on this host: {known}")
    _, mark, told = out.partition(_MARK)
    if code or not mark or len(out) >= MAX_OUTPUT_BYTES:
        lines = err.decode(errors="replace").split("\n")
        said = " ".join(line.strip() for line in lines if line.strip())[:300]
        if not said and code == _NOT_LOADED:
            said = f"`module load {out.decode(errors='replace')}` has loaded nothing, and says nothing"
        elif not said:
            said = f"bash ends with exit code {code}" if code else "their environment is too large"
        raise BadEnvironment(f"{what}: cannot be loaded: {printable(said)}")
    found: dict[str, str | None] = {}
    for entry in told.split(b"\0"):
        name, sign, value = os.fsdecode(entry).partition("=")
        if sign and name and name not in _UNCHANGED and environ.get(name) != value:
            found[name] = value
    there = {os.fsdecode(entry.partition(b"=")[0]) for entry in told.split(b"\0")}
    found |= {name: None for name in environ if name not in there and name not in _UNCHANGED}
    return Loaded(found, err[-_MOST_SAID_BYTES:])


def laid_over(environ: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """`environ` with these changes."""
    found = {**environ, **{name: value for name, value in changes.items() if value is not None}}
    return {name: value for name, value in found.items() if changes.get(name, "") is not None}


@dataclass(slots=True)
class _Loading:
    """A bash that loads modules, or has."""

    stop: threading.Event
    thread: threading.Thread = field(init=False)
    waiting: set[Hashable] = field(default_factory=set)
    loaded: Loaded | BadEnvironment | None = None
    at: float = 0.0


class Modules:
    """Loads modules for launches, each time anew, in threads.

    `environ`: what workers inherit. `clock` is monotonic, in seconds.
    """

    def __init__(self, environ: Mapping[str, str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._environ, self._clock = environ, clock
        self._loading: dict[tuple[str, ...], _Loading] = {}
        self._given_up: list[_Loading] = []

    def ready(self, names: tuple[str, ...], who: Hashable, marks: Mapping[str, str] = NO_MARKS) -> bool:
        """Whether `loaded` would answer at once; if not, they are loaded from now on, in a thread.

        `marks`: variables by which the processes that load them are known to be the run's.
        """
        loading = self._loading.get(names)
        if loading is not None and loading.thread.is_alive():
            loading.waiting.add(who)
            return False
        if loading is not None and who in loading.waiting:
            return True
        self._begin(names, marks).waiting.add(who)
        return False

    def give_up(self, who: Hashable) -> None:
        """Who has waited waits no longer: modules that nobody else waits for are not loaded any more."""
        for names, loading in list(self._loading.items()):
            waited = who in loading.waiting
            loading.waiting.discard(who)
            if waited and not loading.waiting and loading.thread.is_alive():
                loading.stop.set()
                self._given_up.append(self._loading.pop(names))

    def close(self) -> None:
        """Load none any more, and end what does."""
        loading = [*self._loading.values(), *self._given_up]
        for one in loading:
            one.stop.set()
        until = time.monotonic() + CLOSED_WITHIN_S
        for one in loading:
            one.thread.join(max(0.0, until - time.monotonic()))

    def loaded(self, names: tuple[str, ...], who: Hashable, marks: Mapping[str, str] = NO_MARKS) -> Loaded:
        """What comes of loading these modules; may wait. Raises BadEnvironment."""
        loading = self._loading.get(names)
        fresh = loading is not None and (who in loading.waiting or self._clock() - loading.at < FRESH_S)
        if loading is None or not fresh:
            loading = self._begin(names, marks)
        loading.thread.join()  # it has its own limit
        loading.waiting.discard(who)
        found = loading.loaded
        if isinstance(found, BadEnvironment):
            raise BadEnvironment(str(found), transient=found.transient)
        assert found is not None
        return found

    def _begin(self, names: tuple[str, ...], marks: Mapping[str, str]) -> _Loading:
        stop, environ = threading.Event(), {**self._environ, **marks}
        self._given_up = [one for one in self._given_up if one.thread.is_alive()]

        def load() -> None:
            try:
                loading.loaded = load_modules(names, environ, stop=stop)
            except BadEnvironment as error:
                loading.loaded = error
            loading.at = self._clock()

        loading = _Loading(stop)
        loading.thread = started(load, "modules")
        self._loading[names] = loading
        return loading
