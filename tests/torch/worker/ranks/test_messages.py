"""Ranks meet on one address, and nothing that one of them reads from another can run code."""

from __future__ import annotations

import ast
import os
import pickle
import socket
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from hpcsched.contract.orders import Resize  # noqa: E402
from hpcsched.worker.checkpoint.shared_memory import Held  # noqa: E402
from hpcsched.worker.ranks import rendezvous  # noqa: E402
from hpcsched.worker.ranks.messages import packed, packed_state, unpacked, unpacked_state  # noqa: E402

WORKER = Path(rendezvous.__file__).parents[1]

PICKLES = {
    "checkpoint/layout.py": "the job's own arena, a memfd: read by an unpickler that knows four types",
    "checkpoint/plain_dcp.py": "an index of a sharded checkpoint: read by an unpickler of its few classes",
    "call.py": "functions of the user's own, which the user's own Python has pickled",
    "packing/data_feed.py": "compares datasets, and reads nothing",
}


def test_nothing_is_pickled_between_ranks() -> None:
    found = set()
    for path in WORKER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module if isinstance(node, ast.ImportFrom) else ""
            if {"pickle", "cloudpickle", "dill"} & {module, *names}:
                found.add(str(path.relative_to(WORKER)))
            if isinstance(node, ast.Attribute):
                assert not node.attr.endswith(("_object", "_object_list")), f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                words = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert words.get("weights_only") == "True", f"{path}:{node.lineno}"
    assert found == set(PICKLES)


def test_a_fact_is_read_as_what_it_is_expected_to_be() -> None:
    order = Resize(attempt=2, world_size=3, keep=(0, 1), one_host=True)
    assert unpacked(packed(order), Resize | None) == order
    assert unpacked(packed((Held(1, 2, 3), True)), tuple[Held | None, bool]) == (Held(1, 2, 3), True)
    assert unpacked(packed("\udce8"), str) == "\udce8"
    for bad in (packed("text"), torch.zeros(0, dtype=torch.uint8), packed({"keep": "all"})):
        with pytest.raises(RuntimeError, match="makes no sense"):
            unpacked(bad, Resize)


class _Runs:
    def __reduce__(self) -> object:
        return os.putenv, ("HACKED", "1")


def test_a_state_comes_as_it_was_and_runs_nothing() -> None:
    state = [((0, 1, 2), (torch.float64, 3), {"mean": (torch.float32, 1)}, {"step": torch.tensor(4.0)})]
    assert unpacked_state(packed_state(state)) == state
    hostile = torch.frombuffer(bytearray(pickle.dumps(_Runs(), protocol=2)), dtype=torch.uint8)
    with pytest.raises(pickle.UnpicklingError):
        unpacked_state(hostile)


def test_the_store_listens_on_the_address_that_was_told_and_nowhere_else() -> None:
    with socket.socket() as probe:
        probe.bind((rendezvous.LOOPBACK, 0))
        port = probe.getsockname()[1]
    store = rendezvous.open_store((rendezvous.LOOPBACK, port), first=True, ranks=1, timeout_s=10.0)
    store.set("key", "value")
    (line,) = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    ]
    assert line[1] == f"0100007F:{port:04X}"


def test_gloo_listens_where_the_ranks_meet_unless_the_user_says_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_said", None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    rendezvous.listen_towards(rendezvous.LOOPBACK)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    rendezvous.listen_towards(rendezvous.LOOPBACK)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setattr(rendezvous, "_interface_towards", lambda address: "eth7")
    rendezvous.listen_towards("192.0.2.1")  # after a resize to several hosts
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
