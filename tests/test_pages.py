"""Section 9: what came back, is it the page, and how the content chain goes on when it is not. Loaders: test_loaders.py."""

import functools
import gzip
import io
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kindly_search import (
    BLOCKED,
    CONSENT_WALL,
    NEEDS_JAVASCRIPT,
    NEEDS_LOGIN,
    NO_BROWSER,
    NO_TEXT,
    NOT_FOUND,
    TIMED_OUT,
    AddressGuard,
    AuthError,
    Breakers,
    Browser,
    BrowserSettings,
    ConfigError,
    Deadline,
    Exa,
    Http,
    HttpStep,
    Kindly,
    Offline,
    Page,
    PageCache,
    PageFailed,
    ParseSlot,
    ProviderDown,
    Reader,
    Reply,
    ScrapeStep,
    Serper,
    Settings,
    Step,
    Tavily,
    Telemetry,
    Timeout,
    content_chain,
    failed_page,
    failure_note,
    reply_to_markdown,
)

URL = "https://example.com/page"


def reply(body: str | bytes, content_type: str = "text/html", *, url: str = URL, **headers: str) -> Reply:
    given = {"content-type": content_type, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return Reply(url, 200, given, body.encode() if isinstance(body, str) else body)


def read(body: str | bytes, content_type: str = "text/html", *, url: str = URL, **headers: str) -> str:
    return reply_to_markdown(reply(body, content_type, url=url, **headers), deadline=Deadline(30))


def refusal(body: str | bytes, content_type: str = "text/html", *, url: str = URL, **headers: str) -> PageFailed:
    with pytest.raises(PageFailed) as caught:
        read(body, content_type, url=url, **headers)
    return caught.value


def article(about: str, *, title: str = "A story", paragraphs: int = 12, head: str = "", extra: str = "") -> str:
    """A page with enough text to be beyond suspicion."""
    text = "".join(
        f"<p>Paragraph {i}: {about}, told at some length and with care for detail, as one does.</p>"
        for i in range(paragraphs)
    )
    return (
        f"<html><head><title>{title}</title>{head}</head><body><main><h1>{title}</h1>{text}</main>{extra}</body></html>"
    )


# -- HTML and its header -----------------------------------------------------


def test_a_page_begins_with_its_title_author_and_date_where_it_states_them() -> None:
    head = (
        '<meta name="author" content="Ada Lovelace">'
        '<meta property="article:published_time" content="2024-05-17T08:00:00Z">'
    )
    body = "".join(f"<p>Sentence {i} of an article about engines and what they can compute.</p>" for i in range(30))
    html = f"<html><head><title>Notes on the Engine</title>{head}</head><body><article>{body}</article></body></html>"

    lines = read(html).split("\n\n")
    assert lines[0] == "# Notes on the Engine"
    assert re.fullmatch(r"By Ada Lovelace · 2024-05-17(T08:00:00Z)?", lines[1])
    assert lines[2].startswith("Sentence 0 of an article")


def test_author_and_date_stand_below_the_title_that_the_page_shows_itself() -> None:
    markdown = read(article("tides", title="The tides", head='<meta name="author" content="Ada Lovelace">'))

    assert markdown.startswith("# The tides\n\nBy Ada Lovelace\n\nParagraph 0: tides")


def test_a_title_that_the_page_shows_itself_is_not_said_twice() -> None:
    assert read(article("tides", title="The tides")).count("The tides") == 1


def test_a_page_without_author_and_date_has_no_line_for_them() -> None:
    assert read(article("tides", title="The tides")).startswith("# The tides\n\nParagraph 0: tides")


# -- other types -------------------------------------------------------------


def test_plain_text_stays_as_it_is() -> None:
    text = "Dear reader,\n\n   indented *not* Markdown <b>not</b> HTML\n\n\n1. one"

    assert read(text, "text/plain", url="https://example.com/notes.txt") == text


def test_markdown_stays_as_it_is() -> None:
    text = "# Title\n\n- a\n- b\n\n```python\nx = 1\n```"

    assert read(text, "text/markdown; charset=utf-8", url="https://example.com/README.md") == text


def test_windows_line_ends_become_plain_ones() -> None:
    assert read("one\r\ntwo\r\n", "text/plain") == "one\ntwo"


def test_json_is_fenced_as_it_is() -> None:
    text = '{\n  "a": [1, 2.50],\n  "b": "`x`"\n}'

    assert read(text, "application/json") == f"```json\n{text}\n```"


def test_json_on_one_long_line_is_spread_over_several() -> None:
    value = {"items": [{"id": i, "name": f"naïve {i}"} for i in range(30)]}

    markdown = read(json.dumps(value), "application/vnd.api+json")

    lines = markdown.split("\n")
    assert (lines[0], lines[-1]) == ("```json", "```")
    assert json.loads("\n".join(lines[1:-1])) == value
    assert len(lines) > 60
    assert "naïve 7" in markdown


def test_what_only_claims_to_be_json_is_shown_as_it_is() -> None:
    text = "{" + "oops " * 100

    assert read(text, "application/json") == f"```json\n{text}\n```"


def test_json_nested_beyond_reason_is_shown_as_it_is() -> None:
    text = "[" * 100_000

    assert read(text, "application/json") == f"```json\n{text}\n```"


def test_json_lines_stay_lines() -> None:
    text = "\n".join(json.dumps({"n": i}) for i in range(50))

    assert read(text, "application/x-ndjson") == f"```json\n{text}\n```"


def test_xml_is_fenced() -> None:
    text = '<?xml version="1.0"?>\n<config><a b="c"/></config>'

    assert read(text, "application/xml") == f"```xml\n{text}\n```"


def test_a_drawing_in_svg_is_text_too() -> None:
    assert read("<svg><text>Hi</text></svg>", "image/svg+xml") == "```xml\n<svg><text>Hi</text></svg>\n```"


def test_csv_is_fenced_row_by_row() -> None:
    assert read("a,b\n1,2\n", "text/csv") == "```csv\na,b\n1,2\n```"


@pytest.mark.parametrize(
    ("url", "content_type", "language"),
    [
        ("https://raw.example.com/src/main.rs", "text/plain", "rust"),
        ("https://raw.example.com/a/Tool.KT?raw=1", "text/plain", "kotlin"),
        ("https://raw.example.com/Dockerfile", "text/plain", "dockerfile"),
        ("https://raw.example.com/setup.py", "application/octet-stream", "python"),
        ("https://raw.example.com/x", "text/x-python", "python"),
        ("https://raw.example.com/x", "text/javascript", "javascript"),
        ("https://raw.example.com/x", "application/javascript", "javascript"),
        ("https://raw.example.com/x", "application/x-sh", "bash"),
        ("https://raw.example.com/x", "application/yaml", "yaml"),
        ("https://raw.example.com/style.css", "text/css", "css"),
    ],
)
def test_source_code_is_fenced_with_its_language(url: str, content_type: str, language: str) -> None:
    assert read("a = List<String>\n\n\tb", content_type, url=url) == f"```{language}\na = List<String>\n\n\tb\n```"


def test_the_indentation_of_the_first_line_of_code_survives() -> None:
    assert read("    indented:\n  - a\n", "application/yaml") == "```yaml\n    indented:\n  - a\n```"


def test_a_fence_is_longer_than_any_run_of_backticks_inside() -> None:
    code = 's = """\n````\nx\n````\n"""'

    assert read(code, "text/x-python") == f"`````python\n{code}\n`````"


def test_html_that_calls_itself_plain_text_is_still_html() -> None:
    assert read("<!DOCTYPE html>" + article("tides"), "text/plain").startswith("# A story\n\nParagraph 0")


def test_an_empty_text_file_says_so() -> None:
    assert str(refusal(" \n", "text/plain")) == NO_TEXT


RSS = """<?xml version="1.0" encoding="UTF-8"?>
<rss version="2.0" xmlns:content="http://purl.org/rss/1.0/modules/content/"><channel>
<title>Planet News</title><link>https://news.example/</link>
<item><title>First &amp; foremost</title><link>https://news.example/1?utm_source=rss&amp;id=7</link>
<pubDate>Mon, 06 May 2024 10:00:00 GMT</pubDate><description>Short &lt;b&gt;one&lt;/b&gt;.</description></item>
<item><title>Second</title><link>https://news.example/2</link>
<description>Teaser</description><content:encoded><![CDATA[<p>Full <em>text</em>.</p><ul><li>a</li></ul>]]></content:encoded>
</item></channel></rss>"""

ATOM = """<feed xmlns="http://www.w3.org/2005/Atom"><title>Releases</title>
<entry><title>v2.0</title><link rel="self" href="https://x.example/self"/><link href="https://x.example/v2"/>
<updated>2024-01-02T03:04:05Z</updated><content type="html">&lt;h2&gt;Fixed&lt;/h2&gt;&lt;p&gt;All.&lt;/p&gt;</content></entry>
<entry><title>v1.0</title><link href="https://x.example/v1"/><summary>Begin</summary></entry></feed>"""


@pytest.mark.parametrize("content_type", ["application/rss+xml", "text/xml", "application/xml; charset=utf-8"])
def test_an_rss_feed_is_a_list_of_its_entries(content_type: str) -> None:
    assert read(RSS, content_type) == (
        "# Planet News\n\n"
        "## [First & foremost](https://news.example/1?id=7)\n\nMon, 06 May 2024 10:00:00 GMT\n\nShort **one**.\n\n"
        "## [Second](https://news.example/2)\n\nFull *text*.\n\n- a"
    )


def test_an_atom_feed_is_a_list_of_its_entries() -> None:
    assert read(ATOM, "application/atom+xml") == (
        "# Releases\n\n"
        "## [v2.0](https://x.example/v2)\n\n2024-01-02T03:04:05Z\n\n## Fixed\n\nAll.\n\n"
        "## [v1.0](https://x.example/v1)\n\nBegin"
    )


def test_a_feed_that_is_not_well_formed_is_shown_as_xml() -> None:
    assert read("<rss><channel><title>x</channel>", "application/rss+xml").startswith("```xml\n<rss>")


def test_entities_that_would_blow_up_are_not_expanded() -> None:
    bomb = '<!DOCTYPE rss [<!ENTITY a "haha"><!ENTITY b "&a;&a;&a;">]><rss><channel><title>&b;</title></channel></rss>'

    assert read(bomb, "application/rss+xml") == f"```xml\n{bomb}\n```"


@pytest.mark.parametrize(
    ("content_type", "length", "reason"),
    [
        ("image/png", "48213", "unsupported type image/png (48,213 bytes)"),
        ("application/zip", "1000", "unsupported type application/zip (1,000 bytes)"),
        ("video/mp4", "", "unsupported type video/mp4"),
        ("application/octet-stream", "4", "unsupported type application/octet-stream (4 bytes)"),
        ("", "", "unsupported type unknown"),
        ("application/zip", "a lot", "unsupported type application/zip"),
    ],
)
def test_other_types_are_refused_with_type_and_size(content_type: str, length: str, reason: str) -> None:
    error = refusal(b"\x00\x01\x02\x03", content_type, content_length=length)

    assert str(error) == reason
    assert error.final


# -- PDF ---------------------------------------------------------------------


def pdf(*pages: str, title: str = "") -> bytes:
    """A PDF written by hand: one line of text per page."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else ""
        resources = "/Resources << /Font << /F1 3 0 R >> >>"
        objects.append(f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] {resources} /Contents {5 + 2 * i} 0 R >>")
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    objects.append(f"<< /Title ({title}) >>")
    out, offsets = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    trailer = f"<< /Size {len(objects) + 1} /Root 1 0 R /Info {len(objects)} 0 R >>"
    xref = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n{trailer}\nstartxref\n{len(out)}\n%%EOF\n"
    return (out + xref).encode("latin-1")


def encrypted(body: bytes, password: str) -> bytes:
    pypdf = pytest.importorskip("pypdf")
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(body))
    writer.encrypt(password, "owner", algorithm="AES-256")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def test_a_pdf_is_read_page_by_page_below_its_title() -> None:
    body = pdf("Hello from page one", "And from page two", title="A Paper")

    expected = "# A Paper\n\n## Page 1\n\nHello from page one\n\n## Page 2\n\nAnd from page two"
    assert read(body, "application/pdf") == expected


def test_a_pdf_is_known_by_its_first_bytes_whatever_its_type() -> None:
    assert read(pdf("Hello"), "application/octet-stream") == "## Page 1\n\nHello"


def test_pages_without_text_are_left_out_but_counted() -> None:
    assert read(pdf("One", "", "Three"), "application/pdf") == "## Page 1\n\nOne\n\n## Page 3\n\nThree"


def test_a_pdf_of_very_many_pages_says_how_many_were_read() -> None:
    markdown = read(pdf(*(f"Text {i}" for i in range(1, 306))), "application/pdf")

    assert "## Page 300\n\nText 300" in markdown
    assert "Page 301" not in markdown
    assert markdown.endswith("\n\n_Read 300 of 305 pages._")


def test_a_pdf_that_takes_too_long_gives_what_was_read_in_time() -> None:
    clock = iter([0.0, 0.0, 100.0, *[100.0] * 50])
    deadline = Deadline(30, now=lambda: next(clock))

    markdown = reply_to_markdown(reply(pdf("One", "Two", "Three"), "application/pdf"), deadline=deadline)

    assert markdown == "## Page 1\n\nOne\n\n## Page 2\n\nTwo\n\n_Read 2 of 3 pages._"


def test_a_scanned_pdf_says_so() -> None:
    error = refusal(pdf("", ""), "application/pdf")

    assert str(error) == "a scanned PDF without text"
    assert error.final


def test_a_pdf_with_a_password_says_so() -> None:
    error = refusal(encrypted(pdf("Secret"), "sesame"), "application/pdf")

    assert str(error) == "an encrypted PDF"
    assert error.final


def test_a_pdf_that_only_restricts_printing_is_read() -> None:
    assert read(encrypted(pdf("Not so secret"), ""), "application/pdf") == "## Page 1\n\nNot so secret"


@pytest.mark.parametrize("body", [b"%PDF-1.7\n%garbage", pdf("Hello")[:150], b"not a PDF at all"])
def test_a_damaged_pdf_says_so(body: bytes) -> None:
    error = refusal(body, "application/pdf")

    assert str(error) == "a damaged PDF"
    assert error.final


def test_reading_a_damaged_pdf_leaves_no_word_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        refusal(pdf("Hello")[:150], "application/pdf")

    assert not caplog.records


# -- charsets ----------------------------------------------------------------

WORDS = "Grüße, naïve café – “quoted”"


@pytest.mark.parametrize(
    ("encoding", "content_type"),
    [
        ("utf-8-sig", "text/plain"),
        ("utf-8-sig", "text/plain; charset=iso-8859-1"),
        ("utf-16", "text/plain"),
        ("utf-16", "text/plain; charset=utf-8"),
    ],
)
def test_a_byte_order_mark_decides_the_charset(encoding: str, content_type: str) -> None:
    assert read(WORDS.encode(encoding), content_type) == WORDS


@pytest.mark.parametrize(
    ("encoding", "label"),
    [("windows-1252", "iso-8859-1"), ("utf-8", "UTF-8"), ("utf-8", '"utf8"'), ("windows-1252", "Latin1")],
)
def test_without_a_mark_the_header_decides_the_charset(encoding: str, label: str) -> None:
    assert read(WORDS.encode(encoding), f"text/plain; charset={label}") == WORDS


@pytest.mark.parametrize(
    "meta", ['<meta charset="shift_jis">', '<meta http-equiv="Content-Type" content="text/html; charset=Shift_JIS">']
)
def test_without_a_header_the_meta_tag_decides_the_charset(meta: str) -> None:
    html = article("日本語の文章", title="題名", head=meta).encode("shift_jis")

    assert "Paragraph 3: 日本語の文章" in read(html, "text/html")


def test_the_header_wins_over_the_meta_tag() -> None:
    html = article(WORDS, head='<meta charset="shift_jis">').encode()

    assert WORDS in read(html, "text/html; charset=utf-8")


def test_without_any_word_on_the_charset_it_is_utf_8() -> None:
    assert read(WORDS.encode(), "text/plain") == WORDS


def test_what_is_not_utf_8_is_windows_1252() -> None:
    assert read(WORDS.encode("windows-1252"), "text/plain") == WORDS


def test_a_charset_that_nobody_knows_is_ignored() -> None:
    assert read(WORDS.encode(), "text/plain; charset=klingon-8") == WORDS


def test_the_meta_tag_in_a_text_about_html_decides_nothing() -> None:
    text = f'Write <meta charset="iso-8859-1"> into the head. {WORDS}'

    assert read(text.encode(), "text/markdown") == text


def test_a_character_cut_in_two_by_the_size_cap_does_not_spoil_the_rest() -> None:
    body = WORDS.encode()
    cut = body[: body.index("–".encode()) + 1]
    truncated = Reply(URL, 200, {"content-type": "text/plain"}, cut, truncated=True)

    assert reply_to_markdown(truncated, deadline=Deadline(10)) == "Grüße, naïve café"


def test_nul_and_other_bytes_that_are_no_text_give_a_string_all_the_same() -> None:
    assert read(b"a\x00b\xff\xfe\x81", "text/plain").startswith("ab")


# -- is it the page? ---------------------------------------------------------

CLOUDFLARE = """<!DOCTYPE html><html lang="en-US"><head><title>Just a moment...</title>
<meta http-equiv="refresh" content="390"></head><body><div class="main-wrapper" role="main"><div class="main-content">
<noscript><div class="h2"><span id="challenge-error-text">Enable JavaScript and cookies to continue</span></div></noscript>
</div></div><script>(function(){window._cf_chl_opt={cvId:'3',cZone:"example.com",cType:'managed',cRay:'8f'}})();</script>
</body></html>"""

CLOUDFLARE_BLOCK = """<!DOCTYPE html><html><head><title>Attention Required! | Cloudflare</title></head><body>
<div id="cf-wrapper"><div id="cf-error-details" class="cf-error-details-wrapper"><h1>Sorry, you have been blocked</h1>
<h2>You are unable to access example.com</h2><h2>Why have I been blocked?</h2><p>This website is using a security service
to protect itself from online attacks. The action you just performed triggered the security solution. There are several
actions that could trigger this block including submitting a certain word or phrase, a SQL command or malformed data.</p>
<h2>What can I do to resolve this?</h2><p>You can email the site owner to let them know you were blocked. Please include
what you were doing when this page came up and the Cloudflare Ray ID found at the bottom of this page.</p></div></div>
</body></html>"""

DATADOME = """<html lang="en"><head><title>example.com</title><style>#cmsg{animation: A 1.5s;}</style></head>
<body style="margin:0"><p id="cmsg">Please enable JS and disable any ad blocker</p><script data-cfasync="false">var dd={
'rt':'c','cid':'AHrlqAAAAAMA','hsh':'2013','t':'bv','host':'geo.captcha-delivery.com'}</script>
<script data-cfasync="false" src="https://ct.captcha-delivery.com/c.js"></script></body></html>"""

PERIMETERX = """<!DOCTYPE html><html><head><title>Access to this page has been denied</title>
<script>window._pxAppId = 'PXabc123';</script></head><body><div class="content"><h1>Press &amp; Hold to confirm you are
a human (and not a bot).</h1><div id="px-captcha"></div><p>Reference ID 9b1c</p></div></body></html>"""

AKAMAI = """<HTML><HEAD><TITLE>Access Denied</TITLE></HEAD><BODY><H1>Access Denied</H1>
You don't have permission to access "http://www.example.com/" on this server.<P>Reference #18.5c1e1502.1700000000.1a2b
<P>https://errors.edgesuite.net/18.5c1e1502.1700000000.1a2b</P></BODY></HTML>"""

IMPERVA = """<html style="height:100%"><head><META NAME="ROBOTS" CONTENT="NOINDEX, NOFOLLOW"></head><body>
<iframe id="main-iframe" src="/_Incapsula_Resource?SWUDNSAI=31&xinfo=1" width="100%">Request unsuccessful. Incapsula
incident ID: 1234-5678</iframe></body></html>"""

AWS_WAF = """<!DOCTYPE html><html><head><title></title><script>window.awsWafCookieDomainList = [];
window.gokuProps = {"key":"AQID","iv":"CgA"};</script><script src="https://a.token.awswaf.com/challenge.js"></script></head>
<body><div id="challenge-container"></div><noscript><h1>JavaScript is disabled</h1>In order to continue, we need to verify
that you're not a robot. This requires JavaScript.</noscript></body></html>"""

GOOGLE_SORRY = """<html><head><title>https://www.google.com/search?q=x</title></head><body><form id="captcha-form"
action="index" method="post"><script src="https://www.google.com/recaptcha/api.js"></script><div class="g-recaptcha"
data-sitekey="6L"></div></form><div><b>About this page</b><br><br>Our systems have detected unusual traffic from your
computer network. This page checks to see if it's really you sending the requests, and not a robot.</div></body></html>"""

HCAPTCHA = """<html><head><title>Verification</title></head><body><p>Please complete the captcha to go on.</p>
<div class="h-captcha" data-sitekey="1"></div><script src="https://js.hcaptcha.com/1/api.js"></script></body></html>"""

CHALLENGES = {
    "Cloudflare": CLOUDFLARE,
    "Cloudflare block": CLOUDFLARE_BLOCK,
    "DataDome": DATADOME,
    "PerimeterX": PERIMETERX,
    "Akamai": AKAMAI,
    "Imperva": IMPERVA,
    "AWS WAF": AWS_WAF,
    "Google": GOOGLE_SORRY,
    "hCaptcha": HCAPTCHA,
}


@pytest.mark.parametrize("html", CHALLENGES.values(), ids=CHALLENGES.keys())
def test_a_bot_check_is_never_presented_as_content(html: str) -> None:
    error = refusal(html)

    assert str(error) == BLOCKED
    assert not error.final, "a browser may pass"
    assert not error.partial


SHELLS = {
    "React": '<div id="root"></div><noscript>You need to enable JavaScript to run this app.</noscript>',
    "empty": '<div id="app"></div>',
    "spinner": '<div id="app">Loading…</div><noscript>This site requires JavaScript.</noscript>',
}


@pytest.mark.parametrize("body", SHELLS.values(), ids=SHELLS.keys())
def test_a_javascript_shell_is_not_the_page(body: str) -> None:
    error = refusal(f'<html><head><title>App</title></head><body>{body}<script src="/main.js"></script></body></html>')

    assert str(error) == NEEDS_JAVASCRIPT
    assert not error.final
    assert not error.partial, "there is nothing worth showing"


def test_thin_text_beside_scripts_is_kept_in_case_nothing_better_turns_up() -> None:
    error = refusal("<title>Status</title><main><p>All systems work.</p></main><script>poll()</script>")

    assert str(error) == NEEDS_JAVASCRIPT
    assert error.partial == "# Status\n\nAll systems work."


def test_a_short_page_without_scripts_is_a_page() -> None:
    assert read("<title>Status</title><main><p>All systems work.</p></main>") == "# Status\n\nAll systems work."


LOGINS = {
    "form": '<title>Sign in</title><h1>Sign in</h1><form>User <input name=u> Password <input type="password"></form>',
    "words": "<title>Docs</title><p>Please log in to read this document.</p>",
    "continue": "<title>Board</title><p>You must be logged in to do that.</p>",
}


@pytest.mark.parametrize("html", LOGINS.values(), ids=LOGINS.keys())
def test_a_login_wall_is_not_the_page(html: str) -> None:
    error = refusal(html)

    assert str(error) == NEEDS_LOGIN
    assert not error.final


def test_a_redirect_that_ends_at_the_sign_in_page_is_a_login_wall() -> None:
    html = "<title>Welcome</title><p>Choose how to go on.</p>"

    assert str(refusal(html, url="https://example.com/users/sign_in?next=%2Fdoc")) == NEEDS_LOGIN


def test_a_paywalled_page_shows_its_opening_and_says_so() -> None:
    facts = {"@context": "https://schema.org", "@type": "NewsArticle", "headline": "Big", "isAccessibleForFree": False}
    head = f'<script type="application/ld+json">{json.dumps(facts)}</script>'

    markdown = read(article("the merger", title="Big", head=head, paragraphs=8))

    notice = "_Only the opening of this page is public; the rest is behind a paywall._"
    assert markdown.startswith(f"# Big\n\n{notice}\n\nParagraph 0: the merger")
    assert markdown.count(notice) == 1


def test_a_free_article_has_no_notice_of_a_paywall() -> None:
    facts = {"@type": "NewsArticle", "headline": "Big", "isAccessibleForFree": True}
    head = f'<script type="application/ld+json">{json.dumps(facts)}</script>'

    assert "paywall" not in read(article("the merger", title="Big", head=head, paragraphs=8))


@pytest.mark.parametrize(
    ("url", "html"),
    [
        (
            "https://consent.google.com/ml?continue=x",
            "<title>Before you continue to Google Search</title><p>We use cookies.</p>",
        ),
        ("https://example.com/", "<title>News</title><p>We value your privacy</p><button>Accept all</button>"),
    ],
)
def test_a_consent_wall_is_not_the_page(url: str, html: str) -> None:
    assert str(refusal(html, url=url)) == CONSENT_WALL


@pytest.mark.parametrize(
    "html",
    [
        "<title>404 Not Found</title><h1>Not Found</h1><p>The requested URL was not found.</p>",
        "<title>Shop</title><main><h1>Page not found</h1><p>Sorry, we could not find that.</p></main>",
        "<title>Oops</title><main><p>The page you're looking for doesn't exist or was moved.</p></main>",
    ],
)
def test_a_page_that_is_not_there_is_not_a_page_although_its_status_says_200(html: str) -> None:
    error = refusal(html)

    assert str(error) == NOT_FOUND
    assert error.final, "a browser would see the same"


@pytest.mark.parametrize("html", ["", "<html><body></body></html>", "<title>Only a title</title>", "<!-- nothing -->"])
def test_an_empty_page_says_so(html: str) -> None:
    assert str(refusal(html)) == NO_TEXT


@pytest.mark.parametrize(
    "about",
    [
        "how Cloudflare shows 'Just a moment...' with window._cf_chl_opt while checking your browser",
        "why 404 pages say page not found, and what else a 404 may mean",
        "that you must log in to continue, please sign in, and how walls like that annoy people",
        "the words 'please enable JavaScript to run this app' in many shells",
        "cookie banners that say 'we value your privacy' and 'accept all cookies'",
        "access denied, unusual traffic and how to tell that you are not a robot with g-recaptcha",
    ],
)
def test_a_long_article_about_walls_is_content(about: str) -> None:
    markdown = read(article(about, title="About walls", extra="<script>track()</script>", paragraphs=20))

    assert markdown.count("told at some length") == 20


def test_a_long_article_with_a_login_form_in_its_header_is_content() -> None:
    form = '<form>Sign in <input type="password" name="p"></form>'

    assert "Paragraph 7: tides" in read(article("tides", extra=form, paragraphs=20))


def test_a_short_thread_with_a_quick_login_box_below_is_content() -> None:
    thread = "<p>The fan is loud since the update. Does anybody know how to set its speed on this board?</p>" * 4
    login = '<form id="quick-login"><h3>Login</h3><input name="u"><input type="password" name="p"></form>'

    assert "set its speed" in read(f"<title>Loud fan</title><main>{thread}</main>{login}")


def test_a_short_page_that_documents_a_login_endpoint_is_content() -> None:
    text = "<p>Send the user name and the code as JSON; the answer holds a token that is valid for one hour.</p>" * 5
    html = f"<title>POST /login</title><main><h1>POST /login</h1>{text}</main>"

    assert "valid for one hour" in read(html, url="https://docs.example.com/api/login")


def test_a_short_page_about_a_car_called_404_is_content() -> None:
    text = "<p>The Peugeot 404 is a large family car that was made from 1960 to 1975 and styled by Pininfarina.</p>" * 3

    assert "Pininfarina" in read(f"<title>Peugeot 404</title><main><h1>Peugeot 404</h1>{text}</main>")


# -- notes -------------------------------------------------------------------


def test_a_note_is_the_same_text_for_the_same_failure() -> None:
    assert failure_note("HTTP 404", "https://a.example/x") == (
        "_Could not read this page: HTTP 404._\n\nSource: https://a.example/x"
    )


def test_a_failed_page_holds_its_note_and_its_reason() -> None:
    page = failed_page("https://a.example/x", "timed out")

    assert page.markdown == "_Could not read this page: timed out._\n\nSource: https://a.example/x"
    assert page.failure == "timed out"


# -- the http step -----------------------------------------------------------


def open_http(**settings: Any) -> Http:
    return Http(Settings(allow_private_hosts="*", **settings), sleep=lambda seconds: None)


def read_page(url: str, http: Http | None = None, steps: Sequence[Step] | None = None, **options: Any) -> Page:
    http = http or open_http()
    return Reader(http, [HttpStep(http)] if steps is None else steps, **options).read(url, deadline=Deadline(10))


def test_a_page_is_read_over_http_and_says_how(serve: Any) -> None:
    site = serve({"/": article("tides")})

    page = read_page(site.url + "/")

    assert page.markdown.startswith("# A story\n\nParagraph 0: tides")
    assert (page.method, page.failure, page.cached) == ("http", "", False)
    assert [(attempt.by, attempt.outcome) for attempt in page.attempts] == [("http", "ok")]


def test_markdown_is_asked_for_and_used_where_a_site_offers_it(serve: Any) -> None:
    def negotiate(request: Any) -> Any:
        if "text/markdown" in request.headers["Accept"]:
            return 200, {"Content-Type": "text/markdown"}, "# From the source\n\nPlain."
        return article("HTML")

    site = serve({"/": negotiate})

    assert read_page(site.url + "/").markdown == "# From the source\n\nPlain."


def test_a_compressed_page_is_read(serve: Any) -> None:
    site = serve({"/": (200, {"Content-Encoding": "gzip"}, gzip.compress(article("tides").encode()))})

    assert "Paragraph 3: tides" in read_page(site.url + "/").markdown


def test_an_image_is_a_note_and_its_bytes_are_not_downloaded(serve: Any) -> None:
    sent: list[int] = []

    def picture(request: Any) -> None:
        request.send(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 50000000\r\n\r\n")
        try:
            for _ in range(50):
                request.send(b"x" * 1_000_000)
                sent.append(1_000_000)
        except OSError:
            return

    site = serve({"/p.png": picture})

    page = read_page(site.url + "/p.png")

    assert page.markdown == failure_note("unsupported type image/png (50,000,000 bytes)", site.url + "/p.png")
    assert sum(sent) < 20_000_000


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (401, "needs a login"),
        (403, "blocked by the site"),
        (404, "HTTP 404"),
        (410, "HTTP 410"),
        (429, "blocked by the site"),
        (500, "HTTP 500"),
        (503, "blocked by the site"),
    ],
)
def test_an_error_status_is_a_fixed_note(serve: Any, status: int, reason: str) -> None:
    site = serve({"/x": (status, {}, article("an error page with a lot of text"))})

    page = read_page(site.url + "/x")

    assert page.markdown == f"_Could not read this page: {reason}._\n\nSource: {site.url}/x"
    assert page.failure == reason


