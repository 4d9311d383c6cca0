"""A packed job's own process: how it stands with its host, and where that is."""

from __future__ import annotations

import os
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from hpcsched.errors import ConfigError
from hpcsched.worker.background.protocol import GuestConnection, connect, listen, peer, take
from hpcsched.worker.packing import job_process
from hpcsched.worker.packing.environment import common
from hpcsched.worker.packing.host_start import address_of, log_of
from hpcsched.worker.packing.job_process import HostLink

HURRY_S = job_process.ANSWERS_WITHIN_S


def begun(now: float = 0.0) -> HostLink:
    stay = HostLink(now)
    for word in ({"accepted": True}, {"building": True}, {"begun": True}):
        assert not stay.hears(word, now)
    return stay


def test_a_job_waits_for_its_training_as_long_as_that_takes() -> None:
    stay = begun()
    assert stay.begun
    assert stay.over(10**9) is None
    assert stay.sleep_s(5.0) == inf


@pytest.mark.parametrize("last", ["exit", "refused", "left"])
def test_the_last_word_is_known(last: str) -> None:
    assert begun().hears({last: 0}, 1.0)


def test_a_host_that_does_not_come_is_given_up_and_only_who_holds_it_up_ends_it() -> None:
    stay = HostLink(0.0)
    assert stay.over(job_process.ACCEPTED_WITHIN_S - 1) is None
    assert stay.over(job_process.ACCEPTED_WITHIN_S)
    assert not stay.ends_host
    stay.hears({"accepted": True}, 10.0)
    assert stay.over(9 + job_process.BEGUN_WITHIN_S) is None
    assert stay.over(10 + job_process.BEGUN_WITHIN_S)
    assert not stay.ends_host  # others are built before it
    stay.hears({"building": True}, 100.0)
    assert stay.over(100 + job_process.BEGUN_WITHIN_S)
    assert stay.ends_host


def test_a_stop_is_asked_for_again_and_again_and_at_once_when_it_becomes_another() -> None:
    stay = begun()
    assert stay.asks(1.0, "SIGTSTP", inf) == "SIGTSTP"
    assert stay.asks(1.5, "SIGTSTP", inf) is None
    assert stay.sleep_s(1.5) <= 1.0
    assert stay.asks(2.0, "SIGTSTP", inf) == "SIGTSTP"
    assert stay.asks(2.1, "SIGTERM", HURRY_S) == "SIGTERM"


def test_a_host_may_take_any_time_to_save_until_its_job_is_told_to_end() -> None:
    stay = begun()
    stay.asks(1.0, "SIGTSTP", inf)
    assert stay.over(10**6) is None
    stay.asks(10**6, "SIGTERM", HURRY_S)
    assert stay.over(10**6 + HURRY_S - 0.1) is None
    assert stay.over(10**6 + HURRY_S)
    assert stay.ends_host


def test_a_host_that_answers_is_not_ended() -> None:
    stay = begun()
    stay.asks(1.0, "SIGTERM", HURRY_S)
    for now in range(1, 100):
        assert stay.over(float(now)) is None
        stay.hears({"heard": True}, float(now))
    assert stay.over(99 + HURRY_S)


def test_a_host_that_has_said_that_it_is_busy_is_given_more_time() -> None:
    stay = begun()
    stay.hears({"busy": True}, 1.0)
    stay.asks(1.0, "SIGTERM", HURRY_S)
    assert stay.over(1 + HURRY_S) is None
    assert stay.over(1 + job_process.BUSY_TIMES * HURRY_S)
    stay.hears({"busy": False}, 2.0)
    assert stay.over(2 + HURRY_S)


def test_a_job_that_has_not_begun_leaves_without_ending_the_host_of_others() -> None:
    stay = HostLink(0.0)
    stay.hears({"accepted": True}, 0.0)
    stay.hears({"building": True}, 0.0)
    stay.asks(1.0, "SIGTERM", HURRY_S)
    assert stay.over(1 + HURRY_S)
    assert not stay.ends_host


def test_what_all_members_have_in_common_is_not_any_jobs_own() -> None:
    environ = {
        "HPCSCHED_RUN_ID": "r",
        "HPCSCHED_JOB_ID": "1",
        "HPCSCHED_PROGRESS_FD": "5",
        "RANK": "0",
        "MASTER_PORT": "1234",
        "CUDA_VISIBLE_DEVICES": "3",
        "OF_THE_USER": "x",
    }
    kept = {"HPCSCHED_RUN_ID": "r", "CUDA_VISIBLE_DEVICES": "3", "OF_THE_USER": "x"}
    assert common(environ) == kept


def test_where_a_pack_is_and_where_it_writes(tmp_path: Path) -> None:
    environ = {"HPCSCHED_RUN_ID": "r" * 64, "HPCSCHED_PACK": "p" * 200, "HPCSCHED_RUN_DIR": str(tmp_path)}
    environ |= {"HPCSCHED_DEVICES": "7", "HPCSCHED_RANK": "0"}
    address = address_of(environ)
    assert address is not None and address.startswith("\0") and len(address) <= 107
    assert address != address_of({**environ, "HPCSCHED_RUN_ID": "other"})
    assert address_of({**environ, "HPCSCHED_PACK": ""}) is None
    assert log_of(environ) == tmp_path / "packs" / "7.log"


def test_an_address_that_is_taken_is_nobodys_until_somebody_listens() -> None:
    address = f"\0hpcsched/test/{os.getpid()}"
    listener = take(address)
    assert listener is not None
    assert take(address) is None
    assert listen(address) is None
    assert connect(address) is None
    listener.listen(1)
    line = connect(address)
    assert line is not None
    assert peer(line.socket) == (os.getpid(), os.getuid())
    other = GuestConnection(listener.accept()[0])
    assert not line.hung_up()
    other.say({"last": 1})
    other.close()
    assert line.hung_up()  # though something is still to be heard
    assert line.hear(0.0) == {"last": 1}
    listener.close()
    line.close()
    assert connect(address) is None


def test_an_address_that_cannot_be_had_at_all_is_said() -> None:
    with pytest.raises(OSError):
        take("\0" + "x" * 200)


def test_only_packed_jobs_of_one_rank_have_members(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"HPCSCHED_JOB_ID": "1", "HPCSCHED_RUN_DIR": "/r", "HPCSCHED_PACK": "p"}
    packed = {"HPCSCHED_STRATEGY": '{"kind": "packed"}'}
    assert job_process.be_member({}) is None
    assert job_process.be_member(job) is None
    assert job_process.be_member({**job, **packed, "HPCSCHED_WORLD_SIZE": "2"}) is None
    assert job_process.be_member({**job, **packed, "HPCSCHED_PACK": ""}) is None
    with pytest.raises(ConfigError):
        job_process.be_member({**job, "HPCSCHED_STRATEGY": "nonsense"})


def test_a_packed_jobs_own_process_needs_no_torch() -> None:
    program = "import sys, hpcsched.worker.packing.job_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
