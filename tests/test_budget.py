"""Section 10: fitting pages into the response."""

import dataclasses
import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kindly_search import (
    SearchResult,
    arranged,
    condensed,
    continued,
    cost,
    fair_shares,
    fit_results,
    html_to_markdown,
    relevance,
    split_blocks,
)

URL = "https://example.com/docs/page.html"

# The last line of a part: how much is left, of how much, and the call that goes on.
MORE = re.compile(
    r'\n\n_\[([\d,]+) of ([\d,]+) characters left\. Continue with get_content\(url="([^"]*)", start_index=(\d+)\)\]_\Z'
)

# The line that stands for what was left out of a condensed page.
GAP = re.compile(
    r'^_\[([\d,]+) characters(?: under (.+))? left out: get_content\(url="([^"]*)", start_index=(\d+)\)\]_$'
)

# A line that may open or close a code block, also in a list or a quotation.
FENCE = re.compile(r"^[ >]*(?:[-*+] |\d+[.)] )*[ >]*(`{3,}|~{3,})([^`]*)$")


def open_fence(markdown: str) -> str:
    """The fence that is still open at the end of the text, told the way CommonMark does."""
    fence = ""
    for line in markdown.split("\n"):
        mark = FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and not mark[2].strip():
            fence = ""
    return fence


def all_parts(markdown: str, limit: int, url: str = URL) -> list[tuple[int, str]]:
    """Every part of a page with the index it was asked for, got by following the calls that the parts name."""
    parts, start = [], 0
    while True:
        answer = continued(markdown, url, start=start, limit=limit)
        more = MORE.search(answer)
        parts.append((start, answer[: more.start()] if more else answer))
        if not more:
            return parts
        assert more[3] == url
        assert int(more[4]) > start, "the next part must begin later than this one"
        start = int(more[4])


def serialised(page_content: str, url: str = URL) -> int:
    return len(json.dumps({"url": url, "page_content": page_content}, ensure_ascii=False))


def code_block(lines: int, language: str = "python") -> str:
    body = "\n".join(f"    value_{i} = compute({i})  # step {i}" for i in range(lines))
    return f"```{language}\n{body}\n```\n\n"


def table(rows: int) -> str:
    return "| name | value |\n| --- | --- |\n" + "".join(f"| row {i} | {i * i} |\n" for i in range(rows)) + "\n"


def marked_code(marker: str, lines: int) -> str:
    """A code block that begins on the line of a list marker or inside a quotation."""
    indent = re.sub(r"[^>]", " ", marker)
    body = "\n".join(f"{indent}line {i}" if i % 5 else indent for i in range(lines))
    return f"{marker}```sh\n{body}\n{indent}```\n\n"


def wide_table(columns: int) -> str:
    header = "| " + " | ".join(f"column number {i}" for i in range(columns)) + " |\n"
    return header + "|" + " --- |" * columns + "\n" + ("| " + " | ".join(["x"] * columns) + " |\n") * 5 + "\n"


def long_page(sections: int = 30, paragraphs: int = 3) -> str:
    """A page on one topic per section; the opening says what it is about."""
    parts = ["# The handbook\n\nThis handbook explains every part of the machine.\n\n"]
    for i in range(sections):
        parts.append(f"## Part {i}\n\n")
        parts += [
            f"Paragraph {j} of part {i} says ordinary things about bolts. " * 6 + "\n\n" for j in range(paragraphs)
        ]
    return "".join(parts)


