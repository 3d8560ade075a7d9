"""The real services: RUN_LIVE_TESTS=1 and the key of each. Never in CI; a run costs a few credits."""

import os

import pytest

from kindly_search import (
    PROVIDERS,
    AuthError,
    Deadline,
    Exa,
    Filters,
    Http,
    Kindly,
    Serper,
    Tavily,
    from_env,
    variables,
)

pytestmark = pytest.mark.live


def configured(cls):
    """The provider as this machine has it; skips the test where it has none."""
    provider = from_env(cls, os.environ)
    if not provider.configured():
        needed = " or ".join(variable.name for variable in variables(cls).values() if variable.required)
        pytest.skip(f"live: needs {needed}")
    return provider


@pytest.fixture
def http():
    kindly = Kindly.from_env()
    yield Http(kindly.settings, redact=kindly.redact)
    kindly.close()


@pytest.mark.parametrize("cls", PROVIDERS, ids=lambda cls: cls.name)
def test_the_provider_finds_something(cls, http):
    found = configured(cls).search(http, "python asyncio documentation", 3, deadline=Deadline(30))
    assert 1 <= len(found) <= 3
    assert all(result.title and result.link.startswith("http") for result in found)


@pytest.mark.parametrize("cls", PROVIDERS, ids=lambda cls: cls.name)
def test_the_provider_takes_every_filter_that_it_claims_to(cls, http):
    filters = Filters(freshness="year", include_domains=("python.org",), country="us", language="en")
    configured(cls).search(http, "python release", 3, deadline=Deadline(30), filters=filters)


@pytest.mark.parametrize("cls", [Serper, Exa, Tavily], ids=lambda cls: cls.name)
def test_the_provider_reads_a_page(cls, http):
    assert "Example Domain" in configured(cls).scrape(http, "https://example.com/", deadline=Deadline(45))


@pytest.mark.parametrize("cls", [Serper, Exa, Tavily], ids=lambda cls: cls.name)
def test_a_wrong_key_is_refused_and_not_shown(cls, http):
    configured(cls)
    with pytest.raises(AuthError) as caught:
        cls(api_key="wrong-key-0123456789").search(http, "python", 1, deadline=Deadline(30))
    assert "wrong-key" not in str(caught.value)


def test_keyless_tavily_finds_something(http):
    if not from_env(Tavily, os.environ).keyless:
        pytest.skip("live: needs TAVILY_KEYLESS=true")
    assert Tavily(keyless=True).search(http, "python asyncio", 1, deadline=Deadline(30))


def test_a_whole_search_reads_its_pages():
    with Kindly.from_env() as kindly:
        if not kindly.router.providers:
            pytest.skip("live: needs the key of any provider")
        report = kindly.web_search("python asyncio documentation", 2)
    assert report.results
    assert all(result.page_content for result in report.results)