def test_a_private_address_is_a_note(serve: Any) -> None:
    site = serve({"/": article("secrets")})
    http = Http(Settings())

    page = read_page(site.url + "/", http)

    assert page.markdown == failure_note("address not allowed", site.url + "/")
    assert site.requests == []


def test_a_redirect_to_a_private_address_is_a_note_and_no_other_step_is_tried(serve: Any) -> None:
    inner = serve({"/": article("secrets")})
    outer = serve({"/": (302, {"Location": inner.url + "/"}, "")})
    http = Http(Settings(allow_private_hosts=outer.host))
    second = Canned("tavily", "secrets")

    page = read_page(outer.url + "/", http, [HttpStep(http), second])

    assert page.failure == "address not allowed"
    assert inner.requests == []
    assert second.asked == []


def test_what_is_no_url_is_a_note() -> None:
    assert read_page("mailto:someone@example.com").failure == "invalid input"


def test_a_host_that_does_not_exist_is_a_note_and_no_other_step_is_tried() -> None:
    def nowhere(*args: Any, **kwargs: Any) -> Any:
        import socket

        raise socket.gaierror(-2, "Name or service not known")

    http = Http(Settings(), guard=AddressGuard(resolve=nowhere))
    second = Canned("tavily", "made up")

    page = read_page("http://no-such-host.example/", http, [HttpStep(http), second])

    assert page.failure == "not reachable"
    assert second.asked == []


