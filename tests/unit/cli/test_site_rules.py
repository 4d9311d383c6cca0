"""What a site has locked or limited, against options and their variables."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from hpcsched import config
from hpcsched.cli.common import option
from hpcsched.errors import ConfigError
from hpcsched.site_rules import SiteRules

RULES: dict[str, Any] = {
    "locked": ["policy", "hosts"],
    "limits": {"max_restarts": {"most": 5}},
    "policy": "marble",
}


@click.group()
@click.pass_context
def top(ctx: click.Context) -> None:
    rules, given = SiteRules(), dict(RULES)
    rules.take(given, config.KEYS, file="/etc/site.toml")
    settings = config.Settings()
    settings.rules.add(rules, given)
    ctx.obj = settings


def _command(max_restarts: int, policy: str | None, hosts: str | None) -> str:
    return f"{max_restarts} {policy} {hosts}"


for name in ("run", "simulate"):
    made = click.command(name)(_command)
    for long, more in {"--max-restarts": {"type": int, "default": 20}, "--policy": {}, "--hosts": {}}.items():
        made = option(long, **more)(made)
    top.add_command(made)


def call(*words: str, **environ: str) -> tuple[str, str]:
    done = CliRunner().invoke(top, words, env=environ, standalone_mode=False)
    if done.exception:
        raise done.exception
    return done.return_value, done.output


def test_a_number_comes_within_its_limit_and_says_so() -> None:
    assert call("run") == ("5 None None", "")
    assert call("run", "--max-restarts", "3") == ("3 None None", "")
    value, said = call("run", "--max-restarts", "9")
    assert value == "5 None None"
    assert said == "hpcsched: --max-restarts 9: 5 counts, at most 5 (a limit of /etc/site.toml)\n"
    value, said = call("run", HPCSCHED_MAX_RESTARTS="9")
    assert value == "5 None None" and said.startswith("hpcsched: HPCSCHED_MAX_RESTARTS 9: 5 counts")


def test_what_is_locked_is_refused_unless_it_is_what_the_site_has() -> None:
    assert call("run", "--policy", "marble") == ("5 marble None", "")
    with pytest.raises(ConfigError, match=r"^--policy: planner; accepted: marble \(/etc/site.toml has"):
        call("run", "--policy", "planner")
    with pytest.raises(ConfigError, match=r"^HPCSCHED_HOSTS: n1; accepted: no value"):
        call("run", HPCSCHED_HOSTS="n1")
    assert call("simulate", "--policy", "planner")[0] == "20 planner None", "what-if is free"
