"""Settings from files: site, user and project; which of them says what.

Order: flag > HPCSCHED_* > the job file's [policy] > project file > user file > site file > default. Flags and
environment are the command line's business; this reads the files below them. What a site has locked or
limited (`site_rules`) goes before all of it.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcsched import trust
from hpcsched.contract.schema import check, either, flag, many, number, one_of, printed, table, text, whole
from hpcsched.errors import ConfigError
from hpcsched.patience import kind_of, patiently
from hpcsched.shipped import shipped
from hpcsched.site_rules import SiteRules

SITE_FILES = (Path(sys.prefix) / "etc/hpcsched/config.toml", Path("/etc/hpcsched/config.toml"))
"""Files of a site: the one beside this installation, and over it this machine's."""

PROJECT = "hpcsched.toml"
"""The project's file, in the working directory."""

DIR = "Run directory (the newest ./hpcsched-run*)."
"""What --dir is, for help texts."""

_LAUNCHER = "auto, ssh, local, or one of the batch system's: srun; blaunch, jsrun; qrsh"

KEYS = {
    "dir": printed("the run directory"),
    "devices": printed("auto, cuda[:N], cpu:N, replay:N[@SPEED] or replay:NODE.toml[@SPEED]"),
    "device_type": printed("the device type whose profiles count"),
    "policy": printed("the name of a policy"),
    "policy_option": table("a table of the policy's options"),
    "profiles": many(printed(""), "a list of profile files or names of shipped ones"),
    "database": printed("the path of the database"),
    "grace": number("seconds a worker has at least to save", minimum=0),
    "monitor": number("seconds (0.1 or more) between two samples of the devices", minimum=0.1),
    "batch": printed("auto, slurm, lsf, sge, none, or the name of one that a package adds"),
    "launcher": printed(_LAUNCHER),
    "hosts": either("host names: a list, or with commas", printed(""), many(printed(""), "", least=1)),
    "interface": printed("the name or address of the network interface that hosts meet on"),
    "margin": number("seconds before the end at which saving starts at the latest", minimum=0),
    "requeue": flag("put the batch job back into its queue when time is up and work is left"),
    "chain": flag("submit a follow-up job when time is up and work is left"),
    "chain_script": printed("the batch script of the follow-up job"),
    "max_restarts": whole("how often a batch job may come back: a whole number", 0),
    "checkpoints": printed("a directory on a shared filesystem for checkpoints"),
    "pyslurm": one_of("auto", "off"),
    "warm": either(
        "auto, off, or how many warm processes wait on a host: a whole number",
        one_of("auto", "off"),
        whole("", 0),
    ),
    "cpus_per_gpu": whole("cores kept for the jobs of each GPU: a whole number", 0),
    "joinable": flag("let hosts of other allocations join the run"),
    "release_idle_nodes": number("minutes for which nothing could use a node that is given back", minimum=0),
    "python": printed("the Python interpreter of jobs that name no environment"),
    "notify": either(
        "what to tell of: failure, drain, disk, end (a list, or with commas)",
        printed(""),
        many(printed(""), "", least=1),
    ),
    "notify_command": either(
        "the command that is given each message: a list of words, or a text",
        printed(""),
        many(printed(""), "", least=1),
    ),
    "notify_webhook": printed("the address that each message is posted to"),
    "mps": flag("whether jobs may share GPUs by NVIDIA's MPS"),
    "poll": number("seconds (10 or more) between two regular questions to the batch system", minimum=10),
    "records": printed("a folder in which each run leaves a record of what its trainings used"),
    "share": printed("a group whose members may watch runs, and not change them"),
    "script": table("a table: what `hpcsched script` writes"),
}

MEMORY = r"^\d{1,12}[KMGTkmgt]?$"
"""Memory as sbatch reads it: MiB, or with K, M, G or T."""

FILE_ONLY = ("mps", "poll", "records")
"""Keys without an option or a variable: a site's business, mostly."""

