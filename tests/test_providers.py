"""Section 5, Providers: what we say to each search API and how we read what it says."""

import json
import logging
import time
import traceback
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
import requests
import responses
from responses import matchers

from kindly_search import (
    PROVIDERS,
    AuthError,
    BadRequest,
    BadResponse,
    Deadline,
    Exa,
    Filters,
    Http,
    PageFailed,
    ProviderDown,
    QuotaExhausted,
    RateLimited,
    Redactor,
    Router,
    SearchError,
    SearchResult,
    SearXNG,
    Serper,
    Settings,
    Tavily,
    Timeout,
    Unreachable,
    configured_providers,
    country_name,
    headers_json,
    retry_after,
)

KEY = "k3y-0f-th3-0p3rat0r+/="
SERPER = "https://google.serper.dev/search"
EXA = "https://api.exa.ai/search"
TAVILY = "https://api.tavily.com/search"
SEARXNG = "https://searx.example/search"

PROVIDER = {
    "serper": Serper(api_key=KEY),
    "exa": Exa(api_key=KEY),
    "tavily": Tavily(api_key=KEY),
    "searxng": SearXNG(url="https://searx.example", headers={"Authorization": KEY}),
}
ENDPOINT = {"serper": SERPER, "exa": EXA, "tavily": TAVILY, "searxng": SEARXNG}
METHOD = {"serper": "POST", "exa": "POST", "tavily": "POST", "searxng": "GET"}

#: Where each provider lists its results, and what it calls the link and the snippet.
SHAPE = {
    "serper": ("organic", "link", "snippet"),
    "exa": ("results", "url", "text"),
    "tavily": ("results", "url", "content"),
    "searxng": ("results", "url", "content"),
}
EVERY_PROVIDER = pytest.mark.parametrize("name", list(PROVIDER))


@pytest.fixture
def api():
    """The network as `responses` plays it; every registered answer must be asked for."""
    with responses.RequestsMock() as mock:
        yield mock


@pytest.fixture
def http():
    http = Http(Settings(), redact=Redactor([KEY]))
    yield http
    http.close()


def answers(api, name, body, *, status=200, **kwargs):
    """Registers what a provider's search says."""
    given = {"json": body} if isinstance(body, dict | list) or body is None else {"body": body}
    return api.add(METHOD[name], ENDPOINT[name], status=status, **given, **kwargs)


def search(provider, http, query="python asyncio", limit=3, **filters):
    return provider.search(http, query, limit, deadline=Deadline(5), filters=Filters(**filters))


def sent(api, index=0):
    return json.loads(api.calls[index].request.body)


# -- exact requests ----------------------------------------------------------


def test_serper_is_asked_by_post_with_its_key_header(api, http):
    answers(api, "serper", {"organic": []})
    search(PROVIDER["serper"], http, limit=7)
    request = api.calls[0].request
    assert (request.method, request.url) == ("POST", SERPER)
    assert request.headers["X-API-KEY"] == KEY
    assert request.headers["Content-Type"] == "application/json"
    assert sent(api) == {"q": "python asyncio", "num": 7}


def test_exa_is_asked_in_camel_case_with_a_bearer_key(api, http):
    answers(api, "exa", {"results": []})
    search(PROVIDER["exa"], http, limit=7)
    request = api.calls[0].request
    assert (request.method, request.url) == ("POST", EXA)
    assert request.headers["Authorization"] == f"Bearer {KEY}"
    assert sent(api) == {"query": "python asyncio", "numResults": 7, "contents": {"highlights": True}}


def test_tavily_is_asked_with_a_bearer_key_and_without_extra_payloads(api, http):
    """Spec 000, requirement 1."""
    answers(api, "tavily", {"results": []})
    search(PROVIDER["tavily"], http, limit=7)
    request = api.calls[0].request
    assert (request.method, request.url) == ("POST", TAVILY)
    assert request.headers["Authorization"] == f"Bearer {KEY}"
    assert sent(api) == {
        "query": "python asyncio",
        "max_results": 7,
        "search_depth": "basic",
        "include_answer": False,
        "include_images": False,
        "include_raw_content": False,
    }


def test_the_key_is_not_in_tavilys_body(api, http):
    answers(api, "tavily", {"results": []})
    search(PROVIDER["tavily"], http)
    assert KEY not in api.calls[0].request.body.decode()


def test_searxng_is_asked_by_get_for_json(api, http):
    answers(
        api, "searxng", {"results": []}, match=[matchers.query_param_matcher({"q": "python asyncio", "format": "json"})]
    )
    search(PROVIDER["searxng"], http)
    request = api.calls[0].request
    assert request.headers["Accept"] == "application/json"
    assert request.headers["Accept-Language"]
    assert request.headers["Authorization"] == KEY


