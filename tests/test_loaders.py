"""The site loaders: what they ask of each API, and what they make of the answers."""

import base64
import contextlib
import html
import json
import os
import random
import threading
from urllib.parse import parse_qs, urlsplit

import pytest
import responses

import kindly_search as ks

PYTHON = 'def f(xs: List[T]) -> "Map<K, V>":\n    if xs:\n\treturn `xs`  # tab, then two spaces\n\n    return {"a": 1}'
YAML = 'on:\n  push:\n    branches: [main]\nrun: |\n  echo "a & b" > out.txt  \n  test 1 -lt 2'
MAKEFILE = "all: a.o\n\t$(CC) -o $@ $<\n\n.PHONY: clean\nclean:\n\t@rm -f *.o `ls *.tmp`"
GENERIC = "List<String> xs = new ArrayList<>();\nif (a < b && c > d) { x = y&lt; }"
FENCED = "```\nnot the end\n```"
CODES = [PYTHON, YAML, MAKEFILE, GENERIC, FENCED]


@pytest.fixture
def web():
    with responses.RequestsMock(assert_all_requests_are_fired=False) as mock:
        yield mock


@pytest.fixture
def http():
    return ks.Http(sleep=lambda seconds: None)


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.time = 1000.0
        self.slept = []

    def __call__(self):
        return self.time

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.time += seconds


@pytest.fixture
def clock():
    return Clock()


def read(loader, http, url, seconds=30.0):
    assert loader.matches(url), url
    page = loader.load(http, url, deadline=ks.Deadline(seconds))
    assert page.url == url
    assert page.method == loader.name
    assert not page.failure
    return page.markdown


def in_order(text, *parts):
    """Asserts that the parts stand in the text in this order."""
    places = [text.find(part) for part in parts]
    assert -1 not in places, [part for part, place in zip(parts, places, strict=True) if place < 0]
    assert places == sorted(places), dict(zip(parts, places, strict=True))


def pre(code):
    return f"<pre><code>{html.escape(code, quote=False)}\n</code></pre>"


def fenced(code):
    ticks = "````" if "```" in code else "```"
    return f"{ticks}\n{code}\n{ticks}"


# -- which pages are whose


@pytest.mark.parametrize(
    ("loader", "url"),
    [
        (ks.StackExchange, "https://stackoverflow.com/questions/12"),
        (ks.StackExchange, "https://stackoverflow.com/questions/12/some-slug/34?r=1#34"),
        (ks.StackExchange, "http://www.stackoverflow.com/q/12/777"),
        (ks.StackExchange, "https://pt.stackoverflow.com/a/34"),
        (ks.StackExchange, "https://meta.stackoverflow.com/questions/12/x"),
        (ks.StackExchange, "https://superuser.com/a/34/777"),
        (ks.StackExchange, "https://unix.stackexchange.com/questions/12"),
        (ks.StackExchange, "https://unix.meta.stackexchange.com/questions/12"),
        (ks.StackExchange, "https://mathoverflow.net/questions/12"),
        (ks.GitHub, "https://github.com/o/r"),
        (ks.GitHub, "https://github.com/o/r.git"),
        (ks.GitHub, "https://github.com/o/r/tree/main"),
        (ks.GitHub, "https://github.com/o/r/issues/1#issuecomment-2"),
        (ks.GitHub, "https://github.com/o/r/pull/1/files"),
        (ks.GitHub, "https://github.com/o/r/discussions/1"),
        (ks.GitHub, "https://github.com/o/r/releases"),
        (ks.GitHub, "https://github.com/o/r/releases/tag/pkg/v1"),
        (ks.GitHub, "https://github.com/o/r/blob/main/a/b.py#L1-L2"),
        (ks.GitHub, "https://raw.githubusercontent.com/o/r/main/a.py"),
        (ks.GitHub, "https://github.com/o/r/commit/0123abc"),
        (ks.GitHub, "https://github.com/o/r/compare/v1...v2"),
        (ks.GitHub, "https://gist.github.com/someone/0123abcdef"),
        (ks.Wikipedia, "https://en.wikipedia.org/wiki/Tea"),
        (ks.Wikipedia, "https://de.m.wikipedia.org/wiki/Tee#Sorten"),
        (ks.Wikipedia, "https://fr.wiktionary.org/w/index.php?title=th%C3%A9"),
        (ks.Wikipedia, "https://en.wikibooks.org/wiki/Tea"),
        (ks.Wikipedia, "https://www.mediawiki.org/wiki/API:Main_page"),
        (ks.Wikipedia, "https://zh.wikipedia.org/zh-tw/%E8%8C%B6"),
        (ks.ArXiv, "https://arxiv.org/abs/2401.00001v2"),
        (ks.ArXiv, "http://www.arxiv.org/pdf/2401.00001.pdf"),
        (ks.ArXiv, "https://export.arxiv.org/abs/hep-th/9901001"),
        (ks.ArXiv, "https://arxiv.org/html/math.GT/0309136v1"),
        (ks.HackerNews, "https://news.ycombinator.com/item?id=1#2"),
    ],
)
def test_a_page_belongs_to_exactly_one_loader(loader, url):
    assert [cls for cls in ks.LOADERS if cls().matches(url)] == [loader]


@pytest.mark.parametrize(
    "url",
    [
        "https://other.com/questions/12",
        "https://notstackoverflow.com/questions/12",
        "https://stackoverflow.com.evil.com/questions/12",
        "https://chat.stackexchange.com/questions/12",
        "https://xx.superuser.com/questions/12",
        "https://stackoverflow.com/questions/tagged/python",
        "https://stackoverflow.com/users/12",
        "https://github.com/",
        "https://github.com/o",
        "https://github.com/features/actions",
        "https://github.com/orgs/o/discussions/1",
        "https://github.com/o/r/issues",
        "https://github.com/o/r/issues/new",
        "https://github.com/o/r/wiki/Home",
        "https://github.com/o/r/releases/download/v1/a.zip",
        "https://mygithub.com/o/r",
        "https://github.com/../user",
        "https://github.com/o/r/blob/main/../../../../user/emails",
        "https://github.com/o/r/blob/main/%2e%2e/%2E%2E/..%2F../user",
        "https://en.wikipedia.org/",
        "https://en.wikipedia.org/w/index.php?title=Tea&action=edit",
        "https://www.wikipedia.org/wiki/Tea",
        "https://wikipedia.example.org/wiki/Tea",
        "https://arxiv.org/list/cs/new",
        "https://arxiv.org/abs/nonsense",
        "https://news.ycombinator.com/user?id=pg",
        "https://news.ycombinator.com/item?id=x",
        "https://[bad",
        "",
    ],
)
def test_other_pages_are_left_to_the_content_chain(url):
    assert not [cls.name for cls in ks.LOADERS if cls().matches(url)]


def test_loaders_are_made_from_the_environment_and_hide_their_secrets():
    made = ks.from_env(ks.GitHub, {"GITHUB_TOKEN": "ghp_secret", "GITHUB_API_URL": "https://ghe.test/api/v3/"})
    assert (made.token, made.api_url) == ("ghp_secret", "https://ghe.test/api/v3")
    assert "ghp_secret" not in repr(made)
    assert "hush" not in repr(ks.from_env(ks.StackExchange, {"STACKEXCHANGE_KEY": "hush"}))
    assert ks.secrets_of(ks.StackExchange, {"STACKEXCHANGE_KEY": "hush"}) == ["hush"]
    assert [cls.name for cls in ks.LOADERS] == ["stackexchange", "github", "wikipedia", "arxiv", "hackernews"]


# -- keeping pace


def test_calls_keep_their_distance_across_threads(clock):
    pace = ks.Pace(3.0, now=clock, sleep=lambda seconds: clock.slept.append(seconds))
    for _ in range(3):
        pace.wait(ks.Deadline(60))
    assert clock.slept == [3.0, 6.0]


def test_a_wait_that_would_eat_the_deadline_is_refused_at_once(clock):
    pace = ks.Pace(now=clock, sleep=clock.sleep)
    pace.hold(20.0)
    with pytest.raises(ks.RateLimited) as caught:
        pace.wait(ks.Deadline(30))
    assert caught.value.retry_after == 20.0
    assert clock.slept == []


def test_a_pause_of_one_method_does_not_hold_up_the_others(clock):
    pace = ks.Pace(now=clock, sleep=clock.sleep)
    pace.hold(5.0, "answers")
    pace.wait(ks.Deadline(60), "questions")
    assert clock.slept == []
    pace.wait(ks.Deadline(60), "answers")
    assert clock.slept == [5.0]


# -- StackExchange

SE = "https://api.stackexchange.com/2.3"


def question(**changes):
    return {
        "question_id": 12,
        "title": "What does List&lt;String&gt; &amp; co. mean?",
        "body": "<p>I wonder about <code>List&lt;String&gt;</code>.</p>",
        "tags": ["java", "generics"],
        "score": 7,
        "answer_count": 2,
        "accepted_answer_id": 34,
        "creation_date": 1577836800,
        "last_edit_date": 1580515200,
        "link": "https://stackoverflow.com/questions/12/what",
        "owner": {"display_name": "Ann &amp; Co"},
        **changes,
    }


