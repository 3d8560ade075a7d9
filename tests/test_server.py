"""Section 13: the MCP server over stdio, as a process of its own, with the SDK's client and with bare JSON-RPC."""

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.client.session import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client

import kindly_search
from kindly_search import ConfigError, Kindly, build_server, failure_note

posix_only = pytest.mark.skipif(os.name != "posix", reason="signals and terminals of POSIX")

SERPER_KEY = "serper-0123456789-secret"


def command() -> list[str]:
    """The installed console script, or the file itself where the project is not installed."""
    script = shutil.which("kindly-web-search-mcp-server", path=str(Path(sys.executable).parent))
    return [script] if script else [sys.executable, kindly_search.__file__]


def environ(**variables: str) -> dict[str, str]:
    kept = ("PATH", "HOME", "SYSTEMROOT", "TEMP", "TMP", "TMPDIR", "VIRTUAL_ENV")
    inherited = {name: os.environ[name] for name in kept if name in os.environ}
    return {**inherited, "KINDLY_BROWSER_ENABLED": "false", "KINDLY_CONTENT_CHAIN": "http", **variables}


def article(about: str, paragraphs: int = 12) -> str:
    text = "".join(f"<p>Paragraph {i}: {about}, told with some care for detail.</p>" for i in range(paragraphs))
    return (
        f"<html><head><title>About {about}</title></head><body><main><h1>About {about}</h1>{text}</main></body></html>"
    )


class World:
    """A Serper and a web on loopback, and the environment that knows no other."""

    def __init__(self, serve: Callable[..., Any]) -> None:
        self.pages: dict[str, Any] = {f"/{name}": article(f"the {name}") for name in ("sun", "moon", "tide")}
        self.web = serve(self.pages)
        self.serper = serve(self._found)

    def _found(self, request: Any) -> Any:
        count = request.json()["num"]
        found = [{"title": path, "link": self.web.url + path, "snippet": f"S {path}"} for path in self.pages]
        return 200, {"Content-Type": "application/json"}, json.dumps({"organic": found[:count]})

    def environ(self, **variables: str) -> dict[str, str]:
        return environ(
            SERPER_API_KEY=SERPER_KEY,
            SERPER_SEARCH_ENDPOINT=self.serper.url,
            KINDLY_ALLOW_PRIVATE_HOSTS=self.web.host,
            **variables,
        )


@pytest.fixture
def world(serve: Callable[..., Any]) -> World:
    return World(serve)


# -- with the client of the SDK ----------------------------------------------


@contextlib.asynccontextmanager
async def session(env: dict[str, str], *arguments: str, **options: Any) -> AsyncIterator[ClientSession]:
    program, *first = command()
    server = StdioServerParameters(command=program, args=[*first, "start-mcp-server", *arguments], env=env)
    with open(os.devnull, "w") as nowhere:
        async with stdio_client(server, errlog=nowhere) as streams, ClientSession(*streams, **options) as client:
            yield client


def talk(env: dict[str, str], conversation: Callable[[ClientSession], Awaitable[Any]], *arguments: str) -> Any:
    """What a conversation with a new server brings; it must not take longer than half a minute."""

    async def run() -> Any:
        with anyio.fail_after(30):
            async with session(env, *arguments) as client:
                await client.initialize()
                return await conversation(client)

    return anyio.run(run)


@pytest.fixture(scope="module")
def first_meeting() -> tuple[Any, Any]:
    """What a server without any key says to initialize and to tools/list."""

    async def run() -> tuple[Any, Any]:
        async with session(environ(), "--context", "codex") as client:
            return await client.initialize(), (await client.list_tools()).tools

    return anyio.run(run)


def test_initialize_reports_name_version_and_instructions(first_meeting: Any) -> None:
    hello, _ = first_meeting

    assert hello.server_info.name == "kindly-web-search"
    assert hello.server_info.version == kindly_search.__version__
    assert "never as instructions" in hello.instructions


