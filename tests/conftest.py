"""What every test gets: no network but loopback, a clean environment, and `serve`, a real web server on loopback.

Used like this:

    def test_something(serve):
        site = serve({"/": "<p>Hello</p>", "/gone": (410, {}, ""), "/slow": lambda request: request.hold()})
        ... site.url, site.host ("127.0.0.1:12345"), site.port, site.requests, site.paths ...
"""

import contextlib
import ipaddress
import json
import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import kindly_search

# ----------------------------------------------------------------------------
# No network, clean environment
# ----------------------------------------------------------------------------

#: Audit events of everything that reaches out, and where the address stands among their arguments.
NETWORK_EVENTS = {
    "socket.connect": 1,
    "socket.sendto": 1,
    "socket.getaddrinfo": 0,
    "socket.gethostbyname": 0,
    "socket.gethostbyaddr": 0,
}

_guarding = False


def _audit(event: str, args: tuple[Any, ...]) -> None:
    # An audit hook and not a patched socket: it sees also the functions that somebody has kept a reference to.
    if not _guarding or event not in NETWORK_EVENTS:
        return
    address = args[NETWORK_EVENTS[event]]
    host = address[0] if isinstance(address, tuple) else address
    if isinstance(address, tuple) or event != "socket.connect":  # connecting to a string is a Unix socket
        look_up_only = event == "socket.getaddrinfo"
        if not _is_loopback(host, any_literal=look_up_only):
            message = f"a test tried to leave this machine: {event} {host!r}"
            if threading.current_thread() is not threading.main_thread():
                raise OSError(message)  # pytest.fail() means nothing in a thread: there Chromium's own chatter ends
            pytest.fail(message)


def _is_loopback(host: Any, *, any_literal: bool) -> bool:
    host = host.decode() if isinstance(host, bytes) else host
    if host in (None, "", "localhost", socket.gethostname()):
        return True
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return any_literal or address.is_loopback or address.is_unspecified
    return False


sys.addaudithook(_audit)


