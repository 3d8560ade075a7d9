"""What is shipped: the wheel, and the single file that others copy into their own tree."""

import email
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kindly_search

ROOT = Path(kindly_search.__file__).parent

#: What the vendored file may rely on: requests, html5lib and what these two need themselves.
VENDORED = ("requests", "urllib3", "certifi", "idna", "charset_normalizer", "html5lib", "six", "webencodings")

#: What must not be loaded by the import alone: most of it is slow, some of it may be absent.
LATE = (
    "mcp",
    "pydantic",
    "anyio",
    "pychrome",
    "websocket",
    "pypdf",
    "prometheus_client",
    "requests",
    "html5lib",
)


# -- the wheel ---------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    [path] = out.glob("*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    [member] = [member for member in wheel.namelist() if member.endswith(f".dist-info/{name}")]
    return wheel.read(member).decode()


def test_the_wheel_holds_exactly_the_two_modules(wheel: zipfile.ZipFile) -> None:
    modules = [name for name in wheel.namelist() if ".dist-info/" not in name]

    assert sorted(modules) == ["chrome_worker.py", "kindly_search.py"]
    assert wheel.read("kindly_search.py") == (ROOT / "kindly_search.py").read_bytes()


def test_the_metadata_says_name_version_python_and_licence(wheel: zipfile.ZipFile) -> None:
    said = email.message_from_string(metadata(wheel, "METADATA"))

    assert said["Name"] == "kindly-web-search-mcp-server"
    assert said["Version"] == kindly_search.__version__
    assert said["Requires-Python"] == ">=3.10"
    assert said["License-Expression"] == "MIT"
    assert said["License-File"] == "LICENSE"
    assert "MIT License" in metadata(wheel, "licenses/LICENSE")


def test_the_wheel_needs_these_packages_and_no_others(wheel: zipfile.ZipFile) -> None:
    said = email.message_from_string(metadata(wheel, "METADATA"))
    needed = {re.split(r"[^\w-]", line)[0] for line in said.get_all("Requires-Dist") if "extra ==" not in line}

    assert needed == {"mcp", "requests", "html5lib", "pychrome", "websocket-client", "pypdf", "prometheus-client"}
    assert [line for line in said.get_all("Requires-Dist") if line.startswith("mcp")] == ["mcp<3,>=2.1"]


def test_both_console_scripts_lead_to_main(wheel: zipfile.ZipFile) -> None:
    lines = metadata(wheel, "entry_points.txt").split("\n")

    assert lines[0] == "[console_scripts]"
    assert sorted(filter(None, lines[1:])) == [
        "kindly-search = kindly_search:main",
        "kindly-web-search-mcp-server = kindly_search:main",
    ]
    assert callable(kindly_search.main)


# -- the single file ---------------------------------------------------------


@pytest.fixture(scope="module")
def bare_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages that holds requests and html5lib, and really nothing else."""
    folder = tmp_path_factory.mktemp("packages")
    for name in VENDORED:
        spec = importlib.util.find_spec(name)
        assert spec, name
        assert spec.origin, name
        origin = Path(spec.origin)
        if origin.name == "__init__.py":
            shutil.copytree(origin.parent, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            for compiled in origin.parent.parent.glob("*__mypyc*"):
                shutil.copy(compiled, folder)
        else:
            shutil.copy(origin, folder)
    return folder


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def alone(bare_packages: Path, tmp_path: Path) -> Run:
    """Runs Python beside a lone copy of the module, with no package but those of `bare_packages`, or with none."""
    shutil.copy(ROOT / "kindly_search.py", tmp_path)

    def run(code: str, *arguments: str, packages: bool = True, **variables: str) -> "subprocess.CompletedProcess[str]":
        path = [str(tmp_path), *([str(bare_packages)] if packages else [])]
        # -S: no site-packages; -I: no PYTHONPATH and nothing from the current folder.
        program = [sys.executable, "-I", "-S", "-W", "error", "-c", f"import sys; sys.path += {path!r}\n{code}"]
        return subprocess.run(
            [*program, *arguments], env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
        )

    return run


def output(done: "subprocess.CompletedProcess[str]") -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_module_imports_without_any_package_at_all(alone: Run) -> None:
    done = alone("import kindly_search, json; print(json.dumps(kindly_search.__version__))", packages=False)

    assert output(done) == kindly_search.__version__


def test_importing_the_module_loads_no_package() -> None:
    code = f"import sys, json, kindly_search; print(json.dumps([name for name in {LATE!r} if name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )

    assert output(done) == []


def test_the_lone_file_converts_html(alone: Run) -> None:
    html = "<main><h1>Title</h1><p>Some <b>bold</b> text.</p><pre><code class=language-c>int  x;</code></pre></main>"

    done = alone(f"import json, kindly_search; print(json.dumps(kindly_search.html_to_markdown({html!r})))")

    assert output(done) == "# Title\n\nSome **bold** text.\n\n```c\nint  x;\n```"


ARTICLE = "<title>The tide</title><main><h1>The tide</h1>" + "<p>The moon pulls the sea, and the sea follows.</p>" * 30

READ = """
import json
from kindly_search import Kindly
with Kindly.from_env() as kindly:
    report = kindly.get_content(sys.argv[1])