def test_a_page_that_is_too_slow_is_a_note(serve: Any) -> None:
    site = serve({"/": lambda request: request.hold()})
    http = open_http()

    page = Reader(http, [HttpStep(http)]).read(site.url + "/", deadline=Deadline(0.3))

    assert page.markdown == failure_note("timed out", site.url + "/")


# -- the chain ---------------------------------------------------------------


class Canned:
    """A step that answers what it was told to."""

    def __init__(self, name: str, outcome: str | Exception, *, available: bool = True) -> None:
        self.name = name
        self._outcome = outcome
        self._available = available
        self.asked: list[str] = []

    def available(self) -> bool:
        return self._available

    def read(self, url: str, *, deadline: Deadline) -> str:
        self.asked.append(url)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


def chain(*steps: Canned) -> Reader:
    return Reader(open_http(), steps)


def test_the_first_step_that_succeeds_ends_the_chain() -> None:
    steps = [Canned("http", PageFailed(BLOCKED)), Canned("chromium", "page"), Canned("serper", "never")]

    page = chain(*steps).read(URL, deadline=Deadline(5))

    assert (page.markdown, page.method) == ("page", "chromium")
    assert [(attempt.by, attempt.outcome) for attempt in page.attempts] == [("http", BLOCKED), ("chromium", "ok")]
    assert steps[2].asked == []


