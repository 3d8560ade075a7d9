"""Section 13 over HTTP: a real server process on loopback, the real mcp client, and requests that break the rules."""

import contextlib
import functools
import hashlib
import hmac
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import httpx2
import pytest
import uvicorn
from conftest import Site
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

import kindly_search as ks

ALICE, BOB, CAROL = "token-of-alice-0123456789", "token-of-bob-0123456789", "token-of-carol-0123456789"
THREE_TOKENS = f"alice:{ALICE}, bob:{BOB}, carol:{CAROL}"
MCP_HEADERS = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
PARAGRAPH = "<p>Every paragraph of this page says something new about number {}, and says it in one sentence.</p>"

linux_only = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts threads and sockets in /proc")


# --- the world outside: providers and pages on loopback ---------------------------------------------------------------


class World:
    """Stand-ins for the providers and the web. Pages below /held wait until the test lets them go."""

    def __init__(self):
        self.let_go = threading.Event()
        self.asked = threading.Semaphore(0)  # one for each held page that was asked for
        self.site = Site(self.answer)
        self.url = self.site.url

    def answer(self, request):
        path = request.path.partition("?")[0]
        if path in SEARCHES:
            return as_json(SEARCHES[path](self.links(request)))
        if path == "/v1/responses":
            return as_json(OPENAI_ANSWER)
        if path.startswith("/held"):
            self.asked.release()
            self.let_go.wait(20)
        return page(path)

    def links(self, request):
        """Pages that belong to this query alone, so that no cache helps."""
        body = request.json()
        query = body.get("q") or body.get("query")
        return [f"{self.url}/{'-'.join(query.split())}/{number}" for number in range(3)]

    def environ(self, **more):
        return {
            "SERPER_API_KEY": "key-of-serper-0123456789",
            "SERPER_SEARCH_ENDPOINT": f"{self.url}/serper",
            "KINDLY_ALLOW_PRIVATE_HOSTS": "127.0.0.1",
            "KINDLY_BROWSER_ENABLED": "false",
            "KINDLY_CONTENT_CHAIN": "http",
            **more,
        }


#: How each provider says which pages it has found.
SEARCHES = {
    "/serper": lambda links: {"organic": [{"title": f"T {link}", "link": link, "snippet": "S"} for link in links]},
    "/exa": lambda links: {"results": [{"title": f"T {link}", "url": link, "highlights": ["S"]} for link in links]},
    "/tavily": lambda links: {"results": [{"title": f"T {link}", "url": link, "content": "S"} for link in links]},
}

OPENAI_ANSWER = {
    "object": "response",
    "status": "completed",
    "error": None,
    "output": [
        {"type": "web_search_call", "id": "1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "It is 42.", "annotations": []}],
        },
    ],
    "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2},
}


def as_json(data):
    return 200, {"Content-Type": "application/json"}, json.dumps(data)


def page(path):
    text = "".join(PARAGRAPH.format(f"{path} {number}") for number in range(8))
    return f"<title>Page {path}</title><article><h1>Page {path}</h1>{text}</article>"


@pytest.fixture(scope="module")
def world():
    made = World()
    yield made
    made.let_go.set()
    made.site.close()


@pytest.fixture
def held(world):
    """A page that does not answer before `world.let_go` is set; set at the end in any case."""
    world.let_go.clear()
    yield f"{world.url}/held/{time.monotonic_ns()}"
    world.let_go.set()
    while world.asked.acquire(blocking=False):
        pass


# --- the server process -----------------------------------------------------------------------------------------------


def call_body(tool, arguments):
    params = {"name": tool, "arguments": arguments}
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})


def raw_post(server, body, headers=""):
    """The bytes of a POST to /mcp."""
    lines = {"Host": f"127.0.0.1:{server.port}", "Connection": "close", "Content-Length": len(body), **MCP_HEADERS}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST /mcp HTTP/1.1\r\n{head}{headers}\r\n{body}".encode()


class Reply:
    """An answer to a raw request."""

    def __init__(self, response):
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.text = response.read().decode()

    def result(self):
        """The JSON-RPC message inside, from JSON or from the last event of the stream."""
        if self.headers["content-type"].startswith("application/json"):
            return json.loads(self.text)
        return json.loads([line[6:] for line in self.text.splitlines() if line.startswith("data: ")][-1])


def said(reply):
    """The sentence of a refusal: for calls it comes as an error of JSON-RPC, which clients show."""
    return json.loads(reply.text)["error"]["message"] if reply.text.startswith("{") else reply.text


def command(*arguments):
    return [sys.executable, "-m", "kindly_search", "start-mcp-server", "--http", *arguments]


def surroundings(environ):
    """What the process sees and where it starts: nothing of this machine's configuration."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "SYSTEMROOT") if name in os.environ}
    return {"env": {**kept, **environ}, "cwd": Path(ks.__file__).parent}


class Server:
    """A server process on a port of its own."""

    def __init__(self, environ, *arguments):
        self.process = subprocess.Popen(
            command("--port", "0", *arguments), stderr=subprocess.PIPE, text=True, **surroundings(environ)
        )
        self.log = []
        self.url, self.port = self._listening()
        self._reading = threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self._reading.start()

    def _listening(self):
        """The address that it prints, once it listens."""
        for line in self.process.stderr:
            if found := re.fullmatch(r"Listening on (http://\S+:(\d+)/mcp)\n", line):
                return found[1], int(found[2])
            self.log.append(line)
        self.process.wait(10)
        raise AssertionError("".join(self.log))

    def request(self, method, path, body=None, *, token="", **headers):
        """One raw request on a connection of its own."""
        given = {**({"Authorization": f"Bearer {token}"} if token else {}), **headers}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(method, path, body, given)
            return Reply(connection.getresponse())

    def rpc(self, method, params=None, *, token="", **headers):
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
        return self.request("POST", "/mcp", json.dumps(message), token=token, **{**MCP_HEADERS, **headers})

    def call(self, tool, arguments, *, token="", **headers):
        return self.rpc("tools/call", {"name": tool, "arguments": arguments}, token=token, **headers)

    def raw(self, data, *, seconds=10):
        """What comes back for bytes that need not be HTTP."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            with contextlib.suppress(OSError):  # it may have heard enough before we are done
                connection.sendall(data)
            received = b""
            with contextlib.suppress(OSError):
                while chunk := connection.recv(65_536):
                    received += chunk
            return received

    def metric(self, line, *, token=""):
        """The value of one line of /metrics; 0 where it is not there."""
        for found in self.request("GET", "/metrics", token=token).text.splitlines():
            if found.startswith(f"{line} "):
                return float(found.rpartition(" ")[2])
        return 0.0

    def workers(self):
        """The process ids of the worker processes; none where this one does all the work itself."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, parent = stat.read_text().rpartition(")")[2].split()[:2]
                found += [int(stat.parent.name)] * (int(parent) == self.process.pid and state != "Z")
        return found

    def threads(self):
        return sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in (self.process.pid, *self.workers()))

    def sockets(self):
        found = 0
        for pid in (self.process.pid, *self.workers()):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found += os.readlink(entry).startswith("socket:")
        return found

    def stop(self):
        """Asks it to end; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self, seconds=30):
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()
            self.process.wait()
            self._reading.join(5)
            self.process.stderr.close()


