"""One warm Chromium that reads web pages: a line of JSON in, a line of JSON out.

kindly_search.py starts this file when a page needs a browser. It can be tried by hand:

    echo '{"url": "https://example.com"}' | python chrome_worker.py

A request is `{"id": any, "url": "https://…", "timeout": seconds}`; several may be under way, and the
answers come in any order. `{"cmd": "cancel", "id": …}` gives a request up, `{"cmd": "ping"}` asks who is there.
A success is `{"id", "url", "status", "content_type", "title", "html", "partial", "ms"}`, a failure
`{"id", "error", "message"}`, where `error` is one of REASONS below. With --serve the worker ends as soon as its
stdin does; without, it first answers what it was asked.

    1. Protocol
    2. Finding a browser
    3. Proxy
    4. CDP
    5. Launch & retry
    6. Page readiness
    7. Page
    8. Worker loop
"""

import base64
import collections
import concurrent.futures
import contextlib
import functools
import ipaddress
import json
import logging
import os
import queue
import random
import re
import selectors
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

from kindly_search import (
    AddressGuard,
    AddressNotAllowed,
    BrowserSettings,
    Deadline,
    SearchError,
    Settings,
    Unreachable,
    from_env,
)

logger = logging.getLogger("chrome_worker")

WINDOWS = sys.platform == "win32"

# ----------------------------------------------------------------------------
# 1. Protocol
# ----------------------------------------------------------------------------

#: Every `error` an answer can carry, and what it means.
REASONS = {
    "bad_request": "The line was not a request this worker understands.",
    "no_browser": "No Chromium, Chrome, Edge or Brave was found.",
    "launch_failed": "A browser was found but did not start.",
    "no_sandbox": "A browser was found, but this system does not let its sandbox start.",
    "timeout": "The time was up before there was anything to show.",
    "cancelled": "The request was given up by the one who sent it.",
    "address_not_allowed": "The address is private.",
    "unreachable": "No connection, no such host, or a broken answer.",
    "certificate": "The site's certificate was refused.",
    "download": "The address holds a file, not a page; `content_type` says which kind.",
    "needs_login": "The site asks for a user name and a password.",
    "crashed": "The page or the browser crashed, twice if it was the browser.",
    "internal": "A fault in this worker.",
}

DEFAULT_TIMEOUT = 20.0
LONGEST_TIMEOUT = 600.0


class Failure(Exception):
    """A request that ends without a page; becomes its answer."""

    def __init__(self, reason: str, message: str = "", **extra: Any) -> None:
        super().__init__(message or REASONS[reason])
        self.reason = reason
        self.extra = extra

    def answer(self) -> dict[str, Any]:
        """The fields of the answer, but for the id."""
        return {"error": self.reason, "message": str(self), **self.extra}


@dataclass(frozen=True)
class Request:
    """One page that somebody wants, by a point in time."""

    id: Any
    url: str
    deadline: Deadline
    cancelled: threading.Event = field(default_factory=threading.Event)


def parse_line(line: bytes) -> dict[str, Any]:
    """The JSON object on a line, or Failure."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise Failure("bad_request", "This line is not JSON.") from None
    if not isinstance(message, dict):
        raise Failure("bad_request", "A request is a JSON object.")
    return message


def parse_request(message: Mapping[str, Any]) -> Request:
    """The request that a message holds, or Failure."""
    url, timeout = message.get("url"), message.get("timeout", DEFAULT_TIMEOUT)
    if not isinstance(url, str) or not url.strip():
        raise Failure("bad_request", "A request needs a url.")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= LONGEST_TIMEOUT:
        raise Failure("bad_request", f"timeout is a number of seconds, at most {LONGEST_TIMEOUT:.0f}.")
    return Request(message.get("id"), url.strip(), Deadline(timeout))


class Replies:
    """Writes one answer per line; many threads share it."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._lock = threading.Lock()

    def send(self, answer: Mapping[str, Any]) -> None:
        """Writes the answer, unless nobody listens any more."""
        line = json.dumps(answer).encode("ascii") + b"\n"
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._out.write(line)
            self._out.flush()


# ----------------------------------------------------------------------------
# 2. Finding a browser
# ----------------------------------------------------------------------------

#: Variables that name a browser, the most specific first.
PATH_VARIABLES = ("KINDLY_BROWSER_EXECUTABLE_PATH", "CHROME_PATH", "CHROME_BIN")

#: Names on the PATH. chromium-browser comes last: on Ubuntu it may be a stub that only asks for the snap.
COMMANDS = (
    "google-chrome-stable",
    "google-chrome",
    "chromium",
    "chrome",
    "microsoft-edge-stable",
    "microsoft-edge",
    "brave-browser",
    "brave",
    "msedge",
    "chromium-browser",
)

LINUX_PLACES = (
    "/opt/google/chrome/chrome",
    "/usr/lib/chromium/chromium",
    "/usr/lib64/chromium-browser/chromium-browser",
    "/opt/microsoft/msedge/msedge",
    "/opt/brave.com/brave/brave",
    "/snap/bin/chromium",
    "/snap/bin/brave",
    "/var/lib/flatpak/exports/bin/org.chromium.Chromium",
    "/var/lib/flatpak/exports/bin/com.google.Chrome",
    "/var/lib/flatpak/exports/bin/com.microsoft.Edge",
    "/var/lib/flatpak/exports/bin/com.brave.Browser",
    "~/.local/share/flatpak/exports/bin/org.chromium.Chromium",
    "~/.local/share/flatpak/exports/bin/com.google.Chrome",
)

MAC_PLACES = tuple(
    f"{folder}/{app}.app/Contents/MacOS/{app}"
    for app in ("Google Chrome", "Chromium", "Microsoft Edge", "Brave Browser")
    for folder in ("/Applications", "~/Applications")
)

WINDOWS_PLACES = (
    r"Google\Chrome\Application\chrome.exe",
    r"Chromium\Application\chrome.exe",
    r"Microsoft\Edge\Application\msedge.exe",
    r"BraveSoftware\Brave-Browser\Application\brave.exe",
)
WINDOWS_FOLDERS = ("PROGRAMFILES", "PROGRAMFILES(X86)", "PROGRAMW6432", "LOCALAPPDATA")

# A Flatpak application's launcher: its file name is the application's id.
FLATPAK_LAUNCHER = re.compile(r"/flatpak/exports/bin/([\w.-]+)$")


def find_browser(
    environ: Mapping[str, str],
    *,
    which: Callable[[str], str | None] = shutil.which,
    exists: Callable[[str], bool] = os.path.isfile,
    platform: str = sys.platform,
) -> str:
    """The path of the browser to use, or "" where there is none."""
    for name in PATH_VARIABLES:
        if path := _named(environ.get(name, "").strip(), which, exists):
            return path
    if environ.get(PATH_VARIABLES[0], "").strip():
        return ""  # another browser than the one that was asked for would only hide the mistake
    candidates = (which(command) for command in COMMANDS)
    places = (place for place in well_known_places(environ, platform) if exists(place))
    return next((path for path in (*candidates, *places) if path), "")


def _named(value: str, which: Callable[[str], str | None], exists: Callable[[str], bool]) -> str:
    """The file that a variable names: a path, or a command on the PATH."""
    if not value:
        return ""
    path = os.path.expanduser(value)
    return path if exists(path) else which(value) or ""


def well_known_places(environ: Mapping[str, str], platform: str) -> list[str]:
    """Where browsers are usually installed on this platform. WSL is Linux: a browser of Windows cannot be driven."""
    if platform == "win32":
        folders = [environ[name] for name in WINDOWS_FOLDERS if environ.get(name)]
        return [f"{folder}\\{place}" for place in WINDOWS_PLACES for folder in folders]
    home = environ.get("HOME") or os.path.expanduser("~")
    places = MAC_PLACES if platform == "darwin" else LINUX_PLACES
    return [home + place[1:] if place.startswith("~") else place for place in places]


def is_snap(path: str) -> bool:
    """True for a browser that Snap confines: it cannot write to the system's temporary folder."""
    real = os.path.realpath(path)
    if "/snap/" in path or "/snap/" in real or real.endswith("/bin/snap"):
        return True
    return b"/snap/bin/" in _start_of_script(path)


