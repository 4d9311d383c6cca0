"""Posts a message to a webhook: `python -m hpcsched.agent.notify.post`, the address in stdin's first line.

A process of its own, so that whatever hangs (names, proxies, servers) ends when it is killed.
"""

from __future__ import annotations

import http.client
import sys
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from hpcsched.agent.notify.channels import is_this_host

TIMEOUT_S = 10.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Who has the address of a webhook has not that of where it may lead."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def post(url: str, body: bytes) -> str:
    """Post it; returns why that failed, or nothing. The address is not part of that."""
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if is_this_host(urlsplit(url).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(
        url, data=body, headers={"Content-Type": "application/json", "User-Agent": "hpcsched"}, method="POST"
    )
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=TIMEOUT_S) as answer:
            return "" if 200 <= answer.status < 300 else f"HTTP {answer.status}"
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code} {http.client.responses.get(error.code, '')}".rstrip()
    except urllib.error.URLError as error:
        return str(error.reason)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return type(error).__name__


def main() -> int:
    url, _, body = sys.stdin.buffer.read().partition(b"\n")
    why = post(url.decode(), body)
    if why:
        sys.stderr.write(f"{why}\n")
    return int(bool(why))


if __name__ == "__main__":
    sys.exit(main())
