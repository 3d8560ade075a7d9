"""A web on loopback in a process of its own: a search provider and pages that take as long as they are told.

    with World() as world:
        kindly = Kindly.from_env(world.environ())
        kindly.web_search("300 x", 5)      # the provider waits 300 ms, and so does each page

The first word of a query is the delay in milliseconds; the rest makes the pages of this query different from others.
Pages are of about 70 kB; those of queries that go on with the word "small" are of about 2 kB.
"""

import asyncio
import json
import random
import re
import subprocess
import sys
import urllib.parse

from extraction import article, made_pages

QUERY = re.compile(r"(\d+) (.+)")


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
            "KINDLY_ALLOW_PRIVATE_HOSTS": "127.0.0.1",
            "KINDLY_BROWSER_ENABLED": "false",
            "KINDLY_CONTENT_CHAIN": "http",
            "KINDLY_LOG_LEVEL": "ERROR",
        }


PAGES = [page.html.encode() for page in made_pages()]
SMALL_PAGES = [
    f"<!DOCTYPE html><title>Small {seed}</title><main>{article(random.Random(seed), paragraphs=3)[0]}</main>".encode()
    for seed in range(10)
]


async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers one connection until it is closed."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = re.search(rb"(?i)content-length: (\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b""
            path = head.split(b" ", 2)[1].decode()
            writer.write(await answer(path, body))
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def answer(path: str, body: bytes) -> bytes:
    if path == "/search":
        kind, content, delay = "application/json", *found(json.loads(body))
    else:
        _, first, name = urllib.parse.unquote(path).split("/", 2)
        # A stable choice, so that each run reads the same pages.
        pages = SMALL_PAGES if name.startswith("small") else PAGES
        kind, content, delay = "text/html; charset=utf-8", pages[sum(name.encode()) % len(pages)], int(first)
    await asyncio.sleep(delay / 1000)
    return f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def found(asked: dict[str, object]) -> tuple[bytes, int]:
    """The provider's answer to a query and how long it takes."""
    match = QUERY.fullmatch(str(asked["q"]))
    assert match, asked
    delay, name = int(match[1]), match[2].replace(" ", "-")
    links = [f"{LISTENING[0]}/{delay}/{name}-{number}" for number in range(int(str(asked["num"])))]
    hits = [{"title": f"Hit {link[-2:]}", "link": link, "snippet": "What it says."} for link in links]
    return json.dumps({"organic": hits}).encode(), delay


#: Where this process listens, once it does.
LISTENING: list[str] = []


async def main() -> None:
    server = await asyncio.start_server(converse, "127.0.0.1", 0, backlog=1024)
    LISTENING.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    print(LISTENING[0], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
