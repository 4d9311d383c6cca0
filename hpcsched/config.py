"""Settings from files: site, user and project; which of them says what.

Order: flag > HPCSCHED_* > the job file's [policy] > project file > user file > site file > default. Flags and
environment are the command line's business; this reads the files below them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from hpcsched import trust
from hpcsched.errors import ConfigError


class Key(NamedTuple):
    """What a setting may be: `check` says whether a value will do, `accepted` says it to people."""

    check: Callable[[Any], bool]
    accepted: str


def _text(accepted: str) -> Key:
    return Key(lambda value: isinstance(value, str) and bool(value) and value.isprintable(), accepted)


def _one_of(*words: str) -> Key:
    return Key(lambda value: value in words, ", ".join(words[:-1]) + f" or {words[-1]}")


def _at_least(least: float, accepted: str) -> Key:
    return Key(lambda v: type(v) in (int, float) and least <= v < inf, accepted)


def _whole(least: int, accepted: str) -> Key:
    return Key(lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= least, accepted)


def _texts(accepted: str) -> Key:
    def check(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(v, str) and v and v.isprintable() for v in value)

    return Key(check, accepted)


def _flag(accepted: str) -> Key:
    return Key(lambda value: isinstance(value, bool), f"true or false: {accepted}")


_HOSTS = _texts("").check

PROJECT = "hpcsched.toml"
"""The project's file, in the working directory."""

KEYS: dict[str, Key] = {
    "dir": _text("the run directory"),
    "devices": _text("auto, cuda[:N], cpu:N or replay:N[@SPEED]"),
    "device_type": _text("the device type whose profiles count"),
    "policy": _text("the name of a policy"),
    "policy_option": Key(lambda value: isinstance(value, dict), "a table of the policy's options"),
    "profiles": _texts("a list of profile files or names of shipped ones"),
    "database": _text("the path of the database"),
    "grace": _at_least(0, "seconds a worker has at least to save"),
    "monitor": _at_least(0.1, "seconds (0.1 or more) between two samples of the devices"),
    "batch": _one_of("auto", "slurm", "lsf", "none"),
    "launcher": _one_of("auto", "srun", "blaunch", "jsrun", "ssh", "local"),
    "hosts": Key(
        lambda value: _HOSTS([value]) or (_HOSTS(value) and bool(value)), "host names: a list, or with commas"
    ),
    "interface": _text("the name or address of the network interface that hosts meet on"),
    "margin": _at_least(0, "seconds before the end at which saving starts at the latest"),
    "requeue": _flag("put the batch job back into its queue when time is up and work is left"),
    "chain": _flag("submit a follow-up job when time is up and work is left"),
    "chain_script": _text("the batch script of the follow-up job"),
    "max_restarts": _whole(0, "how often a batch job may come back: a whole number"),
    "checkpoints": _text("a directory on a shared filesystem for checkpoints"),
    "pyslurm": _one_of("auto", "off"),
    "warm": Key(
        lambda v: v in ("auto", "off") or (type(v) is int and v >= 0),
        "auto, off, or how many warm processes wait on a host: a whole number",
    ),
    "cpus_per_gpu": _whole(0, "cores kept for the jobs of each GPU: a whole number"),
    "python": _text("the Python interpreter of jobs that name no environment"),
    "script": Key(lambda value: isinstance(value, dict), "a table: what `hpcsched script` writes"),
}

SCRIPT_KEYS: dict[str, Key] = {
    "time": Key(
        lambda v: isinstance(v, int | str) and not isinstance(v, bool) and bool(v),
        'the time limit: minutes, or "90m", "2h", "2:00:00", "1-12:00:00"',
    ),
    "nodes": _whole(1, "hosts: 1 or more"),
    "gpus_per_node": _whole(0, "GPUs on each host: 0 or more"),
    "cpus": _whole(1, "CPUs on each host: 1 or more"),
    "cpus_per_gpu": _whole(1, "CPUs for each GPU: 1 or more"),
    "partition": _text("a partition (Slurm) or queue (LSF)"),
    "account": _text("an account (Slurm) or project (LSF)"),
    "name": _text("the batch job's name"),
    "mail": _text("a mail address"),
    "again": _one_of("requeue", "chain", "once"),
    "launcher": _one_of("auto", "srun", "blaunch", "jsrun", "ssh", "local"),
    "modules": _texts("a list of modules to load"),
    "setup": _texts("a list of shell lines"),
    "directives": _texts('a list of further directives, such as "--exclusive"'),
    "gpu_option": _one_of("gres", "gpus-per-node", "gpu", "none"),
    "host_option": _one_of("span", "nnodes"),
}
"""What may stand in the table [script]."""