@EVERY_PROVIDER
def test_the_user_agent_is_our_own(name, api, http):
    answers(api, name, {SHAPE[name][0]: []})
    search(PROVIDER[name], http)
    assert api.calls[0].request.headers["User-Agent"].startswith("kindly-web-search/")


def test_extra_headers_of_searxng_may_replace_ours(api, http):
    answers(api, "searxng", {"results": []})
    search(SearXNG(url="https://searx.example", headers={"User-Agent": "Mine/1.0"}), http)
    assert api.calls[0].request.headers["User-Agent"] == "Mine/1.0"


@pytest.mark.parametrize(
    ("cls", "setting", "key"),
    [
        (Serper, "search_endpoint", "organic"),
        (Exa, "search_endpoint", "results"),
        (Tavily, "search_endpoint", "results"),
    ],
)
def test_the_endpoint_can_be_moved(cls, setting, key, api, http):
    api.post("https://proxy.example/v2", json={key: []})
    assert search(cls(api_key=KEY, **{setting: "https://proxy.example/v2"}), http) == []


@pytest.mark.parametrize(("asked", "sent_as"), [(0, 1), (1, 1), (20, 20), (21, 20), (100, 20)])
def test_tavily_is_asked_for_1_to_20_results(asked, sent_as, api, http):
    answers(api, "tavily", {"results": []})
    search(PROVIDER["tavily"], http, limit=asked)
    assert sent(api)["max_results"] == sent_as


def test_tavily_gets_at_most_400_characters_of_query(api, http):
    answers(api, "tavily", {"results": []})
    search(PROVIDER["tavily"], http, "x" * 500)
    assert sent(api)["query"] == "x" * 400
    assert Tavily.longest_query == 400


def test_keyless_tavily_sends_the_access_mode_and_no_key(api, http):
    answers(api, "tavily", {"results": []})
    search(Tavily(keyless=True), http)
    request = api.calls[0].request
    assert request.headers["X-Tavily-Access-Mode"] == "keyless"
    assert "Authorization" not in request.headers


def test_a_key_is_used_even_where_keyless_is_allowed(api, http):
    answers(api, "tavily", {"results": []})
    search(Tavily(api_key=KEY, keyless=True), http)
    assert api.calls[0].request.headers["Authorization"] == f"Bearer {KEY}"
    assert "X-Tavily-Access-Mode" not in api.calls[0].request.headers


def test_searxng_may_live_below_a_path(api, http):
    api.get("https://example.com/tools/searx/search", json={"results": []})
    assert search(SearXNG(url="https://example.com/tools/searx"), http) == []


# -- filters -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("freshness", "tbs"), [("day", "qdr:d"), ("week", "qdr:w"), ("month", "qdr:m"), ("year", "qdr:y")]
)
def test_serper_maps_freshness_country_and_language(freshness, tbs, api, http):
    answers(api, "serper", {"organic": []})
    search(PROVIDER["serper"], http, freshness=freshness, country="DE", language="de")
    assert sent(api) == {"q": "python asyncio", "num": 3, "tbs": tbs, "gl": "de", "hl": "de"}


@pytest.mark.parametrize(
    ("include", "exclude", "scoped"),
    [
        (("a.org",), (), "python asyncio site:a.org"),
        (("a.org", "b.org"), (), "python asyncio (site:a.org OR site:b.org)"),
        ((), ("c.org", "d.org"), "python asyncio -site:c.org -site:d.org"),
        (("a.org",), ("c.org",), "python asyncio site:a.org -site:c.org"),
    ],
)
@pytest.mark.parametrize("name", ["serper", "searxng"])
def test_domains_become_operators_where_there_is_no_field_for_them(name, include, exclude, scoped, api, http):
    answers(api, name, {SHAPE[name][0]: []})
    search(PROVIDER[name], http, include_domains=include, exclude_domains=exclude)
    request = api.calls[0].request
    assert (request.params["q"] if name == "searxng" else sent(api)["q"]) == scoped


@pytest.mark.parametrize(("freshness", "days"), [("day", 1), ("week", 7), ("month", 31), ("year", 366)])
def test_exa_maps_freshness_to_a_date(freshness, days, api, http):
    answers(api, "exa", {"results": []})
    search(PROVIDER["exa"], http, freshness=freshness)
    start = datetime.fromisoformat(sent(api)["startPublishedDate"].replace("Z", "+00:00"))
    assert timedelta(days=days) <= datetime.now(timezone.utc) - start < timedelta(days=days + 1)