def test_a_step_that_is_not_available_is_not_tried() -> None:
    browser = Canned("chromium", "never", available=False)

    page = chain(Canned("http", PageFailed(BLOCKED)), browser, Canned("tavily", "page")).read(URL, deadline=Deadline(5))

    assert page.method == "tavily"
    assert browser.asked == []


def test_a_final_failure_ends_the_chain() -> None:
    second = Canned("chromium", "never")

    page = chain(Canned("http", PageFailed("HTTP 404", final=True)), second).read(URL, deadline=Deadline(5))

    assert page.failure == "HTTP 404"
    assert second.asked == []


def test_when_every_step_fails_the_note_gives_the_first_reason() -> None:
    steps = [Canned("http", PageFailed(BLOCKED)), Canned("chromium", Timeout("late")), Canned("exa", PageFailed("Exa"))]

    assert chain(*steps).read(URL, deadline=Deadline(5)).markdown == failure_note(BLOCKED, URL)


def test_a_timeout_leads_to_the_next_step() -> None:
    page = chain(Canned("http", Timeout("late")), Canned("serper", "page")).read(URL, deadline=Deadline(5))

    assert page.markdown == "page"
    assert page.attempts[0].outcome == "timed out"


def test_thin_content_is_returned_when_nothing_better_turns_up() -> None:
    thin = PageFailed(NEEDS_JAVASCRIPT, partial="All systems work.")

    page = chain(Canned("http", thin), Canned("serper", PageFailed(BLOCKED))).read(URL, deadline=Deadline(5))

    assert (page.markdown, page.method, page.failure) == ("All systems work.", "http", "")