# One piece of a page as strangers write it; the sizes reach beyond a quarter of the smallest budget.
words = st.text(alphabet='abc é€😀"\\\t.', min_size=1, max_size=30)
pieces = st.one_of(
    st.builds(lambda text, times: text * times + "\n\n", words, st.integers(1, 60)),
    st.builds(lambda text: f"## {text.strip() or 'x'}\n\n", words),
    st.builds(code_block, st.integers(1, 80)),
    st.builds(table, st.integers(1, 120)),
    st.builds(lambda n: "".join(f"- item {i}\n  more of it\n" for i in range(n)) + "\n", st.integers(1, 60)),
    st.builds(lambda n: "x" * n + "\n\n", st.integers(1, 4000)),
    st.builds(lambda n: "\x01\x0c\u2028" * n + "\n\n", st.integers(1, 500)),
    st.builds(lambda before, n: before + code_block(n), st.sampled_from(["Example:\n", "x\n\n\n"]), st.integers(1, 80)),
    st.builds(marked_code, st.sampled_from(["- ", "* ", "12. ", "> ", "- > "]), st.integers(1, 80)),
    st.builds(lambda n: "~~~~\n" + "```\n\n" * n + "~~~~\n\n", st.integers(1, 200)),
    st.builds(wide_table, st.integers(1, 60)),
)
pages = st.lists(pieces, min_size=1, max_size=12).map("".join)
limits = st.integers(2000, 9000)


def thorough(examples: int) -> settings:
    """The same examples in every run, however slow the machine: a failure must not depend on luck."""
    return settings(max_examples=examples, deadline=None, derandomize=True)


# -- blocks ------------------------------------------------------------------


@thorough(100)
@given(st.text())
def test_the_blocks_of_any_text_joined_are_the_text(text: str) -> None:
    blocks = split_blocks(text)

    assert "".join(block.text for block in blocks) == text
    assert all(text[block.start : block.end] == block.text for block in blocks)


def test_a_block_ends_with_the_blank_lines_after_it() -> None:
    assert [block.text for block in split_blocks("one\nstill one\n\n\ntwo\n")] == ["one\nstill one\n\n\n", "two\n"]


def test_a_fenced_block_with_blank_lines_inside_is_one_block() -> None:
    code = "```python\nfirst\n\n\nsecond\n```\n\n"

    assert [block.text for block in split_blocks(f"Before\n\n{code}After")] == ["Before\n\n", code, "After"]


def test_a_shorter_fence_inside_a_longer_one_does_not_end_it() -> None:
    code = "````\n```\n\ninside\n```\n````\n\n"

    assert [block.text for block in split_blocks(code + "After")] == [code, "After"]


@pytest.mark.parametrize("marker", ["- ", "* ", "1. ", "> ", "   "])
def test_a_fence_that_begins_on_the_line_of_a_list_marker_is_one_block(marker: str) -> None:
    indent = marker if marker == "> " else " " * len(marker)
    code = f"{marker}```sh\n{indent}one\n{indent}\n{indent}two\n{indent}```\n\n"

    assert [block.text for block in split_blocks(f"{code}After\n\nThe end")] == [code, "After\n\n", "The end"]


def test_code_in_a_list_item_does_not_swallow_the_rest_of_a_converted_page() -> None:
    html = (
        "<main><p>Intro text that is long enough.</p><ol><li><pre><code>one\n\ntwo</code></pre></li></ol>"
        "<p>After it.</p><p>The end.</p></main>"
    )

    blocks = [block.text.strip() for block in split_blocks(html_to_markdown(html))]

    assert blocks[-2:] == ["After it.", "The end."]


def test_a_line_that_begins_with_inline_code_opens_no_fence() -> None:
    blocks = split_blocks("```a``` is inline code.\n\nNext\n\nLast")

    assert [block.text for block in blocks] == ["```a``` is inline code.\n\n", "Next\n\n", "Last"]