def _start_of_script(path: str) -> bytes:
    """The first lines of a launcher script; nothing of a binary."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        start = file.read(4096)
        return start if start.startswith(b"#!") else b""
    return b""


def flatpak_id(path: str) -> str:
    """The id of the Flatpak application behind a launcher, or ""."""
    match = FLATPAK_LAUNCHER.search(path)
    return match[1] if match else ""


# ----------------------------------------------------------------------------
# 3. Proxy
# ----------------------------------------------------------------------------
# Chromium reaches the network through this proxy only. It asks the same guard as
# plain HTTP, for every connection, and connects to the very address that was checked.

LONGEST_HEAD = 65_536
CONNECT_SECONDS = 10.0
QUIET_SECONDS = 120.0
RELAY_BYTES = 65_536

#: Headers that concern the connection to us and not the one we open.
HOP_HEADERS = (b"connection", b"proxy-connection", b"proxy-authorization", b"keep-alive")

REFUSED = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
UNREACHED = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
CONNECTED = b"HTTP/1.1 200 Connection established\r\n\r\n"


@dataclass(frozen=True)
class Upstream:
    """The proxy that the operator has configured, if any, for a host."""

    http_proxy: str = ""
    https_proxy: str = ""
    no_proxy: str = ""

    def for_host(self, scheme: str, host: str, port: int) -> str:
        """The URL of the proxy to go through, or "" for none."""
        import requests.utils

        proxy = self.https_proxy if scheme == "https" else self.http_proxy
        shown = f"[{host}]" if ":" in host else host
        url = f"{scheme}://{shown}:{port}/"
        bypass = proxy and requests.utils.should_bypass_proxies(url, no_proxy=self.no_proxy or None)
        return "" if not proxy or bypass else proxy if "://" in proxy else f"http://{proxy}"


class GuardProxy:
    """An HTTP proxy on loopback that connects to what the guard allows, and to nothing else."""

    def __init__(self, guard: AddressGuard, upstream: Upstream | None = None) -> None:
        self._guard = guard
        self._upstream = upstream or Upstream()
        self._lock = threading.Lock()
        self._failures: collections.OrderedDict[tuple[str, int], SearchError] = collections.OrderedDict()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def close(self) -> None:
        """Takes no more connections."""
        self._server.close()

    def failure(self, url: str) -> SearchError | None:
        """Why the host of this URL could not be reached the last time it was tried, if it could not."""
        with contextlib.suppress(ValueError):
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme in ("https", "wss") else 80)
            with self._lock:
                return self._failures.get(((parts.hostname or "").lower(), port))
        return None

    def _note(self, host: str, port: int, error: SearchError | None) -> None:
        with self._lock:
            self._failures.pop((host, port), None)
            if error:
                self._failures[host, port] = error
            if len(self._failures) > 500:
                self._failures.popitem(last=False)

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, ValueError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.settimeout(QUIET_SECONDS)
            head, rest = read_head(client)
            method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
            tunnel = method == "CONNECT"
            parts = urlsplit(f"https://{target}" if tunnel else target)
            if parts.scheme not in ("http", "https") or not parts.hostname or (parts.scheme == "https") != tunnel:
                return client.sendall(REFUSED)
            server, first = self._open(client, parts, b"" if tunnel else head + rest, tunnel)
            if server:
                with server:
                    server.sendall(first)
                    relay(client, server)

    def _open(
        self, client: socket.socket, parts: Any, request: bytes, tunnel: bool
    ) -> tuple[socket.socket | None, bytes]:
        """A connection to where the request goes and what to say first there; the client hears how it went."""
        host, port = parts.hostname.lower(), parts.port or (443 if tunnel else 80)
        try:
            server, proxy = self._dial(parts.scheme, host, port)
        except SearchError as error:
            self._note(host, port, error)
            client.sendall(REFUSED if isinstance(error, AddressNotAllowed) else UNREACHED)
            return None, b""
        self._note(host, port, None)
        if tunnel:
            client.sendall(CONNECTED)
            return server, b""
        return server, forwarded(request, parts, proxy)

    def _dial(self, scheme: str, host: str, port: int) -> tuple[socket.socket, str]:
        """A socket that leads to the host, and the URL of the proxy it goes through, if any."""
        shown = f"[{host}]" if ":" in host else host
        self._guard.target(f"{scheme}://{shown}:{port}/")
        proxy = self._upstream.for_host(scheme, host, port)
        if proxy:
            # The operator's proxy resolves names itself: what a look at the name tells has just been checked.
            return through_proxy(proxy, f"{shown}:{port}" if scheme == "https" else ""), proxy
        return connect_to(self._guard.addresses(host, port), port, host), ""


def read_head(sock: socket.socket) -> tuple[bytes, bytes]:
    """The head of an HTTP message, and what came after it. ValueError if there is none."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = sock.recv(RELAY_BYTES)
        data += chunk
        if not chunk or len(data) > LONGEST_HEAD:
            raise ValueError("no HTTP head")
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def forwarded(request: bytes, parts: Any, proxy: str) -> bytes:
    """The request as the next hop wants it. One per connection, so that each one passes the guard."""
    head, _, rest = request.partition(b"\r\n\r\n")
    line, *headers = head.split(b"\r\n")
    method, target, version = line.split(b" ", 2)
    if not proxy:
        target = urlunsplit(("", "", parts.path or "/", parts.query, "")).encode("latin-1")
        target = b"/." + target if target.startswith(b"//") else target
    kept = [header for header in headers if header.partition(b":")[0].strip().lower() not in HOP_HEADERS]
    kept += [b"Connection: close", *proxy_login(proxy)]
    return b"\r\n".join([b" ".join((method, target, version)), *kept]) + b"\r\n\r\n" + rest


def proxy_login(proxy: str) -> list[bytes]:
    """The header with the credentials that a proxy's URL holds."""
    parts = urlsplit(proxy)
    if not parts.username:
        return []
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return [b"Proxy-Authorization: Basic " + base64.b64encode(pair)]


def connect_to(addresses: Sequence[str], port: int, host: str) -> socket.socket:
    """A connection to the first address that answers."""
    for address in addresses:
        # Where IPv6 leads nowhere, the next address has to get its chance before the page's time is up.
        patience = CONNECT_SECONDS if address == addresses[-1] else CONNECT_SECONDS / 3
        with contextlib.suppress(OSError):
            sock = socket.create_connection((address, port), timeout=patience)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(QUIET_SECONDS)
            return sock
    raise Unreachable(f"no connection to {host}")


def through_proxy(proxy: str, tunnel_to: str) -> socket.socket:
    """A connection to the operator's proxy, and on through it to `tunnel_to` if that is given."""
    parts = urlsplit(proxy)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Unreachable(f"the browser cannot use a {parts.scheme} proxy")
    sock = connect_to([parts.hostname], parts.port or (443 if parts.scheme == "https" else 80), "the proxy")
    try:
        if parts.scheme == "https":
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=parts.hostname)
        if tunnel_to:
            _ask_for_tunnel(sock, tunnel_to, proxy)
        return sock
    except (OSError, ValueError):
        sock.close()
        raise Unreachable("the proxy broke off the connection") from None
    except Unreachable:
        sock.close()
        raise


def _ask_for_tunnel(sock: socket.socket, tunnel_to: str, proxy: str) -> None:
    lines = [f"CONNECT {tunnel_to} HTTP/1.1".encode(), f"Host: {tunnel_to}".encode(), *proxy_login(proxy)]
    sock.sendall(b"\r\n".join(lines) + b"\r\n\r\n")
    status = read_head(sock)[0].split(b" ", 2)[1]
    if not status.startswith(b"2"):
        raise Unreachable(f"the proxy answered {status.decode('latin-1')[:3]}")


def relay(client: socket.socket, server: socket.socket) -> None:
    """Passes bytes both ways until both sides are done or nobody has spoken for a while."""
    with selectors.DefaultSelector() as selector:
        for source, sink in ((client, server), (server, client)):
            selector.register(source, selectors.EVENT_READ, (source, sink))
        while selector.get_map():
            ready = selector.select(QUIET_SECONDS)
            if not ready:
                return
            for key, _ in ready:
                if not _pass_on(*key.data):
                    selector.unregister(key.fileobj)


def _pass_on(source: socket.socket, sink: socket.socket) -> bool:
    """Moves what is there; False at the end of the stream, which the other side is told of."""
    data = source.recv(RELAY_BYTES)
    while data:
        sink.sendall(data)
        # TLS to an https:// proxy may hold more than select() can see.
        if not isinstance(source, ssl.SSLSocket) or not source.pending():
            return True
        data = source.recv(RELAY_BYTES)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
    return False


# ----------------------------------------------------------------------------
# 4. CDP
# ----------------------------------------------------------------------------
# One connection carries the sessions of all pages. pychrome provides the calls
# (`tab.Page.enable()`); the two classes here replace how it sends and receives:
# it polls, blocks for ever when the browser dies, and checks UTF-8 byte by byte.

CALL_SECONDS = 10.0

#: Put into every queue that somebody waits on when the browser is gone.
GONE: Mapping[str, Any] = {"method": "kindly.gone"}


class BrowserGone(Exception):
    """The browser has ended or hung up."""


class Transport(Protocol):
    """Carries CDP messages, each a JSON text."""

    def send(self, text: str) -> Any: ...
    def recv(self) -> str | bytes: ...
    def close(self) -> Any: ...


class PipeTransport:
    """Chromium's DevTools pipe: messages end with a zero byte. No port is open that others could use."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._messages: collections.deque[bytes] = collections.deque()
        self._parts: list[bytes] = []
        self._lock = threading.Lock()

    def send(self, text: str) -> None:
        """Writes one message, whole."""
        data = memoryview(text.encode() + b"\0")
        with self._lock:
            while data:
                data = data[os.write(self._write_fd, data) :]

    def recv(self) -> bytes:
        """The next message; empty when the browser is gone."""
        while not self._messages:
            chunk = os.read(self._read_fd, 1 << 20)
            if not chunk:
                return b""
            first, *others = chunk.split(b"\0")
            self._parts.append(first)
            for other in others:
                self._messages.append(b"".join(self._parts))
                self._parts = [other]
        return self._messages.popleft()

    def hang_up(self) -> None:
        """Closes our writing end: Chromium ends itself when it notices."""
        with self._lock:
            fd, self._write_fd = self._write_fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Gives both ends back."""
        self.hang_up()
        with self._lock:
            fd, self._read_fd = self._read_fd, -1
        if fd >= 0:
            os.close(fd)


def web_socket(url: str, deadline: Deadline) -> Transport:
    """A WebSocket to a browser."""
    import websocket

    options: dict[str, Any] = {"enable_multithread": True, "suppress_origin": True}
    options["skip_utf8_validation"] = True  # done in Python it takes 2 s per megabyte
    if is_loopback(urlsplit(url).hostname or ""):
        # Else http_proxy would hijack loopback; http_no_proxy counts only where a proxy is named.
        options |= {"http_proxy_host": "unused", "http_proxy_port": 1, "http_no_proxy": ["*"]}
    try:
        timeout = max(0.1, min(CALL_SECONDS, deadline.remaining()))
        transport: Transport = websocket.create_connection(url, timeout=timeout, **options)
    except (OSError, ValueError, websocket.WebSocketException) as error:
        raise LaunchFailed(f"Failed to connect to browser: {type(error).__name__}.") from None
    transport.settimeout(None)  # type: ignore[attr-defined]
    return transport


