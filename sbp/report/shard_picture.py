"""Shards -> a picture: the tensor with its dims cut in proportion, and in each block the devices
that have it."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sbp.report.parts import Paragraph, Picture, Plain, table
from sbp.report.shards import Extent, ShardFact, TensorShards
from sbp.report.svg import CELL, PARTIAL, SPLIT, WHOLE, Board, Ink
from sbp.report.wording import counted, listed
from sbp.source.reader import shortened
from sbp.types import Unreduced

MOST_BLOCKS = 8
"""Blocks of one dim that are drawn; further ones are a gap with their number."""

MOST_PANELS = 6
"""Blocks of third and further dims, each of which is a drawing of its own."""

LISTED_SHARDS = 16
"""Shards in the words of a picture; as many again are folded, and the others counted."""

_WIDE, _HIGH, _GAP, _SHEET, _PAGE = 150.0, 44.0, 82.0, 6.0, 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A dim as it is drawn.

    Arguments:
      dim: the dim; -1 where the tensor has no such dim.
      extents: its blocks that have elements; None stands for those that are left out.
      left_out: their number.
      pixels: the length of each.
    """

    dim: int
    extents: tuple[Extent | None, ...]
    left_out: int
    pixels: tuple[float, ...]


def shard_picture(found: TensorShards) -> Picture:
    """Where a tensor lives, as a picture with the same in words.

    Arguments:
      found: its shards.
    """
    across, down, rest = _drawn_dims(found)
    room = max((len(_label(group)) for group in _blocks(found).values()), default=0)
    wide = min(max(64.0, CELL * (room + 2)), _WIDE)
    columns = _cut(found, across, wide, _GAP)
    rows = _cut(found, down, _HIGH, 0.8 * _HIGH)
    text = _caption(found)
    return Picture(
        caption=text, svg=_drawing(found, columns, rows, rest).svg(text), instead=_words(found)
    )


def _blocks(found: TensorShards) -> dict[tuple[Extent, ...], list[ShardFact]]:
    """The summands of each block that has elements; one where the tensor is not partial."""
    blocks: dict[tuple[Extent, ...], list[ShardFact]] = defaultdict(list)
    for shard in sorted(found.shards, key=lambda s: s.summand):
        if not shard.is_empty:
            blocks[shard.extents].append(shard)
    return blocks


def _drawn_dims(found: TensorShards) -> tuple[int, int, tuple[int, ...]]:
    """The dim from left to right, the dim from top to bottom, and the other dims that are split."""
    split = [d for d in range(len(found.shape)) if found.axes_of(d)]
    shown = sorted({*split[:2]})
    for dim in reversed(range(len(found.shape))):
        if len(shown) < 2 and dim not in shown:
            shown = sorted([*shown, dim])
    across = shown[-1] if shown else -1
    down = shown[0] if len(shown) > 1 else -1
    return across, down, tuple(split[2:])


def _extents(found: TensorShards, dim: int) -> list[Extent]:
    return sorted({s.extents[dim] for s in found.shards if not s.is_empty})


def _cut(found: TensorShards, dim: int, longest: float, gap: float) -> _Cut:
    """A dim whose longest block has `longest` pixels, and the others in proportion."""
    extents = _extents(found, dim) if dim >= 0 else [(0, 1)]
    shown: list[Extent | None] = [*extents]
    left_out = max(0, len(extents) - MOST_BLOCKS)
    if left_out:
        ends = MOST_BLOCKS - 2
        left_out = len(extents) - MOST_BLOCKS
        shown = [*extents[:ends], None, *extents[-2:]]
    most = max((stop - start for start, stop in extents), default=1)
    if len(extents) == 1:
        longest *= 2  # a whole dim looks like one
    pixels = tuple(gap if e is None else longest * (e[1] - e[0]) / most for e in shown)
    return _Cut(dim=dim, extents=tuple(shown), left_out=left_out, pixels=pixels)


