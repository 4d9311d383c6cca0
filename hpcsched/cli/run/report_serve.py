"""The server of `hpcsched report --serve`: one page, on loopback, for who has the token.

Every user of the host can connect to it. What they send is bounded in size, number and time, and without the
token they get nothing.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Protocol

import click
import msgspec

from hpcsched.cli.run.report_live import Drawer, LivePage, Page, State
from hpcsched.errors import ConfigError
from hpcsched.store.rundir import RunDir

ADDRESS = "127.0.0.1"
ENTRANCE = "/?token="

MOST_CONNECTIONS = 32
"""At once; more are closed (chosen)."""

MOST_HEAD = 2**15
"""Bytes of a request (chosen): browsers send all cookies of all ports of the host with it."""

ASKED_WITHIN_S = 10.0
"""A request has come as a whole after that, or its connection is closed (chosen)."""

SENT_WITHIN_S = 180.0
"""An answer is taken as a whole after that, or its connection is closed (chosen): pages come over ssh."""

_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)
"""Hosts that a browser may think it talks to; of another name its owner has bent it to this one."""

_SAFE = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_NOTHING_ELSE = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the page may load and do: no script, and nothing that is not in it."""


class Shown(Protocol):
    """What is served; a LivePage."""

    page: Page | None

    def state(self) -> State: ...


class Server(ThreadingMixIn, TCPServer):
    """Serves `shown` at a port of 127.0.0.1; 0: a free one. Raises ConfigError if it cannot have it."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, port: int, shown: Shown, *, asked_within_s: float = ASKED_WITHIN_S) -> None:
        from hpcsched.report.pieces import template

        self.shown, self.asked_within_s = shown, asked_within_s
        self.token = secrets.token_urlsafe(32)
        # Cookies know no ports: of two servers behind one address each has its own.
        self.cookie = f"hpcsched-{secrets.token_hex(4)}"
        html = template("live.html.jinja").render()
        script = html.partition("<script>")[2].partition("</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        self.frame = html.encode()
        self.frame_policy = f"{_NOTHING_ELSE}; script-src 'sha256-{digest}'; connect-src 'self'"
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            accepted = "a port that is free, or no --port"
            raise ConfigError(where="--port", got=f"{port}: {error.strerror}", accepted=accepted) from error

    @property
    def port(self) -> int:
        """The port that it has."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """The address with the token."""
        return f"http://{ADDRESS}:{self.port}{ENTRANCE}{self.token}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread, or close it where there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be had
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread of a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nobody has to know that a client has gone."""


class _Handler(BaseHTTPRequestHandler):
    """A connection: one request, one answer (HTTP/1.0)."""

    server: Server

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BytesIO(_head(self.connection, self.server.asked_within_s))
        self.connection.settimeout(SENT_WITHIN_S)  # `sendall` counts it over all that is sent

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0].strip()):
            return self._answer(403)
        if self.path.startswith(ENTRANCE):
            token = self.path.removeprefix(ENTRANCE)
            if not self._is_token(token):
                return self._answer(403)
            kept = f"{self.server.cookie}={token}; Path=/; HttpOnly; SameSite=Strict"
            return self._answer(303, {"Location": "/", "Set-Cookie": kept})
        if not self._is_token(self._cookie()):
            return self._answer(403)
        if self.path == "/":
            return self._html(self.server.frame, self.server.frame_policy)
        if self.path == "/state":
            told = msgspec.json.encode(self.server.shown.state())
            return self._answer(200, {"Content-Type": "application/json"}, told)
        if self.path == "/page":
            return self._page()
        return self._answer(404)

    def _page(self) -> None:
        state, page = self.server.shown.state(), self.server.shown.page
        if page is None:
            text = state.note or "The first page is being drawn: load it again."
            return self._answer(503, {"Content-Type": "text/plain; charset=utf-8"}, text.encode())
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            return self._html(page.gzipped, _NOTHING_ELSE, {"Content-Encoding": "gzip"})
        return self._html(page.html, _NOTHING_ELSE)

    def _html(self, body: bytes, policy: str, more: Mapping[str, str] = {}) -> None:
        about = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": policy}
        self._answer(200, {**about, **more}, body)

    def _answer(self, code: int, about: Mapping[str, str] = {}, body: bytes = b"") -> None:
        """Without the words on the server and its version that are usual."""
        self.send_response_only(code)
        for name, value in {**_SAFE, **about, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(body)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self.server.token.encode())

    def _cookie(self) -> str:
        """The token in the cookie. Cookies of others, which may be anything, are passed over."""
        for part in ";".join(self.headers.get_all("Cookie", [])).split(";"):
            name, _, value = part.strip().partition("=")
            if name == self.server.cookie:
                return value
        return ""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """For what cannot be understood, and for other methods: no words on it."""
        self._answer(405 if code == 501 else int(code), {"Allow": "GET, HEAD"} if code == 501 else {})

    def log_message(self, *_: Any) -> None:
        """Requests are not logged."""


def _head(connection: socket.socket, within_s: float) -> bytes:
    """A request up to its empty line; empty if it does not come in time, or is too long."""
    data, until = b"", time.monotonic() + within_s
    while b"\r\n\r\n" not in data and b"\n\n" not in data:
        left_s = until - time.monotonic()
        if left_s <= 0 or len(data) > MOST_HEAD:
            return b""
        connection.settimeout(left_s)
        try:
            more = connection.recv(4096)
        except OSError:  # it has gone, or nothing came
            return b""
        if not more:
            return b""
        data += more
    return data


def serve(rundirs: Sequence[RunDir], port: int) -> None:
    """Show these runs at a port of this host (0: a free one) until Ctrl-C. Raises ConfigError."""
    with Drawer() as draw, Server(port, LivePage(rundirs, draw)) as server, suppress(KeyboardInterrupt):
        for number in (signal.SIGTERM, signal.SIGHUP):  # leave nothing behind then either
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, lambda number, _: sys.exit(128 + number))
        click.echo(server.url)
        tunnel = f"{server.port}:{ADDRESS}:{server.port}"
        click.echo(f"from your machine: ssh -L {tunnel} {os.uname().nodename}")
        click.echo("Ctrl-C ends it", err=True)
        server.serve_forever()
