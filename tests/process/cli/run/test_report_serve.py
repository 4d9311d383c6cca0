"""`hpcsched report --serve`: who gets the page and who does not, what is bounded, when a page is drawn."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from hpcsched.cli.run.report_live import LEAST_PAUSE_S, PAUSE_OF_FAILURE_S, LivePage, NotDrawn, Page, State
from hpcsched.cli.run.report_serve import MOST_CONNECTIONS, MOST_HEAD, Server
from hpcsched.errors import ConfigError
from hpcsched.store.journal import Journal
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import Driver, a_job

WITHIN_S = 60.0
HTML = b"<!DOCTYPE html><p>the page of a run</p>"


class Fixed:
    """What is served here."""

    page: Page | None = Page(3, HTML, gzip.compress(HTML), 0.0)

    def state(self) -> State:
        return State(page=3, age_s=1.5, doing="current", note="")


class Answer(NamedTuple):
    code: int
    about: dict[str, str]
    body: bytes


@contextmanager
def serving(**bounds: float) -> Iterator[Server]:
    with Server(0, Fixed(), **bounds) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(WITHIN_S)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=WITHIN_S)


def sent(server: Server, data: bytes) -> bytes:
    """All that is answered to these bytes."""
    with connected(server) as connection:
        answer = b""
        try:
            connection.sendall(data)
            while more := connection.recv(2**16):
                answer += more
        except ConnectionError:  # it was closed with bytes unread
            pass
        return answer


def asked(
    server: Server, path: str = "/", *lines: str, method: str = "GET", host: str = "localhost"
) -> Answer:
    head = [f"{method} {path} HTTP/1.1", *([f"Host: {host}"] if host else []), *lines, "", ""]
    answer, _, body = sent(server, "\r\n".join(head).encode()).partition(b"\r\n\r\n")
    first, *rest = answer.decode().split("\r\n")
    return Answer(int(first.split()[1]), dict(line.split(": ", 1) for line in rest), body)


def with_cookie(server: Server, path: str = "/", *lines: str, **more: str) -> Answer:
    return asked(server, path, f'Cookie: a=b; {server.cookie}={server.token}; é[="', *lines, **more)


def test_the_token_becomes_a_cookie_and_leaves_the_address(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1" and len(server.token) >= 43
    first = asked(server, server.url.partition(str(server.port))[2], host=f"127.0.0.1:{server.port}")
    assert (first.code, first.about["Location"], first.body) == (303, "/", b"")
    cookie, *rules = first.about["Set-Cookie"].split("; ")
    assert rules == ["Path=/", "HttpOnly", "SameSite=Strict"]
    page = asked(server, "/", f"Cookie: {cookie}", host="[::1]:9999")
    assert page.code == 200 and server.token.encode() not in page.body


def test_one_script_runs_and_nothing_else_is_loaded(server: Server) -> None:
    frame, page = with_cookie(server), with_cookie(server, "/page")
    script = re.findall(rb"<script>(.*?)</script>", frame.body, re.DOTALL)
    assert len(script) == 1 and b"<script" not in page.body
    digest = base64.b64encode(hashlib.sha256(script[0]).digest()).decode()
    rules = frame.about["Content-Security-Policy"].split("; ")
    assert rules[0] == "default-src 'none'" and "frame-ancestors 'none'" in rules
    assert set(rules) - set(page.about["Content-Security-Policy"].split("; ")) == {
        f"script-src 'sha256-{digest}'",
        "connect-src 'self'",
    }


def test_every_answer_is_for_this_reader_alone(server: Server) -> None:
    asks = [with_cookie(server, path) for path in ("/", "/page", "/state", "/x")]
    for answer in (
        *asks,
        asked(server),
        asked(server, method="POST"),
        asked(server, f"/?token={server.token}"),
    ):
        about = answer.about
        assert about["Cache-Control"] == "no-store" and about["Referrer-Policy"] == "no-referrer"
        assert about["X-Content-Type-Options"] == "nosniff" and about["X-Frame-Options"] == "DENY"
        assert "Server" not in about and "Access-Control-Allow-Origin" not in about


def test_page_and_state(server: Server) -> None:
    assert with_cookie(server, "/page").body == HTML
    small = with_cookie(server, "/page", "Accept-Encoding: gzip, br")
    assert small.about["Content-Encoding"] == "gzip" and gzip.decompress(small.body) == HTML
    told = json.loads(with_cookie(server, "/state").body)
    assert told == {"page": 3, "age_s": 1.5, "doing": "current", "note": ""}
    head = with_cookie(server, "/page", method="HEAD")
    assert (head.code, head.about["Content-Length"], head.body) == (200, str(len(HTML)), b"")


@pytest.mark.parametrize(
    "path", ["/", "/page", "/state", "/?token=", "/?token=x", "/?x", "/../../etc/passwd", "//x", "*", "/é"]
)
def test_without_the_token_nothing_is_said(server: Server, path: str) -> None:
    for lines in ((), ("Cookie: x",), (f"Cookie: {server.cookie}=x",), (f"Cookie: x={server.token}",)):
        answer = asked(server, path, *lines)
        assert (answer.code, answer.body) == (403, b"") and "Set-Cookie" not in answer.about


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "127.0.0.1.evil.example", "localhost:x", "0.0.0.0", "localhost\r\nHost: localhost"],
)
def test_another_name_of_this_host_gets_nothing(server: Server, host: str) -> None:
    assert with_cookie(server, host=host)[::2] == (403, b"")
    answer = asked(server, f"/?token={server.token}", host=host)
    assert answer[::2] == (403, b"") and "Set-Cookie" not in answer.about


@pytest.mark.parametrize(
    "path", ["/journal.jsonl", "/../run.json", "/page/", "/page?x", "/%2e%2e/x", "http://x/page"]
)
def test_no_file_is_served(server: Server, path: str) -> None:
    assert with_cookie(server, path)[::2] == (404, b"")


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "__init__"]
)
def test_other_methods_are_refused(server: Server, method: str) -> None:
    answer = with_cookie(server, method=method)
    assert answer[::2] == (405, b"") and answer.about["Allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "data",
    [b"\r\n\r\n", b"\x16\x03\x01" * 99 + b"\n\n", b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n", b"GET /\r\n\r\n",
     b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"GET / HTTP/1.1\r\n: \x00\r\n\xff\r\n\r\n"],
)  # fmt: skip
def test_garbage_is_answered_with_nothing(server: Server, data: bytes) -> None:
    answer = sent(server, data)
    assert re.fullmatch(rb"|(HTTP/1.0 4\d\d .*\r\n\r\n)", answer, re.DOTALL), answer
    assert b"<" not in answer and b"Python" not in answer
    assert with_cookie(server).code == 200


def test_a_long_request_is_cut_off(server: Server) -> None:
    whole = f"GET / HTTP/1.1\r\nHost: localhost\r\nCookie: {server.cookie}={server.token}\r\nx: %s\r\n\r\n"
    assert sent(server, (whole % ("x" * (MOST_HEAD + 8192))).encode()) == b""
    assert b" 200 " in sent(server, (whole % ("x" * (MOST_HEAD // 2))).encode())


def test_slow_clients_are_bounded_in_time_and_number() -> None:
    with serving(asked_within_s=1.0) as server:
        slow = [connected(server) for _ in range(MOST_CONNECTIONS)]
        dripping = threading.Event()

        def drip() -> None:
            while not dripping.wait(0.1):
                for connection in slow:
                    try:
                        connection.send(b"G")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        for connection in slow:  # each is closed, though it never pauses
            assert not _rest(connection)
        dripping.set()
        thread.join(WITHIN_S)
        until = time.monotonic() + WITHIN_S
        while not sent(server, b"GET / HTTP/1.1\r\n\r\n"):
            assert time.monotonic() < until
        for connection in slow:
            connection.close()


def test_more_connections_than_allowed_are_closed_at_once() -> None:
    with serving(asked_within_s=WITHIN_S) as server:
        slow = [connected(server) for _ in range(MOST_CONNECTIONS)]
        assert sent(server, b"GET / HTTP/1.1\r\n\r\n") == b""
        slow.pop().close()
        until = time.monotonic() + WITHIN_S
        while not sent(server, b"GET / HTTP/1.1\r\n\r\n"):
            assert time.monotonic() < until
        for connection in slow:
            connection.close()


def _rest(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except ConnectionError:
        return b""


def test_a_port_that_is_taken_is_refused_in_one_line(server: Server) -> None:
    with pytest.raises(ConfigError, match=f"^--port: {server.port}: .*; accepted: a port that is free"):
        Server(server.port, Fixed())


class Drawn:
    """Draws pages that say how many there were, one at a time, when it is let."""

    def __init__(self) -> None:
        self.runs: list[Sequence[RunDir]] = []
        self.lets, self.busy = threading.Semaphore(0), threading.Lock()
        self.fails = False

    def __call__(self, rundirs: Sequence[RunDir]) -> bytes:
        assert self.busy.acquire(blocking=False)
        try:
            self.runs.append(rundirs)
            assert self.lets.acquire(timeout=WITHIN_S)
            if self.fails:
                raise NotDrawn("no new page: no")
            return b"page %d" % len(self.runs)
        finally:
            self.busy.release()


class Scene:
    """A live page of the runs `a` and `b`, with a clock played by hand."""

    def __init__(self, tmp_path: Path) -> None:
        self.a, self.b = RunDir(tmp_path / "a"), RunDir(tmp_path / "b")
        self.drawn, self.now = Drawn(), 0.0
        self.live = LivePage([self.a, self.b], self.drawn, clock=lambda: self.now)

    def look(self, after_s: float = 0.0) -> tuple[int, float, str]:
        self.now += after_s
        state = self.live.state()
        return state.page, state.age_s, state.doing

    def draw(self) -> None:
        """Let the page be drawn."""
        self.drawn.lets.release()
        _until(lambda: self.look()[2] != "drawing")


def _until(done: Callable[[], bool]) -> None:
    until = time.monotonic() + WITHIN_S
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)


def begins(rundir: RunDir, *, more: bool = False) -> None:
    rundir.root.mkdir(exist_ok=True)
    with rundir.journal.open("a") as journal:
        journal.write("x" * (1 + more))


def test_a_page_is_drawn_when_the_run_has_changed_and_somebody_looks(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.look() == (0, 0.0, "current")
    assert scene.live.state().note == f"No run has begun in {scene.a.root}, {scene.b.root} yet."
    begins(scene.a)
    assert scene.look(2.0) == (0, 0.0, "drawing")
    scene.draw()
    assert scene.look() == (1, 0.0, "current") and scene.drawn.runs == [[scene.a]]
    assert scene.live.state().note == f"No run has begun in {scene.b.root} yet."
    assert scene.look(99.0) == (1, 99.0, "current")
    begins(scene.b)
    assert scene.look(2.0) == (1, 101.0, "drawing") and scene.live.page and scene.live.page.html == b"page 1"
    begins(scene.a, more=True)
    assert scene.look(1.0) == (1, 102.0, "drawing")  # one at a time
    scene.draw()
    # It changed while it was drawn; what took a second has a pause of five.
    assert scene.look() == (2, 1.0, "waiting") and scene.live.state().note == ""
    assert scene.look(LEAST_PAUSE_S - 0.1)[2] == "waiting"
    assert scene.look(0.1)[2] == "drawing"
    scene.draw()
    assert len(scene.drawn.runs) == 3 and scene.drawn.runs[-1] == [scene.a, scene.b]


def test_what_takes_long_is_drawn_rarely(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    begins(scene.a)
    scene.look()
    scene.now = 100.0
    scene.draw()
    begins(scene.a)
    assert scene.look(399.0)[2] == "waiting"
    assert scene.look(1.0)[2] == "drawing"
    scene.draw()


def test_the_page_stays_where_no_new_one_can_be_drawn(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    begins(scene.a)
    scene.look()
    scene.draw()
    begins(scene.a)
    scene.drawn.fails = True
    assert scene.look(LEAST_PAUSE_S)[2] == "drawing"
    scene.draw()
    assert scene.look()[0] == 1 and scene.live.state().note.startswith("no new page: no")
    assert scene.look(PAUSE_OF_FAILURE_S - 0.1)[2] == "waiting"
    scene.drawn.fails = False
    assert scene.look(0.1)[2] == "drawing"  # though nothing has changed
    scene.draw()
    assert scene.look()[0] == 2


def test_the_command_shows_a_run_until_it_is_interrupted(tmp_path: Path) -> None:
    environ = {**os.environ, "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "MPLCONFIGDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcsched", "report", "--serve"],
        cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout and process.stderr
        assert select.select([process.stdout], [], [], WITHIN_S)[0], "no address"
        url, tunnel = process.stdout.readline().strip(), process.stdout.readline().strip()
        port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{43})", url).groups()  # type: ignore[union-attr]
        assert tunnel == f"from your machine: ssh -L {port}:127.0.0.1:{port} {os.uname().nodename}"

        def get(path: str) -> bytes:
            connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=WITHIN_S)
            connection.request("GET", f"/?token={token}")
            cookie = connection.getresponse().headers["Set-Cookie"].partition(";")[0]
            connection.close()
            connection.request("GET", path, headers={"Cookie": cookie})
            return connection.getresponse().read()

        assert json.loads(get("/state"))["note"] == f"No run has begun in {tmp_path}/hpcsched-run yet."
        rundir = RunDir(tmp_path / "hpcsched-run")
        rundir.make()
        driver = Driver(a_job("one"), gpus=1)
        journal = Journal(rundir.journal)
        journal.append(driver.events)
        journal.close()
        rundir.device_use.mkdir()
        _until(lambda: b"hpcsched: " in get("/page"))
        assert b"one" in get("/page")
        processes = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
        assert not any(token.encode() in words for words in processes)
        process.send_signal(signal.SIGINT)
        assert process.wait(WITHIN_S) == 0
        assert "no run in" in (said := process.stderr.read()) and "Traceback" not in said
        assert said.count("it is no file: left out") == 1
        assert not list(tmp_path.glob("hpcsched-report.*"))
        assert {path.name for path in rundir.root.iterdir()} == {
            "journal.jsonl",
            "inbox",
            "jobs",
            "device-use.jsonl",
        }
    finally:
        with process:
            process.kill()