def is_loopback(host: str) -> bool:
    """True for a name or an address of this very machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class BrowserTab:
    """Mixed into pychrome.Tab: the connection to a whole browser, shared by the sessions of its pages."""

    debug: Any
    _started: bool
    _cur_id: int
    _recv_th: threading.Thread
    method_results: dict[int, "queue.SimpleQueue[Mapping[str, Any]]"]
    _ws: Transport

    def begin(self, transport: Transport) -> None:
        """Starts to listen."""
        self.debug = False  # pychrome prints to stdout where DEBUG is set
        self._started = True
        self._ws = transport
        self._guarded = threading.Lock()
        self.sessions: dict[str, queue.SimpleQueue[Mapping[str, Any]]] = {}
        self.gone = threading.Event()
        self._recv_th.start()

    def post(self, message: dict[str, Any], sink: "queue.SimpleQueue[Mapping[str, Any]]") -> int:
        """Sends a message whose reply will be put into `sink`; its number."""
        with self._guarded:
            if self.gone.is_set():
                raise BrowserGone("The browser has ended.")
            self._cur_id += 1
            number = message["id"] = self._cur_id
            self.method_results[number] = sink
        try:
            self._ws.send(json.dumps(message))
        except Exception as error:  # noqa: BLE001  # the websocket raises what it likes
            raise BrowserGone(f"The browser has ended: {type(error).__name__}.") from None
        return number

    def _send(self, message: dict[str, Any], timeout: float | None = None) -> Mapping[str, Any]:
        reply: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        number = self.post(message, reply)
        try:
            answer = reply.get(timeout=CALL_SECONDS if timeout is None else max(0.0, timeout))
        except queue.Empty:
            raise Failure("timeout", f"The browser did not answer {message['method']} in time.") from None
        finally:
            self.method_results.pop(number, None)
        if answer is GONE:
            raise BrowserGone("The browser ended in mid-sentence.")
        return answer

    def _recv_loop(self) -> None:
        try:
            while text := self._ws.recv():
                self._route(json.loads(text))
        except Exception as error:  # noqa: BLE001  # the websocket raises what it likes
            logger.debug("the browser hung up: %s", type(error).__name__)
        with self._guarded:
            self.gone.set()
            waiting = [*self.method_results.values(), *self.sessions.values()]
        for sink in waiting:
            sink.put(GONE)

    def _route(self, message: dict[str, Any]) -> None:
        if "id" in message:
            sink = self.method_results.pop(message["id"], None)
        else:
            sink = self.sessions.get(message.get("sessionId", ""))
        if sink is not None:
            sink.put(message)


class PageTab:
    """Mixed into pychrome.Tab: one page's session. Its events and the replies to post() come through next()."""

    debug: Any
    _started: bool
    browser: Any
    session: str

    def begin(self, browser: Any, session: str) -> None:
        """Starts to collect events."""
        self.debug = False
        self._started = True
        self.browser, self.session = browser, session
        self._inbox: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        browser.sessions[session] = self._inbox

    def _send(self, message: dict[str, Any], timeout: float | None = None) -> Any:
        return self.browser._send({**message, "sessionId": self.session}, timeout)

    def post(self, method: str, **params: Any) -> int:
        """Sends without waiting; the number that the reply will carry."""
        message = {"method": method, "params": params, "sessionId": self.session}
        return int(self.browser.post(message, self._inbox))

    def next(self, timeout: float) -> Mapping[str, Any] | None:
        """The next event or reply, or None when none came in time."""
        try:
            message = self._inbox.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None
        if message is GONE:
            raise BrowserGone("The browser ended in mid-page.")
        return message

    def forget(self) -> None:
        """Stops collecting."""
        self.browser.sessions.pop(self.session, None)


@functools.cache
def _tab_class(mixin: type) -> Any:
    """pychrome.Tab with one of the two mixins; made late, so that finding a browser needs no pychrome."""
    import pychrome

    return type(mixin.__name__, (mixin, pychrome.Tab), {})


def browser_tab(transport: Transport) -> Any:
    """The browser at the other end of a transport."""
    tab = _tab_class(BrowserTab)(type="browser")
    tab.begin(transport)
    return tab


def page_tab(browser: Any, session: str) -> Any:
    """A session of that browser."""
    tab = _tab_class(PageTab)(type="page")
    tab.begin(browser, session)
    return tab


# ----------------------------------------------------------------------------
# 5. Launch & retry
# ----------------------------------------------------------------------------

PROFILE_PREFIX = "kindly-chrome-"

#: How long a browser may take until its first word; Snap unpacks itself first.
START_SECONDS = 12.0
SNAP_START_SECONDS = 30.0

#: How long a browser may take to end by itself.
LEAVE_SECONDS = 0.8

#: The most that one pause between two launches lasts.
LONGEST_BACKOFF = 8.0

#: Chromium crashes when its shared memory is full; Docker gives 64 MB.
SMALL_SHARED_MEMORY = 256 * 1024 * 1024

#: File descriptors on which Chromium expects its DevTools pipe.
PIPE_FDS = (3, 4)

#: A socket's path has at most 104 bytes (macOS), of which Chromium needs 45 for itself.
LONGEST_SOCKET_FOLDER = 58

#: What Chromium may see of the environment: enough to start, no key, no token.
BROWSER_VARIABLES = (
    "PATH HOME USER LOGNAME USERPROFILE SYSTEMROOT SYSTEMDRIVE WINDIR COMSPEC PATHEXT LOCALAPPDATA APPDATA PROGRAMDATA"
    " PROGRAMFILES PROGRAMFILES(X86) PROGRAMW6432 TMP TEMP TMPDIR LANG LANGUAGE TZ DISPLAY WAYLAND_DISPLAY"
    " XDG_RUNTIME_DIR LD_LIBRARY_PATH FONTCONFIG_FILE FONTCONFIG_PATH SSL_CERT_FILE SSL_CERT_DIR"
).split()

BASE_FLAGS = (
    "--headless=new",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-service-autorun",
    "--no-pings",
    "--disable-background-networking",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--disable-breakpad",
    "--disable-crash-reporter",
    "--disable-client-side-phishing-detection",
    "--disable-component-extensions-with-background-pages",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-domain-reliability",
    "--disable-extensions",
    "--disable-field-trial-config",
    "--disable-gpu",
    "--disable-hang-monitor",
    "--disable-notifications",
    "--disable-print-preview",
    "--disable-prompt-on-repost",
    "--disable-quic",
    "--disable-remote-fonts",
    "--disable-search-engine-choice-screen",
    "--disable-sync",
    "--deny-permission-prompts",
    "--hide-scrollbars",
    "--lang=en-US",
    "--metrics-recording-only",
    "--mute-audio",
    "--password-store=basic",
    "--use-mock-keychain",
    "--window-size=1280,1600",
    "--blink-settings=imagesEnabled=false",
    # Two names of one switch: newer versions ignore the old one, and WebRTC would then speak UDP past the proxy.
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--disable-features=Translate,MediaRouter,OptimizationHints,OptimizationGuideModelDownloading,HttpsUpgrades,"
    "InterestFeedContentSuggestions,AutofillServerCommunication,CertificateTransparencyComponentUpdater,"
    "DestroyProfileOnBrowserClose,GlobalMediaControls,LensOverlay,PaintHolding",
)

# What a failed start says when the next one may work: no connection yet, a lock or a folder in the way, a fluke.
RETRYABLE_LAUNCH = re.compile(
    r"failed to connect to (?:the )?browser|did not answer|connection (?:refused|reset|closed)|broken pipe|timed? ?out"
    r"|DevToolsActivePort|processsingleton|profile.{0,40}in use|singletonlock|target closed|ended at once"
    r"|resource temporarily unavailable|cannot allocate|no space left|text file busy|snap-confine|dbus|zygote"
    r"|websocket",
    re.IGNORECASE,
)

# What no second start can change.
HOPELESS_LAUNCH = re.compile(
    r"no such file|not found|permission denied|exec format error|without --no-sandbox"
    r"|error while loading shared libraries|requires the chromium snap|cannot execute|bad cpu type",
    re.IGNORECASE,
)


# What Chromium says where it may not make namespaces for its sandbox, with and without a helper that is setuid.
NO_SANDBOX = re.compile(
    r"no usable sandbox|failed to move to new namespace|failed to receive hello message from zygote", re.IGNORECASE
)
NO_SANDBOX_ADVICE = (
    "Chromium's sandbox cannot start: this system forbids user namespaces. In Docker, run the container with "
    "--cap-add=SYS_ADMIN or with a seccomp profile that allows clone, setns and unshare."
)

# What Chromium says of a machine it does not know well; it has nothing to do with a failed start.
IDLE_TALK = re.compile(r"cpufreq|crashpad", re.IGNORECASE)

# The folder in which Chromium, Chrome, Edge or Brave keeps its socket.
SOCKET_FOLDER = re.compile(r"(?:org|com)\.[\w.]+\.\w{6}$")


def is_retryable_launch_error(message: str) -> bool:
    """True where the same browser may well start at the next try."""
    hopeless = HOPELESS_LAUNCH.search(message) or NO_SANDBOX.search(message)
    return not hopeless and bool(RETRYABLE_LAUNCH.search(message))


def backoff(
    attempt: int, base: float, *, slow: bool = False, jitter: Callable[[float, float], float] = random.uniform
) -> float:
    """The pause after the attempt with this number (from 0): doubling, spread by a quarter, longer for Snap."""
    pause = base * 2.0**attempt * (2.0 if slow else 1.0)
    return min(LONGEST_BACKOFF, pause) * jitter(0.75, 1.25)


class LaunchFailed(Exception):
    """The browser did not start; the message ends with what it said itself."""


def browser_environ(environ: Mapping[str, str], profile: str) -> dict[str, str]:
    """The environment for Chromium: the few variables it needs, and every folder it litters inside its profile."""
    kept = {k: v for k, v in environ.items() if k.upper() in BROWSER_VARIABLES or k.startswith("LC_")}
    temporary = dict.fromkeys(("TMPDIR", "TMP", "TEMP"), socket_folder(profile, environ))
    return {**kept, **temporary, **dict.fromkeys(("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"), profile)}


