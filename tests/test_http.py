"""Section 4, HTTP: the one guarded door to the network, against a real server on loopback."""

import contextlib
import gzip
import os
import socket
import threading
import time
import zlib

import pytest
from conftest import Site, certificates

from kindly_search import (
    AddressGuard,
    AddressNotAllowed,
    BadResponse,
    ConfigError,
    Deadline,
    Http,
    InvalidInput,
    Offline,
    PageFailed,
    SearchError,
    Settings,
    Timeout,
    Unreachable,
    parse_target,
)

PUBLIC = "93.184.216.34"

#: Every spelling of an address that is not of the open internet.
PRIVATE_HOSTS = [
    "127.0.0.1",
    "127.0.0.1.",
    "127.1",
    "127.0.1",
    "2130706433",
    "0x7f000001",
    "0x7F.0.0.1",
    "0177.0.0.1",
    "017700000001",
    "0x7f.1",
    "127.0.0.0x1",
    "%31%32%37.0.0.1",
    "１２７.0.0.1",
    "127。0。0。1",
    "①②⑦.0.0.1",
    "0",
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "10.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "0300.0250.1.1",
    "169.254.169.254",
    "0xa9fea9fe",
    "2852039166",
    "100.64.0.1",
    "100.100.100.200",
    "192.0.0.192",
    "192.0.2.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::ffff:169.254.169.254]",
    "[::127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[64:ff9b::169.254.169.254]",
    "[64:ff9b:1::1]",
    "[2002:7f00:1::]",
    "[2002:a9fe:a9fe::1]",
    "[2001:0:4136:e378:8000:63bf:80ff:fffe]",
    "[2001:4860::5efe:10.0.0.1]",
    "[fe80::1]",
    "[fe80::1%25eth0]",
    "[fc00::1]",
    "[fd00:ec2::254]",
    "[fec0::1]",
    "[ff02::1]",
    "[2001:db8::1]",
    "localhost",
    "LOCALHOST",
    "localhost.",
    "ｌocalhost",
    "app.localhost",
    "printer.local",
    "metadata.google.internal",
    "wiki.intranet",
    "router.lan",
    "nas.home.arpa",
    "localhost.localdomain",
    "intranet",
    "metadata",
    "example.com@10.0.0.1",
    "example.com%2f@10.0.0.1",
    "example.com:80@localhost",
]

#: URLs that make no sense, whoever sends them.
BAD_URLS = [
    "",
    "   ",
    None,
    42,
    "example.com",
    "//example.com/",
    "http:example.com",
    "http://",
    "http:///path",
    "https://?q=1",
    "http://:80/",
    "http://user@/",
    "ftp://example.com/",
    "file:///etc/passwd",
    "javascript:alert(1)",
    "data:text/html,hello",
    "gopher://example.com/",
    "http://exam ple.com/",
    "http://example.com/a b",
    "http://example.com/\tx",
    "http://example.com/\r\nHost: evil.example",
    "http://example.com/\x00",
    "http://example.com/\x7f",
    "http://example.com/\u2028x",
    "http://example.com\\@10.0.0.1/",
    "http:\\\\example.com\\",
    "http://example.com:0/",
    "http://example.com:99999/",
    "http://example.com:-1/",
    "http://example.com:http/",
    "http://[::1",
    "http://[not-an-address]/",
    "http://[::1%0d%0aHost:evil]/",
    "http://a..example/",
    "http://*.example.com/",
    "http://exam<ple.com/",
    "http://exam%0aple.com/",
    "http://\u202eexample.com/",
    "http://" + "ü" * 70 + ".example/",
    "http://example.com/" + "a" * 100_000,
]


def resolver(*answers):
    """A look-up that gives each answer once, the last one for ever, and counts its calls."""
    calls = []

    def resolve(host, port, **kwargs):
        calls.append(host)
        addresses = answers[min(len(calls), len(answers)) - 1]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    resolve.calls = calls
    return resolve


@pytest.fixture
def make_http():
    """Makes an Http that may read from loopback and does not really sleep; all are closed at the end."""
    made = []

    def make(*, guard=None, sleep=lambda seconds: None, **settings):
        settings.setdefault("allow_private_hosts", "127.0.0.1")
        made.append(Http(Settings(**settings), guard=guard, sleep=sleep))
        return made[-1]

    yield make
    for http in made:
        http.close()


@pytest.fixture
def http(make_http):
    return make_http()


def within(seconds=5.0):
    return Deadline(seconds)


@contextlib.contextmanager
def takes_less_than(seconds):
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


# -- the address guard -------------------------------------------------------


@pytest.mark.parametrize("host", PRIVATE_HOSTS)
def test_a_private_address_is_refused_in_every_spelling(host, make_http):
    http = make_http(allow_private_hosts="")
    with pytest.raises(AddressNotAllowed, match=r"address not allowed: .* KINDLY_ALLOW_PRIVATE_HOSTS"):
        http.get(f"http://{host}/", deadline=within())


