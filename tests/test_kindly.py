"""Section 12: web_search and get_content end to end, in process, against real servers on loopback."""

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from conftest import Site

from kindly_search import (
    AllProvidersFailed,
    AuthError,
    BadRequest,
    Breakers,
    Browser,
    BrowserSettings,
    ConfigError,
    Filters,
    Http,
    HttpStep,
    InvalidInput,
    Kindly,
    Offline,
    PageCache,
    RateLimited,
    Reader,
    Router,
    SearchError,
    Settings,
    Telemetry,
    Threads,
    checked_filters,
    failure_note,
    same_page_key,
)

SERPER_KEY = "serper-0123456789-secret"
TAVILY_KEY = "tvly-dev-9876543210-secret"
GITHUB_TOKEN = "ghp_abcdefABCDEF0123456789"
BOTH_KEYS = {"SERPER_API_KEY": SERPER_KEY, "TAVILY_API_KEY": TAVILY_KEY}


def article(about: str, *, paragraphs: int = 12) -> str:
    text = "".join(f"<p>Paragraph {i}: {about}, told with some care for detail.</p>" for i in range(paragraphs))
    return (
        f"<html><head><title>About {about}</title></head><body><main><h1>About {about}</h1>{text}</main></body></html>"
    )


class World:
    """Loopback stand-ins for Serper, Tavily and the web, and Kindlys that know no other."""

    def __init__(self, serve: Callable[..., Any]) -> None:
        self.pages: dict[str, Any] = {f"/{i}": article(f"topic {i}") for i in range(1, 11)}
        self.web = serve(self.pages)
        self.serper_answer: Any = None
        self.tavily_answer: Any = None
        self.serper = serve(lambda request: self._answer(request, self.serper_answer, "organic", "link", "snippet"))
        self.tavily = serve(lambda request: self._answer(request, self.tavily_answer, "results", "url", "content"))
        self._made: list[Kindly] = []

    def _answer(self, request: Any, answer: Any, key: str, link: str, snippet: str) -> Any:
        if callable(answer):
            return answer(request)
        if isinstance(answer, tuple):
            return answer
        asked = request.json()
        count = asked.get("num") or asked.get("max_results")
        found = [{"title": f"Hit {path}", link: self.web.url + path, snippet: f"about {path}"} for path in self.pages]
        return 200, {"Content-Type": "application/json"}, json.dumps({key: found[:count] if answer is None else answer})

    def kindly(self, keys: Mapping[str, str] = BOTH_KEYS, **variables: str) -> Kindly:
        environ = {
            "SERPER_SEARCH_ENDPOINT": self.serper.url,
            "TAVILY_SEARCH_ENDPOINT": self.tavily.url,
            "KINDLY_ALLOW_PRIVATE_HOSTS": self.web.host,
            "KINDLY_CONTENT_CHAIN": "http",
            "KINDLY_BROWSER_ENABLED": "false",
            **keys,
            **variables,
        }
        self._made.append(Kindly.from_env(environ))
        return self._made[-1]

    def close(self) -> None:
        for kindly in self._made:
            kindly.close()


@pytest.fixture
def world(serve: Callable[..., Any]) -> Any:
    world = World(serve)
    yield world
    world.close()


def hits(*paths: str, base: str) -> list[dict[str, str]]:
    """Results in Serper's words."""
    return [{"title": f"Hit {path}", "link": base + path, "snippet": f"about {path}"} for path in paths]


# -- spec 001, acceptance criteria -------------------------------------------


def test_criterion_1_a_tavily_key_alone_is_enough(world: World) -> None:
    report = world.kindly({"TAVILY_API_KEY": TAVILY_KEY}).web_search("topics")

    assert [result.title for result in report.results] == ["Hit /1", "Hit /2", "Hit /3"]
    assert all("told with some care" in result.page_content for result in report.results)
    assert world.serper.requests == []


def test_criterion_1_a_serper_key_alone_is_enough(world: World) -> None:
    report = world.kindly({"SERPER_API_KEY": SERPER_KEY}).web_search("topics")

    assert len(report.results) == 3
    assert world.tavily.requests == []


def test_criterion_2_with_both_keys_serper_is_asked(world: World) -> None:
    report = world.kindly().web_search("topics")

    assert report.meta["provider"] == "serper"
    assert world.tavily.requests == []


