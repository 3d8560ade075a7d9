"""Faults: every provider with every fault, with and without a successor; and what the machine itself can do to us.

What has to happen is read off the policy that the error classes carry (`fallback`, `retryable`, `trips`), not written
down a second time here. FAULTS says only which class a fault is.
"""

import contextlib
import glob
import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import Site
from test_hostile import StdioServer

import kindly_search
from kindly_search import (
    AuthError,
    BadRequest,
    BadResponse,
    Breakers,
    Browser,
    CircuitBreaker,
    Deadline,
    Http,
    Kindly,
    ProviderDown,
    QuotaExhausted,
    RateLimited,
    Router,
    SearchError,
    Settings,
    Timeout,
    Unreachable,
)

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

#: How long a provider has to answer here.
PATIENCE = 0.8

INJECTED = {"provider faults": 0, "other faults": 0}


@pytest.fixture(scope="module", autouse=True)
def _counts_are_printed(request):
    yield
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\nfaults injected: " + ", ".join(f"{count} {kind}" for kind, count in INJECTED.items()))


# ----------------------------------------------------------------------------
# Every provider × every fault × with and without successor
# ----------------------------------------------------------------------------

JSON = {"Content-Type": "application/json"}
GOOD = {
    "serper": {"organic": [{"title": "serper", "link": "https://example.com/", "snippet": "S"}]},
    "exa": {"results": [{"title": "exa", "url": "https://example.com/", "highlights": ["S"]}]},
    "tavily": {"results": [{"title": "tavily", "url": "https://example.com/", "content": "S"}]},
    "searxng": {"results": [{"title": "searxng", "url": "https://example.com/", "content": "S"}]},
}
PROVIDERS = [cls.name for cls in kindly_search.PROVIDERS]


def status(number, body='{"message": "no"}', **headers):
    return lambda request: (
        number,
        {**JSON, **{name.replace("_", "-"): value for name, value in headers.items()}},
        body,
    )


def raw(data):
    return lambda request: request.send(data)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

