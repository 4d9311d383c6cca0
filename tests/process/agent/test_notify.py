"""Messages of a real run, to a command and to a web server of this host; and one that never answers."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from livebench import Bench, job, saves

from hpcsched.agent.notify.channels import CommandChannel, WebhookChannel
from hpcsched.agent.notify.delivery import Delivery
from hpcsched.agent.notify.message import Message, RunPart

CPU = ["--devices", "cpu:2", "--warm", "off"]


@pytest.fixture
def posted() -> Iterator[tuple[str, list[dict[str, object]]]]:
    """The address of a web server, and what is posted there."""
    got: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.append({"type": self.headers["Content-Type"], "path": self.path, **body})
            self.send_response(204 if body["kind"] == "end" else 302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/T0/secret", got
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_command_and_a_webhook_are_told(bench: Bench, posted: tuple[str, list[dict[str, object]]]) -> None:
    url, got = posted
    bench.env["HPCSCHED_NOTIFY_WEBHOOK"] = url
    bench.env["http_proxy"] = "http://127.0.0.1:1"  # not for this host
    told = bench.folder / "told"
    program = bench.folder / "tell.sh"
    program.write_text('#!/bin/sh\ncat > $0.$HPCSCHED_MESSAGE_KIND; (sleep 1; echo "late" >> $0.late) &\n')
    program.chmod(0o755)
    shows = job("shows", "env; exit 3", gpus=1, retries=0)
    agent = bench.start(
        bench.set_of(shows, saves("runs", steps=100_000, gpus=1)), *CPU, "--notify-command", "./tell.sh"
    )
    bench.until(lambda: bench.job("shows").get("state") == "FAILED", "failed")
    bench.ready("runs")
    assert bench("drain").returncode == 0
    assert agent.wait() == 75, agent.said
    kinds = [message["kind"] for message in got]
    assert kinds == ["drain", "end"]
    assert got[-1]["path"] == "/T0/secret" and got[-1]["type"] == "application/json"
    assert "1 job left" in str(got[-1]["text"])
    end = json.loads((told.parent / "tell.sh.end").read_text())
    assert [one["name"] for one in end["jobs"]] == ["shows"] and end["run"]["dir"] == str(bench.dir)
    assert "message (drain) not delivered: the webhook at http://127.0.0.1" in agent.said  # a redirect
    assert "HTTP 302" in agent.said and "/T0/secret" not in agent.said
    assert "/T0/secret" not in bench.output(1)  # the jobs are not told
    bench.until(lambda: (told.parent / "tell.sh.late").exists(), "what a command leaves behind goes on")


def test_a_server_that_never_answers_is_left_and_so_is_a_command_that_hangs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        hangs = CommandChannel(("sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; wait"))
        delivery = Delivery([WebhookChannel(url), hangs], environ=os.environ, cwd=str(tmp_path), within_s=1.0)
        run = RunPart(id="r", dir="/r", host="h", allocation={}, state="", jobs={})
        delivery.put(Message(kind="end", text="over", time="", run=run))
        delivery.close()
    assert delivery.trouble() == [
        f"message (end) not delivered: the webhook at {url[:-2]}: not done within 1 s",
        "message (end) not delivered: the command sh: not done within 1 s",
    ]
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10.0
    while _runs(pid) and time.monotonic() < deadline:  # one that is killed runs until the kernel gets to it
        time.sleep(0.02)
    assert not _runs(pid)  # what it has started is ended too


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