def answer(number, score=0, **changes):
    return {
        "answer_id": number,
        "question_id": 12,
        "score": score,
        "is_accepted": number == 34,
        "creation_date": 1577923200,
        "body": f"<p>answer {number}</p>",
        "owner": {"display_name": f"user{number}", "user_type": "registered"},
        **changes,
    }


def comment(number, post, text="a remark", **changes):
    return {
        "comment_id": number,
        "post_id": post,
        "score": 3,
        "creation_date": 1577923200,
        "body": text,
        "owner": {"display_name": "Cid"},
        **changes,
    }


def se(web, path, items, **wrapper):
    web.get(SE + path, json={"items": items, "has_more": False, "quota_remaining": 299, **wrapper})


def se_thread(web, answers, comments=(), **changes):
    se(web, "/questions/12", [question(**changes)])
    se(web, "/questions/12/answers", answers)
    ids = ";".join(["12", *(str(one["answer_id"]) for one in answers)])
    se(web, f"/posts/{ids}/comments", list(comments))


def asked(call):
    return {key: values[0] for key, values in parse_qs(urlsplit(call.request.url).query).items()}


def test_a_question_comes_with_its_answers_and_comments_in_three_requests(web, http):
    se_thread(
        web, [answer(56, 99), answer(34, 5)], [comment(1, 12, "see <a href='https://x.test/'>x</a>"), comment(2, 34)]
    )
    text = read(ks.StackExchange(), http, "https://stackoverflow.com/questions/12/what")
    assert text.startswith("# What does List<String> & co. mean?\n\n")
    in_order(
        text,
        "Question · score 7 · 2 answers · tags: java, generics",
        "**Ann & Co** · 2020-01-01, edited 2020-02-01 · https://stackoverflow.com/questions/12/what",
        "I wonder about `List<String>`.",
        "**Comments**\n\n- **Cid** · 2020-01-02 · score 3: see [x](https://x.test/)",
        "## Accepted answer · score 5",
        "**user34** · 2020-01-02 · https://stackoverflow.com/a/34",
        "- **Cid** · 2020-01-02 · score 3: a remark",
        "## Answer · score 99",
    )
    assert len(web.calls) == 3
    assert asked(web.calls[0]) == {"site": "stackoverflow", "filter": "withbody", "pagesize": "100"}
    assert asked(web.calls[1])["sort"] == "votes"


@pytest.mark.parametrize(
    ("url", "requests"),
    [
        ("https://stackoverflow.com/questions/12/what/56", 3),
        ("https://stackoverflow.com/questions/12#56", 3),
        ("https://stackoverflow.com/questions/12#answer-56", 3),
        ("https://stackoverflow.com/questions/12#comment9_56", 3),
        ("https://stackoverflow.com/a/56/777", 4),
    ],
)
def test_the_answer_that_a_link_points_at_is_named_first(web, http, url, requests):
    se_thread(web, [answer(34, 5), answer(56, 1)])
    se(web, "/answers/56", [answer(56, 1)])
    text = read(ks.StackExchange(), http, url)
    in_order(text, "the link points at the answer by user56", "## Linked answer · score 1", "## Accepted answer")
    assert len(web.calls) == requests


@pytest.mark.parametrize(
    ("host", "site"),
    [
        ("ru.stackoverflow.com", "ru.stackoverflow"),
        ("meta.superuser.com", "meta.superuser"),
        ("mathoverflow.net", "mathoverflow.net"),
        ("unix.stackexchange.com", "unix"),
        ("unix.meta.stackexchange.com", "unix.meta"),
        ("meta.unix.stackexchange.com", "unix.meta"),
        ("meta.stackexchange.com", "meta"),
    ],
)
def test_each_host_is_asked_for_under_its_own_name(web, http, host, site):
    se_thread(web, [answer(34)])
    read(ks.StackExchange(), http, f"https://{host}/questions/12")
    assert {asked(call)["site"] for call in web.calls} == {site}


def test_all_pages_of_answers_are_read_and_a_broken_one_ends_the_list(web, http):
    se(web, "/questions/12", [question(answer_count=300)])
    se(web, "/questions/12/answers", [answer(n, 1000 - n) for n in range(100, 200)], has_more=True)
    se(web, "/questions/12/answers", [answer(n, 1000 - n) for n in range(200, 300)], has_more=True)
    web.get(f"{SE}/questions/12/answers", status=500)
    se(web, "/answers/34", [answer(34, 1)])
    text = read(ks.StackExchange(), http, "https://stackoverflow.com/q/12")
    pages = [asked(call).get("page") for call in web.calls if call.request.url.startswith(f"{SE}/questions/12/answers")]
    assert pages == [None, "2", "3"]
    in_order(
        text, "## Accepted answer · score 1", "answer 100\n", "answer 299", "_99 answers with lower scores left out"
    )


def test_deleted_users_and_missing_fields_do_not_spoil_a_thread(web, http):
    se(web, "/questions/12", [{"question_id": 12, "title": "T", "owner": {"user_type": "does_not_exist"}}])
    se(web, "/questions/12/answers", [{"answer_id": 34, "owner": None}, "nonsense"])
    se(web, "/posts/12;34/comments", [{"post_id": 34, "body": "hm"}])
    text = read(ks.StackExchange(), http, "https://stackoverflow.com/q/12")
    in_order(
        text, "# T", "**deleted user**", "## Answer · score 0", "**deleted user** · https://stackoverflow.com/a/34"
    )
    assert "- **deleted user**: hm" in text


def test_a_closed_question_says_why(web, http):
    se_thread(web, [answer(34)], closed_date=1577836800, closed_reason="Needs details &amp; clarity")
    assert "closed: Needs details & clarity" in read(ks.StackExchange(), http, "https://stackoverflow.com/q/12")


def test_comments_that_fail_do_not_cost_the_answers(web, http):
    se(web, "/questions/12", [question()])
    se(web, "/questions/12/answers", [answer(34)])
    web.get(f"{SE}/posts/12;34/comments", status=500)
    assert "answer 34" in read(ks.StackExchange(), http, "https://stackoverflow.com/q/12")


def test_an_unknown_question_falls_through(web, http):
    se(web, "/questions/12", [])
    with pytest.raises(ks.SearchError, match="404"):
        read(ks.StackExchange(), http, "https://stackoverflow.com/q/12")


@pytest.mark.parametrize(
    "reply", [{"body": "<html>"}, {"json": []}, {"json": {"items": None}}, {"status": 500}, {"json": None}]
)
def test_an_answer_of_another_shape_falls_through(web, http, reply):
    web.get(f"{SE}/questions/12", **reply)
    with pytest.raises(ks.SearchError):
        read(ks.StackExchange(), http, "https://stackoverflow.com/q/12")


def test_a_backoff_is_obeyed_by_the_next_call_of_that_method(web, http, clock):
    loader = ks.StackExchange(pace=ks.Pace(now=clock, sleep=clock.sleep))
    se(web, "/questions/12", [question()], backoff=10)
    se(web, "/questions/12/answers", [answer(34)])
    se(web, "/posts/12;34/comments", [])
    read(loader, http, "https://stackoverflow.com/q/12")
    assert clock.slept == []
    read(loader, http, "https://stackoverflow.com/q/12")
    assert clock.slept == [10.0]


def test_a_throttle_message_is_obeyed_across_calls_without_asking_again(web, http, clock):
    loader = ks.StackExchange(pace=ks.Pace(now=clock, sleep=clock.sleep))
    said = "too many requests from this IP, more requests available in 67194 seconds"
    fault = {"error_id": 502, "error_name": "throttle_violation", "error_message": said}
    web.get(f"{SE}/questions/12", status=400, json=fault)
    for url in ("https://stackoverflow.com/q/12", "https://superuser.com/a/99"):
        with pytest.raises(ks.RateLimited):
            read(loader, http, url)
    assert len(web.calls) == 1
    assert clock.slept == []


def test_a_key_is_sent_and_a_refused_one_is_dropped_for_good(web, http, caplog):
    loader = ks.StackExchange(key="hush-hush")
    said = "`key` doesn't match a known application"
    web.get(
        f"{SE}/questions/12", status=400, json={"error_id": 400, "error_name": "bad_parameter", "error_message": said}
    )
    se_thread(web, [answer(34)])
    text = read(loader, http, "https://stackoverflow.com/q/12")
    assert [asked(call).get("key") for call in web.calls] == ["hush-hush", None, None, None]
    assert "hush-hush" not in text + caplog.text


# -- GitHub

GH = "https://api.github.com"
ISSUE = f"{GH}/repos/o/r/issues/1"
PAGE = "https://github.com/o/r/issues/1"


