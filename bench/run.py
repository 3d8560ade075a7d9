"""Runs the benchmarks, prints their tables and writes them to bench/RESULTS.md.

    uv run --group bench python bench/run.py [names] [--pages FOLDER] [--fetch-python PYTHON]

Names: startup, search, extraction, browser, memory, growth; all of them without one. Only ratios within one run mean
anything: the absolute figures are those of the machine at that moment.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import extraction
import growth
import memory
import search
import startup
from report import ROOT, Table

RESULTS = Path(__file__).with_name("RESULTS.md")
BROWSER_SECONDS = 150


def browser_tables() -> list[Table]:
    """The lines that bench/browser.py prints, which is a program of its own."""
    table = Table(
        "Browser", "Our worker against Playwright: the same Chromium, the same pages, taking turns.", ("figure",)
    )
    command = [sys.executable, str(ROOT / "bench" / "browser.py"), "--pages", "50", "--rounds", "10"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=BROWSER_SECONDS)
    except subprocess.TimeoutExpired:
        table.note = f"Left out: it did not end within {BROWSER_SECONDS} s."
        return [table]
    table.rows = [(f"`{line}`",) for line in ended.stdout.splitlines() if line.strip()]
    if ended.returncode:
        # Not the whole of stderr: it names folders of this machine.
        table.note += f" It ended early: {(ended.stderr.strip().splitlines() or ['no reason given'])[-1][:200]}"
    return [table]


def benchmarks(options: argparse.Namespace) -> dict[str, Callable[[], list[Table]]]:
    """Every benchmark by its name, in the order of the report."""
    return {
        "startup": lambda: startup.tables(fetch_python=options.fetch_python),
        "search": search.tables,
        "extraction": lambda: extraction.tables(options.pages),
        "browser": browser_tables,
        "memory": memory.tables,
        "growth": growth.tables,
    }


def heading() -> str:
    """Where and when the figures were taken, as far as it matters."""
    return (
        "# Benchmark results\n\n"
        "Made by `uv run --group bench python bench/run.py`. Only the ratios mean anything, and only within one run: "
        f"this one was made on {time.strftime('%Y-%m-%d')} with Python {platform.python_version()} on a machine with "
        f"{os.cpu_count()} cores, shared with others.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="names", help="the benchmarks to run (default: all)")
    parser.add_argument("--pages", type=Path, metavar="FOLDER", help="a folder with more pages for `extraction`")
    parser.add_argument("--fetch-python", default="", metavar="PYTHON", help="an interpreter that has mcp-server-fetch")
    options = parser.parse_args()
    known = benchmarks(options)
    if unknown := set(options.names) - set(known):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    sections = [heading()]
    for name, run in known.items():
        if not options.names or name in options.names:
            made = [table.markdown() for table in run()]
            print("\n".join(made), flush=True)
            sections += made
    if not options.names:
        RESULTS.write_text("\n".join(sections), encoding="utf-8")
        print(f"written to {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
