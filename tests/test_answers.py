"""Section 11: search_web by OpenAI, search by the Gemini CLI, and the rate limit on both."""

import dataclasses
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import responses

import kindly_search as ks

URL = "https://api.openai.com/v1/responses"
KEY = "sk-test-0123456789"
SOURCE = "https://docs.python.org/3/whatsnew/3.14.html"
PROSE = "Python 3.14 is out ([docs](https://docs.python.org))."


# --- OpenAI: the pieces of a response -------------------------------------------------------------------------------


def citation(url=SOURCE, start=19, end=53, title="What's new"):
    return {"type": "url_citation", "start_index": start, "end_index": end, "url": url, "title": title}


def message(text=PROSE, *annotations):
    part = {"type": "output_text", "text": text, "annotations": list(annotations)}
    return {"type": "message", "status": "completed", "role": "assistant", "content": [part]}


SEARCHED = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}


def response(*output, **more):
    steps = list(output) or [{"type": "reasoning"}, SEARCHED, message(PROSE, citation())]
    usage = {"input_tokens": 11, "output_tokens": 22, "total_tokens": 33}
    return {"object": "response", "status": "completed", "error": None, "output": steps, "usage": usage, **more}


def failure(status, code=None, **headers):
    body = {"error": {"message": f"went wrong with {KEY}", "type": "x", "param": None, "code": code}}
    return {"status": status, "json": body, "headers": headers}


class Asked:
    """search_web with everything around it replaced by the test: replies, sleep, clock."""

    def __init__(self, *replies, settings=None, **fields):
        self.answers = ks.OpenAIAnswers(api_key=KEY, **fields)
        self.http = ks.Http(settings or ks.Settings(), redact=ks.Redactor([KEY]))
        self.breakers = ks.Breakers(self.http.settings)
        self.slept = []
        self.replies = [reply if "json" in reply or "body" in reply else {"json": reply} for reply in replies]
        self.sent = []

    def __call__(self, query="python 3.14 release", deadline=30.0, **options):
        with responses.RequestsMock(assert_all_requests_are_fired=False) as mock:
            for reply in self.replies or [{"json": response()}]:
                mock.add("POST", f"{self.answers.base_url}/responses", **reply)
            try:
                return self.answers.answer(
                    self.http,
                    query,
                    deadline=ks.Deadline(deadline),
                    breakers=self.breakers,
                    sleep=self.slept.append,
                    now=lambda: 1_800_000_000.0,
                    **options,
                )
            finally:
                self.sent = [call.request for call in mock.calls]

    @property
    def body(self):
        return json.loads(self.sent[0].body)


def refused(asked, *args, **options):
    with pytest.raises(ks.SearchError) as caught:
        asked(*args, **options)
    return caught.value


# --- search_web: contract -------------------------------------------------------------------------------------------


def test_an_answer_has_exactly_the_fields_of_the_contract():
    answer = dataclasses.asdict(Asked()())
    assert answer == {
        "text": PROSE,
        "citations": [
            {
                "url": SOURCE,
                "title": "What's new",
                "textSnippet": "([docs](https://docs.python.org)).",
                "startIndex": 19,
                "endIndex": 53,
                "rank": 1,
            }
        ],
        "provider": "gpt-5-nano-web-search",
        "respondedAt": "2027-01-15T08:00:00Z",
        "usage": {"promptTokens": 11, "responseTokens": 22},
    }


def test_the_answer_types_give_pydantic_a_full_output_schema():
    pydantic = pytest.importorskip("pydantic")
    schema = pydantic.TypeAdapter(ks.Answer).json_schema()
    assert set(schema["properties"]) == {"text", "citations", "provider", "respondedAt", "usage"}
    assert set(schema["$defs"]["Citation"]["required"]) == {
        "url", "title", "textSnippet", "startIndex", "endIndex", "rank",
    }  # fmt: skip


def test_it_is_configured_by_the_key_alone():
    assert ks.from_env(ks.OpenAIAnswers, {"OPENAI_API_KEY": KEY}).configured()
    assert not ks.from_env(ks.OpenAIAnswers, {}).configured()


def test_the_key_shows_neither_in_repr_nor_in_an_error():
    asked = Asked(failure(400))
    assert KEY not in repr(asked.answers)
    assert KEY not in str(refused(asked))


def test_the_request_is_what_current_models_accept():
    asked = Asked()
    asked(region="ae")
    assert asked.sent[0].headers["Authorization"] == f"Bearer {KEY}"
    assert "temperature" not in asked.body
    assert asked.body["model"] == "gpt-5-nano"
    assert asked.body["reasoning"] == {"effort": "low"}
    assert asked.body["max_output_tokens"] >= 4000
    assert asked.body["store"] is False
    assert asked.body["tools"] == [{"type": "web_search", "user_location": {"type": "approximate", "country": "AE"}}]


def test_without_a_region_the_search_is_not_made_from_the_united_states():
    asked = Asked()
    asked()
    assert asked.body["tools"][0]["user_location"] == {"type": "approximate"}


def test_a_model_that_does_not_reason_is_not_told_how_hard_to():
    asked = Asked(model="gpt-4.1-mini")
    assert asked().provider == "gpt-4.1-mini-web-search"
    assert "reasoning" not in asked.body


def test_the_base_url_can_be_another():
    asked = Asked(base_url="https://gateway.example/v1")
    asked()
    assert asked.sent[0].url == "https://gateway.example/v1/responses"


def test_the_same_question_makes_the_same_prompt():
    question = ks.Question("python 3.14", freshness_hours=24)
    assert ks.OpenAIAnswers().request(question, 0.0) == ks.OpenAIAnswers().request(question, 0.0)


def test_the_prompt_holds_the_query_the_result_limit_and_the_freshness():
    asked = Asked()
    asked(query="  python   3.14 ", max_results=3, freshness_hours=24)
    assert asked.body["input"].startswith("python 3.14 (prefer results from the last 24 hours, since 2027-01-14T08:00")
    assert "at most 3 sources" in asked.body["instructions"]


def test_without_freshness_the_prompt_is_the_query():
    asked = Asked()
    asked()
    assert asked.body["input"] == "python 3.14 release"


# --- search_web: input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", ["", "  ", "ab", " a  ", "x" * 401, "???", None, 7])
def test_a_query_too_short_too_long_or_without_a_word_is_refused(query):
    error = refused(Asked(), query=query)
    assert ks.error_code(error) == "VALIDATION"


@pytest.mark.parametrize("query", ["abc", "x" * 400, "  abc  ", "日本語"])
def test_a_query_of_3_to_400_characters_is_accepted_trimmed(query):
    asked = Asked()
    asked(query=query)
    assert asked.body["input"] == query.strip()


@pytest.mark.parametrize(
    ("given", "kept"), [("3", 3), (3.0, 3), (None, 5), ("", 5), (0, 1), (-2, 1), (99, 8), ("8", 8), (float("inf"), 8)]
)
def test_the_result_limit_is_read_leniently_and_clamped(given, kept):
    assert ks.Question.of("abc", given, None, "", True).max_results == kept