def gh_item(number=1, body="It crashes.", **changes):
    """An issue or a comment as REST sends it."""
    return {
        "id": number,
        "number": number,
        "title": "Crash on start",
        "body": body,
        "user": {"login": "ann"},
        "author_association": "NONE",
        "created_at": "2024-01-01T10:00:00Z",
        "updated_at": "2024-01-01T10:00:00Z",
        "html_url": f"{PAGE}#issuecomment-{number}",
        "reactions": {"url": "x", "total_count": 0, "+1": 0},
        **changes,
    }


def gh_issue(web, comments=(), **changes):
    issue = gh_item(html_url=PAGE, comments=len(comments), labels=[{"name": "bug"}], **changes)
    web.get(ISSUE, json=issue)
    web.get(f"{ISSUE}/comments", json=list(comments))
    return issue


def node(number=1, body="It crashes.", **changes):
    """The same as GraphQL sends it."""
    return {
        "author": {"login": "ann"},
        "authorAssociation": "NONE",
        "body": body,
        "createdAt": "2024-01-01T10:00:00Z",
        "lastEditedAt": None,
        "url": f"{PAGE}#issuecomment-{number}",
        "reactionGroups": [{"content": "THUMBS_UP", "reactors": {"totalCount": 0}}],
        **changes,
    }


def connection(nodes, total=None, cursor=None):
    return {
        "totalCount": len(nodes) if total is None else total,
        "pageInfo": {"hasNextPage": cursor is not None, "endCursor": cursor},
        "nodes": nodes,
    }


def gh_thread(web, thread, **more):
    web.post(f"{GH}/graphql", json={"data": {"repository": {"thread": thread}}, **more})


def opening(comments, **changes):
    thread = {"title": "Crash on start", "number": 1, "labels": {"nodes": [{"name": "bug"}]}, "comments": comments}
    return {**node(url=PAGE, **changes), **thread}


def sent(call):
    return json.loads(call.request.body)


def test_an_issue_is_read_with_graphql_in_one_request(web, http):
    closer = {
        "number": 9,
        "title": "Fix it",
        "url": "https://github.com/o/r/pull/9",
        "mergedAt": "2024-01-02T00:00:00Z",
    }
    gh_thread(
        web,
        opening(
            connection(
                [
                    node(
                        2,
                        "Known.",
                        author={"login": "bob"},
                        authorAssociation="OWNER",
                        reactionGroups=[{"content": "HEART", "reactors": {"totalCount": 4}}],
                    )
                ]
            ),
            closedAt="2024-01-03T00:00:00Z",
            stateReason="COMPLETED",
            timelineItems={"nodes": [{"closer": closer}]},
        ),
    )
    text = read(ks.GitHub(token="ghp_secret"), http, PAGE)
    in_order(
        text,
        "# Crash on start (#1)",
        "o/r · issue · closed 2024-01-03 as completed · labels: bug"
        " · closed by pull request #9 “Fix it” https://github.com/o/r/pull/9 · 1 comment",
        f"**ann** · 2024-01-01 · {PAGE}",
        "It crashes.",
        "## Comment",
        f"**bob** (owner) · 2024-01-01 · ❤️ 4 · {PAGE}#issuecomment-2",
        "Known.",
    )
    assert len(web.calls) == 1
    request = web.calls[0].request
    assert request.headers["Authorization"] == "Bearer ghp_secret"
    assert sent(web.calls[0])["variables"] == {"owner": "o", "name": "r", "number": 1, "after": None}
    query = sent(web.calls[0])["query"]
    assert query.count("{") == query.count("}")


def test_without_a_token_an_issue_is_read_with_rest_in_two_requests(web, http):
    gh_issue(
        web,
        [
            gh_item(
                2,
                "Known.",
                user={"login": "bob"},
                author_association="MEMBER",
                updated_at="2024-02-01T00:00:00Z",
                reactions={"heart": 4, "total_count": 4},
            )
        ],
    )
    text = read(ks.GitHub(), http, PAGE)
    in_order(
        text,
        "# Crash on start (#1)",
        "o/r · issue · open · labels: bug · 1 comment",
        "It crashes.",
        "## Comment",
        "**bob** (member) · 2024-01-01, edited 2024-02-01 · ❤️ 4",
        "Known.",
    )
    assert len(web.calls) == 2
    assert all("Authorization" not in call.request.headers for call in web.calls)
    assert all("kindly" in call.request.headers["User-Agent"] for call in web.calls)


def test_rest_names_the_merged_pull_request_behind_a_closed_issue(web, http):
    gh_issue(web, closed_at="2024-01-03T00:00:00Z", state_reason="completed")
    pull = gh_item(
        9, title="Fix it", html_url="https://github.com/o/r/pull/9", pull_request={"merged_at": "2024-01-02T00:00:00Z"}
    )
    web.get(f"{ISSUE}/timeline", json=[{"event": "labeled"}, {"event": "cross-referenced", "source": {"issue": pull}}])
    text = read(ks.GitHub(), http, PAGE)
    assert "closed 2024-01-03 as completed" in text
    assert "mentioned by the merged pull request #9 “Fix it” https://github.com/o/r/pull/9" in text
    assert len(web.calls) == 2  # no comments, so none are asked for


def test_comments_are_paged_with_cursors(web, http):
    gh_thread(web, opening(connection([node(n, f"remark {n}") for n in range(2, 102)], total=130, cursor="CUR")))
    gh_thread(web, {"comments": connection([node(n, f"remark {n}") for n in range(102, 132)], total=130)})
    text = read(ks.GitHub(token="t0ken"), http, PAGE)
    assert sent(web.calls[1])["variables"]["after"] == "CUR"
    assert len(web.calls) == 2
    assert all(f"remark {n}\n" in text + "\n" for n in range(2, 132))


def test_of_a_huge_thread_the_first_pages_and_the_last_are_read(web, http):
    def remarks(start):
        return [node(n, f"remark {n}") for n in range(start, start + 100)]

    gh_thread(web, opening(connection(remarks(100), total=2000, cursor="A")))
    for start in (200, 300, 400):
        gh_thread(web, {"comments": connection(remarks(start), total=2000, cursor="B")})
    gh_thread(web, {"comments": connection(remarks(1900), total=2000)})
    text = read(ks.GitHub(token="t0ken"), http, PAGE)
    assert len(web.calls) == 5
    assert "last:100" in sent(web.calls[4])["query"]
    assert "$after" not in sent(web.calls[4])["query"]
    assert "remark 1999" in text
    assert "_1,500 more comments not read: https://github.com/o/r/issues/1_" in text


def test_rest_reads_the_first_pages_and_the_last_too(web, http):
    web.get(ISSUE, json=gh_item(html_url=PAGE, comments=1234))
    for page in range(1, 14):
        found = [gh_item(1000 * page + n, f"remark {page}-{n}") for n in range(2)]
        web.get(
            f"{ISSUE}/comments",
            json=found,
            match=[responses.matchers.query_param_matcher({"page": str(page), "per_page": "100"})],
        )
    text = read(ks.GitHub(), http, PAGE)
    assert [asked(call).get("page") for call in web.calls[1:]] == ["1", "2", "3", "4", "13"]
    in_order(text, "remark 1-0", "remark 13-1")


def test_a_refused_token_falls_back_to_no_token_and_is_not_sent_again(web, http, caplog):
    loader = ks.GitHub(token="ghp_expired00")
    web.post(f"{GH}/graphql", status=401, json={"message": "Bad credentials"})
    gh_issue(web)
    for _ in range(2):
        assert "It crashes." in read(loader, http, PAGE)
    assert ["Authorization" in call.request.headers for call in web.calls] == [True, False, False]
    assert "ghp_expired00" not in caplog.text


def test_rest_repeats_a_request_without_a_token_that_was_refused(web, http, caplog):
    web.get(f"{GH}/repos/o/r/releases/latest", status=401, json={"message": "Bad credentials"})
    web.get(f"{GH}/repos/o/r/releases/latest", json={"tag_name": "v1", "body": "New."})
    assert "## v1" in read(ks.GitHub(token="ghp_expired00"), http, "https://github.com/o/r/releases/latest")
    assert "GITHUB_TOKEN" in caplog.text
    assert "ghp_expired00" not in caplog.text


@pytest.mark.parametrize("kind", ["NOT_FOUND", "RATE_LIMITED", "SOMETHING"])
def test_graphql_errors_inside_http_200_lead_to_rest(web, http, kind):
    web.post(f"{GH}/graphql", json={"data": {"repository": None}, "errors": [{"type": kind, "message": "no"}]})
    gh_issue(web)
    assert "It crashes." in read(ks.GitHub(token="t0ken"), http, PAGE)
    assert len(web.calls) == 2


def test_an_unknown_issue_falls_through(web, http):
    web.get(ISSUE, status=404, json={"message": "Not Found"})
    with pytest.raises(ks.PageFailed, match="404"):
        read(ks.GitHub(), http, PAGE)


