"""Settings of a site: shipped files by name, one clear line for what is wrong, tables merged key by key."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import ROOT

from hpcsched import config
from hpcsched.cli.site.settings import DEFAULTS
from hpcsched.errors import ConfigError


def settings(tmp_path: Path, site: str = "", project: str = "", **environ: str) -> config.Settings:
    (tmp_path / "site.toml").write_text(site)
    (tmp_path / "hpcsched.toml").write_text(project)
    env = {"HPCSCHED_SITE_CONFIG": str(tmp_path / "site.toml"), "HOME": str(tmp_path), **environ}
    return config.load(env, here=tmp_path)


@pytest.mark.parametrize(
    ("text", "key", "accepted"),
    [
        ("batch = 1", "batch", "slurm, lsf, sge, none"),
        ('launcher = ""', "launcher", "srun"),
        ("hosts = []", "hosts", "host names"),
        ("hosts = [1]", "hosts[0]", "host names"),
        ("margin = -1", "margin", "seconds before the end"),
        ("margin = true", "margin", "seconds before the end"),
        ("requeue = 1", "requeue", "true or false"),
        ('chain = "yes"', "chain", "true or false"),
        ("max_restarts = 1.5", "max_restarts", "whole number"),
        ('pyslurm = "on"', "pyslurm", '"auto" or "off"'),
        ('warm = "on"', "warm", "auto, off, or how many"),
        ("warm = -1", "warm", "auto, off, or how many"),
        ("warm = true", "warm", "auto, off, or how many"),
        ("cpus_per_gpu = -1", "cpus_per_gpu", "cores kept for the jobs of each GPU"),
        ('checkpoints = ""', "checkpoints", "a directory"),
        ("monitor = 0", "monitor", "0.1 or more"),
        ("profiles = [1]", "profiles[0]", "a list of profile files"),
        ('script = "x"', "script", "a table"),
        ("[script]\ngpus = 4", "script.gpus", "gpus_per_node"),
        ("[script]\ngpus_per_node = -1", "script.gpus_per_node", "0 or more"),
        ('[script]\ngpu_option = "gpus"', "script.gpu_option", "gpus-per-node"),
        ('[script]\nmodules = "cuda"', "script.modules", "a list of modules"),
        ('[script]\nsetup = ["a\\nb"]', "script.setup", "a list of shell lines"),
    ],
)
def test_a_wrong_setting_is_refused_with_file_key_and_what_is_accepted(
    tmp_path: Path, text: str, key: str, accepted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, site=text)
    line = str(caught.value)
    assert f"site.toml: {key}: " in line and accepted in line and "\n" not in line


def test_every_setting_can_be_set_and_has_a_default_to_show(tmp_path: Path) -> None:
    right = """
        dir = "d"
        devices = "cpu:2"
        device_type = "V100"
        policy = "marble"
        profiles = ["marble-summit"]
        database = "db"
        grace = 1
        monitor = 2.5
        batch = "lsf"
        launcher = "jsrun"
        hosts = ["n1", "n2"]
        interface = "ib0"
        margin = 90
        requeue = true
        chain = false
        chain_script = "next.sh"
        max_restarts = 3
        checkpoints = "/scratch"
        pyslurm = "off"
        warm = 2
        cpus_per_gpu = 4
        release_idle_nodes = 10
        joinable = true
        notify = ["failure", "end"]
        notify_command = ["mail", "-s", "a b", "me"]
        mps = false
        poll = 120
        records = "/srv/records"
        share = "team"
        notify_webhook = "https://hooks.example.org/x"
        python = "/envs/a/bin/python"
        [policy_option]
        promote = "always"
        [script]
        time = 90
    """
    found = settings(tmp_path, site=right)
    assert found.values.keys() == config.KEYS.keys() == DEFAULTS.keys() | {"script"}
    assert found.values["hosts"] == "n1,n2"  # as the option takes it
    assert found.values["notify_command"] == "mail -s 'a b' me"


def test_the_script_table_is_merged_key_by_key_and_each_key_knows_its_file(tmp_path: Path) -> None:
    found = settings(
        tmp_path, site='[script]\npartition = "gpu"\ntime = "2h"\n', project='[script]\ntime = "1h"\n'
    )
    assert found.values["script"] == {"partition": "gpu", "time": "1h"}
    assert found.origins["script.partition"].endswith("site.toml")
    assert found.origins["script.time"].endswith("hpcsched.toml")


@pytest.mark.parametrize("path", sorted((ROOT / "site-config").glob("*.toml")), ids=lambda p: p.stem)
def test_a_shipped_site_file_is_found_by_its_bare_name_and_right(path: Path, tmp_path: Path) -> None:
    found = settings(tmp_path, HPCSCHED_SITE_CONFIG=path.stem)
    assert found.values["policy"] == "marble"
    assert found.origins["policy"] == str(path)


def test_an_unknown_bare_name_lists_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'sumit'.*generic-lsf, generic-sge, generic-slurm, single"):
        settings(tmp_path, HPCSCHED_SITE_CONFIG="sumit")


RULES = """
locked = ["records", "batch", "notify_webhook"]
records = "/srv/records"
batch = "slurm"
max_restarts = 3
policy = "planner"
[limits]
max_restarts = { most = 5 }
monitor = { least = 5 }
checkpoints = { below = ["/scratch"] }
"""


def test_what_a_site_has_locked_or_limited_goes_before_users_files(tmp_path: Path) -> None:
    mine = 'batch = "none"\nmax_restarts = 9\nmonitor = 1\npolicy = "marble"\nnotify_webhook = "https://x"\n'
    found = settings(tmp_path, site=RULES, project=mine)
    assert found.values["batch"] == "slurm" and found.values["max_restarts"] == 5
    assert found.values["monitor"] == 5 and found.values["policy"] == "marble"
    assert "notify_webhook" not in found.values
    assert set(found.gave_way) == {"batch", "max_restarts", "monitor", "notify_webhook"}
    line = found.gave_way["max_restarts"]
    assert (
        "hpcsched.toml: max_restarts = 9 does not count; accepted: at most 5" in line and "site.toml" in line
    )
    with pytest.raises(
        ConfigError, match=r"^--batch: lsf; accepted: slurm \(.*site\.toml has locked batch\)$"
    ):
        found.rules.check("batch", "lsf", where="--batch")
    with pytest.raises(ConfigError, match="no value, so that the default counts"):
        found.rules.check("notify_webhook", "https://x", where="HPCSCHED_NOTIFY_WEBHOOK")
    found.rules.check("batch", "slurm", where="--batch")
    found.rules.check("checkpoints", Path("/scratch/me/x"), where="--checkpoints")
    for elsewhere in ("/scratchy/x", "/scratch/../home/me", "/home/me"):
        with pytest.raises(ConfigError, match="a place below /scratch"):
            found.rules.check("checkpoints", Path(elsewhere), where="--checkpoints")


def test_rules_of_a_site_hold_whatever_a_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HPCSCHED_SITE_CONFIG brings other values, but no way around locks."""
    (tmp_path / "etc.toml").write_text(RULES)
    monkeypatch.setattr(config, "SITE_FILES", (tmp_path / "etc.toml",))
    found = settings(
        tmp_path, site='batch = "none"\nmax_restarts = 8\n[limits]\nmax_restarts = { most = 99 }\n'
    )
    assert found.values["batch"] == "slurm" and found.values["max_restarts"] == 5
    assert "policy" not in found.values, "the other file takes the place of what is not locked"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('locked = ["policies"]', "locked: 'policies'"),
        ('locked = "policy"', "a list of settings"),
        ("[limits]\npolicy = { most = 3 }", "limits.policy: not one; accepted: a setting with limits"),
        ("[limits]\nmonitor = { below = ['/x'] }", "limits.monitor.below"),
        ("[limits]\nmonitor = { least = 9, most = 5 }", "a least that is not above the most"),
        ("[limits]\ncheckpoints = { below = ['x'] }", "absolute paths"),
        ("max_restarts = 9\n[limits]\nmax_restarts = { most = 5 }", "9, beside its own limit"),
    ],
)
def test_wrong_rules_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, site=text)
    assert said in str(caught.value)
    with pytest.raises(ConfigError, match="not a site's file"):
        settings(tmp_path, project=text.replace("max_restarts = 9\n", ""))
