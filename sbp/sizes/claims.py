"""The claims about sizes that a program and its typing make, and for which sizes all of them hold.

A typing claims that the rule of each node gives the chosen row, and that each split leaves every
device an element; `sbp.infer.typing.certify` checks the same at one choice of sizes. A program
claims that its reshapes keep the number of elements, which JAX does not check for symbolic sizes.
A claim is a predicate on sizes, so that it can be decided for all of them. A trace may ask what
symbolic sizes do not decide, which is an error.

>>> import jax
>>> (size,) = jax.export.symbolic_shape("4*b")
>>> claim = Claim(text="x divides", key=0, holds=lambda lift: lift(size) % 8 == 0)
>>> decide((claim,), Scope(("b",), ()), {"b": 6}).holds
'x divides'
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from sbp import _jax
from sbp.errors import SHOWN, SbpError, Span, counted
from sbp.infer.flow import Decision
from sbp.infer.pins import pinned_codes
from sbp.infer.rows import NdRow, nests
from sbp.infer.space import (
    Codes,
    encode,
    has_elements,
    is_even,
    local_shape,
    needs_of,
    to_type,
)
from sbp.infer.typing import Typing
from sbp.limits import Policy
from sbp.machine.mesh import MeshSpec
from sbp.signatures import ROUNDED_PARTS, Op, all_b, kernel_named, rule_for, traits_of
from sbp.signatures.region import REGION_OPS, region_rows
from sbp.sizes.scope import (
    MULTIPLE,
    Explored,
    Lift,
    Point,
    Scope,
    Solver,
    explore,
    map_sizes,
    numbers,
    shape_text,
    symbolic_in,
    symbols_in,
)
from sbp.trace.graph import DIM_AS_VALUE, Graph, Node, group_by


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One condition on sizes that a typing needs.

    Arguments:
      text: the condition in words, for the report.
      key: equal for claims of the same condition.
      holds: whether the condition holds, computed with the sizes that its argument gives for
          symbolic ones.
      span: the user's line.
      fact: the condition as a constraint on sizes, where one states it.
    """

    text: str
    key: Any = field(repr=False)
    holds: Callable[[Lift], bool] = field(repr=False)
    span: Span | None = None
    fact: str = ""


def claims_of(graph: Graph, typing: Typing) -> tuple[Claim, ...]:
    """The claims that a typing makes about the sizes of its program, those on inputs and outputs
    first. Claims with equal keys are one.

    Arguments:
      graph: the program with symbolic sizes.
      typing: its typing at one choice of sizes.
    """
    found = group_by((*_boundary(graph, typing), *_inside(graph, typing)), lambda claim: claim.key)
    return tuple(same[0] for same in found.values())


# ---- boundary -----------------------------------------------------------------------------------


def _boundary(graph: Graph, typing: Typing) -> Iterator[Claim]:
    ins = zip(
        graph.input_names, graph.inputs, (typing.values[v] for v in graph.inputs), strict=True
    )
    outs = zip(range(len(graph.outputs)), graph.outputs, typing.outputs, strict=True)
    for kind, group in (("input", ins), ("output", outs)):
        for position, (name, operand, codes) in enumerate(group):
            padded, aval = typing.request.demand.is_padded(kind, position), graph.aval(operand)
            if symbolic_in([aval]) and any(c > 0 for c in codes):
                yield _holding(f"{kind} {name}", aval.shape, codes, typing.mesh, padded=padded)


def _holding(
    what: str, shape: tuple[Any, ...], codes: Codes, mesh: MeshSpec, *, padded: bool
) -> Claim:
    """The claim that an input or output can be held in its type."""
    if padded:
        return Claim(
            text=f"{what} of shape {shape_text(shape)} has elements to split",
            key=("elements", str(shape)),
            holds=lambda lift: all(lift(d) != 0 for d in shape),
        )
    return Claim(
        text=f"{what} of shape {shape_text(shape)} divides evenly under {to_type(codes, mesh)!r}",
        key=("even", str(shape), codes),
        holds=lambda lift: is_even([lift(d) for d in shape], codes, mesh.sizes),
    )


# ---- nodes --------------------------------------------------------------------------------------