@pytest.mark.parametrize("separator", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_only_newlines_divide_lines_so_that_a_table_row_stays_whole(separator: str) -> None:
    row = f"| a{separator}{separator}b | c |\n"

    assert [block.text for block in split_blocks(row)] == [row]


def test_a_block_knows_the_headings_it_stands_under() -> None:
    blocks = split_blocks("# A\n\nintro\n\n## B\n\nb\n\n### C\n\nc\n\n## D\n\nd")

    assert {block.text.strip(): block.headings for block in blocks if not block.is_heading} == {
        "intro": ("A",),
        "b": ("A", "B"),
        "c": ("A", "B", "C"),
        "d": ("A", "D"),
    }


def test_a_hash_inside_code_is_no_heading() -> None:
    blocks = split_blocks("# A\n\n```sh\n# not a heading\n\n# neither\n```\n\ntext")

    assert [block.is_heading for block in blocks] == [True, False, False]
    assert blocks[-1].headings == ("A",)


# -- continuation ------------------------------------------------------------


def test_a_page_that_fits_comes_whole_and_unchanged() -> None:
    page = long_page(2)

    assert continued(page, URL, start=0, limit=60_000) == page


def test_a_cut_ends_with_one_line_that_names_the_exact_call() -> None:
    page = long_page()

    answer = continued(page, URL, start=0, limit=5000)

    more = MORE.search(answer)
    assert more
    left, total, index = (int(more[i].replace(",", "")) for i in (1, 2, 4))
    assert total == len(page)
    assert left == len(page) - index
    assert page[:index].rstrip("\n") == answer[: more.start()]


@thorough(150)
@given(pages, limits)
def test_following_the_calls_gives_the_whole_page_without_gap_or_overlap(page: str, limit: int) -> None:
    whole = arranged(page, limit)
    parts = all_parts(page, limit)

    ends = [start for start, _ in parts[1:]] + [len(whole)]
    for (start, text), end in zip(parts, ends, strict=True):
        assert whole[start:end].rstrip("\n") == text.rstrip("\n")


@thorough(150)
@given(pages, limits)
def test_no_part_is_longer_than_the_limit_as_json(page: str, limit: int) -> None:
    start = 0
    while True:
        answer = continued(page, URL, start=start, limit=limit)
        assert serialised(answer) <= limit
        more = MORE.search(answer)
        if not more:
            return
        start = int(more[4])


@thorough(100)
@given(st.text(max_size=300), st.integers(1, 200), limits, st.integers(0, 70_000))
def test_any_text_from_any_index_stays_within_the_limit(text: str, times: int, limit: int, start: int) -> None:
    answer = continued(text * times, URL, start=start, limit=limit)

    assert serialised(answer) <= limit


@thorough(100)
@given(pages, limits)
def test_no_part_ends_inside_a_code_block(page: str, limit: int) -> None:
    assert not [text[-200:] for _, text in all_parts(page, limit) if open_fence(text)]


def test_a_code_block_that_would_fit_but_for_the_frame_of_the_answer_is_not_cut_open() -> None:
    for lines in range(40, 60):
        page = "Example:\n" + code_block(lines)
        for limit in range(cost(page), cost(page) + 120, 10):
            assert not [text for _, text in all_parts(page, max(limit, 2000)) if open_fence(text)]


@thorough(60)
@given(st.integers(1, 400), limits)
def test_a_table_is_cut_between_rows_only(rows: int, limit: int) -> None:
    for _, text in all_parts("Intro\n\n" + table(rows), limit):
        lines = [line for line in text.split("\n") if line.strip() and line != "Intro"]
        assert all(line.startswith("|") and line.endswith("|") for line in lines)


def test_every_part_of_a_giant_table_has_its_header_and_no_row_is_lost() -> None:
    parts = [text for _, text in all_parts(table(2000), 4000)]

    assert len(parts) > 5
    assert all(text.startswith("| name | value |\n| --- | --- |\n") for text in parts)
    rows = [line for text in parts for line in text.split("\n") if line.startswith("| row")]
    assert rows == [f"| row {i} | {i * i} |" for i in range(2000)]


def test_every_part_of_a_giant_code_block_is_fenced_with_its_language_and_no_line_is_lost() -> None:
    parts = [text for _, text in all_parts(code_block(3000), 6000)]

    lines = [line for text in parts for line in text.split("\n")]
    assert len(parts) > 10
    assert all(text.startswith("```python\n") and text.rstrip("\n").endswith("\n```") for text in parts)
    assert [line for line in lines if line and not line.startswith("```")] == code_block(3000).split("\n")[1:-3]


@pytest.mark.parametrize("before", ["Example:\n", "- item\n  ", "> "])
def test_a_giant_code_block_right_below_other_text_is_never_cut_open(before: str) -> None:
    indent = "> " if before == "> " else "  " if before.startswith("-") else ""
    code = "\n".join([f"{indent}line {i}" if i % 7 else indent.rstrip() for i in range(2000)])
    page = f"{before}```sh\n{code}\n{indent}```\n\nAfter\n"

    parts = [text for _, text in all_parts(page, 4000)]

    assert len(parts) > 3
    assert not [text[-80:] for text in parts if open_fence(text)]
    assert parts[-1].rstrip().endswith("After")


def test_a_giant_line_is_cut_between_words_and_no_word_is_lost() -> None:
    line = " ".join(f"word{i}." if i % 9 == 0 else f"word{i}" for i in range(5000))

    parts = [text for _, text in all_parts(line, 4000)]

    assert len(parts) > 5
    assert " ".join(" ".join(parts).split()) == line


def test_a_giant_line_without_a_single_blank_is_cut_all_the_same() -> None:
    parts = [text for _, text in all_parts("x" * 50_000, 4000)]

    assert "".join("".join(parts).split()) == "x" * 50_000


def test_characters_that_json_spells_out_count_with_their_full_length() -> None:
    page = "\x01\x02" * 20_000

    assert all(serialised(continued(page, URL, start=start, limit=3000)) <= 3000 for start in (0, 5000, 39_000))


def test_an_index_beyond_the_end_is_answered_with_a_sentence() -> None:
    assert continued("short", URL, start=10**9, limit=2000) == "_Nothing is left: this page has 5 characters._"


def test_an_index_below_zero_is_the_beginning() -> None:
    assert continued("short", URL, start=-5, limit=2000) == "short"


def test_an_empty_page_is_an_empty_part() -> None:
    assert continued("", URL, start=0, limit=2000) == ""


@pytest.mark.parametrize(
    "page",
    ["x " * 2_500_000, "```js\n" + "a=1;" * 50_000 + "\n```\n", "Short paragraph.\n\n" * 20_000, table(50_000)],
    ids=["one line of words", "minified script", "many paragraphs", "many rows"],
)
def test_a_huge_page_is_cut_and_condensed_in_linear_time(page: str) -> None:
    started = time.process_time()

    continued(page, URL, start=0, limit=60_000)
    condensed(page, URL, "paragraph", room=20_000, limit=60_000)

    assert time.process_time() - started < 3


# -- fair shares -------------------------------------------------------------


@thorough(100)
@given(st.lists(st.integers(0, 100_000), max_size=10), st.integers(-1000, 200_000))
def test_nobody_gets_more_than_it_needs_and_all_together_no_more_than_there_is(needs: list[int], room: int) -> None:
    shares = fair_shares(needs, room)

    assert len(shares) == len(needs)
    assert all(0 <= share <= need for share, need in zip(shares, needs, strict=True))
    assert sum(shares) <= max(0, room)


@thorough(100)
@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=10), st.integers(0, 200_000))
def test_room_stays_unused_only_when_everybody_has_enough(needs: list[int], room: int) -> None:
    spare = room - sum(fair_shares(needs, room))

    assert spare < len(needs) or fair_shares(needs, room) == needs


