"""The check of a plan after lowering and after every pass: each instruction reads registers that
are written, in the types that its row takes.

This module shares no walk with the code that makes plans. It reads the parameters of `scan` and
`while` itself and does not use `interface_of`, so that a fault there cannot hide itself here.
"""

from collections.abc import Iterator

from sbp.errors import SbpInternalError
from sbp.infer.request import Request
from sbp.infer.space import Codes, stack
from sbp.plan.ir import Apply, Block, Box, Loop, Register, Source, walk
from sbp.trace.graph import SAME, Node


def verify_budgets(block: Block, request: Request) -> None:
    """Checks every collective of a plan against the request's budgets, except those of hand-written
    regions.

    Raises:
      SbpInternalError: naming the collective that a budget forbids.
    """
    for kind, mesh_axes, sent, reader in over_budget(block, request):
        raise _fail(f"a budget forbids {kind} of {sent} bytes over mesh axes {mesh_axes}", reader)


def over_budget(
    block: Block, request: Request
) -> Iterator[tuple[str, tuple[int, ...], float, Node | None]]:
    """The collectives of a plan that budgets forbid, in program order: the kind, the positions of
    the mesh axes, the bytes that one device sends in one run, and the node that reads the result;
    None for a result of the program.

    Arguments:
      block: the plan.
      request: the request with its budgets.
    """
    for instruction, _, regions, _ in walk(block) if request.budgets else ():
        in_loop = any(node.op in ("scan", "while") for node, _ in regions)
        if isinstance(instruction, Box):
            reader, value = instruction.reader, instruction.source.value
            at = reader or (regions[-1][0] if regions else None)
            bans = request.rules(at, value=value, in_loop=in_loop, free=True).bans
            sends = [(s.kind, s.mesh_axes, s.bytes_sent) for s in instruction.steps]
        else:
            reader = instruction.node
            bans = request.rules(reader, in_loop=in_loop, free=True).bans
            sends = [(s.kind, (position,), s.bytes) for position, s in instruction.sends]
        for kind, mesh_axes, sent in sends:
            if any(b.forbids(kind, mesh_axes, sent) for b in bans):
                yield kind, mesh_axes, sent, reader


def _fail(what: str, node: Node | None) -> SbpInternalError:
    where = f" ({node.op}, node {node.id})" if node is not None else ""
    return SbpInternalError(f"plan does not verify{where}: {what}")


def verify(block: Block) -> None:
    """Checks that registers are written once and before they are read, that conversions and rows
    fit their registers, and that the types of regions agree with their bodies.

    Raises:
      SbpInternalError: naming the instruction that breaks the plan.
    """
    written: set[Register] = set(block.inputs)

    def read(source: Source, node: Node | None) -> Codes:
        if isinstance(source, Register) and source not in written:
            raise _fail(f"register {source} is read before it is written", node)
        return source.codes

    for instruction in block.instructions:
        match instruction:
            case Apply(node=node, row=row, ins=ins, outs=outs):
                if (
                    tuple(read(s, node) for s in ins) != row.ins
                    or tuple(r.codes for r in outs) != row.outs
                ):
                    raise _fail(f"row {row} does not fit its registers", node)
                if node.op in SAME and row.ins != row.outs:
                    raise _fail(f"row {row} changes a type without a conversion", node)
            case Box(source=source, target=target, steps=steps, reader=reader):
                here = read(source, reader)
                for step in steps:
                    if step.source != here:
                        raise _fail(f"step {step} starts from {here}", reader)
                    here = step.target
                if here != target.codes or source.value != target.value:
                    raise _fail(f"box ends in {here}, not in {target}", reader)
            case Loop(node=node, ins=ins, outs=outs, blocks=blocks):
                types = tuple(read(s, node) for s in ins)
                _verify_region(node, types, tuple(r.codes for r in outs), blocks)
                for inner in blocks:
                    verify(inner)
        for register in instruction.outs:
            if register in written:
                raise _fail(f"register {register} is written twice", None)
            written.add(register)
    for source in block.outputs:
        read(source, None)


def _verify_region(
    node: Node, ins: tuple[Codes, ...], outs: tuple[Codes, ...], blocks: tuple[Block, ...]
) -> None:
    entries = [tuple(r.codes for r in b.inputs) for b in blocks]
    exits = [tuple(s.codes for s in b.outputs) for b in blocks]
    match node.op:
        case "scan":
            c, k = node.params["num_consts"], node.params["num_carry"]
            good = (
                ins[: c + k] == entries[0][: c + k]
                and entries[0][c : c + k] == exits[0][:k] == outs[:k]
                and tuple(map(stack, entries[0][c + k :])) == ins[c + k :]
                and tuple(map(stack, exits[0][k:])) == outs[k:]
            )
        case "while":
            c, b = node.params["cond_nconsts"], node.params["body_nconsts"]
            good = (
                entries[0] == (*ins[:c], *ins[c + b :])
                and entries[1] == ins[c:]
                and exits[1] == ins[c + b :] == outs
                and not any(exits[0][0])
            )
        case _:
            good = (
                all(e == ins[1:] for e in entries)
                and all(e == outs for e in exits)
                and not any(ins[0])
            )
    if not good:
        raise _fail("types of the region do not agree with its body", node)