def _inside(program: Graph, typing: Typing) -> Iterator[Claim]:
    """The claims of the decisions of each node, in program order."""
    mesh = typing.mesh
    decided = group_by(typing.request.flow.decisions, lambda d: d.node and d.node.id)
    for node in program.walk():
        for decision in decided.get(node.id, ()):
            match decision.kind:
                case "row" if node.op != DIM_AS_VALUE:
                    yield from _row(node, program, typing)
                case "annotation":
                    pin = node.params["pin"]
                    codes = (None,) * len(mesh.sizes) if pin is None else pinned_codes(pin, mesh)
                    yield from _large(node, program, decision, typing, tuple(c or 0 for c in codes))
                case "value":
                    yield from _large(node, program, decision, typing, ())
                case _:
                    pass


def _large(
    node: Node, program: Graph, decision: Decision, typing: Typing, pinned: Codes
) -> Iterator[Claim]:
    """The claim that a split that is not pinned leaves each device an element (`TypeSpace`)."""
    mesh, codes = typing.mesh, typing.codes_at(decision.place)
    whole = tuple(program.avals[decision.makes[0]].shape)
    shape = whole if decision.place[0] == "value" else whole[1:]  # a slice of a stacked result
    if any(c > 0 and symbolic_in([(shape[c - 1],)]) for c in codes):
        yield Claim(
            text=(
                f"a value of {node.op} of shape {shape_text(shape)} is large enough for"
                f" {to_type(codes, mesh)!r}"
            ),
            key=("large", str(shape), codes, pinned),
            holds=lambda lift: _large_enough([lift(d) for d in shape], codes, pinned, mesh.sizes),
            span=node.span,
        )


def _large_enough(shape: Sequence[Any], codes: Codes, pinned: Codes, sizes: Sequence[int]) -> bool:
    return has_elements(shape, codes, sizes, needs_of(shape, (pinned,), sizes)[0])


def _row(node: Node, program: Graph, typing: Typing) -> Iterator[Claim]:
    """The claim that the rule of a node gives the chosen row on each mesh axis; on an inner axis,
    for the shapes that the outer axes leave (`RowTable`)."""
    mesh, row = typing.mesh, typing.rows[node.id]
    policies = typing.graph_request.rules(node).policies
    avals = [program.aval(o) for o in node.inputs], [program.avals[v] for v in node.outputs]

    def lifted(lift: Lift) -> dict[str, Any]:
        return {
            k: v if isinstance(v, Graph) else map_sizes(v, lift) for k, v in node.params.items()
        }

    same = all(v is node.params[k] for k, v in lifted(lambda size: None).items())
    is_concrete = same and not symbolic_in([*avals[0], *avals[1]])
    if is_concrete or not any(c for t in (*row.ins, *row.outs) for c in t):
        return  # all B is always a row

    def holds(lift: Lift) -> bool:
        ins, outs = (
            tuple(jax.ShapeDtypeStruct(tuple(map(lift, a.shape)), a.dtype) for a in side)
            for side in avals
        )
        return _is_offered(Op(node.op, lifted(lift), ins, outs, 1), row, mesh, policies, ())

    takes, gives = (", ".join(repr(to_type(c, mesh)) for c in side) for side in (row.ins, row.outs))
    shapes = " ".join(shape_text(a.shape) for a in avals[0])
    yield Claim(
        text=f"{node.op} on {shapes} takes {takes} to {gives}",
        key=(
            node.op,
            *(
                (k, id(v) if isinstance(v, Graph) else str(v))
                for k, v in sorted(node.params.items())
            ),
            *((str(a.shape), a.dtype) for side in avals for a in side),
            row.ins,
            row.outs,
            policies,
        ),
        holds=holds,
        span=node.span,
    )