@pytest.mark.parametrize("reply", [{"body": "<html>"}, {"json": []}, {"status": 500}, {"status": 403}])
def test_github_answers_of_another_shape_fall_through(web, http, reply):
    web.get(ISSUE, **reply)
    with pytest.raises(ks.SearchError):
        read(ks.GitHub(), http, PAGE)


def test_a_spent_rate_limit_is_obeyed_across_calls(web, http, clock):
    loader = ks.GitHub(pace=ks.Pace(now=clock, sleep=clock.sleep), now=lambda: 5000.0)
    headers = {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "8600"}
    web.get(ISSUE, status=403, json={"message": "API rate limit exceeded"}, headers=headers)
    for _ in range(2):
        with pytest.raises(ks.RateLimited):
            read(loader, http, PAGE)
    assert len(web.calls) == 1


def test_the_limit_of_nameless_requests_does_not_hold_up_those_with_a_token(web, http):
    latest = f"{GH}/repos/o/r/releases/latest"
    web.get(latest, status=403, json={"message": "Resource not accessible by personal access token"})
    web.get(latest, status=403, headers={"x-ratelimit-remaining": "0", "x-ratelimit-reset": "99999999999"})
    web.get(latest, json={"tag_name": "v1"})
    loader = ks.GitHub(token="t0ken")
    with pytest.raises(ks.RateLimited):
        read(loader, http, "https://github.com/o/r/releases/latest")
    assert "v1" in read(loader, http, "https://github.com/o/r/releases/latest")


def test_a_renamed_repository_is_followed_within_the_api_only(web, http):
    web.get(ISSUE, status=301, headers={"Location": f"{GH}/repositories/5/issues/1"})
    web.get(f"{GH}/repositories/5/issues/1", json=gh_item(html_url=PAGE))
    assert "It crashes." in read(ks.GitHub(), http, PAGE)
    web.replace(responses.GET, ISSUE, status=301, headers={"Location": "https://evil.test/steal"})
    with pytest.raises(ks.SearchError):
        read(ks.GitHub(token="t0ken"), http, PAGE)
    assert not [call for call in web.calls if "evil.test" in call.request.url]


def test_deleted_accounts_and_missing_fields_do_not_spoil_an_issue(web, http):
    web.get(ISSUE, json={"number": 1, "title": "T", "body": None, "user": None, "comments": 2})
    web.get(f"{ISSUE}/comments", json=[{"body": "ghost speaks", "user": None}, "nonsense", {"body": None}])
    text = read(ks.GitHub(), http, PAGE)
    in_order(text, "# T (#1)", "**deleted user**", "**deleted user**", "ghost speaks")


def test_the_comment_that_a_link_points_at_is_named_first(web, http):
    gh_issue(web, [gh_item(2, "first words"), gh_item(3, "the very words")])
    text = read(ks.GitHub(), http, f"{PAGE}#issuecomment-3")
    in_order(text, "It crashes.", "## Linked: Comment", "the very words", "first words")


def test_a_linked_comment_between_the_pages_is_fetched_by_itself(web, http):
    gh_issue(web, [gh_item(2, "first words")])
    web.get(f"{GH}/repos/o/r/issues/comments/77", json=gh_item(77, "the very words"))
    text = read(ks.GitHub(), http, f"{PAGE}#issuecomment-77")
    in_order(text, "## Linked: Comment", "the very words", "first words")
    assert len(web.calls) == 3


def long_thread():
    """120 comments: two by maintainers, one with many reactions, a closing one, many that say +1."""
    comments = []
    for n in range(100, 220):
        extra = {"created_at": f"2024-01-{1 + (n - 100) // 5:02}T{n - 100:03}"}
        text = f"comment {n} " + "words " * 150
        if n % 3 == 0:
            text = ["+1", "Same here!", "👍👍", "Any updates on this?", "me too, having the same issue"][n % 5]
        if n in (111, 177):
            extra["author_association"], text = "MEMBER", f"maintainer {n} " + "says " * 50
        if n == 150:
            extra["reactions"], text = {"+1": 40}, "popular workaround"
        comments.append(gh_item(n, text, **extra))
    return comments


def test_a_long_thread_is_distilled_and_not_beheaded(web, http):
    comments = long_thread()
    web.get(ISSUE, json=gh_item(html_url=PAGE, comments=120, closed_at="2024-01-20T099"))
    web.get(f"{ISSUE}/comments", json=comments[:100])
    web.get(f"{ISSUE}/comments", json=comments[100:])
    web.get(f"{ISSUE}/timeline", json=[])
    text = read(ks.GitHub(), http, PAGE)
    in_order(
        text,
        "It crashes.",
        "A long thread",
        "maintainer 111",
        "popular workaround",
        "maintainer 177",
        "comment 199 ",
        "comment 218 ",
    )
    in_order(text, "comment 218 ", "left out, from https://github.com/o/r/issues/1#issuecomment-")
    assert "_37 comments saying no more than “+1” or “same here” not shown._" in text
    assert "Same here!" not in text
    assert len(text) < 62_000
    left_out = sum(int(line.split()[0][1:]) for line in text.splitlines() if "left out, from" in line)
    assert text.count("\n## Comment\n") + left_out + 37 == 120


def test_a_short_thread_stays_in_order_with_only_the_seconding_folded(web, http):
    gh_issue(
        web,
        [
            gh_item(2, "one"),
            gh_item(3, "+1"),
            gh_item(4, "two", author_association="OWNER"),
            gh_item(5, "I see the same with v2"),
        ],
    )
    text = read(ks.GitHub(), http, PAGE)
    in_order(text, "one", "two", "I see the same with v2", "_1 comment saying no more than")
    assert "A long thread" not in text


@pytest.mark.parametrize(
    ("said", "folded"),
    [
        ("+1", True),
        ("👍🏻", True),
        ("Same here.", True),
        ("me too!!", True),
        ("Any update on this?", True),
        ("bump", True),
        ("I'm having the exact same problem", True),
        ("+1, using 3.12", False),
        ("Fixed in #12", False),
        ("```\n+1\n```", True),
        ("", False),
    ],
)
def test_only_comments_without_a_thought_of_their_own_are_folded(said, folded):
    assert ks._only_seconds(ks.Post(said)) is folded
    assert not ks._only_seconds(ks.Post(said, role="OWNER"))


def test_a_pull_request_shows_files_reviews_and_remarks_on_lines(web, http):
    url = "https://github.com/o/r/pull/1"
    thread = {
        "path": "src/a.py",
        "line": 12,
        "isResolved": True,
        "comments": {
            "nodes": [
                node(body="Why?", url=f"{url}#discussion_r5", diffHunk="@@ -1 +1 @@\n-old\n+new"),
                node(body="Because.", author=None),
            ]
        },
    }
    gh_thread(
        web,
        opening(
            connection([node(2, "LGTM soon", createdAt="2024-01-02T00:00:00Z")]),
            mergedAt="2024-01-05T00:00:00Z",
            mergedBy={"login": "bob"},
            changedFiles=2,
            additions=10,
            deletions=3,
            files={
                "nodes": [
                    {"path": "src/a.py", "additions": 9, "deletions": 3},
                    {"path": "b.md", "additions": 1, "deletions": 0},
                ]
            },
            reviews={
                "nodes": [
                    node(body="Nice", state="APPROVED", createdAt="2024-01-04T00:00:00Z"),
                    node(body="", state="COMMENTED"),
                ]
            },
            reviewThreads={"nodes": [thread]},
        ),
    )
    text = read(ks.GitHub(token="t0ken"), http, url)
    in_order(
        text,
        "o/r · pull request · merged 2024-01-05 by bob",
        "## Changed files · 2 (+10 −3)",
        "- src/a.py (+9 −3)",
        "## Review comment on src/a.py, line 12 · resolved",
        "```diff\n@@ -1 +1 @@\n-old\n+new\n```\n\nWhy?",
        "**1** · **deleted user**",
        "Because.",
        "LGTM soon",
        "## Review · approved",
        "Nice",
    )
    assert len(web.calls) == 1


def test_a_pull_request_without_a_token_takes_five_requests(web, http):
    web.get(ISSUE, json=gh_item(html_url=PAGE, comments=1, pull_request={"merged_at": None}, draft=True))
    web.get(f"{ISSUE}/comments", json=[gh_item(2, "hm")])
    pulls = f"{GH}/repos/o/r/pulls/1"
    web.get(f"{pulls}/files", json=[{"filename": "a.py", "additions": 2, "deletions": 1}])
    web.get(f"{pulls}/reviews", json=[gh_item(3, "", state="CHANGES_REQUESTED", submitted_at="2024-01-01T00:00:00Z")])
    remarks = [gh_item(5, "Why?", path="a.py", line=3, diff_hunk="@@\n+x"), gh_item(6, "So.", in_reply_to_id=5)]
    web.get(f"{pulls}/comments", json=remarks)
    text = read(ks.GitHub(), http, "https://github.com/o/r/pull/1/files")
    in_order(text, "pull request · draft", "- a.py (+2 −1)")
    assert "## Review · changes requested" in text
    in_order(text, "## Review comment on a.py, line 3", "Why?", "**1** · **ann**", "So.")
    assert len(web.calls) == 5