@pytest.mark.parametrize(
    "host",
    [
        "8.8.8.8",
        "134744072",
        "1.1.1.1",
        "[2606:4700:4700::1111]",
        "[::ffff:8.8.8.8]",
        "[64:ff9b::808:808]",
        "example.com",
    ],
)
def test_a_public_address_passes_the_guard(host):
    target = AddressGuard().target(f"https://{host}/")
    assert target.port == 443


def test_a_name_that_resolves_to_a_private_address_is_refused_before_connecting(make_http):
    guard = AddressGuard(resolve=resolver(["10.0.0.1"]))
    with pytest.raises(AddressNotAllowed, match=r"inside\.example is private"):
        make_http(guard=guard).get("http://inside.example/", deadline=within())


@pytest.mark.parametrize(
    "addresses", [[PUBLIC, "10.0.0.1"], ["10.0.0.1", PUBLIC], [PUBLIC, "::1"], [PUBLIC, "fe80::1%2"]]
)
def test_one_private_address_among_several_refuses_the_name(addresses, make_http):
    guard = AddressGuard(resolve=resolver(addresses))
    with pytest.raises(AddressNotAllowed):
        make_http(guard=guard).get("http://mixed.example/", deadline=within())


def test_the_connection_goes_to_the_address_that_was_checked(serve, make_http):
    """DNS rebinding: a second look-up would say 10.0.0.1, so there must not be one."""
    site = serve({"/": "the checked one"})
    resolve = resolver(["127.0.0.1"], ["10.0.0.1"])
    http = make_http(guard=AddressGuard("127.0.0.1", resolve=resolve))
    reply = http.get(f"http://rebinding.example:{site.port}/", deadline=within())
    assert reply.body == b"the checked one"
    assert resolve.calls == ["rebinding.example"]
    assert site.requests[0].headers["Host"] == f"rebinding.example:{site.port}"


def test_a_name_that_changes_its_mind_is_refused_at_the_next_connection(serve, make_http):
    site = serve({"/": (200, {"Connection": "close"}, "first")})
    http = make_http(guard=AddressGuard("127.0.0.1", resolve=resolver(["127.0.0.1"], ["127.0.0.2"])))
    url = f"http://rebinding.example:{site.port}/"
    assert http.get(url, deadline=within()).body == b"first"
    with pytest.raises(AddressNotAllowed):
        http.get(url, deadline=within())


def test_the_next_address_is_tried_when_the_first_does_not_answer(serve, make_http):
    site = serve({"/": "hello"})
    resolve = resolver(["127.0.0.9", "127.0.0.1"])
    http = make_http(guard=AddressGuard("127.0.0.0/8", resolve=resolve))
    assert http.get(f"http://two.example:{site.port}/", deadline=within()).body == b"hello"


def test_a_name_that_does_not_exist_is_unreachable(make_http):
    def resolve(host, port, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.raises(Unreachable, match=r"the host name nowhere\.example was not found"):
        make_http(guard=AddressGuard(resolve=resolve)).get("http://nowhere.example/", deadline=within())


def test_a_name_without_any_address_is_unreachable(make_http):
    with pytest.raises(Unreachable, match=r"empty\.example was not found"):
        make_http(guard=AddressGuard(resolve=resolver([]))).get("http://empty.example/", deadline=within())


@pytest.mark.parametrize(
    ("allow", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1/"),
        ("127.0.0.1", "http://2130706433/"),
        ("127.0.0.1:8080", "http://127.0.0.1:8080/"),
        ("127.0.0.0/8", "http://127.9.9.9/"),
        ("10.0.0.0/8, 192.168.0.0/16", "http://192.168.1.1:9000/"),
        ("localhost", "http://localhost:3000/"),
        ("LocalHost:3000", "http://LOCALHOST:3000/"),
        ("wiki.intranet", "https://wiki.intranet/page"),
        ("localhost:443", "https://localhost/"),
        ("::1", "http://[::1]:8080/"),
        ("[::1]", "http://[::1]:8080/"),
        ("[::1]:8080", "http://[::1]:8080/"),
        ("fd00::/8", "http://[fd00::1]/"),
        ("*", "http://169.254.169.254/"),
        ("*", "http://intranet/"),
    ],
)
def test_the_allow_list_opens_hosts_ports_networks_or_everything(allow, url):
    guard = AddressGuard(allow)
    assert guard.target(url).url


@pytest.mark.parametrize(
    ("allow", "url"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8081/"),
        ("127.0.0.1:8080", "http://127.0.0.1/"),
        ("127.0.0.1", "http://127.0.0.2/"),
        ("localhost", "http://127.0.0.1/"),
        ("localhost:3000", "http://localhost:3001/"),
        ("10.0.0.0/8", "http://192.168.1.1/"),
        ("intranet", "http://other/"),
        ("intranet", "http://wiki.intranet/"),
        ("[::1]:8080", "http://[::1]:8081/"),
        ("", "http://localhost/"),
        (" , ,", "http://localhost/"),
    ],
)
def test_the_allow_list_opens_nothing_else(allow, url):
    with pytest.raises(AddressNotAllowed):
        AddressGuard(allow).target(url)


def test_an_allowed_network_opens_names_that_resolve_into_it(serve, make_http):
    site = serve({"/": "inside"})
    http = make_http(guard=AddressGuard("127.0.0.0/8", resolve=resolver(["127.0.0.1"])))
    assert http.get(f"http://inside.example:{site.port}/", deadline=within()).body == b"inside"


def test_the_operators_endpoints_are_trusted(serve, make_http):
    site = serve({"/search": "{}"})
    http = make_http(allow_private_hosts="")
    assert http.api("POST", f"{site.url}/search", json={"q": "x"}, deadline=within()).json() == {}


# -- redirects ---------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "location",
    [
        "http://10.0.0.1/",
        "http://169.254.169.254/latest/meta-data/",
        "//localhost/",
        "http://[::ffff:10.0.0.1]/",
        "http://0x7f.2/",
    ],
)
def test_a_redirect_to_a_private_address_is_refused(status, location, serve, http):
    site = serve({"/": (status, {"Location": location}, "")})
    with pytest.raises(AddressNotAllowed):
        http.get(site.url, deadline=within())
    assert site.paths == ["/"]


