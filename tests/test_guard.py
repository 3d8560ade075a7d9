"""The address guard, attacked systematically: every way to name or reach a private address, through every door.

WAYS is the table. Each way is tried in the http step, behind redirects, as an answer of the DNS, in the browser's proxy,
in the browser worker, and from pages in a real Chromium; loaders get their share. Loopback stands for the private
network; its address 127.0.0.2, which the operator allows here, for the open internet.
"""

import contextlib
import ipaddress
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import certificates

import chrome_worker
import kindly_search
from kindly_search import AddressGuard, Kindly

PUBLIC = "127.0.0.2"
#: What was blocked, and what had to pass and did.
COUNTS = {"refusals": 0, "controls": 0}


@pytest.fixture(scope="module", autouse=True)
def _counts_are_printed(request):
    yield
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(
            f"\naddress guard: {len(WAYS)} ways to name a private address and {len(PAGE_WAYS)} ways from a page "
            f"({len(TAKEN)} of them with a control); "
            f"{COUNTS['refusals']:,} attempts blocked, {COUNTS['controls']:,} controls passed"
        )


# ----------------------------------------------------------------------------
# The table
# ----------------------------------------------------------------------------


def spellings(text):
    """Every way to write an IPv4 address that some system reads."""
    address = ipaddress.IPv4Address(text)
    number, parts = int(address), [int(part) for part in text.split(".")]
    a, b, c, d = parts
    high, low = number >> 16, number & 0xFFFF
    inverted = number ^ 0xFFFFFFFF
    return {
        "plain": text,
        "trailing dot": f"{text}.",
        "decimal": str(number),
        "hexadecimal": hex(number),
        "hexadecimal in capitals": f"0X{number:X}",
        "octal": f"0{number:o}",
        "octal with many zeros": f"0000000{number:o}",
        "dotted hexadecimal": ".".join(hex(part) for part in parts),
        "dotted octal": ".".join(f"0{part:o}" for part in parts),
        "mixed bases": f"{a:#x}.{b}.0{c:o}.{d}",
        "two parts": f"{a}.{(b << 16) + (c << 8) + d}",
        "three parts": f"{a}.{b}.{(c << 8) + d}",
        "percent-encoded": "".join(f"%{ord(char):02x}" for char in text),
        "full-width digits": "".join(chr(ord(char) + 0xFEE0) if char.isdigit() else char for char in text),
        "ideographic dots": text.replace(".", "。"),
        "circled digits": "".join(chr(0x245F + int(char)) if char in "123456789" else char for char in text),
        "behind a user name": f"example.com@{text}",
        "behind a user name and password": f"example.com:80@{text}",
        "behind an encoded slash": f"example.com%2f@{text}",
        "IPv4-mapped": f"[::ffff:{text}]",
        "IPv4-mapped in hexadecimal": f"[::ffff:{high:x}:{low:x}]",
        "IPv4-mapped in full": f"[0:0:0:0:0:ffff:{high:x}:{low:x}]",
        "IPv4-compatible": f"[::{text}]",
        "IPv4-translated": f"[::ffff:0:{text}]",
        "NAT64": f"[64:ff9b::{text}]",
        "local-use NAT64": f"[64:ff9b:1::{text}]",
        "6to4": f"[2002:{high:x}:{low:x}::1]",
        "Teredo": f"[2001:0:4136:e378:8000:63bf:{inverted >> 16:x}:{inverted & 0xFFFF:x}]",
        "ISATAP": f"[2001:4860:4860::5efe:{text}]",
        "global ISATAP": f"[2001:4860:4860:0:200:5efe:{text}]",
    }


