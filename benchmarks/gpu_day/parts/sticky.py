"""A step after an accident must be as one without: same bits, no late errors."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from gpu_day.accidents import CASES, FOR_INFORMATION, training_with
from gpu_day.found import Found
from gpu_day.live import LiveRun, job

SETTLE_S = 1.0


def run(found: Found) -> None:
    """Accidents, each in a process of its own, all at once; then a guest that breaks the device's context."""
    with found.trying("accidents"):
        _accidents(found)
    with found.trying("a guest with a device-side assert"):
        _guest(found)


def _accidents(found: Found) -> None:
    forking = multiprocessing.get_context("fork")  # nothing has used the device here: torch is imported once
    running: dict[str, tuple[BaseProcess, Connection]] = {}
    answers: dict[str, dict[str, Any]] = {}
    try:
        for case in CASES:
            ours, theirs = forking.Pipe(duplex=False)
            process = forking.Process(target=_accident, args=(case, "cpu" if found.cpu else "cuda:0", theirs))
            process.start()
            theirs.close()
            running[case] = process, ours
        for case, (_, ours) in running.items():
            try:
                there = ours.poll(max(1.0, found.left_s / 2))  # the guest needs the rest
                answers[case] = ours.recv() if there else {"error": "no answer"}
            except EOFError:
                answers[case] = {"error": "it has ended without an answer"}
    finally:
        for one, _ in running.values():
            one.kill()
            one.join()
    found.number(accidents=answers)
    plain = answers["none"].get("digest")
    for case, answer in answers.items():
        good = bool(plain) and answer.get("digest") == plain and answer.get("on_default_stream", True)
        said = answer.get("error") or ("same bits" if good else f"{answer}")
        said += f" ({answer.get('happened') or 'nothing happened'})"
        ok = None if case in FOR_INFORMATION else good
        found.check(f"steps after: {case}", "as without", said, ok)


def _accident(case: str, kind: str, answer: Connection) -> None:
    answer.send(training_with(case, kind))


def _guest(found: Found) -> None:
    """Its foreground, in the same process, ends with it, and must come back from what it has saved."""
    front = job("front", "mobilenet-v2", 10**6, found, "max_foreground_slowdown = 1.0", pause_s=0.03)
    # In the background of a CPU slot it would hardly get to run beside other work: there it has its own.
    more = "retries = 0" if found.cpu else "retries = 0\nbackground = true"
    text = f"schema = 1\n{front}{job('back', 'mobilenet-v2', 50, found, more, breaks_at=5)}"
    known = {"front": 20.0, "back": 20.0}  # what is not known shares no GPU
    devices = "cpu:2" if found.cpu else None
    with LiveRun.of(found, text, devices=devices, steps_per_s=known) as live:
        live.until(lambda: live.trains("front"), "the foreground", found.left_s)
        live.until(lambda: _has_ended(live, "back"), "the guest's end", found.left_s)
        time.sleep(SETTLE_S)  # whether its host ends too
        live.until(lambda: live.trains("front"), "the foreground's return", found.left_s)
        live.order("suspend", "front")
        live.until(lambda: live.state("front") == "SUSPENDED", "the foreground's save", found.left_s)
        step = live.jobs()["front"]["step"]
        tried = len(live.records("front"))
        found.number(front_processes=tried, front_step=step, back_output=live.output("back")[-500:])
        if live.state("back") != "FAILED":  # it waits for a GPU that nobody has
            live.order("cancel", "back")
        live.order("cancel", "front")
        ended = live.ended(found.left_s)
        roles = {attempt["role"] for attempt in ended["back"]["attempts"]}
        found.check(
            "a guest that breaks", "in the background", roles, None if found.cpu else roles == {"background"}
        )
        found.check("foreground after its guest broke", "trains, and saves", f"step {step}", bool(step))


def _has_ended(live: LiveRun, name: str) -> bool:
    """Whether a job has begun, and does not run any more."""
    return bool(live.records(name)) and live.state(name) != "RUNNING"