@pytest.mark.parametrize(("given", "kept"), [(None, None), ("24", 24), (0, 1), (1000, 168)])
def test_the_freshness_is_read_leniently_and_clamped(given, kept):
    assert ks.Question.of("abc", 5, given, "", True).freshness_hours == kept


@pytest.mark.parametrize(("given", "kept"), [(None, ""), ("", ""), ("us", "US"), (" AE ", "AE"), ("uk", "GB")])
def test_the_region_is_an_iso_country_code_in_any_case(given, kept):
    assert ks.Question.of("abc", 5, None, given, True).region == kept


@pytest.mark.parametrize(("given", "kept"), [(None, True), ("false", False), (False, False), ("true", True), (1, True)])
def test_include_answers_is_read_leniently(given, kept):
    assert ks.Question.of("abc", 5, None, "", given).include_answers is kept


@pytest.mark.parametrize(
    "options",
    [
        {"max_results": "many"},
        {"max_results": []},
        {"max_results": float("nan")},
        {"freshness_hours": "today"},
        {"region": "USA"},
        {"region": "Germany"},
        {"include_answers": "perhaps"},
    ],
)
def test_a_parameter_that_makes_no_sense_is_refused_before_anything_is_sent(options):
    asked = Asked()
    error = refused(asked, **options)
    assert ks.error_code(error) == "VALIDATION"
    assert asked.sent == []


# --- search_web: guardrails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query",
    [
        "event loop",
        "between",
        "feedback form",
        "stock market crash 1929",
        "prediction interval",
        "news about the Python steering council",
        "python asyncio event loop policy",
        "docker volume mount",
        "css position absolute",
        "alphabet earnings",
        "odds ratio in logistic regression",
        "liquidity of a bond",
        "weather prediction models",
        "process RSS memory growing linux",
        "how to parse an RSS feed in Python",
        "facebook news feed ranking algorithm",
        "polymarket api documentation",
        "what is a prediction market",
        "what is Polymarket?",
        "subscribe to a kafka topic",
        "google newsroom address",
        "cattle feed prices",
    ],
)
def test_a_query_that_merely_shares_a_word_with_other_services_passes(query):
    assert Asked()(query=query).text == PROSE


@pytest.mark.parametrize(
    ("query", "tool"),
    [
        ("Polymarket odds on the next US election", "polymarket"),
        ("what are the polymarket odds for a rate cut", "polymarket"),
        ("current prediction market prices for the 2028 election", "polymarket"),
        ("prediction markets volume today", "polymarket"),
        ("prediction-market data on bitcoin", "polymarket"),
        ("google news rss feed about AI", "google-news-rss"),
        ("Google News headlines today", "google-news-rss"),
        ("subscribe to the BBC RSS", "google-news-rss"),
        ("give me the RSS feeds of the New York Times", "google-news-rss"),
        ("news feed for electric cars", "google-news-rss"),
    ],
)
def test_a_real_request_for_market_data_or_a_feed_is_refused_and_the_better_tool_named(query, tool):
    asked = Asked()
    error = refused(asked, query=query)
    assert isinstance(error, ks.WrongTool)
    assert error.tool == tool
    assert f"Use the {tool} MCP server" in str(error)
    assert ks.error_code(error) == "VALIDATION"
    assert asked.sent == []


def test_the_words_that_are_refused_can_be_configured():
    environ = {"OPENAI_API_KEY": KEY, "KINDLY_ANSWER_REFUSALS": "share price: stocks, weather * forecast: weather"}
    fields = {"refused": ks.from_env(ks.OpenAIAnswers, environ).refused}
    assert refused(Asked(**fields), query="share prices of Siemens").tool == "stocks"
    assert refused(Asked(**fields), query="weather in Berlin forecast").tool == "weather"
    assert Asked(**fields)(query="polymarket odds").text == PROSE


def test_the_refusals_can_be_switched_off():
    environ = {"OPENAI_API_KEY": KEY, "KINDLY_ANSWER_REFUSALS": "off"}
    assert ks.from_env(ks.OpenAIAnswers, environ).refused == ()


def test_a_refusal_without_a_better_tool_is_a_configuration_error_that_names_the_variable():
    with pytest.raises(ValueError, match="KINDLY_ANSWER_REFUSALS"):
        ks.from_env(ks.OpenAIAnswers, {"KINDLY_ANSWER_REFUSALS": "polymarket"})


# --- search_web: reading the response -------------------------------------------------------------------------------


def test_the_array_form_of_a_response_is_read_too():
    answer = Asked({"json": [SEARCHED, message(PROSE, citation())]})()
    assert (answer.text, len(answer.citations), answer.usage) == (PROSE, 1, None)


def test_every_citation_of_every_message_is_kept_with_the_slice_that_refers_to_it():
    first = message("One [a].", citation("https://a.example/", 4, 7))
    second = message("Two [b] three [c].", citation("https://b.example/", 4, 7), citation("https://c.example/", 14, 17))
    answer = Asked(response(SEARCHED, first, SEARCHED, second))()
    assert answer.text == "One [a].\n\nTwo [b] three [c]."
    assert [c.textSnippet for c in answer.citations] == ["[a]", "[b]", "[c]"]
    assert [c.rank for c in answer.citations] == [1, 2, 3]
    assert all(answer.text[c.startIndex : c.endIndex] == c.textSnippet for c in answer.citations)


def test_tracking_parameters_are_stripped_and_duplicates_merged():
    urls = ["https://a.example/?utm_source=openai", "https://a.example/?ref=x", "https://a.example/?id=1&utm_medium=y"]
    answer = Asked(response(SEARCHED, message(PROSE, *map(citation, urls))))()
    assert [c.url for c in answer.citations] == ["https://a.example/", "https://a.example/?id=1"]
    assert [c.rank for c in answer.citations] == [1, 2]


def test_no_more_citations_come_back_than_were_asked_for():
    many = [citation(f"https://{n}.example/") for n in range(9)]
    assert len(Asked(response(SEARCHED, message(PROSE, *many)))(max_results=2).citations) == 2


def test_missing_and_wild_fields_of_an_annotation_do_no_harm():
    wild = [
        {"type": "url_citation", "url": "https://a.example/"},
        citation("https://b.example/", -5, 10**9, None),
        citation("https://c.example/", "1", True),
        citation("https://d.example/", 9, 3),
        citation("javascript:alert(1)"),
        {"type": "file_citation"},
        {"type": "oai-weather"},
        "nonsense",
    ]
    answer = Asked(response(SEARCHED, message(PROSE, *wild)))(max_results=8)
    assert [c.url for c in answer.citations] == [f"https://{x}.example/" for x in "abcd"]
    assert [c.textSnippet for c in answer.citations] == ["", PROSE, "", ""]


def test_without_answers_the_citations_come_without_the_prose():
    asked = Asked()
    answer = asked(include_answers=False)
    assert answer.text == ""
    assert [c.url for c in answer.citations] == [SOURCE]
    assert "Give no summary" in asked.body["instructions"]


def test_an_answer_without_citations_says_so():
    answer = Asked(response(SEARCHED, message()))()
    assert answer.citations == []
    assert answer.text.startswith(PROSE)
    assert "cited no source" in answer.text


def test_plain_text_without_a_search_is_rejected():
    error = refused(Asked(response(message(PROSE, citation()))))
    assert ks.error_code(error) == "PARSE"
    assert "from memory" in str(error)