def test_a_discussion_puts_the_chosen_answer_first_with_its_replies(web, http):
    url = "https://github.com/o/r/discussions/1"
    chosen = node(3, "Do this.", isAnswer=True, upvoteCount=5, replies={"nodes": [node(4, "Thanks, works with 2.0")]})
    gh_thread(web, opening(connection([node(2, "Dunno."), chosen]), isAnswered=True, category={"name": "Q&A"}))
    text = read(ks.GitHub(token="t0ken"), http, url)
    in_order(
        text,
        "o/r · discussion · Q&A · answered",
        "It crashes.",
        "## Answer",
        "▲ 5",
        "Do this.",
        "**1** · **ann**",
        "Thanks, works with 2.0",
        "## Comment",
        "Dunno.",
    )
    assert len(web.calls) == 1


def test_a_discussion_without_a_token_falls_through_without_a_request(web, http):
    with pytest.raises(ks.SearchError, match="GITHUB_TOKEN"):
        read(ks.GitHub(), http, "https://github.com/o/r/discussions/1")
    assert len(web.calls) == 0


def test_a_release_shows_notes_and_files_and_the_list_shows_several(web, http):
    def release(tag, **more):
        return {
            "tag_name": tag,
            "name": f"Name {tag}",
            "body": f"notes {tag}",
            "author": {"login": "bob"},
            "published_at": "2024-05-06T00:00:00Z",
            "html_url": f"https://github.com/o/r/releases/tag/{tag}",
            **more,
        }

    one = release("v1", assets=[{"browser_download_url": "https://github.com/o/r/releases/download/v1/a.whl"}])
    web.get(f"{GH}/repos/o/r/releases/tags/v1", json=one)
    text = read(ks.GitHub(), http, "https://github.com/o/r/releases/tag/v1")
    in_order(
        text,
        "## Name v1 (v1)",
        "**bob** · 2024-05-06",
        "notes v1",
        "- https://github.com/o/r/releases/download/v1/a.whl",
    )
    web.get(f"{GH}/repos/o/r/releases", json=[release("v2", prerelease=True), release("v1")])
    text = read(ks.GitHub(), http, "https://github.com/o/r/releases")
    in_order(text, "## Name v2 (v2) · pre-release", "notes v2", "notes v1")


def test_a_gist_shows_every_file_and_its_comments(web, http):
    files = {
        "a.py": {"filename": "a.py", "content": PYTHON + "\n"},
        "long.txt": {
            "filename": "long.txt",
            "content": "begin",
            "truncated": True,
            "raw_url": "https://gist.githubusercontent.com/x/raw/long.txt",
        },
    }
    web.get(f"{GH}/gists/0123abcdef", json={"description": "Two files", "files": files, "owner": None, "comments": 1})
    web.get(f"{GH}/gists/0123abcdef/comments", json=[gh_item(2, "neat trick")])
    web.get("https://gist.githubusercontent.com/x/raw/long.txt", body="begin and end")
    text = read(ks.GitHub(), http, "https://gist.github.com/x/0123abcdef")
    in_order(
        text, "# Two files", "gist · 2 files", "**deleted user**", "## a.py", PYTHON, "begin and end", "neat trick"
    )
    assert len(web.calls) == 3


def test_a_repository_shows_its_readme_and_what_it_is(web, http):
    about = {
        "description": "Tools",
        "stargazers_count": 1234,
        "license": {"name": "MIT License"},
        "language": "C",
        "default_branch": "main",
        "topics": ["a", "b"],
    }
    web.get(f"{GH}/repos/o/r", json=about)
    web.get(f"{GH}/repos/o/r/readme", body="# R\n\n```make\nall:\n\tcc\n```\n")
    text = read(ks.GitHub(), http, "https://github.com/o/r")
    in_order(
        text,
        "# o/r",
        "Tools · C · MIT License · ★ 1,234 · topics: a, b",
        "https://github.com/o/r/blob/main/",
        "all:\n\tcc\n",
    )
    assert len(web.calls) == 2


def test_a_file_is_fenced_in_its_language_and_costs_no_api_request(web, http):
    web.get("https://raw.githubusercontent.com/o/r/main/src/a.py", body=PYTHON + "\n")
    text = read(ks.GitHub(token="t0ken"), http, "https://github.com/o/r/blob/main/src/a.py")
    assert text == f"# src/a.py\n\no/r at main · https://github.com/o/r/blob/main/src/a.py\n\n```python\n{PYTHON}\n```"
    assert "Authorization" not in web.calls[0].request.headers


@pytest.mark.parametrize(
    ("fragment", "first", "last"), [("L2", 2, 2), ("L2-L4", 2, 4), ("L4C1-L9C3", 4, 9), ("L9-L99", 9, 10)]
)
def test_the_lines_that_a_link_names_are_shown_alone(web, http, fragment, first, last):
    web.get("https://raw.githubusercontent.com/o/r/v1/Makefile", body="\n".join(f"\tline {n}" for n in range(1, 11)))
    text = read(ks.GitHub(), http, f"https://github.com/o/r/blob/v1/Makefile#{fragment}")
    wanted = "\n".join(f"\tline {n}" for n in range(first, last + 1))
    assert text.endswith(f"```makefile\n{wanted}\n```")
    assert f"lines {first}–{last} of 10" in text


def test_a_private_file_comes_from_the_api(web, http):
    web.get("https://raw.githubusercontent.com/o/r/main/a%20b.md", status=404)
    web.get(f"{GH}/repos/o/r/contents/a%20b.md", body="# Hello\n")
    text = read(ks.GitHub(token="t0ken"), http, "https://github.com/o/r/blob/main/a%20b.md")
    assert text.startswith("# a b.md\n")
    assert text.endswith("\n\n# Hello")
    assert asked(web.calls[1])["ref"] == "main"


def test_a_binary_file_falls_through(web, http):
    web.get("https://raw.githubusercontent.com/o/r/main/a.png", body=b"\x89PNG\x00\xff")
    with pytest.raises(ks.PageFailed):
        read(ks.GitHub(), http, "https://github.com/o/r/blob/main/a.png")


def diff_files():
    return [
        {
            "filename": "Makefile",
            "status": "modified",
            "additions": 1,
            "deletions": 1,
            "patch": "@@ -1 +1 @@\n-\t```old\n+\tnew",
        },
        {"filename": "a.png", "status": "added"},
    ]


def test_a_commit_is_shown_as_its_diff(web, http):
    commit = {
        "sha": "0123abc" + "0" * 33,
        "html_url": "https://github.com/o/r/commit/0123abc",
        "author": None,
        "commit": {"message": "Fix it\n\nBecause.", "author": {"name": "Ann", "date": "2024-01-01T00:00:00Z"}},
        "stats": {"additions": 1, "deletions": 1},
        "files": diff_files(),
    }
    web.get(f"{GH}/repos/o/r/commits/0123abc", json=commit)
    text = read(ks.GitHub(), http, "https://github.com/o/r/commit/0123abc")
    in_order(
        text,
        "# Fix it",
        "commit 0123abc00000 · +1 −1",
        "**Ann** · 2024-01-01",
        "Because.",
        "## Makefile · modified (+1 −1)",
        "````diff\n@@ -1 +1 @@\n-\t```old\n+\tnew\n````",
        "## a.png · added",
        "_No diff",
    )
    assert len(web.calls) == 1


@pytest.mark.parametrize("dots", ["..", "..."])
def test_a_comparison_lists_the_commits_and_the_diff(web, http, dots):
    one = {"sha": "abcdef0123456", "commit": {"message": "One\n\nmore", "author": {"name": "Ann"}}}
    web.get(f"{GH}/repos/o/r/compare/v1...v2", json={"total_commits": 1, "commits": [one], "files": diff_files()})
    text = read(ks.GitHub(), http, f"https://github.com/o/r/compare/v1{dots}v2")
    in_order(text, "# v1...v2", "o/r · 1 commit", "- abcdef0123 One (Ann)", "## Makefile")


# -- Wikipedia

WIKI = "https://en.wikipedia.org/w/api.php"