@thorough(100)
@given(st.lists(st.integers(0, 100_000), min_size=2, max_size=10), st.integers(0, 200_000))
def test_a_page_that_is_cut_has_at_least_as_much_as_any_other(needs: list[int], room: int) -> None:
    shares = fair_shares(needs, room)

    for share, need in zip(shares, needs, strict=True):
        assert share == need or share >= max(shares) - len(needs)


def test_short_pages_donate_what_they_spare() -> None:
    assert fair_shares([100, 50_000, 50_000], 60_100) == [100, 30_000, 30_000]


# -- condensed pages ---------------------------------------------------------


NEEDLE = "The flux capacitor needs 1.21 gigawatts of power.\n\n"


def page_with_needle() -> str:
    return long_page().replace("## Part 17\n\n", f"## Power supply\n\n{NEEDLE}")


def test_a_page_that_fits_is_not_condensed() -> None:
    assert condensed("# A\n\ntext", URL, "query", room=1000, limit=2000) == "# A\n\ntext"


def test_a_condensed_page_keeps_its_opening_and_the_block_that_answers_the_query() -> None:
    short = condensed(page_with_needle(), URL, "flux capacitor power", room=4000, limit=60_000)

    assert short.startswith("# The handbook\n\nThis handbook explains every part of the machine.\n\n")
    assert NEEDLE.strip() in short
    assert cost(short) <= 4000