SCRIPT_KEYS = {
    "time": either('the time limit: minutes, or "90m", "2h", "2:00:00", "1-12:00:00"', whole(""), text("")),
    "nodes": whole("hosts: 1 or more", 1),
    "gpus_per_node": whole("GPUs on each host: 0 or more", 0),
    "cpus": whole("CPUs on each host: 1 or more", 1),
    "cpus_per_gpu": whole("CPUs for each GPU: 1 or more", 1),
    "mem": text('memory on each node, as sbatch has it: "64G", "0" for all of it', MEMORY),
    "mem_per_gpu": text('memory for each GPU: "64G"', MEMORY),
    "partition": printed("a partition (Slurm) or queue (LSF, SGE)"),
    "account": printed("an account (Slurm) or project (LSF, SGE)"),
    "name": printed("the batch job's name"),
    "mail": printed("a mail address"),
    "again": one_of("requeue", "chain", "once"),
    "launcher": printed(_LAUNCHER),
    "modules": many(printed(""), "a list of modules to load"),
    "setup": many(printed(""), "a list of shell lines"),
    "directives": many(printed(""), 'a list of further directives, such as "--exclusive"'),
    "gpu_option": one_of("gres", "gpus-per-node", "gpu", "none"),
    "host_option": one_of("span", "nnodes"),
    "pe": printed("a parallel environment (SGE)"),
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
    rules: SiteRules = field(default_factory=SiteRules)
    gave_way: dict[str, str] = field(default_factory=dict)
    """By key a line on what a file says that gave way to a rule of the site."""

    def read(self, path: Path, *, must: bool = False, site: bool = False) -> None:
        """Lay a file's settings over those so far, a `site`'s with its rules; raises ConfigError for what it
        does not know."""
        if not must and kind_of(path) is None:
            return
        try:
            content = patiently(path.read_bytes)
        except OSError as error:
            raise ConfigError(where=str(path), got=str(error.strerror), accepted="a readable file") from error
        self._take(path, content, site=site)

    def read_found(self, path: Path, environ: Mapping[str, str]) -> None:
        """The same for a file that nobody has named: what others can write, only if the user accepted it."""
        if kind_of(path) is None:
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

    def _take(self, path: Path, content: bytes, *, site: bool = False) -> None:
        import tomllib  # most commands find no such file, and login nodes are slow

        try:
            given = tomllib.loads(content.decode())
        except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
            raise ConfigError(where=str(path), got=f"not valid TOML: {error}", accepted="TOML") from error
        rules = SiteRules()
        if site:
            rules.take(given, KEYS, file=str(path))
        elif wrong := [key for key in ("locked", "limits") if key in given]:
            accepted = f"{wrong[0]} in a site's file ({', '.join(map(str, SITE_FILES))})"
            raise ConfigError(where=str(path), key=wrong[0], got="not a site's file", accepted=accepted)
        check(given, KEYS, where=str(path), unknown="unknown setting")
        script = given.pop("script", {})
        check(script, SCRIPT_KEYS, where=str(path), prefix="script.", unknown="unknown setting")
        if script:
            self.values["script"] = {**self.values.get("script", {}), **script}
            self.origins.update((f"script.{key}", str(path)) for key in script)
        for key, value in given.items():
            self._set(key, _as_a_flag(key, value), path)
        self.rules.add(rules, self.values)

    def _set(self, key: str, value: Any, path: Path) -> None:
        """Take a value; a lock or a limit of a site's goes before it. A place that is not accepted is refused
        where it is used: nothing can be taken in its stead."""
        if instead := self.rules.instead(key, value):
            self.gave_way[key] = f"{path}: {key} = {value} does not count; accepted: {instead}"
            if key in self.rules.locked:
                return
            value = self.rules.nearest(key, value)
        self.values[key] = value
        self.origins[key] = str(path)

    def keep_locked(self) -> None:
        """Forget all values but those that are locked."""
        self.values = {key: value for key, value in self.values.items() if key in self.rules.locked}
        self.origins = {key: self.origins[key] for key in self.values}


def _as_a_flag(key: str, value: Any) -> Any:
    """A value as the command line takes it."""
    if not isinstance(value, list) or key not in ("hosts", "notify", "notify_command"):
        return value
    return shlex.join(value) if key == "notify_command" else ",".join(value)


def load(environ: Mapping[str, str], *, here: Path, config: Path | None = None) -> Settings:
    """The settings that apply in directory `here`; `config` replaces its project file.

    HPCSCHED_SITE_CONFIG names the site's file, or by its bare name one that came with hpcsched. It takes the
    place of SITE_FILES, but for what these have locked or limited.
    """
    settings = Settings()
    for path in SITE_FILES:
        settings.read(path, site=True)
    if named := environ.get("HPCSCHED_SITE_CONFIG"):
        settings.keep_locked()
        settings.read(_site(named), site=True)
    user = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config")
    settings.read(user / "hpcsched" / "config.toml")
    if config is not None:
        settings.read(config, must=True)
    else:
        settings.read_found(here / PROJECT, environ)
    return settings


def _site(given: str) -> Path:
    path = Path(given)
    if kind_of(path) is not None or path.name != given or path.suffix == ".toml":
        return path
    known = shipped("site-config", ".toml")
    if given not in known:
        names = ", ".join(known) or "none were found"
        raise ConfigError(
            where="HPCSCHED_SITE_CONFIG",
            got=f"no file, and no shipped one, is called {given!r}",
            accepted=f"the path of a site's settings, or the name of shipped ones ({names})",
        )
    return known[given]


def environment_name(key: str) -> str:
    """The environment variable of a setting or an option."""
    return "HPCSCHED_" + key.upper().replace("-", "_")
