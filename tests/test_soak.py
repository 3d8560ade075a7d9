"""Soak: a real server under mixed calls with faults for a while, and nothing of it grows.

Twelve seconds by default, and twenty with a browser; KINDLY_SOAK_SECONDS=1800 makes it half an hour. Memory,
threads, descriptors, child processes and temporary files are read from /proc, so it runs on Linux only.
"""

import contextlib
import glob
import gzip
import itertools
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import Site
from test_hostile import StdioServer

SECONDS = float(os.environ.get("KINDLY_SOAK_SECONDS", "12"))

#: What counts as growth, from the end of the warm-up to the end. Allocators and caches breathe; leaks do not stop.
MEGABYTES = 12.0
SLACK = 4

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")

WORDS = "".join(f"<p>Paragraph {i} says something about subject number {i % 7} at length. </p>" for i in range(200))
JSON = {"Content-Type": "application/json"}


# ----------------------------------------------------------------------------
# The world around the server
# ----------------------------------------------------------------------------


def page(request, number):
    """Pages of every kind, good and bad, by their number."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"
    kinds = [
        lambda: f"<title>Page {number}</title><h1>Page {number}</h1>{WORDS}",
        lambda: f"<title>Page {number}</title><table>{'<tr><td>a<td>b' * 300}</table>{WORDS}",
        lambda: (200, JSON, json.dumps([{"n": number, "text": "x" * 50}] * 500)),
        lambda: (200, {"Content-Encoding": "gzip"}, gzip.compress((WORDS * 20).encode())),
        lambda: (404, {}, "gone"),
        lambda: (503, {}, "busy"),
        lambda: (302, {"Location": f"/page/{number + 1}"}, ""),
        lambda: (302, {"Location": "http://10.0.0.1/"}, ""),
        lambda: (200, {"Content-Type": "image/png"}, b"\x89PNG" * 1000),
        lambda: (200, {"Content-Type": "application/pdf"}, b"%PDF-1.4 broken"),
        lambda: request.reset(),
        lambda: request.send(head + b"Content-Length: 5000\r\n\r\n<p>cut off"),
        lambda: request.send(head + b"Content-Length: 10, 20\r\n\r\n<p>two lengths"),
        lambda: request.send(b"this is not HTTP"),
        lambda: request.send(head + b"\r\n") or request.drip(b"<p>slow" * 20, every=0.05),
        lambda: time.sleep(1.5) or "<p>too late",
    ]
    return kinds[number % len(kinds)]()


def search(request, number):
    """Search answers with five pages each, and the usual troubles."""
    hits = [
        {"url": f"http://{request.headers['Host']}/page/{(number * 5 + i) % 48}", "title": f"T{i}", "content": "C"}
        for i in range(5)
    ]
    good = (200, JSON, json.dumps({"results": hits}))
    kinds = [good] * 8 + [
        (500, JSON, "{}"),
        (429, JSON, "{}"),
        (200, {}, "<html>"),
        (200, JSON, "{}"),
        (401, JSON, "{}"),
        None,
    ]
    answer = kinds[number % len(kinds)]
    return request.reset() if answer is None else answer


DRAWN = WORDS[:700] + "<div id=a></div><script>setTimeout(()=>a.textContent='drawn at last',50)</script>"


class World(Site):
    """The stand-in for search engine and web; it forgets what it was asked, which would grow here instead."""

    def __init__(self):
        self._searches = itertools.count()
        super().__init__(self._answer)

    def _answer(self, request):
        del self.requests[:-50], self.connections[:-300]
        if request.path.startswith("/search"):
            return search(request, next(self._searches))
        if request.path.startswith("/drawn"):
            return DRAWN
        return page(request, int(request.path.rpartition("/")[2]))


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


# ----------------------------------------------------------------------------
# What must not grow
# ----------------------------------------------------------------------------


def children_of(pid):
    """The process and everything below it."""
    parents = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            fields = Path(path).read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(path.split("/")[2])] = int(fields[1])
    found, queue_ = set(), [pid]
    while queue_:
        parent = queue_.pop()
        below = [child for child, of in parents.items() if of == parent and child not in found]
        found.update(below)
        queue_ += below
    return found


class Sample:
    """What the server holds at one moment."""

    def __init__(self, pid, folder):
        status = Path(f"/proc/{pid}/status").read_text()
        self.megabytes = int(status.partition("VmRSS:")[2].split()[0]) / 1024
        self.threads = int(status.partition("Threads:")[2].split()[0])
        self.descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        self.children = len(children_of(pid))
        self.files = sum(len(files) + len(folders) for _, folders, files in os.walk(folder))

    def __repr__(self):
        return " ".join(f"{name}={value:.4g}" for name, value in vars(self).items())


def calls(world, dice):
    """An endless mixture of what clients do, good and bad."""
    yield from (("web_search", {"query": f"warm {i}"}) for i in range(3))
    while True:
        yield dice.choice(
            [
                ("web_search", {"query": f"question {dice.randint(0, 99)}", "num_results": dice.randint(1, 10)}),
                ("web_search", {"query": "filtered", "include_domains": ["a.example"], "freshness": "week"}),
                ("web_search", {"query": ""}),
                ("web_search", {"query": "x" * 50_000}),
                ("get_content", {"url": f"{world.url}/page/{dice.randint(0, 47)}"}),
                ("get_content", {"url": f"{world.url}/page/{dice.randint(0, 47)}", "start_index": 5000}),
                ("get_content", {"url": f"http://10.0.0.{dice.randint(1, 250)}/"}),
                ("get_content", {"url": "not a url"}),
                ("get_content", {"url": dice.choice([None, 5, [], {}])}),
                ("no_such_tool", {}),
            ]
        )


def soak(server, folder, seconds, mixture, *, at_once=8, disturb=lambda: None):
    """Clients that call for so long and cancel some; the samples after the warm-up, and how many calls there were."""
    end, lock, failures, done = time.monotonic() + seconds, threading.Lock(), [], itertools.count()

    def client(seed):
        dice = random.Random(seed)
        try:
            while time.monotonic() < end:
                with lock:
                    tool, arguments = next(mixture)
                number, answer = server.start("tools/call", name=tool, arguments=arguments)
                if dice.random() < 0.1:
                    time.sleep(dice.random() / 5)
                    server.cancel(number)
                else:
                    message = answer.get(timeout=30)
                    assert "result" in message or "error" in message
                next(done)
        except BaseException as error:
            failures.append(repr(error))

    clients = [threading.Thread(target=client, args=(seed,), daemon=True) for seed in range(at_once)]
    for thread in clients:
        thread.start()
    samples, warm = [], end - 0.6 * seconds
    while time.monotonic() < end:
        time.sleep(max(0.25, seconds / 100))
        del server.lines[:]
        disturb()
        if time.monotonic() > warm:
            samples.append(Sample(server.pid, folder))
    for thread in clients:
        thread.join(35)
    assert not failures, f"{failures[:3]}; {''.join(server.said)[-2000:]}"
    return samples, next(done)


def settled(server, folder, limits, seconds=15.0):
    """The first sample that is within the limits, or the last one when the time is up."""
    end = time.monotonic() + seconds
    while True:
        sample = Sample(server.pid, folder)
        if time.monotonic() > end or all(getattr(sample, name) <= limit for name, limit in limits.items()):
            return sample
        time.sleep(0.25)


def assert_no_growth(samples, name, slack):
    """The last third of the samples is no higher than the first third, but for the slack."""
    third = max(1, len(samples) // 3)
    early = statistics.median(getattr(sample, name) for sample in samples[:third])
    late = statistics.median(getattr(sample, name) for sample in samples[-third:])
    assert late <= early + slack, f"{name} grew from {early:g} to {late:g}: {samples[:: max(1, len(samples) // 8)]}"
    return late - early


def reported(request, kind, done, seconds, growth, before, rest):
    """Prints what was measured: growth from the first third after the warm-up to the last, and what was left at rest."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        grown = ", ".join(f"{name} {change:+.3g}" for name, change in growth.items())
        print(f"\nsoak, {kind}: {done:,} calls in {seconds:.0f} s; growth: {grown}; before: {before}; at rest: {rest}")