def test_an_answer_after_a_failed_search_is_rejected():
    error = refused(Asked(response({**SEARCHED, "status": "failed"}, message())))
    assert "its search failed" in str(error)


def test_a_response_that_ran_out_of_tokens_before_its_text_is_a_parse_error():
    reply = response(SEARCHED, status="incomplete", incomplete_details={"reason": "max_output_tokens"})
    error = refused(Asked(reply))
    assert ks.error_code(error) == "PARSE"
    assert "output tokens" in str(error)


def test_a_response_cut_off_in_its_text_is_handed_on_with_a_note():
    details = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    answer = Asked(response(SEARCHED, message(PROSE, citation()), **details))()
    assert answer.text.startswith(PROSE)
    assert "incomplete" in answer.text


def test_a_filtered_response_is_an_error_that_says_so():
    reply = response(SEARCHED, status="incomplete", incomplete_details={"reason": "content_filter"})
    assert "content_filter" in str(refused(Asked(reply)))


def test_a_failed_response_is_a_provider_error():
    reply = response(SEARCHED, status="failed", error={"code": "server_error", "message": f"Oops {KEY}."})
    error = refused(Asked(reply))
    assert ks.error_code(error) == "PROVIDER"
    assert str(error) == "OpenAI could not finish the answer: Oops [redacted]."


@pytest.mark.parametrize("status", ["queued", "in_progress", "cancelled"])
def test_a_response_that_never_ended_is_a_parse_error(status):
    assert ks.error_code(refused(Asked(response(status=status)))) == "PARSE"


def test_a_refusal_by_the_model_is_an_error_with_its_words():
    part = {"type": "refusal", "refusal": "I cannot help with that."}
    error = refused(Asked(response(SEARCHED, {"type": "message", "content": [part]})))
    assert "declined to answer: I cannot help with that." in str(error)


@pytest.mark.parametrize(
    "reply",
    [
        {"body": "<html>"},
        {"body": "null"},
        {"json": {}},
        {"json": []},
        {"json": {"output": "x"}},
        {"json": {"output": [SEARCHED, {"type": "message", "content": None}]}},
        {"json": {"output": [None, SEARCHED, {"type": "message", "content": [{"type": "output_text", "text": 5}]}]}},
    ],
)
def test_a_success_of_the_wrong_shape_is_a_parse_error(reply):
    assert ks.error_code(refused(Asked(reply))) == "PARSE"


def test_missing_usage_is_no_usage():
    assert Asked(response(usage=None))().usage is None
    assert Asked(response(usage={"input_tokens": "x"}))().usage is None


# --- search_web: errors and retries ---------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_an_auth_error_and_not_retried(status):
    asked = Asked(failure(status, "invalid_api_key"))
    error = refused(asked)
    assert ks.error_code(error) == "AUTH"
    assert "OPENAI_API_KEY" in str(error)
    assert len(asked.sent) == 1


def test_a_rate_limit_is_retried_once_and_then_reported():
    asked = Asked(failure(429, "rate_limit_exceeded", **{"retry-after": "1"}))
    error = refused(asked)
    assert ks.error_code(error) == "RATE_LIMIT"
    assert len(asked.sent) == 2
    assert 1.0 < asked.slept[0] < 2.0


def test_a_long_wait_is_not_waited_for():
    asked = Asked(failure(429, "rate_limit_exceeded", **{"retry-after": "60"}))
    refused(asked)
    assert (len(asked.sent), asked.slept) == (1, [])


def test_a_used_up_quota_is_not_retried():
    asked = Asked(failure(429, "insufficient_quota"))
    error = refused(asked)
    assert ks.error_code(error) == "RATE_LIMIT"
    assert "out of credit" in str(error)
    assert len(asked.sent) == 1


@pytest.mark.parametrize("status", [500, 502, 503])
def test_a_server_error_is_retried_once_with_jitter(status):
    asked = Asked(failure(status), response())
    assert asked().text == PROSE
    assert len(asked.sent) == 2
    assert 0 < asked.slept[0] < 1


@pytest.mark.parametrize("status", [500, 502, 503])
def test_two_server_errors_are_a_provider_error(status):
    asked = Asked(failure(status))
    error = refused(asked)
    assert ks.error_code(error) == "PROVIDER"
    assert f"HTTP {status}" in str(error)
    assert len(asked.sent) == 2


@pytest.mark.parametrize("status", [400, 404, 409, 422])
def test_other_client_errors_are_not_retried(status):
    asked = Asked(failure(status))
    assert ks.error_code(refused(asked)) == "PROVIDER"
    assert len(asked.sent) == 1


def test_an_unknown_model_is_a_configuration_error_that_names_the_variable():
    error = refused(Asked(failure(404, "model_not_found")))
    assert isinstance(error, ks.ConfigError)
    assert "OPENAI_SEARCH_MODEL" in str(error)


@pytest.mark.parametrize("reply", [{"body": TimeoutError()}, failure(504), failure(408)])
def test_a_timeout_is_not_retried(reply):
    asked = Asked(reply)
    error = refused(asked)
    assert isinstance(error, ks.Timeout)
    assert ks.error_code(error) == "PROVIDER"
    assert len(asked.sent) == 1


def test_a_parse_error_is_not_retried():
    asked = Asked({"body": "<html>"})
    refused(asked)
    assert len(asked.sent) == 1


def test_a_deadline_that_has_passed_sends_nothing():
    asked = Asked()
    assert isinstance(refused(asked, deadline=0.0), ks.Timeout)
    assert asked.sent == []


def test_offline_mode_sends_nothing():
    assert isinstance(refused(Asked(settings=ks.Settings(offline=True))), ks.Offline)


def test_sustained_server_errors_open_the_circuit_and_the_error_says_when_to_come_back():
    asked = Asked(failure(500))
    for _ in range(3):
        refused(asked)
    error = refused(asked)
    assert isinstance(error, ks.CircuitOpen)
    assert str(error).startswith("OpenAI is left out after 5 failures")
    assert asked.sent == []


def test_bad_input_does_not_count_against_the_circuit():
    asked = Asked()
    for _ in range(6):
        refused(asked, query="")
    assert asked().text == PROSE


def test_the_log_has_one_line_with_hash_latency_status_and_count_and_no_text(caplog):
    caplog.set_level(logging.INFO, "kindly_search")
    Asked()()
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"answer completed engine=openai results=1 ms=\d+ query=sha256:[0-9a-f]{12}", line)
    for private in ("python", "docs", "http"):
        assert private not in line


def test_a_failed_call_is_logged_with_its_code(caplog):
    refused(Asked(failure(401)))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("answer failed engine=openai outcome=key_refused ms=")


def test_openai_is_not_blamed_for_a_timeout_that_was_ours():
    asked = Asked(response(status="in_progress"), settings=ks.Settings(circuit_failures=1))
    assert isinstance(refused(asked, deadline=0.0), ks.OutOfTime)
    assert asked.breakers.states()["answer", "openai"] == "closed"