NETWORKS = {
    "this network": "0.1.2.3",
    "unspecified": "0.0.0.0",
    "unspecified, short": "0",
    "loopback, elsewhere": "127.255.255.254",
    "private A": "10.255.0.1",
    "private B": "172.31.255.255",
    "private C": "192.168.0.1",
    "carrier-grade NAT": "100.64.0.1",
    "link-local": "169.254.0.1",
    "protocol assignments": "192.0.0.8",
    "documentation": "203.0.113.5",
    "6to4 relay": "192.88.99.1",
    "benchmarks": "198.18.0.1",
    "multicast": "224.0.0.251",
    "reserved": "240.0.0.1",
    "broadcast": "255.255.255.255",
    "IPv6 loopback": "[::1]",
    "IPv6 loopback in full": "[0000:0000:0000:0000:0000:0000:0000:0001]",
    "IPv6 unspecified": "[::]",
    "IPv6 link-local": "[fe80::1]",
    "IPv6 link-local with a zone": "[fe80::1%25eth0]",
    "IPv6 unique local": "[fd12:3456:789a::1]",
    "IPv6 site-local": "[fec0::1]",
    "IPv6 multicast": "[ff02::1]",
    "IPv6 documentation": "[2001:db8::1]",
    "IPv6 discard": "[100::1]",
}
NAMES = {
    "localhost": "localhost",
    "localhost in capitals": "LocalHost",
    "localhost with a dot": "localhost.",
    "localhost in full-width letters": "ｌｏｃａｌｈｏｓｔ",
    "localhost percent-encoded": "%6cocalhost",
    "below localhost": "anything.localhost",
    "localhost.localdomain": "localhost.localdomain",
    "mDNS": "printer.local",
    "a name without a dot": "intranet",
    "a router": "router.lan",
    "a home": "nas.home.arpa",
    "an intranet": "wiki.intranet",
}
METADATA = {
    "AWS, GCP, Azure, DigitalOcean": "169.254.169.254",
    "AWS by IPv6": "[fd00:ec2::254]",
    "AWS containers": "169.254.170.2",
    "AWS pods": "169.254.170.23",
    "GCP by name": "metadata.google.internal",
    "GCP by short name": "metadata",
    "GCP by IPv6": "[fd20:ce::254]",
    "Alibaba": "100.100.100.200",
    "Oracle": "192.0.0.192",
    "Azure's wire server": "168.63.129.16",
    "OpenStack by IPv6": "[fe80::a9fe:a9fe]",
    "Kubernetes": "kubernetes.default.svc.cluster.local",
    "Docker": "host.docker.internal",
    "Hetzner": "instance-data.ec2.internal",
}

#: Name → host as it stands in a URL.
WAYS = {
    **{f"{text}, {how}": host for text in ("127.0.0.1", "169.254.169.254", "10.0.0.1") for how, host in spellings(text).items()},
    **NETWORKS,
    **NAMES,
    **{f"metadata: {name}": host for name, host in METADATA.items()},
}  # fmt: skip

#: Each host once: what was read a moment ago comes from the cache.
HOSTS = list(dict.fromkeys(WAYS.values()))

#: The addresses themselves, as a name server would give them.
PRIVATE_ADDRESSES = sorted(
    {
        str(address)
        for host in WAYS.values()
        for address in [kindly_search.ip_literal(host.rpartition("@")[2].strip("[]").replace("%25", "%").rstrip(".").lower())]
        if address is not None
    }
)  # fmt: skip

#: Hosts that look like the above and are not.
CONTROLS = [
    "8.8.8.8", "1.1.1.1", "9.255.255.255", "11.0.0.1", "100.63.255.255", "100.128.0.1", "126.255.255.255", "128.0.0.1", "169.253.255.255", "169.255.0.1", "172.15.255.255", "172.32.0.1",
    "192.167.255.255", "192.169.0.1", "198.17.255.255", "198.20.0.1", "223.255.255.255", "134744072", "0x08080808", "010.010.010.010", "[2606:4700:4700::1111]", "[2001:4860:4860::8888]",
    "[::ffff:8.8.8.8]", "[64:ff9b::8.8.8.8]", "[2002:808:808::1]", "example.com", "localhost.example.com", "127.0.0.1.example.com", "internal.example.com", "local.example", "metadata.example",
    "10.example.com", "xn--bcher-kva.example", "bücher.example", "my-localhost.dev", "a.b.c.d.e.example.co.uk",
]  # fmt: skip


def test_the_table_has_enough_ways():
    assert len(WAYS) >= 60 and len(set(WAYS.values())) >= 60 and len(PRIVATE_ADDRESSES) >= 40