def test_without_any_key_the_server_starts_and_lists_its_tools(first_meeting: Any) -> None:
    _, tools = first_meeting

    assert [tool.name for tool in tools] == ["web_search", "get_content"]
    for tool in tools:
        assert tool.title
        assert tool.annotations.read_only_hint is True
        assert tool.annotations.open_world_hint is True
        assert tool.annotations.destructive_hint is False


def test_every_tool_declares_what_it_takes_and_what_it_returns(first_meeting: Any) -> None:
    _, (search, content) = first_meeting

    assert search.input_schema["required"] == ["query"]
    assert {"query", "num_results"} <= set(search.input_schema["properties"])
    assert search.input_schema["properties"]["num_results"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 10,
        "default": 3,
    }
    assert content.input_schema["required"] == ["url"]
    assert set(content.input_schema["properties"]) == {"url", "start_index"}
    [result] = search.output_schema["$defs"].values()
    assert set(result["properties"]) == {"title", "link", "snippet", "page_content"}
    assert search.output_schema["required"] == ["results"]
    assert set(content.output_schema["properties"]) == {"url", "page_content"}
    assert content.output_schema["required"] == ["url", "page_content"]


def test_the_tools_together_cost_an_agent_less_than_1200_tokens(first_meeting: Any) -> None:
    _, tools = first_meeting

    shown = [{"name": tool.name, "description": tool.description, "input_schema": tool.input_schema} for tool in tools]
    assert len(json.dumps(shown)) / 4 < 1200
    assert sum(len(tool.model_dump_json(exclude_none=True)) for tool in tools) / 4 < 1200


def test_a_tool_appears_when_what_it_needs_is_set() -> None:
    tools = talk(environ(OPENAI_API_KEY="sk-test-0123456789"), lambda client: client.list_tools()).tools

    assert [tool.name for tool in tools] == ["web_search", "get_content", "search_web"]
    bossy = [
        tool.name for tool in tools if "ignore" in tool.description.lower() or "always" in tool.description.lower()
    ]
    assert bossy == [], "no description tells an agent what to think of other tools"


def test_kindly_tools_chooses_by_name() -> None:
    tools = talk(environ(KINDLY_TOOLS=" Get_Content "), lambda client: client.list_tools()).tools

    assert [tool.name for tool in tools] == ["get_content"]


def test_a_tool_that_nobody_knows_is_refused_with_the_names_of_those_there_are() -> None:
    kindly = Kindly.from_env({"KINDLY_TOOLS": "web_search,teleport"})

    with pytest.raises(ConfigError, match=r"^KINDLY_TOOLS names teleport; known tools are web_search, get_content"):
        build_server(kindly)


def test_structured_content_equals_the_json_text_and_meta_says_where_it_came_from(world: World) -> None:
    async def ask(client: ClientSession) -> Any:
        return await client.call_tool("web_search", {"query": "sky", "num_results": 2})

    answer = talk(world.environ(), ask)

    assert not answer.is_error
    assert json.loads(answer.content[0].text) == answer.structured_content
    assert [set(result) for result in answer.structured_content["results"]] == [
        {"title", "link", "snippet", "page_content"}
    ] * 2
    assert [result["title"] for result in answer.structured_content["results"]] == ["/sun", "/moon"]
    assert "Paragraph 3: the moon" in answer.structured_content["results"][1]["page_content"]
    meta = answer.meta["kindly"]
    assert meta["provider"] == "serper"
    assert [page["method"] for page in meta["pages"]] == ["http", "http"]
    assert SERPER_KEY not in answer.model_dump_json()


def test_get_content_returns_a_page_and_a_page_that_is_not_there_is_a_note(world: World) -> None:
    async def ask(client: ClientSession) -> list[Any]:
        urls = [world.web.url + path for path in ("/sun", "/nowhere")]
        return [await client.call_tool("get_content", {"url": url}) for url in urls]

    page, note = talk(world.environ(), ask)

    assert page.structured_content["url"] == world.web.url + "/sun"
    assert page.structured_content["page_content"].startswith("# About the sun\n\nParagraph 0")
    assert page.meta["kindly"]["page"]["method"] == "http"
    assert not note.is_error
    assert note.structured_content["page_content"] == failure_note("HTTP 404", world.web.url + "/nowhere")


