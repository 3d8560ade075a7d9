"""README, .env.example and CONTRIBUTING say what the code does."""

import re
from pathlib import Path

import pytest

import kindly_search
from kindly_search import CONFIGURED, build_parser, variables

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ENV_EXAMPLE = (ROOT / ".env.example").read_text(encoding="utf-8")
NAMES = sorted({variable.name for cls in CONFIGURED for variable in variables(cls).values()})


def table_variables() -> set[str]:
    table = README.partition("<!-- variables -->")[2].partition("<!-- /variables -->")[0]
    return set(re.findall(r"^\| `([A-Z_]+)`", table, re.MULTILINE))


def test_the_readme_table_names_every_variable_and_no_other() -> None:
    assert sorted(table_variables()) == NAMES


def test_the_readme_table_gives_each_variable_its_own_help() -> None:
    for cls in CONFIGURED:
        for variable in variables(cls).values():
            assert variable.help.replace("|", "¦") in README, variable.name


def test_env_example_names_every_variable_and_no_other() -> None:
    assert sorted(set(re.findall(r"^(?:# )?([A-Z][A-Z_]+)=", ENV_EXAMPLE, re.MULTILINE))) == NAMES


def test_env_example_sets_nothing_but_blanks() -> None:
    active = [line for line in ENV_EXAMPLE.splitlines() if line and not line.startswith("#")]
    assert all(line.endswith("=") for line in active)


def commands() -> list[str]:
    parser = build_parser()
    subparsers = next(action for action in parser._actions if getattr(action, "choices", None))
    return list(subparsers.choices)


@pytest.mark.parametrize("command", commands())
def test_the_readme_shows_each_command(command: str) -> None:
    assert f"kindly-web-search-mcp-server {command}" in README


def test_the_readme_shows_no_command_that_does_not_exist() -> None:
    shown = re.findall(
        r"kindly-web-search-mcp-server ([a-z][a-z-]+)", README.replace("kindly-web-search-mcp-server kindly", "kindly")
    )
    assert set(shown) <= {*commands()}


@pytest.mark.parametrize(
    "heading", ["Codex", "Claude Desktop", "Gemini CLI", "Cursor", "VS Code / Copilot", "Windsurf"]
)
def test_the_readme_has_a_snippet_for_each_client(heading: str) -> None:
    assert f"<summary>{heading}</summary>" in README


def test_the_json_snippets_of_the_readme_parse() -> None:
    import json

    snippets = re.findall(r"```json\n(\{\n.*?)```", README, re.DOTALL)
    assert len(snippets) >= 5
    for snippet in snippets:
        assert json.loads(snippet)


def test_the_python_snippets_of_the_readme_compile_and_import_what_exists() -> None:
    for snippet in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        compile(snippet, "README.md", "exec")
        for names in re.findall(r"from kindly_search import (.+)", snippet):
            assert all(hasattr(kindly_search, name.strip()) for name in names.split(","))


def test_both_set_up_commands_stand_in_the_readme() -> None:
    assert "bash .ci/setup && .venv/bin/kindly-web-search-mcp-server demo" in README
    assert "bash .ci/setup && .venv/bin/python -m pytest" in README


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "bash .ci/setup && .venv/bin/python -m pytest" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_changelog_knows_the_version() -> None:
    assert f"## {kindly_search.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_architecture_picture_shows_every_section() -> None:
    picture = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    sections = re.findall(r"^\s+(\d+\. \w+)$", kindly_search.__doc__ or "", re.MULTILINE)
    assert len(sections) == 14
    assert all(f">{section}<" in picture for section in sections)
