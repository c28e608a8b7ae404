"""Tensor -> shards: the elements of a tensor on each device of the mesh, and which summand of them
the device has where the tensor is partial; and a picture: the tensor with its dims cut in
proportion, and in each block the devices that have it."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sbp.errors import SbpError, counted, listed
from sbp.explain.subjects import Subjects
from sbp.infer.pins import block_numbers
from sbp.plan.ir import Register, Source
from sbp.plan.program import Program
from sbp.report.facts import Tensor, annotated_tensors, inputs, tensor
from sbp.report.parts import (
    CELL,
    PARTIAL,
    SPLIT,
    WHOLE,
    Board,
    Ink,
    Picture,
    Point,
    Table,
    picture,
    sentences,
    table,
)
from sbp.run.arrays import Padding
from sbp.source.reader import shorten
from sbp.trace.graph import group_by
from sbp.types import NdSbp, Split, Unreduced

# ---- shards -------------------------------------------------------------------------------------


Extent = tuple[int, int]
"""The first index of a shard along a dim, and the first one behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFact:
    """A shard, with the devices that have it.

    Arguments:
      extents: for each dim, the indices of the tensor's elements.
      summand: the number of the summand of these elements, from 0; 0 if the tensor is not partial.
      devices: the devices that have it, in order. Device k is `mesh.devices.flat[k]`.
    """

    extents: tuple[Extent, ...]
    summand: int
    devices: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether it has no element."""
        return any(start == stop for start, stop in self.extents)


class TensorShards:
    """Where a tensor lives. A dim of length L that an axis of n devices splits is in blocks of
    ceil(L / n) elements; an inner axis splits each block so again.

    Arguments:
      tensor: its name, shape and type.
      mesh: names and sizes of the mesh axes, outer first.
      times: how many values of the program have the name: one in each unrolled layer.
      types: their other types.

    Attributes:
      shards: the shards, by their first device.
      summands: the number of summands of each element; 1 where the tensor is not partial.
      atoms: its atoms on the mesh axes with several devices.
      partial_axes: the mesh axes with several devices that it is partial on.

    >>> x = Tensor(name="x", shape="f32[5]", global_shape=(5,), type=NdSbp({"d": Split(0)}))
    >>> found = TensorShards(x, (("d", 4),))
    >>> [(s.extents, s.devices) for s in found.shards]
    [(((0, 2),), (0,)), (((2, 4),), (1,)), (((4, 5),), (2,)), (((5, 5),), (3,))]
    """

    def __init__(
        self,
        tensor: Tensor,
        mesh: tuple[tuple[str, int], ...],
        *,
        times: int = 1,
        types: tuple[NdSbp, ...] = (),
    ) -> None:
        self.tensor, self.mesh, self.times, self.types = tensor, mesh, times, types
        self.atoms = [(a, tensor.type.get(a)) for a, n in mesh if n > 1]
        self.partial_axes = tuple(a for a, atom in self.atoms if isinstance(atom, Unreduced))
        names, dims = [a for a, _ in mesh], range(len(tensor.global_shape))
        padding = Padding.of(tensor.global_shape, tensor.type, mesh)
        ranges = [padding.ranges(dim) for dim in dims]
        # Of each device the number of its block along each dim, and last that of its summand.
        cuts = [[*map(names.index, axes)] for axes in (*map(self.axes_of, dims), self.partial_axes)]
        numbers = block_numbers([n for _, n in mesh], cuts).T.tolist()
        # Empty shards are blocks of their own: their numbers differ, and their extents may not.
        devices = group_by(range(len(numbers)), lambda device: tuple(numbers[device]))
        self.shards = tuple(
            ShardFact(
                extents=tuple(blocks[n] for blocks, n in zip(ranges, at, strict=True)),
                summand=summand,
                devices=tuple(found),
            )
            for (*at, summand), found in devices.items()
        )
        self.summands = 1 + max(s.summand for s in self.shards)

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The mesh axes with several devices that split a dim, outer first."""
        return tuple(a for a, atom in self.atoms if atom == Split(dim))


def telling_tensor(program: Program) -> TensorShards | None:
    """The annotated tensor that the most mesh axes split or are partial on, the first of several;
    without annotations the input, the largest of several. None where all are whole."""
    found = annotated_tensors(program) or sorted(
        inputs(program), key=lambda fact: -fact.bytes_per_device
    )
    several = [axis for axis, n in program.mesh.axes if n > 1]
    told = [
        sum(isinstance(fact.type.get(axis), Split | Unreduced) for axis in several)
        for fact in found
    ]
    return TensorShards(found[told.index(max(told))], program.mesh.axes) if any(told) else None