def test_exa_maps_domains_and_country(api, http):
    answers(api, "exa", {"results": []})
    search(PROVIDER["exa"], http, include_domains=("a.org",), country="de")
    body = sent(api)
    assert (body["includeDomains"], body["userLocation"]) == (["a.org"], "DE")


def test_exa_gets_only_one_of_the_two_domain_lists(api, http):
    answers(api, "exa", {"results": []})
    answers(api, "exa", {"results": []})
    search(PROVIDER["exa"], http, include_domains=("a.org",), exclude_domains=("b.org",))
    search(PROVIDER["exa"], http, exclude_domains=("b.org",))
    assert "excludeDomains" not in sent(api, 0)
    assert sent(api, 1)["excludeDomains"] == ["b.org"]
    assert "includeDomains" not in sent(api, 1)


def test_tavily_maps_every_filter_and_wants_the_country_by_name(api, http):
    answers(api, "tavily", {"results": []})
    search(
        PROVIDER["tavily"],
        http,
        freshness="week",
        include_domains=("a.org",),
        exclude_domains=("b.org",),
        country="US",
        language="en",
    )
    body = sent(api)
    assert body["time_range"] == "week"
    assert body["include_domains"] == ["a.org"]
    assert body["exclude_domains"] == ["b.org"]
    assert body["country"] == "united states"
    assert body["language"] == "en"


def test_tavily_gets_no_more_domains_than_it_takes(api, http):
    answers(api, "tavily", {"results": []})
    many = tuple(f"d{i}.org" for i in range(400))
    search(PROVIDER["tavily"], http, include_domains=many, exclude_domains=many)
    assert (len(sent(api)["include_domains"]), len(sent(api)["exclude_domains"])) == (300, 150)


@pytest.mark.parametrize(
    ("code", "name"), [("de", "germany"), ("GB", "united kingdom"), ("kr", "south korea"), ("zz", ""), ("", "")]
)
def test_country_codes_have_english_names(code, name):
    assert country_name(code) == name


def test_searxng_maps_freshness_and_language(api, http):
    answers(api, "searxng", {"results": []})
    search(PROVIDER["searxng"], http, freshness="month", language="de")
    params = api.calls[0].request.params
    assert (params["time_range"], params["language"]) == ("month", "de")


@pytest.mark.parametrize(
    ("name", "country", "ignored"),
    [
        ("serper", "gl", set()),
        ("exa", "gl", {"language"}),
        ("tavily", "de", set()),
        ("tavily", "gl", {"country"}),
        ("searxng", "gl", {"country"}),
    ],
)
def test_each_provider_says_which_filters_it_cannot_do(name, country, ignored):
    assert PROVIDER[name].ignores(Filters(freshness="day", country=country, language="de")) == ignored


def test_a_country_that_tavily_has_no_name_for_is_not_sent_and_is_named_in_the_hits(api, http):
    answers(api, "tavily", {"results": []})
    hits = Router([PROVIDER["tavily"]], http).search("x", 3, deadline=Deadline(5), filters=Filters(country="gl"))
    assert "country" not in sent(api)
    assert hits.ignored_filters == ("country",)


@EVERY_PROVIDER
def test_without_filters_none_is_sent(name, api, http):
    answers(api, name, {SHAPE[name][0]: []})
    search(PROVIDER[name], http)
    said = api.calls[0].request.params if name == "searxng" else sent(api)
    assert not set(said) & {
        "tbs",
        "gl",
        "hl",
        "startPublishedDate",
        "includeDomains",
        "userLocation",
        "time_range",
        "country",
        "language",
    }


# -- mapping -----------------------------------------------------------------


def test_serpers_organic_results_are_mapped(api, http):
    answers(
        api,
        "serper",
        {
            "searchParameters": {"q": "x", "type": "search", "engine": "google"},
            "knowledgeGraph": {"title": "Python"},
            "answerBox": {"answer": "42", "link": "https://box.example"},
            "organic": [
                {
                    "title": "One",
                    "link": "https://one.example/a",
                    "snippet": "First",
                    "position": 1,
                    "date": "3 days ago",
                },
                {"title": "Two", "link": "https://two.example/b", "snippet": "Second", "position": 2, "sitelinks": []},
            ],
            "peopleAlsoAsk": [{"question": "?", "link": "https://ask.example"}],
            "credits": 1,
        },
    )
    assert search(PROVIDER["serper"], http) == [
        SearchResult("One", "https://one.example/a", "First"),
        SearchResult("Two", "https://two.example/b", "Second"),
    ]