def test_a_redirect_to_a_name_that_resolves_privately_is_refused(serve, make_http):
    site = serve({"/": (302, {"Location": "http://inside.example/"}, "")})
    http = make_http(guard=AddressGuard("127.0.0.1", resolve=resolver(["192.168.0.1"])))
    with pytest.raises(AddressNotAllowed, match=r"inside\.example"):
        http.get(site.url, deadline=within())


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "javascript:alert(1)", "ftp://example.com/", "http://a b\\c/", "http://["]
)
def test_a_redirect_to_something_unreadable_is_an_error_of_ours(location, serve, http):
    site = serve({"/": (302, {"Location": location}, "")})
    with pytest.raises(SearchError):
        http.get(site.url, deadline=within())


@pytest.mark.parametrize(
    ("location", "arrives_at"),
    [
        ("/there", "/there"),
        ("there", "/a/there"),
        ("../there", "/there"),
        ("?page=2", "/a/b?page=2"),
        ("//{host}/there", "/there"),
        ("http://{host}/there#fragment", "/there"),
        (" /there ", "/there"),
        ("/with space", "/with%20space"),
        ("/caf%C3%A9", "/caf%C3%A9"),
    ],
)
def test_a_location_may_be_relative(location, arrives_at, serve, http):
    site = serve(
        lambda request: (302, {"Location": location.format(host=site.host)}, "") if request.path == "/a/b" else "there"
    )
    reply = http.get(f"{site.url}/a/b", deadline=within())
    assert reply.body == b"there"
    assert site.paths == ["/a/b", arrives_at]
    assert reply.url == site.url + arrives_at


@pytest.mark.parametrize("raw", ["/café", "/日本"])
def test_a_location_may_be_raw_utf8(raw, serve, http):
    def route(request):
        if request.path != "/":
            return "arrived"
        return request.send(
            b"HTTP/1.1 302 Found\r\nConnection: close\r\nLocation: " + raw.encode() + b"\r\nContent-Length: 0\r\n\r\n"
        )

    site = serve(route)
    assert http.get(site.url, deadline=within()).body == b"arrived"
    assert site.paths[1] == "/" + "".join(f"%{byte:02X}" if byte > 127 else chr(byte) for byte in raw.encode()[1:])


def test_a_redirect_loop_ends(serve, http):
    site = serve({"/": (302, {"Location": "/"}, "")})
    with pytest.raises(PageFailed, match="too many redirects") as caught:
        http.get(site.url, deadline=within())
    assert caught.value.final
    assert len(site.requests) == 11


def test_ten_redirects_are_followed(serve, http):
    steps = {f"/{i}": (301, {"Location": f"/{i + 1}"}, "") for i in range(10)}
    site = serve({**steps, "/10": "arrived"})
    assert http.get(f"{site.url}/0", deadline=within()).body == b"arrived"


@pytest.mark.parametrize("status", [300, 304, 305, 306])
def test_other_3xx_answers_are_not_followed(status, serve, http):
    site = serve({"/": (status, {"Location": "/elsewhere"}, "")})
    assert http.get(site.url, deadline=within()).status == status
    assert site.paths == ["/"]


