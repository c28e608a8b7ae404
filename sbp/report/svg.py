"""Shapes -> SVG: the drawing board of the report's pictures.

A picture has no style sheet and no script: it looks the same inside a report, in a file and as PNG.
Text and thin lines have the colour of the page around it (`currentColor`), and fills are half
transparent, so it is readable on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

NAMESPACE = "http://www.w3.org/2000/svg"
FILE_ATTRIBUTES = f' xmlns="{NAMESPACE}" style="background:white"'
"""What a drawing has in a file and not inside a page, whose background it takes."""

FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
FONT_SIZE = 11
"""Of a label, in pixels."""

CELL = 6.7
"""Width of one cell of monospaced text at `FONT_SIZE`, in pixels, rounded up."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ink:
    """How a shape looks.

    Arguments:
      color: of lines and text, and of a fill.
      opacity: of a fill, from 0 to 1.
      width: of a line, in pixels; 0 for a box without a border.
      dashed: whether the line is.
      bold: whether the text is.
    """

    color: str = "currentColor"
    opacity: float = 0.25
    width: float = 1
    dashed: bool = False
    bold: bool = False


class Board:
    """Shapes on a board. Coordinates are in pixels from the top left corner. The `title` of a shape
    shows when the pointer rests on it.

    Arguments:
      width, height: of the board.

    >>> board = Board(80, 20)
    >>> board.rect((0, 0), (80, 20), Ink(color="#3b82f6"), title="a weight")
    >>> board.text((40, 14), "S(0)", anchor="middle")
    >>> board.svg("one box").startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    True
    """

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self._shapes: list[ElementTree.Element] = []

    def rect(self, corner: Point, size: Point, ink: Ink = Ink(), *, title: str = "") -> None:
        """A filled box from its top left `corner`; `size` is its width and height."""
        box = self._add("rect", x=corner[0], y=corner[1], width=size[0], height=size[1])
        box.set("rx", _number(min(3, size[0] / 2, size[1] / 2)))
        box.set("fill", ink.color)
        box.set("fill-opacity", _number(ink.opacity))
        if ink.width:
            _stroke(box, ink)
        _title(box, title)

    def line(
        self, points: Sequence[Point], ink: Ink = Ink(), *, arrow: bool = False, title: str = ""
    ) -> None:
        """Straight lines from point to point, with a head at the last where `arrow` is true."""
        line = self._add("polyline", points=_path(points), fill="none")
        _stroke(line, ink)
        _title(line, title)
        if arrow:
            self._add(
                "polygon", points=_path(_head(points[-2], points[-1], ink.width)), fill=ink.color
            )

    def area(self, points: Sequence[Point], ink: Ink = Ink(), *, title: str = "") -> None:
        """A filled polygon."""
        area = self._add("polygon", points=_path(points), fill=ink.color)
        area.set("fill-opacity", _number(ink.opacity))
        if ink.width:
            _stroke(area, ink)
        _title(area, title)

    def text(
        self, at: Point, text: str, ink: Ink = Ink(), *, anchor: str = "start", title: str = ""
    ) -> None:
        """A label whose base line is at height `at[1]`; `anchor` is what of it stands at `at[0]`:
        its "start", "middle" or "end"."""
        label = self._add("text", x=at[0], y=at[1], fill=ink.color)
        label.set("text-anchor", anchor)
        if ink.bold:
            label.set("font-weight", "bold")
        label.text = _printable(text)
        _title(label, title)

    def svg(self, description: str) -> str:
        """The drawing as SVG.

        Arguments:
          description: what it shows, for those who cannot see it.
        """
        root = ElementTree.Element("svg", {"xmlns": NAMESPACE, "style": "background:white"})
        size = _number(self.width), _number(self.height)
        root.set("width", size[0])
        root.set("height", size[1])
        root.set("viewBox", f"0 0 {size[0]} {size[1]}")
        root.set("role", "img")
        root.set("aria-label", _printable(description))
        root.set("font-family", FONT)
        root.set("font-size", str(FONT_SIZE))
        root.extend(self._shapes)
        return ElementTree.tostring(root, encoding="unicode")

    def _add(self, tag: str, **attributes: float | str) -> ElementTree.Element:
        shape = ElementTree.Element(tag)
        for name, value in attributes.items():
            shape.set(name, value if isinstance(value, str) else _number(value))
        self._shapes.append(shape)
        return shape


def _title(shape: ElementTree.Element, title: str) -> None:
    if title:
        ElementTree.SubElement(shape, "title").text = _printable(title)


def _stroke(shape: ElementTree.Element, ink: Ink) -> None:
    shape.set("stroke", ink.color)
    shape.set("stroke-width", _number(ink.width))
    if ink.dashed:
        shape.set("stroke-dasharray", "4 3")


def _path(points: Sequence[Point]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _head(start: Point, end: Point, width: float) -> tuple[Point, Point, Point]:
    """The corners of an arrow head at `end`."""
    across, down = end[0] - start[0], end[1] - start[1]
    length = (across * across + down * down) ** 0.5 or 1.0
    unit = across / length, down / length
    size = 4 + 2 * width
    back = end[0] - size * unit[0], end[1] - size * unit[1]
    aside = -unit[1] * size / 2, unit[0] * size / 2
    return (
        end,
        (back[0] + aside[0], back[1] + aside[1]),
        (back[0] - aside[0], back[1] - aside[1]),
    )


def _number(value: float) -> str:
    """At most two digits behind the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _printable(text: str) -> str:
    """Characters that XML forbids are replaced."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