@pytest.fixture(scope="module")
def open_server(world):
    """A server without a token: what everybody runs at home."""
    server = Server(world.environ(KINDLY_LOG_LEVEL="INFO"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def team_server(world):
    """A server with three named tokens, JSON logs and an OpenAI that answers."""
    environ = world.environ(
        KINDLY_HTTP_TOKEN=THREE_TOKENS,
        KINDLY_LOG_LEVEL="DEBUG",
        OPENAI_API_KEY="key-of-openai-0123456789",
        OPENAI_BASE_URL=f"{world.url}/v1",
        KINDLY_RATE_LIMIT="1/10m",
    )
    server = Server(environ, "--log-format", "json")
    yield server
    server.stop()


@pytest.fixture
def start(world):
    """Starts a server with some variables of its own."""
    started = []

    def run(*arguments, **environ):
        started.append(Server(world.environ(**environ), *arguments))
        return started[-1]

    yield run
    world.let_go.set()
    for server in started:
        if server.process.poll() is None:
            server.stop()


def refused_start(environ, *arguments):
    """The exit code and stderr of a server that should not start at all."""
    run = functools.partial(subprocess.run, stderr=subprocess.PIPE, text=True, timeout=8)
    try:
        ended = run(command(*arguments), **surroundings(environ))
    except subprocess.TimeoutExpired:
        pytest.fail("it started all the same")
    return ended.returncode, ended.stderr


async def with_client(server, action, *, token="", mode="auto"):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    # mcp's own defaults for the timeouts; httpx2's five seconds are too short for a search.
    async with httpx2.AsyncClient(headers=headers, timeout=30) as carrier:
        async with Client(streamable_http_client(server.url, http_client=carrier), mode=mode) as client:
            return await action(client)


def ask(server, tool, arguments, **how):
    """The result of one tool call by the real mcp client."""
    return anyio.run(lambda: with_client(server, lambda client: client.call_tool(tool, arguments), **how))


# --- the real client --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_the_real_client_searches_and_reads_over_http(open_server, mode):
    answer = ask(open_server, "web_search", {"query": f"client in {mode} mode"}, mode=mode)
    assert not answer.is_error
    results = answer.structured_content["results"]
    assert [sorted(result) for result in results] == [["link", "page_content", "snippet", "title"]] * 3
    assert all("says something new" in result["page_content"] for result in results)
    assert answer.meta["kindly"]["provider"] == "serper"


def test_the_real_client_sees_the_tools_and_their_schemas(open_server):
    tools = anyio.run(lambda: with_client(open_server, lambda client: client.list_tools())).tools
    assert [tool.name for tool in tools] == ["web_search", "get_content"]
    assert all(tool.output_schema and tool.annotations.read_only_hint for tool in tools)


def test_progress_reaches_the_real_client(open_server):
    seen = []

    async def progress(done, total, message):
        seen.append((done, total, message))

    async def action(client):
        return await client.call_tool("web_search", {"query": "with progress"}, progress_callback=progress)

    anyio.run(lambda: with_client(open_server, action))
    assert seen[0] == (0, 3, "serper found 3")
    assert seen[-1][:2] == (3, 3)


@pytest.mark.parametrize(
    ("tool", "meta", "kind"),
    [
        ("get_content", {}, "application/json"),
        ("get_content", {"_meta": {"progressToken": 1}}, "text/event-stream"),
        ("search", {}, "text/event-stream"),
    ],
    ids=["in one piece", "with progress", "by Gemini, which may take minutes"],
)
def test_only_a_call_that_has_a_use_for_a_stream_is_answered_by_one(open_server, world, tool, meta, kind):
    params = {"name": tool, "arguments": {"url": f"{world.url}/stream-or-not", "query": "x"}, **meta}
    reply = open_server.rpc("tools/call", params)
    assert reply.headers["content-type"].partition(";")[0] == kind
    assert "result" in reply.result() or "error" in reply.result()


def test_a_call_in_several_packets_and_one_in_chunks_are_answered(open_server, world):
    body = call_body("get_content", {"url": f"{world.url}/in-packets"}).encode()
    head, _, _ = raw_post(open_server, body.decode()).partition(b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", open_server.port), timeout=10) as connection:
        for part in (head + b"\r\nConnection: close\r\n\r\n", body[:20], body[20:50], body[50:]):
            connection.sendall(part)
            time.sleep(0.05)
        assert b"says something new" in connection.makefile("rb").read()
    chunked = re.sub(rb"(?i)content-length: \d+", b"Transfer-Encoding: chunked\r\nConnection: close", head)
    assert b"says something new" in open_server.raw(chunked + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))


@pytest.mark.parametrize("token", ["", "wrong"])
def test_the_real_client_is_refused_without_a_token_that_is_right(team_server, token):
    with pytest.raises(BaseException) as caught:  # noqa: B017, PT011  # an exception group, in some versions
        ask(team_server, "get_content", {"url": "http://127.0.0.1/"}, token=token)
    assert not isinstance(caught.value, KeyboardInterrupt)


def test_the_real_client_is_served_with_its_token(team_server, world):
    answer = ask(team_server, "get_content", {"url": f"{world.url}/for-alice"}, token=ALICE)
    assert "says something new" in answer.structured_content["page_content"]


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/mcp", "/metrics", "/readyz", "/", "/nope", "/healthz/", "//healthz", "/HEALTHZ"])
def test_every_route_but_healthz_needs_the_token(team_server, path):
    for method in ("GET", "POST", "DELETE", "OPTIONS"):
        reply = team_server.request(method, path)
        assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
        assert said(reply) == "A valid bearer token is needed."


@pytest.mark.parametrize("path", ["/healthz/../metrics", "/%6detrics", "/healthz%2f../metrics", "/metrics?/healthz"])
def test_no_spelling_of_a_path_gets_past_the_token(team_server, path):
    assert team_server.request("GET", path).status == 401


def test_healthz_is_open(team_server):
    reply = team_server.request("GET", "/healthz")
    assert (reply.status, reply.text) == (200, "ok")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer wrong",
        f"Bearer {ALICE}x".encode(),
        f"Bearer {ALICE[:-1]}".encode(),
        f"Bearer alice:{ALICE}".encode(),
        f"Bearer {THREE_TOKENS}".encode(),
        f"Basic {ALICE}".encode(),
        ALICE.encode(),
        b"Bearer \xff\xfe\x80",
        b"Bearer " + b"x" * 20_000,
    ],
    ids=lambda sent: repr(sent[:30]),
)
def test_anything_but_a_right_token_is_refused(team_server, sent):
    reply = team_server.raw(
        b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nAuthorization: " + sent + b"\r\n\r\n"
    )
    assert reply.startswith(b"HTTP/1.1 401 "), reply[:200]