def test_a_redirect_without_a_location_is_the_answer(serve, http):
    site = serve({"/": (302, {}, "nowhere to go")})
    assert http.get(site.url, deadline=within()).body == b"nowhere to go"


def test_the_deadline_counts_for_all_redirects_together(serve, http):
    def route(request):
        time.sleep(0.15)
        return (302, {"Location": "/"}, "")

    site = serve(route)
    with takes_less_than(1.5), pytest.raises(Timeout):
        http.get(site.url, deadline=within(0.3))


def test_an_endpoint_that_redirects_is_not_followed_so_that_a_key_goes_to_its_owner_only(serve, http):
    other = serve({"/": "{}"})
    site = serve({"/search": (307, {"Location": other.url}, "")})
    reply = http.api("POST", f"{site.url}/search", headers={"X-API-KEY": "hunter2"}, json={}, deadline=within())
    assert reply.status == 307
    assert other.requests == []


def test_the_body_of_a_redirect_is_not_waited_for(serve, http):
    def stalling(request):
        request.send(b"HTTP/1.1 302 Found\r\nLocation: /there\r\nContent-Length: 9000000\r\n\r\nstart")
        request.hold()

    site = serve({"/": stalling, "/there": "arrived"})
    with takes_less_than(2):
        assert http.get(site.url, deadline=within()).body == b"arrived"


def test_the_cap_holds_for_the_body_of_a_redirect_too(serve, make_http):
    def endless(request):
        request.send(b"HTTP/1.1 302 Found\r\nLocation: /there\r\n\r\n")
        while True:
            request.send(b"more " * 1000)

    site = serve({"/": endless, "/there": "arrived"})
    http = make_http(max_download_bytes=100_000)
    with takes_less_than(2):
        assert http.get(site.url, deadline=within()).body == b"arrived"
        assert http.api("POST", site.url, json={}, deadline=within()).status == 302


# -- size --------------------------------------------------------------------


def test_the_body_is_cut_at_the_cap(serve, make_http):
    site = serve({"/": b"x" * 50_000})
    reply = make_http(max_download_bytes=10_000).get(site.url, deadline=within())
    assert reply.body == b"x" * 10_000
    assert reply.truncated


def test_a_body_of_exactly_the_cap_is_whole(serve, make_http):
    site = serve({"/": b"x" * 10_000})
    reply = make_http(max_download_bytes=10_000).get(site.url, deadline=within())
    assert len(reply.body) == 10_000
    assert not reply.truncated


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [("gzip", lambda data: gzip.compress(data, 9)), ("deflate", lambda data: zlib.compress(data, 9))],
)
def test_the_cap_counts_bytes_after_decompression(encoding, compress, serve, make_http):
    bomb = compress(bytes(30_000_000))
    assert len(bomb) < 200_000
    site = serve({"/": (200, {"Content-Encoding": encoding}, bomb)})
    with takes_less_than(3):
        reply = make_http(max_download_bytes=1_000_000).get(site.url, deadline=within(10))
    assert len(reply.body) == 1_000_000
    assert reply.truncated


def test_a_compressed_body_arrives_as_text(serve, http):
    site = serve({"/": (200, {"Content-Encoding": "gzip"}, gzip.compress(b"hello"))})
    assert http.get(site.url, deadline=within()).body == b"hello"


def test_a_body_that_lies_about_its_compression_is_a_bad_response(serve, http):
    site = serve({"/": (200, {"Content-Encoding": "gzip"}, b"this is not gzip")})
    with pytest.raises(BadResponse, match="cannot be decompressed"):
        http.get(site.url, deadline=within())


def test_an_endless_body_stops_at_the_cap(serve, make_http):
    def endless(request):
        request.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n")
        while True:
            request.send(b"more " * 1000)

    reply = make_http(max_download_bytes=100_000).get(serve(endless).url, deadline=within())
    assert len(reply.body) == 100_000


def test_a_type_that_is_not_wanted_is_not_downloaded(serve, http):
    def video(request):
        request.send(b"HTTP/1.1 200 OK\r\nContent-Type: Video/MP4; codecs=x\r\nContent-Length: 9000000\r\n\r\nstart")
        request.hold()

    asked = []
    with takes_less_than(2):
        reply = http.get(serve(video).url, wanted=lambda kind: bool(asked.append(kind)), deadline=within())
    assert asked == ["video/mp4"]
    assert (reply.status, reply.content_type, reply.body) == (200, "video/mp4", b"")


# -- time --------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"