def test_each_attempt_is_logged_and_told_to_the_listeners_by_itself(caplog):
    caplog.set_level(logging.INFO, "kindly_search")
    telemetry, heard = ks.Telemetry(), []
    telemetry.listeners.append(lambda operation, attempt, ended: heard.append((operation, attempt.by, ended)))
    Asked(failure(500), response())(telemetry=telemetry)
    assert heard == [("answer", "openai", "failed"), ("answer", "openai", "completed")]
    told = [(record.levelname, record.getMessage().split(" ms=")[0]) for record in caplog.records]
    assert told == [
        ("WARNING", "answer failed engine=openai outcome=server_error"),
        ("INFO", "answer completed engine=openai results=1"),
    ]


def test_the_query_is_logged_only_on_request(caplog):
    caplog.set_level(logging.INFO, "kindly_search")
    Asked()(telemetry=ks.Telemetry(log_queries=True))
    assert 'query="python 3.14 release"' in caplog.text


def test_an_answer_reads_well_for_people():
    assert Asked()().markdown() == f"{PROSE}\n\n1. [What's new]({SOURCE})"


# --- the rate limit -------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.time = 1000.0

    def __call__(self):
        return self.time


@pytest.mark.parametrize(("text", "rate"), [("20/10m", (20, 600.0)), ("5/30s", (5, 30.0)), ("off", (0, 0.0))])
def test_a_rate_is_read_from_its_variable(text, rate):
    assert ks.from_env(ks.RateLimit, {"KINDLY_RATE_LIMIT": text}).rate == rate


@pytest.mark.parametrize("text", ["20", "20/", "x/10m", "0/10m", "5/0s", "-1/10m", "5/10d"])
def test_a_rate_that_makes_no_sense_names_its_variable(text):
    with pytest.raises(ValueError, match="KINDLY_RATE_LIMIT"):
        ks.from_env(ks.RateLimit, {"KINDLY_RATE_LIMIT": text})


def test_by_default_a_user_has_20_calls_in_10_minutes():
    limit = ks.RateLimit(now=Clock())
    for _ in range(20):
        limit.check("ann")
    with pytest.raises(ks.RateLimited, match=r"20 calls in 10 min is used up. Come back in 10 min."):
        limit.check("ann")


def test_the_error_says_when_to_come_back():
    clock = Clock()
    limit = ks.RateLimit((1, 600.0), clock)
    limit.check()
    clock.time += 349.5
    with pytest.raises(ks.RateLimited, match="Come back in 4 min 11 s") as caught:
        limit.check()
    assert caught.value.retry_after == 250.5
    assert ks.error_code(caught.value) == "RATE_LIMIT"


def test_the_window_is_fixed_and_ends_by_itself():
    clock = Clock()
    limit = ks.RateLimit((2, 30.0), clock)
    limit.check()
    clock.time += 29.0
    limit.check()
    with pytest.raises(ks.RateLimited):
        limit.check()
    clock.time += 1.0
    limit.check()
    limit.check()


def test_each_user_has_a_window_of_their_own():
    limit = ks.RateLimit((1, 30.0), Clock())
    limit.check("ann")
    limit.check("bob")
    with pytest.raises(ks.RateLimited):
        limit.check("ann")


def test_a_switched_off_limit_limits_nothing():
    limit = ks.RateLimit((0, 0.0))
    for _ in range(1000):
        limit.check()


def test_many_users_do_not_fill_the_memory():
    clock = Clock()
    limit = ks.RateLimit((5, 30.0), clock, most_users=10)
    for n in range(100):
        limit.check(str(n))
    assert len(limit._windows) == 10


def test_a_user_in_use_is_not_forgotten_for_the_sake_of_others():
    limit = ks.RateLimit((15, 30.0), Clock(), most_users=3)
    for n in range(15):
        limit.check("busy")
        limit.check(str(n))
    with pytest.raises(ks.RateLimited):
        limit.check("busy")