@pytest.mark.parametrize(
    "failure",
    [
        (500, {}, "oops"),
        (502, {}, ""),
        (429, {}, "slow down"),
        (402, {}, "pay"),
        (200, {}, "not JSON"),
        (200, {"Content-Type": "application/json"}, "[]"),
        lambda request: request.reset(),
    ],
    ids=["500", "502", "429", "402", "not JSON", "wrong shape", "reset"],
)
def test_criterion_3_when_serper_has_a_problem_tavily_answers(world: World, failure: Any) -> None:
    world.serper_answer = failure

    report = world.kindly().web_search("topics")

    assert report.meta["provider"] == "tavily"
    assert [attempt["by"] for attempt in report.meta["attempts"]] == ["serper", "tavily"]
    assert len(report.results) == 3


def test_criterion_3_when_serper_is_silent_tavily_answers(world: World) -> None:
    world.serper_answer = lambda request: request.hold()

    report = world.kindly(SERPER_TIMEOUT="300ms").web_search("topics")

    assert report.meta["provider"] == "tavily"
    assert report.meta["attempts"][0]["outcome"] == "timed out"


@pytest.mark.parametrize(("status", "error"), [(401, AuthError), (403, AuthError), (400, BadRequest)])
def test_a_refused_key_or_request_is_not_hidden_by_a_fallback(
    world: World, status: int, error: type[SearchError]
) -> None:
    world.serper_answer = (status, {}, "no")

    with pytest.raises(error, match=rf"HTTP {status}"):
        world.kindly().web_search("topics")
    assert world.tavily.requests == []


def test_no_results_is_an_answer_and_not_a_reason_to_ask_another(world: World) -> None:
    world.serper_answer = []

    assert world.kindly().web_search("topics").results == []
    assert world.tavily.requests == []


@pytest.mark.parametrize("blank", ["", "  \t"])
def test_criterion_4_without_a_key_the_error_names_both_variables(world: World, blank: str) -> None:
    kindly = world.kindly({"SERPER_API_KEY": blank, "TAVILY_API_KEY": blank})

    with pytest.raises(ConfigError, match=r"SERPER_API_KEY.*TAVILY_API_KEY"):
        kindly.web_search("topics")


def test_criterion_5_page_content_is_a_string_whatever_happens_to_the_page(world: World) -> None:
    awkward = {
        "/gone": (404, {}, "gone"),
        "/empty": "",
        "/image": (200, {"Content-Type": "image/png"}, b"\x89PNG"),
        "/reset": lambda request: request.reset(),
        "/loop": (302, {"Location": "/loop"}, ""),
        "/shell": "<title>App</title><div id=app></div><script src=x.js></script>",
        "/binary": (200, {"Content-Type": "text/html"}, bytes(range(256)) * 10),
        "/bad-gzip": (200, {"Content-Encoding": "gzip"}, b"not gzip at all"),
    }
    world.pages.update(awkward)
    paths = [*awkward, "/1"]
    private = {"title": "private", "link": "http://10.0.0.1/", "snippet": ""}
    world.serper_answer = [*hits(*paths, base=world.web.url), private]

    report = world.kindly().web_search("topics", 10)

    answer = json.loads(json.dumps(report.as_dict()))
    assert [set(result) for result in answer["results"]] == [{"title", "link", "snippet", "page_content"}] * 10
    assert all(isinstance(result["page_content"], str) and result["page_content"] for result in answer["results"])
    notes = {result["title"]: result["page_content"] for result in answer["results"]}
    assert notes["Hit /gone"] == failure_note("HTTP 404", world.web.url + "/gone")
    assert notes["Hit /image"].startswith("_Could not read this page: unsupported type image/png")
    assert notes["Hit /loop"] == failure_note("too many redirects", world.web.url + "/loop")
    assert notes["private"] == failure_note("address not allowed", "http://10.0.0.1/")
    assert "Paragraph 3: topic 1" in notes["Hit /1"]


SECRETS = (SERPER_KEY, TAVILY_KEY, GITHUB_TOKEN)


@pytest.mark.parametrize("status", [200, 400, 401, 402, 403, 429, 500])
def test_criterion_6_errors_never_hold_a_key_even_if_the_providers_echo_it(world: World, status: int) -> None:
    echo = json.dumps({"message": f"bad keys {SECRETS}", "error": {"message": " ".join(SECRETS)}})
    headers = {"Content-Type": "application/json", "X-Echo": SERPER_KEY, "Retry-After": "60"}
    world.serper_answer = world.tavily_answer = (status, headers, echo)

    with pytest.raises(SearchError) as caught:
        world.kindly({**BOTH_KEYS, "GITHUB_TOKEN": GITHUB_TOKEN}).web_search("topics")

    shown = f"{caught.value} {caught.value!r} {caught.value.__cause__} {caught.value.__context__!r}"
    assert not [secret for secret in SECRETS if secret in shown]