def resolving(**names):
    """A name server that knows these names; a list of lists is given out one answer at a time, the last for ever."""
    asked = dict.fromkeys(names, 0)

    def resolve(host, port, *arguments, **options):
        if host not in names:
            raise OSError(host)
        asked[host] += 1
        answers = names[host] if isinstance(names[host][0], list) else [names[host]]
        addresses = answers[min(asked[host], len(answers)) - 1]
        family = socket.AF_INET6 if ":" in addresses[0] else socket.AF_INET
        return [(family, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    resolve.asked = asked
    return resolve


# ----------------------------------------------------------------------------
# Servers
# ----------------------------------------------------------------------------


def _both_sockets(address, port):
    """A TCP and a UDP socket on one port, or nothing where the second one is taken."""
    server = socket.create_server((address, port), backlog=256)
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        datagrams.bind((address, server.getsockname()[1]))
        return server, datagrams
    except OSError:
        server.close()
        datagrams.close()
        return None


class Canary:
    """Listens where nobody may come, over TCP and UDP, and notes whoever does."""

    def __init__(self, address="127.0.0.1", port=0):
        self.heard = []
        self.server, self.datagrams = next(filter(None, (_both_sockets(address, port) for _ in range(20))))
        self.port = self.server.getsockname()[1]
        self.url = f"http://{address}:{self.port}"
        for loop in (self._listen, self._listen_udp):
            threading.Thread(target=loop, daemon=True).start()

    def _listen(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.server.accept()
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client):
        with client, contextlib.suppress(OSError):
            client.settimeout(2)
            line = client.recv(65536).partition(b"\r\n")[0].decode("latin-1")
            self.heard.append(line or "a connection")
            client.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"
            )

    def _listen_udp(self):
        with contextlib.suppress(OSError):
            while True:
                self.datagrams.recvfrom(2048)
                self.heard.append("a datagram")

    def names(self):
        """The ways that led here, by the last part of the path they asked for."""
        return {line.split(" ")[1].rpartition("/")[2].partition("?")[0] for line in self.heard if line.count(" ") >= 2}

    def close(self):
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        self.datagrams.close()


@pytest.fixture
def canary():
    canary = Canary()
    yield canary
    canary.close()


class Public:
    """A web server on the address that stands for the open internet; `routes` maps paths to (status, headers, body)."""

    def __init__(self, port=0):
        self.routes, self.asked = {}, []
        try:
            self.server = socket.create_server((PUBLIC, port), backlog=256)
        except OSError:
            pytest.skip(f"{PUBLIC} is not an address of this machine")
        self.port = self.server.getsockname()[1]
        self.url = f"http://{PUBLIC}:{self.port}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.server.accept()
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client):
        with client, contextlib.suppress(OSError, IndexError):
            client.settimeout(5)
            path = client.recv(65536).decode("latin-1").split(" ")[1]
            self.asked.append(path)
            route = self.routes.get(path.partition("?")[0], (404, {}, "not here"))
            status, headers, body = route(path) if callable(route) else route
            data = body.encode()
            given = {
                "Content-Type": "text/html; charset=utf-8",
                "Content-Length": len(data),
                "Connection": "close",
                **headers,
            }
            head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
            client.sendall(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + data)

    def close(self):
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()


@pytest.fixture
def public():
    public = Public()
    yield public
    public.close()


@pytest.fixture
def reading():
    """Makes a Kindly that reads pages by plain HTTP, with a guard of one's own."""
    made = []

    def make(*, allow="", resolve=resolving(), **environ):
        made.append(Kindly.from_env({"KINDLY_BROWSER_ENABLED": "false", "KINDLY_CONTENT_CHAIN": "http", **environ}))
        made[-1].http.guard = AddressGuard(allow, resolve=resolve)  # before the first connection takes it
        return made[-1]

    yield make
    for kindly in made:
        kindly.close()


def assert_refused(report):
    COUNTS["refusals"] += 1
    assert report.failure in ("address not allowed", "invalid input"), report.page_content
    assert report.page_content.startswith("_Could not read this page: ")


# ----------------------------------------------------------------------------
# The http step
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_private_address_is_not_read_however_it_is_written(reading, way):
    for url in (f"http://{WAYS[way]}/x", f"https://{WAYS[way]}/x", f"http://{WAYS[way]}:8080/latest/meta-data/"):
        assert_refused(reading().get_content(url))


def test_the_spellings_of_loopback_do_lead_there_where_all_is_allowed(canary):
    """The control of the test above: these are no spellings that nobody could use anyway."""
    allowed = AddressGuard("*")
    reached = 0
    for how, host in spellings("127.0.0.1").items():
        target = allowed.target(f"http://{host}:{canary.port}/")
        literal = kindly_search.ip_literal(target.host)
        inner = literal if literal.version == 4 else kindly_search._embedded_ipv4(literal)
        reached += str(inner) == "127.0.0.1"
        COUNTS["controls"] += 1
        assert literal is not None, how
    assert reached >= 28


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_leads_to_a_private_address(public, canary, reading, status):
    public.routes["/move"] = lambda path: (status, {"Location": path.partition("?")[2]}, "")
    kindly = reading(allow=PUBLIC)
    for host in HOSTS:
        public.asked.clear()
        assert_refused(kindly.get_content(f"{public.url}/move?http://{host}:{canary.port}/"))
        assert public.asked, "the redirect itself must have been seen"
    assert canary.heard == []


@pytest.mark.parametrize(
    "location",
    ["//127.0.0.1:{p}/", "http:127.0.0.1:{p}", "http:/127.0.0.1:{p}", "http:\\\\127.0.0.1:{p}\\", "/\\127.0.0.1:{p}/", "\t//127.0.0.1:{p}/", "http://127.0.0.1:{p}#@{public}/", "http://{public}@127.0.0.1:{p}/", "http://{public}\\@127.0.0.1:{p}/", "http://{public};@127.0.0.1:{p}/", "HTTP://127.0.0.1:{p}/", "http://127.0.0.1:{p}?@{public}/", "http:///127.0.0.1:{p}/", "http://{public}%2f@127.0.0.1:{p}/", "file:///etc/passwd", "gopher://127.0.0.1:{p}/"],
)  # fmt: skip
def test_no_twisted_location_leads_to_a_private_address(public, canary, reading, location):
    where = location.replace("{p}", str(canary.port)).replace("{public}", f"{PUBLIC}:{public.port}")
    public.routes["/move"] = (302, {"Location": where}, "")
    report = reading(allow=PUBLIC).get_content(public.url + "/move")
    COUNTS["refusals"] += 1
    assert report.failure and canary.heard == [] and public.asked[0] == "/move"