@pytest.mark.parametrize("token", [ALICE, BOB, CAROL])
def test_each_of_several_tokens_opens_the_door(team_server, token):
    assert team_server.request("GET", "/readyz", token=token).text == "ready"
    assert team_server.request("GET", "/readyz", Authorization=f"bearer {token}").status == 200


def test_a_token_need_not_be_ascii(start):
    server = start(KINDLY_HTTP_TOKEN="anna:schlüssel-0123456789")
    head = "GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nAuthorization: Bearer schlüssel-0123456789"
    assert server.raw(f"{head}\r\n\r\n".encode()).startswith(b"HTTP/1.1 200 ")


def test_every_token_is_compared_in_constant_time(monkeypatch):
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    tokens = {"alice": ALICE, "bob": BOB, "carol": CAROL}
    assert ks.user_of({"authorization": f"Bearer {ALICE}"}, tokens) == "alice"
    assert [known for known, _ in compared] == [ALICE.encode(), BOB.encode(), CAROL.encode()]


@pytest.mark.parametrize("token", [",", " , ,", "alice:", ":", "alice:,bob:"])
def test_a_token_that_is_empty_is_a_mistake_and_opens_nothing(token):
    code, said = refused_start({"KINDLY_HTTP_TOKEN": token}, "--host", "0.0.0.0", "--port", "0")
    assert code == 2
    assert "KINDLY_HTTP_TOKEN" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("tokens", ["first,second", "alice:first,alice:second"])
def test_two_tokens_of_one_name_are_a_mistake_or_both_work(tokens):
    with contextlib.suppress(ValueError):
        assert set(ks.named_tokens(tokens).values()) == {"first", "second"}


def test_two_authorization_headers_do_not_slip_out_of_the_rate_limit(start, world):
    """One reading for the gate and another for the rate limit would give a user a second allowance."""
    answers = {"OPENAI_API_KEY": "key-of-openai-0123456789", "OPENAI_BASE_URL": f"{world.url}/v1"}
    server = start(KINDLY_HTTP_TOKEN=THREE_TOKENS, KINDLY_RATE_LIMIT="1/10m", **answers)
    arguments = {"query": "the answer to everything"}
    body = call_body("search_web", arguments)
    assert "It is 42." in server.call("search_web", arguments, token=ALICE).text
    for first, second in ((ALICE, "wrong"), ("wrong", ALICE)):
        both = f"Authorization: Bearer {first}\r\nAuthorization: Bearer {second}\r\n"
        assert b"It is 42." not in server.raw(raw_post(server, body, both))


# --- where it listens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", "192.0.2.1", "example.invalid"])
def test_an_address_others_can_reach_is_refused_without_a_token(host):
    code, said = refused_start({}, "--host", host, "--port", "0")
    assert code == 2
    assert said == f"kindly: Set KINDLY_HTTP_TOKEN before binding {host}: anyone who reaches it could use your keys.\n"


def test_a_port_that_is_taken_is_a_sentence(open_server):
    code, said = refused_start({}, "--port", str(open_server.port))
    assert (code, said) == (2, f"kindly: Cannot listen on 127.0.0.1:{open_server.port}: Address already in use.\n")


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_a_port_that_does_not_exist_is_a_sentence(port):
    code, said = refused_start({}, "--port", port)
    assert code == 2
    assert "Traceback" not in said
    assert port in said


def test_the_address_of_an_ipv6_host_is_one_that_can_be_used(start):
    server = start("--host", "::1")
    assert server.url == f"http://[::1]:{server.port}/mcp"


@pytest.mark.parametrize("host", ["127.0.0.2", "[::1]"])
def test_every_address_of_this_machine_can_be_listened_on(start, host):
    server = start("--host", host)
    address = f"{host}:{server.port}"
    assert server.url == f"http://{address}/mcp"
    with contextlib.closing(http.client.HTTPConnection(host.strip("[]"), server.port, timeout=10)) as connection:
        connection.request("POST", "/mcp", call_body("get_content", {"url": ""}), {**MCP_HEADERS, "Host": address})
        assert connection.getresponse().status == 200


def test_a_name_or_address_may_be_written_in_all_ways_that_mean_the_same(start):
    server = start(
        "--host", "0.0.0.0", KINDLY_HTTP_TOKEN=ALICE, KINDLY_HTTP_HOSTS="[2001:db8::1],2001:db8::2,A.example"
    )
    for host in ("[2001:db8::1]:80", "[2001:db8::2]", "a.example:443", "A.EXAMPLE"):
        assert server.rpc("tools/list", token=ALICE, Host=host).status == 200
        assert server.rpc("tools/list", token=ALICE, Host=host, Origin=f"HTTPS://{host}").status == 200
    for host in ("[2001:db8::3]", "user@a.example", "a.example/x", "a.example@evil.example"):
        assert server.rpc("tools/list", token=ALICE, Host=host).status == 421
    assert server.rpc("tools/list", token=ALICE, Host="a.example", Origin="ftp://a.example").status == 403