def test_of_several_thin_contents_the_longest_is_returned() -> None:
    thin = [PageFailed(NEEDS_JAVASCRIPT, partial=text) for text in ("one", "the longest one", "two")]

    page = chain(*map(Canned, ("http", "chromium", "serper"), thin)).read(URL, deadline=Deadline(5))

    assert (page.markdown, page.method) == ("the longest one", "chromium")


def test_better_content_replaces_thin_content() -> None:
    thin = PageFailed(NEEDS_JAVASCRIPT, partial="thin, but with so many words that it is longer than the page itself")

    page = chain(Canned("http", thin), Canned("serper", "The page.")).read(URL, deadline=Deadline(5))

    assert page.markdown == "The page."


def test_a_page_that_needs_javascript_names_the_missing_browser() -> None:
    browser = Canned("chromium", "never", available=False)

    page = chain(Canned("http", PageFailed(NEEDS_JAVASCRIPT)), browser).read(URL, deadline=Deadline(5))

    assert page.markdown == failure_note("needs JavaScript and no browser was found", URL)
    assert page.failure == NO_BROWSER


def test_a_chain_without_any_step_says_so() -> None:
    assert chain().read(URL, deadline=Deadline(5)).failure == "no way to read pages is switched on"


def test_a_host_that_needed_the_browser_gets_it_first_next_time() -> None:
    http, browser = Canned("http", PageFailed(BLOCKED)), Canned("chromium", "page")
    reader = chain(http, browser)

    reader.read("https://example.com/1", deadline=Deadline(5))
    reader.read("https://example.com/2", deadline=Deadline(5))
    reader.read("https://other.example/3", deadline=Deadline(5))

    assert http.asked == ["https://example.com/1", "https://other.example/3"]


