"""Settings from files: site, user and project; which of them says what.

Order: flag > HPCSCHED_* > the job file's [policy] > project file > user file > site file > default. Flags and
environment are the command line's business; this reads the files below them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcsched.errors import ConfigError

KEYS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "dir": (str, "the run directory"),
    "devices": (str, "auto, cuda[:N], cpu:N or replay:N[@SPEED]"),
    "device_type": (str, "the device type whose profiles count"),
    "policy": (str, "the name of a policy"),
    "policy_option": (dict, "a table of the policy's options"),
    "profiles": (list, "a list of profile files or names of shipped ones"),
    "database": (str, "the path of the database"),
    "grace": ((int, float), "seconds a worker has at least to save"),
    "monitor": ((int, float), "seconds between two samples of the devices"),
}


@dataclass
class Settings:
    """Merged settings, and for each the file it comes from."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def read(self, path: Path, *, must: bool = False) -> None:
        """Lay a file's settings over those so far; raises ConfigError for what it does not know."""
        if not must and not path.exists():
            return
        import tomllib  # most commands find no such file, and login nodes are slow

        try:
            with path.open("rb") as file:
                table = tomllib.load(file)
        except OSError as error:
            raise ConfigError(where=str(path), got=str(error.strerror), accepted="a readable file") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(where=str(path), got=f"not valid TOML: {error}", accepted="TOML") from error
        for key, value in table.items():
            if key not in KEYS:
                raise ConfigError(where=str(path), key=key, got="unknown setting", accepted=", ".join(KEYS))
            kind, accepted = KEYS[key]
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ConfigError(where=str(path), key=key, got=repr(value), accepted=accepted)
            self.values[key] = value
            self.origins[key] = str(path)


def load(environ: Mapping[str, str], *, here: Path, config: Path | None = None) -> Settings:
    """The settings that apply in directory `here`; `config` replaces its project file."""
    settings = Settings()
    site = Path(environ.get("HPCSCHED_SITE_CONFIG", "/etc/hpcsched/config.toml"))
    user = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config")
    settings.read(site)
    settings.read(user / "hpcsched" / "config.toml")
    settings.read(config or here / "hpcsched.toml", must=config is not None)
    return settings


def environment_name(key: str) -> str:
    """The environment variable of a setting or an option."""
    return "HPCSCHED_" + key.upper().replace("-", "_")


def run_dir(value: str | None) -> Path:
    """The run directory: as given, else ./hpcsched-run."""
    return Path(value or "hpcsched-run").absolute()