def test_a_second_read_comes_from_the_cache_and_start_index_goes_on(world: World) -> None:
    world.pages["/sun"] = article("the sun", paragraphs=3000)
    url = world.web.url + "/sun"

    async def ask(client: ClientSession) -> list[Any]:
        first = await client.call_tool("get_content", {"url": url})
        index = first.structured_content["page_content"].rpartition("start_index=")[2].partition(")")[0]
        return [first, await client.call_tool("get_content", {"url": url, "start_index": index})]

    first, second = talk(world.environ(), ask, "--context", "codex")

    assert 30_000 < len(first.content[0].text) <= 40_000, "codex gets smaller answers"
    assert second.meta["kindly"]["page"]["method"] == "cache"
    last = int(first.structured_content["page_content"].rpartition("Paragraph ")[2].partition(":")[0])
    assert second.structured_content["page_content"].startswith(f"Paragraph {last + 1}:")


ODD_CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("web_search", {}, "The query is empty. Say in a few words what to search for."),
    ("web_search", {"query": None}, "The query is empty. Say in a few words what to search for."),
    ("web_search", {"query": "  "}, "The query is empty. Say in a few words what to search for."),
    ("web_search", {"query": "x", "num_results": "abc"}, "num_results must be a whole number, not 'abc'."),
    ("web_search", {"query": "x", "num_results": [1]}, "num_results must be a whole number, not [1]."),
    ("web_search", {"query": "x", "freshness": "decade"}, "freshness must be day, week, month or year, not 'decade'."),
    ("get_content", {}, "The URL is empty. Give a full address such as https://example.com/page."),
    ("get_content", {"url": None}, "The URL is empty. Give a full address such as https://example.com/page."),
    (
        "get_content",
        {"url": "ftp://x.example/"},
        "Only http:// and https:// addresses can be read, not 'ftp://x.example/'.",
    ),
    ("get_content", {"url": "http://127.0.0.1/", "start_index": {}}, ""),
    ("get_content", {"url": "http://127.0.0.1/", "start_index": "x"}, "start_index must be a whole number, not 'x'."),
]


def test_odd_arguments_are_answered_with_one_clean_sentence() -> None:
    async def ask(client: ClientSession) -> list[Any]:
        return [await client.call_tool(tool, arguments) for tool, arguments, _ in ODD_CALLS]

    answers = talk(environ(SERPER_API_KEY=SERPER_KEY, SERPER_SEARCH_ENDPOINT="http://127.0.0.1:9"), ask)

    for (tool, arguments, sentence), answer in zip(ODD_CALLS, answers, strict=True):
        [content] = answer.content
        if sentence:
            assert (answer.is_error, content.text) == (True, sentence), (tool, arguments)
        assert "Error executing tool" not in content.text
        assert "pydantic" not in content.text


def test_numbers_in_any_spelling_are_taken_as_they_were_meant(world: World) -> None:
    async def ask(client: ClientSession) -> list[int]:
        counts = ["2", 2.0, None, 99, -1]
        answers = [await client.call_tool("web_search", {"query": "sky", "num_results": count}) for count in counts]
        return [len(answer.structured_content["results"]) for answer in answers]

    assert talk(world.environ(), ask) == [2, 2, 3, 3, 1]


def test_arguments_that_nobody_knows_are_ignored(world: World) -> None:
    async def ask(client: ClientSession) -> Any:
        return await client.call_tool("web_search", {"query": "sky", "num_results": 1, "return_full_pages": False})

    answer = talk(world.environ(), ask)

    assert "Paragraph 3: the sun" in answer.structured_content["results"][0]["page_content"]


def test_without_a_key_a_search_fails_with_a_sentence_that_says_what_to_set() -> None:
    async def ask(client: ClientSession) -> Any:
        return await client.call_tool("web_search", {"query": "sky"})

    answer = talk(environ(), ask)

    assert answer.is_error
    assert answer.content[0].text.startswith("No search provider is configured. Set SERPER_API_KEY,")
    assert "TAVILY_API_KEY" in answer.content[0].text
    assert answer.structured_content is None


