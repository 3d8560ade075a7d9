"""Section 8, the client of chrome_worker.py: fake workers that hang, crash and chatter, and a real one at the end."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import kindly_search
from kindly_search import (
    AddressNotAllowed,
    Browser,
    BrowserSettings,
    Deadline,
    InvalidInput,
    PageFailed,
    Timeout,
    browser_install_command,
    from_env,
    secrets_of,
    worker_environ,
)

ROOT = Path(kindly_search.__file__).parent

#: What every fake worker starts with; `starts` counts how often it was started.
PRELUDE = """
import json, os, sys, time
with open(os.path.join(os.path.dirname(__file__), "starts"), "a") as file:
    file.write("x")
starts = os.path.getsize(os.path.join(os.path.dirname(__file__), "starts"))
def requests():
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("cmd") == "ping":
            say(id=message["id"], pong=True)
        elif "url" in message:
            yield message
def say(**answer):
    print(json.dumps(answer), flush=True)
def page(message, **more):
    say(**{"id": message["id"], "url": message["url"], "status": 200, "content_type": "text/html",
           "html": "<p>" + message["url"], "partial": False, **more})
"""


@pytest.fixture
def fake(tmp_path):
    """Makes a browser whose worker is a script of a few lines."""
    made = []

    def make(script, **options):
        path = tmp_path / "worker.py"
        path.write_text(PRELUDE + script)
        made.append(Browser(environ=options.pop("environ", os.environ), command=[sys.executable, str(path)], **options))
        return made[-1]

    make.starts = lambda: (tmp_path / "starts").stat().st_size
    yield make
    for browser in made:
        browser.close()


ECHO = "for message in requests():\n    page(message)\n"


def render(browser, url="https://a.example/", seconds=10.0):
    return browser.render(url, deadline=Deadline(seconds))


class TestTalking:
    def test_a_page_comes_back(self, fake):
        page = render(fake(ECHO))
        assert (page.url, page.status, page.content_type) == ("https://a.example/", 200, "text/html")
        assert page.html == "<p>https://a.example/" and page.partial is False

    def test_the_worker_starts_with_the_first_page_and_not_before(self, fake, tmp_path):
        browser = fake(ECHO)
        assert browser.available() and not (tmp_path / "starts").exists()
        render(browser)
        render(browser)
        assert fake.starts() == 1

    def test_answers_in_any_order_find_their_requests(self, fake):
        browser = fake(
            "waiting = []\n"
            "for message in requests():\n"
            "    waiting.append(message)\n"
            "    if len(waiting) == 8:\n"
            "        for each in reversed(waiting): page(each)\n"
        )
        urls = [f"https://a.example/{number}" for number in range(8)]
        with ThreadPoolExecutor(8) as pool:
            assert [page.url for page in pool.map(lambda url: render(browser, url), urls)] == urls

    def test_chatter_is_passed_over(self, fake):
        browser = fake(
            "print('Hello!'); print('[1, 2'); print('{\"id\": 99, \"html\": \"?\"}'); print('null'); print('5')\n"
            "sys.stdout.buffer.write(b'\\xff\\xfe\\n'); sys.stderr.write('noise\\n')\n" + ECHO
        )
        assert render(browser).status == 200

    def test_the_worker_is_told_to_be_done_before_the_deadline(self, fake):
        page = render(fake("for message in requests():\n    page(message, html=str(message['timeout']))\n"), seconds=5)
        assert 4.0 < float(page.html) < 5.0


class TestTrouble:
    def test_a_worker_that_hangs_costs_no_more_than_the_deadline(self, fake):
        browser = fake("time.sleep(60)\n")
        started = time.monotonic()
        with pytest.raises(Timeout, match=r"^timed out$"):
            render(browser, seconds=0.7)
        assert time.monotonic() - started < 1.2

    def test_a_worker_that_hangs_is_replaced_for_the_next_page(self, fake):
        browser = fake("if starts == 1: time.sleep(60)\n" + ECHO)
        with pytest.raises(Timeout):
            render(browser, seconds=0.5)
        assert render(browser).status == 200 and fake.starts() == 2

    def test_a_worker_that_is_only_slow_is_kept(self, fake):
        browser = fake("for message in requests():\n    if 'slow' not in message['url']: page(message)\n")
        with pytest.raises(Timeout):
            render(browser, "https://slow.example/", seconds=0.5)
        assert render(browser).status == 200 and fake.starts() == 1

    def test_a_worker_that_stops_reading_does_not_block_us(self, fake):
        browser = fake("time.sleep(60)\n")
        url = "https://a.example/" + "x" * 7000
        started = time.monotonic()
        with ThreadPoolExecutor(40) as pool:
            for future in [pool.submit(render, browser, url, 1.0) for _ in range(40)]:
                with pytest.raises(Timeout):
                    future.result()
        assert time.monotonic() - started < 3

    def test_a_worker_that_crashes_is_started_once_more(self, fake):
        browser = fake("for message in requests():\n    if starts == 1: sys.exit(3)\n    page(message)\n")
        assert render(browser).status == 200 and fake.starts() == 2

    def test_a_worker_that_always_crashes_is_given_up(self, fake):
        browser = fake("for message in requests(): sys.exit(3)\n")
        with pytest.raises(PageFailed, match="the browser failed"):
            render(browser)
        assert fake.starts() == 2

    def test_a_worker_that_ends_when_idle_is_started_again(self, fake):
        browser = fake("for message in requests():\n    page(message)\n    break\n")
        assert render(browser).status == render(browser).status == 200

    def test_a_worker_that_cannot_start_is_a_failed_page(self):
        browser = Browser(environ={}, command=["/nowhere/python"])
        with pytest.raises(PageFailed, match="did not start"):
            render(browser)

    def test_one_crash_takes_no_other_page_with_it(self, fake):
        browser = fake(
            "for message in requests():\n"
            "    if starts == 1 and 'bad' in message['url']: sys.exit(3)\n"
            "    if starts > 1: page(message)\n"
        )
        urls = ["https://a.example/1", "https://a.example/2", "https://bad.example/"]
        with ThreadPoolExecutor(3) as pool:
            assert [page.url for page in pool.map(lambda url: render(browser, url), urls)] == urls

    def test_no_time_left_is_a_timeout(self, fake):
        with pytest.raises(Timeout):
            render(fake(ECHO), seconds=0)

    @pytest.mark.parametrize(
        "answer, error, text",
        [
            ({"error": "timeout"}, Timeout, "^timed out$"),
            ({"error": "address_not_allowed", "message": "address not allowed: x"}, AddressNotAllowed, "^address not"),
            ({"error": "bad_request", "message": "Not a URL."}, InvalidInput, "^Not a URL"),
            ({"error": "no_browser"}, PageFailed, "^needs JavaScript and no browser was found$"),
            (
                {"error": "launch_failed", "message": "stderr"},
                PageFailed,
                "^needs JavaScript and the browser did not start$",
            ),
            ({"error": "certificate"}, PageFailed, "^its certificate is not valid$"),
            ({"error": "needs_login"}, PageFailed, "^needs a login$"),
            ({"error": "crashed"}, PageFailed, "^it crashed the browser$"),
            ({"error": "unreachable", "message": "no connection to x"}, PageFailed, "^no connection to x$"),
            ({"error": "unreachable", "status": 404}, PageFailed, "^HTTP 404$"),
            ({"error": "something new"}, PageFailed, "^the browser failed$"),
        ],
    )
    def test_each_reason_reads_well_in_a_note(self, fake, answer, error, text):
        browser = fake(f"for message in requests():\n    say(id=message['id'], **{answer!r})\n")
        with pytest.raises(error, match=text):
            render(browser)

    def test_a_file_is_final(self, fake):
        answer = {"error": "download", "content_type": "image/png"}
        with pytest.raises(PageFailed, match=r"^unsupported type image/png$") as caught:
            render(fake(f"for message in requests():\n    say(id=message['id'], **{answer!r})\n"))
        assert caught.value.final

    def test_every_reason_of_the_worker_is_understood(self):
        import chrome_worker

        mapped = {
            *kindly_search.BROWSER_REASONS,
            "timeout",
            "address_not_allowed",
            "bad_request",
            "download",
            "unreachable",
        }
        assert mapped == set(chrome_worker.REASONS)

    def test_close_ends_the_worker(self, fake):
        browser = fake(ECHO)
        render(browser)
        process = browser._worker._process
        browser.close()
        assert process.poll() is not None
        browser.close()

    def test_no_thread_outlives_the_worker(self, fake):
        browser = fake(ECHO)
        render(browser)
        browser.close()
        deadline = Deadline(2)
        while deadline.remaining() and any(thread.name == "kindly-browser" for thread in threading.enumerate()):
            time.sleep(0.02)
        assert not any(thread.name == "kindly-browser" for thread in threading.enumerate())


class TestSettings:
    def test_defaults(self):
        settings = from_env(BrowserSettings, {})
        assert (settings.enabled, settings.retry_attempts, settings.retry_backoff) == (True, 3, 0.5)
        assert settings.idle_seconds == 120

    def test_secrets_in_the_cdp_url_are_known_and_not_shown(self):
        environ = {"KINDLY_CDP_URL": "wss://me:passw0rd@pool.example/x?token=t0ken123"}
        settings = from_env(BrowserSettings, environ)
        assert "passw0rd" not in repr(settings) and "t0ken123" not in repr(settings)
        assert {"passw0rd", "t0ken123"} <= set(secrets_of(BrowserSettings, environ))

    def test_a_cdp_url_has_to_be_one(self):
        with pytest.raises(ValueError, match="KINDLY_CDP_URL"):
            from_env(BrowserSettings, {"KINDLY_CDP_URL": "localhost"})

    def test_no_key_crosses_into_the_worker(self, fake):
        environ = {
            **os.environ,
            "SERPER_API_KEY": "hunter22",
            "GITHUB_TOKEN": "hunter22",
            "KINDLY_HTTP_TOKEN": "hunter22",
        }
        browser = fake("for message in requests():\n    page(message, html=repr(dict(os.environ)))\n", environ=environ)
        assert "hunter22" not in render(browser).html

    def test_what_the_worker_needs_does_cross(self, fake):
        environ = {
            **os.environ,
            "HTTPS_PROXY": "http://p:1",
            "https_proxy": "http://p:1",
            "CHROME_BIN": "/c",
            "LC_ALL": "C",
        }
        assert {"HTTPS_PROXY", "https_proxy", "CHROME_BIN", "LC_ALL", "PATH"} <= worker_environ(environ).keys()
        browser = fake(
            "for message in requests():\n    page(message, html=repr(dict(os.environ)))\n",
            settings=BrowserSettings(idle_seconds=7, executable_path="/my/chrome"),
            allow_private_hosts="10.0.0.0/8",
        )
        html = render(browser).html
        assert "'KINDLY_BROWSER_IDLE_SECONDS': '7'" in html and "/my/chrome" in html and "10.0.0.0/8" in html

    def test_switched_off_means_no_browser(self):
        browser = Browser(BrowserSettings(enabled=False), environ={}, command=["never"])
        assert not browser.available() and "KINDLY_BROWSER_ENABLED" in browser.problem()
        with pytest.raises(PageFailed, match="needs JavaScript and no browser was found"):
            render(browser)

    def test_nothing_found_means_no_browser(self):
        browser = Browser(BrowserSettings(executable_path="/nowhere/chrome"), environ={})
        assert not browser.available() and browser.problem()

    def test_a_cdp_url_is_enough(self):
        assert Browser(BrowserSettings(cdp_url="http://127.0.0.1:9222"), environ={"PATH": ""}).available()

    def test_without_the_worker_file_the_browser_is_off(self, tmp_path):
        shutil.copy(ROOT / "kindly_search.py", tmp_path)
        code = "import kindly_search as k; print(k.Browser(environ={}).problem())"
        run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=30)
        assert "chrome_worker.py is not beside kindly_search.py" in run.stdout, run.stderr

    def test_copied_into_a_package_both_files_still_find_each_other(self, tmp_path):
        package = tmp_path / "tool" / "vendor"
        package.mkdir(parents=True)
        for name in ("kindly_search.py", "chrome_worker.py"):
            shutil.copy(ROOT / name, package)
        code = "from tool.vendor import kindly_search as k; print(repr(k.Browser(environ={'PATH': ''}).executable()))"
        run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=30)
        assert run.returncode == 0 and run.stdout.startswith(("'", '"')), run.stderr


class TestInstalling:
    @staticmethod
    def command(platform, *present, root=False):
        return " ".join(browser_install_command(platform, lambda name: name if name in present else None, root=root))

    @pytest.mark.parametrize(
        "platform, present, line",
        [
            ("linux", ["apt-get", "sudo"], "sudo apt-get install -y chromium"),
            ("linux", ["snap", "apt-get", "sudo"], "sudo snap install chromium"),
            ("linux", ["dnf"], "dnf install -y chromium"),
            ("linux", ["pacman", "sudo"], "sudo pacman -S --noconfirm chromium"),
            ("linux", ["zypper", "sudo"], "sudo zypper --non-interactive install chromium"),
            ("linux", ["apk"], "apk add chromium"),
            ("darwin", ["brew", "sudo"], "brew install --cask google-chrome"),
            ("win32", ["winget"], "winget install --exact --id Google.Chrome"),
            ("linux", [], ""),
            ("sunos5", ["apt-get"], ""),
        ],
    )
    def test_the_platforms_own_package_manager_is_used(self, platform, present, line):
        assert self.command(platform, *present) == line

    def test_root_needs_no_sudo(self):
        assert self.command("linux", "apt-get", "sudo", root=True) == "apt-get install -y chromium"


@pytest.mark.chrome
class TestRealBrowser:
    @pytest.fixture
    def site(self):
        class Page(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(b"<p id=a></p><script>a.textContent = 'made by a script'</script>")

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        server.server_close()

    @pytest.fixture
    def browser(self, site):
        browser = Browser(environ=os.environ, allow_private_hosts=site)
        if not browser.available() and os.environ.get("KINDLY_REQUIRE_CHROME") != "1":
            pytest.skip(browser.problem())
        yield browser
        browser.close()

    def test_a_page_is_rendered_and_a_private_one_is_not(self, browser, site):
        page = render(browser, f"http://{site}/", 20)
        assert "made by a script" in page.html and page.status == 200
        with pytest.raises(AddressNotAllowed):
            render(browser, "http://127.0.0.1:9/")
        with pytest.raises(InvalidInput):
            render(browser, "file:///etc/passwd")

    def test_a_worker_that_is_killed_is_replaced_unnoticed(self, browser, site):
        render(browser, f"http://{site}/", 20)
        browser._worker._process.kill()
        assert "made by a script" in render(browser, f"http://{site}/", 20).html

    def test_json_survives_what_pages_contain(self, browser, site):
        assert json.loads(json.dumps(render(browser, f"http://{site}/?\u00e4=\u2028", 20).url))
