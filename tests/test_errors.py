"""Section 3, Errors: the policy sits on the type, and nothing that leaves holds a secret."""

import json
import logging
from urllib.parse import quote, quote_plus

import pytest

import kindly_search
from kindly_search import (
    REDACTED,
    AddressNotAllowed,
    AllProvidersFailed,
    AuthError,
    BadRequest,
    BadResponse,
    CircuitOpen,
    ConfigError,
    InvalidInput,
    LogFormat,
    Offline,
    OutOfTime,
    PageFailed,
    ProviderDown,
    QuotaExhausted,
    RateLimited,
    Redactor,
    SearchError,
    Timeout,
    Unreachable,
)

#: DESIGN §5: try the next provider, retry the same one, count against its breaker.
POLICY = [
    (ConfigError, False, False, False),
    (InvalidInput, False, False, False),
    (AddressNotAllowed, False, False, False),
    (AuthError, False, False, False),
    (BadRequest, False, False, False),
    (QuotaExhausted, True, False, True),
    (RateLimited, True, True, True),
    (ProviderDown, True, True, True),
    (Unreachable, True, True, True),
    (Timeout, True, True, True),
    (OutOfTime, True, True, False),
    (BadResponse, True, False, True),
    (CircuitOpen, True, False, False),
    (AllProvidersFailed, False, False, False),
    (Offline, False, False, False),
    (PageFailed, False, False, False),
]

SECRET = "s3cr3t+key/with=all&sorts"


# -- policy ------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "fallback", "retryable", "trips"), POLICY)
def test_each_error_carries_its_policy(cls, fallback, retryable, trips):
    error = cls("what happened")
    assert (error.fallback, error.retryable, error.trips) == (fallback, retryable, trips)


def test_the_policy_table_is_complete():
    def descendants(cls):
        return {cls}.union(*map(descendants, cls.__subclasses__()))

    ours = {cls for cls in descendants(SearchError) if cls.__module__ == kindly_search.__name__}
    in_table = {cls for cls, *_ in POLICY}
    # A subclass may be left out of the table only where it inherits the whole policy of a row.
    for cls in ours - in_table - {SearchError}:
        parent = next(base for base in cls.__mro__[1:] if base in in_table | {SearchError})
        assert (cls.fallback, cls.retryable, cls.trips) == (parent.fallback, parent.retryable, parent.trips), cls


@pytest.mark.parametrize("cls", [row[0] for row in POLICY])
def test_every_error_says_what_happened_and_its_kind_in_a_word_or_two(cls):
    assert str(cls("what happened")) == "what happened"
    assert 1 <= len(cls.brief.split()) <= 4


def test_a_timeout_is_a_kind_of_unreachable():
    assert issubclass(Timeout, Unreachable)


def test_a_rate_limit_knows_how_long_to_wait():
    assert RateLimited("slow down").retry_after == 0.0
    assert RateLimited("slow down", 2.5).retry_after == 2.5


def test_a_failed_page_may_keep_what_it_got():
    failed = PageFailed("needs JavaScript", partial="# Half a page")
    assert (str(failed), failed.final, failed.partial) == ("needs JavaScript", False, "# Half a page")
    assert PageFailed("HTTP 404", final=True).final


def test_finality_of_one_failed_page_does_not_spread_to_others():
    PageFailed("HTTP 404", final=True)
    assert PageFailed("timed out").final is False


# -- redaction ---------------------------------------------------------------


@pytest.mark.parametrize(
    "spelled",
    [SECRET, quote(SECRET), quote_plus(SECRET), quote(SECRET, safe=""), json.dumps(SECRET), repr(SECRET)],
)
def test_a_secret_is_blotted_out_however_it_is_spelled(spelled):
    text = Redactor([SECRET])(f"before {spelled} after")
    assert "s3cr3t" not in text
    assert "sorts" not in text
    assert text.startswith("before ")
    assert text.endswith(" after")


@pytest.mark.parametrize("secret", ['quo"te\\back', "tab\tand\nnewline", "schlüssel-ü", "snow☃man"])
def test_a_secret_that_json_escapes_is_blotted_out_inside_json(secret):
    assert Redactor([secret])(json.dumps({"key": secret})) == json.dumps({"key": REDACTED})
    assert secret not in Redactor([secret])(json.dumps({"key": secret}, ensure_ascii=False))