#: Fault → what the server does, and the class of the error; a dict where providers differ, with "" for the others.
FAULTS = {
    **{f"HTTP {n}": (status(n), AuthError) for n in (401, 403)},
    **{f"HTTP {n}": (status(n), BadRequest) for n in (400, 404, 405, 408, 409, 410, 413, 415, 418, 422, 431, 451, 499)},
    **{f"HTTP {n}": (status(n), ProviderDown) for n in (500, 501, 502, 503, 504, 507, 520, 522, 524, 529, 599)},
    **{f"HTTP {n}": (status(n, Location="http://127.0.0.1:9/"), BadResponse) for n in (301, 302, 303, 307, 308)},
    **{f"HTTP {n}": (status(n), BadResponse) for n in (300, 304, 305)},
    "HTTP 402": (status(402), QuotaExhausted),
    "HTTP 432": (status(432), {"tavily": QuotaExhausted, "": BadRequest}),
    "HTTP 433": (status(433), {"tavily": QuotaExhausted, "": BadRequest}),
    "HTTP 400, not enough credits": (status(400, '{"message": "Not enough credits"}'), {"serper": QuotaExhausted, "": BadRequest}),
    "HTTP 429": (status(429), RateLimited),
    "HTTP 429 for a second": (status(429, Retry_After="1"), RateLimited),
    "HTTP 429 for an hour": (status(429, Retry_After="3600"), RateLimited),
    "HTTP 204": (raw(b"HTTP/1.1 204 No Content\r\n\r\n"), BadResponse),
    "HTTP 103": (raw(b"HTTP/1.1 103 Early Hints\r\n\r\n"), BadResponse),
    "empty": (status(200, ""), BadResponse),
    "HTML": (status(200, "<html>Welcome to the hotel's Wi-Fi", Content_Type="text/html"), BadResponse),
    "half a JSON document": (status(200, '{"organic": [{"title"'), BadResponse),
    "a list": (status(200, "[]"), BadResponse),
    "an object without results": (status(200, "{}"), BadResponse),
    "results that are no list": (status(200, '{"organic": {}, "results": "x"}'), BadResponse),
    "binary": (status(200, b"\x00\xff\xfe" * 100), BadResponse),
    "compressed garbage": (raw(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnope"), BadResponse),
    "too much": (status(200, b'{"x": "' + b"x" * 300_000 + b'"}'), BadResponse),
    "a bomb": (status(200, gzip.compress(b" " * 5_000_000), Content_Encoding="gzip"), BadResponse),
    "reset": (lambda request: request.reset(), Unreachable),
    "close": (raw(b""), Unreachable),
    "close in the head": (raw(b"HTTP/1.1 200 OK\r\nContent-"), (Unreachable, BadResponse)),
    "truncated": (raw(HEAD + b"Content-Length: 500\r\n\r\n{"), Unreachable),
    "truncated in a chunk": (raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n50\r\n{"), Unreachable),
    "garbage": (raw(b"\x16\x03\x01 this is not HTTP\r\n\r\n"), Unreachable),
    "silence": (lambda request: request.hold(), Timeout),
    "drip of the head": (lambda request: request.drip(HEAD * 50, every=0.02), Timeout),
    "drip of the body": (lambda request: request.send(HEAD + b"\r\n") or request.drip(b" " * 500, every=0.02), Timeout),
    "slow": (lambda request: time.sleep(2 * PATIENCE) or (200, JSON, "{}"), Timeout),
    "refused": (None, Unreachable),
    "TLS error": (None, Unreachable),
}  # fmt: skip

#: Faults of the connection itself: no request arrives that could be counted.
UNCOUNTED = {"refused": "http://127.0.0.1:9", "TLS error": "https://{host}"}


def slug(fault):
    """The fault as a part of a path."""
    return fault.replace(" ", "_").replace(",", "")


@pytest.fixture(scope="module")
def world():
    """One server for all faults: /<fault>/<provider>/… behaves so."""
    faults = {slug(name): behave for name, (behave, _) in FAULTS.items()}
    site = Site(lambda request: faults[request.path.split("/")[1]](request))
    yield site
    site.close()


@pytest.fixture(scope="module")
def good():
    """A server of its own, as in the world, for what works: /<provider>/… answers well."""
    site = Site(lambda request: (200, JSON, json.dumps(GOOD[request.path.split("/")[1]])))
    yield site
    site.close()


def provider_at(name, url, **more):
    """The provider with its endpoint at the URL."""
    if name == "searxng":
        return kindly_search.from_env(
            kindly_search.SearXNG, {"SEARXNG_URL": url, "SEARXNG_TIMEOUT": str(PATIENCE), **more}
        )
    cls = next(cls for cls in kindly_search.PROVIDERS if cls.name == name)
    key = name.upper()
    environ = {
        f"{key}_API_KEY": "key-of-a-test",
        f"{key}_SEARCH_ENDPOINT": url,
        f"{key}_TIMEOUT": f"{PATIENCE}s",
        **more,
    }
    return kindly_search.from_env(cls, environ)


class Case:
    """One provider with one fault, ready to be asked."""

    serial = itertools.count()

    def __init__(self, world, name, fault, *, failures, good=None):
        self.world, self.fault = world, fault
        base = UNCOUNTED.get(fault, "http://{host}").format(host=world.host)
        self.path = f"/{slug(fault)}/{name}/{next(self.serial)}"
        self.expected = FAULTS[fault][1]
        if isinstance(self.expected, dict):
            self.expected = self.expected.get(name, self.expected[""])
        providers = [provider_at(name, base + self.path)]
        other = "tavily" if name == "serper" else "serper"
        if good:
            providers.append(provider_at(other, f"{good.url}/{other}/"))
        self.successor = other
        self.pauses = []
        self.http = Http(Settings(circuit_failures=failures, max_download_bytes=200_000))
        self.breakers = Breakers(self.http.settings)
        self.router = Router(providers, self.http, breakers=self.breakers, sleep=self.pauses.append)
        self.breaker = self.breakers.of("search", name)
        INJECTED["provider faults"] += 1

    def search(self):
        try:
            return self.router.search("q", 3, deadline=Deadline(5))
        except SearchError as error:
            return error
        finally:
            self.http.close()

    @property
    def asked(self):
        return sum(request.path.startswith(self.path) for request in self.world.requests)

    def policy(self, error=None):
        """The class whose policy counts; where a fault may be one of two, the one that came."""
        if isinstance(self.expected, type):
            return self.expected
        return next((cls for cls in self.expected if isinstance(error, cls)), self.expected[0])


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_without_successor_is_its_error_and_is_retried_where_the_policy_says_so(world, fault, name):
    case = Case(world, name, fault, failures=5)
    error = case.search()
    policy = case.policy(error)
    assert isinstance(error, policy), repr(error)
    assert "key-of-a-test" not in str(error) and len(str(error)) < 300
    tries = 2 if policy.retryable and fault != "HTTP 429 for an hour" else 1
    assert len(case.pauses) == tries - 1
    if fault == "HTTP 429 for a second":
        assert case.pauses == [1.0]
    if fault not in UNCOUNTED:
        assert case.asked == tries
    assert case.breaker._failures == (tries if policy.trips else 0)


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_with_a_successor_is_answered_by_it_where_the_policy_says_so(world, good, fault, name):
    # A single failure opens the breaker here, so that its state tells whether this one counted.
    case = Case(world, name, fault, failures=1, good=good)
    started = time.monotonic()
    outcome = case.search()
    policy = case.policy(outcome)
    if policy.fallback:
        assert outcome.provider == case.successor and [result.title for result in outcome.results] == [case.successor]
        assert [attempt.by for attempt in outcome.attempts] == [name, case.successor]
    else:
        assert isinstance(outcome, policy)
    assert case.pauses == [] and time.monotonic() - started < PATIENCE + 1.5, "the successor is the retry"
    if fault not in UNCOUNTED:
        assert case.asked == 1
    assert case.breaker.state == ("open" if policy.trips else "closed")


@pytest.mark.parametrize("name", PROVIDERS)
def test_without_a_fault_the_provider_answers(good, name):
    """The control of the matrix: the endpoints are the right ones."""
    router = Router([provider_at(name, f"{good.url}/{name}/")], Http())
    assert [result.title for result in router.search("q", 3, deadline=Deadline(5)).results] == [name]


SCRAPES = {"serper": "SERPER_SCRAPE_ENDPOINT", "exa": "EXA_CONTENTS_ENDPOINT", "tavily": "TAVILY_EXTRACT_ENDPOINT"}


@pytest.mark.parametrize("name", SCRAPES)
def test_every_fault_of_a_scrape_api_is_a_note_or_the_next_steps_turn(world, name):
    for fault in FAULTS:
        INJECTED["provider faults"] += 1
        base = UNCOUNTED.get(fault, "http://{host}").format(host=world.host)
        key = name.upper()
        kindly = Kindly.from_env(
            {
                f"{key}_API_KEY": "key-of-a-test",
                SCRAPES[name]: f"{base}/{slug(fault)}/{name}/",
                f"{key}_TIMEOUT": f"{PATIENCE / 3}s",
                "KINDLY_CONTENT_CHAIN": name,
                "KINDLY_BROWSER_ENABLED": "false",
            }
        )
        with kindly:
            report = kindly.get_content("http://8.8.8.8/page")
        assert report.failure and "key-of-a-test" not in report.page_content, fault
        assert report.failure != kindly_search.INTERNAL_ERROR, fault


# ----------------------------------------------------------------------------
# Clocks
# ----------------------------------------------------------------------------


class Clock:
    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


@pytest.mark.parametrize("jump", [3600.0, 86_400.0 * 400, -3600.0])
def test_a_breaker_survives_a_clock_that_jumps(jump):
    """A laptop that slept: the breaker lets a probe through, and never waits for longer than it was told to."""
    clock = Clock()
    breaker = CircuitBreaker(1, 30.0, now=clock)
    with contextlib.suppress(ProviderDown):
        breaker.call(lambda: (_ for _ in ()).throw(ProviderDown("down")))
    assert breaker.state == "open"
    clock.now += jump
    INJECTED["other faults"] += 1
    if jump > 0:
        assert breaker.call(lambda: "well") == "well"
    clock.now = 1000.0 + 31
    assert breaker.state in ("closed", "half-open")


@pytest.mark.parametrize("jump", [3600.0, 86_400.0 * 400])
def test_a_deadline_and_the_cache_end_when_the_clock_leaps_ahead(jump):
    clock = Clock()
    deadline, cache = Deadline(45, now=clock), kindly_search.PageCache(300, now=clock)
    cache.read("u", lambda: kindly_search.Page("u", "old"), deadline=deadline)
    clock.now += jump
    INJECTED["other faults"] += 1
    assert deadline.remaining() == 0.0
    assert cache.read("u", lambda: kindly_search.Page("u", "new"), deadline=deadline).markdown == "new"


def test_a_wall_clock_that_jumps_about_changes_nothing(good, monkeypatch):
    """NTP, daylight saving, a flat battery: only the monotonic clock may decide about time left."""
    real, jumps = time.time, itertools.cycle([0, 1e9, -1e9, 3600, -3600, -1.7e9])
    kindly = Kindly.from_env(
        {"SEARXNG_URL": f"{good.url}/searxng", "KINDLY_CONTENT_CHAIN": "http", "KINDLY_BROWSER_ENABLED": "false"}
    )
    kindly.http.guard = kindly_search.AddressGuard(resolve=lambda *a, **k: (_ for _ in ()).throw(OSError()))
    monkeypatch.setattr(time, "time", lambda: max(0.0, real() + next(jumps)))
    with kindly:
        for _ in range(12):
            INJECTED["other faults"] += 1
            assert [result.title for result in kindly.web_search("q").results] == ["searxng"]
        assert 0 <= kindly_search.retry_after("Wed, 21 Oct 2015 07:28:00 GMT") <= 86_400


# ----------------------------------------------------------------------------
# No file descriptors left
# ----------------------------------------------------------------------------

STARVED = """
import json, os, resource, sys
sys.path.insert(0, {root!r})
import kindly_search
from kindly_search import Kindly, SearchError
kindly = Kindly.from_env(json.loads(sys.argv[1]))
def attempt(number):
    try:
        report = kindly.web_search("q")
        return "notes" if any(r.page_content.startswith("_Could not") for r in report.results) else "well"
    except SearchError as error:
        return type(error).__name__
outcomes = [attempt(0)]
kindly.http.close()
resource.setrlimit(resource.RLIMIT_NOFILE, (60, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for spare in (0, 1, 2, 3):
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for fd in held[:spare]:
        os.close(fd)
    outcomes += [attempt(1), attempt(2)]
    for fd in held[spare:]:
        os.close(fd)
kindly.http.close()
import time
end = time.monotonic() + 10
while attempt(3) != "well" and time.monotonic() < end:
    time.sleep(0.2)
outcomes.append(attempt(4))
print(json.dumps(outcomes))
"""


def pages_and_search(request):
    """A SearXNG whose hits are pages of its own."""
    if request.path.startswith("/search"):
        hits = [{"url": f"http://{request.headers['Host']}/page/{i}", "title": "T", "content": "C"} for i in range(3)]
        return 200, JSON, json.dumps({"results": hits})
    if request.path.startswith("/hold"):
        return request.hold()
    return "<title>T</title><p>" + f"Some words to read here about {request.path}. " * 30


@POSIX
def test_without_file_descriptors_calls_fail_cleanly_and_work_again_afterwards(serve):
    site = serve(pages_and_search)
    environ = {
        "SEARXNG_URL": site.url,
        "KINDLY_ALLOW_PRIVATE_HOSTS": site.host,
        "KINDLY_CONTENT_CHAIN": "http",
        "KINDLY_BROWSER_ENABLED": "false",
        "KINDLY_CACHE_TTL_SECONDS": "0",
        "KINDLY_CIRCUIT_RECOVERY_SECONDS": "0.2",
        "KINDLY_TOOL_TOTAL_TIMEOUT_SECONDS": "5",
    }
    script = STARVED.format(root=str(Path(kindly_search.__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(environ)], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = json.loads(done.stdout)
    INJECTED["other faults"] += len(outcomes)
    assert outcomes[0] == outcomes[-1] == "well"
    assert set(outcomes[1:3]) <= {"Unreachable", "AllProvidersFailed"}
    assert set(outcomes) <= {"Unreachable", "AllProvidersFailed", "CircuitOpen", "notes", "well"}, done.stderr[-3000:]
    assert "internal error" not in done.stdout and "a page could not be read" not in done.stderr


# ----------------------------------------------------------------------------
# A client that goes away
# ----------------------------------------------------------------------------


@pytest.fixture
def stdio(serve):
    """Makes real server processes with a SearXNG and pages beside them."""
    made = []
    site = serve(pages_and_search)

    def make(path="", **environ):
        defaults = {
            "SEARXNG_URL": site.url + path,
            "KINDLY_ALLOW_PRIVATE_HOSTS": site.host,
            "KINDLY_TOOL_TOTAL_TIMEOUT_SECONDS": "30",
        }
        made.append(StdioServer(**{**defaults, **environ}))
        made[-1].site = site
        return made[-1]

    yield make
    for server in made:
        server.close()


def ends_within(seconds, process):
    INJECTED["other faults"] += 1
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the server still runs after {seconds:g} s")


@pytest.mark.parametrize("stage", ["idle", "searching", "reading"])
def test_the_end_of_stdin_ends_the_server_whatever_it_is_doing(stdio, wait_until, stage):
    server = stdio(path="/hold")
    if stage == "searching":
        server.start("tools/call", name="web_search", arguments={"query": "q"})
        wait_until(lambda: any(path.startswith("/hold") for path in server.site.paths))
    if stage == "reading":
        server.start("tools/call", name="get_content", arguments={"url": server.site.url + "/hold/page"})
        wait_until(lambda: "/hold/page" in server.site.paths)
    server.process.stdin.close()
    ends_within(5, server.process)
    assert "Traceback" not in "".join(server.said)


def test_a_client_that_closes_stdout_does_not_leave_a_server_behind(stdio):
    server = stdio()
    for _ in range(3):
        server.start("tools/call", name="web_search", arguments={"query": "q"})
    # The reading end has to go for good: the listening thread holds it, so it is the descriptor that is closed.
    os.close(server.process.stdout.fileno())
    with contextlib.suppress(OSError):
        for _ in range(5):
            server.start("ping")
            time.sleep(0.1)
        server.process.stdin.close()
    ends_within(8, server.process)
    with contextlib.suppress(OSError):
        server.process.stdout.close()


@POSIX
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL", "SIGHUP"])
def test_a_signal_in_mid_call_ends_the_server_at_once(stdio, wait_until, name):
    server = stdio()
    server.start("tools/call", name="get_content", arguments={"url": server.site.url + "/hold/page"})
    wait_until(lambda: "/hold/page" in server.site.paths)
    server.process.send_signal(getattr(signal, name))
    ends_within(5, server.process)


@POSIX
def test_a_server_that_is_stopped_and_goes_on_still_answers(stdio):
    """A laptop that sleeps: SIGSTOP holds everything, deadlines included, and SIGCONT lets it go on."""
    server = stdio(KINDLY_TOOL_TOTAL_TIMEOUT_SECONDS="2")
    number, answer = server.start("tools/call", name="get_content", arguments={"url": server.site.url + "/hold/page"})
    time.sleep(0.5)
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    server.process.send_signal(signal.SIGCONT)
    INJECTED["other faults"] += 1
    text = answer.get(timeout=5)["result"]["structuredContent"]["page_content"]
    assert "timed out" in text and number
    server.assert_alive()


# ----------------------------------------------------------------------------
# kill -9 under load, full disks
# ----------------------------------------------------------------------------

DRAWN = (
    "<p>"
    + "The quick brown fox jumps over the lazy dog. " * 8
    + "</p><div id=a></div><script>setTimeout(()=>a.textContent='drawn at last',150)</script>"
)


def processes_of(worker):
    """The worker's browser processes, its main one first."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"kindly-chrome-{worker}-".encode() in Path(path).read_bytes():
                found.append(int(path.split("/")[2]))
    return sorted(found)


@LINUX
@pytest.mark.chrome
def test_kill_9_of_worker_and_browser_under_load_costs_at_most_the_pages_under_way(serve, tmp_path, wait_until):
    site = serve(lambda request: DRAWN)
    browser = Browser(environ={**os.environ, "TMPDIR": str(tmp_path)}, allow_private_hosts=site.host)
    outcomes, stop, numbers = [], threading.Event(), itertools.count()

    def load():
        while not stop.is_set():
            try:
                page = browser.render(f"{site.url}/{next(numbers)}", deadline=Deadline(20))
                outcomes.append("well" if "drawn at last" in page.html else "thin")
            except SearchError as error:
                outcomes.append(type(error).__name__)
            except BaseException as error:
                outcomes.append(f"bug: {error!r}")
                raise

    threads = [threading.Thread(target=load, daemon=True) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        wait_until(lambda: outcomes.count("well") >= 3, 25)
        for victim in ("browser", "worker", "browser", "worker"):
            pid = browser._worker._process.pid
            target = next(iter(processes_of(pid)), pid) if victim == "browser" else pid
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.SIGKILL)
            INJECTED["other faults"] += 1
            before = outcomes.count("well")
            wait_until(lambda before=before: outcomes.count("well") >= before + 4, 25)
        stop.set()
        for thread in threads:
            thread.join(25)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        stop.set()
        browser.close()
    assert not [outcome for outcome in outcomes if outcome.startswith("bug")], outcomes
    assert outcomes.count("well") > 0.6 * len(outcomes), outcomes
    wait_until(
        lambda: not [path for path in glob.glob("/proc/[0-9]*/cmdline") if str(tmp_path).encode() in read(path)], 10
    )


def read(path):
    with contextlib.suppress(OSError):
        return Path(path).read_bytes()
    return b""


@LINUX
@pytest.mark.chrome
def test_a_full_disk_under_the_profile_is_a_note_and_no_hang(serve):
    site = serve(lambda request: DRAWN)
    # RLIMIT_FSIZE stands for the full disk: nothing can be written to any file.
    worker = Path(kindly_search.__file__).parent / "chrome_worker.py"
    command = ["sh", "-c", f"ulimit -f 0; exec {sys.executable} {worker} --serve"]
    browser = Browser(environ=dict(os.environ), allow_private_hosts=site.host, command=command)
    INJECTED["other faults"] += 1
    started = time.monotonic()
    try:
        with pytest.raises(SearchError) as caught:
            browser.render(site.url, deadline=Deadline(15))
    finally:
        browser.close()
    assert caught.value.reason == kindly_search.BROWSER_REASONS["launch_failed"]
    assert time.monotonic() - started < 16


@LINUX
@pytest.mark.chrome
def test_where_the_folder_for_profiles_is_missing_another_one_is_used(serve, tmp_path):
    site = serve(lambda request: DRAWN)
    browser = Browser(environ={**os.environ, "TMPDIR": str(tmp_path / "not there")}, allow_private_hosts=site.host)
    INJECTED["other faults"] += 1
    try:
        assert "drawn at last" in browser.render(site.url, deadline=Deadline(20)).html
    finally:
        browser.close()