def test_with_a_token_it_listens_everywhere_under_any_name(start):
    server = start("--host", "0.0.0.0", KINDLY_HTTP_TOKEN=ALICE)
    for host in ("127.0.0.1", "search.example", "search.example:8000"):
        assert server.rpc("tools/list", token=ALICE, Host=host).status == 200
    assert server.rpc("tools/list", Host="search.example").status == 401


def test_named_hosts_are_the_only_ones(start):
    server = start("--host", "0.0.0.0", KINDLY_HTTP_TOKEN=ALICE, KINDLY_HTTP_HOSTS="search.example")
    assert server.rpc("tools/list", token=ALICE, Host="search.example:9").status == 200
    assert server.rpc("tools/list", token=ALICE, Host="search.example").status == 200
    assert server.rpc("tools/list", token=ALICE, Host="evil.example").status == 421
    assert server.rpc("tools/list", token=ALICE, Host="search.example", Origin="https://search.example").status == 200
    assert server.rpc("tools/list", token=ALICE, Host="search.example", Origin="https://evil.example").status == 403


# --- browsers of strangers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/mcp", "/readyz", "/metrics"])
@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:80", "localhost.evil.example"]
)
def test_a_foreign_host_is_refused_on_every_route(open_server, path, host):
    """A page whose name was rebound to 127.0.0.1 asks with its own name as the Host."""
    method = "POST" if path == "/mcp" else "GET"
    assert open_server.request(method, path, "{}", **MCP_HEADERS, Host=host).status == 421


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:1", "[::1]:80"])
def test_the_names_of_this_machine_are_good_hosts(open_server, host):
    assert open_server.rpc("tools/list", Host=host).status == 200


@pytest.mark.parametrize("path", ["/mcp", "/readyz", "/metrics"])
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://127.0.0.1.evil.example", "null", "file://", "http://", "x", "chrome://x"]
)
def test_a_foreign_origin_is_refused_on_every_route(open_server, path, origin):
    method = "POST" if path == "/mcp" else "GET"
    assert open_server.request(method, path, "{}", **MCP_HEADERS, Origin=origin).status == 403


def test_a_page_of_this_machine_may_ask(open_server):
    assert open_server.rpc("tools/list", Origin=f"http://127.0.0.1:{open_server.port}").status == 200


# --- requests that break the rules ------------------------------------------------------------------------------------


def still_serves(server, **how):
    return len(server.rpc("tools/list", **how).result()["result"]["tools"]) >= 2


@pytest.mark.parametrize("path", ["/", "/nope", "/mcp/nope", "/metrics/", "/../etc/passwd", "/mcp%00"])
def test_unknown_paths_are_not_found(open_server, path):
    assert open_server.request("GET", path, Accept="text/event-stream").status in (404, 307)
    assert still_serves(open_server)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"garbage",
        b"[]",
        b"{}",
        b"null",
        b"\xff\xfe\x00",
        b'{"jsonrpc": "2.0"',
        b'{"jsonrpc": "1.0", "id": 1, "method": "tools/list"}',
        b'{"jsonrpc": "2.0", "id": {}, "method": "tools/list"}',
        b'{"jsonrpc": "2.0", "id": 1, "method": 5}',
        b"[" * 100_000,
        b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": "x"}',
    ],
    ids=lambda body: repr(body[:50]),
)
def test_a_garbage_body_is_refused_and_harms_nothing(open_server, body):
    reply = open_server.request("POST", "/mcp", body, **MCP_HEADERS)
    # An id that is none makes a request a notification, to which 202 is the answer.
    assert reply.status in (202, 400) or "error" in reply.result()
    assert "Traceback" not in reply.text
    assert still_serves(open_server)


def test_an_unknown_method_or_tool_is_an_error_of_the_protocol(open_server):
    assert "error" in open_server.rpc("no/such/method").result()
    answer = open_server.call("no_such_tool", {}).result()
    assert "error" in answer or answer["result"]["isError"]


def test_a_huge_body_is_refused_before_it_is_read(open_server):
    host = f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{open_server.port}\r\nConnection: close\r\n".encode()
    head = host + b"Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n"
    announced = open_server.raw(head + b"Content-Length: 99999999999\r\n\r\n{", seconds=3)
    assert announced.startswith(b"HTTP/1.1 413 ")
    chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    chunked = open_server.raw(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 6)
    assert not chunked or chunked.startswith(b"HTTP/1.1 413 ")
    assert still_serves(open_server)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,  # the beginning of TLS
        b"GET\r\n\r\n",
        b"\r\n" * 1000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",  # no Host
        b"GET /mcp HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\nhello",
        b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
        b"GET /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 200_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ],
    ids=lambda data: repr(data[:30]),
)
def test_what_is_not_http_is_refused_and_harms_nothing(open_server, data):
    reply = open_server.raw(data, seconds=2)
    assert not reply.startswith(b"HTTP/1.1 2")
    assert still_serves(open_server)


def test_the_wrong_content_type_is_refused(open_server):
    reply = open_server.request("POST", "/mcp", "{}", **{**MCP_HEADERS, "Content-Type": "text/plain"})
    assert reply.status in (400, 415)


def test_bad_arguments_are_a_sentence_of_ours(open_server):
    for arguments, said in (({"query": "  "}, "query"), ({"query": None}, "query"), ({"query": ["x"] * 3}, "")):
        result = open_server.call("web_search", arguments).result()["result"]
        assert said in result["content"][0]["text"].lower()
        assert "pydantic" not in result["content"][0]["text"]


def test_the_stateless_endpoint_offers_no_stream_to_listen_on(open_server):
    """Nothing could ever come on it, and it would hold a place among the calls in flight for ever."""
    host = f"GET /mcp HTTP/1.1\r\nHost: 127.0.0.1:{open_server.port}\r\n".encode()
    listening = open_server.raw(host + b"Accept: text/event-stream\r\nConnection: close\r\n\r\n", seconds=2)
    assert listening.startswith(b"HTTP/1.1 405 "), listening[:100]
    assert open_server.request("DELETE", "/mcp").status == 405


# --- no session -------------------------------------------------------------------------------------------------------


def test_two_calls_need_no_session(open_server, world):
    for number in range(2):
        reply = open_server.call("get_content", {"url": f"{world.url}/stateless/{number}"})
        assert "mcp-session-id" not in reply.headers
        assert f"/stateless/{number}" in reply.result()["result"]["structuredContent"]["page_content"]


