"""html_to_markdown against its peers: what it keeps, what it drops, what it costs, and how many tokens a fact takes.

    python bench/extraction.py [--pages FOLDER] [--rounds 2]

The pages are made here: articles, documentation, references, threads and listings, each with menus, a cookie banner,
related stories, comments and a footer around a text that we know. Quality is the F1 of words kept and dropped. FOLDER
may hold more pages (*.html, *.html.gz), and beside them a truth.json ({"name": {"body": text}}) that says what to
keep; without it they count for speed only. All runs share one process and take turns; the figures are CPU time.
"""

import argparse
import collections
import gzip
import json
import random
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from report import CHARACTERS_PER_TOKEN, ROOT, Table

sys.path.insert(0, str(ROOT))

from kindly_search import html_to_markdown

Reader = Callable[[str], str]

WORDS = (
    "river stone window garden engine market signal paper winter harbour method error value thread memory kernel packet"
    " buffer socket parser branch commit review season teacher letter minister budget report court player record music"
).split()

# A fact of the made pages: a key and a value that stand together nowhere else.
FACT = re.compile(r"\bkey\d+ equals value\d+\b")


#: How the names of pages end whose HTML does not tell what its blocks are for.
DISGUISED = " in disguise"


@dataclass(frozen=True)
class Page:
    """One page, and the words of its main content where they are known."""

    name: str
    html: str
    truth: str = ""


# -- the readers -------------------------------------------------------------------------------------------------------


def readers() -> dict[str, Reader]:
    """Ours, and the peers that are installed."""
    found: dict[str, Reader] = {"kindly": html_to_markdown}
    for name, load in (
        ("trafilatura", _trafilatura),
        ("readability-lxml + markdownify", _readability),
        ("html2text", _html2text),
    ):
        try:
            found[name] = load()
        except ImportError:
            print(f"{name} is not installed: left out", file=sys.stderr)
    return found


def _trafilatura() -> Reader:
    import trafilatura

    return lambda html: trafilatura.extract(html, output_format="markdown") or ""


def _readability() -> Reader:
    import markdownify
    import readability

    return lambda html: markdownify.markdownify(readability.Document(html).summary())


def _html2text() -> Reader:
    import html2text

    def read(html: str) -> str:
        converter = html2text.HTML2Text()
        converter.body_width = 0
        return converter.handle(html)

    return read


# -- the tables --------------------------------------------------------------------------------------------------------


def tables(folder: Path | None = None, rounds: int = 2) -> list[Table]:
    """Quality and cost on the made pages and on those of the folder, and tokens per fact."""
    made = list(made_pages())
    told = [page for page in made if not page.name.endswith(DISGUISED)]
    found = [
        compared("made here, blocks with telling names", told, rounds),
        compared("made here, names and tags that tell nothing", [page for page in made if page not in told], rounds),
    ]
    if folder:
        found.append(compared("of the folder given", list(folder_pages(folder)), rounds))
    return [*found, tokens_per_fact(made)]


def compared(whose: str, pages: Sequence[Page], rounds: int) -> Table:
    size = sum(len(page.html) for page in pages) / len(pages) / 1000
    table = Table(
        f"HTML to Markdown: pages {whose}",
        f"{len(pages)} pages, {size:.0f} kB on average. Words kept and dropped against the known text; CPU per page, "
        f"the fastest of {rounds}, and its ratio to trafilatura.",
        ("reader", "F1", "precision", "recall", "CPU ms", "CPU ratio"),
    )
    everyone = readers()
    cost = {name: sum(fastest(read, page.html, rounds) for page in pages) for name, read in everyone.items()}
    base = cost.get("trafilatura", float("nan"))
    for name, read in everyone.items():
        scores = [f"{score:.3f}" for score in quality(read, [page for page in pages if page.truth])]
        table.rows.append((name, *scores, 1000 * cost[name] / len(pages), cost[name] / base))
    return table


def fastest(read: Reader, html: str, rounds: int) -> float:
    return min(cpu_seconds(read, html) for _ in range(rounds))


def cpu_seconds(read: Reader, html: str) -> float:
    started = time.process_time()
    read(html)
    return time.process_time() - started


