"""How cost grows with work: more results, larger pages, more clients; each with its exponent.

    python bench/growth.py [--clients 200]

An exponent of 0 means that the cost stays as it is, 1 that it grows as the work does, 2 that doubling the work costs
four times as much. Clients talk to a real server process over HTTP; each asks for pages that nobody has read before.
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
import search
from report import ROOT, Table, exponent, p95, verdict
from world import World

CLIENT_TARGET = 1.5
RESULTS = (1, 2, 5, 10)
PACED_SECONDS = 20
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)


# -- more results ------------------------------------------------------------------------------------------------------


def by_results(rounds: int = 3) -> Table:
    table = Table(
        "Growth: 1 to 10 results",
        f"Seconds of one web_search, provider and pages {search.DELAY_MS} ms each; median of {rounds}.",
        ("parser", *(f"{count} results" for count in RESULTS), "ratio 10 : 1", "exponent"),
    )
    with World() as world:
        for backend in search.BACKENDS:
            with search.searcher(world, backend) as kindly:
                took = [statistics.median(search.one_search(kindly, count) for _ in range(rounds)) for count in RESULTS]
            table.rows.append((backend, *took, took[-1] / took[0], exponent(RESULTS, took)))
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
if sys.argv[1] == "html5lib":
    sys.modules["lxml"] = None
sys.path.insert(0, {str(ROOT)!r})
from kindly_search import main
main(["start-mcp-server", "--http", "--port", "0"])
"""


@contextlib.contextmanager
def http_server(world: World, backend: str) -> Iterator[tuple[int, int]]:
    """A server process; its port and its process id."""
    environ = {"PATH": os.environ.get("PATH", ""), **world.environ()}
    command = [sys.executable, "-c", SERVER, backend]
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
    return elapsed


async def calls_at_once(port: int, clients: int, name: str, spread: float) -> list[float]:
    """The times of as many calls, begun within `spread` seconds."""

    async def one(number: int) -> float:
        await asyncio.sleep(spread * number / clients)
        return await one_call(port, f"{search.DELAY_MS} {name} {number}")

    return list(await asyncio.gather(*(one(number) for number in range(clients))))


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def by_clients(most: int = 200) -> Table:
    counts = [count for count in (1, 10, 50, 200) if count < most] + [most]
    table = Table(
        f"Growth: 1 to {most} clients over HTTP",
        f"p95 seconds of a web_search with 3 results, provider and pages {search.DELAY_MS} ms each, pages of about "
        "70 kB, no page read twice, one server process. `at once`: all clients ask in the same instant. "
        f"`over {PACED_SECONDS} s`: each client asks once within that time, as agents do that also think. The ratio is "
        "to the p95 of a single client of the same server. A process has one interpreter lock, so CPU per call times "
        "calls is the least that a burst takes.",
        ("parser", "arrival", *(f"{count}" for count in counts), "ratio", "exponent", "CPU ms per call", "target"),
    )
    with World() as world:
        for backend in search.BACKENDS:
            with http_server(world, backend) as (port, pid):
                asyncio.run(calls_at_once(port, 3, "warm", 0))
                single = p95([asyncio.run(one_call(port, f"{search.DELAY_MS} single {turn}")) for turn in range(10)])
                table.rows.append(burst_row(port, pid, backend, counts, single))
                table.rows.append(paced_row(port, pid, backend, counts, single))
    return table


def burst_row(port: int, pid: int, backend: str, counts: Sequence[int], single: float) -> Sequence[object]:
    """The p95 for each number of clients that ask in the same instant."""
    took, before = [single], cpu_of(pid)
    for count in counts[1:]:
        took.append(p95(asyncio.run(calls_at_once(port, count, f"burst {count}", 0))))
    each = 1000 * (cpu_of(pid) - before) / sum(counts[1:])
    ratio = took[-1] / single
    return backend, "at once", *took, ratio, exponent(counts, took), each, verdict(ratio, CLIENT_TARGET)


def paced_row(port: int, pid: int, backend: str, counts: Sequence[int], single: float) -> Sequence[object]:
    """The p95 for the largest number of clients, each of which asks once within the time."""
    before = cpu_of(pid)
    last = p95(asyncio.run(calls_at_once(port, counts[-1], "paced", PACED_SECONDS)))
    each = 1000 * (cpu_of(pid) - before) / counts[-1]
    blank = [""] * (len(counts) - 2)
    figures = (last / single, exponent((1, counts[-1]), (single, last)), each)
    return backend, f"over {PACED_SECONDS} s", single, *blank, last, *figures, verdict(last / single, CLIENT_TARGET)


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