ARTICLE = """<div class="mw-content-ltr mw-parser-output"><style>.x{}</style>
<div role="note" class="hatnote navigation-not-searchable">For other uses, see <a href="/wiki/T">T</a>.</div>
<table class="infobox vcard"><tbody><tr><th colspan="2">Tea</th></tr><tr><th scope="row">Type</th><td>Hot<br />cold
<sup class="reference">[1]</sup></td></tr><tr><th>Colour | hue</th><td><ul><li>Green</li><li>Black</li></ul></td>
</tr></tbody></table>
<p><b>Tea</b> is a <a href="/wiki/Drink">drink</a><sup id="cite" class="reference"><a href="#n">[1]</a></sup>, see
<a class="external text" href="https://tea.test/">its site</a>.</p><meta property="mw:PageProp/toc" />
<div class="mw-heading mw-heading2"><h2 id="History">History</h2><span class="mw-editsection">[edit]</span></div>
<p>Old &amp; <i>wise</i>.</p>
<div class="mw-heading mw-heading3"><h3 id="Early_days">Early days</h3></div><p>In the East.</p>
<figure><a href="/wiki/File:T.jpg"><img src="//x/t.jpg" /></a><figcaption>A cup</figcaption></figure>
<h2><span class="mw-headline" id="Maths">Maths</span></h2>
<p>It is <span class="mwe-math-element"><span class="mwe-math-mathml-inline" style="display: none;">
<math alttext="{\\displaystyle x_{1}^{2}}"><semantics><mi>x</mi>
<annotation encoding="application/x-tex">{\\displaystyle x_{1}^{2}}</annotation></semantics></math></span>
<img class="mwe-math-fallback-image-inline" alt="{\\displaystyle x_{1}^{2}}" src="//x.test/x" /></span> hot.</p>
<table class="wikitable"><tr><th>Kind</th><th>Price</th></tr><tr><td>Green</td><td>3</td></tr></table>
<div class="mw-heading mw-heading2"><h2 id="References">References</h2></div>
<div class="reflist"><div class="mw-references-wrap"><ol class="references"><li>Someone, 1999</li></ol></div></div>
<div class="navbox">Teas of the world</div></div>"""


def wiki(web, text=ARTICLE, title="Tea", **parsed):
    web.get(WIKI, json={"parse": {"title": title, "pageid": 1, "text": text, "properties": {}, **parsed}})


def test_an_article_is_read_with_one_request_and_loses_its_boxes(web, http):
    wiki(web)
    text = read(ks.Wikipedia(), http, "https://en.wikipedia.org/wiki/Tea")
    in_order(
        text,
        "# Tea\n\nen.wikipedia.org · https://en.wikipedia.org/wiki/Tea",
        "| Type | Hot, cold |",
        "| Colour \\| hue | Green, Black |",
        "**Tea** is a drink, see [its site](https://tea.test/).",
        "## History",
        "Old & *wise*.",
        "### Early days",
        "A cup",
        "## Maths",
        "x_{1}^{2}",
        "| Kind | Price |",
    )
    for gone in ("[1]", "[edit]", "other uses", "References", "1999", "Teas of the world", "t.jpg", "wiki/Drink"):
        assert gone not in text
    assert text.count("x_{1}^{2}") == 1
    assert len(web.calls) == 1
    request = web.calls[0]
    assert "kindly" in request.request.headers["User-Agent"]
    assert "https://" in request.request.headers["User-Agent"]
    assert asked(request)["page"] == "Tea"
    assert asked(request)["redirects"] == "1"


@pytest.mark.parametrize(
    ("url", "api", "page"),
    [
        ("https://de.m.wikipedia.org/wiki/T%C3%A9e", "https://de.wikipedia.org/w/api.php", {"page": "Tée"}),
        (
            "https://fr.wiktionary.org/w/index.php?title=th%C3%A9",
            "https://fr.wiktionary.org/w/api.php",
            {"page": "thé"},
        ),
        ("https://en.wikipedia.org/w/index.php?title=Tea&oldid=77", WIKI, {"oldid": "77"}),
        ("https://en.wikipedia.org/w/index.php?curid=5", WIKI, {"pageid": "5"}),
        ("https://m.mediawiki.org/wiki/Manual:X", "https://www.mediawiki.org/w/api.php", {"page": "Manual:X"}),
        ("https://en.wikipedia.org/wiki/AC/DC", WIKI, {"page": "AC/DC"}),
    ],
)
def test_every_spelling_of_an_address_finds_its_wiki(web, http, url, api, page):
    web.get(api, json={"parse": {"title": "X", "text": "<p>text</p>"}})
    assert "text" in read(ks.Wikipedia(), http, url)
    assert page.items() <= asked(web.calls[0]).items()


@pytest.mark.parametrize(
    ("fragment", "first", "then"),
    [
        ("History", "Old & *wise*", "**Tea** is"),
        ("Maths", "hot.", "## History"),
        ("Early_days", "In the East", "| Type |"),
    ],
)
def test_the_section_that_a_link_points_at_comes_first(web, http, fragment, first, then):
    wiki(web)
    text = read(ks.Wikipedia(), http, f"https://en.wikipedia.org/wiki/Tea#{fragment}")
    in_order(text, f"the link points at the section “{fragment.replace('_', ' ')}”", first, then)
    assert text.count(first) == 1


def test_an_unknown_section_leaves_the_article_in_its_order(web, http):
    wiki(web)
    in_order(
        read(ks.Wikipedia(), http, "https://en.wikipedia.org/wiki/Tea#Nope"), "**Tea** is", "## History", "## Maths"
    )


def test_a_redirect_is_named_and_its_section_honoured(web, http):
    wiki(web, redirects=[{"from": "Cha", "to": "Tea", "tofragment": "History"}])
    text = read(ks.Wikipedia(), http, "https://en.wikipedia.org/wiki/Cha")
    in_order(text, "# Tea", "redirected from Cha", "the section “History”", "## History", "**Tea** is")


def test_a_disambiguation_page_lists_the_meanings_with_their_links(web, http):
    wiki(
        web,
        '<p>Tea may be:</p><ul><li><a href="/wiki/Tea_(drink)">Tea</a>, a drink</li></ul>',
        properties={"disambiguation": ""},
    )
    text = read(ks.Wikipedia(), http, "https://en.wikipedia.org/wiki/Tea")
    in_order(text, "several meanings", "- [Tea](", "a drink")
    assert "https://en.wikipedia.org/wiki/Tea_(drink)" in text.replace("\\", "").replace("%28", "(").replace("%29", ")")


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ({"json": {"error": {"code": "missingtitle", "info": "…"}}}, "PageFailed"),
        ({"json": {"error": {"code": "maxlag"}}, "headers": {"Retry-After": "5"}}, "RateLimited"),
        ({"status": 429, "headers": {"Retry-After": "5"}}, "RateLimited"),
        ({"status": 403, "body": "Please set a user-agent"}, "AuthError"),
        ({"json": {"parse": {"title": "X", "text": {"*": "formatversion 1"}}}}, "PageFailed"),
        ({"json": []}, "BadResponse"),
        ({"body": "<html>"}, "BadResponse"),
    ],
)
def test_whatever_wikimedia_refuses_falls_through(web, http, reply, error):
    web.get(WIKI, **reply)
    with pytest.raises(getattr(ks, error)):
        read(ks.Wikipedia(), http, "https://en.wikipedia.org/wiki/Tea")


def test_wikimedias_retry_after_is_obeyed_across_calls(web, http, clock):
    loader = ks.Wikipedia(pace=ks.Pace(now=clock, sleep=clock.sleep))
    web.get(WIKI, status=429, headers={"Retry-After": "5"})
    wiki(web)
    with pytest.raises(ks.RateLimited):
        read(loader, http, "https://en.wikipedia.org/wiki/Tea")
    read(loader, http, "https://en.wikipedia.org/wiki/Tea")
    assert clock.slept == [5.0]


# -- arXiv

ARXIV_API = "https://export.arxiv.org/api/query"

FEED = """<?xml version="1.0" encoding="UTF-8"?>
<feed xmlns="http://www.w3.org/2005/Atom"><entry xmlns:arxiv="http://arxiv.org/schemas/atom">
<id>http://arxiv.org/abs/2401.00001v2</id><updated>2024-02-02T00:00:00Z</updated>
<published>2024-01-01T00:00:00Z</published>
<title>On tea
  and $E=mc^2$</title><summary>  We brew tea &lt; 100
degrees.
</summary><author><name>Ann Lee</name></author><author><name>Bob Ray</name></author>
<arxiv:comment>12 pages</arxiv:comment><arxiv:journal_ref>J. Tea 1 (2024)</arxiv:journal_ref>
<arxiv:doi>10.1/x</arxiv:doi>
<category term="cs.CL"/><category term="cs.CL"/><category term="stat.ML"/></entry></feed>"""

BAD_ID = FEED.replace("http://arxiv.org/abs/2401.00001v2", "http://arxiv.org/api/errors#bad_id")

PAPER = """<html><body><nav>arXiv home</nav><article class="ltx_document">
<h1 class="ltx_title ltx_title_document">On tea</h1>
<div class="ltx_authors">Ann Lee</div><div class="ltx_abstract"><p>We brew</p></div>
<section class="ltx_section"><h2 class="ltx_title">1 Introduction</h2><div class="ltx_para"><p>Let
<math alttext="x_{1}\\leq 2" class="ltx_Math" display="inline"><mi>x</mi></math> be hot.</p></div>CODE</section>
<section class="ltx_bibliography"><h2>References</h2><ul><li class="ltx_bibitem">Lee, Tea, 1999.</li></ul></section>
</article><footer>Report an issue</footer></body></html>"""