def test_a_404_does_not_lead_to_the_next_step_but_a_403_does(serve: Any) -> None:
    site = serve({"/gone": (404, {}, "gone"), "/wall": (403, {}, CLOUDFLARE)})
    http, second = open_http(), Canned("chromium", "from the browser")

    gone = read_page(site.url + "/gone", http, [HttpStep(http), second])
    wall = read_page(site.url + "/wall", http, [HttpStep(http), second])

    assert gone.failure == "HTTP 404"
    assert wall.markdown == "from the browser"
    assert second.asked == [site.url + "/wall"]


# -- scrape steps ------------------------------------------------------------

SCRAPED = "# From elsewhere\n\n" + "Scraped text. " * 20


def scraper(provider: Any, http: Http | None = None, breakers: Breakers | None = None) -> ScrapeStep:
    return ScrapeStep(provider, http or open_http(), breakers or Breakers(Settings()))


def serper_at(site: Any) -> Serper:
    return Serper(api_key="serper-key", scrape_endpoint=site.url)


def answering(value: Any, status: int = 200) -> Callable[[Any], Any]:
    return lambda request: (status, {"Content-Type": "application/json"}, json.dumps(value))


def test_serper_scrapes_a_page(serve: Any) -> None:
    site = serve(answering({"text": "plain", "markdown": SCRAPED}))

    assert scraper(serper_at(site)).read(URL, deadline=Deadline(5)) == SCRAPED.strip()
    assert site.requests[0].json()["url"] == URL
    assert site.requests[0].headers["X-API-KEY"] == "serper-key"


def test_exa_scrapes_a_page(serve: Any) -> None:
    site = serve(
        answering({"results": [{"url": URL, "text": SCRAPED}], "statuses": [{"id": URL, "status": "success"}]})
    )
    exa = Exa(api_key="exa-key", contents_endpoint=site.url)

    assert scraper(exa).read(URL, deadline=Deadline(5)) == SCRAPED.strip()
    assert site.requests[0].json()["urls"] == [URL]


def test_tavily_scrapes_a_page(serve: Any) -> None:
    site = serve(answering({"results": [{"url": URL, "raw_content": SCRAPED}], "failed_results": []}))
    tavily = Tavily(api_key="tvly-key", extract_endpoint=site.url)

    assert scraper(tavily).read(URL, deadline=Deadline(5)) == SCRAPED.strip()
    assert site.requests[0].json()["urls"] == [URL]


@pytest.mark.parametrize(
    "text",
    [
        "# Just a moment...\n\nVerify you are human by completing the action below.",
        "# Access Denied\n\nYou don't have permission to access this page.",
        "Checking your browser before accessing example.com",
        "You've been blocked by network security. To continue, log in to your account.",
    ],
)
def test_a_challenge_page_scraped_by_someone_else_is_still_one(serve: Any, text: str) -> None:
    site = serve(answering({"markdown": text}))

    with pytest.raises(PageFailed, match=f"^{BLOCKED}$"):
        scraper(serper_at(site)).read(URL, deadline=Deadline(5))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("You need to enable JavaScript to run this app.", NEEDS_JAVASCRIPT),
        ("Sign in\n\nPlease log in to continue\n\nPassword", NEEDS_LOGIN),
        ("Before you continue\n\nAccept all cookies", CONSENT_WALL),
        ("# 404 Page not found\n\nThe page you requested does not exist.", NOT_FOUND),
    ],
)
def test_what_a_scraper_brings_is_judged_as_if_we_had_read_it(serve: Any, text: str, reason: str) -> None:
    site = serve(answering({"markdown": text}))

    with pytest.raises(PageFailed, match=f"^{reason}$") as caught:
        scraper(serper_at(site)).read(URL, deadline=Deadline(5))
    assert caught.value.final == (reason == NOT_FOUND)


def test_a_short_page_is_bought_once(serve: Any) -> None:
    text = "# Release 1.2.1\n\nFixes a crash on start."
    site = serve(answering({"markdown": text}))

    assert scraper(serper_at(site)).read(URL, deadline=Deadline(5)) == text


def test_a_scraper_that_is_left_out_was_not_asked(serve: Any) -> None:
    site = serve(answering({}, 500))
    heard: list[tuple[str, str]] = []
    telemetry = Telemetry()
    telemetry.listeners.append(lambda operation, attempt, ended: heard.append((attempt.by, ended)))
    step = scraper(serper_at(site), breakers=Breakers(Settings(circuit_failures=1)))
    reader = Reader(open_http(), [step], telemetry=telemetry)

    for number in range(2):
        reader.read(f"{URL}/{number}", deadline=Deadline(5))
    assert heard == [("serper", "failed"), ("serper", "skipped")]


def test_a_scraped_article_that_says_just_a_moment_is_content(serve: Any) -> None:
    text = "After the climb we took just a moment to rest, and then went on along the ridge in the evening sun. " * 11
    site = serve(answering({"markdown": " ", "text": text}))

    assert scraper(serper_at(site)).read(URL, deadline=Deadline(5)) == text.strip()


def test_a_scraper_that_was_asked_at_the_last_moment_is_not_blamed_for_being_late(serve: Any) -> None:
    site = serve(lambda request: time.sleep(0.4) or answering({"markdown": SCRAPED})(request))
    breakers = Breakers(Settings(circuit_failures=1))
    step = scraper(serper_at(site), breakers=breakers)

    with pytest.raises(PageFailed, match=r"^Serper: timed out$"):
        step.read(URL, deadline=Deadline(0.2))
    assert breakers.states()["scrape", "serper"] == "closed"
    assert step.read(URL, deadline=Deadline(30)) == SCRAPED.strip()


def test_a_long_scraped_article_about_challenges_is_content(serve: Any) -> None:
    text = "Sites say 'Just a moment...' while they verify you are human. " * 30
    site = serve(answering({"markdown": text}))

    assert scraper(serper_at(site)).read(URL, deadline=Deadline(5)) == text.strip()


