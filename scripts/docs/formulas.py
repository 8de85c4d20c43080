"""MkDocs hook: draw formulas as pictures when the site is built, so that its pages need no script.

`pymdownx.arithmatex` marks LaTeX. matplotlib typesets it (mathtext supports a part of LaTeX), and the outlines are
written as SVG in units of the text's size, in its colour. The LaTeX stays as the picture's text alternative.
"""

import functools
import html
import re
from typing import Any

from matplotlib import rc_context
from matplotlib.path import Path
from matplotlib.textpath import TextPath

_UNIT = 100.0
"""Units of a picture to one em."""

_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
_LETTERS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C"}


def on_page_content(content: str, *, page: Any, **_: Any) -> str:
    """Replace the formulas in a page's HTML; MkDocs calls this.

    Raises:
        ValueError: mathtext does not support a formula. The message names page and formula.
    """

    def drawn(found: re.Match[str]) -> str:
        latex = html.unescape(found["latex"]).strip()
        try:
            picture = svg(latex)
        except ValueError as error:
            raise ValueError(f"{page.file.src_uri}: cannot draw the formula {latex!r}: {error}") from error
        return f'<div class="formula-line">{picture}</div>' if found["open"] == "[" else picture

    return _FORMULA.sub(drawn, content)


@functools.cache
def svg(latex: str) -> str:
    """Return the formula as an SVG element that is aligned with the line of text around it.

    Raises:
        ValueError: matplotlib's mathtext does not support `latex`.
    """
    with rc_context({"mathtext.fontset": "stix"}):
        path = TextPath((0, 0), f"${' '.join(latex.split())}$", size=_UNIT)
    box = path.get_extents()
    width, height = box.width / _UNIT, box.height / _UNIT
    view = f"{box.x0:.1f} {-box.y1:.1f} {box.width:.1f} {box.height:.1f}"
    style = f"width:{width:.3f}em;height:{height:.3f}em;vertical-align:{box.y0 / _UNIT:.3f}em"
    name = html.escape(latex, quote=True)
    return f'<svg class="formula" role="img" aria-label="{name}" viewBox="{view}" style="{style}"><path d="{_outline(path)}"/></svg>'


def _outline(path: Path) -> str:
    """Return the path in SVG's notation; its y axis points down."""
    parts = []
    for points, code in path.iter_segments(simplify=False, curves=True):
        if code == Path.CLOSEPOLY:
            parts.append("Z")
            continue
        pairs = zip(points[::2], points[1::2], strict=True)
        parts.append(_LETTERS[code] + " ".join(f"{x:.1f},{-y:.1f}" for x, y in pairs))
    return "".join(parts)
