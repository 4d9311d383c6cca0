"""Simulated nodes: their description in a file, and devices that behave as NVML says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcsched.devices import open_devices
from hpcsched.devices.node_file import Node, read_node
from hpcsched.devices.nvml import NvmlDevices
from hpcsched.devices.simulated_nvml import Happening, SimulatedNvml
from hpcsched.errors import ConfigError

WHOLE = """
schema = 1
gpus = 2
name = "NVIDIA H100 80GB HBM3"
memory_mib = 81559
mig = [0, 2]
recovery_action = false
visible = "1,0"

[[happens]]
at_s = 5
gpu = 1
instance = 1
what = "xid"
xid = 95
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "node.toml"
    file.write_text(text)
    return file


def test_all_of_a_description_is_read(tmp_path: Path) -> None:
    file = written(tmp_path, WHOLE)
    assert read_node(file) == Node(
        gpus=2,
        name="NVIDIA H100 80GB HBM3",
        named=True,
        memory_mib=81559,
        mig=[0, 2],
        recovery_action=False,
        visible="1,0",
        script=(Happening(at_s=5, gpu=1, instance=1, what="xid", xid=95),),
    )
    devices = open_devices(f"replay:{file}@20", "h")
    assert (devices.kind, devices.speed) == ("replay", 20)
    assert [d.handle[:4] for d in devices.inventory()] == ["MIG-", "GPU-"]
    assert [d.memory_mib for d in devices.inventory()] == [81559 / 2, 81559]
    assert all(d.kind == "replay" for d in devices.inventory())


def test_uuids_are_the_same_each_time_and_others_on_another_host() -> None:
    one, again, other = (
        [d.handle for d in open_devices("replay:3", host).inventory()] for host in ("a", "a", "b")
    )
    assert one == again and len({*one, *other}) == 6


HEAD = "schema = 1\ngpus = 2\nmig = [0, 1]\n"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("schema = 1\n", "gpus: missing"),
        ("gpus = 1\n", "schema: missing"),
        ("schema = 2\ngpus = 1\n", "schema: 2"),
        ("schema = 1\ngpus = 65\n", "gpus: 65"),
        ("schema = 1\ngpus = true\n", "gpus: True"),
        ("schema = 1\ngpus = 1\ncolour = 1\n", "colour: unknown key"),
        ("schema = 1\ngpus = 1\nmig = 8\n", "mig"),
        ("schema = 1\ngpus = 1\nmig = [1, 1]\n", "mig: 2 numbers; accepted: one for each of the 1 GPUs"),
        ("schema = 1\ngpus = 1\nmemory_mib = 0\n", "memory_mib: 0"),
        ("schema = 1\ngpus = 1\nhappens = 3\n", "happens: 3"),
        ('schema = 1\ngpus = 1\nvisible = "7"\n', "visible: '7'"),
        ("schema = \n", "TOML file"),
        (HEAD + "[[happens]]\ngpu = 0\nwhat = 'lost'\n", "happens[0].at_s: missing"),
        (
            HEAD + "[[happens]]\nat_s = -1\ngpu = 0\nwhat = 'lost'\n",
            "happens[0].at_s: -1; accepted: seconds after the start, 0 or more",
        ),
        (HEAD + "[[happens]]\nat_s = 1\ngpu = 2\nwhat = 'lost'\n", "happens[0].gpu: 2; accepted: 0 to 1"),
        (HEAD + "[[happens]]\nat_s = 1\ngpu = 0\nwhat = 'melts'\n", "happens[0].what: 'melts'"),
        (HEAD + "[[happens]]\nat_s = 1\ngpu = 0\nwhat = 'xid'\n", "happens[0].xid: missing"),
        (HEAD + "[[happens]]\nat_s = 1\ngpu = 0\nwhat = 'hang'\n", "happens[0].for_s: missing"),
        (HEAD + "[[happens]]\nat_s = 1\ngpu = 0\nwhat = 'lost'\nfor_s = 2\n", "happens[0].for_s: 2"),
        (HEAD + "[[happens]]\nat_s = 1\ngpu = 0\nwhat = 'lost'\nxid = 79\n", "happens[0].xid: 79"),
        (
            HEAD + "[[happens]]\nat_s = 1\ngpu = 0\ninstance = 0\nwhat = 'lost'\n",
            "happens[0].instance: 0; accepted: one of the 0 MIG instances of GPU 0",
        ),
        (HEAD + "[[happens]]\nat_s = 1\ngpu = 1\ninstance = 1\nwhat = 'lost'\n", "happens[0].instance: 1"),
        (
            HEAD + "[[happens]]\nat_s = 1\ngpu = 1\nwhat = 'memory-stays'\nfor_s = 1\n",
            "accepted: memory_mib for the node",
        ),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(tmp_path: Path, text: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_devices(f"replay:{written(tmp_path, text)}", "h")
    assert where in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"a" * (2**20 + 1)])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "node.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--devices .*node.toml: "):
        open_devices(f"replay:{file}", "h")


