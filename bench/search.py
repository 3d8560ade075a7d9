"""Wall time of web_search over what nobody can avoid: the provider's time plus that of the slowest page.

    python bench/search.py [--rounds 7]

Provider and pages are on loopback, in a process of their own, and take 300 ms each; no page is read twice.
"""

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import requests
from report import ROOT, Table, verdict
from world import World

sys.path.insert(0, str(ROOT))

from kindly_search import Kindly

DELAY_MS = 300
UNAVOIDABLE = 2 * DELAY_MS / 1000
TARGET = 1.2

_numbers = itertools.count()


@contextlib.contextmanager
def searcher(world: World) -> Iterator[Kindly]:
    """A Kindly that has warmed up: the first call of a process also pays for imports."""
    with Kindly.from_env(world.environ()) as kindly:
        kindly.web_search("0 warm", 3)
        yield kindly


def one_search(kindly: Kindly, count: int) -> float:
    """Seconds of one search with `count` results that were never read before."""
    started = time.perf_counter()
    report = kindly.web_search(f"{DELAY_MS} run {next(_numbers)}", count)
    elapsed = time.perf_counter() - started
    assert len(report.results) == count, report.meta
    assert not [page["failure"] for page in report.meta["pages"] if page["failure"]], report.meta
    return elapsed


def bare_search(world: World, count: int) -> float:
    """Seconds of the same exchange by plain requests in threads that throw the pages away: the machine's part."""
    started = time.perf_counter()
    asked = {"q": f"{DELAY_MS} bare {next(_numbers)}", "num": count}
    hits = requests.post(f"{world.url}/search", json=asked, timeout=30).json()["organic"]
    with ThreadPoolExecutor(count) as pool:
        pages = list(pool.map(lambda hit: requests.get(hit["link"], timeout=30).content, hits))
    assert len(pages) == count
    return time.perf_counter() - started


def both(kindly: Kindly, world: World, count: int, rounds: int) -> tuple[float, float]:
    """The median seconds of ours and of the bare exchange, taking turns."""
    turns = [(one_search(kindly, count), bare_search(world, count)) for _ in range(rounds)]
    return statistics.median(ours for ours, _ in turns), statistics.median(bare for _, bare in turns)


def tables(rounds: int = 7) -> list[Table]:
    """The ratios at 3, 5 and 10 results."""
    table = Table(
        "web_search over provider + slowest page",
        f"{DELAY_MS} ms each, so {UNAVOIDABLE:g} s cannot be avoided; median of {rounds} searches, pages of 70 kB. "
        "`bare`: plain requests in threads that throw the same pages away, in turn with ours; it shows how busy the "
        "machine was.",
        ("results", "seconds", "ratio", "bare seconds", "ratio to bare", "target"),
    )
    with World() as world, searcher(world) as kindly:
        for count in (3, 5, 10):
            ours, bare = both(kindly, world, count, rounds)
            target = verdict(ours / UNAVOIDABLE, TARGET) if count == 5 else ""
            table.rows.append((count, ours, ours / UNAVOIDABLE, bare, ours / bare, target))
    return [table]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    for table in tables(parser.parse_args().rounds):
        print(table.markdown())


if __name__ == "__main__":
    main()