def shards_of(program: Program, name: str | int, output_names: tuple[str, ...]) -> TensorShards:
    """The shards of an input, an output or a value.

    Arguments:
      program: the plan.
      name: as `plan.why` takes it.
      output_names: names of the results.

    Raises:
      SbpError: `bad-argument` when nothing has that name, with the nearest names.
    """
    subject = Subjects(program.graph, output_names).find(name)[-1]
    values, block = program.typing.values, program.block
    sides: dict[str, Sequence[Source]] = {"input": block.inputs, "output": block.outputs}
    sources: list[Source] = (
        [sides[subject.kind][subject.position]]
        if subject.kind in sides
        else [Register(v, values[v]) for v in subject.values if v in values]
    )
    if not sources:
        raise SbpError(
            f"the plan does not compute `{subject.label}`, because no operation needs its value"
        )
    facts = [tensor(program, s, subject.label) for s in sources]
    others = (t for t in dict.fromkeys(f.type for f in facts) if t != facts[0].type)
    return TensorShards(facts[0], program.mesh.axes, times=len(sources), types=tuple(others))


# ---- picture ------------------------------------------------------------------------------------


MOST_BLOCKS = 8
"""Blocks of one dim that are drawn; further ones are a gap with their number."""

MOST_PANELS = 6
"""Blocks of third and further dims, each of which is a drawing of its own."""

LISTED_SHARDS = 16
"""Shards in the words of a picture; as many again are folded, and the others counted."""

_WIDE, _HIGH, _GAP, _SHEET, _PAGE = 150.0, 44.0, 82.0, 6.0, 1000.0


class _Cut:
    """A dim as it is drawn. The longest block has `longest` pixels, and the others in proportion.

    Arguments:
      dim: the dim; -1 where the tensor has no such dim.
      extents: its blocks that have elements.
      longest: the length of the longest block in pixels.
      gap: the same of blocks that are left out.

    Attributes:
      extents: the blocks that are drawn, with None in place of the blocks that are left out.
      left_out: the number of blocks that are left out.
      pixels: the length of each.
    """

    def __init__(self, dim: int, extents: list[Extent], longest: float, gap: float) -> None:
        self.left_out = max(0, len(extents) - MOST_BLOCKS)
        ends = [*extents[: MOST_BLOCKS - 2], None, *extents[-2:]]
        longest *= 2 if len(extents) == 1 else 1  # a whole dim looks like one
        most = max((stop - start for start, stop in extents), default=1)
        self.dim, self.extents = dim, tuple(ends if self.left_out else extents)
        self.pixels = [gap if e is None else longest * (e[1] - e[0]) / most for e in self.extents]

    def cells(self, start: float) -> Iterator[tuple[Extent | None, float, float]]:
        """Each block with the pixel at which it begins and its length."""
        begins = itertools.accumulate(self.pixels, initial=start)
        return zip(self.extents, begins, self.pixels, strict=False)


def shard_picture(found: TensorShards) -> Picture:
    """Where a tensor lives, as a picture with the same in words.

    Arguments:
      found: its shards.
    """
    untold = len(found.shards) - 2 * LISTED_SHARDS
    more = (f"This list leaves out {counted(untold, 'shard')}.",) if untold > 0 else ()
    return picture(_caption(found), _ShardDrawing(found).board(), _words(found), *more)


def _drawn_dims(found: TensorShards) -> tuple[int, int, tuple[int, ...]]:
    """The dim from left to right, the dim from top to bottom, and the other dims that are split."""
    split = [d for d in range(len(found.tensor.global_shape)) if found.axes_of(d)]
    whole = [d for d in reversed(range(len(found.tensor.global_shape))) if d not in split]
    down, across = [-1, -1, *sorted([*split, *whole][:2])][-2:]
    return across, down, tuple(split[2:])


def _devices_text(devices: Sequence[int], limit: int = 3, between: str = ",") -> str:
    """Devices with their runs joined, such as `0-3, 8-11`; the middle of many is left out."""
    texts = [
        f"{run[0][1]}-{run[-1][1]}" if run[1:] else str(run[0][1])
        for run in group_by(enumerate(devices), lambda at: at[1] - at[0]).values()
    ]
    return between.join(_elide(texts, limit))


def _label(group: Sequence[ShardFact], limit: int = 3) -> str:
    """The devices of a block: a sum of those of its summands."""
    return " + ".join(_elide([_devices_text(s.devices, limit) for s in group], limit))