# ----------------------------------------------------------------------------
# The soaks
# ----------------------------------------------------------------------------

SHORT = {
    "SEARXNG_TIMEOUT": "1",
    "KINDLY_TOOL_TOTAL_TIMEOUT_SECONDS": "3",
    "KINDLY_CACHE_TTL_SECONDS": "0.5",
    "KINDLY_CIRCUIT_RECOVERY_SECONDS": "0.5",
    "KINDLY_LOG_LEVEL": "ERROR",
}


def test_nothing_grows_under_mixed_calls_with_faults(request, world, tmp_path):
    server = StdioServer(SEARXNG_URL=world.url, KINDLY_ALLOW_PRIVATE_HOSTS=world.host, TMPDIR=str(tmp_path), **SHORT)
    try:
        before = Sample(server.pid, tmp_path)
        samples, done = soak(server, tmp_path, SECONDS, calls(world, random.Random(1)))
        growth = {"megabytes": assert_no_growth(samples, "megabytes", MEGABYTES)}
        growth |= {name: assert_no_growth(samples, name, 3 * SLACK) for name in ("threads", "descriptors")}
        growth |= {name: assert_no_growth(samples, name, 0) for name in ("children", "files")}
        # Once nobody asks any more, what the calls needed goes: threads end, connections are kept only in their pools.
        limits = {"threads": before.threads + 16, "descriptors": before.descriptors + 40, "children": 0, "files": 0}
        rest = settled(server, tmp_path, limits)
        assert all(getattr(rest, name) <= limit for name, limit in limits.items()), f"{rest}, limits {limits}"
        server.assert_alive()
        assert done > 10 * SECONDS, "too few calls to tell anything"
        assert "Traceback" not in "".join(server.said), "".join(server.said)[-3000:]
    finally:
        server.close()
    reported(request, "plain HTTP", done, SECONDS, growth, before, rest)