#: Ways to hold a thread for ever.
SLOW_SERVERS = {
    "silence": lambda request: request.hold(),
    "silence after the head": lambda request: (request.send(HEAD + b"Content-Length: 5\r\n\r\n"), request.hold())[1],
    "dripping status line": lambda request: request.drip(HEAD * 50, every=0.05),
    "dripping headers": lambda request: (request.send(HEAD), request.drip(b"X-Drip: 1\r\n" * 100, every=0.02))[1],
    "dripping body": lambda request: (request.send(HEAD + b"\r\n"), request.drip(b"x" * 500, every=0.05))[1],
    "dripping counted body": lambda request: (
        request.send(HEAD + b"Content-Length: 500\r\n\r\n"),
        request.drip(b"x" * 500, every=0.05),
    )[1],
    "dripping chunks": lambda request: (
        request.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n"),
        request.drip(b"1\r\nx\r\n" * 100, every=0.02),
    )[1],
    "dripping chunk size": lambda request: (
        request.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n"),
        request.drip(b"0" * 500, every=0.05),
    )[1],
    "dripping gzip": lambda request: (
        request.send(HEAD + b"Content-Encoding: gzip\r\n\r\n"),
        request.drip(gzip.compress(bytes(range(256)) * 9), every=0.05),
    )[1],
    "dripping 100 Continue": lambda request: request.drip(b"HTTP/1.1 100 Continue\r\n\r\n" * 50, every=0.01),
}


@pytest.mark.parametrize("slow", SLOW_SERVERS.values(), ids=SLOW_SERVERS)
def test_the_deadline_holds_for_the_whole_answer_of_a_page(slow, serve, http):
    site = serve(slow)
    with takes_less_than(1.5), pytest.raises(Timeout, match=r"127\.0\.0\.1 did not"):
        http.get(site.url, deadline=within(0.3))
    assert len(site.requests) == 1


@pytest.mark.parametrize("name", ["silence", "dripping headers", "dripping body"])
def test_the_deadline_holds_for_the_whole_answer_of_an_endpoint(name, serve, http):
    with takes_less_than(1.5), pytest.raises(Timeout):
        http.api("POST", serve(SLOW_SERVERS[name]).url, json={}, deadline=within(0.3))


def test_the_deadline_holds_on_a_connection_that_is_used_again(serve, http):
    site = serve({"/fast": "ok", "/slow": SLOW_SERVERS["dripping body"]})
    http.get(f"{site.url}/fast", deadline=within(30))
    with takes_less_than(1.5), pytest.raises(Timeout):
        http.get(f"{site.url}/slow", deadline=within(0.3))
    assert len(site.connections) == 1


def test_a_late_sign_of_life_does_not_extend_the_deadline(serve, http):
    def late(request):
        request.send(HEAD + b"\r\n")
        time.sleep(0.7)
        request.send(b"x")
        request.hold()

    with takes_less_than(1.4), pytest.raises(Timeout):
        http.get(serve(late).url, deadline=within(1.0))


def test_a_slow_page_that_ends_in_time_is_read_to_its_end(serve, http):
    site = serve(lambda request: (request.send(HEAD + b"\r\n"), request.drip(b"slow but sure", every=0.03))[1])
    assert http.get(site.url, deadline=within(5)).body == b"slow but sure"


def test_nothing_is_sent_when_the_time_is_up_already(serve, http):
    site = serve({"/": "hello"})
    with pytest.raises(Timeout):
        http.get(site.url, deadline=within(0))
    assert site.requests == []


def test_a_deadline_may_only_become_sooner():
    clock = [100.0]
    deadline = Deadline(10, now=lambda: clock[0])
    assert deadline.sooner(3).remaining() == 3
    assert deadline.sooner(30).remaining() == 10
    clock[0] = 120.0
    assert deadline.remaining() == 0
    assert deadline.sooner(5).remaining() == 0


# -- broken connections ------------------------------------------------------


def test_a_reset_connection_is_tried_once_more(serve, make_http):
    pauses = []
    site = serve(lambda request: request.reset() if len(site.requests) == 1 else "second time lucky")
    assert make_http(sleep=pauses.append).get(site.url, deadline=within()).body == b"second time lucky"
    assert len(site.requests) == 2
    assert len(pauses) == 1
    assert 0 < pauses[0] < 0.5


def test_a_connection_that_is_reset_twice_is_given_up(serve, http):
    site = serve(lambda request: request.reset())
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1 broke off the connection"):
        http.get(site.url, deadline=within())
    assert len(site.requests) == 2


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nonly this",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1f4\r\nonly this",
    ],
    ids=["nothing at all", "counted body", "chunked body"],
)
def test_a_truncated_answer_is_not_taken_for_a_whole_one(sent, serve, http):
    site = serve(lambda request: request.send(sent))
    with pytest.raises(Unreachable, match="broke off"):
        http.get(site.url, deadline=within())
    assert len(site.requests) == 2


def test_an_api_call_is_not_repeated_behind_the_routers_back(serve, http):
    site = serve(lambda request: request.reset())
    with pytest.raises(Unreachable):
        http.api("POST", site.url, json={}, deadline=within())
    assert len(site.requests) == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x00\x01\x02\x03" * 10,
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X" * 70_000 + b"\r\n\r\n",
    ],
)
def test_a_server_that_does_not_speak_http_is_an_error_of_ours(garbage, serve, http):
    site = serve(lambda request: request.send(garbage))
    with pytest.raises(Unreachable):
        http.get(site.url, deadline=within())


