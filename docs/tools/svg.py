"""Boxes, lines and words of a picture, as SVG that needs nothing else: for code hosts and for the site."""

from __future__ import annotations

from html import escape

INK, FAINT, PAPER, FILL, PALE = "#333", "#888", "#fff", "#eef3fa", "#f7f7f7"

_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" \
height="{height}" role="img" font-family="Helvetica, Arial, sans-serif" font-size="12">
<title>{title}</title>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" \
orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="context-stroke"/></marker></defs>
<rect width="100%" height="100%" fill="{paper}"/>
"""


class Picture:
    """A picture of `width` by `height` pixels; what is added later lies above what was there."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self._parts = [
            _HEAD.format(title=escape(title), width=width, height=height, paper=PAPER),
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str = FILL, dash: str = "") -> None:
        style = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}" '
            f'stroke="{FAINT}"{style}/>\n'
        )

    def text(
        self, x: float, y: float, words: str, *, size: int = 12, bold: bool = False, anchor: str = "middle"
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{INK}"{weight}>'
            f"{escape(words)}</text>\n"
        )

    def line(self, *points: tuple[float, float]) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{INK}" marker-end="url(#tip)"/>\n')

    def curve(
        self, start: tuple[float, float], end: tuple[float, float], *, tip: bool = True, dash: str = ""
    ) -> None:
        """A line from above to below that leaves and arrives upright."""
        (x, y), (to_x, to_y) = start, end
        bend = (to_y - y) / 2
        style = (' marker-end="url(#tip)"' if tip else "") + (f' stroke-dasharray="{dash}"' if dash else "")
        self._parts.append(
            f'<path d="M{x:g} {y:g}C{x:g} {y + bend:g} {to_x:g} {to_y - bend:g} {to_x:g} {to_y:g}" '
            f'fill="none" stroke="{INK}"{style}/>\n'
        )

    def __str__(self) -> str:
        return "".join([*self._parts, "</svg>\n"])