def test_a_session_that_another_replica_made_up_is_no_obstacle(open_server, team_server):
    hello = open_server.rpc("initialize", HELLO)
    assert hello.result()["result"]["serverInfo"]["name"] == "kindly-web-search"
    version = hello.result()["result"]["protocolVersion"]
    headers = {"Mcp-Session-Id": "from-elsewhere", "Mcp-Protocol-Version": version}
    assert len(team_server.rpc("tools/list", token=BOB, **headers).result()["result"]["tools"]) == 3


# --- readiness and metrics --------------------------------------------------------------------------------------------


def test_a_server_without_a_provider_is_alive_but_not_ready(start):
    server = start(SERPER_API_KEY="")
    assert server.request("GET", "/healthz").status == 200
    reply = server.request("GET", "/readyz")
    assert (reply.status, reply.text) == (503, "No search provider is configured.")


def test_a_server_whose_providers_all_fail_is_not_ready(start, serve):
    broken = serve({"/search": (500, {}, "down")})
    server = start(SERPER_SEARCH_ENDPOINT=f"{broken.url}/search", KINDLY_CIRCUIT_FAILURES="1")
    assert server.request("GET", "/readyz").text == "ready"
    state = 'circuit_breaker_state{operation="search",provider="serper"}'
    assert f"{state} 0.0" in server.request("GET", "/metrics").text  # before anybody was asked
    assert server.call("web_search", {"query": "anything"}).result()["result"]["isError"]
    reply = server.request("GET", "/readyz")
    assert (reply.status, reply.text) == (503, "Every search provider is failing.")
    assert server.metric(state) == 2
    assert server.metric('mcp_tool_calls_total{provider="",status="error",tool="web_search"}') == 1
    requests = 'provider_requests_total{operation="search",provider="serper",status="%s"}'
    # The second try, and every later one, finds the breaker open: nobody is asked, so nothing fails.
    assert (server.metric(requests % "error"), server.metric(requests % "skipped")) == (1, 1)
    assert server.call("web_search", {"query": "anything else"}).result()["result"]["isError"]
    assert (server.metric(requests % "error"), server.metric(requests % "skipped")) == (1, 2)


def test_calls_are_counted_by_who_answered_them(start, world):
    server = start(OPENAI_API_KEY="key-of-openai-0123456789", OPENAI_BASE_URL=f"{world.url}/v1")
    for _ in range(2):
        server.call("get_content", {"url": f"{world.url}/counted"})
    server.call("search_web", {"query": "who answers this"})
    for tool, provider in (("get_content", "http"), ("get_content", "cache"), ("search_web", "openai")):
        assert server.metric(f'mcp_tool_calls_total{{provider="{provider}",status="ok",tool="{tool}"}}') == 1


def test_metrics_come_in_the_type_that_prometheus_asks_for(open_server):
    kind = open_server.request("GET", "/metrics").headers["content-type"]
    assert kind == "text/plain; version=0.0.4; charset=utf-8"


def test_a_real_scrape_has_every_metric(team_server, world):
    def count(line):
        return team_server.metric(line, token=CAROL)

    lines = [
        'mcp_tool_calls_total{provider="serper",status="ok",tool="web_search"}',
        'mcp_tool_duration_seconds_count{provider="serper",tool="web_search"}',
        'provider_requests_total{operation="search",provider="serper",status="ok"}',
        'pages_total{method="http",outcome="ok"}',
        'pages_total{method="http",outcome="failed"}',
        "page_cache_hits_total",
    ]
    before = {line: count(line) for line in lines}
    for _ in range(2):
        team_server.call("web_search", {"query": "for the metrics"}, token=CAROL)
    team_server.call("get_content", {"url": f"{world.url.replace('127.0.0.1', '127.0.0.2')}/forbidden"}, token=CAROL)
    assert [count(line) - before[line] for line in lines] == [2, 2, 2, 3, 0, 3]
    assert count('circuit_breaker_state{operation="search",provider="serper"}') == 0
    text = team_server.request("GET", "/metrics", token=CAROL).text
    assert "# TYPE mcp_tool_calls_total counter" in text
    assert "# TYPE mcp_tool_duration_seconds histogram" in text
    assert "# TYPE circuit_breaker_state gauge" in text
    assert "browser_launches" in text
    assert not {"alice", "bob", "carol", ALICE, BOB, CAROL} & set(re.split(r'[\s"={},]', text))


def test_a_page_that_failed_is_counted_as_failed(team_server, world):
    forbidden = f"{world.url.replace('127.0.0.1', '127.0.0.2')}/forbidden"
    team_server.call("get_content", {"url": forbidden}, token=CAROL)
    text = team_server.request("GET", "/metrics", token=CAROL).text
    assert re.search(r'^pages_total\{method="[^"]*",outcome="failed"\} [1-9]', text, re.M), text


# --- limits on calls in flight ----------------------------------------------------------------------------------------


def test_calls_over_the_limits_are_told_to_come_back(start, world, held):
    server = start(KINDLY_HTTP_TOKEN=THREE_TOKENS, KINDLY_MAX_IN_FLIGHT="2", KINDLY_MAX_IN_FLIGHT_PER_TOKEN="1")
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(server.call, "get_content", {"url": f"{held}{name}"}, token=name) for name in (ALICE, BOB)
        ]
        assert all(world.asked.acquire(timeout=10) for _ in running)
        again, other = server.rpc("tools/list", token=ALICE), server.rpc("tools/list", token=CAROL)
        # Operators must be able to see a server that is busy.
        health = [server.request("GET", path, token=CAROL).status for path in ("/healthz", "/readyz", "/metrics")]
        world.let_go.set()
        done = [call.result() for call in running]
    assert (again.status, said(again)) == (429, "Too many calls at the same time with this token.")
    assert (other.status, said(other)) == (503, "The server is busy.")
    assert int(again.headers["retry-after"]) >= 1
    assert int(other.headers["retry-after"]) >= 1
    assert health == [200, 200, 200]
    assert all("says something new" in reply.text for reply in done)
    assert all(still_serves(server, token=token) for token in (ALICE, BOB, CAROL))


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_a_refusal_reaches_whoever_uses_the_real_client(start, world, held, mode):
    server = start(KINDLY_MAX_IN_FLIGHT="1")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.call, "get_content", {"url": held})
        assert world.asked.acquire(timeout=10)
        with pytest.raises(BaseException) as caught:  # noqa: B017, PT011  # an exception group, in some versions
            ask(server, "get_content", {"url": f"{world.url}/x"}, mode=mode)
        world.let_go.set()
        running.result()
    assert "The server is busy." in "".join(traceback.format_exception(caught.value))