def test_a_chain_of_redirects_is_checked_at_every_hop(public, canary, reading):
    for i in range(8):
        public.routes[f"/{i}"] = (302, {"Location": f"/{i + 1}"}, "")
    public.routes["/8"] = (307, {"Location": canary.url}, "")
    assert_refused(reading(allow=PUBLIC).get_content(public.url + "/0"))
    assert canary.heard == [] and len(public.asked) == 9


@pytest.mark.parametrize("address", PRIVATE_ADDRESSES)
def test_no_name_leads_to_a_private_address_whatever_else_it_resolves_to(reading, address):
    for answer in (
        [address],
        ["8.8.8.8", address],
        [address, "8.8.8.8"],
        ["8.8.8.8", "2606:4700::1", address, "1.1.1.1"],
    ):
        assert_refused(reading(resolve=resolving(**{"nice.example": answer})).get_content("http://nice.example/"))


def test_an_answer_that_changes_after_the_check_does_not_count(public, canary, reading):
    resolve = resolving(**{"rebind.example": [[PUBLIC], ["127.0.0.1"]]})
    public.routes["/"] = (200, {}, "<p>" + "From the address that was checked. " * 20)
    kindly = reading(allow=PUBLIC, resolve=resolve)
    report = kindly.get_content(f"http://rebind.example:{public.port}/")
    assert "From the address that was checked" in report.page_content and resolve.asked["rebind.example"] == 1
    COUNTS["controls"] += 1
    assert_refused(kindly.get_content(f"http://rebind.example:{canary.port}/again"))
    assert canary.heard == []


def test_a_redirect_to_its_own_name_is_checked_again(public, canary, reading):
    resolve = resolving(**{"rebind.example": [[PUBLIC], ["127.0.0.1"]]})
    public.routes["/"] = (302, {"Location": f"http://rebind.example:{canary.port}/again"}, "")
    assert_refused(reading(allow=PUBLIC, resolve=resolve).get_content(f"http://rebind.example:{public.port}/"))
    assert canary.heard == [] and public.asked == ["/"]


def test_a_search_result_that_names_a_private_address_is_a_note(serve, reading, canary):
    hits = [{"url": f"http://{host}:{canary.port}/", "title": "T", "content": "C"} for host in HOSTS[:60]]
    pages = itertools.count(0, 10)

    def search(request):
        start = next(pages)
        return 200, {"Content-Type": "application/json"}, json.dumps({"results": hits[start : start + 10]})

    kindly = reading(SEARXNG_URL=serve(search).url)
    seen = 0
    for _ in range(6):
        for result in kindly.web_search("q", 10).results:
            COUNTS["refusals"] += 1
            seen += 1
            assert result.page_content.startswith("_Could not read this page: ")
    assert seen > 40 and canary.heard == []


@pytest.mark.parametrize("host", CONTROLS)
def test_what_only_looks_private_passes(host):
    guard = AddressGuard(resolve=lambda host, port, **options: [(2, 1, 6, "", ("93.184.215.14", port))])
    target = guard.target(f"https://{host}/x")
    COUNTS["controls"] += 1
    assert guard.addresses(target.host, target.port)


def test_a_public_page_is_read_by_address_by_name_and_behind_redirects(public, reading):
    public.routes["/"] = (200, {}, "<p>" + "The open internet says hello. " * 20)
    public.routes["/move"] = (301, {"Location": f"http://nice.example:{public.port}/"}, "")
    kindly = reading(allow=PUBLIC, resolve=resolving(**{"nice.example": [PUBLIC]}))
    for url in (f"{public.url}/", f"http://nice.example:{public.port}/", f"{public.url}/move"):
        COUNTS["controls"] += 1
        assert "The open internet says hello" in kindly.get_content(url).page_content


# ----------------------------------------------------------------------------
# Loaders
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "url",
    ["https://github.com/o/r/issues/1", "https://github.com/o/r", "https://gist.github.com/u/0123456789abcdef0123456789abcdef", "https://stackoverflow.com/questions/11/t"],
)  # fmt: skip
def test_an_api_that_redirects_a_loader_does_not_lead_to_a_private_address(serve, canary, reading, status, url):
    site = serve(lambda request: (status, {"Location": f"{canary.url}{request.path}"}, ""))
    kindly = reading(GITHUB_API_URL=site.url, GITHUB_TOKEN="ghp_0123456789abcdef", STACKEXCHANGE_API_URL=site.url)
    report = kindly.get_content(url)
    COUNTS["refusals"] += 1
    assert report.failure and canary.heard == [] and site.requests


