"""SVG and HTML from Python values, escaped, in colours that follow the theme of whatever shows them.

    Picture(200, 40, [rectangle(0, 0, 40, 20, colour_of(3)), label(4, 14, "rank 3")])

Ink and lines are CSS variables. They turn light on dark where the reader's system asks for it (prefers-color-scheme),
and where JupyterLab, VS Code, Furo or Material for MkDocs says by an attribute which theme it shows. The ten colours of
ranks are the same in both; what is written on them is dark. Widths are estimated, for a font in which all letters are
equally wide, as nothing here can measure text. Nothing has an id, so many pictures fit on one page.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

COLOURS = ("#8fb8de", "#f6b26b", "#9ccb88", "#ef9a97", "#a3d4ce", "#f0d878", "#cda9c8", "#ffc0ca", "#c9a793", "#cfc9c4")
DEEP = ("#4e79a7", "#e07b16", "#4b9140", "#d6474a", "#4f9d97", "#c9a019", "#a0618f", "#ef6f7f", "#8d6449", "#8f8580")
FONT = 12                                            # pixels
LETTER = 0.61                                        # the width of a letter, as a share of the size of the font

_LIGHT = "--gt-ink:#1f2328;--gt-soft:#59636e;--gt-line:#818b98;--gt-faint:#d1d9e0;--gt-paper:#fff"
_DARK = "--gt-ink:#e6edf3;--gt-soft:#9da7b3;--gt-line:#7d8590;--gt-faint:#3d444d;--gt-paper:#16191d"
_THEMES_LIGHT = ('[data-jp-theme-light="true"]', '[data-theme="light"]', '[data-md-color-scheme="default"]',
                 ".vscode-light")
_THEMES_DARK = ('[data-jp-theme-light="false"]', '[data-theme="dark"]', '[data-md-color-scheme="slate"]',
                ".vscode-dark")


def _themed(themes: Sequence[str], variables: str) -> str:
    return f"{','.join(f'{theme} .gt-picture' for theme in themes)}{{{variables}}}"


STYLE = (f".gt-picture{{{_LIGHT};color:var(--gt-ink);font-family:ui-monospace,Menlo,Consolas,monospace}}"
         f"@media(prefers-color-scheme:dark){{.gt-picture{{{_DARK}}}}}"
         f"{_themed(_THEMES_LIGHT, _LIGHT)}{_themed(_THEMES_DARK, _DARK)}"
         "table.gt-picture{border-collapse:collapse;font-size:12px;margin:.5em 0;border:0}"
         ".gt-picture th{text-align:left;color:var(--gt-soft);font-weight:normal;"
         "border-bottom:1px solid var(--gt-line)}"
         ".gt-picture td,.gt-picture th{padding:2px 10px 2px 2px;background:none;text-align:left;"
         "vertical-align:top;white-space:pre-wrap}"
         ".gt-picture td.number{text-align:right}"
         ".gt-picture caption{text-align:left;color:var(--gt-soft);white-space:nowrap}"
         ".gt-picture .chip{border-radius:3px;padding:0 5px;color:#111}")


class Picture(NamedTuple):
    """A drawing: its size in pixels, and its elements. A notebook shows it as HTML; `save` writes it as a file."""

    width: float
    height: float
    elements: Sequence[str]

    def svg(self, alone: bool = True) -> str:
        """The picture as SVG. `alone` as a file of its own, which has a background, as nobody knows what is behind."""
        size = f"{self.width:.0f} {self.height:.0f}"
        paper = '<rect width="100%" height="100%" fill="var(--gt-paper)"/>' if alone else ""
        return (f'<svg xmlns="http://www.w3.org/2000/svg" class="gt-picture" viewBox="0 0 {size}" '
                f'width="{self.width:.0f}" height="{self.height:.0f}" font-size="{FONT}" '
                f'style="max-width:100%;height:auto" role="img">'
                f"<style>{STYLE}</style>{paper}{''.join(self.elements)}</svg>")

    def _repr_html_(self) -> str:
        return self.svg(alone=False)

    def save(self, path: str) -> None:
        """Write it as an SVG file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg() + "\n")


def element(tag: str, content: str = "", **attributes: Any) -> str:
    """<tag attributes>content</tag>. The attributes are escaped (`font_size` is font-size), `content` is markup."""
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(_spelled_attribute(value))}"'
                      for key, value in attributes.items() if value is not None)
    return f"<{tag}{written}>{content}</{tag}>"


def _spelled_attribute(value: Any) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def label(x: float, y: float, text: str, *, anchor: str = "start", fill: str = "var(--gt-ink)", size: float = FONT,
          weight: str | None = None) -> str:
    """Text whose baseline begins (or is centred: anchor="middle") at a point."""
    return element("text", escape(text), x=float(x), y=float(y), fill=fill, font_size=size, text_anchor=anchor,
                   font_weight=weight)


def rectangle(x: float, y: float, width: float, height: float, fill: str, *, note: str = "",
              stroke: str = "var(--gt-ink)", dashed: bool = False, line: float = 1.0) -> str:
    """A rectangle; `note` is shown where the mouse rests on it."""
    return element("rect", element("title", escape(note)) if note else "", x=float(x), y=float(y),
                   width=float(max(width, 0)), height=float(max(height, 0)), fill=fill, stroke=stroke,
                   stroke_width=line, stroke_dasharray="3 3" if dashed else None)


def hatching(x: float, y: float, width: float, height: float, gap: float = 7.0) -> str:
    """Slanted lines over a rectangle: what stands there is pending. (Drawn one by one: a pattern would need an id.)"""
    parts = []
    offset = gap
    while offset < width + height:
        low, high = max(0.0, offset - height), min(width, offset)
        parts.append(f"M{x + low:.1f} {y + offset - low:.1f}L{x + high:.1f} {y + offset - high:.1f}")
        offset += gap
    return element("path", d="".join(parts), stroke="#111", stroke_width=1.0, stroke_opacity=0.55, fill="none")


def text_width(text: str, size: float = FONT) -> float:
    """About how wide a text is."""
    return len(text) * size * LETTER


def colour_of(rank: int) -> str:
    """Of a rank, and of the region of which it is the first holder: pale, as text is written on it."""
    return COLOURS[rank % len(COLOURS)]


def line_colour_of(rank: int) -> str:
    """The same hue for lines."""
    return DEEP[rank % len(DEEP)]


def shortened(text: str, letters: int) -> str:
    """At most so many letters; the middle of a longer text is left out."""
    half = (letters - 3) // 2
    return text if len(text) <= letters else f"{text[:half]}...{text[len(text) - half:]}"


def chip(text: str, colour: str) -> str:
    """A word on a colour, in HTML."""
    return element("span", escape(text), class_="chip", style=f"background:{colour}")


def breakable(text: str) -> str:
    """Text as markup, for a cell: a line may end within a long name, and not within an arrow."""
    arrow = element("span", "-&gt;", style="white-space:nowrap")
    return escape(text).replace("-&gt;", arrow).replace("_", "_<wbr>")


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "",
               numbers: Sequence[int] = ()) -> str:
    """A table. The cells are markup, so whoever makes them escapes them; the head and the caption are text."""
    lines = [element("tr", "".join(element("th", escape(name)) for name in head))] if any(head) else []
    lines += [element("tr", "".join(element("td", cell, class_="number" if k in numbers else None)
                                    for k, cell in enumerate(row))) for row in rows]
    top = element("caption", escape(caption)) if caption else ""
    return f"<style>{STYLE}</style>" + element("table", top + "".join(lines), class_="gt-picture")