def test_a_port_where_nobody_listens_is_unreachable(serve, http):
    site = serve({})
    site.close()
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1 refused the connection"):
        http.get(site.url, deadline=within())


@pytest.fixture
def plain_port():
    """A port that answers every connection with plain text, as an http server does to a TLS greeting."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                    connection.recv(10_000)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def test_https_to_a_plain_port_is_a_failed_secure_connection(plain_port, http):
    with pytest.raises(Unreachable, match=r"no secure connection to 127\.0\.0\.1"):
        http.get(f"https://127.0.0.1:{plain_port}/", deadline=within())


def test_a_silent_tls_handshake_ends_at_the_deadline(http):
    with socket.create_server(("127.0.0.1", 0)) as listener, takes_less_than(1.5), pytest.raises(Timeout):
        http.get(f"https://127.0.0.1:{listener.getsockname()[1]}/", deadline=within(0.3))


@pytest.fixture
def secure(tmp_path):
    """A site with TLS whose certificate holds for 127.0.0.1, and the file of its authority."""
    authority, context = certificates(tmp_path, ["IP:127.0.0.1"])
    site = Site({"/": (200, {"Connection": "close"}, "in confidence")}, tls=context)
    yield site, authority
    site.close()


def secure_http(authority=""):
    return Http(Settings(allow_private_hosts="127.0.0.1,localhost", ca_bundle=authority))


def test_a_certificate_of_a_trusted_authority_is_accepted(secure):
    site, authority = secure
    with contextlib.closing(secure_http(authority)) as http:
        assert http.get(site.url, deadline=within()).body == b"in confidence"


def test_a_certificate_of_an_unknown_authority_is_refused(secure):
    site, _ = secure
    with contextlib.closing(secure_http()) as http, pytest.raises(Unreachable, match="no secure connection"):
        http.get(site.url, deadline=within())
    assert not site.requests


def test_a_certificate_for_another_name_is_refused(secure):
    site, authority = secure
    with contextlib.closing(secure_http(authority)) as http, pytest.raises(Unreachable, match="no secure connection"):
        http.get(f"https://localhost:{site.port}/", deadline=within())
    assert not site.requests


def test_the_file_of_authorities_is_read_once_for_all_connections(secure):
    site, authority = secure
    with contextlib.closing(secure_http(authority)) as http:
        http.get(site.url, deadline=within())
        os.remove(authority)
        assert http.get(site.url, deadline=within()).body == b"in confidence"
    assert len(site.connections) == 2


def test_a_missing_file_of_authorities_is_a_sentence_that_names_the_variable(secure, tmp_path):
    site, _ = secure
    http = secure_http(str(tmp_path / "nowhere.pem"))
    with contextlib.closing(http), pytest.raises(ConfigError, match="REQUESTS_CA_BUNDLE"):
        http.get(site.url, deadline=within())


# -- what is sent ------------------------------------------------------------


@pytest.mark.parametrize("url", BAD_URLS, ids=lambda url: repr(url)[:40])
def test_a_bad_url_is_invalid_input_in_a_short_sentence(url, http):
    with pytest.raises(InvalidInput) as caught:
        http.get(url, deadline=within())
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "host", [".example.com", "-", "_", "a" * 64 + ".example", "example.com." * 30, "xn--", "xn--a.example", "[::1]x"]
)
def test_a_strange_host_name_is_an_error_of_ours_and_no_crash(host, make_http):
    http = make_http(guard=AddressGuard("127.0.0.1", resolve=lambda *args, **kwargs: []))
    with pytest.raises(SearchError):
        http.get(f"http://{host}/", deadline=within())


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("http://example.com", "http://example.com/"),
        ("  https://example.com/a  ", "https://example.com/a"),
        ("HTTPS://EXAMPLE.com/Path", "https://example.com/Path"),
        ("http://example.com:8080/x", "http://example.com:8080/x"),
        ("http://user:pass@example.com/x", "http://example.com/x"),
        ("http://10.0.0.1@example.com/", "http://example.com/"),
        ("http://example.com/x#fragment", "http://example.com/x"),
        ("http://example.com./", "http://example.com/"),
        ("http://münchen.example/straße", "http://xn--mnchen-3ya.example/stra%C3%9Fe"),
        ("http://xn--mnchen-3ya.example/", "http://xn--mnchen-3ya.example/"),
        ("http://日本.example/?q=日本", "http://xn--wgv71a.example/?q=%E6%97%A5%E6%9C%AC"),
        ("http://ｅｘａｍｐｌｅ.com/", "http://example.com/"),
        ("http://example.com/a%20b?c=%2F&d[]=1", "http://example.com/a%20b?c=%2F&d[]=1"),
        ('http://example.com/"<>', "http://example.com/%22%3C%3E"),
        ("http://[2606:4700::1111]:8080/", "http://[2606:4700::1111]:8080/"),
        ("http://example.com:/", "http://example.com/"),
    ],
)
def test_a_url_is_put_in_canonical_form(url, canonical):
    assert parse_target(url).url == canonical


def test_a_user_name_in_the_url_is_never_sent(serve, http):
    site = serve({"/": "hello"})
    http.get(f"http://ada:hunter2@{site.host}/", deadline=within())
    assert "Authorization" not in site.requests[0].headers


def test_the_headers_and_the_query_arrive_as_given(serve, http):
    site = serve({"/": "{}"})
    http.api("GET", site.url, params={"q": "a b&c"}, headers={"X-API-KEY": "hunter2"}, deadline=within())
    [request] = site.requests
    assert request.path == "/?q=a+b%26c"
    assert request.headers["X-API-KEY"] == "hunter2"


def test_cookies_last_for_the_redirects_of_one_exchange_and_no_longer(serve, http):
    site = serve({"/": (302, {"Location": "/home", "Set-Cookie": "visit=1; Path=/"}, ""), "/home": "hello"})
    http.get(site.url, deadline=within())
    http.get(f"{site.url}/home", deadline=within())
    assert [request.headers.get("Cookie") for request in site.requests] == [None, "visit=1", None]


def test_cookies_do_not_go_to_another_host(serve, make_http):
    other = serve({"/": "hello"})
    site = serve({"/": (302, {"Location": f"http://two.example:{other.port}/", "Set-Cookie": "visit=1; Path=/"}, "")})
    http = make_http(guard=AddressGuard("127.0.0.1", resolve=resolver(["127.0.0.1"])))
    http.get(f"http://one.example:{site.port}/", deadline=within())
    assert "Cookie" not in other.requests[0].headers


@pytest.mark.parametrize("variable", ["NETRC", "HOME"])
def test_the_passwords_of_netrc_are_never_used(variable, serve, http, tmp_path, monkeypatch):
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine 127.0.0.1 login ada password hunter2\ndefault login ada password hunter2\n")
    netrc.chmod(0o600)
    monkeypatch.setenv(variable, str(netrc if variable == "NETRC" else tmp_path))
    site = serve({"/": "hello"})
    http.get(site.url, deadline=within())
    http.api("POST", site.url, json={}, deadline=within())
    assert [request.headers.get("Authorization") for request in site.requests] == [None, None]


def test_a_header_that_cannot_be_sent_is_an_error_of_ours_without_its_value(serve, http):
    site = serve({"/": "{}"})
    for key in ("hunter2\nX-Evil: 1", "hunter2\r", " hunter2", "hunter2-☃"):
        with pytest.raises(SearchError) as caught:
            http.api("POST", site.url, headers={"X-API-KEY": key}, json={}, deadline=within())
        assert "hunter2" not in str(caught.value)
    assert site.requests == []


def test_connections_are_used_again(serve, http):
    site = serve({"/": "hello"})
    for _ in range(5):
        http.get(site.url, deadline=within())
    assert len(site.connections) == 1


def test_an_exchange_that_is_cut_short_does_not_spoil_the_next(serve, make_http):
    site = serve({"/big": b"x" * 500_000, "/small": b"small"})
    http = make_http(max_download_bytes=1000)
    assert http.get(f"{site.url}/big", deadline=within()).truncated
    assert http.get(f"{site.url}/small", deadline=within()).body == b"small"


# -- replies -----------------------------------------------------------------


def test_a_reply_knows_its_type_and_its_headers_in_lower_case(serve, http):
    site = serve({"/": (418, {"Content-Type": " Text/HTML ; charset=utf-8", "X-Tea": "Earl Grey"}, "short and stout")})
    reply = http.get(site.url, deadline=within())
    assert (reply.status, reply.content_type, reply.headers["x-tea"]) == (418, "text/html", "Earl Grey")


@pytest.mark.parametrize("body", ["", "<html>", "{", b"\xff\xfe{}", "[" * 100_000, "1" * 10_000])
def test_a_body_that_is_not_json_reads_as_none(body, serve, http):
    assert http.get(serve({"/": body}).url, deadline=within()).json() is None


# -- proxies -----------------------------------------------------------------


def test_pages_and_endpoints_go_through_the_proxy_of_the_settings(serve, make_http):
    proxy = serve(lambda request: "from the proxy")
    http = make_http(http_proxy=proxy.url)
    assert http.get("http://example.com/page?x=1", deadline=within()).body == b"from the proxy"
    assert http.api("POST", "http://api.example/search", json={}, deadline=within()).body == b"from the proxy"
    assert proxy.paths == ["http://example.com/page?x=1", "http://api.example/search"]


def test_https_goes_through_the_proxy_by_connect(serve, make_http):
    proxy = serve(lambda request: (502, {}, "no way"))
    with pytest.raises(Unreachable, match="proxy"):
        make_http(https_proxy=proxy.url).get("https://example.com/", deadline=within())
    assert [(request.method, request.path) for request in proxy.requests] == [("CONNECT", "example.com:443")]


def test_the_credentials_of_a_proxy_are_sent_to_the_proxy_and_shown_to_nobody(serve, make_http):
    proxy = serve(lambda request: request.reset())
    with pytest.raises(Unreachable) as caught:
        make_http(http_proxy=f"http://ada:hunter2@{proxy.host}").get("http://example.com/", deadline=within())
    assert proxy.requests[0].headers["Proxy-Authorization"] == "Basic YWRhOmh1bnRlcjI="
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("host", ["10.0.0.1", "0x7f.1", "localhost", "metadata.google.internal", "intranet", "[::1]"])
def test_private_addresses_are_refused_behind_a_proxy_too(host, serve, make_http):
    proxy = serve(lambda request: "from the proxy")
    with pytest.raises(AddressNotAllowed):
        make_http(http_proxy=proxy.url, allow_private_hosts="").get(f"http://{host}/", deadline=within())
    assert proxy.requests == []


def test_a_redirect_behind_a_proxy_passes_the_guard(serve, make_http):
    proxy = serve(lambda request: (302, {"Location": "http://169.254.169.254/"}, ""))
    with pytest.raises(AddressNotAllowed):
        make_http(http_proxy=proxy.url).get("http://example.com/", deadline=within())
    assert len(proxy.requests) == 1


@pytest.mark.parametrize("no_proxy", ["127.0.0.1", "example.org, 127.0.0.1", "127.0.0.0/8", "*"])
def test_no_proxy_reaches_hosts_directly(no_proxy, serve, make_http):
    proxy, site = serve(lambda request: "from the proxy"), serve({"/": "direct"})
    assert make_http(http_proxy=proxy.url, no_proxy=no_proxy).get(site.url, deadline=within()).body == b"direct"
    assert proxy.requests == []


def test_no_proxy_opens_only_the_hosts_that_it_names(serve, make_http):
    proxy = serve(lambda request: "from the proxy")
    http = make_http(http_proxy=proxy.url, no_proxy="other.example")
    assert http.get("http://example.com/", deadline=within()).body == b"from the proxy"


@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
def test_no_proxy_counts_from_the_settings_and_not_from_the_process(name, serve, make_http, monkeypatch):
    proxy = serve(lambda request: "from the proxy")
    monkeypatch.setenv(name, "example.com")
    http = make_http(http_proxy=proxy.url, guard=AddressGuard(resolve=resolver([])))
    assert http.get("http://example.com/", deadline=within()).body == b"from the proxy"


def test_proxies_of_the_process_are_not_used_behind_the_settings_back(serve, http, monkeypatch):
    proxy, site = serve(lambda request: "from the proxy"), serve({"/": "direct"})
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy.url)
    assert http.get(site.url, deadline=within()).body == b"direct"


def test_a_dead_proxy_is_unreachable(serve, make_http):
    proxy = serve({})
    proxy.close()
    with pytest.raises(Unreachable):
        make_http(http_proxy=proxy.url).get("http://example.com/", deadline=within())


def test_the_deadline_holds_behind_a_proxy(serve, make_http):
    proxy = serve(SLOW_SERVERS["dripping body"])
    with takes_less_than(1.5), pytest.raises(Timeout):
        make_http(http_proxy=proxy.url).get("http://example.com/", deadline=within(0.3))


@pytest.mark.parametrize("slow", ["silence", "dripping status line", "dripping headers"])
def test_the_deadline_holds_while_a_proxy_connects(slow, serve, make_http):
    proxy = serve(SLOW_SERVERS[slow])
    with takes_less_than(1.5), pytest.raises(Timeout):
        make_http(https_proxy=proxy.url).get("https://example.com/", deadline=within(0.3))


# -- offline -----------------------------------------------------------------


def test_offline_mode_opens_no_socket(serve, make_http):
    site = serve({"/": "hello"})
    looked_up = resolver(["127.0.0.1"])
    http = make_http(offline=True, guard=AddressGuard("*", resolve=looked_up))
    with pytest.raises(Offline, match=r"^scrape unavailable: offline mode is enabled$"):
        http.get(f"http://name.example:{site.port}/", deadline=within())
    with pytest.raises(Offline, match=r"^search unavailable: offline mode is enabled$"):
        http.api("POST", site.url, json={}, deadline=within())
    assert looked_up.calls == []
    assert site.connections == []