def _is_offered(
    op: Op, row: NdRow, mesh: MeshSpec, policies: Sequence[Policy], kernels: tuple[str, ...]
) -> bool:
    """Whether the rule of an operator gives a row on all mesh axes from position `len(kernels)` on.

    Arguments:
      op: the operator on the shapes that the outer axes leave.
      row: the row on all mesh axes.
      mesh: the mesh.
      policies: the boxing policy on each mesh axis.
      kernels: the kernels on the outer axes.
    """
    position = len(kernels)
    if position == len(mesh.sizes):
        return nests(NdRow(row.ins, row.outs, kernels))
    axis, n = mesh.axes[position]
    if n == 1:
        return _is_offered(op, row, mesh, policies, (*kernels, "local"))
    op = Op(op.name, op.params, op.ins, op.outs, n, ROUNDED_PARTS.name in row.kernels)
    avals, codes = (*op.ins, *op.outs), tuple(t[position] for t in (*row.ins, *row.outs))
    rule = rule_for(op.name)
    rows = (
        region_rows(op, axis)
        if op.name in REGION_OPS
        else rule.rows(op)
        if rule is not None
        else (all_b(op),)
    )
    sends = policies[position] == "auto"
    for r in rows:
        kernel = kernel_named(r.kernel)
        if (
            tuple(map(encode, (*r.ins, *r.outs))) == codes
            and (not kernel.communicates or (sends and mesh.hardware.overlaps >= kernel.overlaps))
            and not (kernel.gathers is not None and r.kernel in kernels)
            and all(c <= 0 or a.shape[c - 1] >= n for a, c in zip(avals, codes, strict=True))
        ):
            shards = tuple(
                a
                if k == kernel.gathers
                else jax.ShapeDtypeStruct(local_shape(a.shape, (c,), (n,)), a.dtype)
                for k, (a, c) in enumerate(zip(avals, codes, strict=True))
            )
            inner = Op(op.name, op.params, shards[: len(op.ins)], shards[len(op.ins) :], 1)
            if _is_offered(inner, row, mesh, policies, (*kernels, r.kernel)):
                return True
    return False


# ---- numbers of elements ------------------------------------------------------------------------


def element_claims(graph: Graph) -> list[Claim]:
    """The claims of a program with symbolic sizes that its reshapes keep the number of elements, in
    program order."""
    claims: list[Claim] = []
    for node in graph.walk():
        shapes = [tuple(graph.aval(o).shape) for o in (*node.inputs[:1], *node.outputs[:1])]
        if traits_of(node.op).regroups and symbolic_in(shapes):
            left, right = element_products(*shapes)
            if str(left) != str(right):
                claims.append(_equal_elements(shapes, left, right, node.span))
    return claims


def _equal_elements(shapes: Sequence[Any], left: Any, right: Any, span: Span | None) -> Claim:
    return Claim(
        text=f"the reshape from {' to '.join(map(shape_text, shapes))} keeps the number of"
        " elements",
        key=("elements", f"{left} == {right}"),
        holds=lambda lift: bool(lift(left) == lift(right)),
        span=span,
        fact=f"{left} == {right}",
    )


def element_products(before: Sequence[Any], after: Sequence[Any]) -> tuple[Any, Any]:
    """The numbers of elements of two shapes, without the sizes that they share.

    >>> b, s = jax.export.symbolic_shape("b, s")
    >>> element_products((b, s), (8, s))
    (b, 8)
    """
    rest, other = list(before), list[Any]()
    for size in after:
        if size in rest:
            rest.remove(size)
        else:
            other.append(size)
    return math.prod(rest), math.prod(other)


def check_symbols(graph: Graph, names: Iterable[str], avals: Iterable[Any]) -> None:
    """Checks that a program has no symbolic sizes but those of its arguments.

    Arguments:
      graph: the program.
      names: the symbols of its arguments.
      avals: the arguments.

    Raises:
      SbpError: `symbolic-sizes`, at the first line that has other ones.
    """
    known, scopes = set(names), {id(d.scope) for d in symbolic_in(avals)}
    for node in graph.walk():
        sizes = [
            *filter(jax.export.is_symbolic_dim, node.params.values()),
            *symbolic_in(graph.aval(v) for v in (*node.inputs, *node.outputs)),
        ]
        others = sorted(
            {
                name
                for size in sizes
                for name in symbols_in(str(size))
                if name not in known or id(size.scope) not in scopes
            }
        )
        if others:
            several = len(others) > 1
            raise SbpError(
                f"the function uses the symbolic size{'s' * several} {' and '.join(others)} from"
                f" outside of its arguments; take {'them' if several else 'it'} from the shapes of"
                " its arguments",
                code="symbolic-sizes",
                span=node.span,
            )


# ---- decisions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decided:
    """For which sizes a typing holds.

    Arguments:
      status: `every` size of the scope, `some` of them, or `open`: not decided for all.
      asked: the scope in words.
      holds: the first decided claims that do not hold everywhere, in words; the scope where all
          of them do.
      point: the sizes that the typing was chosen at.
      counterexample: sizes of the scope at which the typing does not hold.
      limits: the claims that do not hold everywhere, those that fail at the counterexample first.
      undecided: the claims that are not decided everywhere, each with the reason.
      claims: the number of claims.
    """

    status: Literal["every", "some", "open"]
    asked: str
    holds: str
    point: Point
    counterexample: Point | None
    limits: tuple[Claim, ...]
    undecided: tuple[tuple[Claim, str], ...]
    claims: int
    _scope: Scope = field(repr=False)
    _explored: tuple[tuple[Claim, Explored], ...] = field(repr=False)

    def holds_at(self, **sizes: int) -> bool | None:
        """Whether the typing holds at sizes of the scope; None if the scope does not allow them."""
        if sizes.keys() != set(self._scope.names) or not self._scope.allows(sizes):
            return None
        for claim, explored in self._explored:
            known = explored.holds_at(sizes)
            if not (claim.holds(numbers(sizes)) if known is None else known):
                return False
        return True