def test_every_occurrence_is_blotted_out():
    assert Redactor(["hunter2"])("hunter2hunter2 and hunter2") == f"{REDACTED}{REDACTED} and {REDACTED}"


@pytest.mark.parametrize("secrets", [["hunter2", "hunter2-long"], ["hunter2-long", "hunter2"]])
def test_the_longest_secret_goes_first_so_that_no_tail_is_left(secrets):
    assert Redactor(secrets)("the key hunter2-long.") == f"the key {REDACTED}."


def test_values_too_short_to_be_secrets_are_left_alone():
    assert Redactor(["abc", "a", ""])("abc a cab") == "abc a cab"
    assert Redactor(["abcd"])("abcd") == REDACTED


def test_a_secret_is_taken_literally_and_not_as_a_pattern():
    assert Redactor(["a.c*(d"])("axcd a.c*(d") == f"axcd {REDACTED}"


def test_without_secrets_nothing_changes():
    assert Redactor()("sk-looks-like-one but is only text") == "sk-looks-like-one but is only text"


def test_a_redactor_does_not_show_what_it_knows():
    assert "hunter2" not in repr(Redactor(["hunter2"]))


# -- quoted strangers --------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "forbidden"),
    [
        ("Incorrect API key provided: sk-abcde***************wxyz.", ("abcde", "wxyz")),
        ("Incorrect API key provided: sk-proj-AbCd1234EfGh5678.", ("AbCd1234",)),
        ("key tvly-dev-0123456789 is unknown", ("0123456789",)),
        ("bad token ghp_0123456789abcdef", ("0123456789",)),
        ("bad token github_pat_11AAAA_bbbb", ("11AAAA",)),
    ],
)
def test_what_looks_like_a_key_is_not_quoted_even_if_it_is_not_ours(said, forbidden):
    quoted = Redactor().quoted(said)
    assert REDACTED in quoted
    for part in forbidden:
        assert part not in quoted


def test_a_known_secret_is_not_quoted():
    assert Redactor(["hunter2"]).quoted("you sent hunter2") == f"you sent {REDACTED}"


def test_a_secret_across_the_cut_leaves_no_head():
    quoted = Redactor(["hunter2-and-more"]).quoted("x" * 195 + " hunter2-and-more", limit=200)
    assert "hunt" not in quoted


def test_a_quotation_is_one_short_line():
    quoted = Redactor().quoted("first\r\n\tsecond\x0b" + "word " * 100)
    assert quoted.startswith("first second word word")
    assert len(quoted) <= 201
    assert quoted.endswith("…")
    assert "\n" not in quoted


def test_a_secret_that_spans_lines_is_not_quoted():
    secret = "first-half second-half"
    assert Redactor([secret]).quoted("you sent first-half\nsecond-half") == f"you sent {REDACTED}"


def test_ordinary_words_stay_in_a_quotation():
    said = "The risk-free task-list asks: desk-1 or disk_space?"
    assert Redactor().quoted(said) == said


def test_numbers_in_a_structure_stay_numbers_whatever_the_secret() -> None:
    redact = Redactor(["1234"])
    data = {"said": "key 1234!", "count": 51234, "list": ["1234", 1234, None, True, 1.5], "1234": ("a", "1234")}
    assert redact.within(data) == {
        "said": "key [redacted]!",
        "count": 51234,
        "list": ["[redacted]", 1234, None, True, 1.5],
        "[redacted]": ["a", "[redacted]"],
    }


def test_a_json_log_line_parses_whatever_is_in_it() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "said %s", ('"ü\n😀 1234',), None)
    record.parts = {"chars": 51234, "outcome": 'a "quoted" ü 1234'}
    line = LogFormat(Redactor(["1234"]), "json").format(record)
    assert line.isascii()
    assert json.loads(line)["chars"] == 51234
    assert json.loads(line)["outcome"] == 'a "quoted" ü [redacted]'
    assert json.loads(line)["message"] == 'said "ü\n😀 [redacted]'
