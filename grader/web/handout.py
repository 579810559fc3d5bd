"""A handout's Markdown as safe HTML: highlighted code, and formulas as MathML that needs no script.

A handout comes from an instructor, so it is trusted more than a student's file; the result is cleaned all the same.
"""

from __future__ import annotations

import html
import re
from functools import lru_cache
from typing import Any

import nh3
from latex2mathml.converter import convert as to_mathml
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from markupsafe import Markup
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MATHML = _words(
    "math mrow mi mn mo mtext mspace msub msup msubsup munder mover munderover mfrac msqrt mroot mtable mtr mtd mstyle"
    " mpadded mphantom"
)
_MATHML_ATTRIBUTES = _words(
    "display mathvariant stretchy fence form separator accent accentunder lspace rspace columnalign displaystyle"
    " scriptlevel linethickness width height depth minsize maxsize"
)
_TAGS = _MATHML | _words(
    "h1 h2 h3 h4 p ul ol li a em strong s code pre blockquote hr br table thead tbody tr th td span div img"
)
_ATTRIBUTES: dict[str, set[str]] = {
    "a": {"href", "title"},
    "img": {"src", "alt", "title"},
    **{tag: {"id"} for tag in ("h2", "h3", "h4")},
    "ol": {"start"},
    **{tag: {"class"} for tag in ("code", "pre", "span", "div")},
    **{tag: set(_MATHML_ATTRIBUTES) for tag in _MATHML},
}
# \text{...} is copied by the converter as it stands, and `<` would open a tag there
_LATEX_FOR = {"<": r"\lt ", ">": r"\gt "}


@lru_cache(maxsize=64)
def render_handout(text: str, title: str = "") -> Markup:
    """HTML of a handout. Raw HTML in it is shown as text; images may come from this service alone.

    Args:
        title: what the page says above it; a first heading that says the same is left out.
    """
    first, _, rest = text.lstrip().partition("\n")
    if first.removeprefix("# ").strip() == title:
        text = rest
    cleaned = nh3.clean(
        _markdown().render(text),
        tags=set(_TAGS),
        attributes=_ATTRIBUTES,
        # on a narrow screen these scroll sideways, which a keyboard can do only where the focus can go
        set_tag_attribute_values={"pre": {"tabindex": "0"}, "table": {"tabindex": "0"}},
        url_schemes={"http", "https", "mailto"},
        link_rel="noopener noreferrer",
    )
    return Markup(cleaned)  # noqa: S704  cleaned in the line above


def _markdown() -> MarkdownIt:
    # html=False: a handout needs none, and what looks like a tag is then shown as it was typed
    md = MarkdownIt("commonmark", {"html": False, "highlight": _highlight}).enable(["table", "strikethrough"])
    dollarmath_plugin(md, allow_space=False, allow_digits=False, double_inline=True, renderer=_math)
    md.core.ruler.before("inline", "formula_first", _space_before_formulas)
    md.add_render_rule("heading_open", _shifted_heading)
    md.add_render_rule("heading_close", _shifted_heading)
    return md


def _space_before_formulas(state: StateCore) -> None:
    # at the start of a text the plugin looks for a digit before the dollar sign, and finds the text's last character
    for token in state.tokens:
        if token.type == "inline" and token.content.startswith("$"):
            token.content = " " + token.content


def _shifted_heading(self: RendererHTML, tokens: list[Token], idx: int, options: Any, env: Any) -> str:
    # the page has its own h1
    token = tokens[idx]
    token.tag = f"h{min(int(token.tag[1]) + 1, 4)}" if token.tag in ("h1", "h2", "h3") else "h4"
    if token.nesting == 1:
        token.attrSet("id", anchor(tokens[idx + 1].content))
    return self.renderToken(tokens, idx, options, env)


def anchor(heading: str) -> str:
    """What the heading of a handout is called in its page's address."""
    return "handout-" + re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")[:60]


def _math(content: str, options: dict[str, Any]) -> str:
    """One formula. Where the converter cannot read it, its LaTeX source: readable, and never a broken page."""
    latex = re.sub("[<>]", lambda found: _LATEX_FOR[found[0]], content)
    try:
        if not options.get("display_mode"):
            return _converted(latex)
        return "".join(_converted(part, display="block") for part in _beside_each_other(latex))
    except Exception:  # whatever it raises, the handout stays readable
        return f'<code class="tex">{html.escape(content.strip())}</code>'


def _converted(latex: str, *, display: str = "inline") -> str:
    # infinity is a number here; the converter makes it an operator, which browsers set apart from its sign
    return str(to_mathml(latex, display=display)).replace("<mo>&#x0221E;</mo>", "<mi>&#x0221E;</mi>")


def _beside_each_other(latex: str) -> list[str]:
    """The formulas of one line, which may stand below each other on a narrow screen."""
    parts: list[str] = []
    for piece in latex.split(r"\qquad"):
        if parts and any(parts[-1].count(a) != parts[-1].count(b) for a, b in (("{", "}"), (r"\begin", r"\end"))):
            parts[-1] += rf"\qquad{piece}"  # within a group
        else:
            parts.append(piece)
    return parts


def _highlight(code: str, language: str, _attributes: str) -> str:
    return highlight_code(code, language) or html.escape(code)


def highlight_code(code: str, language: str) -> str:
    """Spans with classes around the words of `code`; empty when nobody knows the language."""
    try:
        lexer = get_lexer_by_name(language or "text", stripnl=False, ensurenl=False)
    except ClassNotFound:
        return ""
    return str(highlight(code, lexer, HtmlFormatter(nowrap=True)))
