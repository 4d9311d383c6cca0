"""Why a decision was taken: typed, so that programs can read them, and said in words for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hpcsched.core.exits import said_exit
from hpcsched.core.nouns import GPU, reworded


class Why(StrEnum):
    """The kinds of reasons; the value is what `status` shows in its REASON column."""

    # why a job waits
    RESOURCES = "Resources"
    ONE_TYPE = "OneType"
    PRIORITY = "Priority"
    PLAN = "Plan"
    DEPENDENCY = "Dependency"
    BEGIN_TIME = "BeginTime"
    ARRAY_LIMIT = "JobArrayTaskLimit"
    HELD = "JobHeldUser"
    USER_SUSPENDED = "UserSuspended"
    DRAINING = "Draining"
    WALLTIME_TOO_SHORT = "WalltimeTooShort"
    NO_LANE = "NoLane"
    NO_CORES = "NoCores"
    CORES_PRIORITY = "CoresPriority"
    NO_SPACE = "NoSpace"
    HOST_SILENT = "HostSilent"
    FAILED_AT_ONCE = "FailedAtOnce"
    MODULES = "Modules"
    NO_AGENT = "NoAgent"
    # why it has this many GPUs, and these
    ON_TYPE = "OnType"
    UNEVEN = "Uneven"
    OPTIMAL = "Optimal"
    LEFT_OVER = "LeftOver"
    NO_PROFILE = "NoProfile"
    FIXED = "Fixed"
    NOT_PARALLEL = "NotParallel"
    EXCLUSIVE = "Exclusive"
    EQUAL_SHARE = "EqualShare"
    MARGINAL_GAIN = "MarginalGain"
    PLANNED = "Planned"
    IDLE_GPU = "IdleGpu"
    BESIDE = "Beside"
    PACKED = "Packed"
    SHARED = "Shared"
    JOINED = "Joined"
    # how many processes it is started as
    ONE_PROCESS = "OneProcess"
    SAYS_PARALLEL = "SaysParallel"
    NOT_MET = "NotMet"
    # why it was, or was not, changed
    PROMOTED = "Promoted"
    TOO_FEW_FREE = "TooFewFree"
    DOES_NOT_PAY = "DoesNotPay"
    WORK_UNKNOWN = "WorkUnknown"
    TIME_TOO_SHORT = "TimeTooShort"
    NOT_READY = "NotReady"
    NEVER_PROMOTE = "NeverPromote"
    RESIZED = "Resized"
    RESIZED_IN_PLACE = "ResizedInPlace"
    RESIZE_FAILED = "ResizeFailed"
    PREEMPTED = "Preempted"
    PROPOSED = "Proposed"
    SCALED_UP = "ScaledUp"
    SCALED_DOWN = "ScaledDown"
    GIVEN_BACK = "GivenBack"
    GROWN = "Grown"
    SHRUNK = "Shrunk"
    PACED = "Paced"
    GIVES_WAY = "GivesWay"
    TOO_COSTLY = "TooCostly"
    ENDS_SOON = "EndsSoon"
    PARTED = "Parted"
    LEFT_PACK = "LeftPack"
    SLOWER_TOGETHER = "SlowerTogether"
    FAULT_TOGETHER = "FaultTogether"
    NOT_ITS_FAULT = "NotItsFault"
    MOVED_APART = "MovedApart"
    ADDED = "Added"
    """Of a mechanism that another package adds: what it says is in its facts."""
    # why a job on CPU cores has the seats it has
    SEATED = "Seated"
    MORE_CORES = "MoreCores"
    NETWORK_BOTTLENECK = "NetworkBottleneck"
    UTILISATION_BOTTLENECK = "UtilisationBottleneck"
    MORE_SERVERS = "MoreServers"
    MORE_WORKERS = "MoreWorkers"
    FEWER_WORKERS = "FewerWorkers"
    AT_ONCE = "AtOnce"
    BALANCED = "Balanced"
    TRIMMED = "Trimmed"
    BEST_SEEN = "BestSeen"
    SETTLED = "Settled"
    WANTS_CORES = "WantsCores"
    RESEATED = "Reseated"
    # what happened to it
    SUBMITTED = "Submitted"
    CANCELLED = "Cancelled"
    DEPENDENCY_NEVER_SATISFIED = "DependencyNeverSatisfied"
    EXITED = "Exited"
    SAVED = "Saved"
    NOT_SAVED = "NotSaved"
    NEVER_SAVED = "NeverSaved"
    OTHER_COUNT = "OtherCount"
    RETRY = "Retry"
    SAME_FAILURE = "SameFailure"
    RETRIED = "Retried"
    UPDATED = "Updated"
    LOST = "Lost"
    ADOPTED = "Adopted"
    FELL_BACK = "FellBack"
    WENT_BACK = "WentBack"
    LAUNCH_FAILED = "LaunchFailed"
    DEVICE_LOST = "DeviceLost"
    DEVICE_FOUND = "DeviceFound"
    CORES_LOST = "CoresLost"
    ESCALATED = "Escalated"
    TIME_IS_UP = "TimeIsUp"
    HOST_ENDS = "HostEnds"
    TIME_LIMIT = "TimeLimit"
    OUT_OF_MEMORY = "OutOfMemory"
    LEARNED = "Learned"
    QUARANTINED = "Quarantined"
    EXCUSED = "Excused"
    BAD_RECORD = "BadRecord"
    VOIDED = "Voided"
    COMPLETED = "Completed"


_WORDS = {
    Why.RESOURCES: "waits for GPUs: needs {need}{hosts}, {free} free",
    Why.ONE_TYPE: "waits for GPUs of one type: needs {need}{hosts}, free are {free}",
    Why.PRIORITY: "waits for GPUs behind earlier jobs",
    Why.PLAN: "waits for its turn in the plan: {free} GPUs free",
    Why.DEPENDENCY: "waits for {after} to complete",
    Why.BEGIN_TIME: "starts not before {at:.0f} s into the run",
    Why.ARRAY_LIMIT: "waits for another job of its array to end: at most {n} run at once",
    Why.NO_AGENT: "waits for an agent",
    Why.HELD: "held by the user",
    Why.USER_SUSPENDED: "suspended by the user",
    Why.DRAINING: "the run saves and stops; what is left goes on in its next life",
    Why.WALLTIME_TOO_SHORT: "its first checkpoint needs about {need:.0f} s, saving begins in {left:.0f} s: "
    "it waits for the next allocation",
    Why.NO_LANE: "waits for a background lane that it may use",
    Why.NO_CORES: "waits for CPU cores to start on",
    Why.CORES_PRIORITY: "waits for CPU cores behind earlier jobs",
    Why.NO_SPACE: "no room in {where}: tries again {again:.0f} s into the run (try {tries})",
    Why.FAILED_AT_ONCE: "has failed {failures} times in a row, the last time at once: tries again "
    "{again:.0f} s into the run",
    Why.HOST_SILENT: "starts not before {again:.0f} s into the run: processes of its last attempt may live "
    "until then, on a host that has not been heard of",
    Why.MODULES: "its modules are being loaded: {modules}",
    Why.SEATED: "starts with {seats}, on {cores:.4g} of the {budget:.4g} cores that it may have{because}",
    Why.MORE_CORES: "more cores, from {old} to {seats}: at {rate:.4g} steps/s it used {efficiency:.0%} of "
    "the {had:.4g} it had{because}",
    Why.NETWORK_BOTTLENECK: "more servers, from {old} to {seats}: at {rate:.4g} steps/s the link of "
    "server {server} was over 90 % full for {net:.0%} of the time{because}",
    Why.UTILISATION_BOTTLENECK: "more workers, from {old} to {seats}: at {rate:.4g} steps/s it used "
    "{efficiency:.0%} of its {had:.4g} cores, and no link was full: its processes do not use more{because}",
    Why.MORE_SERVERS: "more servers, from {old} to {seats}: at {rate:.4g} steps/s it used "
    "{efficiency:.0%} of its {had:.4g} cores, and nothing else helped or was free{because}",
    Why.MORE_WORKERS: "more workers, from {old} to {seats}: at {rate:.4g} steps/s it used "
    "{efficiency:.0%} of its {had:.4g} cores, and nothing else helped or was free{because}",
    Why.FEWER_WORKERS: "fewer workers, from {old} to {seats}: at {rate:.4g} steps/s it used {efficiency:.0%} "
    "of its {had:.4g} cores, and nothing else helped or was free{because}",
    Why.AT_ONCE: "several changes at once, from {old} to {seats}: at {rate:.4g} steps/s it used "
    "{efficiency:.0%} of its {had:.4g} cores, and one alone did not help or was not possible{because}",
    Why.BALANCED: "cores moved, from {old} to {seats}: at {rate:.4g} steps/s {low} used {least:.0%} of "
    "what there was, {high} {most:.0%}{because}",
    Why.TRIMMED: "fewer cores, from {old} to {seats}: at {rate:.4g} steps/s it used {efficiency:.0%} of its "
    "{had:.4g}, others can have the rest{because}",
    Why.BEST_SEEN: "back from {old} to {seats}, the best seen ({best:.4g} steps/s, {rate:.4g} now)",
    Why.SETTLED: "stays with {seats} at {rate:.4g} steps/s: {because}",
    Why.WANTS_CORES: "would take more than its {had:.4g} cores, of which it uses {efficiency:.0%}: none are "
    "free",
    Why.RESEATED: "has {seats} since step {step}{stopped}",
    Why.UNEVEN: "its hosts have unequally many GPUs free: it gets {gpus}",
    Why.ON_TYPE: "it gets {type}: of the types of GPU with enough free the fastest, by what is known",
    Why.OPTIMAL: "{gpus} GPUs is the fastest count of {model} ({rate:.4g} steps/s; {source} profile)",
    Why.LEFT_OVER: "{gpus} of the {wanted} GPUs that {model} is fastest on: no more were free",
    Why.NO_PROFILE: "the scaling of {model} has not been measured yet: it gets {gpus} GPUs now, at most half "
    "of the {total}; its speed is learnt as it runs",
    Why.FIXED: "the job asks for {gpus} GPUs{hosts}",
    Why.NOT_PARALLEL: "it gets {gpus} GPUs, as {because}",
    Why.ONE_PROCESS: "is started as one process that sees all {gpus} GPUs, as nothing says that its program "
    'is parallel; processes = "per-gpu" in the job file starts one on each',
    Why.SAYS_PARALLEL: "its program says that it is parallel: from its next start on ({model}) it is one "
    "process on each GPU; processes = 1 in the job file keeps it one",
    Why.NOT_MET: "its {processes} processes have not met at MASTER_PORT after {seconds:.0f} s: if they are "
    "copies of one program, processes = 1 in the job file starts one",
    Why.EXCLUSIVE: "exclusive policy: the {gpus} GPUs that it may have, one job at a time",
    Why.EQUAL_SHARE: "{gpus} GPUs: an equal share of the {total}, at most its fastest count",
    Why.MARGINAL_GAIN: "{gpus} GPUs of the {total}: no other job would gain more by them",
    Why.PLANNED: "{gpus} GPUs{fastest}, at most {cap} by the plan; it has all done {until:.0f} s into the "
    "run, MARBLE would {marble:.0f} s into it{guessed}",
    Why.IDLE_GPU: "in the background of GPU {gpu}, which no other job has",
    Why.BESIDE: "in the background of GPU {gpu}, beside job {job} ({name})",
    Why.PACKED: "trained on GPU {gpu} as one of {members}, together with {others}",
    Why.SHARED: "shares GPU {gpu} with {others}: {because}",
    Why.JOINED: "job {job} ({name}) comes to GPU {gpu}, and {what}",
    Why.SLOWER_TOGETHER: "{guest} leaves {hosts} on GPU {gpu}: {because}; they share no GPU any more",
    Why.FAULT_TOGETHER: "there was a fault while {guest} shared a GPU with job {job} ({name}, {host}): they "
    "share none any more",
    Why.NOT_ITS_FAULT: "job {job} ({name}) had come to share its GPU: that counts as no failure",
    Why.MOVED_APART: "leaves the {others} that it shares GPU {gpu} with for a GPU that nobody has: done "
    "about {sooner:.0f} s sooner, {cost:.1f} s for saving and going on",
    Why.PROPOSED: "proposes {gpus} GPUs (it has {old}) for its next epoch: with global batches of about "
    "{batch:.0f} that is its fastest count ({rate:.4g} steps/s)",
    Why.SCALED_UP: "grown from {old} to {gpus} GPUs, as nothing waits: with global batches of about "
    "{batch:.0f} that is {gain:.0%} faster",
    Why.SCALED_DOWN: "shrunk from {old} to {gpus} GPUs: with global batches of about {batch:.0f} more of "
    "them gain less than 5 %",
    Why.GIVEN_BACK: "shrunk from {old} to {gpus} GPUs, which it had before nothing waited: others do now",
    Why.GROWN: "grown from {old} to {gpus} GPUs, as nothing waits: {costs} save {saved:.0f} s",
    Why.SHRUNK: "shrunk from {old} to {gpus} GPUs for other jobs: the plan has all done {until:.0f} s into "
    "the run, MARBLE would {marble:.0f} s into it{guessed}",
    Why.PROMOTED: "promoted from {old} to {gpus} GPUs: {gain}",
    Why.TOO_FEW_FREE: "not promoted: {wanted} GPUs would be its best, {have} could be had",
    Why.DOES_NOT_PAY: "not promoted to {wanted} GPUs: the {costs} exceed the {saved:.0f} s it would save",
    Why.WORK_UNKNOWN: "not promoted to {wanted} GPUs: the work left is unknown (no `steps` given)",
    Why.TIME_TOO_SHORT: "not promoted to {wanted} GPUs: the {left:.0f} s until saving begins do not make up "
    "for the {costs}",
    Why.NOT_READY: "not promoted to {wanted} GPUs: it has not said that it can be suspended",
    Why.NEVER_PROMOTE: "not promoted: the policy option promote is never",
    Why.RESIZED: "goes from {old} to {gpus} GPUs: {why}",
    Why.RESIZED_IN_PLACE: "resized in place from {old} to {gpus} GPUs at step {step}{stopped}",
    Why.RESIZE_FAILED: "could not be resized in place: {error}",
    Why.PREEMPTED: "gives up its {old} GPUs: {why}",
    Why.PACED: "goes at {share:.3g} of its speed: it slows job {job} ({name}) down by {slowdown:z.1%}, of at "
    "most {limit:.3g}%",
    Why.GIVES_WAY: "leaves GPU {gpu} to job {job} ({name}): {because}",
    Why.TOO_COSTLY: "{guest} slows {host} down by {slowdown:z.1%}, of at most {limit:.3g}% ({beside:.4g} "
    "instead of {alone:.4g} steps/s, it at {share:.3g} of its own speed): they share no GPU any more",
    Why.ENDS_SOON: "saves before the jobs in the foreground do, as the allocation ends",
    Why.PARTED: "leaves the {others} that it trains with on GPU {gpu} for a GPU that nobody has: done about "
    "{sooner:.0f} s sooner, {cost:.1f} s for saving and going on",
    Why.ADDED: "{words}",
    Why.LEFT_PACK: "left its pack on GPU {gpu} at step {step} (its output tells why): it is not packed any "
    "more",
    Why.SUBMITTED: "submitted",
    Why.CANCELLED: "cancelled by the user",
    Why.DEPENDENCY_NEVER_SATISFIED: "cancelled: {after} did not complete",
    Why.EXITED: "ended with {code}{detail}",
    Why.SAVED: "saved at step {step}{where} and left",
    Why.NOT_SAVED: "left with {code} and no newer checkpoint than the one{step} it had: "
    "{again}about {seconds:.0f} s of work lost{not_taken}",
    Why.NEVER_SAVED: "left with {code} and has no checkpoint: it begins once more, "
    "{again}about {seconds:.0f} s of work lost{not_taken}",
    Why.OTHER_COUNT: "goes on on {gpus} GPUs, as its job file says now, and began on {first}: its global "
    "batch is not the same any more",
    Why.RETRY: "failed with {code}; failure {failures} of {retries} allowed in a row, starts again",
    Why.SAME_FAILURE: "ended twice in the same way within {after:.1f} s of its start, with {code}: "
    "{detail}; not repeated, `hpcsched retry {name}` runs it again",
    Why.RETRIED: "is run again {how}{because}",
    Why.UPDATED: "defined anew: {keys}",
    Why.LOST: "attempt {attempt} was lost ({why}); goes on from step {step}{again}",
    Why.ADOPTED: "attempt {attempt} goes on under another agent",
    Why.FELL_BACK: "its checkpoint{of} cannot be used; {then}",
    Why.WENT_BACK: "its program went back to a checkpoint without ending: steps done again {again}",
    Why.LAUNCH_FAILED: "could not be started: {error}",
    Why.DEVICE_LOST: "GPU {gpu} was lost: {why}",
    Why.DEVICE_FOUND: "GPU {gpu} is used again: {why}",
    Why.CORES_LOST: "the cores of host {host} were lost: {why}",
    Why.ESCALATED: "did not leave within {grace:.0f} s: {how}",
    Why.TIME_IS_UP: "the allocation ends in {left:.0f} s: {how}",
    Why.HOST_ENDS: "host {host} ends in {left:.0f} s: leaves it, and goes on elsewhere",
    Why.TIME_LIMIT: "its time limit of {limit} is over{how}",
    Why.OUT_OF_MEMORY: "out of memory: {words}",
    Why.LEARNED: "{model} does {rate:.4g} steps/s on {gpus} GPUs{of} ({samples} samples of {steps} steps in "
    "all, spread {spread:.1%}; {before})",
    Why.QUARANTINED: "there was a fault while it shared GPU {gpu} with job {job} ({name}): it shares none "
    "any more",
    Why.EXCUSED: "background job {job} ({name}) shared a GPU with it: that counts as no failure, and they "
    "share none any more",
    Why.BAD_RECORD: "its STATE.json cannot be read: {error}",
    Why.VOIDED: "{event}, record {record} of the journal, counts for nothing: {error}",
    Why.COMPLETED: "completed",
}


def said_cost(cost_s: float, *, in_place: bool, unsaved_s: float = 0.0) -> str:
    """The seconds that a change of a job's GPUs costs it, in words; of them `unsaved_s` for work that it has
    not saved."""
    if in_place:
        return f"{_seconds(cost_s)} of standing still"
    unsaved = f" and {unsaved_s:.0f} s of work not saved" if unsaved_s >= 0.5 else ""
    return f"{cost_s - unsaved_s:.0f} s of suspend and resume{unsaved}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


_ONE = re.compile(r"\b1 (GPU|CPU slot|device)s\b")

_OURS = ("because", "why")
"""Facts that are texts of ours, which may be about GPUs; but of RETRIED, which has a job's name there."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason: its kind and the facts it rests on."""

    why: Why
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.said(GPU)

    def said(self, noun: str) -> str:
        """The reason in words. `noun`: what the devices of the run are called (`Ledger.noun`)."""
        facts, words = self.facts, reworded(_WORDS[self.why], noun)
        said = {"hosts": "", "stopped": "", "because": "", "again": "", "not_taken": "", "of": ""}
        if self.why is Why.FELL_BACK:
            said["of"] = f" of step {facts.get('expected')}"
            said["then"] = f"goes on from step {facts.get('step')}"
        if "cost" in facts:
            in_place, unsaved_s = facts.get("in_place", False), facts.get("unsaved", 0.0)
            said["costs"] = said_cost(facts["cost"], in_place=in_place, unsaved_s=unsaved_s)
        if facts.get("stopped_s") is not None:
            said["stopped"] = f"; training stood still for {_seconds(facts['stopped_s'])}"
        texts = [key for key in _OURS if key in facts and self.why is not Why.RETRIED]
        ours = {key: reworded(str(facts[key]), noun) for key in texts}
        if "code" in facts:
            ours["code"] = said_exit(facts["code"])
        text = words.format_map({**said, **facts, **ours})
        return _ONE.sub(r"1 \1", text) if f"1 {noun}s" in text else text


@dataclass(frozen=True, slots=True)
class Note:
    """A line of a job's story."""

    at: float
    reason: Reason