def _devices_text(devices: Sequence[int], limit: int = 3, between: str = ",") -> str:
    """Devices with their runs joined, such as `0-3, 8-11`; the middle of many is left out."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and runs[-1][-1] == device - 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    texts = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs]
    if len(texts) > limit:
        texts = [*texts[: limit - 1], "..", texts[-1]]
    return between.join(texts)


def _label(group: Sequence[ShardFact], limit: int = 3) -> str:
    """The devices of a block: a sum of those of its summands."""
    texts = [_devices_text(s.devices, limit) for s in group]
    if len(texts) > limit:
        texts = [*texts[: limit - 1], "..", texts[-1]]
    return " + ".join(texts)


# ---- drawing ------------------------------------------------------------------------------------


def _drawing(found: TensorShards, columns: _Cut, rows: _Cut, rest: tuple[int, ...]) -> Board:
    """One panel for each block of the dims in `rest`, in rows as wide as a page."""
    cuts = [_extents(found, dim) for dim in rest]
    count = math.prod(map(len, cuts))
    some = itertools.islice(itertools.product(*cuts), MOST_PANELS)
    panels = [dict(zip(rest, choice, strict=True)) for choice in some]
    sheets = _SHEET * min(found.summands - 1, 3)
    ticks = [_extent_text(found, rows.dim, e) for e in rows.extents if e] if rows.dim >= 0 else []
    left = CELL * (max(map(len, ticks), default=0) + 1) + 4
    heading = max(_heading_room(found, columns.dim), left + sum(columns.pixels))
    wide = max(heading, CELL * 26) + sheets + 24
    high = sum(rows.pixels) + sheets + 52 + (16 if rows.dim >= 0 else 0) + (16 if rest else 0)
    beside = max(1, min(len(panels), int(_PAGE / wide)))
    more = count - len(panels)
    board = Board(wide * beside, high * max(1, -(-len(panels) // beside)) + (18 if more > 0 else 0))
    if not any(not s.is_empty for s in found.shards):
        board.rect((4, 4), (wide - 8, _HIGH), Ink(color=WHOLE, opacity=0.1, dashed=True))
        board.text((12, 4 + _HIGH / 2), "no elements on any device")
        return board
    for number, panel in enumerate(panels):
        corner = (number % beside) * wide, (number // beside) * high
        _panel(board, found, (columns, rows), panel, (corner[0], corner[1], left, sheets))
    if more > 0:
        board.text((4, board.height - 5), f"and {counted(more, 'such drawing')} more")
    return board


def _heading_room(found: TensorShards, dim: int) -> float:
    return CELL * (len(_dim_text(found, dim)) + 2)


def _dim_text(found: TensorShards, dim: int) -> str:
    """A dim and what splits it; empty for a dim that the tensor has not."""
    if dim < 0:
        return ""
    axes = found.axes_of(dim)
    how = f"split over {listed(axes)}" if axes else "whole"
    return f"dim {dim} ({found.shape[dim]}): {how}"


def _extent_text(found: TensorShards, dim: int, extent: Extent) -> str:
    return ":" if extent == (0, found.shape[dim]) else f"{extent[0]}:{extent[1]}"


def _panel(
    board: Board,
    found: TensorShards,
    cuts: tuple[_Cut, _Cut],
    fixed: dict[int, Extent],
    place: tuple[float, float, float, float],
) -> None:
    """The blocks of two dims.

    Arguments:
      board: where it is drawn.
      found: the shards.
      cuts: the dim from left to right, and the dim from top to bottom.
      fixed: the block of each other dim that is split.
      place: the left and the top edge, room for labels on the left, and room for the sheets behind.
    """
    (columns, rows), (x, y, left, sheets) = cuts, place
    if fixed:
        text = ", ".join(f"dim {d} = {_extent_text(found, d, e)}" for d, e in fixed.items())
        board.text((x + 4, y + 12), text, Ink(bold=True))
        y += 16
    for dim, sign in ((columns.dim, "\N{RIGHTWARDS ARROW}"), (rows.dim, "\N{DOWNWARDS ARROW}")):
        if dim >= 0:
            board.text((x + 4, y + 12), f"{sign} {_dim_text(found, dim)}")
            y += 16
    x, y = x + left, y + sheets + 16
    size = sum(columns.pixels), sum(rows.pixels)
    for sheet in range(round(sheets / _SHEET), 0, -1):
        corner = x + _SHEET * sheet, y - _SHEET * sheet
        board.rect(corner, size, Ink(color=PARTIAL, opacity=0.12, dashed=True))
    blocks = _blocks(found)
    top = y
    for row, (down, high) in enumerate(zip(rows.extents, rows.pixels, strict=True)):
        if rows.dim >= 0 and high >= 10:
            text = ".." if down is None else _extent_text(found, rows.dim, down)
            board.text((x - 5, top + high / 2 + 4), text, anchor="end")
        at = x
        for column, (across, wide) in enumerate(zip(columns.extents, columns.pixels, strict=True)):
            corner = at, top
            at += wide
            if row == 0 and columns.dim >= 0:
                text = ".." if across is None else _extent_text(found, columns.dim, across)
                if CELL * len(text) <= wide:
                    board.text((at - wide / 2, y - sheets - 4), text, anchor="middle")
            if across is None or down is None:
                _left_out(board, corner, (wide, high), (columns, rows), (across, down))
                continue
            chosen = {**fixed, columns.dim: across, rows.dim: down}
            extents = tuple(chosen.get(d, (0, length)) for d, length in enumerate(found.shape))
            _block(board, blocks[extents], corner, (wide, high), (row + column) % 2 == 1)
        top += high


def _left_out(
    board: Board,
    corner: tuple[float, float],
    size: tuple[float, float],
    cuts: tuple[_Cut, _Cut],
    extents: tuple[Extent | None, Extent | None],
) -> None:
    """A gap where blocks are not drawn."""
    board.rect(corner, size, Ink(color=WHOLE, opacity=0.05, dashed=True))
    counts = [cut.left_out for cut, e in zip(cuts, extents, strict=True) if e is None]
    text = f"+ {math.prod(counts)} more" if len(counts) == 1 else ".."
    middle = corner[0] + size[0] / 2, corner[1] + size[1] / 2 + 4
    board.text(middle, text, anchor="middle")


def _block(
    board: Board,
    group: Sequence[ShardFact],
    corner: tuple[float, float],
    size: tuple[float, float],
    is_odd: bool,
) -> None:
    """A block with its devices. Neighbours have different shades."""
    color = PARTIAL if len(group) > 1 else SPLIT
    title = "device " + _label(group, 16)
    board.rect(corner, size, Ink(color=color, opacity=0.4 if is_odd else 0.22), title=title)
    label = shortened(_label(group), max(3, int((size[0] - 4) / CELL)))
    if size[1] >= 14 and CELL * len(label) <= size[0]:
        middle = corner[0] + size[0] / 2, corner[1] + size[1] / 2 + 4
        board.text(middle, label, anchor="middle", title=title)


# ---- words --------------------------------------------------------------------------------------


def _caption(found: TensorShards) -> str:
    mesh = " ".join(f"{a}={n}" for a, n in found.mesh)
    made = [f"where `{found.name}` {found.text}, {found.type!r}, lives on mesh {mesh}."]
    split = [d for d in range(len(found.shape)) if found.axes_of(d)]
    for dim in split:
        blocks = math.prod(n for a, n in found.mesh if a in found.axes_of(dim))
        made.append(
            f"Dim {dim} is split into {counted(blocks, 'block')} over {listed(found.axes_of(dim))}."
        )
    if found.partial_axes:
        op = found.type.get(found.partial_axes[0])
        assert isinstance(op, Unreduced)
        parts = (
            f"{found.summands} summands of each element are on different devices"
            if op.monoid == "sum"
            else f"each element is the {op.monoid} of {found.summands} parts on different devices"
        )
        made.append(
            f"It is partial, {op!r}, over {listed(found.partial_axes)}: {parts}, and `+` stands"
            " between these."
        )
    if found.copied_axes:
        what = "block" if split else "summand" if found.partial_axes else "whole"
        every = f"Every {what} is" if what != "whole" else "It is whole and the same"
        made.append(
            f"{every} on {counted(found.copies, 'device')}, along {listed(found.copied_axes)}."
        )
    empty = sorted(d for s in found.shards if s.is_empty for d in s.devices)
    if empty and math.prod(found.shape):
        has = "has" if len(empty) == 1 else "have"
        made.append(
            f"{counted(len(empty), 'device')} {has} no element of it: {_devices_text(empty)}."
        )
    drawn = {*_drawn_dims(found)[:2], *_drawn_dims(found)[2]}
    hidden = [str(d) for d in range(len(found.shape)) if d not in drawn]
    if hidden:
        made.append(f"Not drawn, since they are whole: dims {listed(hidden, 8)}.")
    if found.types:
        others = listed(map(repr, found.types))
        made.append(f"The program makes it {found.times} times; other types of it: {others}.")
    return " ".join([*made, "Numbers are devices, in the order of `mesh.devices.flat`."])


def _words(found: TensorShards) -> tuple[Plain, ...]:
    def row(shard: ShardFact) -> tuple[str, ...]:
        summand = (f"{shard.summand + 1} of {found.summands}",) if found.summands > 1 else ()
        return _elements(found, shard), *summand, _devices_text(shard.devices, 8, ", ")

    told, left = found.shards[: 2 * LISTED_SHARDS], len(found.shards) - LISTED_SHARDS
    made = table(
        ("elements", *(("summand",) if found.summands > 1 else ()), "devices"),
        map(row, told),
        shown=LISTED_SHARDS,
        rest=lambda _: f"and {counted(left, 'more shard')}",
    )
    untold = counted(len(found.shards) - len(told), "shard")
    if len(found.shards) > len(told):
        return made, Paragraph(text=f"{untold} of these are not listed here.")
    return (made,)


def _elements(found: TensorShards, shard: ShardFact) -> str:
    if shard.is_empty:
        return "none"
    texts = [_extent_text(found, dim, e) for dim, e in enumerate(shard.extents)]
    return f"[{', '.join(texts)}]"