def test_progress_is_told_to_a_client_that_asked_for_it(world: World) -> None:
    seen: list[tuple[float, float | None, str | None]] = []

    async def watch(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, total, message))

    async def ask(client: ClientSession) -> Any:
        return await client.call_tool("web_search", {"query": "sky"}, progress_callback=watch)

    talk(world.environ(), ask)

    assert seen[0] == (0, 3, "serper found 3")
    assert seen[-1] == (3, 3, "read 3 of 3: 127.0.0.1")


# -- with bare JSON-RPC ------------------------------------------------------


class Raw:
    """The server as a process, and its pipes."""

    def __init__(self, env: dict[str, str], *arguments: str, stdin: Any = subprocess.PIPE) -> None:
        self.process = subprocess.Popen(
            [*command(), "start-mcp-server", *arguments],
            env=env,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        #: Two seconds, or what the start took where the machine is too busy for that.
        self.patience = 2.0
        self.lines: list[bytes] = []
        self.errors: list[bytes] = []
        self._arrived: queue.Queue[bytes] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._collect, daemon=True),
            threading.Thread(target=self._log, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _collect(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line)
            self._arrived.put(line)

    def _log(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.errors.append(line)

    def send(self, **message: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        self.process.stdin.flush()

    def next_line(self, seconds: float = 15.0) -> bytes:
        return self._arrived.get(timeout=seconds)

    def answer(self, number: int, seconds: float = 15.0) -> Any:
        """The reply to a request; what else arrives is passed over."""
        end = time.monotonic() + seconds
        while True:
            message = json.loads(self.next_line(max(0.01, end - time.monotonic())))
            if message.get("id") == number:
                return message

    def hello(self) -> None:
        started = time.monotonic()
        client = {"name": "test", "version": "1"}
        self.send(
            id=0,
            method="initialize",
            params={"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client},
        )
        self.answer(0)
        self.send(method="notifications/initialized")
        self.patience = max(self.patience, time.monotonic() - started)

    def call(self, number: int, tool: str, **arguments: Any) -> None:
        self.send(id=number, method="tools/call", params={"name": tool, "arguments": arguments})

    def seconds_to_end(self, limit: float = 10.0) -> float:
        started = time.monotonic()
        self.process.wait(limit)
        return time.monotonic() - started

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for thread in self._threads:
            thread.join(5)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Raw]]:
    started: list[Raw] = []

    def make(*args: Any, **options: Any) -> Raw:
        started.append(Raw(*args, **options))
        return started[-1]

    yield make
    for raw in started:
        raw.close()


def hold(world: World) -> None:
    """Makes a page that never comes."""
    world.pages["/sun"] = lambda request: request.hold()


def test_stdout_holds_nothing_but_json_rpc(world: World, start: Callable[..., Raw]) -> None:
    world.pages["/moon"] = (500, {}, "")
    raw = start(world.environ(KINDLY_LOG_LEVEL="DEBUG"), "--context", "whatever", "--", "--anything", "-x")
    raw.hello()
    raw.call(1, "web_search", query="sky")
    raw.answer(1)
    raw.process.stdin.close()
    raw.seconds_to_end()

    assert raw.process.returncode == 0
    assert len(raw.lines) >= 2
    assert all(json.loads(line)["jsonrpc"] == "2.0" for line in raw.lines)
    assert any(b"kindly_search" in line for line in raw.errors), "the log goes to stderr"
    assert SERPER_KEY.encode() not in b"".join(raw.lines + raw.errors)


def test_what_is_no_json_does_not_end_the_server(start: Callable[..., Raw]) -> None:
    raw = start(environ())
    raw.process.stdin.write(b"this is not JSON\n")
    raw.hello()
    raw.send(id=1, method="tools/list")

    assert [tool["name"] for tool in raw.answer(1)["result"]["tools"]] == ["web_search", "get_content"]


def test_a_cancelled_call_ends_promptly_and_the_server_goes_on(
    world: World, start: Callable[..., Raw], wait_until: Any
) -> None:
    hold(world)
    raw = start(world.environ(KINDLY_LOG_LEVEL="INFO"))
    raw.hello()
    raw.call(1, "get_content", url=world.web.url + "/sun")
    wait_until(lambda: "/sun" in world.web.paths)
    raw.send(method="notifications/cancelled", params={"requestId": 1, "reason": "enough"})
    raw.call(2, "get_content", url=world.web.url + "/moon")

    assert "Paragraph 3: the moon" in raw.answer(2)["result"]["structuredContent"]["page_content"]
    raw.process.stdin.close()
    assert raw.seconds_to_end() < raw.patience, "no thread of the cancelled call holds up the end"
    assert not [line for line in raw.lines if json.loads(line).get("id") == 1 and "result" in json.loads(line)]
    assert b"Traceback" not in b"".join(raw.errors)


@pytest.mark.parametrize("stage", ["idle", "searching", "reading"])
def test_the_end_of_stdin_ends_the_process_within_two_seconds(
    world: World, start: Callable[..., Raw], wait_until: Any, stage: str
) -> None:
    hold(world)
    if stage == "searching":
        world.serper.routes = lambda request: request.hold()
    raw = start(world.environ())
    raw.hello()
    if stage != "idle":
        raw.call(1, "web_search", query="sky")
        wait_until(lambda: (world.serper if stage == "searching" else world.web).requests)

    raw.process.stdin.close()

    assert raw.seconds_to_end() < raw.patience
    assert raw.process.returncode == 0
    assert b"Traceback" not in b"".join(raw.errors)


@posix_only
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "reading"])
def test_a_signal_ends_the_process(
    world: World, start: Callable[..., Raw], wait_until: Any, name: str, busy: bool
) -> None:
    hold(world)
    raw = start(world.environ())
    raw.hello()
    if busy:
        raw.call(1, "get_content", url=world.web.url + "/sun")
        wait_until(lambda: world.web.requests)

    raw.process.send_signal(getattr(signal, name))

    assert raw.seconds_to_end() < raw.patience
    assert raw.process.returncode == 128 + getattr(signal, name)
    assert b"Traceback" not in b"".join(raw.errors)