def socket_folder(profile: str, environ: Mapping[str, str]) -> str:
    """A folder with a name short enough for Chromium to make a socket in it: the profile itself, if possible."""
    folders = (profile, tempfile.gettempdir(), environ.get("XDG_RUNTIME_DIR", ""), environ.get("HOME", ""))
    short = (folder for folder in folders if folder and len(os.fsencode(folder)) <= LONGEST_SOCKET_FOLDER)
    return next(short, profile)


def browser_flags(profile: str, proxy: str, *, root: bool, small_shared_memory: bool) -> list[str]:
    """The command line after the executable. Everything goes through the proxy, loopback too; no name is resolved."""
    flags = [
        *BASE_FLAGS,
        f"--user-data-dir={profile}",
        f"--proxy-server={proxy}",
        "--proxy-bypass-list=<-loopback>",
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    ]
    if root:
        flags.append("--no-sandbox")  # Chromium's sandbox refuses to work for root, and only for root
    if small_shared_memory:
        flags.append("--disable-dev-shm-usage")
    return flags


def is_root() -> bool:
    """True for the superuser of a POSIX system."""
    return sys.platform != "win32" and os.geteuid() == 0


def has_small_shared_memory(path: str = "/dev/shm") -> bool:
    """True in a container with Docker's default of 64 MB."""
    with contextlib.suppress(OSError):
        return sys.platform == "linux" and shutil.disk_usage(path).total < SMALL_SHARED_MEMORY
    return False


NO_PROFILE_FOLDER = "There is no folder for the browser's profile; is the disk full?"


def profile_root(executable: str, environ: Mapping[str, str]) -> str:
    """The folder for profiles: the temporary one, unless the browser is confined to a folder of its own."""
    home = environ.get("HOME") or os.path.expanduser("~")
    if is_snap(executable):
        name = "brave" if "brave" in os.path.basename(executable) else "chromium"
        return os.path.join(home, "snap", name, "common")
    if app := flatpak_id(executable):
        return os.path.join(home, ".var", "app", app, "cache")
    try:
        return tempfile.gettempdir()
    except OSError:
        raise Failure("launch_failed", NO_PROFILE_FOLDER) from None


def make_profile(root: str) -> str:
    """A fresh profile folder whose name tells whose it is."""
    os.makedirs(root, exist_ok=True)
    try:
        return tempfile.mkdtemp(prefix=f"{PROFILE_PREFIX}{os.getpid()}-", dir=root)
    except OSError:
        raise Failure("launch_failed", NO_PROFILE_FOLDER) from None


def sweep_profiles(root: str, *, alive: Callable[[int], bool] | None = None) -> list[str]:
    """Removes the profiles of workers that were killed; the names of those it removed."""
    alive = alive or is_alive
    swept = []
    for entry in _entries(root):
        pid = entry.removeprefix(PROFILE_PREFIX).partition("-")[0]
        path = os.path.join(root, entry)
        if pid.isdigit() and not alive(int(pid)) and not _elsewhere(path):
            remove_profile(path)
            swept.append(entry)
    return swept


