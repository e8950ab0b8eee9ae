"""Formulas of the site as MathML, made when the site is built, so that pages need no script and no network."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\s*\\(?P<open>[(\[])(?P<latex>.*?)\\[)\]]\s*</(?P=tag)>', re.DOTALL
)

_NAME_BEFORE_ARGUMENT = re.compile(r"(<mi>(?:log|exp|det|min|max)</mi>)(?=<m(?:i|n|frac|sub|sup|over|row)\b)")


def on_page_content(content: str, **_: Any) -> str:
    """Replace every formula of a page."""
    return _FORMULA.sub(lambda found: to_mathml(found["latex"], block=found["open"] == "["), content)


def to_mathml(latex: str, *, block: bool) -> str:
    """One formula as MathML.

    Args:
        latex: LaTeX, with HTML's special characters escaped.
        block: Whether the formula has its own line.

    Raises:
        ValueError: If the formula contains a command that has no meaning in MathML.
    """
    source = html.unescape(latex).strip()
    mathml = convert(source, display="block" if block else "inline").replace(r"\_", "_")
    mathml = _NAME_BEFORE_ARGUMENT.sub(r'\1<mspace width="0.17em"/>', mathml)
    unknown = re.search(r">\\[A-Za-z]+", mathml)
    if unknown:
        raise ValueError(f"formula {source!r}: {unknown[0][1:]} is not known; write it another way")
    return f'<div class="formula">{mathml}</div>' if block else mathml
