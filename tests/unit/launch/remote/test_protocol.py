"""Messages between head and node agents, what they need to join, and what workers must not inherit."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import msgspec
import pytest

from hpcsched.agent.node.__main__ import main
from hpcsched.agent.node.own_host import address_towards, own_name, show_granted
from hpcsched.contract.orders import Resize, encode
from hpcsched.core.model import Device
from hpcsched.errors import BadInput, ConfigError
from hpcsched.launch.remote import protocol
from hpcsched.launch.remote.channel import RESEND_S, MessageChannel
from hpcsched.launch.remote.keys import Join, KeyPair, join_file, read_join, write_join

JOIN = Join(
    life="l1",
    run_id="r1",
    endpoint="tcp://127.0.0.1:1",
    server_key="s",
    client_public="p",
    client_secret="secret",
    hosts=("n1", "n2.cluster", "n3"),
    devices="cpu:2",
    grace_s=5.0,
)


@pytest.mark.parametrize("number", [0, -1, 255, 2**53])
def test_a_signal_that_is_none_makes_a_message_none(number: int) -> None:
    for kind in ("signal", "ask"):
        message = msgspec.msgpack.encode((1, 0, {"type": kind, "part": 7, "number": number}))
        with pytest.raises(BadInput, match="number"):
            protocol.read_to_node(message)


def test_messages_survive_the_wire() -> None:
    device = Device(index=0, host="n1", kind="cpu", handle="0-3")
    hello = protocol.Hello(
        name="n1",
        hostname="n1",
        pid=1,
        started=2,
        devices=(device,),
        kind="cpu",
        speed=1.0,
        address="10.0.0.1",
        wall=3.0,
    )
    beat = protocol.Beat(1.0, (protocol.Reading(0.5, 10.0), protocol.Reading(healthy=False, why="broken")))
    for message in (
        hello,
        beat,
        protocol.Exited(1, 75, b"{}"),
        protocol.Progressed(1, b"\xff\n"),
        protocol.Gone("x"),
    ):
        assert protocol.read_to_head(MessageChannel().numbered(message, 0.0)).body == message
    for message in (protocol.Coming("n1"), protocol.Leaving("x"), protocol.LaunchFailed(1, "x", True, True)):
        assert protocol.read_to_head(MessageChannel().numbered(message, 0.0)).body == message
    for message in (
        protocol.Ready(1, 2, b""),
        protocol.Refused(1, 2, b"no"),
        protocol.Living(1, 3),
        protocol.Keeping((4, 5)),
    ):
        assert protocol.read_to_head(MessageChannel().numbered(message, 0.0)).body == message
    for order in (
        protocol.Welcome(),
        protocol.Signal(3, 15),
        protocol.Leave(0.0),
        protocol.Expect(3, 2),
        protocol.Forget(1),
    ):
        assert protocol.read_to_node(MessageChannel().unnumbered(order)).body == order


def test_an_order_for_rank_0_survives_the_wire_as_it_is() -> None:
    order = protocol.Order(3, encode(Resize(attempt=4, world_size=2, keep=(0, 1), one_host=True)))
    assert protocol.read_to_node(MessageChannel().unnumbered(order)).body == order


@pytest.mark.parametrize("data", [b"", b"\xff" * 9, b"{}", msgspec.msgpack.encode((1, 0, {"type": "bomb"}))])
def test_garbage_is_no_message(data: bytes) -> None:
    with pytest.raises(BadInput):
        protocol.read_to_head(data)


def test_a_link_over_connections_that_lose_delivers_once_and_in_order() -> None:
    for seed in range(30):
        chance = random.Random(seed)
        ours, theirs = MessageChannel(), MessageChannel()
        got: list[int] = []
        now, to_send = 0.0, list(range(1, 40))
        while len(got) < 39:
            assert now < 2000
            now += 0.5
            out = [ours.numbered(protocol.Signal(to_send.pop(0), 15), now)] if to_send else []
            for data in [*out, *ours.resends(now)]:
                if chance.random() < 0.6:
                    envelope = protocol.read_to_node(data)
                    if theirs.take(envelope, now):
                        assert isinstance(envelope.body, protocol.Signal)
                        got.append(envelope.body.part)
            if theirs.owes_ack and chance.random() < 0.6:
                ours.take(protocol.read_to_head(theirs.unnumbered(protocol.Beat(now, ()))), now)
        assert got == list(range(1, 40))


def test_nothing_is_sent_again_once_it_has_arrived() -> None:
    ours, theirs = MessageChannel(), MessageChannel()
    theirs.take(protocol.read_to_node(ours.numbered(protocol.Welcome(), 0.0)), 0.0)
    assert theirs.owes_ack and len(ours.resends(RESEND_S)) == 1 and not ours.resends(RESEND_S + 1)
    ours.take(protocol.read_to_head(theirs.unnumbered(protocol.Beat(0.0, ()))), 4.0)
    assert not theirs.owes_ack and not ours.resends(1e9)


def test_the_join_file_is_private_and_replaces_older_ones(tmp_path: Path) -> None:
    write_join(join_file(tmp_path, "old"), JOIN)
    path = join_file(tmp_path, "new")
    write_join(path, JOIN)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_join(path) == JOIN


def bad_join_files(folder: Path) -> list[tuple[Path, str]]:
    write_join(join_file(folder, "x"), JOIN)
    good = join_file(folder, "x").read_bytes()
    cases = {
        "version": (
            good.replace(f'"protocol":{protocol.PROTOCOL}'.encode(), b'"protocol":99'),
            0o600,
            "protocol 99",
        ),
        "torn": (good[:40], 0o600, "not a join file"),
        "open": (good, 0o644, "can be read by others"),
    }
    found = [(folder / "missing", "No such file")]
    for name, (data, mode, words) in cases.items():
        path = folder / name
        path.write_bytes(data)
        path.chmod(mode)
        found.append((path, words))
    return found


def test_a_bad_join_file_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, words in bad_join_files(tmp_path):
        assert main(["--join", str(path)]) == 2
        said = capsys.readouterr().err
        assert words in said and str(path) in said and said.count("\n") == 1


def test_granted_gpus_are_shown_where_nobody_else_has() -> None:
    join = msgspec.structs.replace(JOIN, gpus={"n1": ("2", "GPU-7"), "n3": ()})
    environ: dict[str, str] = {}
    show_granted(join, "n2.cluster", environ)
    assert not environ
    show_granted(join, "n1", environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "2,GPU-7"}
    show_granted(join, "n3", environ)  # srun has said it
    assert environ == {"CUDA_VISIBLE_DEVICES": "2,GPU-7"}


def test_keys_differ_and_do_not_show(tmp_path: Path) -> None:
    one, two = KeyPair.new(), KeyPair.new()
    assert one != two and one.secret not in repr(one)


def test_a_host_knows_its_name() -> None:
    assert own_name(JOIN, "n1", {}, "elsewhere") == "n1"
    assert own_name(JOIN, None, {"SLURMD_NODENAME": "n3"}, "n1") == "n3"
    assert own_name(JOIN, None, {}, "n2") == "n2.cluster"
    assert own_name(JOIN, None, {}, "n3.cluster") == "n3"
    with pytest.raises(ConfigError, match=r"'n9'; accepted: one of n1, n2\.cluster, n3"):
        own_name(JOIN, None, {}, "n9")


def test_the_address_is_the_one_on_the_way() -> None:
    assert address_towards("tcp://127.0.0.1:5") == "127.0.0.1"
    assert os.path.sep not in address_towards("tcp://192.0.2.1:5")