def test_threads_together_get_exactly_the_limit():
    limit = ks.RateLimit((50, 600.0))
    passed = []

    def many():
        for _ in range(40):
            try:
                limit.check("ann")
                passed.append(1)
            except ks.RateLimited:
                pass

    threads = [threading.Thread(target=many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(passed) == 50


# --- search by the Gemini CLI: a fake that is a real executable -----------------------------------------------------

RESPONSE = "Python 3.14 is out [1].\n\nSources\n\n[1] What's new - https://docs.python.org/3/?utm_source=x"


def printed(text=RESPONSE, searches=1, **more):
    tools = {"byName": {"google_web_search": {"count": searches, "success": searches}, "web_fetch": {"success": 3}}}
    models = {
        "gemini-3-flash-preview": {"roles": {"utility_tool": {}}},
        "gemini-9-flash": {"roles": {"main": {"n": 1}}},
    }
    return {"session_id": "s", "response": text, "stats": {"models": models, "tools": tools}, **more}


class Gemini:
    """A folder with a fake `gemini` in it, which notes how it was called and then does what the test says."""

    def __init__(self, folder, **fields):
        self.folder = folder
        self.notes = folder / "notes.jsonl"
        self.temp = folder / "temp"
        self.temp.mkdir()
        self.home = folder / "home"
        self.home.mkdir()
        self.slept = []
        self.environ = {"PATH": os.environ["PATH"], "HOME": str(self.home), "GEMINI_API_KEY": "AIza-0123456789"}
        self.cli = ks.GeminiCLI(enabled=True, path=str(folder / "gemini"), **fields)

    def does(self, action):
        script = self.folder / "gemini"
        script.write_text(
            f"#!{sys.executable}\nimport json, os, signal, subprocess, sys, time\nprompt = sys.stdin.read()\n"
            f"notes = open({str(self.notes)!r}, 'a')\n"
            "files = sorted(os.listdir('.'))\n"
            "settings = json.load(open(os.environ['GEMINI_CLI_HOME'] + '/.gemini/settings.json'))\n"
            "login = sorted(os.listdir(os.environ['GEMINI_CLI_HOME'] + '/.gemini'))\n"
            "note = dict(argv=sys.argv[1:], env=dict(os.environ), cwd=os.getcwd(), files=files, prompt=prompt,\n"
            "            settings=settings, login=login, pid=os.getpid())\n"
            "notes.write(json.dumps(note) + '\\n'); notes.close()\n" + textwrap.dedent(action)
        )
        script.chmod(0o755)
        return self

    def prints(self, *outputs):
        """Prints the first output in the first run, and so on; the last one again and again."""
        texts = [output if isinstance(output, str) else json.dumps(output, indent=2) for output in outputs]
        return self.does(
            f"texts = {texts!r}\nrun = len(open({str(self.notes)!r}).readlines()) - 1\n"
            "print(texts[min(run, len(texts) - 1)])"
        )

    def fails(self, code, stderr="", status=None):
        error = {"session_id": "s", "error": {"type": "Error", "message": stderr, "code": status or code}}
        noise = "Warning: 256-color support not detected.\nRipgrep is not available.\n    at Module._compile (x.js:1)\n"
        return self.does(f"print({noise + json.dumps(error, indent=2)!r}, file=sys.stderr)\nsys.exit({code})")

    def search(self, query="python 3.14", **options):
        options.setdefault("sleep", self.slept.append)
        return self.cli.search(query, environ=self.environ, **options)

    @property
    def runs(self):
        return [json.loads(line) for line in self.notes.read_text().splitlines()] if self.notes.exists() else []


@pytest.fixture
def gemini(tmp_path, monkeypatch):
    fake = Gemini(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(fake.temp))
    yield fake
    assert list(fake.temp.iterdir()) == [], "a temp file was left behind"


def with_fields(gemini, **fields):
    gemini.cli = dataclasses.replace(gemini.cli, **fields)
    return gemini


def is_alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


# --- search: single-round search (spec 004) -------------------------------------------------------------------------


def test_a_successful_search_answers_with_success_result_and_metadata(gemini):
    report = gemini.prints(printed()).search()
    assert set(report) == {"success", "result", "metadata"}
    assert report["success"] is True
    assert report["result"] == RESPONSE
    assert set(report["metadata"]) == {"duration_ms", "query", "model", "timestamp", "sources_visited"}
    assert report["metadata"]["query"] == "python 3.14"
    assert report["metadata"]["sources_visited"] == ["https://docs.python.org/3/"]
    assert isinstance(report["metadata"]["duration_ms"], int)
    assert time.strptime(report["metadata"]["timestamp"], "%Y-%m-%dT%H:%M:%SZ")
    json.dumps(report)


def test_the_metadata_name_the_model_that_wrote_the_answer(gemini):
    assert gemini.prints(printed()).search()["metadata"]["model"] == "gemini-9-flash"


def test_the_metadata_name_the_configured_model_where_the_cli_does_not_tell(gemini):
    reply = printed()
    del reply["stats"]["models"]
    assert with_fields(gemini, model="gemini-x").prints(reply).search()["metadata"]["model"] == "gemini-x"


def test_a_cli_that_is_not_installed_is_reported_with_how_to_install_it(gemini):
    report = gemini.search()
    assert report["success"] is False
    assert report["error"]["code"] == "CLI_NOT_FOUND"
    assert "npm install -g @google/gemini-cli" in report["error"]["message"]


def test_a_cli_that_does_not_start_is_reported_as_not_found(gemini):
    script = gemini.folder / "gemini"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    assert gemini.search()["error"]["code"] == "CLI_NOT_FOUND"


def test_a_machine_without_node_is_reported_as_not_found(gemini):
    assert gemini.does("sys.exit(127)").search()["error"]["code"] == "CLI_NOT_FOUND"


def test_the_cli_is_found_on_the_path_that_was_passed_in(gemini):
    gemini.prints(printed())
    gemini.environ["PATH"] = f"{gemini.folder}:{gemini.environ['PATH']}"
    assert with_fields(gemini, path="gemini").search()["success"]


def test_a_search_beyond_the_timeout_is_stopped_and_reported(gemini):
    started = time.monotonic()
    report = with_fields(gemini, timeout_ms=700).does("time.sleep(60)").search()
    assert time.monotonic() - started < 5
    assert report["error"]["code"] == "EXECUTION_ERROR"
    assert "in time" in report["error"]["message"]
    assert not is_alive(gemini.runs[0]["pid"])


def test_the_default_timeout_is_300000_ms():
    assert ks.GeminiCLI().timeout_ms == 300_000


def test_a_deadline_of_the_caller_that_is_shorter_wins(gemini):
    started = time.monotonic()
    report = gemini.does("time.sleep(60)").search(deadline=ks.Deadline(0.7))
    assert report["error"]["code"] == "EXECUTION_ERROR"
    assert time.monotonic() - started < 5


def test_an_error_answers_with_success_and_error_alone(gemini):
    report = gemini.fails(244, "Internal error", 500).search()
    assert set(report) == {"success", "error"}
    assert set(report["error"]) == {"code", "message", "details"}
    assert report["error"]["code"] == "EXECUTION_ERROR"
    assert report["error"]["details"] == "Exit code 244. Internal error"


# --- search: prompt template (spec 004) -----------------------------------------------------------------------------


def test_the_prompt_comes_from_the_configured_file_with_the_query_in_it(gemini):
    path = gemini.folder / "own.md"
    path.write_text("Look up {{query}} and be brief.")
    with_fields(gemini, prompt_file=str(path)).prints(printed()).search("cats & dogs")
    assert gemini.runs[0]["prompt"] == "Look up cats & dogs and be brief."


def test_a_missing_prompt_file_falls_back_to_the_built_in_prompt(gemini):
    with_fields(gemini, prompt_file="/no/such/file.md").prints(printed()).search("cats")
    assert gemini.runs[0]["prompt"] == ks.SEARCH_PROMPT.replace("{{query}}", "cats").strip()


def test_a_prompt_file_without_a_place_for_the_query_still_asks_it(gemini):
    path = gemini.folder / "own.md"
    path.write_text("Be brief.")
    with_fields(gemini, prompt_file=str(path)).prints(printed()).search("cats")
    assert gemini.runs[0]["prompt"] == "Be brief.\n\nQuery: cats"


def test_the_prompt_file_beside_the_module_and_the_built_in_prompt_are_the_same():
    path = Path(ks.__file__).with_name("prompts") / "search-prompt.md"
    assert path.read_text("utf-8") == ks.SEARCH_PROMPT


def test_the_prompt_asks_for_one_search_three_to_five_pages_and_citations():
    prompt = " ".join(ks.SEARCH_PROMPT.split())
    for order in ("`google_web_search` exactly once", "3-5 most promising URLs", "concise", "Sources", "Do NOT search"):
        assert order in prompt


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("/quit", "Query: /quit"),
        ("@note.txt what is this", "Query: \\@note.txt what is this"),
        ("-p --yolo", "Query: -p --yolo"),
        ("{{query}} {{x}}", "Query: {{query}} {{x}}"),
        ("mail a@b.example", "Query: mail a\\@b.example"),
        ("$(touch x); `id` \"'", "Query: $(touch x); `id` \"'"),
        ("two\nlines", "Query: two lines"),
    ],
)
def test_a_query_cannot_become_a_command_a_file_an_option_or_a_template(gemini, query, shown):
    gemini.prints(printed()).search(query)
    (run,) = gemini.runs
    assert run["prompt"].splitlines()[-1] == shown
    assert run["argv"] == ["--output-format", "json", "--model", gemini.cli.model]
    assert run["files"] == []


def test_a_query_at_the_very_start_of_a_template_is_no_command_either(gemini):
    path = gemini.folder / "own.md"
    path.write_text("{{query}}")
    assert with_fields(gemini, prompt_file=str(path)).cli.prompt("/quit") == "Query: /quit"


@pytest.mark.parametrize("query", ["", "  \n", None])
def test_an_empty_query_is_refused_without_starting_anything(gemini, query):
    assert gemini.prints(printed()).search(query)["error"]["code"] == "INVALID_INPUT"
    assert gemini.runs == []


def test_a_huge_query_reaches_the_cli_shortened(gemini):
    assert gemini.prints(printed()).search("word " * 100_000)["success"]
    assert len(gemini.runs[0]["prompt"]) < 6000


# --- search: JSON retry (spec 004) ----------------------------------------------------------------------------------


