"""Nodes of a simulated cluster, batch jobs, and which nodes Slurm would give to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcsched.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes in one partition; `shards`: parts of each GPU that jobs may ask for (0: none)."""

    nodes: int
    gpus: int
    shards: int = 0

    def gpus_of(self, job: BatchJob) -> float:
        """GPUs that a job has in all; of one that it shares its part."""
        return job.shards / self.shards if job.shards else job.gpus * job.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """A job as it is submitted to the batch system.

    Attributes:
        name: no other job has it.
        submit_s, limit_s, runs_s: when it comes, its time limit, and how long it would run without one.
        gpus: on each of its `nodes`; not looked at if it asks for `shards` of one GPU instead.
        user: whose caps it counts for.
        priority: the higher goes first; among equals the one that came first.
        array, at_once: the array whose task it is, and how many of those may run at a time (`%`; 0: all).
        follow: submitted when this one has ended, as `--chain` does; its own `submit_s` is not looked at.
    """

    name: str
    submit_s: float
    limit_s: float
    runs_s: float
    gpus: int = 1
    nodes: int = 1
    shards: int = 0
    user: str = ""
    priority: float = 0.0
    array: str = ""
    at_once: int = 0
    follow: BatchJob | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """What it needs at the same moment: GPUs a node, nodes, shards."""
        return (self.gpus, self.nodes, self.shards)


Held = tuple[tuple[int, int], ...]
"""What a job holds: its nodes, and on each how many GPUs; or the number of the GPU that it has shards of."""


class Nodes:
    """What is free on each node. A GPU of which shards (`gres/shard`) are in use is given to nobody whole."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.free = [cluster.gpus] * cluster.nodes
        self._shards: list[dict[int, int]] = [{} for _ in range(cluster.nodes)] if cluster.shards else []
        self._next = 0

    def copy(self) -> Nodes:
        new = Nodes.__new__(Nodes)
        new.cluster, new.free, new._next = self.cluster, self.free.copy(), self._next
        new._shards = [gpus.copy() for gpus in self._shards]
        return new

    def check(self, job: BatchJob) -> None:
        """Raises ConfigError for a job that would not fit on an empty cluster."""
        there = self.cluster
        fits = job.nodes <= there.nodes and 0 < job.gpus <= there.gpus and job.shards <= there.shards
        if not fits or (job.shards and job.nodes > 1):
            accepted = f"at most {there.nodes} nodes of {there.gpus} GPUs, {there.shards} shards of one GPU"
            asked = f"{job.nodes} nodes of {job.gpus} GPUs, {job.shards} shards"
            raise ConfigError(where=f"batch job {job.name}", got=asked, accepted=accepted)

    def fitting(self, job: BatchJob, allowed: int = -1) -> list[int]:
        """The nodes, of those whose bits are set, on which there is enough for the job's part now."""
        if not job.shards:
            need = job.gpus
            return [n for n, free in enumerate(self.free) if free >= need and allowed >> n & 1]
        free, parts = self.free, self._shards
        return [
            n
            for n in range(len(free))
            if allowed >> n & 1 and (free[n] or any(left >= job.shards for left in parts[n].values()))
        ]

    def choose(self, job: BatchJob, allowed: int = -1) -> list[int] | None:
        """The nodes that Slurm takes: from the shortest row of neighbours that is long enough, its first."""
        return neighbours(self.fitting(job, allowed), job.nodes)

    def take(self, job: BatchJob, nodes: Sequence[int]) -> Held:
        if not job.shards:
            for node in nodes:
                self.free[node] -= job.gpus
            return tuple((node, job.gpus) for node in nodes)
        (node,) = nodes
        parts = self._shards[node]
        gpu = next((gpu for gpu, left in parts.items() if left >= job.shards), None)
        if gpu is None:
            gpu = self._next = self._next + 1
            parts[gpu] = self.cluster.shards
            self.free[node] -= 1
        parts[gpu] -= job.shards
        return ((node, gpu),)

    def give_back(self, job: BatchJob, held: Held) -> None:
        if not job.shards:
            for node, gpus in held:
                self.free[node] += gpus
            return
        ((node, gpu),) = held
        parts = self._shards[node]
        parts[gpu] += job.shards
        if parts[gpu] == self.cluster.shards:
            del parts[gpu]
            self.free[node] += 1


def neighbours(nodes: Sequence[int], count: int) -> list[int] | None:
    """So many of the nodes, given in order; None if there are fewer.

    The shortest row without a gap that is long enough serves. If none is, the longest rows are used up first.
    """
    if len(nodes) < count:
        return None
    rows: list[list[int]] = []
    for node in nodes:
        if rows and rows[-1][-1] == node - 1:
            rows[-1].append(node)
        else:
            rows.append([node])
    enough = [row for row in rows if len(row) >= count]
    if enough:
        return min(enough, key=len)[:count]
    rows.sort(key=len, reverse=True)
    return sorted([node for row in rows for node in row][:count])