def test_both_failing_gives_the_primarys_error_and_names_the_fallback(world: World) -> None:
    world.serper_answer = (500, {}, "")
    world.tavily_answer = (503, {}, "")

    with pytest.raises(AllProvidersFailed, match=r"^Serper has a problem of its own \(HTTP 500\)\. .*Tavily"):
        world.kindly().web_search("topics")


# -- web_search --------------------------------------------------------------


def test_results_come_in_the_order_of_the_provider_however_fast_their_pages_are(world: World) -> None:
    delays = {"/1": 0.3, "/2": 0.0, "/3": 0.15}
    for path, delay in delays.items():
        world.pages[path] = lambda request, path=path, delay=delay: time.sleep(delay) or article(f"page {path}")

    report = world.kindly().web_search("topics")

    assert [result.link for result in report.results] == [world.web.url + path for path in delays]
    assert [f"page {path}" in result.page_content for path, result in zip(delays, report.results, strict=True)] == [
        True
    ] * 3


def test_the_meta_says_who_was_asked_and_how_each_page_was_read(world: World) -> None:
    world.pages["/2"] = (404, {}, "")

    meta = world.kindly().web_search("topics").meta

    assert meta["provider"] == "serper"
    assert [(page["method"], page["failure"]) for page in meta["pages"]] == [
        ("http", ""),
        ("", "HTTP 404"),
        ("http", ""),
    ]
    assert [page["url"] for page in meta["pages"]] == [world.web.url + path for path in ("/1", "/2", "/3")]
    json.dumps(meta)


def test_a_slow_page_costs_only_its_own_note_at_the_deadline(world: World) -> None:
    world.pages["/2"] = lambda request: request.hold()
    kindly = world.kindly(KINDLY_TOOL_TOTAL_TIMEOUT_SECONDS="1.5")

    started = time.monotonic()
    results = kindly.web_search("topics").results

    assert time.monotonic() - started < 2.5
    assert results[1].page_content == failure_note("timed out", world.web.url + "/2")
    assert "Paragraph 3: topic 1" in results[0].page_content
    assert "Paragraph 3: topic 3" in results[2].page_content


def test_a_page_that_drips_does_not_hold_up_the_answer(world: World) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 100000\r\n\r\n"
    world.pages["/1"] = lambda request: request.send(head) or request.drip(b"x" * 1000, every=0.05)
    kindly = world.kindly(KINDLY_TOOL_TOTAL_TIMEOUT_SECONDS="1.5")

    started = time.monotonic()
    results = kindly.web_search("topics").results

    assert time.monotonic() - started < 2.5
    assert results[0].page_content == failure_note("timed out", world.web.url + "/1")


def test_a_search_that_never_ends_fails_at_the_deadline(world: World) -> None:
    world.serper_answer = lambda request: request.hold()
    kindly = world.kindly({"SERPER_API_KEY": SERPER_KEY}, KINDLY_TOOL_TOTAL_TIMEOUT_SECONDS="800ms")

    started = time.monotonic()
    with pytest.raises(SearchError, match="time"):
        kindly.web_search("topics")

    assert time.monotonic() - started < 2


def test_five_pages_of_a_second_each_take_little_more_than_a_second(world: World) -> None:
    for i in range(1, 6):
        world.pages[f"/{i}"] = lambda request, i=i: time.sleep(1) or article(f"topic {i}")
    found = hits(*(f"/{i}" for i in range(1, 6)), base=world.web.url)
    body = json.dumps({"organic": found})
    world.serper_answer = lambda request: time.sleep(0.3) or (200, {"Content-Type": "application/json"}, body)
    kindly = world.kindly()

    started = time.monotonic()
    results = kindly.web_search("topics", 5).results

    assert time.monotonic() - started < 3
    assert all("told with some care" in result.page_content for result in results)


def test_no_more_pages_are_read_at_once_than_configured(world: World) -> None:
    lock, running, most = threading.Lock(), [0], [0]

    def busy(request: Any) -> str:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.05)
        with lock:
            running[0] -= 1
        return article("busy")

    world.pages.update({f"/{i}": busy for i in range(1, 7)})

    world.kindly(KINDLY_WEB_SEARCH_MAX_CONCURRENCY="2").web_search("topics", 6)

    assert most[0] == 2