def test_output_that_is_not_json_is_asked_for_again_after_1_2_and_5_seconds(gemini):
    report = gemini.prints("I am not JSON {").search()
    assert report["error"]["code"] == "INVALID_JSON"
    assert "I am not JSON" in report["error"]["details"]
    assert gemini.slept == [1.0, 2.0, 5.0]
    assert len(gemini.runs) == 4


def test_a_retry_that_brings_json_is_a_success(gemini):
    assert gemini.prints("garbage", "", printed()).search()["success"]
    assert gemini.slept == [1.0, 2.0]


def test_no_retry_starts_that_the_deadline_would_not_live_to_see(gemini):
    report = with_fields(gemini, timeout_ms=900).prints("garbage").search()
    assert report["error"]["code"] == "INVALID_JSON"
    assert len(gemini.runs) == 1


def test_warnings_before_the_json_do_no_harm(gemini):
    assert gemini.prints("Warning {x}\n{not json\n" + json.dumps(printed(), indent=2)).search()["success"]


@pytest.mark.parametrize("text", ["[1, 2]", "null", "12", '{"response": "cut off'])
def test_json_that_is_no_whole_object_counts_as_garbage(gemini, text):
    assert gemini.prints(text).search()["error"]["code"] == "INVALID_JSON"


# --- search: what the CLI may answer --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply", [printed(searches=0), {"response": "Paris."}, {"response": "x", "stats": {"tools": 1}}]
)
def test_an_answer_without_any_search_is_refused_as_not_grounded(gemini, reply):
    report = gemini.prints(reply).search()
    assert report["error"]["code"] == "EXECUTION_ERROR"
    assert "from memory" in report["error"]["message"]
    assert len(gemini.runs) == 1


@pytest.mark.parametrize("reply", [printed(""), printed(None), printed("", error={"type": "INVALID_STREAM"})])
def test_an_empty_answer_is_an_error(gemini, reply):
    report = gemini.prints(reply).search()
    assert report["error"]["code"] == "EXECUTION_ERROR"
    assert "no answer" in report["error"]["message"]


@pytest.mark.parametrize(
    ("exit_code", "status", "said", "code"),
    [
        (41, 41, "Please set an Auth method", "AUTH_REQUIRED"),
        (145, 401, "Unauthorized", "AUTH_REQUIRED"),
        (147, 403, "Forbidden", "AUTH_REQUIRED"),
        (144, 400, "API key not valid. Please pass a valid API key.", "AUTH_REQUIRED"),
        (173, 429, "Too many requests", "RATE_LIMITED"),
        (1, 1, "You exceeded your current quota", "RATE_LIMITED"),
        (244, 500, "Internal", "EXECUTION_ERROR"),
        (1, 404, "models/x is not found", "EXECUTION_ERROR"),
        (53, 53, "Reached max session turns", "EXECUTION_ERROR"),
    ],
)
def test_the_exit_codes_of_the_cli_are_understood(gemini, exit_code, status, said, code):
    report = gemini.fails(exit_code, said, status).search()
    assert report["error"]["code"] == code
    assert said in report["error"]["details"]
    assert "256-color" not in report["error"]["details"]
    assert len(gemini.runs) == 1


def test_a_failure_in_plain_coloured_text_is_quoted(gemini):
    report = gemini.does(
        "print('Gemini CLI is not running in a trusted directory', file=sys.stderr); sys.exit(55)"
    ).search()
    assert report["error"]["code"] == "EXECUTION_ERROR"
    assert "trusted directory" in report["error"]["details"]


def test_a_cli_killed_by_a_signal_is_an_execution_error(gemini):
    assert gemini.does("os.kill(os.getpid(), signal.SIGSEGV)").search()["error"]["code"] == "EXECUTION_ERROR"


def test_the_key_does_not_show_in_an_error(gemini):
    report = gemini.does("print(os.environ['GEMINI_API_KEY'], file=sys.stderr); sys.exit(1)").search()
    assert "[redacted]" in report["error"]["details"]
    assert "AIza" not in json.dumps(report)


# --- search: processes ----------------------------------------------------------------------------------------------


def test_a_hanging_grandchild_dies_with_the_cli(gemini):
    pid_file = gemini.folder / "grandchild"
    gemini.does(
        f"""
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open({str(pid_file)!r}, "w").write(str(child.pid))
        time.sleep(60)
        """
    )
    report = with_fields(gemini, timeout_ms=1500).search()
    assert report["error"]["code"] == "EXECUTION_ERROR"
    assert not is_alive(int(pid_file.read_text()))


def test_a_grandchild_that_outlives_the_cli_holds_nothing_up_and_dies(gemini):
    pid_file = gemini.folder / "grandchild"
    gemini.does(
        f"""
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open({str(pid_file)!r}, "w").write(str(child.pid))
        print({json.dumps(printed())!r})
        """
    )
    started = time.monotonic()
    assert gemini.search()["success"]
    assert time.monotonic() - started < 5
    assert not is_alive(int(pid_file.read_text()))


def test_a_process_that_left_the_group_and_holds_the_pipes_does_not_hold_us_up(gemini):
    pid_file = gemini.folder / "escaped"
    gemini.does(
        f"""
        code = "import time; time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        open({str(pid_file)!r}, "w").write(str(child.pid))
        print({json.dumps(printed())!r})
        """
    )
    started = time.monotonic()
    report = gemini.search()
    os.kill(int(pid_file.read_text()), 9)
    assert report["success"]
    assert time.monotonic() - started < 10


def test_a_flood_of_braces_is_no_work_for_the_parser(gemini):
    started = time.monotonic()
    assert with_fields(gemini, timeout_ms=900).prints("{\n" * 100_000).search()["error"]["code"] == "INVALID_JSON"
    assert time.monotonic() - started < 5


def test_a_cli_that_ignores_sigterm_is_stopped_all_the_same(gemini):
    gemini.does("signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)")
    assert with_fields(gemini, timeout_ms=700).search()["error"]["code"] == "EXECUTION_ERROR"
    assert not is_alive(gemini.runs[0]["pid"])


def test_a_flood_on_stderr_neither_blocks_the_cli_nor_fills_the_memory(gemini):
    gemini.does(f"sys.stderr.write('x' * 30_000_000)\nprint({json.dumps(printed())!r})")
    assert gemini.search()["success"]


def test_an_endless_flood_is_stopped_at_the_timeout(gemini):
    gemini.does("while True: os.write(2, b'x' * 65536); os.write(1, b'y' * 65536)")
    report = with_fields(gemini, timeout_ms=1000).search()
    assert report["error"]["code"] == "EXECUTION_ERROR"
    assert not is_alive(gemini.runs[0]["pid"])


def test_only_a_limited_part_of_a_flood_is_kept():
    process = subprocess.Popen([sys.executable, "-c", "print('a' + 'x' * 9_000_000 + 'z')"], stdout=subprocess.PIPE)
    with process:
        kept = ks._Drain(process.stdout, keep_end=True).text()
    assert len(kept) == ks.MOST_OUTPUT_BYTES
    assert kept.endswith("xz\n")


def test_cancellation_stops_the_cli_promptly(gemini):
    started = time.monotonic()
    report = gemini.does("time.sleep(60)").search(cancelled=lambda: time.monotonic() - started > 0.6)
    assert time.monotonic() - started < 3
    assert report["error"] == {"code": "EXECUTION_ERROR", "message": "The search was cancelled."}
    assert not is_alive(gemini.runs[0]["pid"])