@pytest.mark.parametrize("suffix", ["@{c}/", ".evil.example/", "{c}/", ":80@{c}/x", "\\@{c}/"])
def test_an_api_that_redirects_to_something_that_begins_like_itself_is_not_followed(serve, canary, reading, suffix):
    place = suffix.replace("{c}", f"127.0.0.1:{canary.port}")
    site = serve(lambda request: (301, {"Location": f"{site.url}{place}"}, ""))
    kindly = reading(GITHUB_API_URL=site.url, GITHUB_TOKEN="ghp_0123456789abcdef")
    assert kindly.get_content("https://github.com/o/r/issues/1").failure
    COUNTS["refusals"] += 1
    assert canary.heard == [] and {request.headers["Host"] for request in site.requests} == {site.host}


def test_the_address_of_a_gists_file_passes_the_guard(serve, canary, reading):
    gists = {f"{number:032x}": host for number, host in enumerate(HOSTS)}

    def gist(request):
        host = gists[request.path.rpartition("/")[2]]
        file = {"filename": "a.py", "truncated": True, "content": "x", "raw_url": f"http://{host}:{canary.port}/raw"}
        return 200, {"Content-Type": "application/json"}, json.dumps({"files": {"a.py": file}})

    site = serve(gist)
    kindly = reading(GITHUB_API_URL=site.url)
    for name in gists:
        report = kindly.get_content(f"https://gist.github.com/u/{name}")
        assert "raw" not in report.page_content.partition("Source:")[0]
    assert len(site.requests) == len(HOSTS)
    COUNTS["refusals"] += len(HOSTS)
    assert canary.heard == []


#: A page of each loader whose API has a fixed address, with the hosts that it asks.
FIXED = {
    "https://news.ycombinator.com/item?id=1": "hn.algolia.com",
    "https://en.wikipedia.org/wiki/Example": "en.wikipedia.org",
    "https://arxiv.org/abs/2001.00001": "export.arxiv.org",
    "https://github.com/o/r/blob/main/a.py": "raw.githubusercontent.com",
}


@pytest.mark.parametrize("url", FIXED)
def test_a_loaders_host_that_resolves_privately_is_not_asked(reading, canary, url):
    names = {host: ["127.0.0.1"] for host in (*FIXED.values(), "news.ycombinator.com", "arxiv.org", "github.com")}
    resolve = resolving(**names)
    report = reading(resolve=resolve, GITHUB_API_URL="http://127.0.0.1:9").get_content(url)
    assert_refused(report)
    assert resolve.asked[FIXED[url]] and canary.heard == []


class Tls:
    """A proxy that answers for every host, with a certificate of its own authority, by redirecting."""

    def __init__(self, folder, location):
        self.location, self.asked = location, []
        hosts = (*FIXED.values(), "news.ycombinator.com", "arxiv.org", "github.com")
        self.authority, self._context = certificates(folder, [f"DNS:{host}" for host in hosts])
        self.server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.server.accept()
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client):
        with contextlib.suppress(OSError, IndexError), client:
            client.settimeout(5)
            host = client.recv(65536).split(b" ")[1].decode()
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            with self._context.wrap_socket(client, server_side=True) as secure:
                path = secure.recv(65536).split(b" ")[1].decode()
                self.asked.append(host)
                status, where = self.location(path)
                head = f"HTTP/1.1 {status} X\r\nLocation: {where}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                secure.sendall(head.encode())

    def close(self):
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()


def test_the_sites_own_apis_redirect_no_loader_to_a_private_address(tmp_path, canary, reading):
    statuses = itertools.cycle([301, 302, 303, 307, 308])
    hosts = itertools.cycle(HOSTS)
    proxy = Tls(tmp_path, lambda path: (next(statuses), f"http://{next(hosts)}:{canary.port}/"))
    try:
        for url in FIXED:
            for _ in range(10):
                kindly = reading(
                    HTTPS_PROXY=proxy.url, REQUESTS_CA_BUNDLE=proxy.authority, GITHUB_API_URL="http://127.0.0.1:9"
                )
                proxy.asked.clear()
                assert_refused(kindly.get_content(url))
                assert f"{FIXED[url]}:443" in proxy.asked, "the loader itself must have been redirected"
    finally:
        proxy.close()
    assert canary.heard == []


# ----------------------------------------------------------------------------
# The browser's doors
# ----------------------------------------------------------------------------


def through(proxy, request):
    """The first line that the browser's proxy answers."""
    host, _, port = proxy.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(request.encode("utf-8") + b"\r\nHost: x\r\n\r\n")
        return sock.recv(100).partition(b"\r\n")[0]


def test_the_browsers_proxy_opens_no_private_address(canary):
    proxy = chrome_worker.GuardProxy(AddressGuard(PUBLIC, resolve=resolving()))
    try:
        for host in HOSTS:
            for request in (f"GET http://{host}:{canary.port}/ HTTP/1.1", f"CONNECT {host}:{canary.port} HTTP/1.1"):
                COUNTS["refusals"] += 1
                assert b" 200" not in through(proxy, request), request
        for address in PRIVATE_ADDRESSES:
            for answer in ([address], ["8.8.8.8", address]):
                own = chrome_worker.GuardProxy(AddressGuard(resolve=resolving(**{"nice.example": answer})))
                COUNTS["refusals"] += 1
                assert b" 403" in through(own, "CONNECT nice.example:443 HTTP/1.1")
                own.close()
    finally:
        proxy.close()
    assert canary.heard == []