def arxiv(**changes):
    """A loader whose pace does not slow the tests down."""
    return ks.ArXiv(pace=ks.Pace(), **changes)


def test_a_paper_comes_with_metadata_abstract_and_the_html_edition_in_two_requests(web, http):
    web.get(ARXIV_API, body=FEED)
    web.get("https://arxiv.org/html/2401.00001v2", body=PAPER)
    text = read(arxiv(), http, "https://arxiv.org/pdf/2401.00001v2.pdf")
    in_order(
        text,
        "# On tea and $E=mc^2$",
        "Ann Lee, Bob Ray · arXiv:2401.00001v2 · 2024-01-01, this version 2024-02-02 · cs.CL, stat.ML"
        " · comment: 12 pages · journal: J. Tea 1 (2024) · doi: 10.1/x · https://arxiv.org/abs/2401.00001v2",
        "## Abstract\n\nWe brew tea < 100 degrees.",
        "## 1 Introduction",
        "x_{1}\\leq 2",
        "## References",
        "Lee, Tea, 1999.",
    )
    assert "arXiv home" not in text
    assert "Report an issue" not in text
    assert text.count("We brew") == 1
    assert len(web.calls) == 2
    assert asked(web.calls[0])["id_list"] == "2401.00001v2"


def small_pdf(text: str) -> bytes:
    """A PDF of one page with one line of text."""
    stream = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 200] /Contents 4 0 R"
        b" /Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
    ]
    body, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return (
        body
        + b"xref\n0 5\n0000000000 65535 f \n"
        + table
        + b"trailer\n<< /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % len(body)
    )


def test_without_an_html_edition_the_pdf_is_read_and_a_note_says_so(web, http):
    web.get(ARXIV_API, body=FEED)
    web.get("https://arxiv.org/html/hep-th/9901001", status=404, body="No HTML")
    web.get("https://arxiv.org/pdf/hep-th/9901001", body=small_pdf("text of the paper"))
    text = read(arxiv(), http, "https://arxiv.org/abs/hep-th/9901001")
    in_order(text, "## Abstract", "_No HTML edition", "text of the paper")
    assert asked(web.calls[0])["id_list"] == "hep-th/9901001"
    assert len(web.calls) == 3


def test_a_paper_without_any_full_text_still_has_its_abstract(web, http):
    web.get(ARXIV_API, body=FEED)
    web.get("https://arxiv.org/html/2401.00001", status=500)
    web.get("https://arxiv.org/pdf/2401.00001", body=b"%PDF-1.7\nbroken")
    text = read(arxiv(), http, "https://arxiv.org/abs/2401.00001")
    in_order(text, "We brew tea", "_Only the abstract could be read. The paper: https://arxiv.org/pdf/2401.00001_")


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ({"body": BAD_ID}, "PageFailed"),
        (
            {
                "body": FEED.replace("http://arxiv.org/abs/2401.00001v2", "http://arxiv.org/api/errors#bad"),
                "status": 400,
            },
            "PageFailed",
        ),
        ({"body": "<feed xmlns='http://www.w3.org/2005/Atom'/>"}, "PageFailed"),
        ({"body": "Rate exceeded.", "status": 429}, "RateLimited"),
        ({"body": "busy", "status": 503}, "RateLimited"),
        ({"body": "not xml"}, "BadResponse"),
    ],
)
def test_whatever_arxiv_refuses_falls_through(web, http, reply, error):
    web.get(ARXIV_API, **reply)
    with pytest.raises(getattr(ks, error)):
        read(arxiv(), http, "https://arxiv.org/abs/2401.00001")


def test_arxiv_is_asked_at_most_once_in_three_seconds(web, http, clock):
    loader = ks.ArXiv(pace=ks.Pace(ks.ARXIV_GAP, now=clock, sleep=clock.sleep))
    web.get(ARXIV_API, body=FEED)
    web.get("https://arxiv.org/html/2401.00001", body=PAPER)
    for _ in range(2):
        read(loader, http, "https://arxiv.org/abs/2401.00001")
    assert clock.slept == [3.0]
    assert ks.ARXIV_GAP == 3.0


def test_missing_metadata_does_not_spoil_a_paper(web, http):
    web.get(ARXIV_API, body="<feed xmlns='http://www.w3.org/2005/Atom'><entry><title>Bare</title></entry></feed>")
    web.get("https://arxiv.org/html/2401.00001", body=PAPER)
    assert read(arxiv(), http, "https://arxiv.org/abs/2401.00001").startswith("# Bare\n\narXiv:2401.00001 · https://")


# -- Hacker News

HN = "https://hn.algolia.com/api/v1/items/1"


def hn(number, text, children=(), **changes):
    return {
        "id": number,
        "author": f"user{number}",
        "text": text,
        "created_at": "2024-01-01T00:00:00.000Z",
        "children": list(children),
        **changes,
    }


def test_a_hacker_news_thread_is_one_request_with_nested_comments(web, http):
    quiet, deep = hn(2, "<p>quiet"), hn(3, "busy", [hn(4, "reply", [hn(5, "deeper")]), hn(6, "second")])
    web.get(HN, json=hn(1, None, [quiet, deep], title="Tea", url="https://tea.test/", points=42))
    text = read(ks.HackerNews(), http, "https://news.ycombinator.com/item?id=1")
    in_order(
        text,
        "# Tea",
        "Hacker News · https://tea.test/ · 42 points · 5 comments",
        "**user1** · 2024-01-01 · https://news.ycombinator.com/item?id=1",
        "**1** · **user3** · 2024-01-01 · https://news.ycombinator.com/item?id=3\n\nbusy",
        "**1.1** · **user4**",
        "**1.1.1** · **user5**",
        "**1.2** · **user6**",
        "**2** · **user2**",
    )
    assert len(web.calls) == 1


def test_a_linked_comment_and_deleted_users_are_handled_on_hacker_news(web, http):
    web.get(HN, json=hn(1, "ask", [hn(2, "a", [hn(7, "x")]), hn(3, None, author=None)], title="Ask HN"))
    text = read(ks.HackerNews(), http, "https://news.ycombinator.com/item?id=1#3")
    in_order(text, "ask", "**1** · **deleted user**", "**2** · **user2**")


@pytest.mark.parametrize(
    "reply", [{"status": 404, "json": {"error": "Not Found"}}, {"json": []}, {"body": "x"}, {"json": None}]
)
def test_whatever_hacker_news_refuses_falls_through(web, http, reply):
    web.get(HN, **reply)
    with pytest.raises(ks.SearchError):
        read(ks.HackerNews(), http, "https://news.ycombinator.com/item?id=1")


# -- what holds for all of them


@pytest.mark.parametrize("code", CODES)
def test_code_comes_through_stackexchange_byte_for_byte(web, http, code):
    se_thread(web, [answer(34, body=pre(code))], body=pre(code))
    assert read(ks.StackExchange(), http, "https://stackoverflow.com/q/12").count(fenced(code)) == 2


@pytest.mark.parametrize("code", CODES)
def test_code_comes_through_github_byte_for_byte(web, http, code):
    body = f"See:\n\n{fenced(code)}\n\nand {code.splitlines()[0]}"
    typed = body.replace("\n", "\r\n")  # as GitHub keeps what was typed into its forms
    gh_thread(web, opening(connection([node(2, typed, replies={"nodes": [node(3, typed)]})]), body=body))
    assert read(ks.GitHub(token="t0ken"), http, PAGE).count(body) == 3


@pytest.mark.parametrize("code", CODES)
def test_code_in_files_and_diffs_comes_through_byte_for_byte(web, http, code):
    web.get("https://raw.githubusercontent.com/o/r/main/f", body=code)
    assert read(ks.GitHub(), http, "https://github.com/o/r/blob/main/f").endswith("\n" + fenced(code))
    web.get(
        f"{GH}/repos/o/r/commits/0123abc",
        json={"commit": {"message": "m"}, "files": [{"filename": "f", "patch": code}]},
    )
    assert f"\n{code}\n" in read(ks.GitHub(), http, "https://github.com/o/r/commit/0123abc")


@pytest.mark.parametrize("code", CODES)
def test_code_comes_through_wikipedia_byte_for_byte(web, http, code):
    coloured = f'<div class="mw-highlight"><pre><span></span>{html.escape(code, quote=False)}\n</pre></div>'
    wiki(web, f'{coloured}<h2 id="A">A</h2>{pre(code)}')
    assert read(ks.Wikipedia(), http, "https://en.wikipedia.org/wiki/Tea").count(fenced(code)) == 2


