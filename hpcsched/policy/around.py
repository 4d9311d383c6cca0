"""What is the same under each policy, put around it once: the rules that say which jobs use a mechanism."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hpcsched.core.mechanisms.background.mechanism import Background
from hpcsched.core.mechanisms.cpu.mechanism import Cpu
from hpcsched.core.mechanisms.elastic.mechanism import Elastic
from hpcsched.core.mechanisms.packing.mechanism import Packing
from hpcsched.core.mechanisms.sharing.mechanism import Sharing
from hpcsched.core.view import Policy
from hpcsched.policy.background import FillLanes
from hpcsched.policy.cpu.allocation import AllotCores
from hpcsched.policy.elastic import FollowProposals
from hpcsched.policy.packing import FillPacks
from hpcsched.policy.sharing import ShareGpus

P = TypeVar("P", bound=Policy)
MakeRule = Callable[[Policy], object]

_rules: dict[str, MakeRule] = {
    Background.name: lambda policy: FillLanes(),
    Packing.name: lambda policy: FillPacks(moves=policy.moves_packed),
    Sharing.name: lambda policy: ShareGpus(moves=policy.moves_packed),
    Elastic.name: lambda policy: FollowProposals() if policy.reshapes else None,
    Cpu.name: lambda policy: AllotCores(),
}


def register_rule(mechanism: str, make: MakeRule) -> None:
    """Have a mechanism go by this rule; `make` gives None for a policy that is to have none."""
    if mechanism in _rules:
        raise ValueError(f"there is a rule for {mechanism!r} already")
    _rules[mechanism] = make


def with_rules(policy: P) -> P:
    """The policy, with the rules of all mechanisms around it."""
    made = {name: make(policy) for name, make in _rules.items()}
    policy.rules = {name: rule for name, rule in made.items() if rule is not None}
    return policy