@pytest.mark.parametrize("speed", ["0", "fast", "inf"])
def test_a_described_node_has_a_speed_too(tmp_path: Path, speed: str) -> None:
    with pytest.raises(ConfigError, match=r"--devices: 'replay:.*accepted: auto"):
        open_devices(f"replay:{written(tmp_path, WHOLE)}@{speed}", "h")


class Rehearsal:
    """A node with a script, and a clock that is set."""

    def __init__(self, *script: Happening, **about: Any) -> None:
        self.now, self.slept = 0.0, 0.0
        node = Node(gpus=4, script=script, **{"memory_mib": 80_000, **about})
        self.nvml = SimulatedNvml(node.simulated("h"), script, clock=lambda: self.now, sleep=self._sleep)
        self.devices = NvmlDevices("h", nvml=self.nvml, visible=node.visible, clock=lambda: self.now)

    def _sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.now += seconds

    def at(self, now: float) -> list[int]:
        """The devices that must not be used then."""
        self.now = now
        return [sample.gpu for sample in self.devices.sample() if not sample.healthy]


def test_a_gpu_falls_off_the_bus_and_returns() -> None:
    node = Rehearsal(
        Happening(at_s=10, gpu=2, what="xid", xid=31),
        Happening(at_s=20, gpu=1, what="xid", xid=79),
        Happening(at_s=50, gpu=1, what="returns"),
    )
    assert [node.at(now) for now in (9, 10, 19, 20, 60)] == [[], [], [], [1], [1]]
    assert node.at(80) == [], "asked again after a minute, it answers"


def test_errors_that_pass_do_so() -> None:
    node = Rehearsal(
        Happening(at_s=1, gpu=0, what="timeout", for_s=30),
        Happening(at_s=1, gpu=1, what="unknown-error", for_s=30),
        Happening(at_s=5, gpu=3, what="lost"),
    )
    assert [node.at(now) for now in (1, 5, 9, 40)] == [[], [3], [1, 3], [1, 3]]
    assert node.at(200) == [3]


def test_a_contained_memory_error_is_counted_and_condemns_nothing() -> None:
    script = Happening(at_s=1, gpu=0, what="memory-error")
    assert Rehearsal(script).at(1) == [], "the driver does not ask for a reset"
    assert Rehearsal(script, recovery_action=False).at(1) == [0]


@pytest.mark.parametrize("memory_mib", [81559.0, 1000.0])
def test_memory_stays_for_a_while_after_a_job(memory_mib: float) -> None:
    node = Rehearsal(Happening(at_s=1, gpu=2, what="memory-stays", for_s=5), memory_mib=memory_mib)
    device = node.devices.inventory()[2]
    free = []
    for node.now in (0.0, 1.0, 5.9, 6.0):
        free.append(node.devices.free(device))
    assert free == [True, False, False, True]


def test_a_gpu_that_hangs_keeps_who_asks_waiting() -> None:
    node = Rehearsal(Happening(at_s=1, gpu=0, what="hang", for_s=30))
    assert node.at(2) == [] and node.slept == 29
    assert node.at(40) == [] and node.slept == 29


def test_an_xid_of_an_instance() -> None:
    node = Rehearsal(Happening(at_s=1, gpu=0, instance=1, what="xid", xid=95), mig=[2, 0, 0, 0])
    assert node.at(1) == [1]
    assert node.at(100) == [1], "the board is asked to be reset when it suits the others"


def test_a_node_whose_gpus_are_all_lost_at_the_start_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "schema = 1\ngpus = 1\nhappens = [{ at_s = 0, gpu = 0, what = 'lost' }]\n")
    with pytest.raises(ConfigError, match=r"node\.toml: no GPU answers at the start; accepted: "):
        open_devices(f"replay:{file}", "h")


def test_a_driver_that_hangs_from_the_start_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "node.toml"
    file.write_text("schema = 1\ngpus = 1\n[[happens]]\nat_s = 0\ngpu = 0\nwhat = 'hang'\nfor_s = 0.5\n")
    monkeypatch.setattr("hpcsched.devices.OPENS_WITHIN_S", 0.05)
    with pytest.raises(ConfigError, match=r"node\.toml', but the driver has not answered for 0 s"):
        open_devices(f"replay:{file}", "h")


@pytest.mark.parametrize(("said", "gpu_type"), [('name = "NVIDIA A100"\n', "NVIDIA A100"), ("", "replay")])
def test_gpus_of_a_node_with_a_name_stand_for_such_ones(tmp_path: Path, said: str, gpu_type: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(f"schema = 1\ngpus = 1\n{said}")
    devices = open_devices(f"replay:{file}", "here")
    (device,) = devices.inventory()
    devices.close()
    assert (device.kind, device.gpu_type) == ("replay", gpu_type)