@pytest.mark.parametrize(
    ("item", "snippet"),
    [
        ({"highlights": ["one", "two"], "text": "long"}, "one … two"),
        ({"highlights": [], "summary": "in short", "text": "long"}, "in short"),
        ({"highlights": None, "text": "long"}, "long"),
        ({"text": "long"}, "long"),
        ({"highlights": [None, 3, "two"]}, "two"),
        ({}, ""),
    ],
)
def test_exas_snippet_is_highlights_or_summary_or_text(item, snippet, api, http):
    answers(api, "exa", {"results": [{"id": "https://id.example", "title": "T", "url": "https://u.example", **item}]})
    assert search(PROVIDER["exa"], http) == [SearchResult("T", "https://u.example", snippet)]


def test_tavilys_results_are_mapped(api, http):
    """Spec 000, requirement 1: title, url and content become title, link and snippet."""
    answers(
        api,
        "tavily",
        {
            "query": "x",
            "answer": None,
            "images": [],
            "follow_up_questions": None,
            "results": [
                {"title": "One", "url": "https://one.example", "content": "First", "score": 0.9, "raw_content": None},
                {"title": "Two", "url": "https://two.example", "content": "Second", "score": "0.8"},
            ],
            "response_time": "1.09",
        },
    )
    assert search(PROVIDER["tavily"], http) == [
        SearchResult("One", "https://one.example", "First"),
        SearchResult("Two", "https://two.example", "Second"),
    ]


def test_searxng_gives_all_its_results_because_it_takes_no_count(api, http):
    items = [{"url": f"https://r{i}.example", "title": f"R{i}", "content": ""} for i in range(30)]
    answers(api, "searxng", {"results": items})
    assert [r.title for r in search(PROVIDER["searxng"], http, limit=4)] == [f"R{i}" for i in range(30)]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("Alpha <b>result</b>", "Alpha result"),
        ('<span class="x">A</span> &amp; B', "A & B"),
        ("Tom &lt;b&gt; Jerry", "Tom <b> Jerry"),
        ("plain", "plain"),
        ("if a < b and c > d", "if a < b and c > d"),
        ("if a<b then c>d", "if a<b then c>d"),
        ("What is List<String>? <em>std::vector<int></em>", "What is List<String>? std::vector<int>"),
        ('<A HREF="x">Link</A><br/>', "Link"),
        ("x <= 3, y -> z", "x <= 3, y -> z"),
    ],
)
def test_html_in_searxngs_titles_and_snippets_becomes_text(raw, text, api, http):
    answers(api, "searxng", {"results": [{"url": "https://a.example", "title": raw, "content": raw}]})
    assert search(PROVIDER["searxng"], http) == [SearchResult(text, "https://a.example", text)]


@EVERY_PROVIDER
def test_no_results_is_an_answer(name, api, http):
    answers(api, name, {SHAPE[name][0]: []})
    assert search(PROVIDER[name], http) == []


@EVERY_PROVIDER
def test_a_missing_title_or_snippet_is_an_empty_string(name, api, http):
    key, link, snippet = SHAPE[name]
    answers(api, name, {key: [{link: "https://a.example"}, {link: "https://b.example", "title": None, snippet: None}]})
    assert search(PROVIDER[name], http) == [
        SearchResult("", "https://a.example", ""),
        SearchResult("", "https://b.example", ""),
    ]


@EVERY_PROVIDER
def test_a_result_without_a_usable_link_is_dropped(name, api, http):
    key, link, _ = SHAPE[name]
    bad = ["", None, 7, [], {}, "ftp://a.example", "javascript:alert(1)", "/relative"]
    items = [
        {"title": "no link"},
        *({"title": "bad", link: value} for value in bad),
        {"title": "good", link: " https://a.example "},
    ]
    answers(api, name, {key: items})
    assert search(PROVIDER[name], http) == [SearchResult("good", "https://a.example", "")]


@EVERY_PROVIDER
def test_wrong_types_inside_results_do_no_harm(name, api, http):
    key, link, snippet = SHAPE[name]
    wrong = [7, True, 1.5, ["x"], {"a": 1}]
    items = [*wrong, None, "text", *({link: "https://a.example", "title": w, snippet: w} for w in wrong)]
    answers(api, name, {key: items})
    assert search(PROVIDER[name], http, limit=9) == [SearchResult("", "https://a.example", "")] * len(wrong)


@pytest.mark.parametrize("highlights", [5, True, "a plain string", {"a": 1}, [["nested"]], 1.5])
def test_highlights_of_the_wrong_type_are_passed_over(highlights, api, http):
    answers(
        api,
        "exa",
        {"results": [{"url": "https://a.example", "title": "T", "highlights": highlights, "text": "the text"}]},
    )
    assert search(PROVIDER["exa"], http) == [SearchResult("T", "https://a.example", "the text")]