def test_a_scraper_that_fails_is_one_failed_step_and_nothing_of_its_message_is_shown(serve: Any) -> None:
    site = serve(answering({"message": "bad key serper-key"}, 403))

    with pytest.raises(PageFailed, match=r"^Serper: key refused$"):
        scraper(serper_at(site)).read(URL, deadline=Deadline(5))


def test_a_scraper_that_keeps_failing_is_left_out_without_touching_its_search(serve: Any) -> None:
    site = serve(answering({}, 500))
    breakers = Breakers(Settings(circuit_failures=2))
    step = scraper(serper_at(site), breakers=breakers)

    for _ in range(4):
        with pytest.raises(PageFailed):
            step.read(URL, deadline=Deadline(5))

    assert len(site.requests) == 2
    assert breakers.states()["scrape", "serper"] == "open"
    assert breakers.of("search", "serper").state == "closed"


@pytest.mark.parametrize("chain", ["htpp", "http,chrome,serper", "http,searxng"])
def test_a_step_that_does_not_exist_is_named_with_those_that_do(chain: str) -> None:
    wrong = {"htpp": "htpp", "http,chrome,serper": "chrome", "http,searxng": "searxng"}[chain]
    with pytest.raises(
        ConfigError,
        match=f"^KINDLY_CONTENT_CHAIN names {wrong}; known steps are http, chromium, serper, exa, tavily.$",
    ):
        Kindly.from_env({"KINDLY_CONTENT_CHAIN": chain})


def test_a_step_named_twice_is_tried_once(serve: Any) -> None:
    site = serve({"/": (404, {}, "gone")})
    environ = {"KINDLY_CONTENT_CHAIN": "http,http", "KINDLY_ALLOW_PRIVATE_HOSTS": site.host}
    with Kindly.from_env(environ) as kindly:
        assert len(kindly.get_content(site.url).meta["page"]["attempts"]) == 1


def test_nobody_looks_for_a_browser_where_plain_http_is_enough() -> None:
    class Unneeded(Canned):
        def available(self) -> bool:
            raise AssertionError("nobody asked for it")

    reader = Reader(open_http(), [Canned("http", "the page"), Unneeded("chromium", "")])
    assert reader.read(URL, deadline=Deadline(5)).markdown == "the page"


def test_the_chain_follows_the_configured_order_and_leaves_out_what_is_not_configured() -> None:
    http, breakers = open_http(), Breakers(Settings())
    browser = Browser(BrowserSettings(enabled=False), environ={})
    providers = [Serper(api_key="a-key"), Tavily(api_key="b-key")]

    def names(*wanted: str) -> list[str]:
        return [step.name for step in content_chain(wanted, http, browser, providers, breakers)]

    assert names("http", "chromium", "serper", "exa", "tavily") == ["http", "chromium", "serper", "tavily"]
    assert names("tavily", "serper", "http") == ["tavily", "serper", "http"]


def test_a_paid_step_is_asked_only_after_the_page_refused_plain_http(serve: Any) -> None:
    page_site = serve({"/free": article("free"), "/wall": (403, {}, CLOUDFLARE)})
    serper_site = serve(answering({"markdown": SCRAPED}))
    http = open_http()
    steps = [HttpStep(http), scraper(serper_at(serper_site), http)]
    reader = Reader(http, steps)

    free = reader.read(page_site.url + "/free", deadline=Deadline(5))
    assert (free.method, serper_site.requests) == ("http", [])
    wall = reader.read(page_site.url + "/wall", deadline=Deadline(5))
    assert (wall.method, wall.markdown) == ("serper", SCRAPED.strip())


# -- loaders in the chain ----------------------------------------------------


class CannedLoader:
    """A loader for one site that answers what it was told to."""

    name = "canned"

    def __init__(self, outcome: str | Exception) -> None:
        self._outcome = outcome

    def matches(self, url: str) -> bool:
        return url.startswith("https://example.com/")

    def load(self, http: Http, url: str, *, deadline: Deadline) -> Page:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return Page(url, self._outcome, self.name)


def read_with_loader(outcome: str | Exception, url: str = URL) -> Page:
    reader = Reader(open_http(), [Canned("http", "from the chain")], loaders=[CannedLoader(outcome)])
    return reader.read(url, deadline=Deadline(5))


def test_a_loader_comes_before_the_chain_for_its_own_site_only() -> None:
    assert read_with_loader("whole thread").markdown == "whole thread"
    assert read_with_loader("whole thread", "https://other.example/").markdown == "from the chain"


@pytest.mark.parametrize("error", [PageFailed("no"), ProviderDown("down"), AuthError("no"), Timeout("late")])
def test_a_loader_that_fails_falls_through_to_the_chain(error: Exception) -> None:
    page = read_with_loader(error)

    assert page.markdown == "from the chain"
    assert [attempt.by for attempt in page.attempts] == ["canned", "http"]


# -- the cache ---------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def counting(pages: list[Page]) -> tuple[Callable[[], Page], list[int]]:
    calls: list[int] = []

    def once() -> Page:
        calls.append(1)
        return pages[min(len(calls), len(pages)) - 1]

    return once, calls


def test_a_page_is_remembered_for_its_time_and_no_longer() -> None:
    clock = Clock()
    cache = PageCache(300, now=clock)
    fetch, calls = counting([Page(URL, "text", "http")])

    first = cache.read(URL, fetch, deadline=Deadline(5))
    clock.time += 299
    again = cache.read(URL, fetch, deadline=Deadline(5))
    clock.time += 2
    cache.read(URL, fetch, deadline=Deadline(5))

    assert (first.cached, again.cached) == (False, True)
    assert again.markdown == "text"
    assert len(calls) == 2


def test_a_failure_is_forgotten_soon() -> None:
    clock = Clock()
    cache = PageCache(300, now=clock)
    fetch, calls = counting([failed_page(URL, "timed out"), Page(URL, "text", "http")])

    cache.read(URL, fetch, deadline=Deadline(5))
    clock.time += 5
    assert cache.read(URL, fetch, deadline=Deadline(5)).failure == "timed out"
    clock.time += 6
    assert cache.read(URL, fetch, deadline=Deadline(5)).markdown == "text"
    assert len(calls) == 2


def test_the_cache_stays_within_its_bytes_and_forgets_the_oldest_first() -> None:
    cache = PageCache(300, max_bytes=1000)
    for name in "abc":
        cache.read(name, lambda name=name: Page(name, name * 400), deadline=Deadline(5))  # type: ignore[misc]

    fetch, calls = counting([Page("x", "x")])
    assert cache.read("c", fetch, deadline=Deadline(5)).cached
    assert cache.read("b", fetch, deadline=Deadline(5)).cached
    assert not cache.read("a", fetch, deadline=Deadline(5)).cached
    assert len(calls) == 1


@pytest.mark.parametrize("ttl", [0.0, 1.0])
def test_pages_whose_time_is_over_do_not_pile_up(ttl: float) -> None:
    now = [0.0]
    cache = PageCache(ttl, now=lambda: now[0])
    for number in range(100):
        now[0] += 2
        cache.read(f"{URL}/{number}", lambda: Page(URL, "x" * 1000), deadline=Deadline(5))

    assert len(cache._pages) <= 1
    assert cache._size <= 2000