def test_the_opening_stays_even_where_the_answers_would_fill_the_page() -> None:
    opening = "# The handbook\n\n" + "This handbook explains every part. " * 18 + "\n\n"
    answers = "".join(f"Answer {i}: everything about the flux capacitor.\n\n" for i in range(500))

    short = condensed(f"{opening}{answers}", URL, "flux capacitor", room=4000, limit=60_000)

    assert short.startswith(opening.strip())
    assert short.count("flux capacitor") > 20


def test_the_heading_of_a_kept_block_is_kept_with_it() -> None:
    short = condensed(page_with_needle(), URL, "gigawatts", room=4000, limit=60_000)

    assert f"## Power supply\n\n{NEEDLE.strip()}" in short


def test_without_words_of_the_query_on_the_page_its_beginning_is_kept() -> None:
    short = condensed(long_page(), URL, "zzz qqq", room=4000, limit=60_000)

    assert short.startswith("# The handbook")
    assert "## Part 0\n\nParagraph 0 of part 0" in short


def gaps_of(short: str) -> list[re.Match[str]]:
    return [gap for line in short.split("\n") if (gap := GAP.match(line))]


def test_blocks_stay_in_page_order_with_one_line_per_gap() -> None:
    page = page_with_needle()
    short = condensed(page, URL, "flux capacitor power", room=4000, limit=60_000)

    at = 0
    follows_gap = False
    for chunk in split_blocks(short):
        text = chunk.text.strip("\n")
        if GAP.match(text):
            assert not follows_gap, "two gap lines in a row"
            follows_gap = True
            continue
        at = page.index(text, at)
        follows_gap = False
    assert 2 <= len(gaps_of(short)) <= 8


def test_what_is_kept_and_what_the_gaps_count_add_up_to_the_page() -> None:
    page = page_with_needle()
    short = condensed(page, URL, "flux capacitor power", room=4000, limit=60_000)

    kept = sum(len(block.text) for block in split_blocks(page) if block.text.strip() in short)
    assert kept + sum(int(gap[1].replace(",", "")) for gap in gaps_of(short)) == len(page)


def test_the_call_in_a_gap_line_shows_exactly_what_was_left_out() -> None:
    page = page_with_needle()
    short = condensed(page, URL, "flux capacitor power", room=4000, limit=60_000)

    for gap in gaps_of(short):
        shown = continued(page, URL, start=int(gap[4]), limit=60_000)
        first = split_blocks(shown)[0].text.strip()
        assert first not in short
        assert page[int(gap[4]) :].startswith(first)
        before = page[: int(gap[4])].rstrip("\n").rpartition("\n\n")[2]
        assert before in short, "what stands right before the gap is shown"


def test_a_gap_line_names_the_headings_it_hides_and_no_more_than_four() -> None:
    short = condensed(page_with_needle(), URL, "flux capacitor power", room=4000, limit=60_000)

    named = [gap[2] for gap in gaps_of(short)]
    assert any("“Part 29”" in names or names.endswith(", …") for names in named)
    assert all(names.count("“") <= 4 for names in named)
    assert "“Part 18”" in named[-1]


def test_code_blocks_are_kept_whole_or_left_out_whole() -> None:
    page = "".join(f"## Recipe {i}\n\nHow to do {i}.\n\n{code_block(12)}" for i in range(30))
    page += "## Retry\n\nUse the decorator.\n\n```python\n@retry(times=3)\n\ndef fetch():\n    ...\n```\n\n"

    short = condensed(page, URL, "retry decorator", room=5000, limit=60_000)

    assert "```python\n@retry(times=3)\n\ndef fetch():\n    ...\n```" in short
    assert not open_fence(short)
    assert short.count("```python") * 2 == short.count("```")
    whole = code_block(12).strip()
    assert short.count("```python") == short.count(whole) + 1


