"""chrome_worker.py: how it finds and starts a browser, what it answers for pages of every kind, what it leaves behind.

Tests marked `chrome` run a real browser on loopback pages. They are skipped where there is none, unless
KINDLY_REQUIRE_CHROME=1 says that there has to be one.
"""

# ruff: noqa: E501  (a page reads better on one line)

import base64
import contextlib
import glob
import io
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import chrome_worker
from kindly_search import AddressGuard, AddressNotAllowed, BrowserSettings, Deadline, Unreachable

WORKER = chrome_worker.__file__
ROOT = Path(WORKER).parent
LOREM = "<p>" + "The quick brown fox jumps over the lazy dog and tells everybody about it. " * 8 + "</p>"
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

# ----------------------------------------------------------------------------
# Pages and workers
# ----------------------------------------------------------------------------

PAGES = {
    "/static": f"<title>Static</title><h1>Static</h1>{LOREM}",
    "/late300": "<div id=a></div><script>onload=()=>setTimeout(()=>a.textContent='drawn late',300)</script>",
    "/late1500": "<div id=a></div><script>onload=()=>setTimeout(()=>a.textContent='drawn later',1500)</script>",
    "/late-main": f"<nav>{LOREM}</nav><main></main><script>"
    "onload=()=>setTimeout(()=>document.querySelector('main').textContent='main is here',1500)</script>",
    "/fetched": f"{LOREM}<div id=a></div><script>fetch('/slow-json').then(r=>r.json()).then(j=>a.textContent=j.word)</script>",
    "/loop": f"{LOREM}<p>before the loop</p><script>while(true){{}}</script>",
    "/loop-later": f"{LOREM}<script>onload=()=>setTimeout(()=>{{while(true){{}}}},10)</script>",
    "/js-redirect": "<script>location.href='/static'</script>",
    "/js-redirect-later": "<p>moving</p><script>onload=()=>setTimeout(()=>{location.href='/static'},400)</script>",
    "/redirect-to-late": "<p>moving</p><script>setTimeout(()=>{location.href='/late-main'},300)</script>",
    "/poll-late": f"{LOREM}<main></main><script>fetch('/never');new EventSource('/never');"
    "setTimeout(()=>document.querySelector('main').textContent='late beside a poll',800)</script>",
    "/timer-chain": f"{LOREM}<main></main><script>onload=()=>setTimeout(()=>fetch('/slow-json').then(r=>r.json())"
    ".then(j=>setTimeout(()=>document.querySelector('main').textContent=j.word+' in a chain',500)),500)</script>",
    "/interval": f"{LOREM}<p id=a></p><script>let n=0;setInterval(()=>{{a.textContent=++n}},1)</script>",
    "/frames": f"{LOREM}<p id=a></p><script>let n=0;const f=()=>{{a.textContent='frame '+ ++n;requestAnimationFrame(f)}};f()</script>",
    "/meta-redirect": "<meta http-equiv=refresh content='0;url=/static'><p>moving</p>",
    "/meta-redirect-1s": "<meta http-equiv=refresh content='1;url=/static'><p>moving</p>",
    "/meta-loop": f"<meta http-equiv=refresh content='0'><p>again</p>{LOREM}",
    "/no-root": "<p>gone</p><script>onload=()=>document.documentElement.remove()</script>",
    "/alert": "<script>alert(1);confirm(2);prompt(3);document.write('after the dialogs')</script>",
    "/beforeunload": "<p>leaving</p><script>onbeforeunload=e=>{e.preventDefault();e.returnValue='x';return 'x'};"
    "onload=()=>setTimeout(()=>{location.href='/static'},50)</script>",
    "/popups": f"{LOREM}<script>for(let i=0;i<5;i++)window.open('/static?'+i)</script>",
    "/consent": f"<main><h1>Article</h1>{LOREM}</main><div id=onetrust-consent-sdk style='position:fixed;inset:0'>"
    "We value your privacy</div>",
    "/shadow": "<my-card><b slot=t>Slotted title</b></my-card><script>customElements.define('my-card',class extends "
    "HTMLElement{constructor(){super();this.attachShadow({mode:'open'}).innerHTML="
    "'<style>b{color:red}</style><h2><slot name=t></slot></h2><p>Inside the shadow</p><in-ner></in-ner>'}});"
    "customElements.define('in-ner',class extends HTMLElement{constructor(){super();"
    "this.attachShadow({mode:'open'}).innerHTML='<p>Nested shadow</p>'}})</script>",
    "/resources": f"{LOREM}<img src=/r.png><video src=/r.mp4 autoplay muted></video><style>@font-face{{font-family:f;"
    "src:url(/r.woff2)}p{font-family:f}</style><script>new Image().src='/r2.png'</script>",
    "/poll": f"{LOREM}<script>fetch('/never');setInterval(()=>fetch('/static'),100)</script>",
    "/tamper": f"{LOREM}<script>Object.defineProperty(document,'readyState',{{get(){{throw 1}}}});"
    "Element.prototype.getHTML=document.querySelectorAll=()=>{throw 2};Array.prototype.toJSON=()=>'x'</script>",
    "/agent": f"{LOREM}<p id=a></p><script>a.textContent='agent='+navigator.userAgent</script>",
    "/cookie": f"{LOREM}<p id=a></p><script>a.textContent='had['+document.cookie+localStorage.length+']';"
    "document.cookie='k=v';localStorage.k='v'</script>",
    "/visible": f"{LOREM}<p id=a></p><script>requestAnimationFrame(()=>a.textContent='painted '+document.visibilityState)</script>",
    "/surrogate": f"{LOREM}<p id=a></p><script>a.textContent='x\\ud800y'</script>",
    "/observer": f"{LOREM}<p id=a></p><script>new IntersectionObserver(()=>a.textContent='seen').observe(a)</script>",
}