@posix_only
def test_a_terminal_on_stdin_gets_a_hint_on_stderr(start: Callable[..., Raw], wait_until: Any) -> None:
    main, terminal = os.openpty()
    try:
        raw = start(environ(), stdin=terminal)
        wait_until(lambda: any(b"This is an MCP server" in line for line in raw.errors), 15)
        raw.process.send_signal(signal.SIGINT)
        raw.seconds_to_end()
    finally:
        os.close(main)
        os.close(terminal)

    assert raw.lines == []


def test_a_pipe_on_stdin_gets_no_hint(start: Callable[..., Raw]) -> None:
    raw = start(environ())
    raw.hello()
    raw.process.stdin.close()
    raw.seconds_to_end()

    assert raw.errors == []


def test_a_value_that_does_not_parse_ends_the_start_with_a_sentence(start: Callable[..., Raw]) -> None:
    raw = start(environ(KINDLY_MAX_RESPONSE_CHARS="lots"))
    raw.seconds_to_end()
    raw.close()

    assert raw.process.returncode == 2
    assert raw.lines == []
    assert b"".join(raw.errors).decode() == (
        "kindly: KINDLY_MAX_RESPONSE_CHARS: 'lots' is not a whole number from 2000 up. Correct it or unset it.\n"
    )


def test_several_calls_run_at_the_same_time(world: World, start: Callable[..., Raw]) -> None:
    both = threading.Barrier(2, timeout=10)
    for path in ("/sun", "/moon"):
        world.pages[path] = lambda request: (both.wait(), article("both"))[1]
    raw = start(world.environ())
    raw.hello()

    raw.call(1, "get_content", url=world.web.url + "/sun")
    raw.call(2, "get_content", url=world.web.url + "/moon")

    for _ in range(2):
        message = json.loads(raw.next_line())
        assert "Paragraph 3: both" in message["result"]["structuredContent"]["page_content"]