def test_the_browsers_proxy_connects_to_the_address_that_was_checked(public, canary):
    public.routes["/"] = (200, {}, "hello")
    resolve = resolving(**{"rebind.example": [[PUBLIC], ["127.0.0.1"]]})
    proxy = chrome_worker.GuardProxy(AddressGuard(PUBLIC, resolve=resolve))
    try:
        assert b" 200" in through(proxy, f"GET http://rebind.example:{public.port}/ HTTP/1.1")
        COUNTS["controls"] += 1
        assert b" 403" in through(proxy, f"GET http://rebind.example:{canary.port}/ HTTP/1.1")
        COUNTS["refusals"] += 1
    finally:
        proxy.close()
    assert canary.heard == []


class Worker:
    """chrome_worker.py in a process of its own whose name server is ours: NAMES is a JSON object of lists."""

    SCRIPT = (
        "import json, os, socket, sys; names = json.loads(os.environ['NAMES']); real = socket.getaddrinfo\n"
        "def look_up(host, port, *a, **k):\n"
        "    if host not in names: return real(host, port, *a, **k)\n"
        "    answer = names[host][0] if len(names[host]) == 1 else names[host].pop(0)\n"
        "    return [(socket.AF_INET, socket.SOCK_STREAM, 6, '', (address, port)) for address in answer]\n"
        "socket.getaddrinfo = look_up\n"
        "import chrome_worker; os._exit(chrome_worker.main(['--serve']))"
    )

    def __init__(self, names=None, **environ):
        kept = {
            name: os.environ[name] for name in ("PATH", "HOME", "SYSTEMROOT", "TMPDIR", "LANG") if name in os.environ
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**kept, "NAMES": json.dumps(names or {}), **environ},
            cwd=Path(chrome_worker.__file__).parent,
        )

    def ask(self, urls, timeout=12):
        """The answers for all the URLs, which are visited at the same time."""
        for number, url in enumerate(urls):
            self.process.stdin.write(json.dumps({"id": number, "url": url, "timeout": timeout}).encode() + b"\n")
        self.process.stdin.flush()
        answers = [json.loads(self.process.stdout.readline()) for _ in urls]
        return [answer for _, answer in sorted((answer["id"], answer) for answer in answers)]

    def close(self):
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(8)
        self.process.kill()
        self.process.wait(5)
        self.process.stdout.close()


def test_the_browser_worker_refuses_every_way_before_a_browser_starts():
    worker = Worker(KINDLY_BROWSER_EXECUTABLE_PATH="/nowhere")
    try:
        answers = worker.ask([f"http://{host}/" for host in WAYS.values()])
    finally:
        worker.close()
    for way, answer in zip(WAYS, answers, strict=True):
        COUNTS["refusals"] += 1
        assert answer.get("error") in ("address_not_allowed", "bad_request"), way


# ----------------------------------------------------------------------------
# From pages in Chromium
# ----------------------------------------------------------------------------

WORDS = "<p>" + "The quick brown fox jumps over the lazy dog. " * 12 + "</p>"