class Pages(BaseHTTPRequestHandler):
    """Serves PAGES and the special cases, and notes every path that was asked for."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.server.asked.append((path, dict(self.headers)))
        special = getattr(self, "get_" + path[1:].replace("-", "_").replace(".", "_"), None)
        with contextlib.suppress(OSError):
            if path in self.server.pages:
                self.reply(self.server.pages[path])
            elif special:
                special()
            else:
                self.reply("<h1>Not here</h1>" + LOREM, status=404)

    def reply(self, body, *, status=200, kind="text/html; charset=utf-8", **headers):
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def get_sw_js(self):
        self.reply(SERVICE_WORKER, kind="text/javascript")

    def get_never(self):
        self.server.stop.wait(30)

    def get_slow_json(self):
        time.sleep(1.0)
        self.reply('{"word": "fetched late"}', kind="application/json")

    def get_half(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write((LOREM + "<p>the first half</p>").encode())
        self.wfile.flush()
        self.server.stop.wait(30)

    def get_slow_image_sheet(self):
        self.reply(f"<link rel=stylesheet href=/never>{LOREM}")

    def get_auth(self):
        self.reply("<h1>Login</h1>", status=401, WWW_Authenticate='Basic realm="x"')

    def get_forbidden(self):
        self.reply("<h1>Forbidden</h1>" + LOREM, status=403)

    def get_empty404(self):
        self.reply("", status=404)

    def get_file(self):
        self.reply(b"PK\3\4" * 100, kind="application/zip", Content_Disposition="attachment; filename=a.zip")

    def get_picture(self):
        self.reply(b"\x89PNG" * 10, kind="image/png")

    def get_pdf(self):
        self.reply(b"%PDF-1.4 " * 10, kind="application/pdf")

    def get_text(self):
        self.reply("plain <text> here", kind="text/plain")

    def get_huge(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        block = (LOREM * 100).encode()
        for _ in range(100_000_000 // len(block)):
            self.wfile.write(block)

    def get_redirect(self):
        self.send_response(302)
        self.send_header("Location", self.path.partition("?")[2])
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


class Site:
    """A web server on loopback."""

    def __init__(self, pages=PAGES, *, context=None):
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
        self.server.daemon_threads = True
        self.server.pages, self.server.asked, self.server.stop = dict(pages), [], threading.Event()
        if context:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.host = f"127.0.0.1:{self.server.server_address[1]}"
        self.url = ("https://" if context else "http://") + self.host
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def paths(self):
        return [path for path, _ in self.server.asked]

    def close(self):
        self.server.stop.set()
        self.server.shutdown()
        self.server.server_close()


class Asked(dict):
    """An answer; missing fields read as None."""

    def __missing__(self, name):
        return None


class RunningWorker:
    """chrome_worker.py in a process of its own, spoken to as kindly_search.py does."""

    def __init__(self, *arguments, **environ):
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "SYSTEMROOT", "LANG") if name in os.environ}
        self.process = subprocess.Popen(
            [sys.executable, WORKER, *(arguments or ["--serve"])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**kept, "TMPDIR": tempfile.gettempdir(), **environ},
            cwd=tempfile.gettempdir(),
        )
        self.answers, self.lines, self.count = {}, [], 0
        self.arrived = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self.process.stdout:
            answer = json.loads(line)
            with self.arrived:
                self.lines.append(answer)
                self.answers[answer.get("id")] = answer
                self.arrived.notify_all()

    def send(self, **message):
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def start(self, url, **more):
        self.count += 1
        self.send(id=self.count, url=url, **more)
        return self.count

    def result(self, number, timeout=40):
        with self.arrived:
            assert self.arrived.wait_for(lambda: number in self.answers, timeout), "no answer came"
            return Asked(self.answers[number])

    def ask(self, url, **more):
        return self.result(self.start(url, **more), more.get("timeout", 20) + 3)

    def chromium(self):
        """The processes of this worker's browser: the command line of each by its id."""
        return chromium_of(self.process.pid)

    def close(self):
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        self.process.wait(5)
        self.process.stdout.close()


def chromium_of(pid):
    """Every living process of this worker's browser: the one with its profile, and all in the same session."""
    mark, everyone = f"kindly-chrome-{pid}-".encode(), {}
    for path in glob.glob("/proc/[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            session = Path(path, "stat").read_text().rpartition(")")[2].split()[3]
            everyone[int(path[6:])] = (session, Path(path, "cmdline").read_bytes())
    sessions = {session for session, command in everyone.values() if mark in command}
    return {process: command for process, (session, command) in everyone.items() if session in sessions}


def renderers(worker):
    """The renderer processes of a worker's browser."""
    return [pid for pid, command in worker.chromium().items() if b"--type=renderer" in command]


def gone_within(seconds, pids):
    """Waits until none of the processes exists; how long it took."""
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        left = [pid for pid in pids if _state(pid) != "Z"]
        if not left:
            return time.monotonic() - started
        time.sleep(0.05)
    return None


def _state(pid):
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


@pytest.fixture(scope="session")
def browser_path():
    path = chrome_worker.find_browser(os.environ)
    if not path:
        if os.environ.get("KINDLY_REQUIRE_CHROME") == "1":
            pytest.fail("KINDLY_REQUIRE_CHROME=1, but no browser was found")
        pytest.skip("no browser was found")
    return path


@pytest.fixture(scope="module")
def site():
    site = Site()
    yield site
    site.close()


@pytest.fixture(scope="module")
def worker(browser_path, site):
    worker = RunningWorker(KINDLY_ALLOW_PRIVATE_HOSTS=site.host)
    yield worker
    worker.close()


@pytest.fixture
def own_worker(browser_path, site, tmp_path):
    """A worker for one test, with a temporary folder of its own."""
    made = []

    def make(*arguments, **environ):
        defaults = {"KINDLY_ALLOW_PRIVATE_HOSTS": site.host, "TMPDIR": str(tmp_path)}
        made.append(RunningWorker(*arguments, **{**defaults, **environ}))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


# ----------------------------------------------------------------------------
# When a page is ready
# ----------------------------------------------------------------------------


