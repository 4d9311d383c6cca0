"""Which samples go from which rank to which, when a batch changes from some ranks to others."""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.compat import dataclass
from hpcsched.worker.session.sampler import share


def share_of(batch: int, ranks: Sequence[int], rank: int) -> range:
    """The places in a global batch of `batch` samples that `rank` has where `ranks` share it; maybe none."""
    return share(range(batch), ranks.index(rank), len(ranks)) if rank in ranks else range(0)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class SamplePiece:
    """Samples that go to, or come from, another rank: places in this rank's share, `stop` not included."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SampleTransfers:
    """What one rank does when a batch goes from `source` ranks to `target` ranks.

    `had` and `gets` count the samples of its old and its new share. The `kept` ones that are in both begin at
    `kept_from` in the old and at `kept_at` in the new one.
    """

    had: int
    gets: int
    kept: int
    kept_from: int
    kept_at: int
    sends: tuple[SamplePiece, ...]
    receives: tuple[SamplePiece, ...]

    @property
    def idle(self) -> bool:
        """Whether this rank has nothing to do with it."""
        return not (self.had or self.gets)


def moves(batch: int, source: Sequence[int], target: Sequence[int], rank: int) -> SampleTransfers:
    """What `rank` sends, receives and keeps; no sample moves that is where it is needed."""
    old, new = share_of(batch, source, rank), share_of(batch, target, rank)
    kept = _both(old, new)
    sends = [(peer, _both(old, share_of(batch, target, peer))) for peer in target if peer != rank]
    receives = [(peer, _both(new, share_of(batch, source, peer))) for peer in source if peer != rank]
    return SampleTransfers(
        had=len(old),
        gets=len(new),
        kept=len(kept),
        kept_from=kept.start - old.start if kept else 0,
        kept_at=kept.start - new.start if kept else 0,
        sends=tuple(
            SamplePiece(p, part.start - old.start, part.stop - old.start) for p, part in sends if part
        ),
        receives=tuple(
            SamplePiece(p, part.start - new.start, part.stop - new.start) for p, part in receives if part
        ),
    )


def _both(a: range, b: range) -> range:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return range(start, stop) if start < stop else range(0)