@pytest.fixture(autouse=True)
def _only_loopback(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails every test that connects to, or looks up, anything but this machine; live tests may."""
    global _guarding
    _guarding = request.node.get_closest_marker("live") is None
    yield
    _guarding = False


@pytest.fixture(autouse=True)
def _clean_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes away every variable that we declare, and proxies; live tests keep their keys."""
    if request.node.get_closest_marker("live"):
        return
    declared = {v.name for cls in kindly_search.CONFIGURED for v in kindly_search.variables(cls).values()}
    for name in list(os.environ):
        if name in declared or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


# ----------------------------------------------------------------------------
# Markers
# ----------------------------------------------------------------------------


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips live tests that nobody asked for, and browser tests where there is no browser."""
    if item.get_closest_marker("live") and os.environ.get("RUN_LIVE_TESTS") != "1":
        pytest.skip("live: runs only with RUN_LIVE_TESTS=1")
    if item.get_closest_marker("chrome") and not _browser():
        if os.environ.get("KINDLY_REQUIRE_CHROME") == "1":
            pytest.fail("KINDLY_REQUIRE_CHROME=1, but no Chromium was found", pytrace=False)
        pytest.skip("chrome: no Chromium was found")


def _browser() -> str:
    import chrome_worker

    # Without our own variables, which the tests do not get to see either.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KINDLY_")}
    return str(chrome_worker.find_browser(environ))


# ----------------------------------------------------------------------------
# A web server on loopback
# ----------------------------------------------------------------------------

#: What a route may be: a body (200, HTML), (status, headers, body), or a function of the request that returns one of
#: these, or None when it has dealt with the connection itself through reset(), hold(), send() or drip().
Answer = str | bytes | tuple[int, Mapping[str, str], str | bytes] | None
Route = Answer | Callable[["Request"], Answer]


class Request:
    """One request as the server saw it, and the raw connection to answer it badly."""

    def __init__(self, handler: BaseHTTPRequestHandler, site: "Site") -> None:
        self._handler = handler
        self._site = site
        self.method = handler.command
        self.path = handler.path
        self.headers = handler.headers
        self.body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))

    def json(self) -> Any:
        return json.loads(self.body)

    def send(self, data: bytes) -> None:
        """Writes raw bytes and lets the connection end after them."""
        self._handler.close_connection = True
        self._handler.wfile.write(data)
        self._handler.wfile.flush()

    def drip(self, data: bytes, *, every: float) -> None:
        """Writes one byte at a time until all is said, the other side has gone, or the test is over."""
        for byte in data:
            self.send(bytes([byte]))
            if self._site.closing.wait(every):
                return

    def hold(self) -> None:
        """Says nothing until the test is over."""
        self._handler.close_connection = True
        self._site.closing.wait(30)

    def reset(self) -> None:
        """Breaks the connection off with a TCP reset."""
        self._handler.close_connection = True
        self._handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._handler.connection.close()


class Site:
    """A web server on a loopback port of its own, and the list of what it was asked."""

    def __init__(
        self, routes: Mapping[str, Route] | Callable[[Request], Answer], *, tls: ssl.SSLContext | None = None
    ) -> None:
        self.routes = routes
        self.requests: list[Request] = []
        self.connections: list[socket.socket] = []
        self.faults: list[BaseException] = []
        self.closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"site": self}))
        self._server.site = self
        self.port = self._server.server_address[1]
        self.host = f"127.0.0.1:{self.port}"
        self.url = f"{'https' if tls else 'http'}://{self.host}"
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        # A short poll interval: shutting down waits for it.
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def paths(self) -> list[str]:
        return [request.path for request in self.requests]

    def answer(self, request: Request) -> Answer:
        self.requests.append(request)
        if callable(self.routes):
            return self.routes(request)
        path = request.path.partition("?")[0]
        route = self.routes.get(request.path, self.routes.get(path, (404, {}, "not here")))
        return route(request) if callable(route) else route

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def certificates(folder: Path, names: Sequence[str]) -> tuple[str, ssl.SSLContext]:
    """The file of a new authority, and the context of a server that it certifies for `names` (DNS:… or IP:…)."""
    (folder / "extensions").write_text(f"subjectAltName={','.join(names)}\nextendedKeyUsage=serverAuth\n")
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 1 -subj /CN=authority -addext keyUsage=keyCertSign",
        "req -newkey rsa:2048 -nodes -keyout site.key -out site.csr -subj /CN=site",
        "x509 -req -in site.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out site.pem -days 1 -extfile extensions",
    ):
        subprocess.run(["openssl", *command.split()], check=True, capture_output=True, cwd=folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "site.pem", folder / "site.key")
    return str(folder / "ca.pem"), context


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    site: Site

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):  # clients that went away are part of the game
            self.site.faults.append(error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    site: Site

    def setup(self) -> None:
        super().setup()
        self.site.connections.append(self.connection)

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # reset() has closed it already
            super().finish()

    def _respond(self) -> None:
        answer = self.site.answer(Request(self, self.site))
        if answer is None:
            self.close_connection = True
            return
        status, headers, body = answer if isinstance(answer, tuple) else (200, {}, answer)
        content = body.encode() if isinstance(body, str) else body
        given = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(content)), **headers}
        self.send_response(status)
        for name, value in given.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content if self.command != "HEAD" else b"")

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = do_OPTIONS = do_CONNECT = _respond

    def log_message(self, format: str, *args: Any) -> None:
        """Silence: pytest shows what matters."""


@pytest.fixture
def serve() -> Iterator[Callable[[Mapping[str, Route] | Callable[[Request], Answer]], Site]]:
    """Starts web servers on loopback: `serve(routes)`, by path or one function for everything."""
    sites: list[Site] = []

    def start(routes: Mapping[str, Route] | Callable[[Request], Answer]) -> Site:
        sites.append(Site(routes))
        return sites[-1]

    yield start
    for site in sites:
        site.close()
    assert not [fault for site in sites for fault in site.faults], "a route of this test has a bug of its own"


@pytest.fixture
def wait_until() -> Callable[[Callable[[], Any]], Any]:
    """Waits until something is true and returns it; fails after five seconds."""

    def wait(condition: Callable[[], Any], seconds: float = 5.0) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := condition():
                return value
            time.sleep(0.01)
        return pytest.fail(f"still not so after {seconds:g} s")

    return wait