#: Ways within a page, by name; {c} is http://host:port of the canary, {h} its host:port.
MARKUP = {
    "img": "<img src='{c}/img'>",
    "srcset": "<img srcset='{c}/srcset 1x'>",
    "script": "<script src='{c}/script'></script>",
    "module": "<script type=module src='{c}/module'></script>",
    "stylesheet": "<link rel=stylesheet href='{c}/stylesheet'>",
    "css-import": "<style>@import url({c}/css-import);</style>",
    "css-background": "<div style='width:9px;height:9px;background:url({c}/css-background)'></div>",
    "font": "<style>@font-face{{font-family:f;src:url({c}/font)}}</style><p style='font-family:f'>x</p>",
    "iframe": "<iframe src='{c}/iframe'></iframe>",
    "nested-iframe": "<iframe srcdoc=\"<iframe src='{c}/nested-iframe'></iframe>\"></iframe>",
    "iframe-meta-refresh": "<iframe srcdoc=\"<meta http-equiv=refresh content='0;url={c}/iframe-meta-refresh'>\"></iframe>",
    "iframe-location": "<iframe srcdoc=\"<script>location='{c}/iframe-location'</script>\"></iframe>",
    "object": "<object data='{c}/object'></object>",
    "embed": "<embed src='{c}/embed'>",
    "video": "<video src='{c}/video' preload=auto></video>",
    "audio": "<audio src='{c}/audio' preload=auto></audio>",
    "poster": "<video poster='{c}/poster'></video>",
    "track": "<video><track default src='{c}/track'></video>",
    "svg-image": "<svg><image href='{c}/svg-image'/></svg>",
    "preload": "<link rel=preload as=fetch crossorigin href='{c}/preload'>",
    "modulepreload": "<link rel=modulepreload href='{c}/modulepreload'>",
    "prefetch": "<link rel=prefetch href='{c}/prefetch'>",
    "preconnect": "<link rel=preconnect href='{c}'><link rel=dns-prefetch href='{c}'>",
    "icon": "<link rel=icon href='{c}/icon'>",
    "manifest": "<link rel=manifest href='{c}/manifest'>",
    "speculation": '<script type=speculationrules>{{"prefetch":[{{"source":"list","urls":["{c}/speculation"]}}],"prerender":[{{"source":"list","urls":["{c}/speculation"]}}]}}</script>',
    "form": "<iframe name=t></iframe><form id=f1 target=t method=post action='{c}/form'></form><script>f1.submit()</script>",
    "ping": "<a id=a1 href='#x' ping='{c}/ping'>x</a><script>a1.click()</script>",
    "input-image": "<input type=image src='{c}/input-image'>",
}  # fmt: skip
SCRIPTS = {
    "fetch": "fetch('{c}/fetch',{{mode:'no-cors'}})",
    "fetch-post": "fetch('{c}/fetch-post',{{mode:'no-cors',method:'POST',body:'x',keepalive:true}})",
    "fetch-redirected": "fetch('/move?{c}/fetch-redirected',{{mode:'no-cors'}})",
    "iframe-redirected": "document.body.append(Object.assign(document.createElement('iframe'),{{src:'/move?{c}/iframe-redirected'}}))",
    "xhr": "{{let x=new XMLHttpRequest();x.open('GET','{c}/xhr');x.send()}}",
    "websocket": "new WebSocket('ws://{h}/websocket')",
    "eventsource": "new EventSource('{c}/eventsource')",
    "beacon": "navigator.sendBeacon('{c}/beacon','x')",
    "image-object": "new Image().src='{c}/image-object'",
    "import": "import('{c}/import').catch(()=>0)",
    "worker-fetch": "new Worker(URL.createObjectURL(new Blob([\"fetch('{c}/worker-fetch',{{mode:'no-cors'}})\"])))",
    "worker-import": "new Worker(URL.createObjectURL(new Blob([\"importScripts('{c}/worker-import')\"])))",
    "worker-websocket": "new Worker(URL.createObjectURL(new Blob([\"new WebSocket('ws://{h}/worker-websocket')\"])))",
    "shared-worker": "new SharedWorker(URL.createObjectURL(new Blob([\"fetch('{c}/shared-worker',{{mode:'no-cors'}})\"])))",
    "popup": "open('{c}/popup')",
    "document-write": "document.body.insertAdjacentHTML('beforeend',\"<iframe src='{c}/document-write'></iframe>\")",
    "webrtc": "{{let p=new RTCPeerConnection({{iceServers:[{{urls:'stun:{h}'}},{{urls:'turn:{h}?transport=tcp',username:'u',credential:'p'}}]}});p.createDataChannel('x');p.createOffer().then(o=>p.setLocalDescription(o))}}",
    "webtransport": "new WebTransport('https://{h}/webtransport').ready.catch(()=>0)",
    "css-object": "document.adoptedStyleSheets=[];CSS.supports('x:y');document.head.insertAdjacentHTML('beforeend',\"<link rel=stylesheet href='{c}/css-object'>\")",
    "service-worker": "navigator.serviceWorker&&navigator.serviceWorker.register('/sw.js').then(()=>navigator.serviceWorker.ready).then(r=>r.active.postMessage('{c}/service-worker'))",
}  # fmt: skip
#: Whole pages that lead elsewhere: body, or (status, headers).
MOVES = {
    **{str(status): (status, {"Location": "{c}/" + str(status)}) for status in (301, 302, 303, 307, 308)},
    "refresh-header": (200, {"Refresh": "0;url={c}/refresh-header"}),
    "meta-refresh": "<meta http-equiv=refresh content='0;url={c}/meta-refresh'>" + WORDS,
    "js-location": WORDS + "<script>location='{c}/js-location'</script>",
    "js-replace-later": WORDS + "<script>onload=()=>setTimeout(()=>location.replace('{c}/js-replace-later'),100)</script>",
    "js-top-form": WORDS + "<form id=f method=post action='{c}/js-top-form'></form><script>f.submit()</script>",
    "frameset": "<frameset cols='*'><frame src='{c}/frameset'></frameset>",
    "two-hops": (302, {"Location": "/301"}),
}  # fmt: skip
PAGE_WAYS = {**MARKUP, **SCRIPTS, **MOVES}
SERVICE_WORKER = (
    "self.onmessage=e=>fetch(e.data,{mode:'no-cors'}).catch(()=>0);self.onactivate=e=>e.waitUntil(clients.claim())"
)

