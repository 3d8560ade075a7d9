"""Wall time of web_search over what nobody can avoid: the provider's time plus that of the slowest page.

    python bench/search.py [--rounds 5]

Provider and pages are on loopback, in a process of their own, and take 300 ms each; no page is read twice.
"""

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from extraction import lxml_hidden
from report import ROOT, Table, verdict
from world import World

sys.path.insert(0, str(ROOT))

from kindly_search import Kindly

DELAY_MS = 300
UNAVOIDABLE = 2 * DELAY_MS / 1000
TARGET = 1.2

#: The parsers: what `pip install` gives, and the extra [fast].
BACKENDS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "html5lib": lxml_hidden,
    "lxml": contextlib.nullcontext,
}

_numbers = itertools.count()


@contextlib.contextmanager
def searcher(world: World, backend: str) -> Iterator[Kindly]:
    """A Kindly that has warmed up: the first call of a process also pays for imports."""
    with BACKENDS[backend](), Kindly.from_env(world.environ()) as kindly:
        kindly.web_search(f"0 warm {backend}", 3)
        yield kindly


def one_search(kindly: Kindly, count: int) -> float:
    """Seconds of one search with `count` results that were never read before."""
    started = time.perf_counter()
    report = kindly.web_search(f"{DELAY_MS} run {next(_numbers)}", count)
    elapsed = time.perf_counter() - started
    assert len(report.results) == count, report.meta
    assert not [page["failure"] for page in report.meta["pages"] if page["failure"]], report.meta
    return elapsed


def tables(rounds: int = 5) -> list[Table]:
    """The ratios at 3, 5 and 10 results."""
    table = Table(
        "web_search over provider + slowest page",
        f"{DELAY_MS} ms each, so {UNAVOIDABLE:g} s cannot be avoided; median of {rounds} searches; pages of about 70 kB.",
        ("results", "parser", "seconds", "ratio", "target"),
    )
    with World() as world:
        for backend in BACKENDS:
            with searcher(world, backend) as kindly:
                for count in (3, 5, 10):
                    seconds = statistics.median(one_search(kindly, count) for _ in range(rounds))
                    ratio = seconds / UNAVOIDABLE
                    table.rows.append((count, backend, seconds, ratio, verdict(ratio, TARGET) if count == 5 else ""))
    return [table]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    for table in tables(parser.parse_args().rounds):
        print(table.markdown())


if __name__ == "__main__":
    main()