def test_progress_is_reported_for_every_page(world: World) -> None:
    seen: list[tuple[int, int, str]] = []

    world.kindly().web_search("topics", progress=lambda done, total, message: seen.append((done, total, message)))

    assert seen[0] == (0, 3, "serper found 3")
    assert seen[-1] == (3, 3, "read 3 of 3: 127.0.0.1")
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)


class Cancelled(Exception):
    pass


@pytest.mark.parametrize("stage", ["search", "page"])
def test_a_cancelled_call_ends_promptly(world: World, stage: str) -> None:
    if stage == "search":
        world.serper_answer = lambda request: request.hold()
    else:
        world.pages["/1"] = lambda request: request.hold()
    started = time.monotonic()

    def check() -> None:
        if time.monotonic() - started > 0.3:
            raise Cancelled

    with pytest.raises(Cancelled):
        world.kindly().web_search("topics", check_cancelled=check)
    assert time.monotonic() - started < 2


def test_two_hits_on_the_same_page_are_one_result(world: World) -> None:
    world.serper_answer = hits("/1", "/2", "/1/", "/1?utm_source=x", "/1#part", base=world.web.url)

    results = world.kindly().web_search("topics", 5).results

    assert [result.link for result in results] == [world.web.url + "/1", world.web.url + "/2"]
    assert sorted(world.web.paths) == ["/1", "/2"]


def story(words: range, extra: str = "") -> str:
    text = " ".join(f"word{i}" for i in words)
    return f"<title>Story</title><main><p>{extra}</p><p>{text}</p></main>"


def test_what_is_dropped_is_made_up_for_by_what_else_was_found(world: World) -> None:
    """A SearXNG takes no count and may not know `site:`."""
    base = world.web.url
    elsewhere = base.replace("127.0.0.1", "127.0.0.2")
    twice = [f"{base}/1", f"{base}/1?utm_source=x", f"{base}/1#top"]
    links = [*twice, *(f"{elsewhere}/{n}" for n in range(3)), *(f"{base}/{n}" for n in range(2, 9))]
    found = json.dumps({"results": [{"title": link, "url": link, "content": ""} for link in links]})
    searx = Site(lambda request: (200, {"Content-Type": "application/json"}, found))
    kindly = world.kindly({"SEARXNG_URL": searx.url})

    report = kindly.web_search("topics", 3, filters=Filters(exclude_domains=("127.0.0.2",)))

    assert [result.link for result in report.results] == [f"{base}/1", f"{base}/2", f"{base}/3"]
    searx.close()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("https://a.example/x", "https://a.example:443/x", True),
        ("http://a.example:80/x", "https://a.example./x", True),
        ("https://a.example/x", "https://a.example:8443/x", False),
        ("https://www.a.example/x/", "http://a.example/x#part", True),
        ("https://a.example/#/one", "https://a.example/#/two", False),
        ("https://a.example/#!one", "https://a.example/#!two", False),
        ("https://a.example/x?a=1", "https://a.example/x?a=2", False),
    ],
)
def test_addresses_of_one_page_are_known_as_such(one: str, other: str, same: bool) -> None:
    assert (same_page_key(one) == same_page_key(other)) is same


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("a.com, b.com", ("a.com", "b.com")),
        ("a.com b.com", ("a.com", "b.com")),
        (["https://Docs.A.com/x", "*.b.org", "a.com."], ("docs.a.com", "b.org", "a.com")),
        (["münchen.de"], ("xn--mnchen-3ya.de",)),
        (["a.com", "a.com"], ("a.com",)),
        (None, ()),
        ([], ()),
        ("", ()),
    ],
)
def test_domains_are_taken_as_they_were_meant(given: Any, meant: tuple[str, ...]) -> None:
    assert checked_filters(include_domains=given).include_domains == meant


@pytest.mark.parametrize(
    "given",
    [".gov", "gov", "a.com OR b.com", "a.com|b.com", ["a.com) OR site:evil.com"], ["a b.com"], 5, {"a": 1}, "x,y"],
)
def test_what_is_no_domain_is_refused_with_a_sentence(given: Any) -> None:
    for name in ("include_domains", "exclude_domains"):
        with pytest.raises(InvalidInput, match=r"is not a domain such as docs\.python\.org\.$|^Give domains as a list"):
            checked_filters(**{name: given})


