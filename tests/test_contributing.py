"""The worked examples of CONTRIBUTING.md work."""

import dataclasses
import re
from pathlib import Path

import responses

import kindly_search
from kindly_search import Breakers, Deadline, Http, Router, Settings, from_env

TEXT = (Path(__file__).resolve().parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def example_provider() -> type:
    namespace = vars(kindly_search).copy()
    exec(next(block for block in BLOCKS if "class Example" in block), namespace)
    return namespace["Example"]


def test_the_example_provider_is_configured_by_its_key_alone() -> None:
    provider = example_provider()

    assert from_env(provider, {"EXAMPLE_API_KEY": "key-1"}).configured()
    assert not from_env(provider, {}).configured()
    assert "key-1" not in repr(from_env(provider, {"EXAMPLE_API_KEY": "key-1"}))


@responses.activate
def test_the_example_provider_answers_through_the_router() -> None:
    found = {"hits": [{"title": "One", "url": "https://one.example/", "text": "first"}]}
    responses.post("https://api.example.com/search", json=found)
    provider = from_env(example_provider(), {"EXAMPLE_API_KEY": "key-1"})

    hits = Router([provider], Http(Settings()), breakers=Breakers(Settings())).search("q", 3, deadline=Deadline(5))

    assert [dataclasses.astuple(result)[:3] for result in hits.results] == [("One", "https://one.example/", "first")]
    assert responses.calls[0].request.headers["Authorization"] == "Bearer key-1"


def test_the_example_loader_is_the_one_in_the_code() -> None:
    shown = next(block for block in BLOCKS if "class HackerNews" in block)
    code = Path(kindly_search.__file__).read_text(encoding="utf-8")

    for piece in re.split(r"\n\n\n", shown.strip()):
        assert piece.strip() in code
