"""Section 1, Config: every knob is declared once and read from a mapping; bad values are explained, secrets hidden."""

from dataclasses import dataclass

import pytest

from kindly_search import (
    CONFIGURED,
    PROVIDERS,
    ConfigError,
    Exa,
    Kindly,
    SearXNG,
    Serper,
    Settings,
    Tavily,
    at_least,
    env,
    flag,
    from_env,
    http_url,
    log_level,
    required_variables,
    seconds,
    secrets_of,
    url_credentials,
    variables,
    words,
)

DECLARED = [(cls, variable) for cls in CONFIGURED for variable in variables(cls).values()]

#: A value that does not parse, for every variable that can be wrong.
BAD_VALUES = [
    ("KINDLY_TOOL_TOTAL_TIMEOUT_SECONDS", "soon", "a duration such as 15s or 500ms"),
    ("KINDLY_WEB_SEARCH_MAX_CONCURRENCY", "0", "a whole number from 1 up"),
    ("KINDLY_MAX_DOWNLOAD_BYTES", "1e6", "a whole number from 1000 up"),
    ("KINDLY_MAX_RESPONSE_CHARS", "60k", "a whole number from 2000 up"),
    ("KINDLY_OFFLINE", "maybe", "true or false"),
    ("EXA_TIMEOUT", "99999999999", "a duration such as 15s or 500ms"),
    ("KINDLY_TOOL_TOTAL_TIMEOUT_SECONDS", "9" * 400, "a duration such as 15s or 500ms"),
    ("KINDLY_LOG_LEVEL", "chatty", "one of DEBUG, INFO, WARNING, ERROR"),
    ("KINDLY_CIRCUIT_FAILURES", "-5", "a whole number from 1 up"),
    ("KINDLY_CIRCUIT_RECOVERY_SECONDS", "0", "a duration such as 15s or 500ms"),
    ("SERPER_ENABLED", "ja", "true or false"),
    ("EXA_TIMEOUT", "15 apples", "a duration such as 15s or 500ms"),
    ("TAVILY_SEARCH_ENDPOINT", "api.tavily.com/search", "an http:// or https:// URL"),
    ("SERPER_SCRAPE_ENDPOINT", "ftp://scrape.serper.dev", "an http:// or https:// URL"),
    ("EXA_SEARCH_ENDPOINT", "http://", "an http:// or https:// URL"),
    ("SEARXNG_URL", "searx.example", "an http:// or https:// URL"),
]


@dataclass(frozen=True)
class Example:
    name: str = env("EXAMPLE_NAME", help="A name.", default="nobody")
    wait: float = env("EXAMPLE_WAIT", help="A wait.", default=15.0, parse=seconds)
    key: str = env("EXAMPLE_KEY", help="A key.", secret=True, required=True)
    address: str = env("EXAMPLE_URL", help="An address.", secret=url_credentials)
    tags: tuple[str, ...] = ()


# -- env() and from_env() ----------------------------------------------------


def test_unset_variables_give_the_defaults():
    assert from_env(Example, {}) == Example("nobody", 15.0, "", "")


def test_set_variables_are_trimmed_and_parsed():
    made = from_env(Example, {"EXAMPLE_NAME": "  Ada ", "EXAMPLE_WAIT": " 2m ", "EXAMPLE_KEY": "\tsecret-key\n"})
    assert made == Example("Ada", 120.0, "secret-key", "")


@pytest.mark.parametrize("blank", ["", " ", "\t", "\n", " \r\n ", "\u00a0"])
def test_a_blank_value_counts_as_absent(blank):
    assert from_env(Example, {"EXAMPLE_NAME": blank, "EXAMPLE_WAIT": blank, "EXAMPLE_KEY": blank}) == Example()


@pytest.mark.parametrize("cls", PROVIDERS)
@pytest.mark.parametrize("blank", ["", "   ", "\n"])
def test_a_provider_with_a_blank_key_is_not_configured(cls, blank):
    required = next(variable.name for variable in variables(cls).values() if variable.required)
    assert not from_env(cls, {required: blank}).configured()


def test_variables_lists_only_the_fields_that_are_declared_with_env():
    assert list(variables(Example)) == ["name", "wait", "key", "address"]


def test_from_env_reads_the_mapping_and_not_the_process(monkeypatch):
    monkeypatch.setenv("EXAMPLE_NAME", "from the process")
    assert from_env(Example, {}).name == "nobody"


# -- parsers -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("15", 15.0),
        ("15s", 15.0),
        ("15 s", 15.0),
        ("500ms", 0.5),
        ("2m", 120.0),
        ("1.5", 1.5),
        ("0.25s", 0.25),
        ("1.5M", 90.0),
        (" 7S ", 7.0),
    ],
)
def test_durations_may_carry_a_unit(text, expected):
    assert seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text", ["", "s", "-1", "0", "0ms", "1h", "1,5", "15 seconds", "1e3", "nan", "inf", "1 2", ".5"]
)
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="a duration such as 15s or 500ms"):
        seconds(text)