def quality(read: Reader, pages: Iterable[Page]) -> tuple[float, float, float]:
    """F1, precision and recall over the words of all pages."""
    kept = found = wanted = 0
    for page in pages:
        got, truth = words_of(read(page.html)), words_of(page.truth)
        kept += sum((got & truth).values())
        found += sum(got.values())
        wanted += sum(truth.values())
    precision, recall = kept / max(found, 1), kept / max(wanted, 1)
    return 2 * precision * recall / max(precision + recall, 1e-9), precision, recall


def words_of(text: str) -> "collections.Counter[str]":
    """The words without the addresses of links."""
    return collections.Counter(re.findall(r"\w+", re.sub(r"\]\([^)]*\)", "]", text)))


def tokens_per_fact(pages: Sequence[Page]) -> Table:
    """How much a model has to read for one fact, by reader."""
    everyone = {"raw HTML": str, **readers()}
    total = sum(len(set(FACT.findall(page.truth))) for page in pages)
    table = Table(
        "Tokens per useful fact",
        f"{len(pages)} pages with {total} facts in their main content. A token is counted as "
        f"{CHARACTERS_PER_TOKEN} characters; the ratio is to kindly, in tokens per fact.",
        ("reader", "facts kept", "tokens", "tokens per fact", "ratio"),
    )
    figures = {name: facts_and_tokens(read, pages) for name, read in everyone.items()}
    ours = figures["kindly"][1] / figures["kindly"][0]
    for name, (facts, tokens) in figures.items():
        each = tokens / max(facts, 1)
        table.rows.append((name, f"{facts} of {total}", f"{tokens:,}", each, each / ours))
    return table


def facts_and_tokens(read: Reader, pages: Sequence[Page]) -> tuple[int, int]:
    facts = tokens = 0
    for page in pages:
        text = read(page.html)
        # Markup and line breaks inside a fact do not make it less of one.
        said = set(FACT.findall(" ".join(re.findall(r"\w+", text))))
        facts += len(said & set(FACT.findall(page.truth)))
        tokens += len(text) // CHARACTERS_PER_TOKEN
    return facts, tokens


# -- the pages ---------------------------------------------------------------------------------------------------------


def made_pages(count: int = 20) -> Iterator[Page]:
    """Pages of five kinds, half of them without telling names; every word of boilerplate starts with "junk"."""
    for number in range(count):
        chance = random.Random(number)
        make = (article, documentation, reference, thread, listing)[number % 5]
        body, truth = make(chance)
        html, name = frame(body, chance, kind=make.__name__), f"{make.__name__} {number}"
        yield Page(name + DISGUISED, disguised(html), truth) if number // 5 % 2 else Page(name, html, truth)


def disguised(html: str) -> str:
    """The page as a bundler would ship it: no name tells what a block is for, and nearly everything is a <div>."""
    plain = re.sub(r"(</?)(?:main|article|aside|section|header)\b", r"\1div", html)
    return re.sub(r'(class|id)="([^"]+)"', lambda found: f'{found[1]}="c{zlib.crc32(found[2].encode()):x}"', plain)


def frame(body: str, chance: random.Random, *, kind: str) -> str:
    """A page around the content, as heavy as pages are: scripts, styles, menus, related stories, comments."""
    menu = "".join(f'<li class="menu-item"><a href="/{i}" data-track="nav-{i}">junkmenu{i}</a></li>' for i in range(60))
    teasers = "".join(
        f'<div class="card"><h4><a href="/s/{i}">junkstory{i}</a></h4><p>{junk(chance, 20)}</p></div>'
        for i in range(12)
    )
    comments = "".join(f'<li class="comment"><p>{junk(chance, 30)}</p></li>' for _ in range(15))
    discussion = "" if kind == "thread" else f'<section id="comments" class="comments"><ol>{comments}</ol></section>'
    og_type = "article" if kind == "article" else "website"
    return f"""<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{kind}</title>
    <meta property="og:type" content="{og_type}"><style>{".x{color:red}" * 800}</style>
    <script>{"var a=1;" * 4000}</script></head>
    <body class="page"><header class="site-header"><nav class="main-nav"><ul>{menu}</ul></nav></header>
    <div id="cookie-banner" class="consent"><p>{junk(chance, 25)}</p><button>junkaccept</button></div>
    <div class="layout"><main id="content">{body}<div class="share-buttons"><a href="#">junkshare</a></div></main>
    <aside class="sidebar"><h3>junkpopular</h3>{teasers}</aside></div><div class="related-stories">{teasers}</div>
    {discussion}<div class="newsletter-signup"><p>{junk(chance, 15)}</p></div>
    <footer class="site-footer"><p>{junk(chance, 40)}</p><ul>{menu}</ul></footer></body></html>"""