def decide(claims: Sequence[Claim], scope: Scope, point: Point) -> Decided:
    """Decides the claims of a typing for all sizes of a scope.

    Arguments:
      claims: the claims of the typing.
      scope: the sizes that are asked for.
      point: the sizes that the typing was chosen at.
    """
    found = [(c, explore(c.holds, scope, point)) for c in claims]
    limited = _limits(scope, found)
    terms = [f for _, e in limited if len(e.where(True)) == 1 for f in e.where(True)[0]]
    if terms and any(e.open for _, e in found):
        # Products of symbols are easier where the other claims hold: from mod(m, 8) == 0 follows
        # that 8 divides m*k.
        narrowed = scope.narrow(terms)
        found = [(c, explore(c.holds, narrowed, point) if e.open else e) for c, e in found]
        limited = _limits(scope, found)
    failing = [*limited, *((c, e) for c, e in found if e.where(False) and e.open)]
    counterexample = next((p for _, e in failing for holds, _, p in e.cases if not holds), None)
    at, asked = counterexample or point, _scope_text(scope)
    undecided = [(c, e.open) for c, e in found if e.open]
    return Decided(
        status="open" if undecided else "some" if limited else "every",
        asked=asked,
        holds=_list_text([c.text for c, _ in limited]) or asked,
        point=point,
        counterexample=counterexample,
        limits=tuple(c for c, _ in sorted(failing, key=lambda f: f[1].holds_at(at) is not False)),
        undecided=tuple(
            (c, f"sbp could not prove this, because {why}: {c.text}") for c, why in undecided
        ),
        claims=len(claims),
        _scope=scope,
        _explored=tuple(found),
    )


def _limits(scope: Scope, found: Sequence[tuple[Claim, Explored]]) -> list[tuple[Claim, Explored]]:
    """The decided claims that do not hold everywhere, without those that follow from the claims
    before them."""
    solver, limited = Solver(scope), list[tuple[Claim, Explored]]()
    for claim, explored in found:
        holds, fails = map(explored.where, (True, False))
        if fails and not explored.open and not solver.shows(holds):
            limited.append((claim, explored))
            solver.add(holds)
    return limited


def _list_text(texts: Sequence[str]) -> str:
    """The first claims, and how many more there are."""
    more = len(texts) - SHOWN
    rest = [counted(more, "more condition")] if more > 0 else []
    return " and ".join([*texts[:SHOWN], *rest])


def point_text(point: Point) -> str:
    """A point, such as `b = 40 and s = 56`."""
    return " and ".join(f"{name} = {value}" for name, value in sorted(point.items()))


def _scope_text(scope: Scope) -> str:
    """The scope in words, without the constraints that JAX adds to one on a `mod`."""
    added = {
        f"{m[2]}*floordiv({m[1]}, {m[2]}) == {m[1]}"
        for m in map(MULTIPLE.fullmatch, scope.constraints)
        if m
    }
    shown = [c for c in scope.constraints if c not in added]
    bounded = [n for n in scope.names if any(c.startswith((f"{n}>", f"{n} >")) for c in shown)]
    return " and ".join([*(f"{n} >= 1" for n in scope.names if n not in bounded), *shown])


# ---- questions that sizes do not decide ---------------------------------------------------------


@contextlib.contextmanager
def deciding_sizes(advice: str) -> Iterator[None]:
    """Traces the user's function inside.

    Arguments:
      advice: what to change where the function asks something that symbolic sizes do not decide.

    Raises:
      SbpError: `symbolic-sizes`, at the user's line that asks it.
    """
    try:
        yield
    except jax.errors.InconclusiveDimensionOperation as error:
        first = " ".join(str(error).split("\n")[0].split()).removesuffix(".")
        raise SbpError(
            f"the program depends on more than its symbolic sizes say: {first}; {advice}",
            code="symbolic-sizes",
            span=_jax.raising_span(error),
        ) from error