@pytest.mark.parametrize("text", ["1", "true", "True", "YES", "on"])
def test_words_that_mean_yes(text):
    assert flag(text) is True


@pytest.mark.parametrize("text", ["0", "false", "FALSE", "no", "Off"])
def test_words_that_mean_no(text):
    assert flag(text) is False


@pytest.mark.parametrize("text", ["", "2", "maybe", "truee", "y es"])
def test_other_words_are_no_flag(text):
    with pytest.raises(ValueError, match="true or false"):
        flag(text)


@pytest.mark.parametrize("text", ["-1", "1.0", "1_000", "٣", "²", "", "ten", "4"])
def test_what_is_no_whole_number_or_too_small_is_refused(text):
    with pytest.raises(ValueError, match="a whole number from 5 up"):
        at_least(5)(text)


def test_a_whole_number_at_the_limit_passes():
    assert at_least(5)("5") == 5


def test_a_comma_list_is_trimmed_and_lower_case_without_blanks():
    assert words(" HTTP, chromium ,,exa,") == ("http", "chromium", "exa")


def test_an_endpoint_loses_its_trailing_slash():
    assert http_url("https://searx.example/sub/") == "https://searx.example/sub"


@pytest.mark.parametrize("text", ["example.com", "ftp://example.com", "http://", "//example.com", "http:example.com"])
def test_an_endpoint_must_be_an_http_url(text):
    with pytest.raises(ValueError, match="an http:// or https:// URL"):
        http_url(text)


@pytest.mark.parametrize("text", ["http://[::1", "http://example.com:99999", "http://example.com:port"])
def test_an_endpoint_that_cannot_be_taken_apart_is_refused_in_the_same_words(text):
    with pytest.raises(ValueError, match=r"^an http:// or https:// URL$"):
        http_url(text)


@pytest.mark.parametrize(("text", "expected"), [("debug", "DEBUG"), ("Info", "INFO"), ("ERROR", "ERROR")])
def test_log_levels_are_read_in_any_case(text, expected):
    assert log_level(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://ada:hunter22@proxy.example:3128", ["hunter22", "ada"]),
        ("ada:hunter22@proxy.example:3128", ["hunter22", "ada"]),
        ("http://ada:p%40ss@proxy.example", ["p@ss", "ada"]),
        ("http://token@proxy.example", ["token"]),
        ("http://proxy.example:3128", []),
        ("http://[", []),
    ],
)
def test_the_credentials_inside_a_url_are_found(text, expected):
    assert url_credentials(text) == expected


# -- bad values --------------------------------------------------------------