@pytest.mark.parametrize(
    ("country", "language", "meant"),
    [("UK", "en-GB", ("gb", "en")), ("br", "pt_BR", ("br", "pt")), ("", None, ("", ""))],
)
def test_codes_are_taken_as_they_were_meant(country: Any, language: Any, meant: tuple[str, str]) -> None:
    filters = checked_filters(country=country, language=language)
    assert (filters.country, filters.language) == meant


def test_a_copy_of_an_earlier_page_is_a_line_that_names_it(world: World) -> None:
    world.pages.update({"/1": story(range(500)), "/2": story(range(500), "A mirror."), "/3": story(range(300, 800))})

    results = world.kindly().web_search("topics", 3).results

    assert "word499" in results[0].page_content
    assert results[1].page_content == f"_The same text as {world.web.url}/1, which is among these results._"
    assert "word499" in results[2].page_content


def test_failures_are_not_called_copies_of_each_other(world: World) -> None:
    world.pages["/1"] = world.pages["/2"] = (404, {}, "")

    results = world.kindly().web_search("topics", 2).results

    assert results[1].page_content == failure_note("HTTP 404", world.web.url + "/2")


def test_the_whole_answer_stays_within_the_configured_limit(world: World) -> None:
    for i in range(1, 11):
        world.pages[f"/{i}"] = article(f"topic {i}", paragraphs=2000)

    report = world.kindly(KINDLY_MAX_RESPONSE_CHARS="30000").web_search("topic 7", 10)

    size = len(json.dumps(report.as_dict(), ensure_ascii=False))
    assert 20_000 < size <= 30_000


def test_the_call_that_a_shortened_result_names_shows_what_was_left_out(world: World) -> None:
    world.pages["/1"] = article("topic 1", paragraphs=3000)
    kindly = world.kindly({"SERPER_API_KEY": SERPER_KEY}, KINDLY_MAX_RESPONSE_CHARS="20000")

    [result] = kindly.web_search("topics", 1).results
    index = int(result.page_content.rpartition("start_index=")[2].partition(")")[0])
    shown = kindly.get_content(result.link, index).page_content

    first_hidden = shown.split("\n\n")[0]
    assert first_hidden.startswith("Paragraph ")
    assert first_hidden not in result.page_content
    number = int(first_hidden.split(":")[0].removeprefix("Paragraph "))
    assert f"Paragraph {number - 1}:" in result.page_content
    assert world.web.paths == ["/1"], "the rest comes from the cache"


# -- lenient input -----------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [("3", 3), (3.0, 3), (None, 3), ("", 3), (99, 10), (-1, 1), (0, 1), ("2.0", 2), (float("inf"), 10), (1e30, 10)],
)
def test_a_number_of_results_is_taken_as_it_was_meant(world: World, given: Any, meant: int) -> None:
    assert len(world.kindly().web_search("topics", given).results) == meant