@EVERY_PROVIDER
def test_characters_that_no_encoder_takes_are_replaced(name, api, http):
    key, link, snippet = SHAPE[name]
    body = json.dumps({key: [{link: "https://a.example", "title": "lone \ud800", snippet: "nul \x00 byte"}]})
    answers(api, name, body)
    [result] = search(PROVIDER[name], http)
    assert result.title.startswith("lone ")
    assert "\x00" not in result.snippet
    assert (result.title + result.snippet).encode("utf-8")


# -- wrong shapes ------------------------------------------------------------


@EVERY_PROVIDER
@pytest.mark.parametrize(
    "body", ["", "<html>busy</html>", "null", "[]", '"text"', "7", "{", b"\xff\xfe", "{}", "[" * 5000, '{"other": []}']
)
def test_a_success_of_the_wrong_shape_is_a_bad_response(name, body, api, http):
    answers(api, name, body)
    with pytest.raises(BadResponse, match=PROVIDER[name].label):
        search(PROVIDER[name], http)


@EVERY_PROVIDER
@pytest.mark.parametrize("items", [None, {}, "text", 7, {"0": {}}])
def test_results_that_are_no_list_are_a_bad_response(name, items, api, http):
    answers(api, name, {SHAPE[name][0]: items})
    with pytest.raises(BadResponse):
        search(PROVIDER[name], http)


@EVERY_PROVIDER
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused(name, status, api, http):
    answers(api, name, "", status=status, headers={"Location": "https://www.google.com/search?q=x"})
    with pytest.raises(BadResponse, match=f"HTTP {status}"):
        search(PROVIDER[name], http)
    assert len(api.calls) == 1


@EVERY_PROVIDER
def test_an_answer_beyond_the_download_cap_is_a_bad_response(name, api):
    http = Http(Settings(max_download_bytes=1000))
    answers(api, name, {SHAPE[name][0]: [], "padding": "x" * 2000})
    with pytest.raises(BadResponse):
        search(PROVIDER[name], http)


# -- error statuses ----------------------------------------------------------

STATUSES = [
    (400, BadRequest),
    (401, AuthError),
    (402, QuotaExhausted),
    (403, AuthError),
    (404, BadRequest),
    (405, BadRequest),
    (413, BadRequest),
    (422, BadRequest),
    (429, RateLimited),
    (500, ProviderDown),
    (502, ProviderDown),
    (503, ProviderDown),
    (504, ProviderDown),
    (520, ProviderDown),
]


@EVERY_PROVIDER
@pytest.mark.parametrize(("status", "expected"), STATUSES)
def test_every_status_has_its_error(name, status, expected, api, http):
    answers(api, name, {"message": "something went wrong"}, status=status)
    with pytest.raises(SearchError, match=f"{PROVIDER[name].label} .*HTTP {status}") as caught:
        search(PROVIDER[name], http)
    assert type(caught.value) is expected


@EVERY_PROVIDER
@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (requests.ConnectionError("refused"), Unreachable),
        (requests.ReadTimeout("slow"), Timeout),
        (requests.ConnectTimeout("slow"), Timeout),
        (requests.exceptions.SSLError("bad certificate"), Unreachable),
        (requests.exceptions.ProxyError("no proxy"), Unreachable),
        (requests.exceptions.ChunkedEncodingError("cut off"), Unreachable),
        (requests.exceptions.ContentDecodingError("not gzip"), BadResponse),
        (requests.exceptions.TooManyRedirects("round and round"), Unreachable),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_transport_failure_has_its_error(name, failure, expected, api, http):
    answers(api, name, failure)
    with pytest.raises(SearchError) as caught:
        search(PROVIDER[name], http)
    assert isinstance(caught.value, expected)


@pytest.mark.parametrize(
    ("name", "variable"),
    [("serper", "SERPER_API_KEY"), ("exa", "EXA_API_KEY"), ("tavily", "TAVILY_API_KEY")],
)
@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_names_the_variable_to_check(name, variable, status, api, http):
    answers(api, name, {"message": "Unauthorized."}, status=status)
    with pytest.raises(AuthError, match=f"Check {variable}"):
        search(PROVIDER[name], http)


@pytest.mark.parametrize("message", ["Not enough credits", "not enough Credits left", "You are out of credit."])
def test_serpers_400_about_credits_is_an_exhausted_quota(message, api, http):
    answers(api, "serper", {"message": message, "statusCode": 400}, status=400)
    with pytest.raises(QuotaExhausted, match="Serper is out of credit"):
        search(PROVIDER["serper"], http)


def test_serpers_other_400_is_a_bad_request_that_quotes_the_message(api, http):
    answers(api, "serper", {"message": "Missing query parameter", "statusCode": 400}, status=400)
    with pytest.raises(BadRequest, match="Missing query parameter"):
        search(PROVIDER["serper"], http)