def test_a_page_whose_first_block_is_too_large_shows_its_beginning_with_the_fence_closed() -> None:
    page = code_block(1000)

    short = condensed(page, URL, "value_900", room=1500, limit=60_000)

    assert short.startswith("```python\n    value_0 = compute(0)")
    assert not open_fence(short)
    more = MORE.search(short)
    assert more
    assert cost(short) <= 1500


@thorough(100)
@given(pages, st.integers(900, 8000), st.sampled_from(["item", "compute step", "row", "nothing of it"]))
def test_a_condensed_page_is_never_larger_than_its_room(page: str, room: int, query: str) -> None:
    short = condensed(page, URL, query, room=room, limit=max(room, 4000))

    assert cost(short) <= room
    assert not open_fence(short)


def test_a_condensed_page_of_characters_that_json_spells_out_stays_within_its_room() -> None:
    for room in range(900, 1300, 7):
        assert cost(condensed("\x01" * 2000 + "\n\nEnd", URL, "end", room=room, limit=4000)) <= room


def test_rare_words_of_the_query_count_more_than_common_ones() -> None:
    blocks = split_blocks("the common word\n\nthe common word\n\nthe rare thing\n\nthe common word\n\nthe common word")

    scores = relevance(blocks, "the common rare")

    assert max(range(5), key=scores.__getitem__) == 2


def test_a_heading_lends_its_words_to_the_blocks_below_it() -> None:
    blocks = split_blocks("# Page\n\n## Install\n\nRun this.\n\n## Remove\n\nRun that.")

    scores = {block.text.strip(): score for block, score in zip(blocks, relevance(blocks, "remove"), strict=True)}

    assert scores["Run that."] > scores["Run this."]


# -- the whole answer of web_search ------------------------------------------


def answer_size(results: list[SearchResult]) -> int:
    return len(json.dumps({"results": [dataclasses.asdict(result) for result in results]}, ensure_ascii=False))


def test_results_that_fit_are_not_touched() -> None:
    results = [SearchResult("T", "https://a.example/", "S", "page")]

    assert fit_results(results, "query", 60_000) == results


results_of_any_size = st.lists(
    st.builds(
        SearchResult,
        title=st.integers(0, 500).map(lambda n: 't"' * (n // 2)),
        link=st.sampled_from([URL, URL + "?" + "q" * 200]),
        snippet=st.integers(0, 1500).map(lambda n: "s" * n),
        page_content=pages,
    ),
    max_size=10,
)


@thorough(100)
@given(results_of_any_size, st.sampled_from([25_000, 40_000, 60_000]))
def test_the_whole_answer_stays_within_the_limit(results: list[SearchResult], limit: int) -> None:
    fitted = fit_results(results, "compute row", limit)

    assert answer_size(fitted) <= limit
    assert [result.link for result in fitted] == [result.link for result in results]


@pytest.mark.parametrize("limit", [4000, 8000, 16_000])
def test_ten_results_stay_within_small_limits(limit: int) -> None:
    results = [SearchResult("t" * 300, f"{URL}?{i}", "s" * 900, long_page()) for i in range(10)]

    fitted = fit_results(results, "bolts", limit)

    assert answer_size(fitted) <= limit
    assert len(fitted) == 10


def test_three_results_stay_within_the_smallest_limit_that_may_be_set() -> None:
    results = [SearchResult("t" * 300, f"{URL}?{i}", "s" * 900, long_page()) for i in range(3)]

    assert answer_size(fit_results(results, "bolts", 2000)) <= 2000


def test_ten_long_pages_share_the_answer_fairly() -> None:
    results = [SearchResult(f"T{i}", f"{URL}?{i}", "S", long_page(60)) for i in range(10)]

    sizes = [len(result.page_content) for result in fit_results(results, "bolts", 60_000)]

    assert min(sizes) > 4000
    assert max(sizes) - min(sizes) < 1000


def test_titles_and_snippets_beyond_reason_are_clipped() -> None:
    [result] = fit_results([SearchResult("t" * 5000, URL, "s" * 5000, "page")], "query", 60_000)

    assert result.title == "t" * 299 + "…"
    assert result.snippet == "s" * 999 + "…"
    assert result.page_content == "page"


def test_no_results_are_no_results() -> None:
    assert fit_results([], "query", 2000) == []