def test_a_search_cancelled_beforehand_starts_nothing(gemini):
    gemini.prints(printed()).search(cancelled=lambda: True)
    assert gemini.runs == []


def test_cancellation_between_retries_is_noticed(gemini):
    gemini.prints("garbage").search(cancelled=lambda: len(gemini.slept) > 0)
    assert len(gemini.runs) == 1


def test_the_cli_works_in_an_empty_folder_with_a_home_and_a_temp_folder_of_its_own(gemini):
    gemini.prints(printed()).search()
    (run,) = gemini.runs
    root = Path(run["env"]["GEMINI_CLI_HOME"])
    assert run["files"] == []
    assert Path(run["cwd"]) == root / "work"
    assert run["env"]["TMPDIR"] == str(root / "tmp")
    assert not root.exists()


def test_what_the_cli_leaves_in_its_temp_folder_is_deleted(gemini):
    gemini.does(
        f"open(os.environ['TMPDIR'] + '/gemini-client-error-1.json', 'w').write('x')\nprint({json.dumps(printed())!r})"
    )
    assert gemini.search()["success"]  # the fixture looks for leftovers


def test_only_the_allowed_variables_cross_over(gemini):
    gemini.environ |= {
        "SERPER_API_KEY": "serper-secret",
        "OPENAI_API_KEY": KEY,
        "KINDLY_HTTP_TOKEN": "token-secret",
        "NODE_OPTIONS": "--require x",
        "HTTPS_PROXY": "http://proxy.example:8080",
    }
    gemini.prints(printed()).search()
    seen = gemini.runs[0]["env"]
    assert seen["HTTPS_PROXY"] == "http://proxy.example:8080"
    assert seen["GEMINI_API_KEY"] == "AIza-0123456789"
    assert "secret" not in json.dumps(seen)
    assert not {"SERPER_API_KEY", "OPENAI_API_KEY", "NODE_OPTIONS", "KINDLY_HTTP_TOKEN"} & set(seen)


def test_our_own_process_environment_is_not_read(gemini, monkeypatch):
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "not-passed-in")
    gemini.prints(printed()).search()
    assert "GOOGLE_CLOUD_PROJECT" not in gemini.runs[0]["env"]


def test_the_cli_is_limited_to_searching_and_fetching_without_telemetry_or_updates(gemini):
    gemini.prints(printed()).search()
    settings = gemini.runs[0]["settings"]
    assert settings["tools"]["core"] == ["google_web_search", "web_fetch"]
    assert settings["privacy"] == {"usageStatisticsEnabled": False}
    assert settings["general"]["enableAutoUpdate"] is False
    assert settings["security"]["auth"]["selectedType"] == "gemini-api-key"


def test_the_model_is_pinned(gemini):
    with_fields(gemini, model="gemini-x").prints(printed()).search()
    assert gemini.runs[0]["argv"][-2:] == ["--model", "gemini-x"]


def test_a_login_made_with_the_cli_is_lent_to_it(gemini):
    del gemini.environ["GEMINI_API_KEY"]
    (gemini.home / ".gemini").mkdir()
    (gemini.home / ".gemini" / "oauth_creds.json").write_text("{}")
    (gemini.home / ".gemini" / "GEMINI.md").write_text("private notes")
    gemini.prints(printed()).search()
    (run,) = gemini.runs
    assert run["login"] == [".env", "oauth_creds.json", "settings.json"]
    assert run["settings"]["security"]["auth"]["selectedType"] == "oauth-personal"


def test_on_windows_the_whole_tree_is_ended_with_taskkill(tmp_path, monkeypatch):
    taskkill = tmp_path / "taskkill"
    taskkill.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/args\nkill -9 $4\n')
    taskkill.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    process = subprocess.Popen(["sleep", "60"])
    ks.kill_tree(process, windows=True)
    assert (tmp_path / "args").read_text().split() == ["/T", "/F", "/PID", str(process.pid)]
    assert process.returncode == -9


# --- search: sources, progress, log ---------------------------------------------------------------------------------

REDIRECT = "https://vertexaisearch.cloud.google.com/grounding-api-redirect/AUZIYQ-x_1="


@responses.activate
def test_redirects_of_google_are_resolved_to_the_pages_behind_them(gemini):
    target = "https://docs.python.org/3/?utm_source=google"
    responses.get(REDIRECT, status=302, headers={"Location": target})
    report = gemini.prints(printed(f"Out [1]({REDIRECT}).")).search(http=ks.Http())
    assert report["result"] == "Out [1](https://docs.python.org/3/)."
    assert report["metadata"]["sources_visited"] == ["https://docs.python.org/3/"]


@responses.activate
def test_redirects_that_cannot_be_resolved_are_labelled(gemini):
    responses.get(REDIRECT, status=404)
    report = gemini.prints(printed(f"Out ({REDIRECT}).")).search(http=ks.Http())
    assert report["metadata"]["sources_visited"] == [REDIRECT]
    assert "Google's redirects" in report["result"]


def test_without_http_redirects_are_labelled(gemini):
    assert "Google's redirects" in gemini.prints(printed(f"Out ({REDIRECT}).")).search()["result"]


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("see https://a.example/x.", ["https://a.example/x"]),
        ("[t](https://a.example/x), [u](https://b.example)", ["https://a.example/x", "https://b.example"]),
        ("(https://en.wikipedia.org/wiki/Python_(genus))", ["https://en.wikipedia.org/wiki/Python_(genus)"]),
        ("<https://a.example/> and **https://a.example/**", ["https://a.example/"]),
        ("https://a.example/?utm_source=x https://a.example/?b=1", ["https://a.example/", "https://a.example/?b=1"]),
        ("no links", []),
    ],
)
def test_the_sources_are_the_links_of_the_answer(text, links):
    assert ks.links_in(text) == links


def test_offline_mode_starts_nothing(gemini):
    report = gemini.prints(printed()).search(http=ks.Http(ks.Settings(offline=True)))
    assert "offline" in report["error"]["message"]
    assert gemini.runs == []


def test_progress_is_told_while_the_cli_works(gemini, monkeypatch):
    monkeypatch.setattr(ks, "PROGRESS_SECONDS", 0.2)
    told = []
    gemini.does(f"time.sleep(0.6)\nprint({json.dumps(printed())!r})").search(progress=told.append)
    assert told[0].startswith("Gemini is searching")
    assert any(message.startswith("Gemini has been working for") for message in told)


def test_a_search_is_logged_in_one_line_without_its_text(gemini, caplog):
    caplog.set_level(logging.INFO, "kindly_search")
    gemini.prints(printed()).search()
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"answer completed engine=gemini results=1 ms=\d+ query=sha256:[0-9a-f]{12}", line)


def test_a_failed_search_is_logged_with_its_code(gemini, caplog):
    gemini.fails(41).search()
    assert "answer failed engine=gemini outcome=AUTH_REQUIRED ms=" in caplog.text