def test_a_refused_query_pattern_is_asked_again_without_operators(api, http):
    refusal = {"message": "Query pattern not allowed for free accounts.", "statusCode": 400}
    answers(api, "serper", refusal, status=400)
    answers(api, "serper", {"organic": [{"link": "https://a.org/x"}]})
    found = search(PROVIDER["serper"], http, include_domains=("a.org",), freshness="day")
    assert [r.link for r in found] == ["https://a.org/x"]
    assert [sent(api, 0)["q"], sent(api, 1)["q"]] == ["python asyncio site:a.org", "python asyncio"]
    assert sent(api, 1)["tbs"] == "qdr:d"


def test_a_refused_query_pattern_of_the_users_own_is_a_bad_request(api, http):
    answers(api, "serper", {"message": "Query pattern not allowed for free accounts."}, status=400)
    with pytest.raises(BadRequest, match="pattern not allowed"):
        search(PROVIDER["serper"], http, 'site:a.org "exact"')
    assert len(api.calls) == 1


@pytest.mark.parametrize("status", [432, 433])
def test_tavilys_plan_limits_are_an_exhausted_quota(status, api, http):
    answers(api, "tavily", {"detail": {"error": "This request exceeds your plan's set usage limit."}}, status=status)
    with pytest.raises(QuotaExhausted, match=f"Tavily is out of credit .*{status}"):
        search(PROVIDER["tavily"], http)


def test_those_statuses_mean_nothing_special_elsewhere(api, http):
    answers(api, "exa", {}, status=432)
    with pytest.raises(BadRequest):
        search(PROVIDER["exa"], http)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"message": "said plainly"}, "said plainly"),
        ({"error": "said plainly", "tag": "INVALID_REQUEST_BODY"}, "said plainly"),
        ({"detail": "said plainly"}, "said plainly"),
        ({"detail": {"error": "said plainly"}}, "said plainly"),
        ({"detail": [{"loc": ["body", "query"], "msg": "said plainly", "type": "missing"}]}, "said plainly"),
        ({"error": {"code": "x", "message": "said plainly", "next_actions": []}}, "said plainly"),
        ({"error": {"message": {"deep": {"deeper": "x"}}}}, ""),
        ({"detail": []}, ""),
        ({"detail": None}, ""),
        ({"message": 7}, ""),
        ([], ""),
        ("<html>Bad Request</html>", ""),
        ("", ""),
    ],
)
@pytest.mark.parametrize("name", ["serper", "tavily"])
def test_a_complaint_is_quoted_wherever_it_stands(name, body, said, api, http):
    answers(api, name, body, status=422)
    with pytest.raises(BadRequest) as caught:
        search(PROVIDER[name], http)
    ending = f": {said}." if said else "."
    assert str(caught.value) == f"{PROVIDER[name].label} refused the request (HTTP 422){ending}"


def test_a_long_complaint_is_cut(api, http):
    answers(api, "exa", {"error": "word " * 1000}, status=400)
    with pytest.raises(BadRequest) as caught:
        search(PROVIDER["exa"], http)
    assert len(str(caught.value)) < 300


def test_a_402_does_not_echo_the_query(api, http):
    answers(
        api,
        "exa",
        {"error": "You have exceeded your credits limit for 'secret project'", "tag": "NO_MORE_CREDITS"},
        status=402,
    )
    with pytest.raises(QuotaExhausted) as caught:
        search(PROVIDER["exa"], http, "secret project")
    assert "secret project" not in str(caught.value)


# -- Retry-After -------------------------------------------------------------

NOON = datetime(2026, 11, 18, 12, 0, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, 0.0),
        ("", 0.0),
        ("3", 3.0),
        ("0.5", 0.5),
        (" 7 ", 7.0),
        ("-3", 0.0),
        ("0", 0.0),
        ("soon", 0.0),
        ("nan", 0.0),
        ("inf", 86_400.0),
        ("1e99", 86_400.0),
        ("Wed, 18 Nov 2026 12:00:30 GMT", 30.0),
        ("Wed, 18 Nov 2026 11:00:00 GMT", 0.0),
        ("Wed, 99 Foo 2026 99:99:99 GMT", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value, expected):
    assert retry_after(value, now=NOON.timestamp) == pytest.approx(expected)


@EVERY_PROVIDER
def test_a_429_knows_how_long_to_wait_in_seconds_or_as_a_date(name, api, http):
    answers(api, name, {"error": "slow down"}, status=429, headers={"Retry-After": "3"})
    later = format_datetime(datetime.fromtimestamp(time.time() + 60, timezone.utc), usegmt=True)
    answers(api, name, {"error": "slow down"}, status=429, headers={"Retry-After": later})
    waits = []
    for _ in range(2):
        with pytest.raises(RateLimited) as caught:
            search(PROVIDER[name], http)
        waits.append(caught.value.retry_after)
    assert waits[0] == 3.0
    assert 50 < waits[1] <= 60