@pytest.mark.parametrize("given", ["abc", "three", [3], {}, float("nan")])
def test_what_is_no_number_of_results_is_refused_with_a_sentence(world: World, given: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^num_results must be a whole number, not .*\.$"):
        world.kindly().web_search("topics", given)
    assert world.serper.requests == []


@pytest.mark.parametrize("query", ["", "  \n", None, "\x00"])
def test_an_empty_query_is_refused_with_a_sentence(world: World, query: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^The query is empty\. Say in a few words what to search for\.$"):
        world.kindly().web_search(query)
    assert world.serper.requests == []


@pytest.mark.parametrize(
    "url", ["", None, "   ", "ftp://example.com/x", "file:///etc/passwd", "example.com", "http://", 7]
)
def test_what_is_no_web_address_is_refused_with_a_sentence(world: World, url: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^[A-Z][^\n]*\.$"):
        world.kindly().get_content(url)


@pytest.mark.parametrize("start", [0, None, "", "0", -7, 0.0])
def test_a_start_index_is_taken_as_it_was_meant(world: World, start: Any) -> None:
    assert world.kindly().get_content(world.web.url + "/1", start).page_content.startswith("# About topic 1")


@pytest.mark.parametrize("start", ["20", 20, 20.0])
def test_a_start_index_within_the_page_skips_what_was_shown(world: World, start: Any) -> None:
    kindly = world.kindly()
    whole = kindly.get_content(world.web.url + "/1").page_content

    assert kindly.get_content(world.web.url + "/1", start).page_content == whole[20:]


def test_what_is_no_start_index_is_refused_before_the_page_is_read(world: World) -> None:
    with pytest.raises(InvalidInput, match=r"^start_index must be a whole number, not 'x'\.$"):
        world.kindly().get_content(world.web.url + "/1", "x")  # type: ignore[arg-type]
    assert world.web.requests == []


# -- get_content -------------------------------------------------------------


def test_get_content_returns_the_url_and_the_page(world: World) -> None:
    report = world.kindly({}).get_content(world.web.url + "/1")

    assert report.as_dict() == {"url": world.web.url + "/1", "page_content": report.page_content}
    assert report.page_content.startswith("# About topic 1\n\nParagraph 0: topic 1")
    assert report.failure == ""


def test_get_content_of_a_page_that_is_not_there_is_a_note(world: World) -> None:
    report = world.kindly({}).get_content(world.web.url + "/nowhere")

    assert report.page_content == failure_note("HTTP 404", world.web.url + "/nowhere")
    assert report.failure == "HTTP 404"


def test_get_content_ends_at_the_deadline_with_a_note(world: World) -> None:
    world.pages["/1"] = lambda request: request.hold()

    started = time.monotonic()
    report = world.kindly({}, KINDLY_TOOL_TOTAL_TIMEOUT_SECONDS="500ms").get_content(world.web.url + "/1")

    assert time.monotonic() - started < 1.5
    assert report.failure == "timed out"


# -- secrets -----------------------------------------------------------------


def everything_of(report: Any) -> str:
    return json.dumps([report.as_dict(), report.meta], ensure_ascii=False) + repr(report)


@pytest.mark.parametrize("kind", ["text/html", "text/plain", "application/json"])
def test_a_secret_that_a_page_echoes_does_not_come_out(world: World, kind: str) -> None:
    world.pages["/1"] = (
        200,
        {"Content-Type": kind},
        f"<p>{'Hello there. ' * 30} key {SERPER_KEY} and {GITHUB_TOKEN}</p>",
    )
    kindly = world.kindly({**BOTH_KEYS, "GITHUB_TOKEN": GITHUB_TOKEN})

    shown = everything_of(kindly.web_search("topics", 1)) + everything_of(kindly.get_content(world.web.url + "/1"))

    assert "[redacted]" in shown
    assert SERPER_KEY not in shown
    assert GITHUB_TOKEN not in shown


@pytest.mark.parametrize("secret", ["abc_def_ghi_jkl", "star*star*1234", "pass[word]1234"])
def test_a_secret_is_found_even_where_markdown_escapes_it(world: World, secret: str) -> None:
    import html
    import re

    world.pages["/1"] = f"<title>t</title><main><p>{'Hello there. ' * 30} {html.escape(secret)} </p></main>"

    shown = world.kindly({"SERPER_API_KEY": secret}).get_content(world.web.url + "/1").page_content

    assert secret not in re.sub(r"\\(.)", r"\1", shown)


def test_secrets_that_a_provider_echoes_do_not_come_out(world: World) -> None:
    link = f"{world.web.url}/1?key={SERPER_KEY}"
    world.serper_answer = [{"title": f"T {SERPER_KEY}", "link": link, "snippet": f"S {TAVILY_KEY}"}]

    shown = everything_of(world.kindly().web_search(f"why is {SERPER_KEY} refused"))

    assert SERPER_KEY not in shown
    assert TAVILY_KEY not in shown


def test_a_note_about_an_address_with_a_secret_in_it_does_not_show_it(world: World) -> None:
    shown = everything_of(world.kindly().get_content(f"{world.web.url}/nowhere?key={SERPER_KEY}"))

    assert SERPER_KEY not in shown


def test_the_line_that_continues_a_page_does_not_show_a_secret_in_its_address(world: World) -> None:
    world.pages["/1"] = article("topic", paragraphs=2000)

    report = world.kindly(KINDLY_MAX_RESPONSE_CHARS="5000").get_content(f"{world.web.url}/1?key={SERPER_KEY}")

    assert "start_index=" in report.page_content
    assert SERPER_KEY not in report.page_content


def test_nothing_in_the_log_holds_a_secret_or_the_query(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.serper_answer = (500, {}, SERPER_KEY)
    with caplog.at_level(logging.DEBUG, logger="kindly_search"):
        world.kindly().web_search("my private question")

    assert "serper" in caplog.text
    assert "private question" not in caplog.text
    assert not [secret for secret in SECRETS if secret in caplog.text]


def parts_of(thing: Any, depth: int = 3) -> list[Any]:
    """The object, and what it is made of."""
    if depth == 0 or isinstance(thing, str | int | float | bytes | type(None)):
        return [thing]
    inner = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    inner += list(thing) if isinstance(thing, list | tuple) else []
    return [thing, *(part for value in inner for part in parts_of(value, depth - 1))]


def test_the_repr_of_kindly_and_of_its_parts_holds_no_secret(world: World) -> None:
    proxy = "http://someone:pa55word99@127.0.0.1:9/"
    kindly = world.kindly({**BOTH_KEYS, "GITHUB_TOKEN": GITHUB_TOKEN}, HTTPS_PROXY=proxy, EXA_API_KEY="exa-key-12345")

    parts = [part for part in parts_of(kindly) if type(part).__module__ == "kindly_search"]

    assert {"Kindly", "Router", "Reader", "Redactor", "Settings", "Serper", "Tavily"} <= {
        type(part).__name__ for part in parts
    }
    for part in parts:
        shown = repr(part)
        assert not [s for s in (*SECRETS, "pa55word99", "exa-key-12345") if s in shown], type(part).__name__


# -- configuration -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KINDLY_MAX_RESPONSE_CHARS", "many"),
        ("KINDLY_TOOL_TOTAL_TIMEOUT_SECONDS", "soon"),
        ("SERPER_ENABLED", "maybe"),
        ("TAVILY_SEARCH_ENDPOINT", "not a url"),
        ("KINDLY_LOG_LEVEL", "LOUD"),
    ],
)
def test_a_value_that_does_not_parse_is_named_in_one_sentence(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: '{value}' is not .*\. Correct it or unset it\.$"):
        Kindly.from_env({name: value})


def test_the_environment_is_read_once_when_kindly_is_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**BOTH_KEYS, "SERPER_SEARCH_ENDPOINT": world.serper.url, "KINDLY_BROWSER_ENABLED": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KINDLY_ALLOW_PRIVATE_HOSTS", world.web.host)
    with Kindly.from_env() as kindly:
        monkeypatch.delenv("SERPER_API_KEY")
        assert kindly.web_search("topics").meta["provider"] == "serper"


def test_the_limit_that_a_client_is_known_for_yields_to_the_configured_one() -> None:
    assert Kindly.from_env({}, max_response_chars=40_000).settings.max_response_chars == 40_000
    configured = {"KINDLY_MAX_RESPONSE_CHARS": "50000"}
    assert Kindly.from_env(configured, max_response_chars=40_000).settings.max_response_chars == 50_000


def test_closing_kindly_ends_its_connections(world: World, wait_until: Any) -> None:
    kindly = world.kindly()
    kindly.get_content(world.web.url + "/1")
    kindly.close()

    # A closed connection reads as the end of file on the server's side.
    wait_until(lambda: all(connection.fileno() == -1 for connection in world.web.connections))


# -- offline -----------------------------------------------------------------


def test_offline_is_said_before_anything_else_is_missed() -> None:
    with Kindly.from_env({"KINDLY_OFFLINE": "true"}) as kindly:
        with pytest.raises(Offline, match=r"^search unavailable: offline mode is enabled$"):
            kindly.web_search("anything")


def test_a_key_that_no_header_can_carry_is_named_as_the_problem(world: World) -> None:
    with pytest.raises(ConfigError, match="a strange character in its key"):
        world.kindly({"SERPER_API_KEY": "abc…def", "TAVILY_API_KEY": TAVILY_KEY}).web_search("topics")


def test_offline_nothing_is_searched_and_nothing_is_read(world: World) -> None:
    kindly = world.kindly(KINDLY_OFFLINE="true")

    with pytest.raises(Offline, match="^search unavailable: offline mode is enabled$"):
        kindly.web_search("topics")
    with pytest.raises(Offline, match="^scrape unavailable: offline mode is enabled$"):
        kindly.get_content(world.web.url + "/1")
    assert world.serper.requests == world.web.requests == []


def test_offline_a_page_that_was_read_before_is_still_served(world: World) -> None:
    cache = PageCache(300)

    def made(settings: Settings) -> Kindly:
        http = Http(settings)
        return Kindly(
            settings,
            Router([], http),
            Reader(http, [HttpStep(http)], cache=cache),
            breakers=Breakers(settings),
            telemetry=Telemetry(),
            browser=Browser(BrowserSettings(enabled=False), environ={}),
            http=http,
            environ={},
        )

    online = Settings(allow_private_hosts=world.web.host)
    with made(online) as before, made(dataclasses.replace(online, offline=True)) as after:
        page = before.get_content(world.web.url + "/1").page_content
        report = after.get_content(world.web.url + "/1")

    assert report.page_content == page
    assert report.meta["page"]["method"] == "cache"
    assert world.web.paths == ["/1"]


# -- threads -----------------------------------------------------------------


def running() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kindly"}


def test_a_thread_is_used_again(wait_until: Callable[..., Any]) -> None:
    before, threads = running(), Threads(100, idle_seconds=5)
    workers = set()
    for _ in range(20):
        workers.add(threads.run(threading.current_thread).result(timeout=5))
        wait_until(lambda: threads._idle == 1)
    assert workers == running() - before
    assert len(workers) == 1


def test_jobs_at_the_same_time_never_wait_for_each_other() -> None:
    threads, everybody = Threads(100), threading.Barrier(30, timeout=5)
    for _ in range(3):
        together = [threads.run(everybody.wait) for _ in range(30)]
        assert sorted(job.result(timeout=10) for job in together) == list(range(30))


def test_threads_that_nobody_needs_end(wait_until: Callable[..., Any]) -> None:
    before, threads = running(), Threads(100, idle_seconds=0.05)
    for job in [threads.run(lambda: time.sleep(0.05)) for _ in range(10)]:
        job.result(timeout=5)
    wait_until(lambda: running() <= before)
    assert threads.run(lambda: "again").result(timeout=5) == "again"


def test_a_job_that_comes_while_a_thread_is_about_to_end_is_done() -> None:
    threads = Threads(100, idle_seconds=0.001)
    for number in range(300):
        assert threads.run(lambda number=number: number).result(timeout=5) == number  # type: ignore[misc]
        time.sleep(0.001)


def test_a_thread_that_cannot_be_started_fails_its_own_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = Threads(100, idle_seconds=0.01)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.run(lambda: "lost")
    for number in range(3):
        assert threads.run(lambda: "done").result(timeout=5) == "done", number
        time.sleep(0.05)  # the thread ends


def test_no_more_jobs_than_allowed_are_under_way(wait_until: Callable[..., Any]) -> None:
    threads, let_go = Threads(2), threading.Event()
    running = [threads.run(let_go.wait) for _ in range(2)]
    with pytest.raises(RateLimited, match="still busy with earlier calls"):
        threads.run(let_go.wait)
    let_go.set()
    assert [future.result(5) for future in running] == [True, True]
    wait_until(lambda: threads._busy == 0)
    assert threads.run(lambda: "again").result(5) == "again"


def test_a_cancelled_call_begins_nothing_new(world: World, wait_until: Callable[..., Any]) -> None:
    held, asked = threading.Event(), threading.Semaphore(0)

    def slow(request: Any) -> Any:
        asked.release()
        held.wait(10)
        return 403, {}, "blocked"

    world.pages.update({f"/{n}": slow for n in range(1, 11)})
    kindly = world.kindly(KINDLY_CONTENT_CHAIN="http,tavily", KINDLY_WEB_SEARCH_MAX_CONCURRENCY="2")
    cancelled = threading.Event()

    def check() -> None:
        if cancelled.is_set():
            raise KeyboardInterrupt

    def search() -> None:
        with pytest.raises(KeyboardInterrupt):
            kindly.web_search("topics", 6, check_cancelled=check)

    thread = threading.Thread(target=search, daemon=True)
    thread.start()
    assert asked.acquire(timeout=5) and asked.acquire(timeout=5)
    cancelled.set()
    thread.join(5)
    held.set()
    wait_until(lambda: kindly._threads._busy == 0)
    assert not asked.acquire(blocking=False), "a page was asked for after the call had been cancelled"
    assert world.tavily.requests == [], "a page was paid for after the call had been cancelled"


def test_what_a_job_raises_reaches_whoever_waits_and_the_thread_goes_on() -> None:
    threads = Threads(100)
    with pytest.raises(ZeroDivisionError):
        threads.run(lambda: 1 // 0).result(timeout=5)
    assert threads.run(lambda: 2).result(timeout=5) == 2
