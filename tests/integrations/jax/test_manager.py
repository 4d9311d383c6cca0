"""Orbax's manager with ours: what it says to hpcsched, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed")

from attempts import Attempts  # noqa: E402

from hpcsched.contract import files  # noqa: E402
from hpcsched.contract.state import State  # noqa: E402
from hpcsched.errors import ConfigError  # noqa: E402
from hpcsched.integrations import jax as ours  # noqa: E402
from hpcsched.worker.link import Link  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def trained(
    folder: Path, *stops: int, steps: int = 9, every: int = 4, ask: bool = False, final: bool = False
) -> tuple[list[float], list[int]]:
    """A state of two numbers; what it was after each step of this attempt, and the steps that are saved."""
    ours.current.cache_clear()
    options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=3)
    state = {"x": jax.numpy.zeros(2), "key": jax.random.key_data(jax.random.key(0))}
    seen = []
    with ours.CheckpointManager(folder / "saved", options=options) as manager:
        start = manager.latest_step() or 0
        if start:
            state = manager.restore(start, args=ocp.args.StandardRestore(state))
        for step in range(start + 1, steps + 1):
            key, draw = jax.random.split(jax.random.wrap_key_data(state["key"]))
            state = {"x": state["x"] + jax.random.normal(draw, (2,)), "key": jax.random.key_data(key)}
            seen.append(float(state["x"].sum()))
            if step in stops:
                Attempts.stop()
            if not ask or manager.should_save(step):
                manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        if final:
            manager.save(steps, args=ocp.args.StandardSave(state), force=True)
            manager.wait_until_finished()
        return seen, list(manager.all_steps())


@pytest.mark.parametrize("ask", [False, True])
def test_twice_suspended_is_as_never(tmp_path: Path, ask: bool) -> None:
    whole, _ = trained(tmp_path / "whole")
    attempts = Attempts(tmp_path)
    parts, _ = attempts.run(lambda: trained(tmp_path, 3, 6, ask=ask))
    assert attempts.codes == [75, 75]
    assert [state.step for state in attempts.states] == [3, 6]
    assert parts == whole[6:]
    assert Path(attempts.states[-1].checkpoint or "").is_dir()
    assert b"true" not in (tmp_path / files.ready(1)).read_bytes()  # it has not said that it can be several


def test_after_the_last_step_it_is_not_left(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path, HPCSCHED_STEPS="9")
    parts, saved = attempts.run(lambda: trained(tmp_path, 9))
    assert (attempts.codes, len(parts), saved[-1]) == ([], 9, 9)


@pytest.mark.parametrize("steps", ["9", None], ids=["known", "not known"])
@pytest.mark.parametrize("every_s", ["0", "3600"], ids=["periodic", "seldom"])
@pytest.mark.parametrize("stops", [(), (9,)], ids=["alone", "told at the last step"])
def test_a_save_of_the_programs_own_after_the_last_step(
    tmp_path: Path, steps: str | None, every_s: str, stops: tuple[int, ...]
) -> None:
    more = {"HPCSCHED_CHECKPOINT_EVERY_S": every_s} | ({"HPCSCHED_STEPS": steps} if steps else {})
    _, saved = Attempts(tmp_path, **more).run(lambda: trained(tmp_path, *stops, final=True))
    assert saved[-1] == 9
    assert State.decode((tmp_path / files.STATE).read_bytes()).step == 9


def test_the_last_step_is_saved(tmp_path: Path) -> None:
    _, saved = Attempts(tmp_path, HPCSCHED_STEPS="9").run(lambda: trained(tmp_path))
    assert saved[-1] == 9
    assert State.decode((tmp_path / files.STATE).read_bytes()).step == 9


@pytest.mark.parametrize("ask", [False, True])
def test_the_loss_is_told_whoever_asks_first(tmp_path: Path, monkeypatch: Any, ask: bool) -> None:
    told: list[tuple[int, float | None]] = []
    monkeypatch.setattr(Link, "report", lambda self, step, loss=None: told.append((step, loss)))

    def program() -> None:
        ours.current.cache_clear()
        options = ocp.CheckpointManagerOptions(save_interval_steps=2)
        with ours.CheckpointManager(tmp_path / "saved", options=options) as manager:
            for step in (1, 2, 3):
                if not ask or manager.should_save(step):
                    args = ocp.args.StandardSave({"x": jax.numpy.zeros(2)})
                    manager.save(step, args=args, metrics={"loss": step / 2})

    attempts = Attempts(tmp_path)
    attempts.run(program)
    first = attempts.points[0]
    assert (first.step, first.values) == (1, {"loss": 0.5})
    assert told == [(1, 0.5), (2, 1.0), (3, None if ask else 1.5)]


def test_what_orbax_saves_by_itself_is_said_too(tmp_path: Path) -> None:
    _, saved = Attempts(tmp_path).run(lambda: trained(tmp_path, every=3))
    assert saved == [3, 6, 9]
    state = State.decode((tmp_path / files.STATE).read_bytes())
    assert state.step == 9


def test_copies_are_refused(tmp_path: Path) -> None:
    more: dict[str, Any] = {"HPCSCHED_RANK": "0", "HPCSCHED_WORLD_SIZE": "2"}
    with pytest.raises(ConfigError, match="know nothing of each other"):
        Attempts(tmp_path, **more).run(lambda: trained(tmp_path))


def test_without_hpcsched_it_is_orbax(tmp_path: Path) -> None:
    _, saved = trained(tmp_path)
    assert saved == [1, 4, 8]
