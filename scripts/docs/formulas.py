"""MkDocs hook: formulas become pictures when the site is built, so that its pages need no script.

`pymdownx.arithmatex` marks LaTeX; matplotlib sets it (its mathtext knows a part of LaTeX), and the outlines are written
as SVG in units of the text's size, in its colour. The LaTeX stays as the picture's name for those who cannot see it.
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
    """MkDocs calls this with a page's HTML.

    Raises:
        ValueError: a formula that mathtext cannot set; names page and formula.
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
    """The formula as an SVG element that stands on the line of the text around it.

    Raises:
        ValueError: `latex` is beyond matplotlib's mathtext.
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
    """SVG's notation of the path; its y axis points down."""
    parts = []
    for points, code in path.iter_segments(simplify=False, curves=True):
        if code == Path.CLOSEPOLY:
            parts.append("Z")
            continue
        pairs = zip(points[::2], points[1::2], strict=True)
        parts.append(_LETTERS[code] + " ".join(f"{x:.1f},{-y:.1f}" for x, y in pairs))
    return "".join(parts)