# -- SearXNG's own ways ------------------------------------------------------


def test_searxng_without_json_says_how_to_enable_it(api, http):
    answers(api, "searxng", "<!doctype html><title>403 Forbidden</title>", status=403, content_type="text/html")
    with pytest.raises(AuthError, match=r"Add `json` to `search: formats:` in its settings\.yml"):
        search(PROVIDER["searxng"], http)


def test_nothing_found_because_the_engines_are_down_is_a_failure(api, http):
    answers(api, "searxng", {"results": [], "unresponsive_engines": [["google", "timeout"], ["bing", "CAPTCHA"]]})
    with pytest.raises(BadResponse, match="engines did not respond"):
        search(PROVIDER["searxng"], http)


def test_something_found_although_some_engines_are_down_is_an_answer(api, http):
    answers(api, "searxng", {"results": [{"url": "https://a.example"}], "unresponsive_engines": [["bing", "timeout"]]})
    assert len(search(PROVIDER["searxng"], http)) == 1


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ("!!g python", "g python"),
        ("!ddg python", "ddg python"),
        (":de python", "de python"),
        ("<3 python", "3 python"),
        ("python !images cats", "python images cats"),
        ("!!! python", None),
        ("what is a monad!", "what is a monad!"),
        ("std::vector a:b x!y", "std::vector a:b x!y"),
        ("python != operator", "python != operator"),
        ("a <= b and c << 2", "a <= b and c << 2"),
        ("#include <vector>", "#include <vector>"),
    ],
)
def test_words_that_searxng_takes_for_commands_are_neutralised_and_nothing_else(query, asked, api, http):
    answers(api, "searxng", {"results": []})
    search(PROVIDER["searxng"], http, query)
    q = api.calls[0].request.params["q"]
    if asked is not None:
        assert q == asked
    assert not [word for word in q.split() if len(word) > 1 and word[0] in "!:" and word.lstrip("!:")[:1].isalnum()]


def test_searxng_headers_are_a_json_object_of_strings():
    assert headers_json('{"Authorization": "Basic abc", "X": "1"}') == {"Authorization": "Basic abc", "X": "1"}


@pytest.mark.parametrize("text", ["", "Basic abc", "[]", '{"X": 1}', '{"X": null}', '"text"', "{"])
def test_other_searxng_headers_are_refused(text):
    with pytest.raises(ValueError, match="a JSON object such as"):
        headers_json(text)


# -- which providers there are -----------------------------------------------

ALL_KEYS = {"TAVILY_API_KEY": "t", "SEARXNG_URL": "http://s", "EXA_API_KEY": "e", "SERPER_API_KEY": "s"}


def test_the_order_is_serper_exa_tavily_searxng():
    assert [cls.name for cls in PROVIDERS] == ["serper", "exa", "tavily", "searxng"]
    assert [provider.name for provider in configured_providers(ALL_KEYS)] == ["serper", "exa", "tavily", "searxng"]


@pytest.mark.parametrize("name", ["SERPER", "EXA", "TAVILY", "SEARXNG"])
def test_a_provider_can_be_switched_off_although_it_has_a_key(name):
    names = [provider.name for provider in configured_providers({**ALL_KEYS, f"{name}_ENABLED": "false"})]
    assert len(names) == 3
    assert name.lower() not in names


@pytest.mark.parametrize("name", ["SERPER", "EXA", "TAVILY", "SEARXNG"])
def test_enabled_without_a_key_is_not_configured(name):
    assert configured_providers({f"{name}_ENABLED": "true"}) == []


def test_keyless_tavily_is_the_last_resort():
    environ = {"TAVILY_KEYLESS": "true", "SEARXNG_URL": "http://s", "EXA_API_KEY": "e"}
    assert [provider.name for provider in configured_providers(environ)] == ["exa", "searxng", "tavily"]


def test_keyless_tavily_alone_is_enough():
    assert [provider.name for provider in configured_providers({"TAVILY_KEYLESS": "true"})] == ["tavily"]


def test_keyless_tavily_must_be_asked_for():
    assert configured_providers({}) == []
    assert configured_providers({"TAVILY_KEYLESS": "false"}) == []


# -- scraping ----------------------------------------------------------------

PAGE = "https://page.example/article"


def scrape(provider, http):
    return provider.scrape(http, PAGE, deadline=Deadline(5))