def test_it_is_configured_only_when_enabled():
    assert ks.from_env(ks.GeminiCLI, {"GEMINI_CLI_ENABLED": "true"}).configured()
    assert not ks.from_env(ks.GeminiCLI, {}).configured()


def test_its_variables_are_read_from_the_environment_that_is_passed_in():
    environ = {
        "GEMINI_CLI_PATH": "/opt/gemini",
        "GEMINI_MODEL": "m",
        "GEMINI_TIMEOUT_MS": "1000",
        "GEMINI_PROMPT_FILE": "/p.md",
        "GEMINI_API_KEY": "AIza-0123456789",
    }
    cli = ks.from_env(ks.GeminiCLI, environ)
    assert (cli.path, cli.model, cli.timeout_ms, cli.prompt_file) == ("/opt/gemini", "m", 1000, "/p.md")
    assert "AIza" not in repr(cli)


def test_our_own_rate_limit_has_a_place_in_the_report():
    report = ks.GeminiReport.failed("RATE_LIMITED", "Come back in 10 s.").as_dict()
    assert report == {"success": False, "error": {"code": "RATE_LIMITED", "message": "Come back in 10 s."}}


# --- search by the real CLI, against a stand-in of the Gemini API ---------------------------------------------------

REAL_GEMINI = os.environ.get("KINDLY_TEST_GEMINI") or shutil.which("gemini")
needs_gemini = pytest.mark.skipif(not REAL_GEMINI, reason="no gemini on the PATH and KINDLY_TEST_GEMINI is not set")


class GeminiAPI(ThreadingHTTPServer):
    """Loopback stand-in: asks for one search, one fetch and one shell command, then answers."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), GeminiHandler)
        self.requests = []
        self.status = 200
        self.steps = [
            {"functionCall": {"name": "google_web_search", "args": {"query": "python 3.14"}}},
            {"functionCall": {"name": "web_fetch", "args": {"prompt": "Read https://docs.python.org/3/"}}},
            {"functionCall": {"name": "run_shell_command", "args": {"command": "touch pwned"}}},
            {"text": RESPONSE},
        ]
        self.hang = threading.Event()
        self.hang.set()

    def part(self, body):
        if "googleSearch" in json.dumps(body.get("tools", "")):
            return {"text": "Python 3.14 came out in October 2025."}
        done = sum("functionResponse" in part for content in body["contents"] for part in content["parts"])
        return self.steps[min(done, len(self.steps) - 1)]


class GeminiHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        self.server.hang.wait(30)
        candidate = {"content": {"role": "model", "parts": [self.server.part(body)]}, "finishReason": "STOP"}
        reply = {"candidates": [candidate], "usageMetadata": {"totalTokenCount": 3}}
        if self.server.status != 200:
            reply = {"error": {"code": self.server.status, "message": "stand-in says no", "status": "X"}}
        data = json.dumps(reply).encode()
        streamed = "alt=sse" in self.path and self.server.status == 200
        self.send_response(self.server.status)
        self.send_header("Content-Type", "text/event-stream" if streamed else "application/json")
        data = b"data: " + data + b"\r\n\r\n" if streamed else data
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def api():
    server = GeminiAPI()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.hang.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def real(gemini, api):
    gemini.cli = ks.GeminiCLI(enabled=True, path=REAL_GEMINI, timeout_ms=40_000)
    gemini.environ["GOOGLE_GEMINI_BASE_URL"] = f"http://127.0.0.1:{api.server_address[1]}"
    return gemini


@needs_gemini
def test_the_real_cli_searches_once_and_answers(real, api):
    report = real.search("@note.txt what is new in python 3.14")
    assert report["success"], report
    assert report["result"] == RESPONSE
    assert report["metadata"]["sources_visited"] == ["https://docs.python.org/3/"]
    assert sum("googleSearch" in json.dumps(body.get("tools", "")) for _, body in api.requests) == 1


@needs_gemini
def test_the_real_cli_offers_the_model_two_tools_and_refuses_a_third(real, api):
    real.search()
    first, last = api.requests[0][1], api.requests[-1][1]
    declared = {tool["name"] for group in first["tools"] for tool in group["functionDeclarations"]}
    assert declared == {"google_web_search", "web_fetch"}
    assert 'run_shell_command\\" not found' in json.dumps(last["contents"]).replace("\\\\", "\\")


@needs_gemini
def test_the_real_cli_gets_our_system_prompt_and_no_file_of_anybody_else(real, api):
    (real.temp / ".git").mkdir()  # up to here the CLI would look for context files
    (real.temp / "GEMINI.md").write_text("STRANGE NOTES")
    (real.temp / "note.txt").write_text("STRANGE FILE")
    (real.temp / ".env").write_text("GOOGLE_GEMINI_BASE_URL=http://127.0.0.1:1\n")
    del real.environ["GOOGLE_GEMINI_BASE_URL"]
    (real.home / ".gemini").mkdir()
    (real.home / ".gemini" / ".env").write_text(f"GOOGLE_GEMINI_BASE_URL=http://127.0.0.1:{api.server_address[1]}\n")
    (real.home / ".gemini" / "GEMINI.md").write_text("STRANGE NOTES")
    report = real.search("@../../note.txt @note.txt")
    for name in ("GEMINI.md", "note.txt", ".env"):
        (real.temp / name).unlink()
    (real.temp / ".git").rmdir()
    assert report["success"], report
    sent = json.dumps(api.requests)
    assert "STRANGE" not in sent
    assert api.requests[0][1]["systemInstruction"]["parts"][0]["text"].startswith("You are a web research assistant")


@needs_gemini
def test_a_stranger_cannot_plant_settings_for_the_real_cli_in_the_temp_folder(real, api):
    planted = real.temp / ".gemini" / ".env"
    planted.parent.mkdir()
    planted.write_text(f"GOOGLE_GEMINI_BASE_URL={real.environ.pop('GOOGLE_GEMINI_BASE_URL')}\n")
    # Nothing of this test reaches Google, but the stand-in would be reached.
    real.environ |= {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    report = with_fields(real, timeout_ms=5000).search()
    shutil.rmtree(planted.parent)
    assert not report["success"]
    assert api.requests == []


@needs_gemini
@pytest.mark.parametrize(
    ("status", "code"),
    [(401, "AUTH_REQUIRED"), (429, "RATE_LIMITED")],
)
def test_the_real_cli_reports_a_refusal_of_the_api(real, api, status, code):
    api.status = status
    assert real.search()["error"]["code"] == code


@needs_gemini
def test_the_real_cli_answering_without_a_search_is_refused(real, api):
    api.steps = [{"text": "Paris."}]
    assert "from memory" in real.search()["error"]["message"]


@needs_gemini
def test_the_real_cli_without_any_login_says_that_one_is_needed(real, api):
    real.environ = {"PATH": os.environ["PATH"], "HOME": str(real.home)}
    assert real.search()["error"]["code"] == "AUTH_REQUIRED"


@needs_gemini
def test_the_real_cli_leaves_no_process_and_no_file_after_a_timeout(real, api):
    api.hang.clear()
    report = with_fields(real, timeout_ms=4000).search()
    assert report["error"]["code"] == "EXECUTION_ERROR"
    assert api.requests, "it was stopped before it had begun"
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            assert str(real.temp) not in entry.read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