def article(chance: random.Random, paragraphs: int = 14) -> tuple[str, str]:
    texts = [f"{prose(chance, chance.randint(40, 90))} {fact(chance)}" for _ in range(paragraphs)]
    body = "".join(f"<p>{text}</p>" for text in texts)
    return f'<article><div class="article-body">{body}</div></article>', " ".join(texts)


def documentation(chance: random.Random) -> tuple[str, str]:
    html, truth = "", ""
    for _ in range(8):
        title, text, item = prose(chance, 3), f"{prose(chance, 50)} {fact(chance)}", prose(chance, 6)
        code = f"def {chance.choice(WORDS)}(value):\n    return value + {chance.randint(1, 9)}"
        html += f"<h2>{title}</h2><p>{text}</p><pre><code class='language-python'>{code}</code></pre>"
        html += f"<ul><li>{item}</li></ul>"
        truth += f" {title} {text} python {code} {item}"
    return f'<article class="markdown-body">{html}</article>', truth


def reference(chance: random.Random) -> tuple[str, str]:
    html, truth = "", ""
    for _ in range(12):
        name, text, cell = prose(chance, 1), prose(chance, 25), f"{prose(chance, 4)} {fact(chance)}"
        html += (
            f"<h3><code>{name}</code></h3><p>{text}</p><table><tr><th>Name</th><th>Meaning</th></tr>"
            f"<tr><td>{name}</td><td>{cell}</td></tr></table><dl><dt>{name}</dt><dd>{cell}</dd></dl>"
        )
        truth += f" {name} {text} Name Meaning {name} {cell} {name} {cell}"
    return html, truth


def thread(chance: random.Random) -> tuple[str, str]:
    posts = [f"{prose(chance, chance.randint(15, 80))} {fact(chance)}" for _ in range(15)]
    body = "".join(
        f'<div class="post" id="p{i}"><div class="post-body"><p>{text}</p></div></div>' for i, text in enumerate(posts)
    )
    return f'<div class="thread">{body}</div>', " ".join(posts)


def listing(chance: random.Random) -> tuple[str, str]:
    entries = [(prose(chance, 4), f"{prose(chance, 18)} {fact(chance)}") for _ in range(25)]
    body = "".join(
        f'<li><a href="/e/{i}">{title}</a> <span>{text}</span></li>' for i, (title, text) in enumerate(entries)
    )
    return f"<h1>Entries</h1><ul>{body}</ul>", "Entries " + " ".join(f"{title} {text}" for title, text in entries)


def prose(chance: random.Random, count: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(count))


def fact(chance: random.Random) -> str:
    return f"key{chance.randint(1000, 9999)} equals value{chance.randint(1000, 9999)}"


def junk(chance: random.Random, count: int) -> str:
    return " ".join("junk" + chance.choice(WORDS) for _ in range(count))


def folder_pages(folder: Path) -> Iterator[Page]:
    """The pages of a folder, with what its truth.json says about them."""
    beside = [path for path in (folder / "truth.json", folder.parent / "truth.json") if path.exists()]
    truth = json.loads(beside[0].read_text(encoding="utf-8")) if beside else {}
    for path in sorted(folder.glob("*.htm*")):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        name = path.name.partition(".")[0]
        yield Page(name, data.decode(errors="replace"), truth.get(name, {}).get("body", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=Path, metavar="FOLDER", help="a folder with more pages")
    parser.add_argument("--rounds", type=int, default=2, help="how often each page is read; the fastest counts")
    arguments = parser.parse_args()
    for table in tables(arguments.pages, arguments.rounds):
        print(table.markdown())


if __name__ == "__main__":
    main()