@dataclass
class Settings:
    """Merged settings, and for each the file it comes from.

    The table `script` is merged key by key, with origins such as "script.time"; `policy_option` is
    replaced as a whole, because the options of one file's policy mean nothing to another's.
    `passed_over`: lines that say which files are not obeyed, and what to do about it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    passed_over: list[str] = field(default_factory=list)

    def read(self, path: Path, *, must: bool = False) -> None:
        """Lay a file's settings over those so far; raises ConfigError for what it does not know."""
        if not must and not path.exists():
            return
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(where=str(path), got=str(error.strerror), accepted="a readable file") from error
        self._take(path, content)

    def read_found(self, path: Path, environ: Mapping[str, str]) -> None:
        """The same for a file that nobody has named: what others can write, only if the user accepted it."""
        if not path.exists():
            return
        try:
            content, why = trust.read(path)
        except ConfigError as error:
            if path.lstat().st_uid in (os.geteuid(), 0):
                raise
            content, why = b"", f"it is somebody else's: {error.got}"
        if not why or trust.accepted(path, content, environ):
            self._take(path, content)
            return
        shown = str(path) if str(path).isprintable() else repr(str(path))
        how = "after reading it, accept it with `hpcsched config trust`"
        self.passed_over.append(f"{shown} is not obeyed, as {why}; {how}")

    def _take(self, path: Path, content: bytes) -> None:
        import tomllib  # most commands find no such file, and login nodes are slow

        try:
            table = tomllib.loads(content.decode())
        except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
            raise ConfigError(where=str(path), got=f"not valid TOML: {error}", accepted="TOML") from error
        _check(table, KEYS, where=str(path))
        script = table.pop("script", {})
        _check(script, SCRIPT_KEYS, where=str(path), prefix="script.")
        if script:
            self.values["script"] = {**self.values.get("script", {}), **script}
            self.origins.update((f"script.{key}", str(path)) for key in script)
        for key, value in table.items():
            # As the command line takes them.
            self.values[key] = ",".join(value) if key == "hosts" and isinstance(value, list) else value
            self.origins[key] = str(path)


def _check(table: Mapping[str, Any], keys: Mapping[str, Key], *, where: str, prefix: str = "") -> None:
    for key, value in table.items():
        name = prefix + (key if key.isprintable() else repr(key))
        if key not in keys:
            raise ConfigError(where=where, key=name, got="unknown setting", accepted=", ".join(keys))
        if not keys[key].check(value):
            raise ConfigError(where=where, key=name, got=repr(value), accepted=keys[key].accepted)


def load(environ: Mapping[str, str], *, here: Path, config: Path | None = None) -> Settings:
    """The settings that apply in directory `here`; `config` replaces its project file.

    HPCSCHED_SITE_CONFIG names the site's file, or by its bare name one that came with hpcsched.
    """
    settings = Settings()
    user = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config")
    settings.read(_site(environ.get("HPCSCHED_SITE_CONFIG") or "/etc/hpcsched/config.toml"))
    settings.read(user / "hpcsched" / "config.toml")
    if config is not None:
        settings.read(config, must=True)
    else:
        settings.read_found(here / PROJECT, environ)
    return settings


def _site(given: str) -> Path:
    path = Path(given)
    if path.exists() or path.name != given or path.suffix == ".toml":
        return path
    known = shipped()
    if given not in known:
        names = ", ".join(known) or "none were found"
        raise ConfigError(
            where="HPCSCHED_SITE_CONFIG",
            got=f"no file, and no shipped one, is called {given!r}",
            accepted=f"the path of a site's settings, or the name of shipped ones ({names})",
        )
    return known[given]


def shipped() -> dict[str, Path]:
    """The site files that came with hpcsched, by bare name, in alphabetical order."""
    import site

    beside = Path(__file__).resolve().parents[1]
    share = Path("share", "hpcsched", "site-config")
    # An editable install reads the repository; else the data files are under the prefix of the install.
    roots = [Path(sys.prefix), beside, Path(site.getuserbase())]
    found: dict[str, Path] = {}
    for folder in [beside / "site-config", *(root / share for root in roots)]:
        for path in folder.glob("*.toml"):
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def environment_name(key: str) -> str:
    """The environment variable of a setting or an option."""
    return "HPCSCHED_" + key.upper().replace("-", "_")


def run_dir(value: str | None) -> Path:
    """The run directory: as given, else ./hpcsched-run."""
    return Path(value or "hpcsched-run").absolute()