@pytest.mark.chrome
class TestPages:
    def test_a_static_page_comes_back_whole(self, worker, site):
        answer = worker.ask(site.url + "/static")
        assert (answer["status"], answer["content_type"], answer["title"]) == (200, "text/html", "Static")
        assert "<h1>Static</h1>" in answer["html"] and answer["partial"] is False
        assert answer["url"] == site.url + "/static"

    @pytest.mark.parametrize(
        "path, text",
        [
            ("/late300", "drawn late"),
            ("/late1500", "drawn later"),
            ("/late-main", "main is here"),
            ("/fetched", "fetched late"),
            ("/js-redirect", "<h1>Static</h1>"),
            ("/js-redirect-later", "<h1>Static</h1>"),
            ("/redirect-to-late", "main is here"),
            ("/poll-late", "late beside a poll"),
            ("/timer-chain", "fetched late in a chain"),
            ("/interval", "quick brown fox"),
            ("/frames", "frame "),
            ("/meta-redirect", "<h1>Static</h1>"),
            ("/meta-redirect-1s", "<h1>Static</h1>"),
            ("/alert", "after the dialogs"),
            ("/beforeunload", "<h1>Static</h1>"),
            ("/popups", "quick brown fox"),
            ("/poll", "quick brown fox"),
            ("/tamper", "quick brown fox"),
            ("/visible", "painted visible"),
            ("/observer", "seen"),
            ("/surrogate", "x\ufffdy"),
            ("/redirect?/static", "<h1>Static</h1>"),
            ("/text", "plain &lt;text&gt; here"),
        ],
    )
    def test_what_a_page_draws_is_there(self, worker, site, path, text):
        answer = worker.ask(site.url + path)
        assert text in (answer["html"] or str(answer)), answer
        assert answer["partial"] is False

    def test_a_redirect_shows_in_the_url(self, worker, site):
        assert worker.ask(site.url + "/js-redirect")["url"] == site.url + "/static"

    def test_a_page_that_never_answers_times_out(self, worker, site):
        started = time.monotonic()
        assert worker.ask(site.url + "/never", timeout=2)["error"] == "timeout"
        assert time.monotonic() - started < 2.5

    def test_a_page_that_stops_half_way_is_partial(self, worker, site):
        answer = worker.ask(site.url + "/half", timeout=10)
        assert "the first half" in answer["html"] and answer["partial"] is True
        assert answer["ms"] < 6000

    def test_at_the_deadline_what_is_there_comes_back(self, worker, site):
        answer = worker.ask(site.url + "/half", timeout=2)
        assert "the first half" in answer["html"] and answer["partial"] is True

    @pytest.mark.parametrize("path", ["/loop", "/loop-later"])
    def test_an_endless_script_is_ended(self, worker, site, path):
        answer = worker.ask(site.url + path, timeout=12)
        assert "quick brown fox" in (answer["html"] or str(answer))
        assert answer["ms"] < 9000

    def test_a_page_that_refreshes_for_ever_comes_back(self, worker, site):
        answer = worker.ask(site.url + "/meta-loop", timeout=12)
        assert "again" in (answer["html"] or str(answer))

    def test_a_page_that_takes_its_root_away_comes_back_empty_and_soon(self, worker, site):
        answer = worker.ask(site.url + "/no-root", timeout=12)
        assert (answer["status"], answer["html"]) == (200, "") and answer["ms"] < 8000

    def test_a_crashed_page_is_named_and_the_next_one_works(self, worker, site):
        assert worker.ask(site.url + "/static")["status"] == 200
        number = worker.start(site.url + "/half", timeout=20)
        time.sleep(1)
        for pid in renderers(worker):
            os.kill(pid, signal.SIGKILL)
        assert worker.result(number)["error"] == "crashed"
        assert worker.ask(site.url + "/static")["status"] == 200

    def test_http_auth_needs_a_login(self, worker, site):
        assert worker.ask(site.url + "/auth")["error"] == "needs_login"

    @pytest.mark.parametrize(
        "path, kind", [("/file", "application/zip"), ("/picture", "image/png"), ("/pdf", "application/pdf")]
    )
    def test_a_file_is_not_a_page(self, worker, site, path, kind):
        answer = worker.ask(site.url + path)
        assert (answer["error"], answer["content_type"]) == ("download", kind)

    def test_an_error_page_with_content_keeps_its_status(self, worker, site):
        answer = worker.ask(site.url + "/forbidden")
        assert answer["status"] == 403 and "Forbidden" in answer["html"]

    def test_an_empty_error_is_not_chromiums_own_page(self, worker, site):
        answer = worker.ask(site.url + "/empty404")
        assert (answer["error"], answer["status"]) == ("unreachable", 404)

    def test_a_hundred_megabytes_are_cut(self, worker, site):
        answer = worker.ask(site.url + "/huge", timeout=30)
        assert answer["partial"] is True and 1_000_000 < len(answer["html"]) <= chrome_worker.LONGEST_HTML

    def test_an_overlay_does_not_replace_the_content(self, worker, site):
        answer = worker.ask(site.url + "/consent")
        assert "<h1>Article</h1>" in answer["html"] and "We value your privacy" not in answer["html"]

    def test_open_shadow_trees_are_included_where_they_show(self, worker, site):
        html = worker.ask(site.url + "/shadow")["html"]
        for part in ('<h2><b slot="t">Slotted title</b></h2>', "Inside the shadow", "<p>Nested shadow</p>"):
            assert part in html
        assert "color:red" not in html and "<script" not in html

    def test_images_media_and_fonts_are_not_loaded(self, worker, site):
        site.server.asked.clear()
        assert worker.ask(site.url + "/resources")["status"] == 200
        assert [path for path in site.paths if path.startswith("/r.") or path.startswith("/r2")] == []

    def test_nothing_is_kept_from_one_page_to_the_next(self, worker, site):
        worker.ask(site.url + "/cookie")
        assert "had[0]" in worker.ask(site.url + "/cookie")["html"]

    def test_the_browser_does_not_call_itself_headless(self, worker, site):
        site.server.asked.clear()
        assert "agent=Mozilla" in worker.ask(site.url + "/agent")["html"]
        assert all("Headless" not in headers.get("User-Agent", "") for _, headers in site.server.asked)

    def test_a_refused_connection_is_unreachable(self, worker):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        worker2 = RunningWorker(KINDLY_ALLOW_PRIVATE_HOSTS=f"127.0.0.1:{port}")
        try:
            answer = worker2.ask(f"http://127.0.0.1:{port}/")
        finally:
            worker2.close()
        assert answer["error"] == "unreachable" and "127.0.0.1" in answer["message"]

    def test_ten_pages_at_once_all_come_back(self, worker, site):
        numbers = [worker.start(f"{site.url}/static?{i}") for i in range(10)]
        assert all(worker.result(number)["url"].endswith(f"?{i}") for i, number in enumerate(numbers))

    def test_a_slow_page_does_not_hold_up_a_quick_one(self, worker, site):
        slow = worker.start(site.url + "/half", timeout=6)
        quick = worker.ask(site.url + "/static")
        assert quick["status"] == 200 and slow not in worker.answers
        assert worker.result(slow)["partial"] is True

    def test_a_queued_page_times_out_in_time(self, worker, site):
        slow = [worker.start(site.url + "/never", timeout=4) for _ in range(chrome_worker.PAGES_AT_ONCE)]
        started = time.monotonic()
        assert worker.ask(site.url + "/static", timeout=1)["error"] == "timeout"
        assert time.monotonic() - started < 1.5
        assert [worker.result(number)["error"] for number in slow] == ["timeout"] * len(slow)

    def test_a_request_can_be_cancelled(self, worker, site):
        number = worker.start(site.url + "/never", timeout=10)
        time.sleep(0.5)
        worker.send(cmd="cancel", id=number)
        assert worker.result(number, 2)["error"] == "cancelled"


# ----------------------------------------------------------------------------
# The guard
# ----------------------------------------------------------------------------

WAYS = {
    "redirect": None,
    "js-redirect": "<script>location.href='{c}/js-redirect'</script>",
    "subresource": f"{LOREM}<script src='{{c}}/subresource'></script><link rel=stylesheet href='{{c}}/subresource'>",
    "fetch": f"{LOREM}<script>fetch('{{c}}/fetch',{{mode:'no-cors'}})</script>",
    "iframe": f"{LOREM}<iframe src='{{c}}/iframe'></iframe>",
    "websocket": f"{LOREM}<script>new WebSocket('{{w}}/websocket')</script>",
    "popup": f"{LOREM}<script>window.open('{{c}}/popup');fetch('/slow-json')</script>",
    "service-worker": f"{LOREM}<script>navigator.serviceWorker.register('/sw.js').then(()=>navigator.serviceWorker.ready)"
    ".then(r=>r.active.postMessage('{c}/service-worker'))</script>",
    "speculation": f'{LOREM}<script type=speculationrules>{{{{"prefetch":[{{{{"source":"list","urls":["{{c}}/speculation"]}}}}],'
    '"prerender":[{{"source":"list","urls":["{c}/speculation"]}}]}}</script>'
    "<link rel=prefetch href='{c}/speculation'><link rel=preconnect href='{c}'>",
    "worker": f"{LOREM}<script>new Worker(URL.createObjectURL(new Blob([\"fetch('{{c}}/worker',{{{{mode:'no-cors'}}}})\"])))</script>",
    "beacon": f"{LOREM}<script>navigator.sendBeacon('{{c}}/beacon','x');new EventSource('{{c}}/beacon')</script>",
    "other-spelling": f"{LOREM}<script>fetch('http://2130706433:{{p}}/other',{{mode:'no-cors'}});"
    "fetch('http://localhost:{p}/other',{mode:'no-cors'});fetch('http://[::ffff:127.0.0.1]:{p}/other',{mode:'no-cors'})</script>",
}
SERVICE_WORKER = (
    "self.onmessage=e=>fetch(e.data,{mode:'no-cors'}).catch(()=>0);self.onactivate=e=>e.waitUntil(clients.claim())"
)


