"""CPU time and memory from process start to the reply to `initialize`, against a minimal mcp server and another one.

    python bench/startup.py [--rounds 10] [--fetch-python PYTHON]

The servers are started in turn, so that noise of the machine hits all of them; figures are medians. mcp-server-fetch
runs in this environment, or by the interpreter of another one that PYTHON names; without either it is left out.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys

from report import ROOT, Table, verdict

TARGET = 1.1

MINIMAL = """
from mcp.server.mcpserver import MCPServer
server = MCPServer("minimal", version="1")
@server.tool()
def echo(text: str) -> str:
    return text
server.run("stdio")
"""

# Imported and not run as a script: the console script imports a module that is compiled already.
KINDLY = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from kindly_search import main
main(["start-mcp-server"])
"""

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "bench", "version": "1"},
    },
}


def servers(fetch_python: str = "") -> dict[str, list[str]]:
    """The commands by name; mcp-server-fetch only where it is there."""
    found = {"minimal mcp server": [sys.executable, "-c", MINIMAL], "kindly": [sys.executable, "-c", KINDLY]}
    if fetch_python or importlib.util.find_spec("mcp_server_fetch"):
        found["mcp-server-fetch"] = [fetch_python or sys.executable, "-m", "mcp_server_fetch"]
    else:
        print("mcp-server-fetch is not installed (--fetch-python names another environment): left out", file=sys.stderr)
    return found


def start_once(command: list[str]) -> tuple[float, float]:
    """CPU milliseconds and resident megabytes of one start."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(INITIALIZE).encode() + b"\n")
        process.stdin.flush()
        reply = json.loads(process.stdout.readline())
        assert reply["result"]["serverInfo"]["name"]
        process.kill()
        # wait4 counts in microseconds, /proc in hundredths of a second.
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = status
    kilobyte = 1 if sys.platform == "darwin" else 1000
    return 1000 * (used.ru_utime + used.ru_stime), used.ru_maxrss * kilobyte / 1e6


def measure(commands: dict[str, list[str]], rounds: int) -> dict[str, tuple[float, float]]:
    """The median CPU time and memory of each server, after one start each that fills the caches."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for turn in range(rounds + 1):
        for name, command in commands.items():
            figures = start_once(command)
            seen[name] += [figures] if turn else []
    return {
        name: (statistics.median(cpu for cpu, _ in runs), statistics.median(memory for _, memory in runs))
        for name, runs in seen.items()
    }


def tables(rounds: int = 10, fetch_python: str = "") -> list[Table]:
    """The table of start-up figures."""
    result = measure(servers(fetch_python), rounds)
    base_cpu, base_memory = result["minimal mcp server"]
    table = Table(
        "Start-up",
        f"From process start to the reply to `initialize`; medians of {rounds} starts in turn.",
        ("server", "CPU ms", "memory MB", "CPU ratio", "memory ratio", "CPU target"),
    )
    for name, (cpu, memory) in result.items():
        target = verdict(cpu / base_cpu, TARGET) if name == "kindly" else ""
        table.rows.append((name, cpu, memory, cpu / base_cpu, memory / base_memory, target))
    return [table]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--fetch-python", default="", metavar="PYTHON")
    options = parser.parse_args()
    for table in tables(options.rounds, options.fetch_python):
        print(table.markdown())


if __name__ == "__main__":
    main()
