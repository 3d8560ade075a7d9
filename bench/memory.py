"""Memory, threads and open files after many reads, against requests + trafilatura over the same pages.

    python bench/memory.py [--reads 1000]

Each reader runs in a process of its own and reads pages on loopback, none of them twice, eight at a time. Linux only.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from report import ROOT, Table
from world import World

sys.path.insert(0, str(ROOT))

READS = 1000
AT_A_TIME = 8


def figures() -> dict[str, float]:
    """Resident megabytes, threads and open files of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(list(Path("/proc/self/fd").iterdir()))
    return {"MB": pages * os.sysconf("SC_PAGE_SIZE") / 1e6, "threads": threading.active_count(), "files": files}


def ours(environ: dict[str, str]) -> Callable[[str], str]:
    from kindly_search import Kindly

    kindly = Kindly.from_env(environ)
    return lambda url: kindly.get_content(url).page_content


def theirs(environ: dict[str, str]) -> Callable[[str], str]:
    import requests
    import trafilatura

    local = threading.local()

    def read(url: str) -> str:
        if not hasattr(local, "session"):
            local.session = requests.Session()
        return trafilatura.extract(local.session.get(url, timeout=30).text, output_format="markdown") or ""

    return read


READERS = {"kindly": ours, "requests + trafilatura": theirs}


def reading(name: str, reads: int, environ: dict[str, str], url: str) -> dict[str, dict[str, float]]:
    """The figures after a tenth of the reads and after all of them; runs in a process of its own."""
    read = READERS[name](environ)
    seen = {}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for label, first, last in (("early", 0, reads // 10), ("late", reads // 10, reads)):
            texts = list(pool.map(read, [f"{url}/0/{number}" for number in range(first, last)]))
            assert all(len(text) > 500 for text in texts), min(texts, key=len)
            seen[label] = figures()
    return seen


def tables(reads: int = READS) -> list[Table]:
    """The table of what stays after so many reads."""
    table = Table(
        f"After {reads:,} reads",
        f"Resident memory after {reads // 10} and after {reads:,} different pages, {AT_A_TIME} at a time; ratio: after "
        "all to after a tenth. Kindly keeps the pages of the last minutes in its cache, the peer has none.",
        ("reader", f"MB after {reads // 10}", f"MB after {reads:,}", "ratio", "threads", "open files"),
    )
    with World() as world:
        for name in READERS:
            seen = in_process(name, reads, world)
            early, late = seen["early"], seen["late"]
            row = (early["MB"], late["MB"], late["MB"] / early["MB"])
            table.rows.append((name, *row, *(f"{early[key]:.0f} → {late[key]:.0f}" for key in ("threads", "files"))))
    return [table]


def in_process(name: str, reads: int, world: World) -> dict[str, dict[str, float]]:
    order = json.dumps([name, reads, world.environ(), world.url])
    command = [sys.executable, __file__, "--order", order]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", type=int, default=READS)
    parser.add_argument("--order", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.order:
        print(json.dumps(reading(*json.loads(options.order))))
        return
    for table in tables(options.reads):
        print(table.markdown())


if __name__ == "__main__":
    main()