def way(template, canary):
    """A page that tries to reach the canary."""
    port = canary.host.rpartition(":")[2]
    for mark, value in (("{c}", canary.url), ("{w}", f"ws://{canary.host}"), ("{p}", port)):
        template = template.replace(mark, value)
    return template.replace("{{", "{").replace("}}", "}")


class Canary:
    """Counts connections. Nothing that a page does may make one."""

    def __init__(self):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self.server.getsockname()[1]}"
        self.url = "http://" + self.host
        self.heard = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.server.accept()
                with client:
                    client.settimeout(1)
                    with contextlib.suppress(OSError):
                        self.heard.append(client.recv(200))
                        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    def close(self):
        self.server.close()


@pytest.fixture(scope="module")
def canary():
    canary = Canary()
    yield canary
    canary.close()


@pytest.fixture(scope="module")
def trap(canary):
    pages = {f"/{name}": way(template, canary) for name, template in WAYS.items() if template}
    trap = Site(pages)
    yield trap
    trap.close()


@pytest.fixture(scope="module")
def guarded(browser_path, trap):
    worker = RunningWorker(KINDLY_ALLOW_PRIVATE_HOSTS=trap.host)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def open_worker(browser_path):
    worker = RunningWorker(KINDLY_ALLOW_PRIVATE_HOSTS="*")
    yield worker
    worker.close()


@pytest.mark.chrome
class TestGuard:
    @pytest.mark.parametrize("name", WAYS)
    def test_no_way_leads_from_a_page_to_a_private_address(self, guarded, trap, canary, name):
        canary.heard.clear()
        trap.server.asked.clear()
        path = f"/redirect?{canary.url}/redirect" if name == "redirect" else f"/{name}"
        guarded.ask(trap.url + path, timeout=8)
        time.sleep(0.3)
        assert trap.paths, "the page itself must have been loaded"
        assert canary.heard == []

    # Without this the tests above would prove nothing. Popups are blocked anyway: TestConnections looks after them.
    @pytest.mark.parametrize("name", sorted(WAYS.keys() - {"popup"}))
    def test_the_same_ways_work_where_the_address_is_allowed(self, open_worker, trap, canary, name):
        canary.heard.clear()
        path = f"/redirect?{canary.url}/redirect" if name == "redirect" else f"/{name}"
        open_worker.ask(trap.url + path, timeout=8)
        time.sleep(0.3)
        assert canary.heard

    def test_a_private_address_is_refused_before_a_browser_starts(self, browser_path):
        worker = RunningWorker(KINDLY_BROWSER_EXECUTABLE_PATH="/nowhere")
        try:
            for url in ("http://127.0.0.1/", "http://localhost:1/", "http://169.254.169.254/", "http://10.0.0.1/"):
                assert worker.ask(url)["error"] == "address_not_allowed"
        finally:
            worker.close()

    @pytest.mark.parametrize("path", ["/redirect?{c}/x", "/js-redirect"])
    def test_a_redirect_to_a_private_address_is_named(self, guarded, trap, canary, path):
        answer = guarded.ask(trap.url + path.replace("{c}", canary.url), timeout=8)
        assert answer["error"] == "address_not_allowed" and "private" in answer["message"]

    @pytest.mark.parametrize(
        "url", ["file:///etc/passwd", "chrome://version", "javascript:1", "data:text/html,x", "ftp://a.b/"]
    )
    def test_only_http_is_read(self, guarded, url):
        assert guarded.ask(url)["error"] == "bad_request"


