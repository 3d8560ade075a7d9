"""The shape of the source: contents, order of the sections, length of the functions."""

import ast
import re
import statistics
import symtable
from collections.abc import Iterator
from pathlib import Path

import pytest

import kindly_search

ROOT = Path(kindly_search.__file__).parent
MODULES = [path for path in (ROOT / "kindly_search.py", ROOT / "chrome_worker.py") if path.exists()]
SOURCE = (ROOT / "kindly_search.py").read_text(encoding="utf-8")

# A section's banner: a rule, "# 4. HTTP", a rule.
BANNER = re.compile(r"^# -{70,}\n# (\d+)\. (.+)\n# -{70,}$", re.MULTILINE)

# A line of the contents in the module's docstring.
CONTENTS_LINE = re.compile(r"^ +(\d+)\. (.+)$", re.MULTILINE)

every_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)


def banners() -> list[tuple[str, str]]:
    return [(banner[1], banner[2]) for banner in BANNER.finditer(SOURCE)]


class Sections:
    """Tells the section of a line; 0 is the header."""

    def __init__(self, source: str) -> None:
        self._starts = [
            (source.count("\n", 0, banner.start()) + 1, int(banner[1])) for banner in BANNER.finditer(source)
        ]

    def __call__(self, line: int) -> int:
        return max((number for start, number in self._starts if start <= line), default=0)


section_of = Sections(SOURCE)


def defined_names(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement at the top level of a module defines."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
    else:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from scopes(child)


def looks_down(source: str) -> list[str]:
    """Every function or class that uses a name of the module which a later section defines, as a sentence."""
    section = Sections(source)
    home: dict[str, int] = {}
    for statement in ast.parse(source).body:
        for name in defined_names(statement):
            home.setdefault(name, section(statement.lineno))
    found = []
    for scope in scopes(symtable.symtable(source, "kindly_search.py", "exec")):
        here = section(scope.get_lineno())
        names = sorted(s.get_name() for s in scope.get_symbols() if s.is_global() and s.is_referenced())
        found += [
            f"line {scope.get_lineno()}: {scope.get_name()} in section {here} uses {name} of section {home[name]}"
            for name in names
            if home.get(name, 0) > here
        ]
    return found


def test_the_contents_in_the_docstring_are_the_banners_in_the_same_order() -> None:
    assert CONTENTS_LINE.findall(kindly_search.__doc__ or "") == banners()


def test_the_sections_are_numbered_without_a_gap() -> None:
    assert [int(number) for number, _ in banners()] == list(range(1, 15))


def test_no_section_uses_what_a_later_section_defines() -> None:
    assert looks_down(SOURCE) == []


def test_the_check_for_looking_down_would_notice() -> None:
    line = SOURCE.count("\n", 0, SOURCE.index("def flag(")) + 1
    spoiled = SOURCE.replace("def flag(text: str) -> bool:\n", "def flag(text: str) -> bool:\n    build_server(text)\n")

    assert looks_down(spoiled) == [f"line {line}: flag in section 1 uses build_server of section 13"]


@every_module
def test_functions_are_short(path: Path) -> None:
    functions = {
        f"{node.name} (line {node.lineno})": node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    }
    lengths = sorted(functions.values())

    assert {name: length for name, length in functions.items() if length > 60} == {}
    assert statistics.median(lengths) <= 8
    assert lengths[int(0.9 * len(lengths))] <= 25


def test_what_a_star_import_brings_is_what_all_says() -> None:
    namespace: dict[str, object] = {}
    exec("from kindly_search import *", namespace)
    namespace.pop("__builtins__")

    assert set(namespace) == set(kindly_search.__all__)
    assert {"Kindly", "SearchError", "SearchResult", "html_to_markdown", "main"} <= set(namespace)
    assert list(kindly_search.__all__) == sorted(set(kindly_search.__all__))


def test_all_exports_only_what_is_defined_here() -> None:
    here = {name for statement in ast.parse(SOURCE).body for name in defined_names(statement)}
    imported = {
        name
        for statement in ast.parse(SOURCE).body
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for name in defined_names(statement)
    }

    assert set(kindly_search.__all__) <= here - imported


@every_module
@pytest.mark.parametrize("mark", ["TODO", "FIXME", "XXX"])
def test_nothing_is_left_for_later(path: Path, mark: str) -> None:
    assert re.findall(rf".*\b{mark}\b.*", path.read_text(encoding="utf-8")) == []


@every_module
def test_no_path_below_tmp_is_written_down(path: Path) -> None:
    assert re.findall(r".*/tmp\b.*", path.read_text(encoding="utf-8")) == []


def test_annotations_are_evaluated_because_the_mcp_sdk_reads_them() -> None:
    futures = [
        node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]

    assert futures == []


def test_only_the_server_and_the_demo_import_mcp_and_pydantic() -> None:
    found = {
        section_of(node.lineno)
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name.partition(".")[0] in ("mcp", "pydantic")
    }

    assert found <= {0, 13, 14}, "section 0 may do so for type checking only"


def test_only_from_env_reads_the_environment() -> None:
    """os.environ is read where a Kindly is made, and in the command line for what it hands to child processes."""
    nodes = list(ast.walk(ast.parse(SOURCE)))
    written = {id(node.value) for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)}
    lines = {
        section_of(node.lineno)
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and id(node) not in written
    }

    assert lines <= {12, 14}