@linux_only
@pytest.mark.parametrize("meta", [{}, {"_meta": {"progressToken": 1}}], ids=["in one piece", "as a stream"])
def test_who_has_the_answer_has_given_the_place_back(start, world, meta):
    server = start("--workers", "2", KINDLY_MAX_IN_FLIGHT="1")
    url = f"{world.url}/one-after-the-other"
    call = {"name": "get_content", "arguments": {"url": url}, **meta}
    assert {server.rpc("tools/call", call).status for _ in range(60)} == {200}


def test_nobody_can_listen_for_changes_that_never_come(start):
    server = start(KINDLY_MAX_IN_FLIGHT="1")

    async def listen(client):
        async with client.listen(tools_list_changed=True):
            pytest.fail("it listens")

    with pytest.raises(BaseException) as caught:  # noqa: B017, PT011  # an exception group, in some versions
        anyio.run(lambda: with_client(server, listen, mode="2026-07-28"))
    assert "Method not found" in "".join(traceback.format_exception(caught.value))
    assert still_serves(server)


def test_strangers_do_not_fill_the_places_of_others(start, world, held):
    server = start(KINDLY_HTTP_TOKEN=ALICE, KINDLY_MAX_IN_FLIGHT="1")
    with ThreadPoolExecutor(20) as pool:
        statuses = list(pool.map(lambda _: server.rpc("tools/list", token="wrong").status, range(40)))
    assert set(statuses) == {401}
    assert still_serves(server, token=ALICE)


def test_a_client_that_goes_away_gives_its_place_back(start, world, held, wait_until):
    server = start(KINDLY_MAX_IN_FLIGHT="1")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as gone:
        gone.sendall(raw_post(server, call_body("get_content", {"url": held})))
        assert world.asked.acquire(timeout=10)
        assert server.rpc("tools/list").status == 503
    wait_until(lambda: server.rpc("tools/list").status == 200)


@pytest.mark.parametrize("length", ["Content-Length: {}", "Transfer-Encoding: chunked"])
def test_a_call_that_is_only_announced_takes_no_place_and_leaves_no_trace(start, length):
    server = start(KINDLY_MAX_IN_FLIGHT="1", KINDLY_LOG_LEVEL="INFO")
    call = raw_post(server, call_body("web_search", {"query": "half a question"}))
    head, _, body = call.partition(b"\r\n\r\n")
    head = re.sub(rb"(?i)content-length: (\d+)", lambda found: length.format(int(found[1])).encode(), head)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as gone:
        gone.sendall(head + b"\r\n\r\n" + (b"99\r\n" if "chunked" in length else b"") + body[:9])
        time.sleep(0.3)
        assert server.rpc("tools/list").status == 200
    assert server.rpc("tools/list").status == 200
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.log)


@pytest.mark.parametrize("piece", [b"", b"x"])
def test_a_call_that_does_not_arrive_in_time_is_refused(piece):
    kindly = ks.Kindly.from_env({})
    gate = ks.Gate(None, None, kindly, ks.Metrics(kindly), arrival_seconds=0.2)
    sent = []

    async def receive():
        await anyio.sleep(0.01 if piece else 60)
        return {"type": "http.request", "body": piece, "more_body": True}

    async def send(message):
        sent.append(message)

    host = [(b"host", b"127.0.0.1")]
    anyio.run(gate, {"type": "http", "method": "POST", "path": "/mcp", "headers": host}, receive, send)
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"]["message"] == "The call did not arrive in time."
    assert gate.places.all() == 0


@pytest.mark.parametrize(("length", "refused"), [("000000000000000040", False), ("1000001", True)])
def test_the_length_that_a_call_announces_is_read_as_a_number(open_server, length, refused):
    head = f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    assert open_server.raw(head.encode() + b" " * 40).startswith(b"HTTP/1.1 413 ") is refused


@pytest.mark.parametrize("more", [True, False])
def test_a_body_that_is_just_too_long_is_refused(more):
    kindly = ks.Kindly.from_env({})
    gate = ks.Gate(None, None, kindly, ks.Metrics(kindly))
    sent = []

    async def receive():
        return {"type": "http.request", "body": b" " * 1_000_001, "more_body": more}

    async def send(message):
        sent.append(message)

    host = [(b"host", b"127.0.0.1"), (b"transfer-encoding", b"chunked")]
    anyio.run(gate, {"type": "http", "method": "POST", "path": "/mcp", "headers": host}, receive, send)
    assert sent[0]["status"] == 413


def test_progress_is_no_reason_to_refuse_who_takes_no_stream(open_server, world):
    params = {"name": "get_content", "arguments": {"url": f"{world.url}/x"}, "_meta": {"progressToken": 1}}
    reply = open_server.rpc("tools/call", params, Accept="application/json")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")


@pytest.fixture
def impatient():
    """Starts a server of little patience, and with an application that takes its time."""
    started = []

    def start(patience, takes):
        async def app(scope, receive, send):
            await anyio.sleep(takes)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        [listener] = ks._listeners("127.0.0.1", 0, 1)
        config = uvicorn.Config(app, http=ks._impatient(patience), lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: anyio.run(lambda: server.serve(sockets=[listener])), daemon=True)
        thread.start()
        started.append((server, thread))
        return listener.getsockname()

    yield start
    for server, thread in started:
        server.should_exit = True
        thread.join(10)


def ask_and_listen(connection):
    connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    reply = b""
    while not reply.endswith(b"ok"):
        piece = connection.recv(1000)
        assert piece, "it was closed"
        reply += piece


