"""How cost grows with work: more results, larger pages, more clients; each with its exponent.

    python bench/growth.py [--clients 200]

An exponent of 0 means that the cost stays as it is, 1 that it grows as the work does, 2 that doubling the work costs
four times as much. Clients talk to a real server process over HTTP; each asks for pages that nobody has read before.
What the same calls take with hardly anybody else there is measured first, so that both meet the same delays and faults.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import extraction
import psutil
import search
from report import ROOT, Table, exponent, p95, verdict
from world import World

CLIENT_TARGET = 1.5
WORKERS = (1, os.cpu_count() or 1)
#: What the clients ask for, as the table and as a query says it: the size of the pages, and the times of all. With the
#: times: how many calls are made alone, and how many of those at the same time do not get in each other's way.
SIZES_ASKED = (("2 kB", "small"), ("70 kB", "large"))
TIMES_ASKED = (("as on the web", "web", 200, 10), ("300 ms each", "300", 20, 1))
RESULTS = (1, 2, 5, 10)
PACED_SECONDS = 20
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)


# -- more results ------------------------------------------------------------------------------------------------------


def by_results(rounds: int = 3) -> Table:
    table = Table(
        "Growth: 1 to 10 results",
        f"Seconds of one web_search, provider and pages {search.DELAY_MS} ms each; median of {rounds}.",
        (*(f"{count} results" for count in RESULTS), "ratio 10 : 1", "exponent"),
    )
    with World() as world, search.searcher(world) as kindly:
        took = [statistics.median(search.one_search(kindly, count) for _ in range(rounds)) for count in RESULTS]
    table.rows.append((*took, took[-1] / took[0], exponent(RESULTS, took)))
    return table


# -- larger pages ------------------------------------------------------------------------------------------------------


def by_size() -> Table:
    table = Table(
        "Growth: 10 kB to 10 MB pages",
        "CPU seconds from HTML to Markdown, for an article of that size. The exponent is over the first three sizes: "
        "kindly looks at the first 3 million characters of markup only, so its last column is less work than that of "
        "the others.",
        ("reader", *(f"{size / 1e6:g} MB" for size in SIZES), "exponent"),
    )
    pages = [article_of(size) for size in SIZES]
    for name, read in extraction.readers().items():
        took = [extraction.fastest(read, page, 1 if len(page) > 5_000_000 else 3) for page in pages]
        table.rows.append((name, *(f"{cost:.3f}" for cost in took), exponent(SIZES[:3], took[:3])))
    return table


def article_of(size: int) -> str:
    """A page of about that many characters, nearly all of them in paragraphs."""
    body, _ = extraction.article(random.Random(size), paragraphs=max(5, size // 500))
    return f"<!DOCTYPE html><html><head><title>Long</title></head><body><main>{body}</main></body></html>"


# -- more clients ------------------------------------------------------------------------------------------------------

SERVER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from kindly_search import main
main(["start-mcp-server", "--http", "--port", "0", "--workers", sys.argv[1]])
"""


@contextlib.contextmanager
def http_server(world: World, workers: int = 1) -> Iterator[tuple[int, int]]:
    """A server process; its port and its process id."""
    environ = {"PATH": os.environ.get("PATH", ""), **world.environ()}
    command = [sys.executable, "-c", SERVER, str(workers)]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            found = re.search(r":(\d+)/mcp", process.stderr.readline())
            assert found
            yield int(found[1]), process.pid
        finally:
            process.kill()


async def one_call(port: int, query: str, count: int = 3) -> float:
    """Seconds of one web_search over HTTP; a bare client, so that its own cost does not count."""
    arguments = {"name": "web_search", "arguments": {"query": query, "num_results": count}}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": arguments})
    head = (
        f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Accept: application/json, text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((head + body).encode())
    reply = await reader.read()
    elapsed = time.perf_counter() - started
    writer.close()
    assert reply.startswith(b"HTTP/1.1 200") and b'"isError":false' in reply, reply[:500]
    assert b"_Could not read this page" not in reply, reply
    return elapsed


async def calls_at_once(port: int, clients: int, query: str, spread: float = 0, most: int = 1000) -> list[float]:
    """The times of as many calls, begun within `spread` seconds, `most` of them at the same time."""
    places = asyncio.Semaphore(most)

    async def one(number: int) -> float:
        await asyncio.sleep(spread * number / clients)
        async with places:
            return await one_call(port, f"{query} {number}")

    return list(await asyncio.gather(*(one(number) for number in range(clients))))


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and of its worker processes so far."""
    family = [psutil.Process(pid), *psutil.Process(pid).children()]
    return sum(sum(process.cpu_times()[:2]) for process in family)


def by_clients(most: int = 200) -> Table:
    table = Table(
        f"Growth: 1 to {most} clients over HTTP",
        f"p95 seconds of {most} calls of web_search with 3 results, no page read twice. `as on the web`: the provider "
        "takes 0.3 to 3 s, each page 0.2 to 5 s (most of them little), one search in twenty is answered by the second "
        "provider because the first one fails, and one page in twenty is broken off once; no call and no page may be "
        "lost by that. `at once`: all clients ask in the same instant. "
        f"`over {PACED_SECONDS} s`: each asks once within that time, as agents do that also think. `alone`: calls with "
        "the same delays and faults, but so few at a time that they do not meet. CPU per call, times calls, divided by "
        "the cores is the least that a burst takes; the clients and the stand-ins for the web share the same cores.",
        ("workers", "pages", "times", "arrival", "alone", str(most), "ratio", "CPU ms per call", "target"),
    )
    for workers in WORKERS:
        with World() as world, http_server(world, workers) as (port, pid):
            asyncio.run(calls_at_once(port, 3 * workers, "0 warm"))
            table.rows += [(workers, *row) for row in client_rows(port, pid, most)]
    return table


def client_rows(port: int, pid: int, most: int) -> Iterator[Sequence[object]]:
    """One server under each load."""
    for size, kind in SIZES_ASKED:
        for times, first, calls, together in TIMES_ASKED:
            alone = p95(asyncio.run(calls_at_once(port, calls, f"{first} {kind} alone", most=together)))
            for arrival, spread in (("at once", 0), (f"over {PACED_SECONDS} s", PACED_SECONDS)):
                query = f"{first} {kind} spread {spread}"
                yield size, times, arrival, *under_load(port, pid, most, query, alone, spread)


def under_load(
    port: int, pid: int, clients: int, query: str, alone: float, spread: float = 0
) -> tuple[float, float, float, float, str]:
    """The p95 of calls alone and together, their ratio, the CPU of a call and the verdict."""
    before = cpu_of(pid)
    together = p95(asyncio.run(calls_at_once(port, clients, query, spread)))
    each = 1000 * (cpu_of(pid) - before) / clients
    return alone, together, together / alone, each, verdict(together / alone, CLIENT_TARGET)


def tables(clients: int = 200) -> list[Table]:
    """Growth by results, by size and by clients."""
    return [by_results(), by_size(), by_clients(clients)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200, choices=(1, 10, 50, 100, 200))
    for table in tables(parser.parse_args().clients):
        print(table.markdown())


if __name__ == "__main__":
    main()
