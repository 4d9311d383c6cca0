"""Who gets GPUs: pure policies, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpcsched.core.view import Policy
from hpcsched.errors import ConfigError
from hpcsched.policy.around import with_rules
from hpcsched.policy.baselines.equal import Equal
from hpcsched.policy.baselines.optimus import Optimus
from hpcsched.policy.exclusive import Exclusive
from hpcsched.policy.marble import Marble
from hpcsched.policy.options import Accepted, read, said
from hpcsched.policy.planner.planner import Planner

POLICIES: dict[str, Callable[..., Policy]] = {
    "marble": Marble,
    "exclusive": Exclusive,
    "planner": Planner,
    "equal": Equal,
    "optimus": Optimus,
}


def make_policy(name: str, options: Mapping[str, Any] | None = None, *, where: str = "") -> Policy:
    """The policy of this name with these options; ConfigError if either is unknown.

    `where` they come from, if not from the flags.
    """
    if name not in POLICIES:
        raise ConfigError(where=where or "--policy", got=repr(name), accepted=", ".join(POLICIES))
    where = where or "--policy-option"
    make, given = POLICIES[name], dict(options or {})
    accepted: Mapping[str, Accepted] = getattr(make, "OPTIONS", {})
    for key, value in given.items():
        if key not in accepted:
            names = ", ".join(accepted) or f"none ({name} has no options)"
            raise ConfigError(where=where, key=f"{name}.{key}", got="unknown option", accepted=names)
        try:
            given[key] = read(accepted[key], value)
        except ValueError:
            raise ConfigError(where=where, key=key, got=repr(value), accepted=said(accepted[key])) from None
    return with_rules(make(**given))