@pytest.mark.parametrize("sent", [b"", b"GET /", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
@pytest.mark.parametrize("calls", [0, 1])
def test_a_connection_on_which_no_whole_request_comes_is_closed(impatient, calls, sent):
    with socket.create_connection(impatient(patience=0.2, takes=0.5), timeout=4) as connection:
        for _ in range(calls):
            ask_and_listen(connection)
        connection.sendall(sent)
        assert connection.recv(1000) == b""


def test_a_connection_stays_open_for_a_while_after_a_long_call(impatient):
    with socket.create_connection(impatient(patience=1.0, takes=1.5), timeout=4) as connection:
        ask_and_listen(connection)
        time.sleep(0.8)  # beyond the next look, which must not hold the time of the call against it
        ask_and_listen(connection)


def test_sigterm_waits_as_long_as_the_longest_call_may_take():
    assert ks.longest_call(ks.Kindly.from_env({"KINDLY_TOOL_TOTAL_TIMEOUT_SECONDS": "45"})) == 45
    assert ks.longest_call(ks.Kindly.from_env({"GEMINI_CLI_ENABLED": "true", "GEMINI_TIMEOUT_MS": "90000"})) == 90


@pytest.mark.parametrize("workers", [1, 2])
def test_connections_send_without_waiting_for_acknowledgements(workers):
    """asyncio switches Nagle's algorithm off for sockets that say that they are TCP, and for no others."""
    for listener in ks._listeners("127.0.0.1", 0, workers):
        assert listener.proto == socket.IPPROTO_TCP
        listener.close()


def test_calls_that_may_be_silent_for_long_are_answered_by_a_stream(start):
    server = start(KINDLY_TOOL_TOTAL_TIMEOUT_SECONDS="90")
    assert server.rpc("tools/list").headers["content-type"].startswith("text/event-stream")


def test_the_rate_limit_counts_each_token_by_itself(team_server):
    def answered(token):
        result = team_server.call("search_web", {"query": "the answer to everything"}, token=token).result()["result"]
        return result["content"][0]["text"]

    assert "It is 42." in answered(ALICE)
    assert "RATE_LIMIT" in answered(ALICE)
    assert "It is 42." in answered(BOB)


# --- shutdown ---------------------------------------------------------------------------------------------------------


def test_a_running_call_may_finish_after_sigterm(start, world, held):
    server = start()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.call, "get_content", {"url": held})
        assert world.asked.acquire(timeout=10)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        with pytest.raises(OSError):  # nobody new is let in
            server.rpc("tools/list")
        world.let_go.set()
        content = running.result().result()["result"]["structuredContent"]["page_content"]
    assert "says something new" in content
    assert server.ended() == 0


def test_sigterm_ends_an_idle_server_with_exit_code_0(start):
    server = start()
    assert still_serves(server)
    started = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - started < 10
    assert "Traceback" not in "".join(server.log)


def test_an_idle_connection_does_not_delay_the_end(start):
    server = start()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as idle:
        idle.request("GET", "/healthz")
        assert idle.getresponse().read() == b"ok"
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 10


# --- the log ----------------------------------------------------------------------------------------------------------


def test_json_log_lines_parse_and_tell_no_secret(team_server, wait_until):
    query = "a query that nobody else should read"
    team_server.call("web_search", {"query": query}, token=BOB)
    team_server.request("GET", "/metrics", token="wrong-token-0123456789")
    hashed = f"query=sha256:{hashlib.sha256(query.encode()).hexdigest()[:12]}"
    wait_until(lambda: any(hashed in line for line in team_server.log))
    lines = [json.loads(line) for line in list(team_server.log)]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    [completed] = [line for line in lines if hashed in line["message"]]
    assert re.match(r"search completed engine=serper .*\bms=\d+ ", completed["message"] + " ")
    assert (completed["level"], completed["logger"]) == ("INFO", "kindly_search")
    assert (completed["engine"], completed["results"], type(completed["ms"])) == ("serper", 3, int)
    everything = "".join(team_server.log)
    assert query not in everything
    assert "nobody-else" not in everything  # nor in the address of a page
    for secret in (ALICE, BOB, CAROL, "wrong-token-0123456789", "key-of-serper", "key-of-openai"):
        assert secret not in everything
    assert not re.search(r"\b(alice|bob|carol)\b", everything)


def test_text_log_lines_are_one_line_each(open_server, wait_until):
    open_server.call("web_search", {"query": "for\nthe log"})
    wait_until(lambda: any("scrape completed" in line for line in open_server.log))
    ours = [line for line in open_server.log if " kindly_search " in line and "engine=" in line]
    assert ours
    assert all(
        re.match(r"(INFO|WARNING) kindly_search (search|scrape) (completed|failed) engine=\w+ ", line) for line in ours
    )


# --- several workers --------------------------------------------------------------------------------------------------

#: Connections of their own, enough that each of two workers gets some: one in 4,096 runs would miss one.
SEVERAL = 13


def statuses(server, count=SEVERAL):
    return {server.rpc("tools/list").status for _ in range(count)}


@linux_only
def test_the_workers_count_their_calls_together(start, world):
    server = start("--workers", "2")
    for number in range(SEVERAL):
        assert not server.call("get_content", {"url": f"{world.url}/together/{number}"}).result()["result"]["isError"]
    line = 'mcp_tool_calls_total{provider="http",status="ok",tool="get_content"}'
    assert {server.metric(line) for _ in range(SEVERAL)} == {SEVERAL}
    assert len(server.workers()) == 2
    busy = [pid for pid in server.workers() if len(list(Path(f"/proc/{pid}/task").iterdir())) > 2]
    assert len(busy) == 2, "each of them has had something to do"


@linux_only
def test_every_metric_is_there_with_workers_too(start, world):
    server = start("--workers", "2")
    server.call("web_search", {"query": "metrics of workers"})
    text = server.request("GET", "/metrics").text
    for name in ("mcp_tool_calls_total", "mcp_tool_duration_seconds_bucket", "provider_requests_total", "pages_total"):
        assert f"\n{name}{{" in text
    assert 'circuit_breaker_state{operation="search",provider="serper"} 0.0' in text
    assert "\nbrowser_launches 0.0" in text


@linux_only
def test_the_limit_on_calls_in_flight_holds_over_all_workers(start, world, held):
    server = start("--workers", "2", KINDLY_MAX_IN_FLIGHT="2")
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(server.call, "get_content", {"url": f"{held}{number}"}) for number in range(2)]
        assert all(world.asked.acquire(timeout=10) for _ in running)
        assert statuses(server) == {503}
        world.let_go.set()
        assert all("says something new" in call.result().text for call in running)
    assert statuses(server) == {200}


