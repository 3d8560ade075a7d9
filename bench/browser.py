"""Our worker against Playwright, same Chromium, same pages, one run: time per page, memory, what is left behind.

    python bench/browser.py [--pages 200] [--rounds 15]

Both open a new browser context and a new page for each address and wait until the content is there: Playwright
with wait_for_function on the last words that the page draws, which it has to be told; our worker finds out itself.
The two take turns in blocks of five pages back to back (our worker opens its next page ahead of time, so each of
our pages but the first pays for that), with a second of rest in between, and whatever else the machine does hits both.
"""

import argparse
import os
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import chrome_worker
from kindly_search import Browser, BrowserSettings, Deadline

TEXT = "<p>" + "The quick brown fox jumps over the lazy dog and tells everybody about it. " * 20 + "</p>"
PAGES = {
    "/static": f"<title>Static</title><h1>Static</h1>{TEXT * 20}<p>all of it</p>",
    "/script": f"<title>Script</title><div id=a></div><script src=/app.js></script>{TEXT}",
}
SCRIPT = """fetch('/data.json').then(r => r.json()).then(rows => {
  for (const row of rows) { const p = document.createElement('p'); p.textContent = row; a.append(p); }
  a.append('all of it');
})"""
ROWS = "[" + ",".join(f'"row {i} of the table"' for i in range(500)) + "]"


class Site(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = self.path.partition("?")[0]
        kind = {".js": "text/javascript", "json": "application/json"}.get(path[-4:].removeprefix("p"), "text/html")
        kind = "text/javascript" if path.endswith(".js") else kind
        body = {"/app.js": SCRIPT, "/data.json": ROWS}.get(path) or PAGES.get(path, "")
        self.send_response(200)
        self.send_header("Content-Type", kind + "; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        pass


def serve():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


class Ours:
    def __init__(self, site):
        host = site.removeprefix("http://")
        self.browser = Browser(BrowserSettings(), environ=os.environ, allow_private_hosts=host)

    def read(self, url):
        html = self.browser.render(url, deadline=Deadline(30)).html
        assert "all of it" in html, html[:200]

    def read_many(self, urls):
        with ThreadPoolExecutor(len(urls)) as pool:
            list(pool.map(self.read, urls))

    def close(self):
        self.browser.close()


class Playwright:
    def __init__(self, path):
        self.manager = sync_playwright().start()
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        self.browser = self.manager.chromium.launch(executable_path=path, args=arguments)

    def read(self, url):
        context = self.browser.new_context()
        page = context.new_page()
        page.goto(url)
        page.wait_for_function("document.body.textContent.includes('all of it')")
        assert "all of it" in page.content()
        context.close()

    def close(self):
        self.browser.close()
        self.manager.stop()


def read_many_with_playwright(path, urls):
    """Three pages at once with its own asyncio interface; seconds."""
    import asyncio

    from playwright.async_api import async_playwright

    async def one(browser, url):
        context = await browser.new_context()
        page = await context.new_page()
        await page.goto(url)
        await page.wait_for_function("document.body.textContent.includes('all of it')")
        assert "all of it" in await page.content()
        await context.close()

    async def rounds():
        times = []
        async with async_playwright() as manager:
            arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = await manager.chromium.launch(executable_path=path, args=arguments)
            for index, batch in enumerate(urls):
                started = time.perf_counter()
                await asyncio.gather(*(one(browser, url) for url in batch))
                if index:
                    times.append(time.perf_counter() - started)
            await browser.close()
        return times

    return asyncio.run(rounds())


def timed(read, url):
    started = time.perf_counter()
    read(url)
    return time.perf_counter() - started


def block(read, url):
    """The times of five pages in a row, after one that does not count."""
    time.sleep(1)
    return [timed(read, f"{url}?{index}") for index in range(6)][1:]


def line(name, ours, theirs, most):
    a, b = statistics.median(ours), statistics.median(theirs)
    verdict = "ok" if a / b <= most else "MISSED"
    print(
        f"{name:<14} ours {a * 1000:6.0f} ms   Playwright {b * 1000:6.0f} ms   ratio {a / b:.2f} (≤ {most}) {verdict}"
    )


def worker_of():
    """The worker process that we have started."""
    for child in psutil.Process().children():
        if any("chrome_worker" in part for part in child.cmdline()):
            return child
    raise SystemExit("no worker runs")


def cold(read, close):
    started = time.perf_counter()
    thing = read()
    elapsed = time.perf_counter() - started
    close(thing)
    return elapsed


def first_page_of_ours(site):
    ours = Ours(site)
    ours.read(site + "/static")
    return ours


def first_page_of_playwright(path, site):
    theirs = Playwright(path)
    theirs.read(site + "/static")
    return theirs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    path = chrome_worker.find_browser(os.environ)
    site = serve()

    # Cold: from nothing to the first page. Ours starts a worker process; Playwright starts its driver.
    ours_cold, their_cold = [], []
    for _ in range(3):
        their_cold.append(cold(lambda: first_page_of_playwright(path, site), lambda thing: thing.close()))
        ours_cold.append(cold(lambda: first_page_of_ours(site), lambda thing: thing.close()))
    line("cold", ours_cold, their_cold, 1.2)

    ours, theirs = Ours(site), Playwright(path)
    for path_of in ("/static", "/script"):
        a, b = [], []
        for _ in range(max(1, options.rounds // 5)):
            a += block(ours.read, site + path_of)
            b += block(theirs.read, site + path_of)
        line("warm " + path_of, a, b, 1.0)
    theirs.close()

    a, b = [], []
    for turn in range(max(1, options.rounds // 5)):
        batches = [[f"{site}/script?{turn}-{i}-{j}" for j in range(3)] for i in range(6)]
        a += [timed(ours.read_many, batch) for batch in batches][1:]
        b += in_thread(read_many_with_playwright, path, batches)
    line("3 at once", a, b, 1.0)

    worker = worker_of()
    for index in range(10):
        ours.read(f"{site}/static?w{index}")
    before = worker.memory_info().rss
    started = time.perf_counter()
    for index in range(options.pages):
        ours.read(f"{site}/{'script' if index % 2 else 'static'}?n{index}")
    each = (time.perf_counter() - started) / options.pages
    growth = (worker.memory_info().rss - before) / 1e6
    sizes = f"worker {before / 1e6:.0f} MB, grew by {growth:.1f} MB (< 30)"
    print(f"{options.pages} pages: {each * 1000:.0f} ms each, {sizes}")
    children = worker.children(recursive=True)
    ours.close()
    left = psutil.wait_procs(children, timeout=3)[1]
    print(f"processes left: {len([p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE])}")


def in_thread(function, *arguments):
    """Away from the thread where Playwright's sync interface has left an event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


if __name__ == "__main__":
    main()
