"""Section 14: the command line, as a process of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kindly_search
from kindly_search import build_parser, failure_note, main

SERPER_KEY = "serper-0123456789-secret"


def command() -> list[str]:
    """The installed console script, or the file itself where the project is not installed."""
    script = shutil.which("kindly-web-search-mcp-server", path=str(Path(sys.executable).parent))
    return [script] if script else [sys.executable, kindly_search.__file__]


def environ(**variables: str) -> dict[str, str]:
    kept = ("PATH", "HOME", "SYSTEMROOT", "TEMP", "TMP", "TMPDIR", "VIRTUAL_ENV")
    inherited = {name: os.environ[name] for name in kept if name in os.environ}
    return {**inherited, "KINDLY_BROWSER_ENABLED": "false", "KINDLY_CONTENT_CHAIN": "http", **variables}


class Ended:
    """How a run of the command line ended."""

    def __init__(self, done: "subprocess.CompletedProcess[bytes]") -> None:
        self.code = done.returncode
        self.out = done.stdout.decode()
        self.err = done.stderr.decode()
        assert "Traceback" not in self.err, self.err


def run(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> Ended:
    return Ended(
        subprocess.run(
            [*command(), *arguments],
            env=environ() if env is None else env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=30,
            check=False,
            **options,
        )
    )


def article(about: str, paragraphs: int = 12) -> str:
    text = "".join(f"<p>Paragraph {i}: {about}, told with some care for detail.</p>" for i in range(paragraphs))
    return (
        f"<html><head><title>About {about}</title></head><body><main><h1>About {about}</h1>{text}</main></body></html>"
    )


class World:
    """A Serper and a web on loopback, and the environment that knows no other."""

    def __init__(self, serve: Callable[..., Any]) -> None:
        self.pages: dict[str, Any] = {"/sun": article("the sun"), "/käse": article("grün – 太陽")}
        self.web = serve(lambda request: self.pages.get(request.path, (404, {}, "gone")))
        self.serper = serve(self.found)

    def found(self, request: Any) -> Any:
        items = [
            {"title": "The sun", "link": self.web.url + "/sun", "snippet": "A star."},
            {"link": self.web.url + "/x"},
        ]
        return 200, {"Content-Type": "application/json"}, json.dumps({"organic": items[: request.json()["num"]]})

    def environ(self, **variables: str) -> dict[str, str]:
        return environ(
            **{
                "SERPER_API_KEY": SERPER_KEY,
                "SERPER_SEARCH_ENDPOINT": self.serper.url,
                "KINDLY_ALLOW_PRIVATE_HOSTS": self.web.host,
                **variables,
            }
        )


@pytest.fixture
def world(serve: Callable[..., Any]) -> World:
    return World(serve)


# -- help --------------------------------------------------------------------


def test_help_teaches_commands_examples_keys_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])

    shown = capsys.readouterr().out
    assert ended.value.code == 0
    for word in ("start-mcp-server", "web-search", "get-content", "doctor", "demo", "examples:", "exit codes: 0 fine"):
        assert word in shown
    assert {"SERPER_API_KEY", "TAVILY_API_KEY", "SEARXNG_URL"} <= set(re.findall(r"[A-Z_]{8,}", shown))


@pytest.mark.parametrize("name", ["start-mcp-server", "web-search", "get-content", "doctor", "demo"])
def test_every_command_has_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])

    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: kindly-web-search-mcp-server {name}")


def test_the_examples_in_the_help_are_commands_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    examples = re.findall(
        r"^  (?:[A-Z_]+=\S+ )?kindly-web-search-mcp-server (.+)$", build_parser().epilog, re.MULTILINE
    )

    assert len(examples) >= 4
    for example in examples:
        build_parser().parse_args(shlex.split(example))


def test_version_is_the_modules_version() -> None:
    ended = run("--version")

    assert (ended.code, ended.out) == (0, f"kindly-web-search-mcp-server {kindly_search.__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["fly"], ["web-search"], ["get-content", "--sideways", "x"]])
def test_a_command_line_that_makes_no_sense_ends_with_2_and_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    shown = capsys.readouterr()
    assert ended.value.code == 2
    assert shown.out == ""
    assert shown.err.startswith("usage: kindly-web-search-mcp-server")


# -- web-search --------------------------------------------------------------


def test_web_search_prints_markdown_for_people_and_nothing_else(world: World) -> None:
    ended = run("web-search", "the sun", "-n", "2", env=world.environ())

    first, second = ended.out.split("\n\n---\n\n")
    assert ended.code == 0
    assert first.startswith(f"# [The sun]({world.web.url}/sun)\n\n> A star.\n\n# About the sun\n\nParagraph 0")
    assert second.startswith(f"# [{world.web.url}/x]({world.web.url}/x)")
    assert "_Could not read this page: HTTP 404._" in second


def test_web_search_prints_json_for_scripts_and_nothing_else(world: World) -> None:
    ended = run("web-search", "the sun", "--num-results", "1", "--json", env=world.environ())

    answer = json.loads(ended.out)
    assert ended.code == 0
    assert list(answer) == ["results"]
    assert [list(result) for result in answer["results"]] == [["title", "link", "snippet", "page_content"]]


def test_web_search_takes_the_filters_of_the_tool(world: World) -> None:
    options = ["--freshness", "week", "--country", "de", "--language", "de", "--exclude-domains", "a.example,b.example"]
    ended = run("web-search", "sun", "-n", "1", "--json", *options, env=world.environ())

    assert ended.code == 0
    sent = world.serper.requests[0].json()
    asked = {name: sent[name] for name in ("q", "tbs", "gl", "hl")}
    assert asked == {"q": "sun -site:a.example -site:b.example", "tbs": "qdr:w", "gl": "de", "hl": "de"}


def test_a_filter_that_makes_no_sense_ends_with_2_and_a_sentence(world: World) -> None:
    ended = run("web-search", "sun", "--freshness", "decade", env=world.environ())

    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "kindly: freshness must be day, week, month or year, not 'decade'.\n"


def test_a_search_without_results_says_so_and_is_no_failure(world: World) -> None:
    world.serper.routes = lambda request: (200, {"Content-Type": "application/json"}, '{"organic": []}')

    ended = run("web-search", "nothing of the kind", env=world.environ())

    assert (ended.code, ended.out) == (0, "_No results._\n")


def test_a_search_that_fails_ends_with_1_and_a_sentence(world: World) -> None:
    world.serper.routes = lambda request: (403, {}, f"bad key {SERPER_KEY}")

    ended = run("web-search", "the sun", env=world.environ())

    assert (ended.code, ended.out) == (1, "")
    assert ended.err.splitlines()[-1] == "kindly: Serper refused the API key (HTTP 403). Check SERPER_API_KEY."
    assert SERPER_KEY not in ended.err


def test_a_search_without_any_key_ends_with_2_and_says_what_to_set() -> None:
    ended = run("web-search", "the sun")

    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("kindly: No search provider is configured. Set SERPER_API_KEY,")


@pytest.mark.parametrize(
    "arguments",
    [["web-search", " "], ["web-search", "x", "-n", "many"], ["get-content", "ftp://x"], ["get-content", ""]],
)
def test_input_that_makes_no_sense_ends_with_2_and_a_sentence(arguments: list[str]) -> None:
    ended = run(*arguments, env=environ(SERPER_API_KEY=SERPER_KEY))

    assert (ended.code, ended.out) == (2, "")
    assert re.fullmatch(r"kindly: [A-Za-z].*\.\n", ended.err)


# -- get-content -------------------------------------------------------------


def test_get_content_prints_the_page_and_nothing_else(world: World) -> None:
    ended = run("get-content", world.web.url + "/sun", env=world.environ())

    assert ended.code == 0
    assert ended.out.startswith("# About the sun\n\nParagraph 0: the sun")
    assert ended.out.endswith("Paragraph 11: the sun, told with some care for detail.\n")
    assert ended.err == ""


def test_get_content_prints_json_for_scripts(world: World) -> None:
    ended = run("get-content", world.web.url + "/sun", "--json", env=world.environ())

    answer = json.loads(ended.out)
    assert set(answer) == {"url", "page_content"}
    assert answer["url"] == world.web.url + "/sun"


def test_get_content_of_a_page_that_is_not_there_prints_the_note_and_ends_with_1(world: World) -> None:
    ended = run("get-content", world.web.url + "/nowhere", env=world.environ())

    assert (ended.code, ended.out) == (1, failure_note("HTTP 404", world.web.url + "/nowhere") + "\n")


def test_get_content_goes_on_at_an_index(world: World) -> None:
    world.pages["/sun"] = (200, {"Content-Type": "text/plain"}, "0123456789abcdef")

    assert run("get-content", world.web.url + "/sun", "--start-index", "10", env=world.environ()).out == "abcdef\n"


def test_the_answer_is_utf_8_whatever_the_console_says(world: World) -> None:
    url = world.web.url + "/k%C3%A4se"
    world.pages["/k%C3%A4se"] = world.pages["/käse"]

    ended = run("get-content", url, env=world.environ(PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0"))

    assert ended.code == 0
    assert "grün – 太陽" in ended.out


def test_the_answer_can_go_to_a_file(world: World, tmp_path: Path) -> None:
    ended = run("get-content", world.web.url + "/sun", "-o", str(tmp_path / "page.md"), env=world.environ())

    assert (ended.code, ended.out) == (0, "")
    assert (tmp_path / "page.md").read_text(encoding="utf-8").startswith("# About the sun")


def test_a_file_that_cannot_be_written_ends_with_2_and_a_sentence(world: World, tmp_path: Path) -> None:
    ended = run("get-content", world.web.url + "/sun", "-o", str(tmp_path / "no" / "page.md"), env=world.environ())

    assert ended.code == 2
    assert re.fullmatch(r"kindly: .*page\.md cannot be written: .*\.\n", ended.err)


# -- the environment and the end ---------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["web-search", "x"], ["get-content", "https://example.com/"], ["start-mcp-server"]]
)
def test_a_bad_value_in_the_environment_ends_with_2_and_a_sentence(arguments: list[str]) -> None:
    ended = run(*arguments, env=environ(KINDLY_CACHE_TTL_SECONDS="forever"))

    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        "kindly: KINDLY_CACHE_TTL_SECONDS: 'forever' is not a duration such as 15s or 500ms. Correct it or unset it.\n"
    )


def test_a_bad_value_that_is_a_secret_is_not_shown() -> None:
    ended = run("web-search", "x", env=environ(SEARXNG_HEADERS_JSON="Bearer hunter2hunter2"))

    assert ended.code == 2
    assert "SEARXNG_HEADERS_JSON" in ended.err
    assert "hunter2" not in ended.err


def test_a_debug_log_goes_to_stderr_without_the_key(world: World) -> None:
    ended = run("web-search", "the sun", "--json", env=world.environ(KINDLY_LOG_LEVEL="DEBUG"))

    json.loads(ended.out)
    assert "kindly_search" in ended.err
    assert SERPER_KEY not in ended.err


def test_the_server_accepts_any_context_and_whatever_a_wrapper_forwards() -> None:
    ended = run("start-mcp-server", "--context", "whatever", "--", "--anything", "--port-of-call", "7", "more")

    assert (ended.code, ended.out) == (0, ""), "stdin is at its end, so the server just stops"


@pytest.mark.skipif(os.name != "posix", reason="a pipe of POSIX")
def test_a_reader_that_goes_away_is_no_reason_for_a_traceback(world: World) -> None:
    world.pages["/sun"] = (200, {"Content-Type": "text/plain"}, "line of text\n" * 200_000)
    process = subprocess.Popen(
        [*command(), "get-content", world.web.url + "/sun"],
        env=world.environ(KINDLY_MAX_RESPONSE_CHARS="10000000"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout
    assert process.stderr
    process.stdout.read(10)
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()

    assert process.wait(15) == 1
    assert errors == ""