@linux_only
def test_the_rate_limit_holds_over_all_workers(start, world):
    environ = {"OPENAI_API_KEY": "key-of-openai-0123456789", "OPENAI_BASE_URL": f"{world.url}/v1"}
    server = start("--workers", "2", KINDLY_RATE_LIMIT="3/10m", **environ)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: server.call("search_web", {"query": "the answer"}).text, range(SEVERAL)))
    assert sum("It is 42." in answer for answer in answers) == 3
    assert sum("RATE_LIMIT" in answer for answer in answers) == SEVERAL - 3


@linux_only
def test_a_worker_that_is_killed_is_replaced_and_its_places_are_free_again(start, world, held, wait_until):
    server = start("--workers", "2", KINDLY_MAX_IN_FLIGHT="2")
    with ThreadPoolExecutor(2) as pool:
        lost = [pool.submit(server.call, "get_content", {"url": f"{held}{number}"}) for number in range(2)]
        assert all(world.asked.acquire(timeout=10) for _ in lost)
        assert statuses(server) == {503}
        before = server.workers()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert all(isinstance(call.exception(), (OSError, http.client.HTTPException)) for call in lost)
    wait_until(lambda: len(server.workers()) == 2 and not set(server.workers()) & set(before))
    assert statuses(server) == {200}
    assert sum("a worker died and is started again" in line for line in server.log) == 2


@linux_only
def test_workers_that_die_again_and_again_end_the_server_with_a_sentence(start, wait_until):
    server = start("--workers", "2")

    def killed():
        for pid in server.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return server.process.poll() is not None

    wait_until(killed)
    assert server.ended() == 2
    assert "The workers die as soon as they start" in "".join(server.log)
    assert "Traceback" not in "".join(server.log)


@linux_only
def test_workers_do_not_outlive_the_process_that_started_them(start, wait_until):
    server = start("--workers", "2")
    workers = wait_until(lambda: server.workers() if len(server.workers()) == 2 else [])
    server.process.kill()
    server.ended()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


@linux_only
def test_with_workers_a_running_call_may_finish_after_sigterm(start, world, held):
    server = start("--workers", "2")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.call, "get_content", {"url": held})
        assert world.asked.acquire(timeout=10)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1)
        with pytest.raises(OSError):  # nobody new is let in, nor left waiting
            server.rpc("tools/list")
        world.let_go.set()
        assert "says something new" in running.result().text
    assert server.ended() == 0
    assert "Traceback" not in "".join(server.log)


@pytest.mark.parametrize("count", ["0", "-1"])
def test_no_workers_at_all_is_a_mistake(count):
    code, said = refused_start({}, "--port", "0", "--workers", count)
    assert code == 2
    assert "--workers takes a whole number from 1 up." in said


@linux_only
def test_workers_do_not_listen_beside_another_server(start):
    server = start("--workers", "2")
    code, said = refused_start({}, "--port", str(server.port), "--workers", "2")
    assert code == 2
    assert "Cannot listen" in said


# --- load -------------------------------------------------------------------------------------------------------------


class FaultyWorld(World):
    """Providers and pages of which every twentieth request fails, each time in another way."""

    FAULTS = (
        lambda request: (500, {}, "down"),
        lambda request: request.reset(),
        lambda request: (200, {"Content-Type": "application/json"}, '{"organic": [{"title"'),
        lambda request: (429, {"Retry-After": "60"}, "{}"),
        lambda request: request.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n{"),
    )

    def __init__(self):
        self.counts = {}
        self.broken = set()
        self.injected = []
        self.lock = threading.Lock()
        super().__init__()

    def answer(self, request):
        kind = request.path if request.path in SEARCHES else "page"
        with self.lock:
            number = self.counts[kind] = self.counts.get(kind, 0) + 1
            # Never twice for one page: a connection that breaks off twice is nothing that a chain can mend.
            faulty = number % 20 == 7 and request.path not in self.broken
            if faulty:
                self.injected.append(kind)
                self.broken |= {request.path} if kind == "page" else set()
        time.sleep(0.05)
        if not faulty:
            return super().answer(request)
        # A page has no second source here, but a connection that breaks off deserves a second try.
        return request.reset() if kind == "page" else self.FAULTS[number // 20 % len(self.FAULTS)](request)

    def environ(self, **more):
        others = {"EXA_API_KEY": "key-of-exa-0123456789", "EXA_SEARCH_ENDPOINT": f"{self.url}/exa"}
        last = {"TAVILY_API_KEY": "key-of-tavily-0123456789", "TAVILY_SEARCH_ENDPOINT": f"{self.url}/tavily"}
        return super().environ(**others, **last, **more)


async def many_searches(server, count, wave):
    """The answers to `count` searches at the same time, each by a client of its own."""
    answers = []

    async def one(carrier, number):
        transport = streamable_http_client(server.url, http_client=carrier)
        async with Client(transport, mode="2026-07-28") as client:
            answers.append(await client.call_tool("web_search", {"query": f"load {wave} {number}"}))

    unlimited = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(timeout=60, limits=unlimited) as carrier, anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(one, carrier, number)
    return answers


@linux_only
@pytest.mark.parametrize("workers", [1, 2])
def test_two_hundred_searches_at_once_lose_nothing_and_leak_nothing(wait_until, workers):
    world = FaultyWorld()
    server = Server(world.environ(), "--workers", str(workers))
    try:
        anyio.run(many_searches, server, 5, "warm")
        sockets, threads = server.sockets(), server.threads()
        for wave in ("one", "two"):
            answers = anyio.run(many_searches, server, 200, wave)
            assert len(answers) == 200
            assert not [answer.content[0].text for answer in answers if answer.is_error]
            contents = [r["page_content"] for answer in answers for r in answer.structured_content["results"]]
            assert len(contents) == 600
            assert not [content for content in contents if "says something new" not in content]
            # What may stay: the SDK's idle workers, at most one per call in flight, and the pools of connections. Two
            # workers do not share each wave in the same way. Our own threads end when nobody needs them for a while.
            wait_until(lambda: server.threads() <= threads + 200 + 60 * (workers - 1), seconds=20)
            wait_until(lambda: server.sockets() <= sockets + 40 * workers)
        faults = {kind: world.injected.count(kind) for kind in sorted(set(world.injected))}
        print(
            f"400 searches, 1200 pages, faults injected: {faults}, errors: 0, threads: {threads} → {server.threads()}"
        )
        assert world.injected.count("/serper") >= 19
        assert world.injected.count("page") >= 55
        assert still_serves(server)
    finally:
        server.stop()
        world.let_go.set()
        world.site.close()
    assert not world.site.faults