#: Ways that our browser does not go even where all is allowed (pictures, media and fonts are not loaded; WebRTC, pop-ups and
#: the like are off). Nothing may come of them either, but they have no control and are not counted as blocked.
NEVER_TAKEN = set(
    "img srcset css-background font video audio poster track svg-image icon manifest image-object input-image"
    " preconnect speculation webrtc webtransport popup ping".split()
)
#: Ways that demonstrably lead there where the operator allows it.
TAKEN = set(PAGE_WAYS) - NEVER_TAKEN


def filled(template, canary):
    """The template with the canary's address in it."""
    return template.replace("{c}", canary.url).replace("{h}", canary.url[7:]).replace("{{", "{").replace("}}", "}")


def lay_traps(public, canary):
    """Puts all ways into few pages; the paths of these."""
    hosts = [host for how, host in spellings("127.0.0.1").items() if "user name" not in how and "slash" not in how]
    hosts += [
        "localhost",
        "LOCALHOST",
        "x.localhost",
        "localhost.",
        "0",
        "0.0.0.0",
        "private.example",
        "both.example",
        "rebind.example",
    ]
    fetches = "".join(
        f"fetch('http://{host}:{canary.port}/spelling-{i}',{{mode:'no-cors'}}).catch(()=>0);"
        for i, host in enumerate(hosts)
    )
    wait = "<script>fetch('/slow')</script>"
    scripts = "".join(f"<script>try{{{filled(script, canary)}}}catch(e){{}}</script>" for script in SCRIPTS.values())
    public.routes.update(
        {
            "/markup": (200, {}, WORDS + "".join(filled(part, canary) for part in MARKUP.values()) + wait),
            "/scripts": (200, {}, WORDS + scripts + wait),
            "/spellings": (200, {}, f"{WORDS}<script>{fetches}</script>{wait}"),
            "/slow": lambda path: time.sleep(1.2) or (200, {}, "slow"),
            "/move": lambda path: (302, {"Location": path.partition("?")[2]}, ""),
            "/sw.js": (200, {"Content-Type": "text/javascript"}, SERVICE_WORKER),
        }
    )
    for name, move in MOVES.items():
        status, headers = (200, {}) if isinstance(move, str) else move
        body = filled(move, canary) if isinstance(move, str) else WORDS
        public.routes[f"/{name}"] = (status, {key: filled(value, canary) for key, value in headers.items()}, body)
    return ["/markup", "/scripts", "/spellings", *(f"/{name}" for name in MOVES)]


FAKE_NAMES = {
    "private.example": [["127.0.0.1"]],
    "both.example": [[PUBLIC, "127.0.0.1"]],
    "rebind.example": [[PUBLIC], ["127.0.0.1"]],
    "nice.example": [[PUBLIC]],
}


@pytest.mark.chrome
def test_no_way_leads_from_a_page_in_chromium_to_a_private_address(public, canary):
    paths = lay_traps(public, canary)
    worker = Worker(FAKE_NAMES, KINDLY_ALLOW_PRIVATE_HOSTS=PUBLIC)
    try:
        answers = worker.ask([public.url + path for path in paths], timeout=25)
        named = worker.ask(
            [f"http://private.example:{canary.port}/", f"http://both.example:{canary.port}/"], timeout=25
        )
        time.sleep(0.5)
    finally:
        worker.close()
    assert canary.heard == []
    assert {path.partition("?")[0] for path in public.asked} >= set(paths), "each page must have been loaded"
    by_path = dict(zip(paths, answers, strict=True))
    for path in ("/markup", "/scripts", "/spellings"):
        assert "quick brown fox" in by_path[path].get("html", ""), "a refused part costs the page nothing"
    for path in ("/301", "/302", "/303", "/307", "/308", "/two-hops", "/js-location"):
        assert by_path[path].get("error") == "address_not_allowed", path
    assert [answer.get("error") for answer in named] == ["address_not_allowed"] * 2
    COUNTS["refusals"] += len(TAKEN) + len(named)


@pytest.mark.chrome
def test_the_same_ways_lead_there_where_the_operator_allows_it(public, canary):
    """The control: without it the test above could pass because the pages do nothing at all."""
    paths = lay_traps(public, canary)
    worker = Worker(FAKE_NAMES, KINDLY_ALLOW_PRIVATE_HOSTS="*")
    try:
        worker.ask([public.url + path for path in paths], timeout=25)
        [nice] = worker.ask([f"http://nice.example:{public.port}/scripts"], timeout=25)
        time.sleep(0.5)
    finally:
        worker.close()
    assert "quick brown fox" in nice["html"]
    reached = canary.names()
    expected = TAKEN - {"two-hops"}  # which arrives as 301
    assert reached >= expected, f"not reached: {sorted(expected - reached)}"
    assert len([name for name in reached if name.startswith("spelling-")]) >= 20
    COUNTS["controls"] += len(reached)