print(json.dumps([report.page_content, report.failure, report.meta["page"]["method"]]))
"""


def test_the_lone_file_reads_a_page(alone: Run, serve: Any) -> None:
    site = serve({"/": ARTICLE})

    content, failure, method = output(alone(READ, site.url + "/", KINDLY_ALLOW_PRIVATE_HOSTS=site.host))

    assert (failure, method) == ("", "http")
    assert content.startswith("# The tide\n\nThe moon pulls the sea, and the sea follows.\n\n")


def test_the_lone_file_searches_and_reads(alone: Run, serve: Any) -> None:
    site = serve({"/": ARTICLE})
    found = json.dumps({"organic": [{"title": "T", "link": site.url + "/", "snippet": "S"}]})
    serper = serve(lambda request: (200, {"Content-Type": "application/json"}, found))
    code = """
import json
from kindly_search import Kindly
with Kindly.from_env() as kindly:
    print(json.dumps(kindly.web_search("tide").as_dict()))
"""
    variables = {"SERPER_API_KEY": "some-key", "SERPER_SEARCH_ENDPOINT": serper.url, "KINDLY_ALLOW_PRIVATE_HOSTS": "*"}

    [result] = output(alone(code, **variables))["results"]

    assert (result["title"], result["snippet"]) == ("T", "S")
    assert result["page_content"].startswith("# The tide\n\nThe moon pulls the sea")


def test_without_the_browser_worker_beside_it_a_javascript_page_says_what_is_missing(alone: Run, serve: Any) -> None:
    shell = "<title>App</title><div id=app></div><noscript>You need to enable JavaScript.</noscript><script src=a.js></script>"
    site = serve({"/": shell})

    _, failure, _ = output(alone(READ, site.url + "/", KINDLY_ALLOW_PRIVATE_HOSTS=site.host))

    assert failure == "needs JavaScript and no browser was found"


def test_with_the_worker_but_without_pychrome_the_browser_is_off_with_a_sentence(alone: Run, tmp_path: Path) -> None:
    shutil.copy(ROOT / "chrome_worker.py", tmp_path)
    code = "import json, kindly_search as k; print(json.dumps(k.Browser(environ={}).problem()))"

    assert output(alone(code)) == "The browser is off: the Python package pychrome is not installed."


def test_without_pypdf_a_pdf_says_what_is_missing(alone: Run, serve: Any) -> None:
    site = serve({"/": (200, {"Content-Type": "application/pdf"}, b"%PDF-1.4 and so on")})

    _, failure, _ = output(alone(READ, site.url + "/", KINDLY_ALLOW_PRIVATE_HOSTS=site.host))

    assert failure == "a PDF, and the pypdf package is not installed"


@pytest.mark.parametrize("arguments", [["start-mcp-server"], ["demo"], ["start-mcp-server", "--http"]])
def test_without_mcp_the_server_says_what_to_install(alone: Run, arguments: list[str]) -> None:
    done = alone("import kindly_search; kindly_search.main()", *arguments)

    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"kindly: .* needs? the packages? .*pip install .*\.\n", done.stderr), done.stderr


def test_the_command_line_works_from_the_lone_file(alone: Run, serve: Any) -> None:
    site = serve({"/": ARTICLE})

    done = alone(
        "import kindly_search; kindly_search.main()",
        "get-content",
        site.url + "/",
        KINDLY_ALLOW_PRIVATE_HOSTS=site.host,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# The tide\n\n")