def test_what_a_broken_browser_says_is_the_reason_and_not_that_one_is_needed() -> None:
    broken = "needs JavaScript and the browser did not start"
    steps = [Canned("http", PageFailed(NEEDS_JAVASCRIPT)), Canned("chromium", PageFailed(broken))]
    assert chain(*steps).read(URL, deadline=Deadline(5)).failure == broken


def test_who_has_time_does_not_inherit_the_timeout_of_who_had_none() -> None:
    cache, begun = PageCache(300), threading.Event()

    def hurried() -> Page:
        begun.set()
        time.sleep(0.2)
        return failed_page(URL, TIMED_OUT)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.read, URL, hurried, deadline=Deadline(0.1))
        assert begun.wait(5)
        second = pool.submit(cache.read, URL, lambda: Page(URL, "the page"), deadline=Deadline(30))
        assert (first.result().failure, second.result().markdown) == (TIMED_OUT, "the page")
    assert cache.read(URL, lambda: Page(URL, "never"), deadline=Deadline(30)).markdown == "the page"


def test_a_timeout_for_want_of_time_is_not_remembered() -> None:
    cache = PageCache(300)
    assert cache.read(URL, lambda: failed_page(URL, TIMED_OUT), deadline=Deadline(0)).failure == TIMED_OUT
    assert cache.read(URL, lambda: Page(URL, "the page"), deadline=Deadline(30)).markdown == "the page"


@pytest.mark.parametrize(
    "kind", ["image/x WARNING forged\tms=1", "image/x\x0bforged=1", "no type at all", "a/" + "b" * 500]
)
def test_a_type_that_is_none_gets_into_no_note(kind: str) -> None:
    assert Reply(URL, 200, {"content-type": kind}, b"").content_type == ""


def test_the_limit_of_the_cache_counts_bytes_not_characters() -> None:
    cache = PageCache(300, max_bytes=1000)
    fetch, calls = counting([Page(URL, "漢" * 900)])

    cache.read(URL, fetch, deadline=Deadline(5))
    cache.read(URL, fetch, deadline=Deadline(5))

    assert len(calls) == 2, "2,700 bytes do not fit into 1,000"


def test_a_page_larger_than_the_whole_cache_is_returned_all_the_same() -> None:
    cache = PageCache(300, max_bytes=10)

    assert cache.read(URL, lambda: Page(URL, "x" * 100), deadline=Deadline(5)).markdown == "x" * 100


def test_concurrent_reads_of_one_url_fetch_once() -> None:
    cache = PageCache(300)
    release, started = threading.Event(), threading.Event()
    calls: list[int] = []

    def slow() -> Page:
        calls.append(1)
        started.set()
        release.wait(5)
        return Page(URL, "text")

    found: list[Page] = []
    threads = [
        threading.Thread(target=lambda: found.append(cache.read(URL, slow, deadline=Deadline(5)))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    started.wait(5)
    release.set()
    for thread in threads:
        thread.join(5)

    assert len(calls) == 1
    assert [page.markdown for page in found] == ["text"] * 8


def test_who_waits_for_another_read_waits_no_longer_than_its_own_deadline() -> None:
    cache = PageCache(300)
    release, started = threading.Event(), threading.Event()

    def slow() -> Page:
        started.set()
        release.wait(5)
        return Page(URL, "text")

    owner = threading.Thread(target=lambda: cache.read(URL, slow, deadline=Deadline(5)))
    owner.start()
    started.wait(5)

    page = cache.read(URL, slow, deadline=Deadline(0.1))
    release.set()
    owner.join(5)

    assert page.markdown == failure_note("timed out", URL)


def test_a_read_that_raises_is_not_remembered() -> None:
    cache = PageCache(300)

    def offline() -> Page:
        raise Offline("no")

    with pytest.raises(Offline):
        cache.read(URL, offline, deadline=Deadline(5))
    assert cache.read(URL, lambda: Page(URL, "text"), deadline=Deadline(5)).markdown == "text"


def test_a_page_read_twice_is_fetched_once(serve: Any) -> None:
    site = serve({"/": article("tides")})
    http = open_http()
    reader = Reader(http, [HttpStep(http)])

    first, second = (reader.read(site.url + "/", deadline=Deadline(5)) for _ in range(2))

    assert first.markdown == second.markdown
    assert (first.cached, second.cached) == (False, True)
    assert len(site.requests) == 1


def test_offline_a_page_that_is_cached_is_still_served_and_another_is_refused(serve: Any) -> None:
    site = serve({"/": article("tides"), "/2": article("waves")})
    cache = PageCache(300)
    online, offline = open_http(), open_http(offline=True)
    Reader(online, [HttpStep(online)], cache=cache).read(site.url + "/", deadline=Deadline(5))
    reader = Reader(offline, [HttpStep(offline)], cache=cache)

    assert "Paragraph 3: tides" in reader.read(site.url + "/", deadline=Deadline(5)).markdown
    with pytest.raises(Offline, match="^scrape unavailable: offline mode is enabled$"):
        reader.read(site.url + "/2", deadline=Deadline(5))
    assert site.paths == ["/"]


# -- one page is parsed at a time --------------------------------------------


def test_the_page_with_the_earliest_deadline_is_parsed_next(wait_until: Callable[..., Any]) -> None:
    slot, free = ParseSlot(), threading.Event()
    order: list[float] = []
    first = threading.Thread(target=slot.run, args=(lambda: free.wait(10), Deadline(10)))
    first.start()
    wait_until(lambda: slot._taken)
    others = []
    for number, seconds in enumerate((30, 20, 40, 20.5)):
        work = functools.partial(order.append, seconds)
        others.append(threading.Thread(target=slot.run, args=(work, Deadline(seconds))))
        others[-1].start()
        wait_until(lambda number=number: len(slot._waiting) == number + 1)
    free.set()
    for thread in (first, *others):
        thread.join(10)
    assert order == [20, 20.5, 30, 40]
    assert slot.run(lambda: "free again", Deadline(1)) == "free again"


def test_a_page_whose_turn_never_comes_times_out_and_the_others_go_on(wait_until: Callable[..., Any]) -> None:
    slot, free = ParseSlot(), threading.Event()
    first = threading.Thread(target=slot.run, args=(lambda: free.wait(10), Deadline(10)))
    first.start()
    wait_until(lambda: slot._taken)
    with pytest.raises(Timeout, match="no time left to convert it"):
        slot.run(lambda: None, Deadline(0.05))
    free.set()
    first.join(10)
    assert slot.run(lambda: "free again", Deadline(1)) == "free again"


def test_a_parser_that_fails_does_not_keep_its_turn() -> None:
    slot = ParseSlot()
    with pytest.raises(ZeroDivisionError):
        slot.run(lambda: 1 // 0, Deadline(1))
    assert slot.run(lambda: "free again", Deadline(1)) == "free again"


def test_a_crowd_of_pages_is_parsed_one_by_one_and_none_is_lost() -> None:
    slot = ParseSlot()
    inside: list[int] = []
    most: list[int] = []

    def parse() -> str:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.001)
        inside.pop()
        return "done"

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(lambda _: slot.run(parse, Deadline(20)), range(200))) == ["done"] * 200
    assert max(most) == 1