def test_serper_scrapes_markdown_or_text(api, http):
    api.post("https://scrape.serper.dev", json={"text": "plain", "markdown": "# Title"})
    api.post("https://scrape.serper.dev", json={"text": "plain"})
    assert [scrape(PROVIDER["serper"], http), scrape(PROVIDER["serper"], http)] == ["# Title", "plain"]
    assert sent(api) == {"url": PAGE, "includeMarkdown": True}
    assert api.calls[0].request.headers["X-API-KEY"] == KEY


def test_exa_reads_a_page_with_a_limit_on_its_text(api, http):
    api.post(
        "https://api.exa.ai/contents", json={"results": [{"text": "the page"}], "statuses": [{"status": "success"}]}
    )
    assert scrape(PROVIDER["exa"], http) == "the page"
    assert sent(api)["urls"] == [PAGE]
    assert sent(api)["text"]["maxCharacters"] > 0


def test_tavily_extracts_markdown(api, http):
    api.post(
        "https://api.tavily.com/extract",
        json={"results": [{"url": PAGE, "raw_content": "the page"}], "failed_results": []},
    )
    assert scrape(PROVIDER["tavily"], http) == "the page"
    assert sent(api) == {"urls": [PAGE], "format": "markdown"}


@pytest.mark.parametrize(
    ("name", "endpoint", "body"),
    [
        ("serper", "https://scrape.serper.dev", {"text": "  "}),
        ("serper", "https://scrape.serper.dev", {}),
        ("serper", "https://scrape.serper.dev", {"text": 7, "markdown": ["x"]}),
        (
            "exa",
            "https://api.exa.ai/contents",
            {"results": [], "statuses": [{"status": "error", "error": {"tag": "CRAWL_NOT_FOUND"}}]},
        ),
        ("exa", "https://api.exa.ai/contents", {"results": []}),
        ("exa", "https://api.exa.ai/contents", {"results": "none", "statuses": 5}),
        ("exa", "https://api.exa.ai/contents", {"results": [{"text": None}]}),
        ("tavily", "https://api.tavily.com/extract", {"results": [], "failed_results": [{"url": PAGE, "error": "x"}]}),
        ("tavily", "https://api.tavily.com/extract", {"results": [{"raw_content": ""}]}),
        ("tavily", "https://api.tavily.com/extract", {}),
    ],
)
def test_a_page_that_failed_inside_a_success_is_a_failure(name, endpoint, body, api, http):
    api.post(endpoint, json=body)
    with pytest.raises(PageFailed):
        scrape(PROVIDER[name], http)


# -- secrets -----------------------------------------------------------------


def echoes():
    """Every way to fail while repeating the key: in the body, in the headers, in the exception."""
    headers = {
        "X-Echo": KEY,
        "WWW-Authenticate": f'Bearer error="{KEY}"',
        "Location": f"https://evil.example/?key={KEY}",
    }
    for status in (200, 302, 400, 401, 402, 403, 404, 422, 429, 432, 433, 500, 503):
        for body in (
            {"message": f"bad key {KEY}"},
            {"detail": [{"msg": KEY}]},
            {"error": {"message": json.dumps({"key": KEY})}},
            {KEY: KEY},
            f"<html>{KEY}</html>",
            KEY,
        ):
            yield f"{status} {str(body)[:14]}", {"status": status, "headers": headers}, body
    for error in (
        requests.ConnectionError(f"failed with {KEY}"),
        requests.ReadTimeout(f"https://x/?key={KEY}"),
        requests.exceptions.SSLError(KEY),
        requests.exceptions.InvalidURL(KEY),
        requests.exceptions.InvalidHeader(f"Invalid header {KEY}"),
        OSError(KEY),
    ):
        yield type(error).__name__, {}, error


@EVERY_PROVIDER
@pytest.mark.parametrize(("kwargs", "body"), [pytest.param(*rest, id=name) for name, *rest in echoes()])
def test_no_failure_shows_the_key(name, kwargs, body, http, caplog):
    """Specs 000 and 001: errors and logs never include the raw value of a key, whatever the provider says."""
    caplog.set_level(logging.DEBUG)
    with responses.RequestsMock(assert_all_requests_are_fired=False) as api:
        answers(api, name, body, **kwargs)
        router = Router([PROVIDER[name]], http, sleep=lambda seconds: None)
        with pytest.raises(SearchError) as caught:
            router.search("python", 3, deadline=Deadline(5))
        assert KEY in str(dict(api.calls[0].request.headers))
    shown = [str(caught.value), repr(caught.value), *traceback.format_exception(caught.value), caplog.text]
    shown += [str(vars(caught.value)), repr(PROVIDER[name]), repr(router), repr(http)]
    assert "k3y-0f-th3" not in "\n".join(shown)