def _entries(root: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [entry for entry in os.listdir(root) if entry.startswith(PROFILE_PREFIX)]
    return []


def _elsewhere(profile: str) -> bool:
    """True where Chromium's lock names another host: containers can share a folder, but not their process numbers."""
    with contextlib.suppress(OSError):
        return os.readlink(os.path.join(profile, "SingletonLock")).rpartition("-")[0] != socket.gethostname()
    return False


def remove_profile(profile: str) -> None:
    """Removes a profile, and the folder with Chromium's socket where that had to be elsewhere."""
    with contextlib.suppress(OSError):
        folder = os.path.dirname(os.readlink(os.path.join(profile, "SingletonSocket")))
        if SOCKET_FOLDER.match(os.path.basename(folder)):
            remove_tree(folder)
    remove_tree(profile)


def remove_tree(path: str, *, tries: int = 20, sleep: Callable[[float], None] = time.sleep) -> None:
    """Removes a folder; a browser that is just dying may still write into it, hence several tries."""
    for _ in range(tries):
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.exists(path):
            return
        sleep(0.05)


def is_alive(pid: int) -> bool:
    """True where a process with this number runs."""
    if WINDOWS:
        return _is_alive_on_windows(pid)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _is_alive_on_windows(pid: int) -> bool:
    """Asks for a handle: on Windows os.kill(pid, 0) would end the process."""
    import ctypes

    kernel = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    handle = kernel.OpenProcess(0x1000, False, pid)  # PROCESS_QUERY_LIMITED_INFORMATION
    if not handle:
        return False
    code = ctypes.c_ulong()
    kernel.GetExitCodeProcess(handle, ctypes.byref(code))
    kernel.CloseHandle(handle)
    return code.value == 259  # STILL_ACTIVE


def die_together_on_windows() -> Any:
    """Puts this process into a job that Windows ends as a whole when we end, however we end; keep what it returns."""
    import ctypes

    kernel = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    kernel.CreateJobObjectW.restype = kernel.GetCurrentProcess.restype = ctypes.c_void_p
    job = ctypes.c_void_p(kernel.CreateJobObjectW(None, None))
    # JOBOBJECT_EXTENDED_LIMIT_INFORMATION; LimitFlags is its third field, after two 64-bit times.
    limits = (ctypes.c_ubyte * (144 if ctypes.sizeof(ctypes.c_void_p) == 8 else 112))()
    ctypes.c_uint32.from_buffer(limits, 16).value = 0x2000  # JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
    kernel.SetInformationJobObject(job, 9, ctypes.byref(limits), ctypes.sizeof(limits))
    kernel.AssignProcessToJobObject(job, ctypes.c_void_p(kernel.GetCurrentProcess()))
    return job


def reserve_pipe_fds() -> None:
    """Keeps descriptors 3 and 4 for Chromium's pipe, before anything else gets them."""
    if WINDOWS:
        return
    for fd in PIPE_FDS:
        null = os.open(os.devnull, os.O_RDWR)
        if null != fd:
            os.dup2(null, fd, inheritable=False)
            os.close(null)


def pipe_fds_are_ours() -> bool:
    """True where reserve_pipe_fds() was called: in a process that has other uses for 3 and 4 they are not touched."""
    with contextlib.suppress(OSError):
        null = os.stat(os.devnull)
        return not WINDOWS and all(os.path.samestat(os.fstat(fd), null) for fd in PIPE_FDS)
    return False


class Process:
    """A Chromium of our own: its command line, its profile, its process, and what it said on stderr."""

    #: One launch at a time: descriptors 3 and 4 exist once.
    _spawning = threading.Lock()

    def __init__(self, executable: str, *, proxy: str, environ: Mapping[str, str]) -> None:
        self.executable = executable
        self._confined = bool(flatpak_id(executable))
        self.profile = make_profile(profile_root(executable, environ))
        self._said: collections.deque[str] = collections.deque(maxlen=30)
        self._transport: Transport | None = None
        small = has_small_shared_memory()
        self._flags = browser_flags(self.profile, proxy, root=is_root(), small_shared_memory=small)
        self._environ = browser_environ(environ, self.profile)
        try:
            self._popen = self._spawn()
        except OSError as error:
            self.end()
            raise LaunchFailed(f"{executable} could not be started: {error.strerror or error}") from None
        threading.Thread(target=self._listen, daemon=True).start()

    _popen: "subprocess.Popen[bytes] | None" = None

    def _spawn(self) -> "subprocess.Popen[bytes]":
        if self._confined or not pipe_fds_are_ours():
            return self._start([*self._flags, "--remote-debugging-port=0"])
        ours, theirs = _pipes()
        with self._spawning:
            try:
                for fd, target in zip(theirs, PIPE_FDS, strict=True):
                    os.dup2(fd, target, inheritable=False)
                popen = self._start([*self._flags, "--remote-debugging-pipe"], pass_fds=PIPE_FDS)
            finally:
                reserve_pipe_fds()  # drops our copies of Chromium's ends: they must close when it dies
                for fd in theirs:
                    os.close(fd)
        self._transport = PipeTransport(*ours)
        return popen

    def _start(self, flags: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        app = flatpak_id(self.executable)
        command = ["flatpak", "run", "--die-with-parent", app] if app else [self.executable]
        return subprocess.Popen(
            [*command, *flags, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=self._environ,
            start_new_session=not WINDOWS,  # renderers are grandchildren: only their group can be killed whole
            **options,
        )

    def _listen(self) -> None:
        assert self._popen and self._popen.stderr
        with contextlib.suppress(OSError, ValueError), self._popen.stderr as lines:
            for line in lines:
                self._said.append(line.decode("utf-8", "replace").rstrip()[:300])

    def transport(self, deadline: Deadline) -> "Transport":
        """The way to talk to it: the pipe, or where there is none the port it has chosen."""
        while self._transport is None:
            if not self.running():
                raise LaunchFailed("Failed to connect to browser: it ended at once." + self.said())
            if not deadline.remaining():
                raise LaunchFailed("Failed to connect to browser: it named no DevTools port in time." + self.said())
            if lines := _active_port(self.profile):
                self._transport = web_socket(f"ws://127.0.0.1:{lines[0]}{lines[1]}", deadline)
            else:
                time.sleep(0.03)
        return self._transport

    def running(self) -> bool:
        """True until the process has ended."""
        return self._popen is not None and self._popen.poll() is None

    def said(self) -> str:
        """The end of what Chromium wrote to stderr, ready to be appended to a message."""
        time.sleep(0.05)  # its last words may still be on their way
        tail = " | ".join([line for line in self._said if line and not IDLE_TALK.search(line)][-6:])
        return f" Chromium said: {tail[-800:]}" if tail else ""

    def end(self) -> None:
        """Ends the browser with all its children and removes its profile."""
        if self._popen:
            if isinstance(self._transport, PipeTransport):
                # It takes leave of its children: killed ones would stay as zombies where nobody reaps orphans (Docker).
                self._transport.hang_up()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._popen.wait(timeout=LEAVE_SECONDS)
            kill_group(self._popen)
        if self._transport:
            self._transport.close()
        remove_profile(self.profile)


def _pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    """Our ends of Chromium's two pipes (read, write), and its own."""
    their_read, our_write = os.pipe()
    our_read, their_write = os.pipe()
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError, AttributeError):  # a page comes in fewer, larger pieces
            fcntl.fcntl(our_read, fcntl.F_SETPIPE_SZ, 1 << 20)
    return (our_read, our_write), (their_read, their_write)


def _active_port(profile: str) -> list[str]:
    """Port and path from the file Chromium writes; nothing while it is half written."""
    with contextlib.suppress(OSError), open(os.path.join(profile, "DevToolsActivePort"), encoding="ascii") as file:
        lines = file.read().split("\n")
        return lines if len(lines) >= 2 and lines[0].isdigit() and lines[1].startswith("/devtools/") else []
    return []


def kill_group(popen: "subprocess.Popen[bytes]") -> None:
    """Ends a process and all it has started, and waits until it is gone."""
    if sys.platform == "win32":
        subprocess.run(["taskkill", "/T", "/F", "/PID", str(popen.pid)], capture_output=True, check=False)
    else:
        with contextlib.suppress(OSError):
            os.killpg(popen.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        popen.wait(timeout=3)


@dataclass
class Running:
    """A browser that answers: our own (`process`), or somebody else's that we only visit."""

    tab: Any
    product: str
    user_agent: str
    process: Process | None = None
    proxy: str = ""  # what each browser context is told to go through, where the command line was not ours
    intercept: bool = False  # the guard is asked about each request by CDP: no proxy of ours can be reached

    def gone(self) -> bool:
        """True once it has ended or hung up."""
        return bool(self.tab.gone.is_set())

    def end(self) -> None:
        """Kills our own browser; hangs up on another's, which disposes of our contexts."""
        if self.process:
            self.process.end()
        else:
            with contextlib.suppress(Exception):
                self.tab._ws.close()


def greet(transport: Transport, *, timeout: float) -> Running:
    """The browser behind a transport, once it has said who it is."""
    tab = browser_tab(transport)
    version = tab.Browser.getVersion(_timeout=timeout)
    agent = version["userAgent"].replace("HeadlessChrome", "Chrome")
    return Running(tab, version["product"], agent)


def start_process(executable: str, *, proxy: str, environ: Mapping[str, str]) -> Running:
    """A new Chromium that has answered its first question. LaunchFailed says why not, in its own words too."""
    patience = SNAP_START_SECONDS if is_snap(executable) else START_SECONDS
    process = Process(executable, proxy=proxy, environ=environ)
    try:
        running = greet(process.transport(Deadline(patience)), timeout=patience)
    except BaseException as error:
        said = process.said()
        process.end()
        if isinstance(error, (BrowserGone, Failure)):
            how = "it ended at once" if isinstance(error, BrowserGone) else "it did not answer"
            raise LaunchFailed(f"Failed to connect to browser: {how}.{said}") from None
        raise
    running.process = process
    return running


def connect_remote(url: str, *, proxy: str) -> Running:
    """The browser or pool behind KINDLY_CDP_URL."""
    deadline = Deadline(START_SECONDS)
    address = url if url.startswith(("ws://", "wss://")) else devtools_socket(url, deadline)
    try:
        running = greet(web_socket(address, deadline), timeout=deadline.remaining())
    except (BrowserGone, Failure):
        raise LaunchFailed("Failed to connect to browser at KINDLY_CDP_URL: it did not answer.") from None
    if is_loopback(urlsplit(url).hostname or ""):
        running.proxy = proxy
    else:
        running.intercept = True
    return running


def devtools_socket(url: str, deadline: Deadline) -> str:
    """The WebSocket address behind a DevTools HTTP address, on the host we were given: pools name their inner one."""
    import requests

    parts = urlsplit(url if "://" in url else f"http://{url}")
    version = urlunsplit((parts.scheme, parts.netloc, "/json/version", parts.query, ""))
    try:
        with requests.Session() as session:
            session.trust_env = not is_loopback(parts.hostname or "")
            inner = urlsplit(session.get(version, timeout=deadline.remaining()).json()["webSocketDebuggerUrl"])
    except (requests.RequestException, ValueError, KeyError, TypeError) as error:
        raise LaunchFailed(f"Failed to connect to browser at KINDLY_CDP_URL: {type(error).__name__}.") from None
    scheme = "wss" if parts.scheme == "https" else "ws"
    return str(urlunsplit((scheme, parts.netloc.rpartition("@")[2], inner.path, inner.query or parts.query, "")))


def start_with_retries(start: Callable[[], Running], attempts: int, pause: Callable[[int], None]) -> Running:
    """What `start` returns, tried again after a pause while the error is one that may pass."""
    for attempt in range(attempts):
        try:
            return start()
        except LaunchFailed as error:
            logger.warning("launch %d of %d: %s", attempt + 1, attempts, error)
            if NO_SANDBOX.search(str(error)):
                raise Failure("no_sandbox", NO_SANDBOX_ADVICE) from None
            if attempt + 1 == attempts or not is_retryable_launch_error(str(error)):
                raise Failure("launch_failed", f"{error} (attempt {attempt + 1} of {attempts})") from None
            pause(attempt)
    raise Failure("launch_failed")


def _pause(attempt: int, *, base: float, slow: bool, sleep: Callable[[float], None]) -> None:
    sleep(backoff(attempt, base, slow=slow))


class Chromium:
    """The one browser: started when first needed, replaced when it has died, ended for good by close()."""

    def __init__(
        self,
        settings: BrowserSettings,
        *,
        guard: AddressGuard,
        upstream: Upstream | None = None,
        environ: Mapping[str, str],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings = settings
        self.guard = guard
        self._environ = environ
        self._sleep = sleep
        self._lock = threading.Lock()
        self._launch: concurrent.futures.Future[Running] | None = None
        self._closed = False
        self._roots: set[str] = set()
        self.proxy = GuardProxy(guard, upstream)

    def running(self, deadline: Deadline) -> Running:
        """A browser that answers. A launch that takes longer than this request may wait goes on for the next."""
        launch = self._current()
        try:
            return launch.result(timeout=deadline.remaining())
        except (TimeoutError, concurrent.futures.TimeoutError):
            raise Failure("timeout", "The browser did not start in time.") from None

    def _current(self) -> "concurrent.futures.Future[Running]":
        with self._lock:
            if self._closed:
                raise Failure("cancelled", "The worker is about to end.")
            launch = self._launch
            if launch is None or (launch.done() and _is_worth_another(launch)):
                self._launch = concurrent.futures.Future()
                threading.Thread(target=self._run, args=(self._launch, launch), daemon=True).start()
            assert self._launch
            return self._launch

    def _run(
        self, launch: "concurrent.futures.Future[Running]", old: "concurrent.futures.Future[Running] | None"
    ) -> None:
        if old and not old.exception():
            old.result().end()
        try:
            running = self._start()
        except BaseException as error:  # noqa: BLE001  # handed on to whoever waits
            launch.set_exception(error)
        else:
            launch.set_result(running)

    def _start(self) -> Running:
        wanted = self._settings
        start, slow = self._remote() if wanted.cdp_url else self._local()
        pause = functools.partial(_pause, base=wanted.retry_backoff, slow=slow, sleep=self._sleep)
        return start_with_retries(start, wanted.retry_attempts, pause)

    def _remote(self) -> tuple[Callable[[], Running], bool]:
        return functools.partial(connect_remote, self._settings.cdp_url, proxy=self.proxy.address), False

    def _local(self) -> tuple[Callable[[], Running], bool]:
        wanted = self._settings.executable_path
        path = find_browser({**self._environ, PATH_VARIABLES[0]: wanted})
        if not path:
            raise Failure("no_browser", _nothing_found(wanted))
        root = profile_root(path, self._environ)
        self._roots.add(root)
        sweep_profiles(root)
        start = functools.partial(start_process, path, proxy=self.proxy.address, environ=self._environ)
        return start, is_snap(path)

    def now_running(self) -> Running | None:
        """The browser that runs at this moment, if one does."""
        launch = self._launch
        if launch and launch.done() and not launch.exception() and not launch.result().gone():
            return launch.result()
        return None

    def close(self) -> None:
        """Ends the browser, also one that is only just starting, and starts no other."""
        self.proxy.close()
        with self._lock:
            self._closed = True
            launch = self._launch
        if launch:
            with contextlib.suppress(Exception, concurrent.futures.CancelledError):
                launch.result(timeout=2.0).end()
        for root in self._roots:
            # Ours, if a launch was cut short, and what the browser of a killed worker wrote while it was dying.
            sweep_profiles(root, alive=lambda pid: pid != os.getpid() and is_alive(pid))


def _is_worth_another(launch: "concurrent.futures.Future[Running]") -> bool:
    """True where the browser has gone or did not start, for a reason that may pass while this worker lives."""
    error = launch.exception()
    if error is None:
        return launch.result().gone()
    return not (isinstance(error, Failure) and error.reason == "no_sandbox")


def _nothing_found(wanted: str) -> str:
    if wanted:
        return f"KINDLY_BROWSER_EXECUTABLE_PATH names {wanted}, which is not there."
    return "No Chromium, Chrome, Edge or Brave was found. Install one, or name it with KINDLY_BROWSER_EXECUTABLE_PATH."


# ----------------------------------------------------------------------------
# 6. Page readiness
# ----------------------------------------------------------------------------
# No event says that a page has drawn what it has to say. We look at it every few
# milliseconds and stop when its text has come to rest.

PROBE_SECONDS = 0.05
STILL_SECONDS = 0.25  # text that has not changed for so long after loading is done
YOUNG_REQUEST_SECONDS = 2.5  # an older request is a long poll, not content
THIN_REQUEST_SECONDS = 6.0  # but where there is next to no text yet, it may be the content
THIN_TEXT = 250  # characters; less looks like a shell that is still to be filled
THIN_SECONDS = 2.5  # how long after loading a shell is given
REST_SECONDS = 2.5  # text at rest for so long is done, whatever the network does
UNFINISHED_SECONDS = 3.5  # the same, for a document that is still coming in
STUCK_SECONDS = 3.0  # a page that does not answer for so long runs an endless script
FORWARD_SECONDS = 2.5  # how much of its own time a loaded page is given: we let its clock run ahead
FORWARD_PATIENCE = 1.0  # real time after which that no longer waits for the network
LONGEST_REFRESH = 5.0  # a later refresh is for people who watch, not a redirect
MOST_CLIENT_REDIRECTS = 5

#: Requests that can bring text.
TEXT_REQUESTS = frozenset({"Document", "Script", "XHR", "Fetch", "Stylesheet"})

#: Returns [readyState, characters of text, elements, has scripts, looks unfinished].
PROBE = r"""(() => {
  const d = document, b = d.body, all = d.getElementsByTagName('*').length;
  let text = b ? b.textContent : '', n;
  if (text.length < 4000) text = text.replace(/\s+/g, ' ').trim();
  n = text.length;
  if (b) for (const s of b.querySelectorAll('script,style,noscript')) n -= s.textContent.length;
  const dig = root => {
    for (const el of root.querySelectorAll('*'))
      if (el.shadowRoot) { n += el.shadowRoot.textContent.trim().length; dig(el.shadowRoot); }
  };
  if (all < 5000) dig(d);
  const main = d.querySelector('main,[role=main],#root,#app,#__next,#content');
  const busy = d.querySelector('[aria-busy=true],[role=progressbar],.loading,.spinner,.skeleton');
  const empty = !!main && !main.shadowRoot && main.textContent.trim().length < 50 && !main.querySelector('iframe');
  return [d.readyState, Math.max(n, 0), all, d.scripts.length > 0, empty || (!!busy && busy.checkVisibility())];
})()"""


class Readiness:
    """Decides from what a page shows and what it still loads whether waiting is worth it."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._requests: dict[str, float] = {}
        self._refresh_at = 0.0
        self.redirects = -1
        self.committed = False
        self.stuck = False
        self._reset()

    def _reset(self) -> None:
        self._state = ""
        self._seen: tuple[int, int] | None = None
        self._still_since = self._loaded_at = 0.0
        self._scripts = self._thin = False
        self.forwarded = False

    def document_committed(self) -> None:
        """A new document has taken over: what was seen and requested before says nothing about it."""
        self.committed = True
        self.redirects += 1
        self._refresh_at = 0.0
        self._requests.clear()
        self._reset()

    def request_started(self, number: str, kind: str) -> None:
        """A request is under way."""
        if kind in TEXT_REQUESTS:
            self._requests.setdefault(number, self._now())

    def request_ended(self, number: str) -> None:
        """A request is over, well or not."""
        self._requests.pop(number, None)

    def refresh_scheduled(self, delay: float) -> None:
        """The page will replace itself by another soon; not for ever, though."""
        if delay <= LONGEST_REFRESH and self.redirects < MOST_CLIENT_REDIRECTS:
            self._refresh_at = self._now() + delay

    def refresh_cleared(self) -> None:
        """The page has thought better of it, or the next one is being loaded."""
        self._refresh_at = 0.0

    def saw(self, state: str, text: int, elements: int, scripts: bool, unfinished: bool) -> None:
        """Takes in one look at the page."""
        now = self._now()
        if (text, elements) != self._seen:
            self._seen, self._still_since = (text, elements), now
        if state == "complete" and self._state != "complete":
            self._loaded_at = now
        self._state, self._scripts = state, scripts
        self._thin = unfinished or text < THIN_TEXT

    def verdict(self) -> str:
        """ "ready", "partial", or "" for: look again."""
        now = self._now()
        if self.stuck:
            return "partial"
        if self._seen is None or now < self._refresh_at + 1.0:
            return ""
        if self._state == "complete":
            return "ready" if self._is_drawn(now) else ""
        patience = UNFINISHED_SECONDS if self._state == "loading" else REST_SECONDS
        if now - self._still_since < patience or (self._thin and self._is_loading(now)):
            return ""
        return "partial" if self._state == "loading" else "ready"

    def may_forward(self) -> bool:
        """True where all is loaded, and only the page's own timers can still bring something."""
        return self._state == "complete" and self._scripts and not self._is_loading(self._now())

    def clock_forwarded(self) -> None:
        """The page's timers have had their time; what it shows at the next look is what there is."""
        self.forwarded = True
        self._seen = None

    def _is_drawn(self, now: float) -> bool:
        if not self._scripts or self.forwarded:
            return not self._is_loading(now)
        if self._thin and now - self._loaded_at < THIN_SECONDS:
            return False
        still = now - self._still_since
        return still >= STILL_SECONDS and (not self._is_loading(now) or (still >= REST_SECONDS and not self._thin))

    def _is_loading(self, now: float) -> bool:
        young = THIN_REQUEST_SECONDS if self._thin else YOUNG_REQUEST_SECONDS
        return any(now - started < young for started in self._requests.values())


# ----------------------------------------------------------------------------
# 7. Page
# ----------------------------------------------------------------------------

#: Bytes of a document after which the rest is left out, and characters of HTML that are handed over.
LONGEST_DOCUMENT = 20_000_000
LONGEST_HTML = 10_000_000

#: The most of its time that a request keeps back for handing over what is there.
RESERVE_SECONDS = 1.0

#: Resources without text.
UNWANTED = ("Image", "Media", "Font")

#: Overlays of the common consent tools.
CONSENT = (
    "#onetrust-consent-sdk,#CybotCookiebotDialog,#CybotCookiebotDialogBodyUnderlay,#didomi-host,#usercentrics-root,"
    "#usercentrics-cmp-ui,.fc-consent-root,.qc-cmp2-container,#qc-cmp2-container,[id^=sp_message_container],"
    "#truste-consent-track,#cookiescript_injected,#cmpbox,#cmpwrapper,.cc-window,.osano-cm-window,#iubenda-cs-banner,#cookie-law-info-bar"
)

#: Returns the document as HTML, open shadow trees in the place where they show, without scripts and styles.
SNAPSHOT = r"""((cap, consent) => {
  const d = document, inert = d.implementation.createHTMLDocument(''), out = /^(script|style|link|noscript)$/;
  for (const el of d.querySelectorAll(consent + ',style,noscript,script:not([type*=json i])')) el.remove();
  const shown = node => (node.shadowRoot || node).childNodes;
  const copy = (node, into, inShadow) => {
    for (const child of shown(node)) {
      if (inShadow && child.localName === 'slot') {
        for (const each of child.assignedNodes({flatten: true})) put(each, into, each.getRootNode() !== d);
      } else put(child, into, inShadow);
    }
  };
  const put = (node, into, inShadow) => {
    if (inShadow && out.test(node.localName || '')) return;
    const twin = inert.importNode(node, false);
    into.appendChild(twin);
    copy(node, twin, inShadow || !!node.shadowRoot);
  };
  let root = d.documentElement;
  if (root && [...d.querySelectorAll('*')].some(el => el.shadowRoot)) {
    try {
      const twin = inert.importNode(root, false);
      copy(root, twin, false);
      root = twin;
    } catch (tooDeep) {}
  }
  let html = root ? root.outerHTML : '';
  const cut = html.length > cap;
  if (cut) html = html.slice(0, cap);
  if (html.toWellFormed) html = html.toWellFormed();
  return {html, cut, title: d.title || '', url: location.href, type: d.contentType};
})"""

# Types that Chromium shows as a document. The rest it would save, or show in a viewer without text.
READABLE_TYPE = re.compile(
    r"text/(?!calendar|csv)[\w.+-]+|application/(?:xhtml\+xml|xml|json|[\w.-]+\+(?:json|xml)|(?:x-)?javascript)|"
)


@dataclass
class Answer:
    """What the server said about a document."""

    status: int
    content_type: str
    wants_login: bool = False
    saves: bool = False

    def as_file(self) -> Failure:
        """What to answer for a document that is none."""
        return Failure("download", f"This is a file of type {self.content_type}.", content_type=self.content_type)


class Page:
    """One page in a browser context of its own. Nothing of it is left after close()."""

    def __init__(self, running: Running, *, timeout: float = CALL_SECONDS) -> None:
        self.running = running
        browser = running.tab
        through = {"proxyServer": running.proxy, "proxyBypassList": "<-loopback>"} if running.proxy else {}
        made = browser.Target.createBrowserContext(disposeOnDetach=True, _timeout=timeout, **through)
        self.context = made["browserContextId"]
        try:
            made = browser.Target.createTarget(url="about:blank", browserContextId=self.context, _timeout=timeout)
            self.target = made["targetId"]
            made = browser.Target.attachToTarget(targetId=self.target, flatten=True, _timeout=timeout)
            self.tab = page_tab(browser, made["sessionId"])
            self._enable(timeout)
        except BaseException:
            self.close()
            raise

    tab: Any = None

    def _enable(self, timeout: float) -> None:
        """Switches on what we listen to; all of it must have answered before navigation, or events are lost."""
        post = self.tab.post
        waiting = {
            post("Page.enable"),
            post("Inspector.enable"),
            post("Network.enable", maxTotalBufferSize=0, maxResourceBufferSize=0, maxPostDataSize=0),
            post("Network.setUserAgentOverride", userAgent=self.running.user_agent),
            post("Browser.setDownloadBehavior", behavior="deny", browserContextId=self.context),
            post("Fetch.enable", patterns=self._patterns()),
        }
        deadline = Deadline(timeout)
        while waiting:
            message = self.tab.next(deadline.remaining())
            if message is None:
                raise Failure("timeout", "The browser did not open a page in time.")
            waiting.discard(message.get("id"))

    def _patterns(self) -> list[dict[str, str]]:
        if self.running.intercept:
            return [{"urlPattern": "*"}]
        return [{"urlPattern": "*", "resourceType": kind} for kind in UNWANTED]

    def is_fresh(self) -> bool:
        """False once the browser or the page has died while it waited for its turn."""
        with contextlib.suppress(BrowserGone):
            while message := self.tab.next(0):
                if message.get("method") == "Inspector.targetCrashed":
                    return False
            return True
        return False

    def close(self) -> None:
        """Disposes of the context: with it go the page, its popups, workers, cookies and storage."""
        with contextlib.suppress(BrowserGone):
            if self.tab is not None:
                self.tab.forget()
            message = {"method": "Target.disposeBrowserContext", "params": {"browserContextId": self.context}}
            self.running.tab.post(message, queue.SimpleQueue())


class Pages:
    """Opens pages. One is kept open ahead of time: that takes longer than a simple page does to load."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: concurrent.futures.Future[Page] | None = None

    def take(self, running: Running, *, timeout: float) -> Page:
        """A page that nobody has used."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare:
            with contextlib.suppress(Failure, BrowserGone, concurrent.futures.TimeoutError):
                page = spare.result(timeout=timeout)
                if page.running is running and page.is_fresh():
                    return page
                page.close()
        return Page(running, timeout=timeout)

    def prepare(self, running: Running) -> None:
        """Opens a page for the next request, if none is waiting; only in a browser of our own."""
        with self._lock:
            if self._spare or not running.process or running.gone():
                return
            spare = self._spare = concurrent.futures.Future()
        try:
            spare.set_result(Page(running))
        except BaseException as error:  # noqa: BLE001  # handed on to whoever waits
            spare.set_exception(error)


class Visit:
    """Takes a fresh page to an address and comes back with what is there."""

    def __init__(self, page: Page, request: Request, *, guard: AddressGuard, proxy: GuardProxy) -> None:
        self._page, self._tab, self._request = page, page.tab, request
        self._guard, self._proxy = guard, proxy
        reserve = min(RESERVE_SECONDS, request.deadline.remaining() / 5)
        self._soft = request.deadline.sooner(request.deadline.remaining() - reserve)
        self._ready = Readiness()
        self._answers: dict[str, Answer] = {}
        self._loader = ""
        self._address = request.url
        self._received = 0
        self._partial = False
        self._world = 0
        self._asked: dict[int, str] = {}
        self._probe_due = 0.0
        self._probe_sent = 0.0
        self._forward_sent = 0.0
        self._on: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "Page.frameNavigated": self._on_commit,
            "Page.loadEventFired": self._on_progress,
            "Page.domContentEventFired": self._on_progress,
            "Page.frameScheduledNavigation": self._on_refresh,
            "Page.frameClearedScheduledNavigation": self._on_refresh_cleared,
            "Page.javascriptDialogOpening": self._on_dialog,
            "Network.requestWillBeSent": self._on_request,
            "Network.responseReceived": self._on_response,
            "Network.dataReceived": self._on_data,
            "Network.loadingFinished": self._on_request_end,
            "Network.loadingFailed": self._on_request_end,
            "Emulation.virtualTimeBudgetExpired": self._on_forwarded,
            "Inspector.targetCrashed": self._on_crash,
            "Fetch.requestPaused": self._on_paused,
        }

    def run(self) -> dict[str, Any]:
        """The fields of a successful answer. Failure says why there is none."""
        self._ask("Page.navigate", url=self._request.url)
        self._partial |= self._settle() == "partial"
        taken = self._snapshot()
        answer = self._answers.get(self._loader, Answer(0, taken["type"]))
        self._partial |= taken["cut"]
        return {
            "url": taken["url"],
            "status": answer.status,
            "content_type": answer.content_type or taken["type"],
            "title": taken["title"],
            "html": taken["html"],
            "partial": self._partial,
        }

    def _settle(self) -> str:
        """Waits until the page is worth taking; "ready" or "partial"."""
        while True:
            self._look()
            if verdict := self._ready.verdict():
                return verdict
            if not self._soft.remaining():
                if self._ready.committed:
                    return "partial"
                raise Failure("timeout", "The page did not answer in time.")
            self._hear(self._soft.remaining())

    def _hear(self, longest: float) -> None:
        """Handles what comes in until the next look is due, at the most for `longest` seconds."""
        if self._request.cancelled.is_set():
            raise Failure("cancelled")
        pause = self._probe_due - time.monotonic() if self._world and not self._probe_sent else PROBE_SECONDS
        message = self._tab.next(min(longest, max(0.001, min(pause, PROBE_SECONDS))))
        if message is None:
            return
        if "id" in message:
            self._on_reply(self._asked.pop(message["id"], ""), message)
        elif message["method"] in self._on:
            self._on[message["method"]](message["params"])

    def _ask(self, method: str, **params: Any) -> int:
        number = int(self._tab.post(method, **params))
        self._asked[number] = method
        return number

    def _look(self) -> None:
        """Sends a probe when one is due, and frees a page that has not answered the last one."""
        now = time.monotonic()
        if self._probe_sent:
            if now - self._probe_sent > STUCK_SECONDS:
                self._free()
                self._ready.stuck = True
        elif self._world and now >= self._probe_due:
            self._forward(now)
            self._probe_sent = now
            self._ask("Runtime.evaluate", expression=PROBE, contextId=self._world, returnByValue=True)

    def _forward(self, now: float) -> None:
        """Lets the clock of a loaded page run ahead: what it draws after a second or two is there at once."""
        if self._ready.forwarded or not self._ready.may_forward():
            return
        if not self._forward_sent:
            self._forward_sent = now
            self._run_clock("pauseIfNetworkFetchesPending")
        elif now - self._forward_sent > FORWARD_PATIENCE:
            self._forward_sent = now
            self._run_clock("advance")  # past a request that never ends

    def _run_clock(self, policy: str) -> None:
        budget = 1000 * FORWARD_SECONDS
        self._ask("Emulation.setVirtualTimePolicy", policy=policy, budget=budget, maxVirtualTimeTaskStarvationCount=500)

    def _free(self) -> None:
        """Ends the script that keeps the page from answering."""
        self._ask("Runtime.terminateExecution")

    def _snapshot(self) -> dict[str, Any]:
        """The document as it is now. An endless script is ended, as often as it takes."""
        expression = f"{SNAPSHOT}({LONGEST_HTML}, {json.dumps(CONSENT)})"
        deadline, patience = self._request.deadline, self._request.deadline.sooner(1.0)
        while deadline.remaining():
            number = self._tab.post("Runtime.evaluate", expression=expression, returnByValue=True, **self._where())
            value = self._await(number, deadline.sooner(STUCK_SECONDS if deadline.remaining() > 4 else 1.0))
            if value and (value["html"] or not patience.remaining()):
                return value
            if value:  # a document that another one is about to replace has nothing in it yet
                self._await(-1, deadline.sooner(PROBE_SECONDS))
            else:
                self._free()
        raise Failure("timeout", "The page kept the browser busy until the time was up.")

    def _where(self) -> dict[str, int]:
        """Our own world inside the page, where its scripts cannot interfere."""
        return {"contextId": self._world} if self._world else {}

    def _await(self, number: int, deadline: Deadline) -> dict[str, Any]:
        """The value that an evaluation returns, or nothing if it fails or takes too long."""
        while deadline.remaining():
            message = self._tab.next(deadline.remaining())
            if message is None:
                continue
            if message.get("id") == number:
                return dict(message.get("result", {}).get("result", {}).get("value") or {})
            if message.get("method") in self._on:
                self._on[message["method"]](message["params"])
        return {}

    # What comes in: replies first, then events in the order of a page's life.

    def _on_reply(self, method: str, message: Mapping[str, Any]) -> None:
        result = message.get("result", {})
        if method == "Page.navigate" and (result.get("errorText") or "error" in message):
            raise self._failure(result.get("errorText", ""))
        if method == "Page.createIsolatedWorld" and "executionContextId" in result:
            self._world, self._probe_sent, self._probe_due = result["executionContextId"], 0.0, 0.0
        elif method == "Runtime.evaluate":
            self._on_probe(result.get("result", {}).get("value"))

    def _on_probe(self, value: Any) -> None:
        took = time.monotonic() - self._probe_sent
        self._probe_sent, self._probe_due = 0.0, time.monotonic() + max(PROBE_SECONDS, 4 * took)
        if isinstance(value, list):
            self._ready.saw(*value)

    def _on_request(self, params: Mapping[str, Any]) -> None:
        kind = params.get("type", "")
        self._ready.request_started(params["requestId"], kind)
        if kind == "Document" and params.get("frameId") == self._page.target:
            self._address = params["request"]["url"]

    def _on_request_end(self, params: Mapping[str, Any]) -> None:
        self._ready.request_ended(params["requestId"])

    def _on_response(self, params: Mapping[str, Any]) -> None:
        if params.get("type") != "Document" or params.get("frameId") != self._page.target:
            return
        answer = read_answer(params["response"])
        self._answers[params["loaderId"]] = answer
        if self._loader and self._loader != params["loaderId"]:
            return  # the page that is already here has moved on; what it has shown remains ours
        # Over plain HTTP a refusal of our own proxy looks like an answer of the site.
        error = self._proxy.failure(self._address) if answer.status in (403, 502) else None
        if error and self._address.startswith("http://"):
            raise _refusal(error)
        if answer.wants_login:
            raise Failure("needs_login")
        if answer.saves:
            raise answer.as_file()

    def _on_data(self, params: Mapping[str, Any]) -> None:
        if params["requestId"] in self._answers and not self._partial:
            self._received += params["dataLength"]
            if self._received > LONGEST_DOCUMENT:
                self._partial = True
                self._tab.post("Page.stopLoading")

    def _on_commit(self, params: Mapping[str, Any]) -> None:
        frame = params["frame"]
        if frame.get("parentId"):
            return
        if frame.get("unreachableUrl"):
            raise self._failure("")  # Chromium shows a page of its own
        self._loader = frame["loaderId"]
        self._received = 0
        self._ready.document_committed()
        if self._forward_sent:  # else the clock of the new document would stand still
            self._forward_sent = time.monotonic()
            self._run_clock("pauseIfNetworkFetchesPending")
        self._world, self._probe_sent = 0, time.monotonic()
        self._ask("Page.createIsolatedWorld", frameId=frame["id"], worldName="kindly")

    def _on_progress(self, params: Mapping[str, Any]) -> None:
        self._probe_due = 0.0

    def _on_forwarded(self, params: Mapping[str, Any]) -> None:
        self._probe_due = 0.0
        if self._ready.may_forward():
            self._ready.clock_forwarded()
        else:  # a request has started at the last moment: what it brings needs time as well
            self._run_clock("pauseIfNetworkFetchesPending")

    def _on_refresh(self, params: Mapping[str, Any]) -> None:
        if params.get("frameId") == self._page.target:
            self._ready.refresh_scheduled(params.get("delay", 0.0))

    def _on_refresh_cleared(self, params: Mapping[str, Any]) -> None:
        if params.get("frameId") == self._page.target:
            self._ready.refresh_cleared()

    def _on_dialog(self, params: Mapping[str, Any]) -> None:
        self._tab.post("Page.handleJavaScriptDialog", accept=params.get("type") in ("alert", "beforeunload"))

    def _on_crash(self, params: Mapping[str, Any]) -> NoReturn:
        raise Failure("crashed", "The page crashed.")

    def _on_paused(self, params: Mapping[str, Any]) -> None:
        number, url = params["requestId"], params["request"]["url"]
        if params.get("resourceType") in UNWANTED:
            self._tab.post("Fetch.failRequest", requestId=number, errorReason="BlockedByClient")
        elif error := self._objection(url):
            self._tab.post("Fetch.failRequest", requestId=number, errorReason="AccessDenied")
            if params.get("resourceType") == "Document" and params.get("frameId") == self._page.target:
                raise _refusal(error)
        else:
            self._tab.post("Fetch.continueRequest", requestId=number)

    def _objection(self, url: str) -> SearchError | None:
        """What the guard has against an address, where only we can ask it: the browser resolves it again itself."""
        if url.startswith(("data:", "blob:", "about:")):
            return None
        try:
            target = self._guard.target(url)
            self._guard.addresses(target.host, target.port)
        except SearchError as error:
            return error
        return None

    def _failure(self, text: str) -> Failure:
        """What Chromium's error for a navigation means."""
        if error := self._proxy.failure(self._address):
            return _refusal(error)
        answer = next(reversed(self._answers.values()), None)
        if answer and (answer.status >= 400 or answer.status in (204, 205)):
            return Failure("unreachable", f"HTTP {answer.status} with nothing to read.", status=answer.status)
        if answer and text in ("", "net::ERR_ABORTED"):
            return answer.as_file()
        if "ERR_CERT" in text or "ERR_SSL" in text:
            return Failure("certificate", f"The site's certificate was refused ({text[5:]}).")
        return Failure("unreachable", f"The page could not be loaded ({text[5:] or 'no answer'}).", net_error=text)


def read_answer(response: Mapping[str, Any]) -> Answer:
    """What matters of a document's response."""
    headers = {name.lower(): value for name, value in response.get("headers", {}).items()}
    kind = str(response.get("mimeType", "")).lower()
    saves = headers.get("content-disposition", "").lower().startswith("attachment") or not READABLE_TYPE.fullmatch(kind)
    return Answer(
        status=int(response.get("status", 0)),
        content_type=kind,
        wants_login=response.get("status") == 401 and "www-authenticate" in headers,
        saves=saves and int(response.get("status", 0)) < 400,
    )


def _refusal(error: SearchError) -> Failure:
    reason = "address_not_allowed" if isinstance(error, AddressNotAllowed) else "unreachable"
    return Failure(reason, str(error))


# ----------------------------------------------------------------------------
# 8. Worker loop
# ----------------------------------------------------------------------------

#: More pages at once take longer each, on the few cores that a laptop has to spare.
PAGES_AT_ONCE = 4
TICK_SECONDS = 0.5


class Worker:
    """Answers requests, each in a thread of its own, with one browser between them."""

    def __init__(self, chromium: Chromium, replies: Replies, *, idle_seconds: float, serve: bool) -> None:
        self._chromium = chromium
        self._replies = replies
        self._idle_seconds = idle_seconds
        self._serve = serve
        self._pages = Pages()
        self._slots = threading.BoundedSemaphore(PAGES_AT_ONCE)
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._idle_since = time.monotonic()

    def run(self, lines: Iterable[bytes]) -> None:
        """Serves until the input ends (and, by hand, all is answered) or nobody has asked for a while."""
        inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=_feed, args=(lines, inbox), daemon=True).start()
        ended = False
        while not (ended and (self._serve or not self._requests)) and not self._is_idle():
            with contextlib.suppress(queue.Empty):
                line = inbox.get(timeout=0.02 if ended else TICK_SECONDS)
                ended = not line
                if line.strip():
                    self._take(line)

    def _is_idle(self) -> bool:
        with self._lock:
            return not self._requests and time.monotonic() - self._idle_since > self._idle_seconds

    def _take(self, line: bytes) -> None:
        number = None
        try:
            message = parse_line(line)
            number = message.get("id")
            if command := message.get("cmd"):
                return self._command(str(command), number)
            request = parse_request(message)
        except Failure as failure:
            return self._replies.send({"id": number, **failure.answer()})
        with self._lock:
            self._requests.append(request)
        threading.Thread(target=self._answer, args=(request,), daemon=True).start()

    def _command(self, command: str, number: Any) -> None:
        if command == "ping":
            running = self._chromium.now_running()
            self._replies.send({"id": number, "pong": True, "browser": running.product if running else ""})
        elif command == "cancel":
            for request in list(self._requests):
                if request.id == number:
                    request.cancelled.set()
        else:
            raise Failure("bad_request", f"There is no command {command[:40]!r}.")

    def _answer(self, request: Request) -> None:
        started = time.monotonic()
        try:
            answer = self._page(request)
        except Failure as failure:
            answer = failure.answer()
        except Exception as error:
            logger.exception("a fault in the worker")
            answer = Failure("internal", f"The browser worker has a fault: {type(error).__name__}.").answer()
        self._replies.send({"id": request.id, **answer, "ms": round(1000 * (time.monotonic() - started))})
        with self._lock:
            self._requests.remove(request)
            self._idle_since = time.monotonic()

    def _page(self, request: Request) -> dict[str, Any]:
        try:
            self._chromium.guard.target(request.url)
        except SearchError as error:
            private = isinstance(error, AddressNotAllowed)
            raise Failure("address_not_allowed" if private else "bad_request", str(error)) from None
        if not self._slots.acquire(timeout=request.deadline.remaining()):
            raise Failure("timeout", "Too many pages were under way.")
        try:
            return self._visit_twice(request)
        finally:
            self._slots.release()

    def _visit_twice(self, request: Request) -> dict[str, Any]:
        """Visits the page, once more if the browser dies meanwhile: that is nearly always another page's doing."""
        try:
            return self._visit(request)
        except BrowserGone:
            logger.info("the browser died; once more")
        try:
            return self._visit(request)
        except BrowserGone:
            raise Failure("crashed", "The browser crashed twice.") from None

    def _visit(self, request: Request) -> dict[str, Any]:
        running = self._chromium.running(request.deadline)
        try:
            return self._visit_in(running, request)
        except Failure as failure:
            if not running.proxy or failure.extra.get("net_error") != "net::ERR_PROXY_CONNECTION_FAILED":
                raise
        # A browser in a container whose DevTools port is published here: our loopback is not its own.
        running.proxy, running.intercept = "", True
        return self._visit_in(running, request)

    def _visit_in(self, running: Running, request: Request) -> dict[str, Any]:
        page = self._pages.take(running, timeout=request.deadline.remaining())
        try:
            return Visit(page, request, guard=self._chromium.guard, proxy=self._chromium.proxy).run()
        finally:
            page.close()
            if len(self._requests) <= 1:  # else it would take the processor from the pages under way
                threading.Thread(target=self._pages.prepare, args=(running,), daemon=True).start()


def _feed(lines: Iterable[bytes], inbox: "queue.SimpleQueue[bytes]") -> None:
    """Passes lines on; the empty one at last stands for the end."""
    with contextlib.suppress(OSError, ValueError):
        for line in lines:
            inbox.put(line if line.strip() else b"\n")
    inbox.put(b"")


def claim_stdout() -> BinaryIO:
    """The real stdout, for answers alone: whatever anybody prints from now on goes to stderr."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out


def upstream_from(environ: Mapping[str, str]) -> Upstream:
    """The operator's proxy; lower-case variables count where the capital ones are unset."""
    names = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    return Upstream(*(environ.get(name) or environ.get(name.lower(), "") for name in names))


def end_on_signals() -> None:
    """Makes the signals that ask us to end raise SystemExit, so that the browser goes first."""

    def leave(number: int, frame: Any) -> NoReturn:
        raise SystemExit(128 + number)

    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), leave)


def main(arguments: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> int:
    """Runs the worker on stdin and stdout."""
    environ = os.environ if environ is None else environ
    reserve_pipe_fds()
    job = die_together_on_windows() if WINDOWS else None
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="chrome_worker: %(message)s")
    warnings.filterwarnings("ignore", module="pychrome")
    replies = Replies(claim_stdout())
    settings, general = from_env(BrowserSettings, environ), from_env(Settings, environ)
    guard = AddressGuard(general.allow_private_hosts)
    chromium = Chromium(settings, guard=guard, upstream=upstream_from(environ), environ=environ)
    end_on_signals()
    worker = Worker(chromium, replies, idle_seconds=settings.idle_seconds, serve="--serve" in arguments)
    try:
        worker.run(sys.stdin.buffer)
    finally:
        chromium.close()
        del job
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = main(sys.argv[1:])
    except ValueError as error:
        print(f"chrome_worker: {error}", file=sys.stderr)
        code = 2
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    # The thread that reads stdin may be blocked there: an ordinary exit could wait for its lock.
    sys.stderr.flush()
    os._exit(code)