class EchoServer:
    """Answers every connection with `reply` and remembers what it was sent."""

    def __init__(self, reply=b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self.heard, self.reply = [], reply
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.server.accept()
                with client:
                    self.heard.append(client.recv(65536))
                    client.sendall(self.reply)

    def close(self):
        self.server.close()


@pytest.fixture
def echo():
    servers = []

    def make(*arguments):
        servers.append(EchoServer(*arguments))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def through(proxy, request, more=b""):
    """What comes back for a request sent to the proxy."""
    host, _, port = proxy.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(request)
        if more:
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
            sock.sendall(more)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def resolving(**names):
    """A resolver that knows these names only."""

    def resolve(host, port, **options):
        if host not in names:
            raise OSError(host)
        return [(0, 0, 0, "", (address, port)) for address in names[host]]

    return resolve


class TestProxy:
    """The proxy alone, spoken to by hand."""

    def test_it_connects_to_the_address_that_was_checked(self, echo):
        server = echo()
        guard = AddressGuard("a.test", resolve=resolving(**{"a.test": ["127.0.0.1"]}))
        proxy = chrome_worker.GuardProxy(guard)
        answer = through(proxy, f"GET http://a.test:{server.port}/x?y=1 HTTP/1.1\r\nHost: a.test\r\n\r\n".encode())
        assert answer.endswith(b"ok")
        assert server.heard[0].startswith(b"GET /x?y=1 HTTP/1.1\r\n") and b"Connection: close" in server.heard[0]

    def test_one_private_address_among_several_closes_the_host(self):
        guard = AddressGuard(resolve=resolving(**{"b.test": ["93.184.216.34", "127.0.0.1"]}))
        proxy = chrome_worker.GuardProxy(guard)
        assert b" 403 " in through(proxy, b"CONNECT b.test:443 HTTP/1.1\r\n\r\n")
        assert isinstance(proxy.failure("https://b.test/"), AddressNotAllowed)

    def test_an_unknown_host_is_unreachable(self):
        proxy = chrome_worker.GuardProxy(AddressGuard(resolve=resolving()))
        assert b" 502 " in through(proxy, b"CONNECT c.test:443 HTTP/1.1\r\n\r\n")
        assert isinstance(proxy.failure("https://c.test/"), Unreachable)

    def test_connect_is_a_tunnel(self, echo):
        server = echo(b"pong")
        proxy = chrome_worker.GuardProxy(AddressGuard("127.0.0.1"))
        assert through(proxy, f"CONNECT 127.0.0.1:{server.port} HTTP/1.1\r\n\r\n".encode(), b"ping") == b"pong"
        assert server.heard == [b"ping"]

    @pytest.mark.parametrize(
        "request_line",
        [
            b"GET / HTTP/1.1",
            b"GET https://a.test/ HTTP/1.1",
            b"GET file:///etc/passwd HTTP/1.1",
            b"GET http://127.0.0.1/ HTTP/1.1",
            b"GET http://localhost/ HTTP/1.1",
            b"CONNECT [::1]:80 HTTP/1.1",
            b"CONNECT 0x7f.1:80 HTTP/1.1",
            b"CONNECT 169.254.169.254:80 HTTP/1.1",
            b"nonsense",
            b"GET http://a.test:99999/ HTTP/1.1",
        ],
    )
    def test_what_it_should_not_do_it_does_not(self, request_line):
        proxy = chrome_worker.GuardProxy(AddressGuard(resolve=resolving()))
        answer = through(proxy, request_line + b"\r\nHost: a.test\r\n\r\n")
        assert answer == b"" or b" 403 " in answer.split(b"\r\n")[0]

    def test_a_second_request_on_a_connection_goes_nowhere_else(self, echo):
        allowed, other = echo(), echo()
        proxy = chrome_worker.GuardProxy(AddressGuard(f"127.0.0.1:{allowed.port}"))
        first = f"GET http://127.0.0.1:{allowed.port}/ HTTP/1.1\r\nHost: x\r\n\r\n"
        second = f"GET http://127.0.0.1:{other.port}/ HTTP/1.1\r\nHost: x\r\n\r\n"
        through(proxy, (first + second).encode())
        assert other.heard == []

    def test_it_goes_through_the_operators_proxy_with_its_credentials(self, echo):
        upstream = echo()
        address = f"http://us%40er:pa%3Ass@127.0.0.1:{upstream.port}"
        guard = AddressGuard(resolve=resolving())
        proxy = chrome_worker.GuardProxy(guard, chrome_worker.Upstream(http_proxy=address, https_proxy=address))
        through(proxy, b"GET http://d.test/x HTTP/1.1\r\nHost: d.test\r\n\r\n")
        login = base64.b64encode(b"us@er:pa:ss")
        assert upstream.heard[0].startswith(b"GET http://d.test/x HTTP/1.1") and login in upstream.heard[0]

    def test_it_tunnels_through_the_operators_proxy(self, echo):
        upstream = echo(b"HTTP/1.1 200 fine\r\n\r\n")
        proxy = chrome_worker.GuardProxy(
            AddressGuard(resolve=resolving()), chrome_worker.Upstream(https_proxy=f"127.0.0.1:{upstream.port}")
        )
        assert b" 200 " in through(proxy, b"CONNECT d.test:443 HTTP/1.1\r\n\r\n")
        assert upstream.heard[0].startswith(b"CONNECT d.test:443 HTTP/1.1")

    def test_private_names_are_refused_before_the_operators_proxy_sees_them(self, echo):
        upstream = echo()
        proxy = chrome_worker.GuardProxy(AddressGuard(), chrome_worker.Upstream(f"127.0.0.1:{upstream.port}", "", ""))
        assert b" 403 " in through(proxy, b"GET http://10.1.2.3/ HTTP/1.1\r\n\r\n")
        assert upstream.heard == []

    def test_no_proxy_is_obeyed(self):
        upstream = chrome_worker.Upstream("http://p:1", "http://p:2", "example.org,.internal.test,c.test:81")
        assert upstream.for_host("http", "c.test", 81) == "" and upstream.for_host("http", "c.test", 82) == "http://p:1"
        assert upstream.for_host("http", "example.org", 80) == ""
        assert upstream.for_host("https", "a.internal.test", 443) == ""
        assert upstream.for_host("https", "example.com", 443) == "http://p:2"


# ----------------------------------------------------------------------------
# TLS, other people's browsers, proxies
# ----------------------------------------------------------------------------


@pytest.mark.chrome
class TestConnections:
    @pytest.fixture
    def tls_site(self, tmp_path):
        if not shutil.which("openssl"):
            pytest.skip("needs openssl")
        key, cert = tmp_path / "k.pem", tmp_path / "c.pem"
        command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 1 -subj /CN=127.0.0.1"
        subprocess.run(command.split(), check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        site = Site(context=context)
        yield site
        site.close()

    def test_a_bad_certificate_is_named(self, own_worker, tls_site):
        answer = own_worker(KINDLY_ALLOW_PRIVATE_HOSTS=tls_site.host).ask(tls_site.url + "/static")
        assert answer["error"] == "certificate"

    def test_pages_come_through_the_operators_proxy(self, own_worker, echo):
        body = b"<p>from the proxy</p>"
        upstream = echo(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n" + body)
        worker = own_worker(HTTP_PROXY=f"http://127.0.0.1:{upstream.port}", KINDLY_ALLOW_PRIVATE_HOSTS="")
        answer = worker.ask("http://page.example/x")
        assert "from the proxy" in (answer["html"] or str(answer))

    @pytest.fixture
    def other_browser(self, browser_path, tmp_path):
        """A browser that somebody else has started."""
        profile = tmp_path / "theirs"
        command = [
            browser_path,
            "--headless=new",
            "--remote-debugging-port=0",
            "--disable-popup-blocking",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        command += ["--no-sandbox"] if os.geteuid() == 0 else []
        folder = tempfile.mkdtemp(prefix="theirs-")  # for its socket: the path of tmp_path is too long
        environ = {**os.environ, "TMPDIR": folder}
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True, env=environ)
        port_file = profile / "DevToolsActivePort"
        for _ in range(200):
            if port_file.exists() and port_file.read_text().count("\n"):
                break
            time.sleep(0.05)
        process.address = "127.0.0.1:" + port_file.read_text().split("\n")[0]
        process.path = port_file.read_text().split("\n")[1]
        yield process
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    @pytest.mark.parametrize("form", ["http://{0.address}", "ws://{0.address}{0.path}"])
    def test_a_browser_that_runs_already_is_used_and_left_running(self, own_worker, site, other_browser, form):
        worker = own_worker(
            KINDLY_CDP_URL=form.format(other_browser), http_proxy="http://127.0.0.1:1", no_proxy="127.0.0.1"
        )
        first = worker.ask(site.url + "/static")
        assert "quick brown fox" in (first["html"] or str(first))
        assert worker.ask("http://127.0.0.1:9/")["error"] == "address_not_allowed"
        redirect = worker.ask(f"{site.url}/redirect?http://127.0.0.1:64999/", timeout=8)
        assert redirect["error"] == "address_not_allowed"
        assert not worker.chromium()
        worker.close()
        assert other_browser.poll() is None

    @pytest.mark.parametrize("allowed", [True, False])
    def test_the_guard_holds_for_popups(self, own_worker, other_browser, trap, canary, allowed):
        canary.heard.clear()
        hosts = "*" if allowed else trap.host
        worker = own_worker(KINDLY_CDP_URL=f"http://{other_browser.address}", KINDLY_ALLOW_PRIVATE_HOSTS=hosts)
        assert worker.ask(trap.url + "/popup", timeout=8)["status"] == 200
        assert bool(canary.heard) is allowed

    def test_a_browser_that_cannot_reach_our_proxy_is_guarded_request_by_request(self, site, other_browser):
        settings = BrowserSettings(cdp_url=f"http://{other_browser.address}")
        chromium = chrome_worker.Chromium(settings, guard=AddressGuard(site.host), environ={})
        chromium.proxy.close()
        out = io.BytesIO()
        worker = chrome_worker.Worker(chromium, chrome_worker.Replies(out), idle_seconds=60, serve=False)
        urls = [f"{site.url}/static", f"{site.url}/redirect?http://127.0.0.1:64999/", f"{site.url}/resources"]
        for url in urls:
            worker.run([json.dumps({"id": url, "url": url}).encode()])
        chromium.close()
        answers = {answer["id"]: answer for answer in map(json.loads, out.getvalue().splitlines())}
        assert answers[urls[0]].get("status") == 200, answers[urls[0]]
        assert answers[urls[1]].get("error") == "address_not_allowed"
        assert answers[urls[2]].get("status") == 200
        assert other_browser.poll() is None

    def test_where_no_pipe_can_be_used_a_port_will_do(self, browser_path, site):
        # In this process descriptors 3 and 4 are in use, as on Windows there are none.
        chromium = chrome_worker.Chromium(BrowserSettings(), guard=AddressGuard(site.host), environ=os.environ)
        out = io.BytesIO()
        worker = chrome_worker.Worker(chromium, chrome_worker.Replies(out), idle_seconds=60, serve=False)
        worker.run([json.dumps({"url": f"{site.url}/static"}).encode()])
        process = chromium.now_running().process
        chromium.close()
        assert json.loads(out.getvalue())["status"] == 200
        assert not process.running() and not os.path.exists(process.profile)

    def test_nobody_at_the_cdp_url_is_a_clear_failure(self, own_worker, site):
        worker = own_worker(KINDLY_CDP_URL="http://127.0.0.1:9", KINDLY_BROWSER_RETRY_BACKOFF_SECONDS="10ms")
        answer = worker.ask(site.url + "/static")
        assert answer["error"] == "launch_failed" and "KINDLY_CDP_URL" in answer["message"]
        assert "attempt 3 of 3" in answer["message"]


# ----------------------------------------------------------------------------
# Start-up
# ----------------------------------------------------------------------------


class TestFinding:
    @staticmethod
    def find(environ=None, *, on_path=(), files=(), platform="linux"):
        return chrome_worker.find_browser(
            {"HOME": "/home/me", **(environ or {})},
            which=lambda name: f"/usr/bin/{name}" if name in on_path else None,
            exists=lambda path: path in files,
            platform=platform,
        )

    def test_the_configured_path_comes_first(self):
        environ = {"KINDLY_BROWSER_EXECUTABLE_PATH": "/my/chrome", "CHROME_PATH": "/other"}
        assert self.find(environ, on_path=["chromium"], files=["/my/chrome", "/other"]) == "/my/chrome"

    def test_a_configured_path_that_is_not_there_is_not_silently_replaced(self):
        assert self.find({"KINDLY_BROWSER_EXECUTABLE_PATH": "/gone"}, on_path=["chromium"]) == ""

    def test_a_configured_name_is_looked_up_on_the_path(self):
        assert self.find({"KINDLY_BROWSER_EXECUTABLE_PATH": "brave"}, on_path=["brave"]) == "/usr/bin/brave"

    @pytest.mark.parametrize("name", ["CHROME_PATH", "CHROME_BIN"])
    def test_the_usual_variables_come_before_the_path(self, name):
        assert self.find({name: "/x/chrome"}, on_path=["chromium"], files=["/x/chrome"]) == "/x/chrome"

    def test_a_stale_usual_variable_is_passed_over(self):
        assert self.find({"CHROME_BIN": "/gone"}, on_path=["chromium"]) == "/usr/bin/chromium"

    def test_the_ubuntu_stub_comes_last_on_the_path(self):
        assert self.find(on_path=["chromium-browser", "microsoft-edge"]) == "/usr/bin/microsoft-edge"

    @pytest.mark.parametrize(
        "platform, path",
        [
            ("linux", "/opt/google/chrome/chrome"),
            ("linux", "/snap/bin/chromium"),
            ("linux", "/var/lib/flatpak/exports/bin/org.chromium.Chromium"),
            ("linux", "/home/me/.local/share/flatpak/exports/bin/com.google.Chrome"),
            ("darwin", "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"),
            ("darwin", "/home/me/Applications/Brave Browser.app/Contents/MacOS/Brave Browser"),
            ("win32", r"C:\Program Files\Google\Chrome\Application\chrome.exe"),
            ("win32", r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe"),
            ("win32", r"C:\Users\me\AppData\Local\BraveSoftware\Brave-Browser\Application\brave.exe"),
        ],
    )
    def test_the_well_known_places_are_searched(self, platform, path):
        windows = {
            "PROGRAMFILES": r"C:\Program Files",
            "PROGRAMFILES(X86)": r"C:\Program Files (x86)",
            "LOCALAPPDATA": r"C:\Users\me\AppData\Local",
        }
        assert self.find(windows, files=[path], platform=platform) == path

    def test_nothing_found_is_an_empty_path(self):
        assert self.find() == ""

    def test_snap_is_recognised_behind_links_and_scripts(self, tmp_path):
        script = tmp_path / "chromium-browser"
        script.write_text('#!/bin/sh\nexec /snap/bin/chromium "$@"\n')
        assert chrome_worker.is_snap("/snap/bin/chromium") and chrome_worker.is_snap(str(script))
        assert not chrome_worker.is_snap("/usr/bin/true")

    def test_a_confined_browser_gets_its_profile_where_it_may_write(self):
        home = {"HOME": "/home/me"}
        assert chrome_worker.profile_root("/snap/bin/chromium", home) == "/home/me/snap/chromium/common"
        flatpak = "/var/lib/flatpak/exports/bin/com.google.Chrome"
        assert chrome_worker.profile_root(flatpak, home) == "/home/me/.var/app/com.google.Chrome/cache"
        assert chrome_worker.profile_root("/usr/bin/chromium", home) == tempfile.gettempdir()


class TestLaunch:
    @pytest.mark.parametrize(
        "message",
        [
            "Failed to connect to browser: it ended at once.",
            "Failed to connect to browser: it did not answer.",
            "Connection refused",
            "DevToolsActivePort file doesn't exist",
            "Failed to create a ProcessSingleton for your profile directory",
            "Failed to connect to browser: WebSocketTimeoutException.",
            "fork: Resource temporarily unavailable",
        ],
    )
    def test_what_may_pass_is_tried_again(self, message):
        assert chrome_worker.is_retryable_launch_error(message)

    @pytest.mark.parametrize(
        "message",
        [
            "/x/chrome could not be started: No such file or directory",
            "/x/chrome could not be started: Permission denied",
            "Failed to connect to browser: it ended at once. Chromium said: No usable sandbox!",
            "it ended at once. Chromium said: Failed to move to new namespace: PID namespaces supported",
            "it ended at once. Chromium said: Failed to receive hello message from zygote",
            "it ended at once. Chromium said: error while loading shared libraries: libnss3.so",
            "it ended at once. Chromium said: Command '/usr/bin/chromium-browser' requires the chromium snap",
            "Running as root without --no-sandbox is not supported",
            "something else",
        ],
    )
    def test_what_will_not_change_is_not(self, message):
        assert not chrome_worker.is_retryable_launch_error(message)

    def test_pauses_double_and_snap_gets_longer_ones(self):
        def pauses(slow):
            return [chrome_worker.backoff(n, 0.5, slow=slow, jitter=lambda a, b: 1.0) for n in range(6)]

        assert pauses(False) == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
        assert pauses(True)[:3] == [1.0, 2.0, 4.0]

    def fake(self, tmp_path, script):
        path = tmp_path / "chromium"
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)
        return str(path)

    def launch(self, path, **settings):
        waits = []
        chromium = chrome_worker.Chromium(
            BrowserSettings(executable_path=path, **settings), guard=AddressGuard(), environ={}, sleep=waits.append
        )
        try:
            chromium.running(Deadline(20))
        except chrome_worker.Failure as failure:
            return failure, waits
        finally:
            chromium.close()

    @POSIX
    def test_a_browser_that_dies_at_once_is_tried_three_times_and_quoted(self, tmp_path):
        failure, waits = self.launch(self.fake(tmp_path, "echo 'cannot open display' >&2; exit 1\n"))
        assert failure.reason == "launch_failed" and len(waits) == 2 and waits[1] > waits[0]
        assert "cannot open display" in str(failure) and "attempt 3 of 3" in str(failure)

    @POSIX
    def test_a_hopeless_browser_is_tried_once(self, tmp_path):
        failure, waits = self.launch(self.fake(tmp_path, "echo 'libnss3.so: not found' >&2; exit 1\n"))
        assert failure.reason == "launch_failed" and waits == []

    @POSIX
    def test_a_sandbox_that_may_not_start_is_named_with_the_remedy_and_not_tried_again(self, tmp_path):
        starts = tmp_path / "starts"
        path = self.fake(
            tmp_path, f"echo once >> '{starts}'; echo 'No usable sandbox! If this is Debian…' >&2; exit 1\n"
        )
        settings = BrowserSettings(executable_path=path)
        chromium = chrome_worker.Chromium(settings, guard=AddressGuard(), environ={}, sleep=lambda seconds: None)
        try:
            for _ in range(3):
                with pytest.raises(chrome_worker.Failure, match="--cap-add=SYS_ADMIN") as caught:
                    chromium.running(Deadline(20))
                assert caught.value.reason == "no_sandbox"
        finally:
            chromium.close()
        assert starts.read_text() == "once\n"

    @POSIX
    def test_idle_talk_of_crashpad_neither_ends_the_tries_nor_is_quoted(self, tmp_path):
        talk = "open /sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq: No such file or directory (2)"
        failure, waits = self.launch(self.fake(tmp_path, f"echo 'cannot open display'; echo '{talk}' >&2; exit 1\n"))
        assert len(waits) == 2
        assert "cpufreq" not in str(failure)

    def test_a_browser_that_is_not_there_is_none(self):
        failure, waits = self.launch("/nowhere/chromium")
        assert failure.reason == "no_browser" and "/nowhere/chromium" in str(failure) and waits == []

    @POSIX
    def test_failed_launches_leave_no_profile(self, tmp_path):
        before = set(glob.glob(os.path.join(tempfile.gettempdir(), f"kindly-chrome-{os.getpid()}-*")))
        self.launch(self.fake(tmp_path, "exit 1\n"))
        assert set(glob.glob(os.path.join(tempfile.gettempdir(), f"kindly-chrome-{os.getpid()}-*"))) == before

    def test_the_sandbox_is_given_up_for_root_only(self):
        flags = chrome_worker.browser_flags("/p", "127.0.0.1:1", root=False, small_shared_memory=False)
        assert "--no-sandbox" not in flags and "--disable-dev-shm-usage" not in flags
        flags = chrome_worker.browser_flags("/p", "127.0.0.1:1", root=True, small_shared_memory=True)
        assert "--no-sandbox" in flags and "--disable-dev-shm-usage" in flags

    def test_no_key_reaches_the_browser(self):
        environ = {"SERPER_API_KEY": "s", "KINDLY_CDP_URL": "u", "HTTPS_PROXY": "p", "PATH": "/bin", "TMPDIR": "/t"}
        assert chrome_worker.browser_environ(environ, "/p").keys() <= {
            "PATH", "TMPDIR", "TMP", "TEMP", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME",
        }  # fmt: skip

    @POSIX
    def test_profiles_of_dead_workers_are_swept_and_no_others(self, tmp_path):
        for name in ("kindly-chrome-111-a", "kindly-chrome-222-b", "kindly-chrome-x", "else-111"):
            (tmp_path / name).mkdir()
        os.symlink("another-host-5", tmp_path / "kindly-chrome-111-a" / "x")
        (tmp_path / "kindly-chrome-111-c").mkdir()
        os.symlink("another-host-5", tmp_path / "kindly-chrome-111-c" / "SingletonLock")
        assert chrome_worker.sweep_profiles(str(tmp_path), alive=lambda pid: pid == 222) == ["kindly-chrome-111-a"]
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"kindly-chrome-222-b", "kindly-chrome-x", "else-111", "kindly-chrome-111-c"}


# ----------------------------------------------------------------------------
# Readiness, without a browser
# ----------------------------------------------------------------------------


class TestReadiness:
    @pytest.fixture
    def clock(self):
        class Clock:
            time = 100.0

            def __call__(self):
                return self.time

        return Clock()

    @pytest.fixture
    def page(self, clock):
        page = chrome_worker.Readiness(now=clock)
        page.document_committed()
        return page

    def after(self, page, clock, seconds, *look):
        """Looks every 50 ms at a page that does not change; the verdict at the end."""
        for _ in range(round(seconds / 0.05)):
            page.saw(*look)
            clock.time += 0.05
        return page.verdict()

    def test_without_scripts_loaded_is_ready(self, page):
        page.saw("complete", 10, 5, False, False)
        assert page.verdict() == "ready"

    def test_with_scripts_it_has_to_come_to_rest(self, page, clock):
        assert self.after(page, clock, 0.2, "complete", 900, 5, True, False) == ""
        assert self.after(page, clock, 0.1, "complete", 900, 5, True, False) == "ready"

    def test_a_shell_is_given_longer(self, page, clock):
        assert self.after(page, clock, 2.4, "complete", 20, 5, True, False) == ""
        assert self.after(page, clock, 0.2, "complete", 20, 5, True, False) == "ready"

    def test_a_young_request_is_waited_for_and_an_old_one_is_not(self, page, clock):
        page.request_started("1", "Fetch")
        assert self.after(page, clock, 2.0, "complete", 900, 5, True, False) == ""
        assert self.after(page, clock, 0.6, "complete", 900, 5, True, False) == "ready"

    def test_images_are_not_waited_for(self, page, clock):
        page.request_started("1", "Image")
        assert self.after(page, clock, 0.3, "complete", 900, 5, True, False) == "ready"

    def test_a_document_that_stays_unfinished_is_partial(self, page, clock):
        assert self.after(page, clock, 3.4, "loading", 900, 5, True, False) == ""
        assert self.after(page, clock, 0.2, "loading", 900, 5, True, False) == "partial"

    def test_a_refresh_is_waited_for(self, page, clock):
        page.refresh_scheduled(1.0)
        assert self.after(page, clock, 1.5, "complete", 900, 5, False, False) == ""

    def test_a_late_refresh_is_not(self, page, clock):
        page.refresh_scheduled(30.0)
        page.saw("complete", 900, 5, False, False)
        assert page.verdict() == "ready"

    def test_an_endless_chain_of_refreshes_ends(self, page):
        for _ in range(6):
            page.document_committed()
        page.refresh_scheduled(0.0)
        page.saw("complete", 900, 5, False, False)
        assert page.verdict() == "ready"


# ----------------------------------------------------------------------------
# Protocol
# ----------------------------------------------------------------------------


class TestProtocol:
    @pytest.mark.parametrize(
        "line",
        [
            b"nonsense", b"[]", b"null", b"{}", b'{"url": ""}', b'{"url": 5}', b'{"url": "x", "timeout": "long"}',
            b'{"url": "x", "timeout": -1}', b'{"url": "x", "timeout": true}', b'{"cmd": "dance"}', b"\xff\xfe", b"[" * 100_000,
            b'{"url": "not a url"}', b'{"url": "http://"}',
        ],
    )  # fmt: skip
    def test_garbage_gets_an_answer(self, line):
        run = subprocess.run([sys.executable, WORKER], input=line + b"\n", capture_output=True, timeout=20)
        answer = json.loads(run.stdout)
        assert answer["error"] == "bad_request" and answer["message"] and run.returncode == 0

    def test_every_reason_is_documented(self):
        source = Path(WORKER).read_text(encoding="utf-8")
        for reason in chrome_worker.REASONS:
            assert f'"{reason}"' in source.split("REASONS = {", 1)[1].split("}", 1)[1], reason

    def test_ping_says_who_is_there(self):
        worker = RunningWorker()
        worker.send(cmd="ping", id="p")
        assert worker.result("p", 5) == {"id": "p", "pong": True, "browser": ""}
        worker.close()

    def test_a_bad_setting_is_named(self):
        run = subprocess.run(
            [sys.executable, WORKER],
            input=b"",
            capture_output=True,
            timeout=20,
            env={**os.environ, "KINDLY_BROWSER_RETRY_ATTEMPTS": "many"},
        )
        assert run.returncode == 2 and b"KINDLY_BROWSER_RETRY_ATTEMPTS" in run.stderr

    @pytest.mark.chrome
    def test_by_hand_it_answers_and_ends(self, browser_path, site):
        run = subprocess.run(
            [sys.executable, os.path.relpath(WORKER, "/")],
            input=json.dumps({"url": site.url + "/static"}).encode(),
            capture_output=True,
            timeout=30,
            cwd="/",
            env={**os.environ, "KINDLY_ALLOW_PRIVATE_HOSTS": site.host, "DEBUG": "1"},
        )
        assert json.loads(run.stdout)["title"] == "Static" and run.stdout.count(b"\n") == 1 and run.returncode == 0


# ----------------------------------------------------------------------------
# What is left behind
# ----------------------------------------------------------------------------


@pytest.mark.chrome
@POSIX
class TestNothingLeftBehind:
    @pytest.mark.parametrize("path", ["/static", "/loop"])
    @pytest.mark.parametrize("how", ["eof", "SIGINT", "SIGTERM", "SIGKILL"])
    def test_the_browser_ends_with_the_worker(self, own_worker, site, tmp_path, how, path):
        worker = own_worker()
        worker.ask(site.url + "/static")
        if path == "/loop":
            worker.start(site.url + path)
            time.sleep(1)
        pids = worker.chromium()
        assert len(pids) >= 3
        if how == "eof":
            worker.process.stdin.close()
        else:
            worker.process.send_signal(getattr(signal, how))
        assert gone_within(3, [*pids, worker.process.pid]) is not None
        if how != "SIGKILL":
            assert [entry.name for entry in tmp_path.iterdir()] == []

    def test_the_browser_ends_with_the_server_that_is_killed(self, browser_path, site, tmp_path):
        code = "import os, time\nimport kindly_search as k\n"
        code += (
            f"b = k.Browser(environ=os.environ, allow_private_hosts={site.host!r})\n"
            f"b.render({site.url + '/static'!r}, deadline=k.Deadline(20))\n"
            "print(b._worker._process.pid, flush=True)\ntime.sleep(60)"
        )
        server = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}
        )
        worker = int(server.stdout.readline())
        pids = chromium_of(worker)
        assert pids
        server.kill()
        server.wait()
        server.stdout.close()
        assert gone_within(3, [*pids, worker]) is not None
        time.sleep(0.3)
        assert list(tmp_path.iterdir()) == []

    def test_what_a_killed_worker_left_is_swept_by_the_next(self, own_worker, site, tmp_path):
        first = own_worker()
        first.ask(site.url + "/static")
        pids = first.chromium()
        first.process.kill()
        first.process.wait()
        assert gone_within(3, pids) is not None
        left = [entry.name for entry in tmp_path.iterdir()]
        assert len(left) == 1 and left[0].startswith(f"kindly-chrome-{first.process.pid}-")
        second = own_worker()
        second.ask(site.url + "/static")
        names = [entry.name for entry in tmp_path.iterdir()]
        assert len(names) == 1 and names[0].startswith(f"kindly-chrome-{second.process.pid}-")

    def test_what_a_dying_browser_wrote_after_the_sweep_goes_with_the_next_worker(self, own_worker, site, tmp_path):
        killed = subprocess.Popen([sys.executable, "-c", ""])
        killed.wait()
        worker = own_worker()
        worker.ask(site.url + "/static")
        for pid in (killed.pid, os.getpid()):
            (tmp_path / f"kindly-chrome-{pid}-late" / "Default").mkdir(parents=True)
        worker.close()
        assert [entry.name for entry in tmp_path.iterdir()] == [f"kindly-chrome-{os.getpid()}-late"]

    def test_home_stays_as_it_was(self, own_worker, site, tmp_path):
        home = tmp_path / "home"
        home.mkdir()
        worker = own_worker(HOME=str(home))
        worker.ask(site.url + "/static")
        worker.close()
        assert [str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()] == []

    def test_an_idle_worker_ends_by_itself(self, own_worker, site, tmp_path):
        worker = own_worker(KINDLY_BROWSER_IDLE_SECONDS="1s")
        worker.ask(site.url + "/static")
        pids = worker.chromium()
        assert gone_within(4, [*pids, worker.process.pid]) is not None
        assert list(tmp_path.iterdir()) == []

    def test_a_browser_that_dies_in_mid_page_is_replaced_unnoticed(self, own_worker, site):
        worker = own_worker()
        worker.ask(site.url + "/static")
        number = worker.start(site.url + "/late1500")
        time.sleep(0.6)
        main = [pid for pid, command in worker.chromium().items() if b"--type=" not in command]
        for pid in main:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert "drawn later" in worker.result(number)["html"]

    def test_the_environment_of_the_browser_holds_no_key(self, own_worker, site):
        worker = own_worker(SERPER_API_KEY="hunter22", OPENAI_API_KEY="hunter22")
        worker.ask(site.url + "/static")
        for pid in worker.chromium():
            with contextlib.suppress(OSError):
                assert b"hunter22" not in Path(f"/proc/{pid}/environ").read_bytes()

    def test_no_port_is_opened_that_others_could_drive_it_by(self, own_worker, site):
        worker = own_worker()
        worker.ask(site.url + "/static")
        commands = worker.chromium().values()
        assert any(b"remote-debugging-pipe" in command for command in commands)
        assert not any(b"remote-debugging-port" in command for command in commands)
