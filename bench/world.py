"""A web on loopback in a process of its own: a search provider and pages that take as long as they are told.

    with World() as world:
        kindly = Kindly.from_env(world.environ())
        kindly.web_search("300 x", 5)      # the provider waits 300 ms, and so does each page

The first word of a query is the delay in milliseconds; the rest makes the pages of this query different from others.
Pages are of about 70 kB; those of queries that go on with the word "small" are of about 2 kB.

"web" instead of a number makes it as slow and as unreliable as the web is: the provider takes 0.3 to 3 s, each page 0.2
to 5 s, one search in twenty is refused with a 500, so that the second provider must answer, and one page in twenty is
broken off once. The last word of such a query alone decides what happens to it: the same again for the same number.
"""

import asyncio
import gzip
import json
import random
import re
import subprocess
import sys
import urllib.parse

from extraction import article, made_pages

QUERY = re.compile(r"(\d+|web) (.+)")
FAULTS = 0.05


class World:
    """Starts the process; `url` is where it listens."""

    def __enter__(self) -> "World":
        self._process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        self.url = self._process.stdout.readline().strip()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate()

    def page(self, name: str, delay_ms: int = 0) -> str:
        """The address of a page that nobody has asked for yet, if the name is new."""
        return f"{self.url}/{delay_ms}/{name}"

    def environ(self) -> dict[str, str]:
        """The configuration that knows no other web."""
        return {
            "SERPER_API_KEY": "bench",
            "SERPER_SEARCH_ENDPOINT": f"{self.url}/search",
            "EXA_API_KEY": "bench",
            "EXA_SEARCH_ENDPOINT": f"{self.url}/exa",
            "KINDLY_ALLOW_PRIVATE_HOSTS": "127.0.0.1",
            "KINDLY_BROWSER_ENABLED": "false",
            "KINDLY_CONTENT_CHAIN": "http",
            "KINDLY_LOG_LEVEL": "ERROR",
        }


def small_page(seed: int) -> str:
    body, _ = article(random.Random(seed), paragraphs=3)
    return f"<!DOCTYPE html><title>Small {seed}</title><main>{body}</main>"


# Compressed, as nearly all pages are.
PAGES = [gzip.compress(page.html.encode()) for page in made_pages()]
SMALL_PAGES = [gzip.compress(small_page(seed).encode()) for seed in range(10)]


async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers one connection until it is closed, by us where an answer is None."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = re.search(rb"(?i)content-length: (\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b""
            path = head.split(b" ", 2)[1].decode()
            reply = await answer(path, body)
            if reply is None:
                break
            writer.write(reply)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def answer(path: str, body: bytes) -> bytes | None:
    status, kind, encoding = "200 OK", "application/json", ""
    if path in ("/search", "/exa"):
        content, delay, fails = found(path, json.loads(body))
        if fails:
            status, content = "500 Internal Server Error", b"{}"
    else:
        _, first, name = urllib.parse.unquote(path).split("/", 2)
        # A stable choice, so that each run reads the same pages.
        pages = SMALL_PAGES if name.startswith("small") else PAGES
        encoding = "Content-Encoding: gzip\r\n"
        kind, content, delay = "text/html; charset=utf-8", pages[sum(name.encode()) % len(pages)], int(first)
        if name.endswith("-breaks") and path not in BROKEN_OFF:
            BROKEN_OFF.add(path)
            return None
    await asyncio.sleep(delay / 1000)
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{encoding}Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


#: The pages that were broken off once.
BROKEN_OFF: set[str] = set()


def found(path: str, asked: dict[str, object]) -> tuple[bytes, int, bool]:
    """A provider's answer to a query, how long it takes, and whether it fails."""
    match = QUERY.fullmatch(str(asked.get("q") or asked["query"]))
    assert match, asked
    name, count = match[2].replace(" ", "-"), int(str(asked.get("num") or asked["numResults"]))
    fate = random.Random(f"{path} {name.rpartition('-')[2]}")
    if match[1] == "web":
        delay, fails = milliseconds(fate, 300, 400, 3000), path == "/search" and fate.random() < FAULTS
        delays = [milliseconds(fate, 200, 700, 5000) for _ in range(count)]
        ends = ["-breaks" if fate.random() < FAULTS else "" for _ in range(count)]
    else:
        delay, fails, delays, ends = int(match[1]), False, [int(match[1])] * count, [""] * count
    links = [f"{LISTENING[0]}/{delays[n]}/{name}-{n}{ends[n]}" for n in range(count)]
    hits = [{"title": f"Hit {link[-2:]}", "link": link, "url": link, "snippet": "What it says."} for link in links]
    return json.dumps({"organic": hits, "results": hits}).encode(), delay, fails


def milliseconds(fate: random.Random, least: float, mean: float, most: float) -> int:
    """A time as they are on the web: most are short, some are not."""
    return round(min(least + fate.expovariate(1 / mean), most))


#: Where this process listens, once it does.
LISTENING: list[str] = []


async def main() -> None:
    server = await asyncio.start_server(converse, "127.0.0.1", 0, backlog=1024)
    LISTENING.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    print(LISTENING[0], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
