"""How many processes a command is: what is known of it, launchers, placeholders."""

from __future__ import annotations

import socket

from hpcsched.agent import rendezvous_check


def test_a_meeting_is_a_socket_that_listens(monkeypatch) -> None:
    monkeypatch.setattr(rendezvous_check, "NOT_MET_AFTER_S", 0.0)
    monkeypatch.setattr(rendezvous_check, "CHECK_EVERY_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert rendezvous_check.RendezvousCheck(port, 2).news(ready=False) is None
    ranks = rendezvous_check.RendezvousCheck(port, 2)
    assert [ranks.news(ready=False), ranks.news(ready=False)] == [False, None]
    with socket.create_server(("127.0.0.1", port)):
        assert [ranks.news(ready=False), ranks.news(ready=False)] == [True, None]