@pytest.mark.parametrize("code", CODES)
def test_code_comes_through_arxiv_byte_for_byte(web, http, code):
    source = base64.b64encode(code.encode()).decode()
    shown = (f'<div id="x" class="ltx_listingline">{html.escape(line)}</div>' for line in code.split("\n"))
    link = f'<div class="ltx_listing_data"><a href="data:text/plain;base64,{source}" download="">⬇</a></div>'
    listing = f'<div class="ltx_listing ltx_lstlisting">{link}\n{"".join(shown)}</div><p>After.</p>{pre(code)}'
    web.get(ARXIV_API, body=FEED)
    web.get("https://arxiv.org/html/2401.00001", body=PAPER.replace("CODE", listing))
    text = read(arxiv(), http, "https://arxiv.org/abs/2401.00001")
    in_order(text, fenced(code), "After.")
    assert text.count(fenced(code)) == 2
    assert "⬇" not in text


def test_a_displayed_equation_is_no_table(web, http):
    equation = (
        '<table class="ltx_equation ltx_eqn_table"><tbody><tr class="ltx_equation ltx_eqn_row">'
        '<td class="ltx_eqn_cell ltx_eqn_center_padleft"></td><td class="ltx_eqn_cell ltx_align_center">'
        '<math alttext="E=mc^{2}" display="block"><mi>E</mi></math></td>'
        '<td class="ltx_eqn_cell ltx_eqn_eqno"><span class="ltx_tag">(1)</span></td></tr></tbody></table>'
        '<table class="ltx_tabular"><tr><td class="ltx_td">a</td><td>b</td></tr><tr><td>c</td><td>d</td></tr></table>'
    )
    web.get(ARXIV_API, body=FEED)
    web.get("https://arxiv.org/html/2401.00001", body=PAPER.replace("CODE", equation))
    text = read(arxiv(), http, "https://arxiv.org/abs/2401.00001")
    assert "| (1) |" not in text
    in_order(text, "E=mc^{2}", "(1)", "| a | b |", "| c | d |")


@pytest.mark.parametrize("code", CODES)
def test_code_comes_through_hacker_news_byte_for_byte(web, http, code):
    web.get(HN, json=hn(1, pre(code), [hn(2, "x", [hn(3, f"<p>so{pre(code)}")])], title="T"))
    assert read(ks.HackerNews(), http, "https://news.ycombinator.com/item?id=1").count(fenced(code)) == 2


def test_a_thread_nested_without_end_does_not_break_the_reader(web, http):
    deep = hn(999, "bottom")
    for number in range(900, 500, -1):
        deep = hn(number, "x", [deep])
    web.get(HN, json=hn(1, "top", [deep], title="T"))
    assert "**user501**" in read(ks.HackerNews(), http, "https://news.ycombinator.com/item?id=1")


URLS = [
    "https://stackoverflow.com/q/12",
    PAGE,
    "https://en.wikipedia.org/wiki/Tea",
    "https://arxiv.org/abs/2401.00001",
    "https://news.ycombinator.com/item?id=1",
]


@pytest.mark.parametrize("url", URLS)
def test_no_request_is_sent_when_the_time_is_up(web, http, url):
    loader = next(cls() for cls in ks.LOADERS if cls().matches(url))
    with pytest.raises(ks.Timeout):
        loader.load(http, url, deadline=ks.Deadline(0))
    assert len(web.calls) == 0


@pytest.mark.parametrize("url", URLS)
def test_a_site_that_cannot_be_reached_falls_through(web, http, url):
    loader = next(cls() for cls in ks.LOADERS if cls().matches(url))
    with pytest.raises(ks.Unreachable):
        read(loader, http, url)


@pytest.mark.parametrize("url", URLS)
def test_offline_nothing_is_asked(web, url):
    loader = next(cls() for cls in ks.LOADERS if cls().matches(url))
    with pytest.raises(ks.Offline):
        read(loader, ks.Http(ks.Settings(offline=True)), url)
    assert len(web.calls) == 0


def test_a_token_goes_to_the_configured_api_only_and_never_into_an_error(web, http, caplog):
    loader = ks.GitHub(token="ghp_verysecret", api_url="https://ghe.test/api/v3")
    web.post("https://ghe.test/api/graphql", status=500, body="ghp_verysecret")
    web.get("https://ghe.test/api/v3/repos/o/r/issues/1", status=418, json={"message": "ghp_verysecret"})
    with caplog.at_level("DEBUG"), pytest.raises(ks.SearchError) as caught:
        read(loader, http, PAGE)
    assert "ghp_verysecret" not in str(caught.value) + caplog.text
    assert all("ghp_verysecret" not in call.request.url for call in web.calls)
    assert {urlsplit(call.request.url).hostname for call in web.calls} == {"ghe.test"}


def test_one_loader_serves_many_threads_at_once(web, http):
    web.get(ARXIV_API, body=FEED)
    web.get("https://arxiv.org/html/2401.00001", body=PAPER)
    loader, slept, texts = None, [], []
    loader = ks.ArXiv(pace=ks.Pace(3.0, now=lambda: 0.0, sleep=slept.append))
    threads = [
        threading.Thread(target=lambda: texts.append(read(loader, http, "https://arxiv.org/abs/2401.00001")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(slept) == [3.0, 6.0, 9.0]
    assert len(texts) == 4


JUNK = [None, [], {}, "x", 5, True, [None], {"a": 1}, -1, 1e300, "\ud800", 0]


def broken(value, chance):
    """The value with some of its parts replaced by others or missing, as an API that has changed would send it."""
    if chance.random() < 0.08:
        return chance.choice(JUNK)
    if isinstance(value, dict):
        return {key: broken(part, chance) for key, part in value.items() if chance.random() > 0.03}
    return [broken(part, chance) for part in value] if isinstance(value, list) else value


def whole_answers():
    """Per page: what its API would send, by address."""
    pulls = f"{GH}/repos/o/r/pulls/1"
    remarks = [gh_item(5, path="a", line=1, diff_hunk="@@"), gh_item(6, in_reply_to_id=5)]
    thread = opening(connection([node(2, replies={"nodes": [node(3)]})]), closedAt="2024-01-03T00:00:00Z")
    gist = {"description": "d", "files": {"a": {"filename": "a", "content": "x"}}, "comments": 1}
    return {
        "https://stackoverflow.com/a/34": {
            f"{SE}/answers/34": {"items": [answer(34)]},
            f"{SE}/questions/12": {"items": [question()]},
            f"{SE}/questions/12/answers": {"items": [answer(34)], "has_more": False, "backoff": 0},
            f"{SE}/posts/12;34/comments": {"items": [comment(1, 12), comment(2, 34)]},
        },
        PAGE: {
            ISSUE: gh_item(comments=3, labels=[{"name": "b"}], pull_request={"merged_at": "2024"}, closed_at="2024"),
            f"{ISSUE}/comments": [gh_item(2), gh_item(3)],
            f"{pulls}/files": [{"filename": "a", "additions": 1, "deletions": 0}],
            f"{pulls}/reviews": [gh_item(4, state="APPROVED")],
            f"{pulls}/comments": remarks,
        },
        "https://github.com/o/r/discussions/1": {f"{GH}/graphql": {"data": {"repository": {"thread": thread}}}},
        "https://gist.github.com/x/0123abcdef": {
            f"{GH}/gists/0123abcdef": gist,
            f"{GH}/gists/0123abcdef/comments": [gh_item(2)],
        },
        "https://en.wikipedia.org/wiki/Tea#History": {
            WIKI: {"parse": {"title": "Tea", "text": ARTICLE, "properties": {}, "redirects": [{"from": "Cha"}]}}
        },
        "https://news.ycombinator.com/item?id=1": {HN: hn(1, "a", [hn(2, "b", [hn(3, "c")])], title="T", points=3)},
    }


@pytest.mark.parametrize("url", whole_answers())
def test_an_api_that_has_changed_gives_a_page_or_falls_through_and_never_breaks(web, http, url):
    chance = random.Random(url)
    for _ in range(60):
        web.reset()
        for address, said in whole_answers()[url].items():
            web.add("POST" if address.endswith("graphql") else "GET", address, json=broken(said, chance))
        loader = next(cls() for cls in ks.LOADERS if cls().matches(url))
        loader = ks.GitHub(token="t0ken") if "discussions" in url else loader
        with contextlib.suppress(ks.SearchError):
            assert loader.load(http, url, deadline=ks.Deadline(30)).markdown.encode()


LIVE = {
    "https://stackoverflow.com/questions/11227809": "branch prediction",
    "https://github.com/psf/requests/issues/1": "requests",
    "https://en.wikipedia.org/wiki/Tea": "Camellia sinensis",
    "https://arxiv.org/abs/1706.03762": "Attention Is All You Need",
    "https://news.ycombinator.com/item?id=1": "Y Combinator",
}


@pytest.mark.live
@pytest.mark.skipif(os.environ.get("RUN_LIVE_TESTS") != "1", reason="RUN_LIVE_TESTS=1 runs it")
@pytest.mark.parametrize("url", LIVE)
def test_a_stable_page_of_each_site_is_read_live(http, url):
    loader = next(ks.from_env(cls, os.environ) for cls in ks.LOADERS if cls().matches(url))
    assert LIVE[url].lower() in read(loader, http, url).lower()
