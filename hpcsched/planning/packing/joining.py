"""Which pack a training that waits joins, by what was measured: one rule for `run`, `simulate`, `plan pack`.

Trainings are taken in their order. One joins the device on which it and all that train there are done
soonest, if that is sooner than if it trained there after them; else it waits. That is known of packs of one
model; of several models together it is not, and the simple rule counts: the fewest members first, but most of
its own model before that if it is known to gain by these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from hpcsched.contract.strategies import Packed
from hpcsched.core.profile import Profile
from hpcsched.planning.packing.costs import PackCosts
from hpcsched.planning.packing.speeds import MemberKind, Speeds, shaped

MAX_MEMBERS = Packed.most
"""Members of a pack, unless their jobs say otherwise: the gain grows little beyond (pack, Figure 4)."""

MIN_REL_GAIN = 1e-6
"""The share of the time that joining must save: less is rounding."""

Place = TypeVar("Place")


def costs_of(profile: Profile | None) -> PackCosts | None:
    """What a profile says of packs of its model, in steps (a batch of 1); None if none was measured."""
    if profile is None or not profile.packed_s:
        return None
    return PackCosts(
        model=profile.model,
        batch=1,
        device=profile.device,
        separate_s=1 / profile.rate(1),
        points=profile.packed_s,
        memory_mib=profile.packed_mib or {},
    )


def joining_s(speeds: Speeds, members: Sequence[MemberKind], newcomer: MemberKind) -> tuple[float, float]:
    """Seconds until all are done if the newcomer joins, and the seconds that this saves over after them."""
    together_s = speeds.time_s(shaped(Counter([*members, newcomer])))
    after_s = speeds.time_s(shaped(Counter(members))) + speeds.alone_s(newcomer)
    return together_s, after_s - together_s


def pays(speeds: Speeds, members: Sequence[MemberKind], newcomer: MemberKind) -> bool:
    """Whether all are done sooner if the newcomer joins than if it trains after them."""
    together_s, saved_s = joining_s(speeds, members, newcomer)
    return saved_s > MIN_REL_GAIN * together_s


def measured(members: Sequence[MemberKind], newcomer: MemberKind) -> bool:
    """Whether measurements say what the newcomer adds: they are of packs of one model."""
    return all(member.key.model == newcomer.key.model for member in members)


def best_place(
    speeds: Speeds, places: Mapping[Place, Sequence[MemberKind]], newcomer: MemberKind
) -> Place | None:
    """The place, of those with room for the newcomer, that it is to join; None: it waits.

    `places` are with the fewest members first. Where a place has other models too, that with most of its own
    model is taken, if by what was measured it gains by these; of those that are equally good the first one.
    """
    good = {
        place: members
        for place, members in places.items()
        if not measured(members, newcomer) or pays(speeds, members, newcomer)
    }
    if all(measured(members, newcomer) for members in good.values()):
        return min(good, key=lambda place: joining_s(speeds, good[place], newcomer)[0], default=None)
    return max(good, key=lambda place: of_its_own(speeds, good[place], newcomer))


def of_its_own(speeds: Speeds, members: Sequence[MemberKind], newcomer: MemberKind) -> int:
    """How many of these are of the newcomer's model; 0 where nobody knows that it gains by them."""
    own = [member for member in members if member.key.model == newcomer.key.model]
    known = own and speeds.costs[newcomer.key].points
    return len(own) if known and pays(speeds, own, newcomer) else 0