def _elide(texts: list[str], limit: int) -> list[str]:
    return texts if len(texts) <= limit else [*texts[: limit - 1], "..", texts[-1]]


def _dim_text(found: TensorShards, dim: int) -> str:
    """A dim and what splits it; empty for a dim that the tensor has not."""
    if dim < 0:
        return ""
    axes = found.axes_of(dim)
    how = f"split over {listed(axes)}" if axes else "whole"
    return f"dim {dim} ({found.tensor.global_shape[dim]}): {how}"


def _extent_text(found: TensorShards, dim: int, extent: Extent | None) -> str:
    whole = (0, found.tensor.global_shape[dim])
    return ".." if extent is None else ":" if extent == whole else f"{extent[0]}:{extent[1]}"


class _ShardDrawing:
    """The drawing of a tensor: one panel for each block of its third and further dims that are
    split.

    Arguments:
      found: its shards.
    """

    def __init__(self, found: TensorShards) -> None:
        self.found = found
        filled = sorted((s for s in found.shards if not s.is_empty), key=lambda s: s.summand)
        self.blocks = group_by(filled, lambda s: s.extents)
        across, down, self.rest = _drawn_dims(found)
        room = CELL * (2 + max((len(_label(group)) for group in self.blocks.values()), default=0))
        self.columns = _Cut(across, self._extents(across), min(max(64.0, room), _WIDE), _GAP)
        self.rows = _Cut(down, self._extents(down), _HIGH, 0.8 * _HIGH)
        self.sheets = min(found.summands - 1, 3)
        ticks = [len(_extent_text(found, down, e)) for e in self.rows.extents if e and down >= 0]
        self.left = CELL * (max(ticks, default=0) + 1) + 4

    def _extents(self, dim: int) -> list[Extent]:
        return sorted({e[dim] for e in self.blocks}) if dim >= 0 else [(0, 1)]

    def board(self) -> Board:
        """The panels in rows as wide as a page."""
        cuts = [self._extents(dim) for dim in self.rest]
        panels = [*itertools.islice(itertools.product(*cuts), MOST_PANELS)]
        more = math.prod(map(len, cuts)) - len(panels)
        sheets, heading = _SHEET * self.sheets, _dim_text(self.found, self.columns.dim)
        texts = CELL * max(len(heading) + 2, 26)
        wide = max(texts, self.left + sum(self.columns.pixels)) + sheets + 24
        lines = 1 + (self.rows.dim >= 0) + bool(self.rest)
        high = sum(self.rows.pixels) + sheets + 36 + 16 * lines
        beside = max(1, min(len(panels), int(_PAGE / wide)))
        tall = high * max(1, -(-len(panels) // beside)) + (18 if more > 0 else 0)
        board = Board(wide * beside, tall)
        if not self.blocks:
            board.rect((4, 4), (wide - 8, _HIGH), Ink(color=WHOLE, opacity=0.1, dashed=True))
            board.text((12, 4 + _HIGH / 2), "no elements on any device")
            return board
        for number, panel in enumerate(panels):
            row, column = divmod(number, beside)
            fixed = dict(zip(self.rest, panel, strict=True))
            self._panel(board, fixed, (column * wide, row * high))
        if more > 0:
            board.text((4, board.height - 5), f"and {counted(more, 'such drawing')} more")
        return board

    def _panel(self, board: Board, fixed: dict[int, Extent], corner: Point) -> None:
        """The blocks of two dims; `fixed` has the block of each other dim that is split."""
        found, columns, rows, (x, y) = self.found, self.columns, self.rows, corner
        place = ", ".join(f"dim {d} = {_extent_text(found, d, e)}" for d, e in fixed.items())
        arrows = {"\N{RIGHTWARDS ARROW}": columns.dim, "\N{DOWNWARDS ARROW}": rows.dim}
        heads = [f"{sign} {_dim_text(found, dim)}" for sign, dim in arrows.items() if dim >= 0]
        for text in [place, *heads] if place else heads:
            board.text((x + 4, y + 12), text, Ink(bold=text == place))
            y += 16
        x, y = x + self.left, y + _SHEET * self.sheets + 16
        for sheet in range(self.sheets, 0, -1):
            board.rect(
                (x + _SHEET * sheet, y - _SHEET * sheet),
                (sum(columns.pixels), sum(rows.pixels)),
                Ink(color=PARTIAL, opacity=0.12, dashed=True),
            )
        for row, (down, top, high) in enumerate(rows.cells(y)):
            if rows.dim >= 0 and high >= 10:
                text = _extent_text(found, rows.dim, down)
                board.text((x - 5, top + high / 2 + 4), text, anchor="end")
            for column, (across, at, wide) in enumerate(columns.cells(x)):
                if row == 0 and columns.dim >= 0:
                    text = _extent_text(found, columns.dim, across)
                    board.inside(at, at + wide, y - _SHEET * self.sheets - 4, text)
                here = {**fixed, columns.dim: across, rows.dim: down}
                self._block(board, here, (at, top), (wide, high), (row + column) % 2 == 1)

    def _block(
        self,
        board: Board,
        here: dict[int, Extent | None],
        corner: Point,
        size: Point,
        is_odd: bool,
    ) -> None:
        """A block with its devices, or a gap where blocks are not drawn. Neighbours have different
        shades."""
        left, right, middle = corner[0], corner[0] + size[0], corner[1] + size[1] / 2 + 4
        counts = [cut.left_out for cut in (self.columns, self.rows) if here[cut.dim] is None]
        if counts:
            board.rect(corner, size, Ink(color=WHOLE, opacity=0.05, dashed=True))
            board.text(
                ((left + right) / 2, middle),
                f"+ {counts[0]} more" if len(counts) == 1 else "..",
                anchor="middle",
            )
            return
        group = self.blocks[
            tuple(here.get(d) or (0, n) for d, n in enumerate(self.found.tensor.global_shape))
        ]
        color, title = PARTIAL if len(group) > 1 else SPLIT, "device " + _label(group, 16)
        board.rect(corner, size, Ink(color=color, opacity=0.4 if is_odd else 0.22), title=title)
        label = shorten(_label(group), max(3, int((size[0] - 4) / CELL)))
        if size[1] >= 14:
            board.inside(left, right, middle, label, title)


# ---- words --------------------------------------------------------------------------------------


def _caption(found: TensorShards) -> str:
    fact, sizes, partial = found.tensor, dict(found.mesh), found.partial_axes
    splits = [
        f"Dim {dim} is split into {counted(math.prod(sizes[a] for a in axes), 'block')} over"
        f" {listed(axes)}."
        for dim in range(len(fact.global_shape))
        if (axes := found.axes_of(dim))
    ]
    op = fact.type.get(partial[0]) if partial else None
    monoid = op.monoid if isinstance(op, Unreduced) else "sum"
    parts = f"each element is the {monoid} of {found.summands} parts on different devices"
    copied = [a for a, atom in found.atoms if not isinstance(atom, Split | Unreduced)]
    whole = "Every part is" if partial else "It is whole and the same"
    alike = "Every block is" if splits else whole
    empty = sorted(d for s in found.shards if s.is_empty for d in s.devices)
    across, down, rest = _drawn_dims(found)
    hidden = [str(d) for d in range(len(fact.global_shape)) if d not in (across, down, *rest)]
    have = f"{counted(len(empty), 'device')} {'has' if len(empty) == 1 else 'have'}"
    return sentences(
        {
            f"where `{fact.name}` {fact.shape}, {fact.type!r}, lives on mesh"
            f" {' '.join(f'{a}={n}' for a, n in found.mesh)}.": True,
            " ".join(splits): splits,
            f"It is partial, {op!r}, over {listed(partial)}: {parts}, drawn with `+` between"
            " them.": partial,
            f"{alike} on {counted(len(found.shards[0].devices), 'device')}, along"
            f" {listed(copied)}.": copied,
            f"{have} no element of it: {_devices_text(empty)}.": empty
            and math.prod(fact.global_shape),
            f"Not drawn, because not split: dim{'s' if len(hidden) > 1 else ''}"
            f" {listed(hidden, 8)}.": hidden,
            f"The program makes it {found.times} times; other types of it:"
            f" {listed(map(repr, found.types))}.": found.types,
            "Numbers are devices, in the order of `mesh.devices.flat`.": True,
        }
    )


def _words(found: TensorShards) -> Table:
    partial = found.summands > 1
    return table(
        ("elements", *(("summand",) if partial else ()), "devices"),
        (
            (
                "none"
                if shard.is_empty
                else f"[{', '.join(_extent_text(found, *at) for at in enumerate(shard.extents))}]",
                *((f"{shard.summand + 1} of {found.summands}",) if partial else ()),
                _devices_text(shard.devices, 8, ", "),
            )
            for shard in found.shards[: 2 * LISTED_SHARDS]
        ),
        shown=LISTED_SHARDS,
        rest=lambda _: f"and {counted(len(found.shards) - LISTED_SHARDS, 'more shard')}",
    )
