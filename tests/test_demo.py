"""The commands for newcomers: demo, doctor, install-browser."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kindly_search
from kindly_search import CLIENT_FILES, DemoRun, client_snippet, demo_page

MODULE = Path(kindly_search.__file__)


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(MODULE), *arguments]
    return subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, encoding="utf-8", timeout=120
    )


@pytest.mark.chrome
def test_the_demo_really_makes_the_whole_journey(tmp_path: Path) -> None:
    done = run("demo", "--html", str(tmp_path / "report.html"))

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") == 6
    assert "✗" not in done.stdout
    assert "chromium: ok" in done.stdout
    assert "\033[" not in done.stdout  # colour is for terminals only
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<svg" in report
    assert "byte for byte" in report


def test_the_demo_works_without_a_browser_and_says_so() -> None:
    done = run("demo", KINDLY_BROWSER_ENABLED="false")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "✓ the JavaScript page says that a browser is missing" in done.stdout


def test_a_demo_that_did_not_happen_is_not_reported_as_one() -> None:
    nothing = DemoRun([], {}, {}, 0, 0, browser=True)

    assert not any(happened for _, happened in nothing.checks())
    assert "✗" in demo_page(nothing)


def test_the_doctor_says_what_is_missing_and_fails_without_a_provider() -> None:
    done = run("doctor", KINDLY_BROWSER_ENABLED="false")

    assert done.returncode == 1
    assert "✗ no search provider is configured" in done.stdout
    assert "SERPER_API_KEY" in done.stdout
    assert "Not ready yet" in done.stdout


def test_the_doctor_is_content_with_one_key_and_never_shows_it() -> None:
    done = run("doctor", "--json", KINDLY_BROWSER_ENABLED="false", TAVILY_API_KEY="tvly-never-shown")

    findings = json.loads(done.stdout)
    assert done.returncode == 0
    assert findings["ready"] is True
    assert {"mark": "good", "what": "Tavily: configured", "fix": ""} in findings["checks"]
    assert any("keeps stdout clean" in check["what"] and check["mark"] == "good" for check in findings["checks"])
    assert any(check["what"].startswith("an agent sees web_search, get_content") for check in findings["checks"])
    assert "tvly-never-shown" not in done.stdout + done.stderr


@pytest.mark.chrome
def test_the_doctor_draws_a_page_in_the_browser() -> None:
    assert re.search(r"✓ browser .+ drew a page in \d+ ms", run("doctor", SERPER_API_KEY="some-key").stdout)


def test_a_live_check_reports_a_refused_key_without_showing_it(serve) -> None:
    site = serve({"/": (403, {"content-type": "application/json"}, '{"message": "Unauthorized. never-shown-key"}')})
    done = run(
        "doctor",
        "--live",
        SERPER_API_KEY="never-shown-key",
        SERPER_SEARCH_ENDPOINT=site.url,
        KINDLY_BROWSER_ENABLED="false",
    )

    assert done.returncode == 1
    assert "✗ Serper refused the API key (HTTP 403). Check SERPER_API_KEY." in done.stdout
    assert "never-shown-key" not in done.stdout + done.stderr


@pytest.mark.parametrize("client", CLIENT_FILES)
def test_each_client_gets_a_snippet_with_placeholders(client: str) -> None:
    snippet = client_snippet(client, {"EXA_API_KEY": "never-shown"})

    assert "never-shown" not in snippet
    assert "EXA_API_KEY" in snippet
    assert "start-mcp-server" in snippet
    assert client in snippet
    assert CLIENT_FILES[client] in snippet


@pytest.mark.parametrize("client", ["claude-desktop", "gemini", "cursor", "vscode"])
def test_the_snippets_for_json_files_are_json(client: str) -> None:
    entry = json.loads(client_snippet(client, {}).partition("\n\n")[2])
    [servers] = entry.values()

    assert servers["kindly"]["args"][-2:] == ["--context", client]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is new in 3.11")
def test_the_snippet_for_codex_is_toml() -> None:
    import tomllib

    table = tomllib.loads(client_snippet("codex", {}).partition("\n\n")[2])

    assert table["mcp_servers"]["kindly"]["env"] == {"SERPER_API_KEY": "your-key"}


@pytest.mark.chrome
def test_install_browser_has_nothing_to_do_where_one_is_there() -> None:
    done = run("install-browser")

    assert done.returncode == 0
    assert "A browser is there already" in done.stdout


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="says what it would run on a machine with apt")
def test_install_browser_says_what_it_will_run_and_asks_first(tmp_path: Path) -> None:
    (tmp_path / "apt-get").write_text("#!/bin/sh\ntouch ran\n")
    (tmp_path / "apt-get").chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(MODULE), "install-browser"],
        env={**os.environ, "PATH": str(tmp_path), "KINDLY_BROWSER_EXECUTABLE_PATH": str(tmp_path / "no-browser")},
        cwd=tmp_path,
        input="n\n",
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert "This will run: " in done.stdout
    assert "apt-get install -y chromium" in done.stdout
    assert done.returncode == 1
    assert not (tmp_path / "ran").exists()