@pytest.mark.parametrize(("name", "value", "expectation"), BAD_VALUES)
def test_a_bad_value_gives_a_sentence_with_the_variable_and_what_it_should_be(name, value, expectation):
    with pytest.raises(ConfigError) as caught:
        Kindly.from_env({name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert f"is not {expectation}. Correct it or unset it." in message


def test_a_bad_value_is_shown_where_it_is_no_secret():
    with pytest.raises(ConfigError, match=r"^KINDLY_OFFLINE: 'maybe' is not true or false"):
        Kindly.from_env({"KINDLY_OFFLINE": "maybe"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SEARXNG_HEADERS_JSON", "Authorization: Bearer hunter2-secret"),
        ("SEARXNG_HEADERS_JSON", '{"Authorization": ["hunter2-secret"]}'),
        ("SEARXNG_HEADERS_JSON", '["hunter2-secret"]'),
        ("SEARXNG_URL", "ada:hunter2-secret@searx.example"),
    ],
)
def test_a_bad_value_that_holds_a_secret_is_not_shown(name, value):
    with pytest.raises(ConfigError) as caught:
        Kindly.from_env({name: value})
    assert str(caught.value).startswith(f"{name}: its value is not ")
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(caught.value)


# -- secrets -----------------------------------------------------------------


def test_secrets_of_finds_whole_values_and_the_secrets_inside_others():
    environ = {
        "EXAMPLE_NAME": "Ada",
        "EXAMPLE_KEY": " secret-key ",
        "EXAMPLE_URL": "http://ada:hunter22@host.example",
    }
    assert secrets_of(Example, environ) == ["secret-key", "hunter22", "ada"]


def test_a_blank_secret_is_none():
    assert secrets_of(Example, {"EXAMPLE_KEY": "  "}) == []


def test_the_values_of_searxng_headers_are_secrets_also_when_they_do_not_parse():
    assert secrets_of(SearXNG, {"SEARXNG_HEADERS_JSON": '{"A": "token-one", "B": "token-two"}'}) == [
        "token-one",
        "token-two",
    ]
    assert secrets_of(SearXNG, {"SEARXNG_HEADERS_JSON": "token-three"}) == ["token-three"]


@pytest.mark.parametrize(
    "configured",
    [
        Serper(api_key="hunter2-secret"),
        Exa(api_key="hunter2-secret"),
        Tavily(api_key="hunter2-secret"),
        SearXNG(url="http://ada:hunter2-secret@searx.example"),
        SearXNG(url="http://searx.example", headers={"Authorization": "hunter2-secret"}),
        Settings(http_proxy="http://ada:hunter2-secret@proxy.example"),
        Settings(https_proxy="http://ada:hunter2-secret@proxy.example"),
    ],
)
def test_repr_shows_no_secret(configured):
    assert "hunter2" not in repr(configured)
    assert "hunter2" not in str(configured)


def test_every_variable_that_sounds_like_a_secret_is_declared_as_one():
    telling = ("_KEY", "_TOKEN", "_TOKENS", "_SECRET", "_PASSWORD", "_HEADERS_JSON")
    named = [(cls, v) for cls, v in DECLARED if v.name.endswith(telling) and not isinstance(v.default, int)]
    assert {"SERPER_API_KEY", "TAVILY_API_KEY", "EXA_API_KEY"} <= {v.name for _, v in named}
    assert [f"{cls.__name__}.{v.name}" for cls, v in named if not v.secrets_in] == []


# -- the declarations as a whole ---------------------------------------------


@pytest.mark.parametrize(("cls", "variable"), [pytest.param(*pair, id=pair[1].name) for pair in DECLARED])
def test_every_variable_has_a_help_text_that_is_a_sentence(cls, variable):
    assert len(variable.help) > 10
    assert variable.help.endswith(".")


def test_no_variable_is_declared_twice():
    names = [variable.name for _, variable in DECLARED]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("name", ["SERPER", "EXA", "TAVILY", "SEARXNG"])
def test_every_provider_can_be_switched_off_and_has_a_timeout_of_its_own(name):
    declared = {variable.name: variable for _, variable in DECLARED}
    assert declared[f"{name}_ENABLED"].default is True
    assert declared[f"{name}_TIMEOUT"].default == 15.0


def test_any_one_of_these_makes_searching_possible():
    assert required_variables() == ["SERPER_API_KEY", "EXA_API_KEY", "TAVILY_API_KEY", "SEARXNG_URL"]


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("KINDLY_TOOL_TOTAL_TIMEOUT_SECONDS", 45.0),
        ("KINDLY_CACHE_TTL_SECONDS", 300.0),
        ("KINDLY_CIRCUIT_FAILURES", 5),
        ("KINDLY_CIRCUIT_RECOVERY_SECONDS", 30.0),
        ("KINDLY_MAX_RESPONSE_CHARS", 60_000),
        ("KINDLY_CONTENT_CHAIN", ("http", "chromium", "serper", "exa", "tavily")),
        ("KINDLY_OFFLINE", False),
        ("KINDLY_LOG_QUERIES", False),
    ],
)
def test_the_defaults_are_those_of_the_design(name, default):
    assert {variable.name: variable for _, variable in DECLARED}[name].default == default


# -- Kindly.from_env() -------------------------------------------------------


def test_the_server_can_be_made_without_any_key():
    with Kindly.from_env({}) as kindly:
        assert kindly.router.providers == ()


def test_from_env_without_a_mapping_reads_the_process(monkeypatch):
    monkeypatch.setenv("TAVILY_API_KEY", "tvly-from-the-process")
    with Kindly.from_env() as kindly:
        assert kindly.router.providers == (Tavily(api_key="tvly-from-the-process"),)


def test_later_changes_of_the_environment_do_not_matter():
    environ = {"SERPER_API_KEY": "the-first-key"}
    with Kindly.from_env(environ) as kindly:
        environ["SERPER_API_KEY"] = "another-key"
        assert kindly.router.providers == (Serper(api_key="the-first-key"),)


def test_proxies_may_be_named_in_lower_case_as_everywhere():
    environ = {"http_proxy": "http://p.example:1", "https_proxy": "http://p.example:2", "no_proxy": "a.example"}
    with Kindly.from_env(environ) as kindly:
        assert kindly.settings.http_proxy == "http://p.example:1"
        assert kindly.settings.https_proxy == "http://p.example:2"
        assert kindly.settings.no_proxy == "a.example"


def test_a_client_hint_sets_the_response_budget_unless_the_operator_did():
    with Kindly.from_env({}, max_response_chars=9000) as kindly:
        assert kindly.settings.max_response_chars == 9000
    with Kindly.from_env({"KINDLY_MAX_RESPONSE_CHARS": "5000"}, max_response_chars=9000) as kindly:
        assert kindly.settings.max_response_chars == 5000


def test_every_configured_secret_is_known_to_the_redactor():
    secret = {variable.name: variable for _, variable in DECLARED if variable.secrets_in}
    environ = {name: f"https://user:password-of-{name}@host.example" for name in secret}
    environ["SEARXNG_HEADERS_JSON"] = '{"X-Token": "password-of-SEARXNG_HEADERS_JSON"}'
    with Kindly.from_env(environ) as kindly:
        for name, variable in secret.items():
            found = variable.secrets_in(environ[name])
            assert f"password-of-{name}" in " ".join(found)
            assert "password-of" not in kindly.redact(f"it was {found}, or {environ[name]}")
