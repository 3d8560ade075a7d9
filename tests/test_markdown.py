"""What html_to_markdown, fragment_to_markdown, read_html and strip_tracking promise."""

import ast
import contextlib
import gc
import html as html_entities
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import FrameType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kindly_search
from kindly_search import Document, fragment_to_markdown, html_to_markdown, read_html, strip_tracking

PAGE = "https://example.org/docs/page.html"


@pytest.fixture(params=["our own tree", "html5lib"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs a test once as usual and once with every page read by html5lib, as otherwise only broken ones are."""
    if request.param == "html5lib":
        monkeypatch.setattr(kindly_search, "_Tree", kindly_search._Markup)
    yield request.param


PAIRS = {
    # headings and paragraphs
    "a heading": ("<h1>One</h1><h6>Six</h6>", "# One\n\n###### Six"),
    "a heading keeps its number": ("<h2>1. Install</h2>", "## 1. Install"),
    "a heading loses its anchor": ('<h2>Use <a class="headerlink" href="#use">¶</a></h2>', "## Use"),
    "a heading loses a hash link": ('<h3><a href="#x">#</a>Title</h3>', "### Title"),
    "a heading loses an edit link": ('<h3>T <a href="/edit">Edit this page</a></h3>', "### T"),
    "a heading is not bold": ("<h2><b>Bold</b></h2>", "## Bold"),
    "a button in a heading": ("<h3><button>Why?</button></h3>", "### Why?"),
    "a signature as heading": ('<h4 class="code-header">fn <a href="/f">f</a>(*x)</h4>', "#### `fn f(*x)`"),
    "paragraphs": ("<p>a</p>\n\n\n<p>b</p>", "a\n\nb"),
    "paragraphs nobody closed": ("<p>one<p>two", "one\n\ntwo"),
    "loose text": ("<div>a<p>b</p>c</div>", "a\n\nb\n\nc"),
    "white space": ("<p>  a \n\t b  </p>", "a b"),
    "a comment between words": ("<p>Count:<!-- --> <b>5</b><!-- --> <i>x</i></p>", "Count: **5** *x*"),
    "white space in a tag that is dropped": ("<div>a<font> </font>b</div>", "a b"),
    "an empty block between words": ('a<div style="clear:both"></div>b<ul></ul>c', "a\n\nb\n\nc"),
    "an empty block in a line": ("<div><b>a<span><div></div></span>b</b></div>", "**a b**"),
    "a hidden block between words": ("<div>a<div hidden>x</div>b<i hidden>y</i>c</div>", "a bc"),
    "a button between words": ("<p>a<button>x</button>b</p>", "a b"),
    "centred words": ("a<center>b</center>c", "a\n\nb\n\nc"),
    "the end of a line break": ("a</br>b<pre>c</br>d</pre>", "a  \nb\n\n```\nc\nd\n```"),
    "the end of a paragraph nobody opened": ("a</p>b <b>c</b></p>d", "a\n\nb **c**\n\nd"),
    "the end of a paragraph in a cell": (
        "<table><tr><td>a</p>b<td>c</p></tr></p></table>",
        "|  |  |\n| --- | --- |\n| a<br>b | c |",
    ),
    "the end of a paragraph in code": ("<pre>a</p>b</pre>", "```\na\nb\n```"),
    "a line break": ("<p>a<br>b<br/> c</p>", "a  \nb  \nc"),
    "a rule": ("<p>a</p><hr><p>b</p>", "a\n\n---\n\nb"),
    # inline
    "bold and italic": ("<p><b>b</b> <strong>s</strong> <em>e</em> <i>i</i></p>", "**b** **s** *e* *i*"),
    "white space inside bold": ("<p>a<b> b </b>c</p>", "a **b** c"),
    "bold beside bold": ("<p><b>a</b><b>b</b></p>", "**ab**"),
    "nothing in bold": ("<p>a<b></b>b</p>", "ab"),
    "deleted text": ("<p><del>a</del> <s>b</s></p>", "~~a~~ ~~b~~"),
    "a short quotation": ("<p><q>hi</q></p>", '"hi"'),
    "keys": ("<p><kbd>Ctrl</kbd>+<kbd>C</kbd></p>", "`Ctrl`+`C`"),
    "an exponent": ("<p>10<sup>6</sup>, H<sub>2</sub>O</p>", "10<sup>6</sup>, H<sub>2</sub>O"),
    "an ordinal": ("<p>the 1<sup>st</sup></p>", "the 1st"),
    "an abbreviation": (
        '<p><abbr title="World Health Organization">WHO</abbr></p>',
        "WHO (World Health Organization)",
    ),
    "an abbreviation that says nothing new": ('<p><abbr title="who">WHO</abbr></p>', "WHO"),
    "entities": ("<p>caf&eacute; &#x1F600; &lt; 5 &copy;</p>", "café 😀 < 5 ©"),
    "carriage returns": ("a&#13;b<pre>c&#13;\nd&#xD;&#10;e&#xdf&#13f</pre>", "a b\n\n```\nc\nd\neß\nf\n```"),
    "a non-breaking space": ("<p>a&nbsp;b\u00a0c</p>", "a b c"),
    "pictures drawn in the page": (
        "<p>a<svg><svg><path/></svg><text>x</text></svg> b<svg class=i /> c<svg><svg/>x</svg> d</p>",
        "a b c d",
    ),
    "words on a map": ("<p>a <map name=m><area href=/x>b</map> c</p>", "a b c"),
    "unseen characters": ("<p>hy\u00adphen\u200b</p>", "hyphen"),
    "hidden elements": ('<p>a<span hidden>x</span><i style="display: none">y</i><b aria-hidden="true">z</b></p>', "a"),
    "text for screen readers": ('<p>a<span class="sr-only">x</span></p>', "a"),
    # lists
    "a list": ("<ul><li>a</li><li>b</li></ul>", "- a\n- b"),
    "a list nobody closed": ("<ul><li>a<li>b</ul>", "- a\n- b"),
    "a numbered list": ("<ol><li>a</li><li>b</li></ol>", "1. a\n2. b"),
    "a list that starts at 9": ('<ol start="9"><li>a</li><li>b</li></ol>', "9. a\n10. b"),
    "an item with its own number": ('<ol><li>a</li><li value="7">b</li></ol>', "1. a\n7. b"),
    "nested lists": ("<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>", "- a\n  - b\n- c"),
    "mixed lists": ("<ol><li>a<ul><li>b<ol><li>c</li></ol></li></ul></li></ol>", "1. a\n   - b\n     1. c"),
    "a list right inside a list": ("<ul><li>a</li><ul><li>b</li></ul></ul>", "- a\n  - b"),
    "an item of two paragraphs": ("<ul><li><p>a</p><p>b</p></li></ul>", "- a\n\n  b"),
    "code in an item": ("<ol><li>a<pre>x\n\n  y</pre></li></ol>", "1. a\n\n   ```\n   x\n\n     y\n   ```"),
    "an empty item": ("<ul><li></li><li>a</li></ul>", "- a"),
    "a task list": (
        '<ul><li><input type="checkbox" checked disabled> done</li><li><input type=checkbox> open</li></ul>',
        "- [x] done\n- [ ] open",
    ),
    "a definition list": ("<dl><dt>T</dt><dd>D</dd><dd>E</dd></dl>", "T\n: D\n: E"),
    "a longer definition": ("<dl><dt>T</dt><dd><p>a</p><p>b</p></dd></dl>", "**T**\n\na\n\nb"),
    "a signature as term": (
        '<dl><dt class="sig">f(<em>*args</em>)<a class="headerlink" href="#f">¶</a></dt><dd><p>a</p><p>b</p></dd></dl>',
        "`f(*args)`\n\na\n\nb",
    ),
    # tables
    "a table": (
        "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>",
        "| a | b |\n| --- | --- |\n| 1 | 2 |",
    ),
    "a table without header": (
        "<table><tr><td>1</td><td>2</td></tr></table>",
        "|  |  |\n| --- | --- |\n| 1 | 2 |",
    ),
    "a table whose first row is bold": (
        "<table><tr><td><b>a</b></td><td><b>b</b></td></tr><tr><td>1</td><td>2</td></tr></table>",
        "| **a** | **b** |\n| --- | --- |\n| 1 | 2 |",
    ),
    "pipes in a table": (
        "<table><tr><th>a|b</th><th>c</th></tr><tr><td><code>x|y</code></td><td>2</td></tr></table>",
        "| a\\|b | c |\n| --- | --- |\n| `x\\|y` | 2 |",
    ),
    "a cell over two columns": (
        '<table><tr><th colspan="2">a</th><th>b</th></tr><tr><td>1</td><td>2</td><td>3</td></tr></table>',
        "| a |  | b |\n| --- | --- | --- |\n| 1 | 2 | 3 |",
    ),
    "a cell over two rows": (
        '<table><tr><th>a</th><th>b</th></tr><tr><td rowspan="2">1</td><td>2</td></tr><tr><td>3</td></tr></table>',
        "| a | b |\n| --- | --- |\n| 1 | 2 |\n| 1 | 3 |",
    ),
    "paragraphs in a cell": (
        "<table><tr><th>a</th><th>b</th></tr><tr><td><p>x</p><p>y</p></td><td>2</td></tr></table>",
        "| a | b |\n| --- | --- |\n| x<br>y | 2 |",
    ),
    "a caption": (
        "<table><caption>Sizes</caption><tr><th>a</th><th>b</th></tr></table>",
        "**Sizes**\n\n| a | b |\n| --- | --- |",
    ),
    "a layout table": (
        "<table role=presentation><tr><td><p>a</p></td><td><p>b</p></td></tr></table>",
        "a\n\nb",
    ),
    "a table around a table": (
        "<table><tr><td>x</td><td><table><tr><th>a</th><th>b</th></tr></table></td></tr></table>",
        "x\n\n| a | b |\n| --- | --- |",
    ),
    "a table of one column": ("<table><tr><td>a</td></tr><tr><td>b</td></tr></table>", "a\n\nb"),
    # code
    "inline code": ("<p><code>a  b</code> and <tt>c</tt></p>", "`a b` and `c`"),
    "inline code with backticks": ("<p><code>a`b</code> <code>``x</code></p>", "``a`b`` ``` ``x ```"),
    "inline code is not escaped": ("<p><code>*a* _b_ &lt;T&gt;</code></p>", "`*a* _b_ <T>`"),
    "a link in code": ('<p><code><a href="/f">f</a>()</code></p>', "`f()`"),
    "code as a link": ('<p><a href="/f"><code>f</code></a></p>', "[`f`](https://example.org/f)"),
    "code with line breaks": ("<p><code>a<br>b</code></p>", "```\na\nb\n```"),
    "a code block": ("<pre>def f():\n\treturn 1\n\n    x\n</pre>", "```\ndef f():\n\treturn 1\n\n    x\n```"),
    "generics": ("<pre>List&lt;String&gt; x = a &amp;&amp; b;</pre>", "```\nList<String> x = a && b;\n```"),
    "the first newline is syntax": ("<pre>\n  a</pre>", "```\n  a\n```"),
    "the second newline is code": ("<pre>\n\n  a</pre>", "```\n\n  a\n```"),
    "backticks in a code block": ("<pre>a\n```\nb</pre>", "````\na\n```\nb\n````"),
    "line breaks in a code block": ("<pre>a<br>  b<br/>c</pre>", "```\na\n  b\nc\n```"),
    "spaces a blogger indented with": ("<pre>&nbsp;&nbsp;a</pre>", "```\n  a\n```"),
    "language-x": ('<pre><code class="language-python">x</code></pre>', "```python\nx\n```"),
    "lang-x": ('<pre class="lang-js s-code-block"><code>x</code></pre>', "```js\nx\n```"),
    "highlight-source-x": ('<div class="highlight highlight-source-rust"><pre>x</pre></div>', "```rust\nx\n```"),
    "brush: x": ('<pre class="brush: java; gutter: true">x</pre>', "```java\nx\n```"),
    "data-lang": ('<pre><code data-lang="go">x</code></pre>', "```go\nx\n```"),
    "Pandoc": ('<pre class="sourceCode bash"><code class="sourceCode bash">x</code></pre>', "```bash\nx\n```"),
    "highlight.js": ('<pre><code class="hljs cpp">x</code></pre>', "```cpp\nx\n```"),
    "no language": ('<pre><code class="language-plaintext">x</code></pre>', "```\nx\n```"),
    "Sphinx": (
        '<div class="highlight-python3 notranslate"><div class="highlight"><pre><span></span>'
        '<span class="kn">import</span>'
        ' <span class="nn">os</span>\n</pre></div></div>',
        "```python\nimport os\n```",
    ),
    "Pygments with line numbers": (
        '<table class="highlighttable"><tr><td class="linenos"><div class="linenodiv"><pre>1\n2</pre></div></td>'
        '<td class="code"><div class="highlight"><pre><code class="language-c">a\n b\n</code></pre></div></td>'
        "</tr></table>",
        "```c\na\n b\n```",
    ),
    "Rouge with a gutter": (
        '<div class="language-ruby highlighter-rouge"><pre class="highlight"><code><table class="rouge-table">'
        "<tbody><tr>"
        '<td class="rouge-gutter gl"><pre class="lineno">1\n2\n</pre></td><td class="rouge-code"><pre>a\n  b\n'
        "</pre></td>"
        "</tr></tbody></table></code></pre></div>",
        "```ruby\na\n  b\n```",
    ),
    "Chroma with a gutter": (
        '<div class="highlight"><table class="lntable"><tr><td class="lntd"><pre class="chroma"><code>'
        '<span class="lnt">1\n'
        '</span></code></pre></td><td class="lntd"><pre class="chroma"><code class="language-go" data-lang="go">'
        '<span class="line"><span class="cl"><span class="kd">a</span>\n</span></span></code></pre></td></tr>'
        "</table></div>",
        "```go\na\n```",
    ),
    "Docusaurus": (
        '<div class="language-jsx codeBlockContainer_x"><div class="codeBlockContent_y">'
        '<pre class="prism-code language-jsx">'
        '<code class="codeBlockLines_z"><span class="token-line" style="color:#39">'
        '<span class="token plain">a {</span><br>'
        '</span><span class="token-line"><span class="token plain" style="display:inline-block">  b</span><br>'
        "</span></code>"
        '</pre><div class="buttonGroup_q"><button type="button">Copy</button></div></div></div>',
        "```jsx\na {\n  b\n```",
    ),
    "Prism": (
        '<pre class="line-numbers language-css"><code class="language-css"><span class="token comment">/* x */'
        "</span>\na"
        '<span aria-hidden="true" class="line-numbers-rows"><span></span></span></code></pre>',
        "```css\n/* x */\na\n```",
    ),
    "Shiki": (
        '<pre class="shiki"><code><span class="line"><span style="color:#F97">a</span></span>\n'
        '<span class="line">  b</span>'
        "</code></pre>",
        "```\na\n  b\n```",
    ),
    "a highlighter's spans in a span around the code": (
        '<span class="wrap"><pre><code><span class="k">if</span> x:\n    y()</code></pre></span>',
        "```\nif x:\n    y()\n```",
    ),
    "a span in a line number": (
        '<pre><span class="lineno"><span class="a">1</span>2</span> x\n<span class=k>y</span></pre>',
        "```\n x\ny\n```",
    ),
    "a span in a line": (
        '<pre><span class="line"><span class=k>a</span> b</span><span class="line">  c</span></pre>',
        "```\na b\n  c\n```",
    ),
    "more ends of spans than spans": ("<span>a<pre>x</span>\n  y</pre></span>", "a\n\n```\nx\n  y\n```"),
    "a span that its code closes": (
        '<span><pre><code><span class="line">x</code></span>\n  y</pre></span>',
        "```\nx\n  y\n```",
    ),
    "numbers that are links": ('<pre><a href="#1" id="1">1</a>a\n<a href="#2" id="2">2</a>b</pre>', "```\na\nb\n```"),
    "lines in divisions": ("<pre><div>a</div><div>  b</div></pre>", "```\na\n  b\n```"),
    "a title in a code block": (
        '<pre><div class="title">app.py</div><code>import os\nx</code></pre>',
        "```\napp.py\nimport os\nx\n```",
    ),
    "a division between lines": ("<pre>x<div>a</div>b<p>c</p>\n\n  <b>d</b></pre>", "```\nx\na\nb\nc\n\n  d\n```"),
    "white space after a division": ("<pre><div>a</div> <b>b</b></pre>", "```\na \nb\n```"),
    "links to lines that are numbers in the code": (
        '<pre>a[<a href="#L10">10</a>]\n<b>b</b> <a href="#L2">2</a>\n <a href="#3"> 3</a> c<div><a href="#4">4</a>d</div></pre>',
        "```\na[10]\nb 2\n  c\nd\n```",
    ),
    "lines in items": ('<pre class="prettyprint"><ol><li>a</li><li>  b</li></ol></pre>', "```\na\n  b\n```"),
    "a table in a code block": (
        '<pre><code class="hljs"><table class="hljs-ln"><tr><td class="hljs-ln-numbers">'
        '<div class="hljs-ln-n">1</div></td>'
        '<td class="hljs-ln-code">a</td></tr><tr><td class="hljs-ln-numbers">2</td><td>  b</td></tr></table>'
        "</code></pre>",
        "```\na\n  b\n```",
    ),
    "a GitHub blob": (
        '<table class="highlight js-file-line-container"><tr><td class="blob-num" data-line-number="1"></td>'
        '<td class="blob-code blob-code-inner">a</td></tr><tr><td class="blob-num"></td>'
        '<td class="blob-code">  b</td></tr>'
        "</table>",
        "```\na\n  b\n```",
    ),
    "Doxygen": (
        '<div class="fragment"><div class="line"><span class="lineno">    1</span>int f() {</div>'
        '<div class="line"><span class="lineno">    2</span>  return 0;</div></div>',
        "```\nint f() {\n  return 0;\n```",
    ),
    "a copy button": ('<div><pre>a<button class="copy">Copy</button></pre></div>', "```\na\n```"),
    # links and images
    "a relative link": ('<p><a href="../a?b=1#c">x</a></p>', "[x](https://example.org/a?b=1#c)"),
    "a tracked link": (
        '<p><a href="https://a.org/?utm_source=x&amp;id=1&amp;fbclid=2">x</a></p>',
        "[x](https://a.org/?id=1)",
    ),
    "a link within the page": ('<p><a href="#part">x</a> <a href="page.html#p">y</a></p>', "x y"),
    "a script link": ('<p><a href="javascript:go()">x</a></p>', "x"),
    "a bare address": ('<p><a href="https://a.org/b">https://a.org/b</a></p>', "<https://a.org/b>"),
    "parentheses in an address": ('<p><a href="/a_(b)">x</a></p>', "[x](https://example.org/a_%28b%29)"),
    "an address that is broken": ('<p><a href="http://[x">y</a></p>', "y"),
    "white space in a link": ('<p>a<a href="/x"> b </a>c</p>', "a [b](https://example.org/x) c"),
    "a link around a card": ('<a href="/x"><h3>T</h3><p>d</p></a>', "### [T](https://example.org/x)\n\nd"),
    "a link to nothing": ('<p>a<a href="/x"></a></p>', "a"),
    "an anchor nobody closed, before code": (
        "<a name=foo><pre>int <a href=T.html>T</a> x;\n  y</pre>",
        "```\nint T x;\n  y\n```",
    ),
    "an anchor nobody closed, before a heading": (
        "<A NAME=foo><h2>Title <a href=/y>link</a> rest</h2>",
        "## Title [link](https://example.org/y) rest",
    ),
    "an anchor nobody closed, before a paragraph": (
        "<a name=foo id=foo><p>See <a href=/y>foo</a> for more.</p>",
        "See [foo](https://example.org/y) for more.",
    ),
    "a link nobody closed, before code": (
        "<a href=/x><pre>int <a href=/y>T</a> x;\n  y</pre>",
        "```\nint T x;\n  y\n```",
    ),
    "a link nobody closed, before another": (
        "<p><a href=/x>a <b><a href=/y>b</a></b></p>",
        "[a](https://example.org/x) [b](https://example.org/y)",
    ),
    "an image": ('<p><img src="a.png" alt="A plan"></p>', "![A plan](https://example.org/docs/a.png)"),
    "a lazy image": (
        '<p><img src="data:image/gif;base64,R0" data-src="/a.png" alt="A plan"></p>',
        "![A plan](https://example.org/a.png)",
    ),
    "an image without words": ('<p>a<img src="a.png" alt=""><img src="b.png" alt="IMG_1.jpg"><img src=c.png></p>', "a"),
    "an image with a link": (
        '<p><a href="/x"><img src="/a.png" alt="A plan"></a></p>',
        "[![A plan](https://example.org/a.png)](https://example.org/x)",
    ),
    "an emoji": ('<p>a <img class="emoji" alt="🎉" src="/e.png"></p>', "a 🎉"),
    "a figure": (
        '<figure><img src="/a.png" alt="A plan"><figcaption>The plan.</figcaption></figure>',
        "![A plan](https://example.org/a.png)\n\nThe plan.",
    ),
    # formulas
    "a math/tex script": (r'<p>a <script type="math/tex">x<y</script></p>', "a $x<y$"),
    "a display formula": ('<p><script type="math/tex; mode=display">x^2</script></p>', "$$\nx^2\n$$"),
    "KaTeX": (
        '<p><span class="katex"><span class="katex-mathml"><math><semantics><mrow><mi>x</mi></mrow>'
        '<annotation encoding="application/x-tex">x^2</annotation></semantics></math></span>'
        '<span class="katex-html" aria-hidden="true">x2</span></span></p>',
        "$x^2$",
    ),
    "MathJax": (
        '<p><span class="MathJax_Preview">x2</span><span class="MathJax">x2</span><script type="math/tex">x^2'
        "</script></p>",
        "$x^2$",
    ),
    "Wikipedia": (
        '<p><span class="mwe-math-element"><span style="display: none;"><math alttext="{\\displaystyle x^2}">'
        "<mi>x</mi></math>"
        '</span><img class="mwe-math-fallback-image-inline" alt="{\\displaystyle x^2}" src="/x.svg"></span></p>',
        "$x^2$",
    ),
    "MathML alone": ("<p><math><msup><mi>x</mi><mn>2</mn></msup><mo>+</mo><mi>y</mi></math></p>", "$x^{2}+y$"),
    "MathML with nothing in it": (
        "<p><math/>a <math><msubsup><mi>x</mi><mrow/><mn>2</mn></msubsup><mspace width='1em' /></math></p>",
        "a $x_{}^{2}$",
    ),
    "TeX in the text": (r"<p>a \(x_1 * y_1\) b</p>", "a $x_1 * y_1$ b"),
    "TeX in a class": (r'<div class="math notranslate">\[x^2\]</div>', "$$\nx^2\n$$"),
    # the rest
    "a quotation": ("<blockquote><p>a</p><blockquote>b</blockquote></blockquote>", "> a\n>\n> > b"),
    "details": ("<details><summary>More</summary><p>a</p></details>", "**More**\n\na"),
    "an admonition": ('<div><p class="admonition-title">Note</p><p>a</p></div>', "**Note**\n\na"),
    "footnotes": (
        '<p>a<sup><a href="#fn1">1</a></sup></p><ol><li id="fn1">b <a href="#ref1">↩</a></li></ol>',
        "a[^1]\n\n[^1]: b",
    ),
    # text that only looks like Markdown
    "asterisks": ("<p>f(*args, **kwargs)</p>", "f(*args, **kwargs)"),
    "asterisks around a word": ("<p>a *b* c</p>", r"a \*b\* c"),
    "underscores": ("<p>snake_case and _x</p>", "snake_case and _x"),
    "underscores around a word": ("<p>call __init__ now</p>", r"call \_\_init__ now"),
    "a tag": ("<p>Map&lt;K, V&gt;, 1 &lt; 2</p>", r"Map\<K, V>, 1 < 2"),
    "brackets": ("<p>a[0] and [x](y)</p>", r"a[0] and \[x](y)"),
    "a backtick": ("<p>a ` b</p>", r"a \` b"),
    "a backslash": (r"<p>C:\dir and \*</p>", r"C:\dir and \\*"),
    "an entity": ("<p>&amp;lt; and a &amp; b</p>", r"\&lt; and a & b"),
    "a hash sign": ("<p># a</p><p>#1</p>", "\\# a\n\n#1"),
    "a dash": ("<p>- a</p><p>-1</p>", "\\- a\n\n-1"),
    "a number": ("<p>1. a</p><p>1.5</p>", "1\\. a\n\n1.5"),
    "a quotation mark": ("<p>&gt; a</p>", "\\> a"),
    "a ticked box": ("<ul><li>[x] a</li></ul>", r"- \[x] a"),
}


@pytest.mark.parametrize(("html", "markdown"), PAIRS.values(), ids=PAIRS.keys())
def test_every_construct_has_its_markdown(html: str, markdown: str, parser: str) -> None:
    assert fragment_to_markdown(html, PAGE) == markdown


@pytest.mark.parametrize("name", ["a list", "a table", "a code block", "Sphinx", "footnotes", "KaTeX", "a figure"])
def test_a_whole_page_is_rendered_like_a_fragment(name: str, parser: str) -> None:
    html, markdown = PAIRS[name]
    page = f"<html><head><title>T</title></head><body><main>{html}</main></body></html>"
    assert html_to_markdown(page, PAGE) == markdown


# ---------------------------------------------------------------- the tree

TAGS = (
    "p div span b i a ul ol li table thead tbody tfoot tr td th caption h1 h2 form button pre code blockquote dl dt dd br"
    " img hr section article main nav em strong math mi mrow annotation input label ruby rt font center details summary"
    " figure figcaption sup small address fieldset legend menu dir body html head col colgroup o:p option select textarea"
    " script style title noscript object u s tt"
).split()
ATTRIBUTES = ("", ' class="x"', ' href="?a=1&copy=2&amp;b&lt"', " hidden", ' id="a&#39;b"', ' alt="&notit;&not;&nbsp"')
TEXTS = ("x ", " ", "\n", "a&amp;b", "<!-- c -->", "&lt;i&gt;", "y\n\nz", "&copy", "\n\nq")


def tag_soup(random: Random) -> str:
    """A small page, now well nested, now not at all."""
    names, care = random.sample(TAGS, random.randint(2, 12)), random.random()
    parts: list[str] = []
    opened: list[str] = []
    for _ in range(random.randint(1, 25)):
        dice = random.random()
        if dice < 0.45:
            opened.append(random.choice(names))
            parts.append(f"<{opened[-1]}{random.choice(ATTRIBUTES)}>")
        elif dice < 0.75 and opened:
            parts.append(f"</{opened.pop() if random.random() < care else random.choice(opened)}>")
        else:
            parts.append(random.choice(TEXTS))
    return "".join(parts)


def shape(node: "kindly_search._Node") -> list[object]:
    """The subtree as plain lists, to be compared."""
    found: list[object] = []
    for child in node.children:
        if not isinstance(child, str):
            found.append((child.tag, dict(child.attrs), shape(child)))
        elif found and isinstance(found[-1], str):
            found[-1] += child
        else:
            found.append(child)
    return found


def grown(page: str, out: "kindly_search._Tree | kindly_search._Markup") -> list[object]:
    return shape(kindly_search._Cleaner(page, out, keep_all=True).run().root)


def test_a_page_that_needs_no_parser_has_the_tree_that_html5lib_makes_of_it() -> None:
    random = Random(7)
    pages = [html for html, _ in PAIRS.values()] + [tag_soup(random) for _ in range(1500)]
    regular = 0
    for page in pages:
        with contextlib.suppress(kindly_search._Soup):
            ours = grown(page, kindly_search._Tree())
            assert ours == grown(page, kindly_search._Markup()), page
            regular += 1
    assert regular > len(pages) / 2  # or hardly anything was compared


@pytest.mark.parametrize(
    ("soup", "markdown"),
    [
        ("<b>a<p>b</b>c</p>", "**a**\n\n**b**c"),
        ("<table>before<tr><td>a</td><td>b</td></tr></table>", "before\n\n|  |  |\n| --- | --- |\n| a | b |"),
        ("<ul><li>a<div>b<li>c</div></ul>", "- a\n\n  b\n- c"),
        ("<a href='/x'>a<div><a href='/y'>b</a></div></a>", "[a](https://example.org/x)\n\n[b](https://example.org/y)"),
    ],
)
def test_tag_soup_is_read_as_browsers_read_it(soup: str, markdown: str) -> None:
    with pytest.raises(kindly_search._Soup):
        grown(soup, kindly_search._Tree())
    assert fragment_to_markdown(soup, PAGE) == markdown


TRACKING = {
    "https://a.org/": "https://a.org/",
    "https://a.org/?utm_source=x": "https://a.org/",
    "https://a.org/?a=1&utm_medium=y&b=%20+#c?utm_x=1": "https://a.org/?a=1&b=%20+#c?utm_x=1",
    "https://a.org/?gclid=1&a": "https://a.org/?a",
    "https://a.org/?ref=nav&id=": "https://a.org/?ref=nav&id=",
    "https://a.org/#/route?utm_source=x": "https://a.org/#/route?utm_source=x",
    "not an address": "not an address",
}


@pytest.mark.parametrize(("url", "stripped"), TRACKING.items())
def test_only_tracking_parameters_leave_an_address(url: str, stripped: str) -> None:
    assert strip_tracking(url) == stripped


# ---------------------------------------------------------------- main content

COOKIES = '<div id="cookie-banner"><p>We use cookies to improve your experience on this site. Accept all?</p></div>'
PROSE = "This sentence is long enough to count as running text, and it says what the page is about."


def assert_holds(markdown: str, *wanted: str) -> None:
    assert not [text for text in wanted if text not in markdown], markdown


def assert_lacks(markdown: str, *unwanted: str) -> None:
    assert not [text for text in unwanted if text in markdown], markdown


def test_sphinx_pages_keep_their_chapters_and_lose_their_frame(parser: str) -> None:
    page = f"""<html><head><title>Comments — Proj 1.0</title></head><body>{COOKIES}
    <div class="related" role="navigation"><ul><li><a href="genindex.html">index</a></li></ul></div>
    <div class="document"><div class="documentwrapper"><div class="bodywrapper"><div class="body" role="main">
    <section id="comments"><h1>Comments<a class="headerlink" href="#comments">¶</a></h1><p>{PROSE}</p>
    <div class="admonition note"><p class="admonition-title">Note</p><p>Mind the gap.</p></div>
    <div class="highlight-default notranslate"><div class="highlight"><pre><span class="n">x</span> = 1\n</pre></div>
    </div>
    <section id="related"><h2>Related<a class="headerlink" href="#related">¶</a></h2><p>More about it.</p></section>
    <dl class="py function"><dt class="sig sig-object py" id="p.f">
    <span class="sig-name">f</span>(<em>a</em>, <em>*b</em>)
    <a class="reference internal" href="_modules/p.html"><span class="viewcode-link">[source]</span></a></dt>
    <dd><p>Does it.</p><dl class="field-list"><dt>Parameters</dt><dd><p>a – first</p></dd></dl></dd></dl>
    </section></div></div></div>
    <div class="sphinxsidebar" role="navigation"><h3>Table of Contents</h3><ul><li><a href="#x">Comments</a></li>
    </ul></div>
    </div><div class="footer">© Copyright 2020, Authors. Created using Sphinx.</div></body></html>"""
    markdown = html_to_markdown(page, PAGE)
    assert_holds(
        markdown, "# Comments", "**Note**", "```\nx = 1\n```", "## Related", "`f(a, *b)`", "Parameters\n: a – first"
    )
    assert_lacks(markdown, "cookies", "index", "Table of Contents", "Copyright", "¶", "[source]")


def test_mkdocs_pages_keep_their_text_and_lose_their_frame(parser: str) -> None:
    page = f"""<body><header class="md-header"><nav><a href="/">Project</a></nav></header>
    <div class="md-container"><main class="md-main"><div class="md-main__inner md-grid">
    <div class="md-sidebar md-sidebar--primary"><nav class="md-nav"><ul><li><a href="a/">Install</a></li></ul></nav>
    </div>
    <div class="md-sidebar md-sidebar--secondary"><nav class="md-nav"><a href="#x">On this page</a></nav></div>
    <div class="md-content"><article class="md-content__inner md-typeset">
    <a href="https://github.com/x/edit/main/a.md" title="Edit this page" class="md-button">Edit this page</a>
    <h1 id="install">Install<a class="headerlink" href="#install" title="Permanent link">¶</a></h1><p>{PROSE}</p>
    <div class="highlight"><pre><span></span><code class="language-bash"><a id="l-0-1" href="#l"></a>pip install x
</code></pre></div><details class="tip" open><summary>Tip</summary><p>Use a venv.</p></details></article></div></div>
    <footer class="md-footer"><nav><a href="b/">Next</a></nav><p>Made with Material for
    MkDocs</p></footer></main></div></body>"""
    markdown = html_to_markdown(page, PAGE)
    assert_holds(markdown, "# Install", PROSE, "```bash\npip install x\n```", "**Tip**\n\nUse a venv.")
    assert_lacks(markdown, "Project", "On this page", "Edit", "Next", "Made with", "¶")


def test_docusaurus_pages_keep_their_text_and_lose_their_frame(parser: str) -> None:
    page = f"""<body class="navigation-with-keyboard"><div id="__docusaurus"><nav class="navbar"><a href="/">Docs</a>
    </nav>
    <div class="main-wrapper docs-wrapper"><aside class="theme-doc-sidebar-container"><ul><li><a href="/a">Guide</a>
    </li></ul>
    </aside><main class="docMainContainer"><div class="row"><div class="col"><article>
    <nav class="theme-doc-breadcrumbs">
    <ul><li><a href="/">Home</a></li></ul></nav><div class="theme-doc-markdown markdown"><h1>Intro</h1><p>{PROSE}</p>
    <div class="theme-admonition theme-admonition-info alert alert--info"><div>info</div><div><p>Good to know.</p>
    </div></div>
    <div role="tabpanel" hidden><pre class="language-js"><code>let a</code></pre></div></div>
    <footer class="theme-doc-footer"><a href="https://github.com/e">Edit this page</a></footer></article>
    <nav class="pagination-nav"><a href="/b">Next<div>Install</div></a></nav></div>
    <div class="col col--3"><div class="tableOfContents_x"><ul><li><a href="#i">Intro section</a></li></ul></div>
    </div></div>
    </main></div><footer class="footer"><p>Copyright © 2024 Project.</p></footer></div></body>"""
    markdown = html_to_markdown(page, PAGE)
    assert_holds(markdown, "# Intro", PROSE, "Good to know.", "```js\nlet a\n```")
    assert_lacks(markdown, "Guide", "Home", "Edit this page", "Install", "Intro section", "Copyright")


def test_remarks_in_documentation_are_kept(parser: str) -> None:
    page = f"""<main><h1>T</h1><p>{PROSE}</p><pre>x</pre><aside class="notice">Mind this.</aside>
    <div class="alert alert-warning" role="alert">Mind that.</div><aside class="right-sidebar">Junk</aside></main>"""
    markdown = html_to_markdown(page, PAGE)
    assert_holds(markdown, "Mind this.", "Mind that.")
    assert_lacks(markdown, "Junk")


def test_rustdoc_pages_keep_every_method(parser: str) -> None:
    methods = "".join(
        f'<details class="toggle method-toggle" open><summary><section id="method.m{i}" class="method">'
        f'<h4 class="code-header">'
        f'pub fn <a href="#method.m{i}" class="fn">m{i}</a>(&amp;self) -&gt; '
        f'<a class="primitive" href="../p.html">usize</a></h4>'
        f'</section></summary><div class="docblock"><p>Method {i} does what its name says.</p>'
        f'<pre class="rust"><code>m{i}()'
        "</code></pre></div></details>"
        for i in range(5)
    )
    page = f"""<body class="rustdoc struct"><nav class="sidebar"><a href="#a">Methods</a></nav><main>
    <div class="width-limiter">
    <section id="main-content" class="content"><div class="main-heading"><h1>Struct <span class="struct">Thing</span>
    </h1></div>
    <pre class="rust item-decl"><code>pub struct Thing&lt;T&gt; {{ }}</code></pre>
    <details class="toggle top-doc" open><summary class="hideme"><span>Expand description</span></summary>
    <div class="docblock"><p>{PROSE}</p></div></details><h2 id="implementations">Implementations</h2>
    <div id="implementations-list">{methods}</div></section></div></main></body>"""
    markdown = html_to_markdown(page, PAGE)
    assert_holds(
        markdown, "# Struct Thing", "```rust\npub struct Thing<T> { }\n```", "#### `pub fn m0(&self) -> usize`", "m4()"
    )
    assert_lacks(markdown, "Expand description", "Methods")


def test_javadoc_pages_keep_signatures_and_tables(parser: str) -> None:
    page = f"""<body class="class-declaration-page"><div class="flex-box"><header role="banner" class="flex-header">
    <nav role="navigation"><div class="top-nav" id="navbar-top"><ul><li><a href="../index.html">Overview</a></li>
    </ul></div>
    </nav></header><div class="flex-content"><main role="main"><div class="header"><h1 class="title">Class Foo</h1>
    </div>
    <section class="class-description" id="class-description"><div class="type-signature">public class <b>Foo</b></div>
    <div class="block">{PROSE}</div></section><section class="method-summary" id="method-summary">
    <h2>Method Summary</h2>
    <table class="memberSummary"><tr><th>Modifier</th><th>Method</th></tr><tr><td><code>void</code></td>
    <td><code><a href="#run()">run</a>()</code></td></tr></table></section></main>
    <footer role="contentinfo"><p><small>Copyright © 1993, Oracle.</small></p></footer></div></div></body>"""
    markdown = html_to_markdown(page, PAGE)
    assert_holds(markdown, "# Class Foo", "public class **Foo**", PROSE, "| `void` | `run()` |")
    assert_lacks(markdown, "Overview", "Oracle")


def test_doxygen_pages_keep_members_and_code(parser: str) -> None:
    page = f"""<body><div id="top"><div id="titlearea"><table><tr><td id="projectalign">Proj</td></tr></table></div>
    </div>
    <div id="side-nav" class="ui-resizable side-nav-resizable"><div id="nav-tree"><a href="x.html">Tree</a></div></div>
    <div id="doc-content"><div class="header"><div class="headertitle"><div class="title">ns::Foo Class</div></div>
    </div>
    <div class="contents"><div class="textblock"><p>{PROSE}</p></div><h2 class="groupheader">Member Function</h2>
    <div class="memitem"><div class="memproto"><table class="memname"><tr><td class="memname">int f</td><td>(</td>
    <td class="paramtype">int</td><td>x</td><td>)</td></tr></table></div><div class="memdoc"><p>Does f.</p>
    <div class="fragment"><div class="line"><span class="lineno">1</span>f(1);</div></div></div></div></div></div>
    <address class="footer"><small>Generated by doxygen 1.9</small></address></body>"""
    markdown = html_to_markdown(page, PAGE)
    assert_holds(markdown, PROSE, "## Member Function", "int f", "Does f.", "```\nf(1);\n```")
    assert_lacks(markdown, "Tree", "Generated by")


def test_man_pages_keep_their_layout(parser: str) -> None:
    page = """<body><div class="nav-bar"><table><tr><td><a href="../index.html">man7.org</a></td></tr></table></div>
    <h1>ls(1) — Linux manual page</h1><h2><a id="NAME" href="#NAME"></a>NAME</h2>
    <pre>       ls - list directory contents
</pre><h2>SYNOPSIS</h2><pre>       <b>ls</b> [<i>OPTION</i>]... [<i>FILE</i>]...
</pre><div class="footer"><p>HTML rendering created 2024-01-01</p></div></body>"""
    markdown = html_to_markdown(page, PAGE)
    assert_holds(markdown, "## NAME", "       ls - list directory contents", "       ls [OPTION]... [FILE]...")
    assert_lacks(markdown, "man7.org", "rendering")


def test_a_forum_thread_keeps_every_post(parser: str) -> None:
    posts = "".join(
        f'<div class="post comment" id="p{i}"><div class="author">user{i}</div><div class="postbody">'
        f"<p>Post {i}: {PROSE}</p>"
        "</div></div>"
        for i in range(6)
    )
    page = f"""<html><body><div class="navbar"><a href="/">Board index</a></div><h1>How do I do it?</h1>
    <div id="page-body">{posts}</div><div id="footer">Powered by a forum</div></body></html>"""
    markdown = html_to_markdown(page, "https://forum.example.org/viewtopic.php?t=1")
    assert_holds(markdown, *(f"Post {i}: " for i in range(6)), "user3")
    assert_lacks(markdown, "Board index", "Powered by")


def test_an_article_loses_its_comments_and_other_stories(parser: str) -> None:
    body = "".join(f"<p>Paragraph {i}. {PROSE}</p>" for i in range(6))
    comments = "".join(f'<li class="comment"><p>Reader {i}: {PROSE} {PROSE}</p></li>' for i in range(9))
    page = f"""<html><head><meta property="og:type" content="article"></head><body><header><nav><a href="/">Home</a>
    </nav></header>
    <article><div class="byline">By Jo</div><div class="body">{body}<figure><img src="a.jpg" alt="Big crowd">
    <figcaption>A crowd. Photo: AP</figcaption></figure><p><strong><a href="/o">READ MORE ABOUT IT</a></strong></p>
    </div>
    <div class="share">Share this</div><div class="related-stories"><h3>Related</h3><p>{PROSE}</p></div>
    <div class="newsletter-signup"><p>Get our newsletter every morning, it is free of charge.</p></div></article>
    <section id="comments"><ol>{comments}</ol></section><footer><p>All rights reserved by the
    paper.</p></footer></body></html>"""
    markdown = html_to_markdown(page, "https://news.example.org/2024/story")
    assert_holds(markdown, *(f"Paragraph {i}." for i in range(6)))
    assert_lacks(markdown, "Reader", "READ MORE", "Related", "newsletter", "By Jo", "Photo: AP", "All rights", "Home")


def test_a_readme_keeps_headings_badges_apart_and_code(parser: str) -> None:
    page = f"""<body class="logged-out"><header><a href="/login">Sign in</a></header><main><div id="repo-content">
    <article class="markdown-body entry-content"><h1 dir="auto">tool<a class="anchor" href="#tool"></a></h1>
    <p><a href="https://ci"><img src="/badge.svg" alt="build status"></a></p><p>{PROSE}</p><h2>Install</h2>
    <div class="highlight highlight-source-shell"><pre>pip install tool</pre><div class="zeroclipboard-container">
    <clipboard-copy aria-label="Copy">Copy</clipboard-copy></div></div><ul class="contains-task-list">
    <li class="task-list-item">
    <input type="checkbox" checked> done</li></ul></article></div></main><footer><p>© 2024 Host,
    Inc.</p></footer></body>"""
    markdown = html_to_markdown(page, PAGE)
    assert_holds(markdown, "# tool", PROSE, "## Install", "```shell\npip install tool\n```", "- [x] done")
    assert_lacks(markdown, "Sign in", "Copy", "© 2024")


def test_a_changelog_keeps_every_version(parser: str) -> None:
    versions = "".join(
        f"<h2>1.{i}.0</h2><ul><li>Fixed <code>f{i}</code></li><li>Added g{i}</li></ul>" for i in range(9)
    )
    page = f"<body><nav><a href='/'>Home</a></nav><div class=content><h1>Changelog</h1>{versions}</div></body>"
    markdown = html_to_markdown(page, PAGE)
    assert_holds(markdown, "# Changelog", "## 1.0.0\n\n- Fixed `f0`\n- Added g0", "## 1.8.0")
    assert_lacks(markdown, "Home")


def test_an_api_reference_keeps_parameters_and_examples(parser: str) -> None:
    page = f"""<body><div class="sidebar"><ul><li><a href="#users">Users</a></li></ul></div><div class="page-wrapper">
    <div class="content"><h1 id="users">Users</h1><p>{PROSE}</p><h2>Get a user</h2><p><code>GET /users/:id</code></p>
    <table><thead><tr><th>Name</th><th>Type</th></tr></thead><tr><td>id</td><td>integer</td></tr></table>
    <pre class="highlight"><code class="language-json">{{"id": 1}}</code></pre></div></div></body>"""
    markdown = html_to_markdown(page, PAGE)
    assert_holds(markdown, "# Users", "`GET /users/:id`", "| id | integer |", '```json\n{"id": 1}\n```')


def test_a_listing_page_keeps_its_links(parser: str) -> None:
    items = "".join(f'<li><a href="/p/{i}">Package number {i}</a></li>' for i in range(20))
    page = f"<nav><a href='/'>Home</a></nav><main><h1>Packages</h1><ul>{items}</ul></main><footer>Fin</footer>"
    markdown = html_to_markdown(page, PAGE)
    assert_holds(markdown, "# Packages", "- [Package number 0](https://example.org/p/0)", "number 19")
    assert_lacks(markdown, "Home", "Fin")


@pytest.mark.parametrize("text", ["It works!", "ok", "404", "Hello, world. This page is short."])
def test_a_very_short_page_is_its_text(text: str, parser: str) -> None:
    page = f"""<html><body><nav><a href="/">Home</a><a href="/about">About us</a></nav><main><h1>Title</h1>
    <p>{text}</p></main>
    {COOKIES}<footer><p>Copyright 2024 Some Company with a long imprint, all rights
    reserved.</p></footer></body></html>"""
    assert html_to_markdown(page, PAGE) == f"# Title\n\n{text}"


@pytest.mark.parametrize(
    "page",
    [
        "<nav>Only a menu</nav>",
        "<footer>Only a footer</footer>",
        "<div class=cookie>Only cookies</div>",
        "<noscript>Only without scripts</noscript>",
        "<div hidden>Only hidden</div>",
        "Only text",
        "<title>Only a title",
        "<button>Only a button</button>",
        "<a href=x>Only a link</a>",
        "<table><tr><td>Only a cell",
        "<select><option>Only an option</select>",
    ],
)
def test_a_page_with_text_never_gives_nothing(page: str, parser: str) -> None:
    assert "Only" in html_to_markdown(page, PAGE)


@pytest.mark.parametrize("junk", ["<div class=ad>Buy</div>", "<nav>Menu</nav>", "<aside><p>Read on</p></aside>"])
def test_what_is_dropped_does_not_glue_the_words_around_it(junk: str, parser: str) -> None:
    assert html_to_markdown(f"<div>{PROSE} The end{junk}starts again. {PROSE}</div>") in (
        f"{PROSE} The end starts again. {PROSE}",
        f"{PROSE} The end\n\nstarts again. {PROSE}",
    )


@pytest.mark.parametrize("tag", ["svg", "video", "audio", "canvas", "object", "map"])
@pytest.mark.parametrize("start", ["<{} class=i />", "<{}/>", "<{} class=i>", '<{} src="a=b"/>'])
def test_an_element_that_holds_no_text_does_not_swallow_the_text_behind_it(tag: str, start: str, parser: str) -> None:
    page = f"<p>Intro {start.format(tag)}</p><p>{PROSE}</p><{tag}>x</{tag}><p>The end.</p>"
    assert_holds(html_to_markdown(page), "Intro", PROSE, "The end.")


def test_one_picture_nobody_closed_does_not_bring_the_text_of_others_in(parser: str) -> None:
    page = f"<p>Intro <svg class=i></p><p>{PROSE}</p>" + "<svg><text>x</text></svg>" * 2 + "<p>The end.</p>"
    assert html_to_markdown(page) == f"Intro\n\n{PROSE}\n\nThe end."


def test_a_slash_in_an_address_closes_nothing() -> None:
    assert html_to_markdown(f"<p>{PROSE}</p><video src=/a/>No video</video>") == PROSE


def test_a_choice_ends_at_the_first_end_tag_as_it_holds_no_other() -> None:
    assert html_to_markdown(f"<select><option>x<select><option>y</select><p>{PROSE}</p></select>") == PROSE


def test_a_template_ends_where_its_own_end_tag_stands(parser: str) -> None:
    page = f"<template><p>a<template>b</template>{{x}}</p></template><p>{PROSE}</p>"
    assert html_to_markdown(page) == PROSE


@pytest.mark.parametrize("part", ["td", "tr", "tbody", "caption"])
def test_a_part_of_a_table_without_a_table_is_not_there(part: str, parser: str) -> None:
    page = (
        f"<p>{PROSE}</p><div class=menu><button>Save<{part}></button></div><p>Second: {PROSE}</p><h2>x</h2><p>{PROSE}"
    )
    assert html_to_markdown(page) == f"{PROSE}\n\nSecond: {PROSE}\n\n## x\n\n{PROSE}"
    assert fragment_to_markdown(f"a<{part}>b</{part}>c") == "a b c"


@pytest.mark.parametrize(
    "menu", ["<header><nav><a href=/x>Home</a></header>", "<nav><a href=/x>Home</a>", "<nav><nav></nav>"]
)
def test_a_menu_nobody_closed_does_not_swallow_the_text_up_to_the_next_one(menu: str, parser: str) -> None:
    main = f"<main><h1>T</h1><p>{PROSE}</p></main>"
    markdown = html_to_markdown(f"<p>Intro {PROSE}</p>{menu}{main}<footer><nav>menu</nav></footer>")
    assert_holds(markdown, f"Intro {PROSE}", f"# T\n\n{PROSE}")
    assert_lacks(markdown, "menu")


@pytest.mark.parametrize("tag", ["span", "b", "div", "label", "i class=x", "font", "path"])
@pytest.mark.parametrize("outside", ["p", "div"])
def test_tags_nobody_closed_leave_the_rest_of_the_page_its_shape(tag: str, outside: str, parser: str) -> None:
    chapters = "".join(f"<h2>T{number}</h2><p>{PROSE}<pre>x\n  y</pre>" for number in range(3))
    markdown = fragment_to_markdown(f"<{outside}>Intro" + f"<{tag}>" * 150 + chapters)
    assert re.findall("^.*T[0-9].*$", markdown, re.M) == ["## T0", "## T1", "## T2"]
    assert markdown.count("```\nx\n  y\n```") == 3


def test_words_stay_apart_however_deep_they_stand(parser: str) -> None:
    deep = fragment_to_markdown("<div>" * 200 + "a<div>b</div><p>c</p>d" + "</div>" * 200 + "e")
    assert deep.split() == list("abcde")
    quoted = fragment_to_markdown("<blockquote>" * 17 + "a<blockquote>b</blockquote>c" + "</blockquote>" * 17 + "d")
    assert quoted.replace(">", "").split() == list("abcd")


def test_hidden_text_that_is_the_page_is_kept() -> None:
    page = f'<body style="visibility:hidden"><div style="display:none" id="app"><p>{PROSE}</p></div></body>'
    assert html_to_markdown(page) == PROSE


# ---------------------------------------------------------------- facts

FACTS_PAGE = """<html lang="de"><head><title>Page &amp; title</title><base href="/b/"><link rel="canonical" href="/c">
<meta name="robots" content="noindex, nofollow"><meta http-equiv="refresh" content="5; URL='/next'">
<script>1</script><script src="x.js"></script><script type="application/ld+json">{"@graph": [{"@type": "NewsArticle",
"headline": "The &amp; headline", "author": [{"name": "Jo Doe"}, {"name": "Al Roe"}], "datePublished": "2024-05-06",
"isAccessibleForFree": "False"}]}</script></head><body><h1>Heading</h1><p>Text.</p>
    <noscript>Please enable JavaScript</noscript>
<form><input type="password"></form></body></html>"""


def test_the_facts_of_a_page_are_read(parser: str) -> None:
    page = read_html(FACTS_PAGE, "https://example.org/x")
    assert (page.title, page.author, page.date) == ("The & headline", "Jo Doe, Al Roe", "2024-05-06")
    assert (page.script_count, page.password_fields, page.paywalled, page.noindex) == (2, 1, True, True)
    assert (page.canonical, page.refresh_url) == ("https://example.org/c", "https://example.org/next")
    assert (page.lang, page.noscript) == ("de", "Please enable JavaScript")
    assert page.text_length == len("Heading") + len("Text.")


@pytest.mark.parametrize(
    ("head", "title"),
    [
        ('<title>A</title><meta property="og:title" content="B &quot;b&quot;">', 'B "b"'),
        ("<title> A\n a </title>", "A a"),
        ("", "Heading"),
        ('<title>A</title><script type="application/ld+json">{broken</script>', "A"),
    ],
)
def test_the_title_comes_from_the_best_place(head: str, title: str) -> None:
    assert read_html(f"<head>{head}</head><h1>Heading</h1><p>Text</p>").title == title


@pytest.mark.parametrize(
    ("body", "author", "date"),
    [
        ('<meta name="author" content="Jo"><meta name="date" content="2024-01-02">', "Jo", "2024-01-02"),
        ('<a rel="author" href="/jo">Jo</a> <time datetime="2024-01-02">2 Jan</time>', "Jo", "2024-01-02"),
        ('<b itemprop="author">Jo</b><i itemprop="datePublished">2 Jan</i>', "Jo", "2 Jan"),
        ('<meta property="article:author" content="https://facebook.com/jo">', "", ""),
    ],
)
def test_author_and_date_come_from_the_best_place(body: str, author: str, date: str) -> None:
    page = read_html(f"<body>{body.replace('<b ', '<span ').replace('</b>', '</span>')}<p>Text</p></body>")
    assert (page.author, page.date) == (author, date)


def test_the_title_is_not_put_into_the_markdown() -> None:
    assert read_html("<title>T</title><p>Text</p>") == Document(title="T", markdown="Text", text_length=4)


# ---------------------------------------------------------------- robustness

MANY = 200_000
ATTACKS = {
    "deep nesting": "<div>" * 20_000 + "text" + "</div>" * 20_000,
    "unclosed elements": "<div>text" * MANY,
    "deep lists": "<ul><li>text" * 20_000,
    "deep quotations": "<blockquote>" * 5_000 + "text<br>" * 20_000,
    "deep tables": "<table><tr><td>text" * 10_000,
    "fifty megabytes of paragraphs": "<p>some text</p>\n" * 3_000_000,
    "fifty megabytes of script": "<p>text</p><script>" + "x = 1;" * 8_000_000 + "</script>",
    "fifty megabytes of text": "text " * 10_000_000,
    "a million attributes": "<p " + "a=b " * 1_000_000 + ">text</p>",
    "null bytes": "<p>te\0xt</p><p>\0</p>" * 1_000,
    "control characters": "<p>te\x01\x0bxt &#1; &#xD800; \ud800</p>",
    "broken nesting": "<b><p>text</b></p><i><table></i><td></b></table>" * 500,
    "no body": "<html><head><title>text</title></head></html>",
    "frames": "<frameset><frame src=a><noframes>text</noframes></frameset>",
    "entities": "<pre>text" + "&lt;" * MANY,
    "text between table cells": "<table>" + "text<b>y</b>" * MANY,
    "unclosed formatting": "".join(f"<p><code class=c{number}>text" for number in range(20_000)),
    "unclosed comments": "text" + "<!--" * MANY,
    "unclosed tags": "text" + "<a " * MANY,
    "unclosed quotes": 'text<a b="' * MANY,
    "unclosed raw elements": "text<svg><nav><title>" * MANY,
    "less-than signs": "text" + "<" * 2_000_000,
    "asterisks": "<p>text" + " *a" * MANY,
    "underscores": "<p>text" + " _a" * MANY,
    "brackets": "<p>text" + "[" * MANY,
    "backslashes": "<p>text" + "\\(" * MANY,
    "white space": "<p>text" + " \n" * 2_000_000,
    "wide cells": "<table>" + "<tr><td colspan=50 rowspan=50>text" * 5_000,
    "pictures in pictures": "text" + "<svg><svg></svg>text" * MANY,
    "slashes": "text" + "<video x" + "=" * 90_000 + " />" + "<svg a=/ b />" * MANY,
    "scripts that are missing": "<noscript>" * MANY + "text</noscript>",
    "wide rows above many": "<table><tr>" + "<td colspan=50>text" * 9_000 + "<tr><td>x<td>y" * 9_000 + "</table>",
    "long classes": ('<div class="' + "a " * 49_000 + '">' + "<pre>text</pre>" * 70 + "</div>") * 40,
    "bodies": f"<body class={'a' * 60}>" * MANY + "<p>text</p>",
    "wide JSON": f"<script type='application/ld+json'>{[[[[]] * 100] * 100] * 100}</script><p>text</p>",
    "items below formatting": "<ul>text" + "<i>" * 149 + "<li></li>" * MANY,
    "links to lines": "<pre>text" + "<a href='#1'>1</a> " * 50_000,
    "menus without an end": "text" + "<nav><nav></nav>" * MANY,
    "deep JSON": '<script type="application/ld+json">' + "[" * MANY + "</script><p>text</p>",
}


@pytest.mark.parametrize("page", ATTACKS.values(), ids=ATTACKS.keys())
def test_hostile_pages_take_bounded_time(page: str, parser: str) -> None:
    start = time.process_time()
    markdown = html_to_markdown(page, PAGE)
    assert time.process_time() - start < 15
    assert "te" in markdown


def test_a_wide_row_does_not_make_all_the_others_wide() -> None:
    rows = 500
    page = "<table><tr>" + "<td colspan=50>x" * rows + "<tr><td>x<td>y" * rows + "</table>"
    markdown = html_to_markdown(page)
    assert len(markdown) < 20 * len(page)
    assert markdown.count("| x | y |") == rows


@pytest.mark.parametrize("html", ["<table><tr><td>a<td>b</table>" + PAIRS["nested lists"][0], "<b>a<p>b</b>c</p>"])
def test_a_page_leaves_nothing_for_the_garbage_collector(html: str) -> None:
    page = f"<main><nav>menu</nav><p>{PROSE}</p>{html}<p hidden>x</p></main>"
    read_html(page)
    gc.collect()
    gc.disable()
    try:
        read_html(page)
        fragment_to_markdown(page)
        assert not [thing for thing in gc.get_objects() if isinstance(thing, kindly_search._Node)]
    finally:
        gc.enable()


def test_a_menu_ends_where_its_markup_says_so() -> None:
    nested = "<nav>menu" * 60 + "</nav>" * 60
    scripted = "<nav>menu<script>'</nav>'</script>menu<!-- </nav> -->menu</nav>"
    assert html_to_markdown(f"{nested}<p>{PROSE}</p>{scripted}<p>The end.</p>") == f"{PROSE}\n\nThe end."


def test_code_in_an_old_tag_is_kept_however_deep_it_stands() -> None:
    assert "x < 1" in html_to_markdown("<div>" * 200 + "<xmp>x < 1</xmp>")


def test_a_shallow_recursion_limit_is_enough() -> None:
    page = "<ul><li><blockquote><div><b>" * 500 + "text"
    depth = len(list(_frames()))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + 60)
    try:
        assert "text" in html_to_markdown(page, PAGE)
    finally:
        sys.setrecursionlimit(limit)


def _frames() -> Iterator[object]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


TAGS = (
    "p div span b i a ul ol li table tr td th pre code h1 h2 br img blockquote dl dt dd script style svg math nav sup"
)
SNIPPETS = st.sampled_from(
    [f"<{tag}>" for tag in TAGS.split()]
    + [f"</{tag}>" for tag in TAGS.split()]
    + [
        "<a href='/x'>",
        '<td rowspan="3" colspan=2>',
        "<!--",
        "-->",
        "&lt;",
        "&amp;",
        "&#0;",
        "<",
        ">",
        '"',
        "`",
        "\\(",
        "*",
        "_",
    ]
    + [
        '<div class="comment">',
        "<p hidden>",
        '<a href="#fn1">1</a>',
        '<li id="fn1">',
        "<input type=checkbox>",
        "\n",
        "  ",
        "x",
    ]
)
RELAXED = settings(deadline=2_000, max_examples=150, suppress_health_check=list(HealthCheck))


@RELAXED
@given(st.lists(st.one_of(SNIPPETS, st.text(max_size=8)), max_size=60).map("".join))
def test_random_markup_never_raises(page: str) -> None:
    assert isinstance(html_to_markdown(page, PAGE), str)
    assert isinstance(fragment_to_markdown(page), str)


@RELAXED
@given(st.text())
def test_random_text_never_raises(page: str) -> None:
    assert isinstance(read_html(page, page), Document)


@RELAXED
@given(st.data())
def test_mutated_pages_never_raise(data: st.DataObject) -> None:
    page = FACTS_PAGE + "".join(html for html, _ in PAIRS.values())
    for _ in range(data.draw(st.integers(1, 8))):
        cut = data.draw(st.integers(0, len(page)))
        page = (
            page[:cut]
            + data.draw(st.one_of(SNIPPETS, st.text(max_size=3)))
            + page[cut + data.draw(st.integers(0, 9)) :]
        )
    assert isinstance(html_to_markdown(page, PAGE), str)


CODE = st.text(st.characters(exclude_categories=["Cs", "Cc", "Co", "Cn"], include_characters="\n\t")).filter(str.strip)


@RELAXED
@given(CODE, st.booleans())
def test_code_survives_verbatim(code: str, in_page: bool) -> None:
    block = f"<pre>\n{html_entities.escape(code)}</pre>"
    page = f"<html><body><nav>Menu</nav><main><h1>T</h1>{block}</main></body></html>" if in_page else block
    markdown = (html_to_markdown if in_page else fragment_to_markdown)(page, PAGE)
    fence = markdown.splitlines()[-1]
    assert set(fence) == {"`"}
    assert fence not in code
    assert f"{fence}\n" + code.rstrip("\n") + f"\n{fence}" in markdown


# ---------------------------------------------------------------- layout


def test_functions_stay_small() -> None:
    tree = ast.parse(Path(kindly_search.__file__).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    sizes = sorted(node.end_lineno - node.lineno + 1 for node in functions if node.end_lineno)
    assert statistics.median(sizes) <= 8
    assert sizes[len(sizes) * 9 // 10] <= 25
    assert sizes[-1] <= 60