def drawings(world):
    """Pages for the browser: most of them draw themselves, some are broken."""
    for number in itertools.count():
        broken = number % 8 == 7
        path = f"/page/{number % 13}" if broken else f"/drawn/{number % 40}"
        yield "get_content", {"url": world.url + path}


@pytest.mark.chrome
def test_nothing_grows_with_a_browser_that_is_killed_now_and_then(request, world, tmp_path):
    seconds = max(20.0, SECONDS)
    server = StdioServer(
        SEARXNG_URL=world.url,
        KINDLY_ALLOW_PRIVATE_HOSTS=world.host,
        TMPDIR=str(tmp_path),
        KINDLY_BROWSER_ENABLED="true",
        KINDLY_CONTENT_CHAIN="chromium",
        KINDLY_BROWSER_IDLE_SECONDS="3",
        **{**SHORT, "KINDLY_TOOL_TOTAL_TIMEOUT_SECONDS": "10"},
    )
    kills, due = [], [time.monotonic() + seconds / 4]

    def kill_the_worker():
        children = sorted(children_of(server.pid))
        if children and time.monotonic() > due[0] and len(kills) < 2:
            due[0] = time.monotonic() + seconds / 4
            with contextlib.suppress(ProcessLookupError):
                os.kill(children[0], signal.SIGKILL)
                kills.append(children[0])

    try:
        before = Sample(server.pid, tmp_path)
        samples, done = soak(server, tmp_path, seconds, drawings(world), at_once=3, disturb=kill_the_worker)
        growth = {"megabytes": assert_no_growth(samples, "megabytes", MEGABYTES)}
        growth |= {name: assert_no_growth(samples, name, 3 * SLACK) for name in ("threads", "descriptors")}
        growth |= {"children": assert_no_growth(samples, "children", 2 * SLACK)}
        assert max(sample.children for sample in samples) > 3 and len(kills) == 2, "the browser must have run, and died"
        assert done >= 10, "too few pages to tell anything"
        # The idle worker ends itself, its browser and its profile with it; it has swept what the killed ones left.
        limits = {"threads": before.threads + 16, "descriptors": before.descriptors + 40, "children": 0, "files": 0}
        rest = settled(server, tmp_path, limits, 25)
        left = sorted(path.name for path in tmp_path.iterdir())
        assert all(getattr(rest, name) <= limit for name, limit in limits.items()), f"{rest}, limits {limits}, {left}"
        server.assert_alive()
    finally:
        server.close()
    reported(request, f"browser, killed {len(kills)} times", done, seconds, growth, before, rest)
