"""CPU time and memory from process start to the reply to `initialize`, against a minimal mcp server with one tool.

    python bench/startup.py [--rounds 10]

The two are started in turn, so that noise of the machine hits both; figures are medians. Linux only (/proc).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MINIMAL = """
from mcp.server.mcpserver import MCPServer
server = MCPServer("minimal", version="1")
@server.tool()
def echo(text: str) -> str:
    return text
server.run("stdio")
"""

SERVERS = {
    "minimal": [sys.executable, "-c", MINIMAL],
    "kindly": [sys.executable, str(ROOT / "kindly_search.py"), "start-mcp-server"],
}

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


def start_once(command: list[str]) -> tuple[float, float]:
    """CPU milliseconds and resident megabytes of one start."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(INITIALIZE).encode() + b"\n")
        process.stdin.flush()
        reply = json.loads(process.stdout.readline())
        assert reply["result"]["serverInfo"]["name"]
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        process.kill()
    return 1000 * ticks / os.sysconf("SC_CLK_TCK"), memory / 1e6


def measure(rounds: int) -> dict[str, tuple[float, float]]:
    """The median CPU time and memory of each server."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in SERVERS}
    for _ in range(rounds):
        for name, command in SERVERS.items():
            seen[name].append(start_once(command))
    return {
        name: (statistics.median(cpu for cpu, _ in runs), statistics.median(memory for _, memory in runs))
        for name, runs in seen.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    result = measure(parser.parse_args().rounds)
    print("| server | CPU ms | memory MB | CPU ratio | memory ratio |\n|---|---|---|---|---|")
    base_cpu, base_memory = result["minimal"]
    for name, (cpu, memory) in result.items():
        print(f"| {name} | {cpu:.0f} | {memory:.0f} | {cpu / base_cpu:.2f} | {memory / base_memory:.2f} |")


if __name__ == "__main__":
    main()
