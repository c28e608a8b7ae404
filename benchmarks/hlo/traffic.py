"""Communication of a compiled XLA program, read from its optimised HLO text.

The measure is what one device sends per execution under bandwidth-optimal (ring) algorithms on n
devices: all-reduce 2(n-1)/n of the size, all-gather (n-1)/n of the output, reduce-scatter (n-1)/n
of the input, all-to-all (n-1)/n of the size, permute the size. Bodies of loops count once per trip.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

_DTYPE_BYTES = {
    **{"s4": 0.5, "u4": 0.5, "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1},
    **{"s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4},
    **{"s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16},
}
_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_SHAPE = re.compile(
    r"\b(" + "|".join(sorted(_DTYPE_BYTES, key=len, reverse=True)) + r")\[([0-9,]*)\]"
)
_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*\(")
_INSTRUCTION = re.compile(r"(?:ROOT )?%?([\w.\-]+) = (.*)")
_COLLECTIVE = re.compile(r" (" + "|".join(_KINDS) + r")(-start)?\(([^)]*)")
ANY_COLLECTIVE = re.compile(r" (" + "|".join(_KINDS) + r")(-start|-done)?\(")
_OPCODE = re.compile(r"\)?\s([a-z][\w\-]*)\(")
WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_KNOWN_TRIPS = re.compile(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)')
_LOOP_BOUND = re.compile(r"(?:ROOT )?%?[\w.\-]+ = [su]32\[\][^ ]* constant\((-?\d+)\)")
_COLLECTIVE_MATMUL = re.compile(r"windowed_dot_general_cond_((?:ag|rs)(?:\.\d+)?)")
_PERMUTES = (" collective-permute-start(", " collective-permute(")
_CALLED = re.compile(
    r"(?:calls|to_apply|called_computations|branch_computations|true_computation"
    r"|false_computation)=\{?%?([\w.\-]+(?:, ?%[\w.\-]+)*)"
)
OPERAND = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_GROUPS_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_GROUPS_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\s*\d+\},?\s*)+)\}")
_GROUPS_LIST = re.compile(r"replica_groups=\{((?:\{[0-9, ]*\},?)+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SentCollective:
    """One collective instruction of a program.

    Arguments:
        kind: XLA's opcode, e.g. `all-gather`.
        group_size: devices that take part together.
        members: the devices that device 0 takes part with, itself included, by position in the
            mesh; of a permute, those that its first source reaches.
        executions: how often one call of the program runs it.
        bytes_per_device: what one device sends in all executions.
        shape: the result's shape, as HLO writes it.
        op_name: JAX's name stack of the operation.
    """

    kind: str
    group_size: int
    members: tuple[int, ...]
    executions: int
    bytes_per_device: float
    shape: str
    op_name: str


def collectives(hlo_text: str, num_devices: int) -> tuple[SentCollective, ...]:
    """All collectives reached from the entry computation, in program order.

    Arguments:
        hlo_text: `jax.stages.Compiled.as_text()`.
        num_devices: devices of the program, the group of a collective that names none.
    """
    computations, entry = computations_of(hlo_text)
    shapes = {
        name: result_shape(rhs)
        for lines in computations.values()
        for name, rhs in instructions(lines)
    }
    found: list[SentCollective] = []

    def walk(computation: str, executions: int) -> None:
        for name, rhs in instructions(computations.get(computation, [])):
            if loop := WHILE.search(rhs):
                trips = loop_trips(rhs, computations)
                walk(loop.group(2), executions * (1 if trips is None else trips))
            elif call := _COLLECTIVE.search(" " + rhs):
                # TPU writes a reduce-scatter as a fusion around an all-reduce.
                scattered = call.group(1) == "all-reduce" and computation.startswith(
                    "all-reduce-scatter"
                )
                kind = "reduce-scatter" if scattered else call.group(1)
                result = (" " + rhs)[: call.start()].strip()
                operands = [shapes.get(operand, "") for operand in OPERAND.findall(call.group(3))]
                size = sum(map(shape_bytes, operands)) or shape_bytes(result)
                members = group_members(rhs, num_devices)
                group_size = len(members)
                op_name = _OP_NAME.search(rhs)
                found.append(
                    SentCollective(
                        kind=kind,
                        group_size=group_size,
                        members=members,
                        executions=executions,
                        bytes_per_device=executions * _sent(kind, size, group_size),
                        shape=result,
                        op_name=op_name.group(1) if op_name else "",
                    )
                )
            elif not (
                name.startswith("async-collective-done") or "calls=%async_collective_fusion" in rhs
            ):
                # On TPU these two repeat a collective that is counted at the start of its
                # asynchronous fusion.
                for callee in callees(rhs):
                    walk(callee, executions)

    walk(entry, 1)
    return tuple(found)


def bytes_by_kind(found: Iterable[SentCollective]) -> dict[str, float]:
    """Bytes that one device sends, per kind of collective, kinds in alphabetical order."""
    totals: dict[str, float] = defaultdict(float)
    for collective in found:
        totals[collective.kind] += collective.bytes_per_device
    return dict(sorted(totals.items()))


def computations_of(hlo_text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of every computation, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    name = entry = ""
    for line in hlo_text.splitlines():
        header = _COMPUTATION.match(line)
        if header and line.rstrip().endswith("{") and not line.startswith("HloModule"):
            name = header.group(2)
            computations[name] = []
            entry = name if header.group(1) else entry
        elif name and line[:1].isspace() and line.strip():
            computations[name].append(line.strip())
    if not entry:
        raise ValueError("the text holds no ENTRY computation: pass the text of a compiled program")
    return computations, entry


def instructions(lines: list[str]) -> Iterable[tuple[str, str]]:
    """The name of each instruction and the text to the right of its `=`."""
    for line in lines:
        if match := _INSTRUCTION.match(line):
            yield match.group(1), match.group(2)


def result_shape(rhs: str) -> str:
    opcode = _OPCODE.search(" " + rhs)
    return rhs.split(f" {opcode.group(1)}(")[0] if opcode else rhs


def shape_bytes(shapes: str) -> float:
    return sum(
        math.prod(int(size) for size in dims.split(",") if size) * _DTYPE_BYTES[dtype]
        for dtype, dims in _SHAPE.findall(shapes)
    )


def callees(rhs: str) -> list[str]:
    """The computations that an instruction calls."""
    return [c.strip().lstrip("%") for called in _CALLED.findall(rhs) for c in called.split(",")]


def loop_trips(rhs: str, computations: Mapping[str, list[str]]) -> int | None:
    """How often the body of a `while` runs.

    Arguments:
        rhs: the `while` instruction.
        computations: the lines of every computation.

    Returns:
        The count that XLA wrote beside the loop. Where it wrote none, that of a loop from zero in
        steps of one: the largest constant that the condition compares with, divided by the steps
        that one turn of a collective matmul makes. None where the condition has no constant.
    """
    if known := _KNOWN_TRIPS.search(rhs):
        return int(known.group(1))
    loop = WHILE.search(rhs)
    assert loop is not None
    lines = computations.get(loop.group(1), [])
    bounds = [int(match.group(1)) for line in lines if (match := _LOOP_BOUND.match(line))]
    return max(1, max(bounds) // _steps_of_a_turn(loop.group(1), computations)) if bounds else None


def _steps_of_a_turn(condition: str, computations: Mapping[str, list[str]]) -> int:
    """How many steps one turn of a loop makes: XLA's collective matmul sends both ways round the
    ring and unrolls two steps, so that a turn has two permutes for each step."""
    found = _COLLECTIVE_MATMUL.search(condition)
    if found is None:
        return 1
    body = re.compile(rf"windowed_dot_general_body_{re.escape(found.group(1))}(\.[a-z]|$)")
    permutes = [
        sum(any(kind in line for kind in _PERMUTES) for line in lines)
        for name, lines in computations.items()
        if body.search(name)
    ]
    return max(1, max(permutes, default=0) // 2)


def group_members(line: str, num_devices: int) -> tuple[int, ...]:
    """The group of device 0, in the three ways HLO writes replica groups."""
    if match := _GROUPS_IOTA.search(line):
        groups, dims, order = match.groups()
        ids = np.arange(num_devices).reshape([int(d) for d in dims.split(",")])
        if order:
            ids = ids.transpose([int(d) for d in order.split(",")])
        rows = ids.reshape([int(d) for d in groups.split(",")])
        return tuple(int(i) for i in rows[int(np.argwhere(rows == 0)[0][0])])
    if match := _GROUPS_MESH.search(line):
        sizes = {
            k: int(v)
            for k, v in (
                axis.replace("'", "").replace(" ", "").split("=")
                for axis in match.group(1).split(",")
            )
        }
        chosen = [axis.replace("'", "").strip().split(":")[0] for axis in match.group(2).split(",")]
        ids = np.arange(num_devices).reshape(list(sizes.values()))
        index = tuple(slice(None) if axis in chosen else 0 for axis in sizes)
        return tuple(int(i) for i in ids[index].ravel())
    if match := _GROUPS_LIST.search(line):
        groups_ = [
            [int(d) for d in group.split(",") if d.strip()]
            for group in re.findall(r"\{([0-9, ]*)\}", match.group(1))
        ]
        return tuple(next(group for group in groups_ if 0 in group))
    if match := _PAIRS.search(line):
        return _reached(
            [tuple(map(int, pair)) for pair in re.findall(r"\{(\d+),\s*(\d+)\}", match.group(1))]
        )
    return tuple(range(num_devices))


def _reached(pairs: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The devices that a permute connects with the first one it names."""
    found, size = {pairs[0][0]}, 0
    while size != len(found):
        size = len(found)
        found |= {d for pair in pairs if found & set(pair) for d in pair}
    return tuple(sorted(found))


def _sent(kind: str, input_bytes: float, group_size: int) -> float:
    """Bytes one device sends for one execution, from the size of its own operand."""
    share = (group_size - 1) / group_size
    match kind:
        case "all-reduce":
            return 2 * share * input_bytes
        case "all-gather":
            return (group_size - 1) * input_bytes
        case "reduce-scatter" | "all-to-all" | "ragged-all-to-all":
            return share * input_bytes
        case _:
            return input_bytes
