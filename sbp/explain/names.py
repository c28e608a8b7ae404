"""Names of a program's values in reports: the user's own, or the operation that makes the value."""

import ast
import functools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from jax import lax

from sbp import _jax
from sbp.annotations import annotate_p
from sbp.errors import Span, listed
from sbp.infer.constraints import PinSite
from sbp.infer.space import Code, decode
from sbp.signatures import traits_of
from sbp.source.reader import (
    Position,
    SourceRead,
    VariableBinding,
    binding_of,
    contains,
    expression_at,
    keyword_of,
    operand_expressions,
    position_at,
    read_of,
    span_of,
    users_span,
)
from sbp.trace.graph import Constant, Dataflow, Graph, Node, Operand

# ---- dims of jax.vmap ---------------------------------------------------------------------------


def behind_vmap(site: PinSite, code: Code) -> int | None:
    """The number of dims that `jax.vmap` puts before the dims that the user sees where a pin is
    written; None when that is not known.

    Arguments:
      site: the pin.
      code: the code that it asks on one mesh axis.
    """
    if not any(n.is_batched for n in site.nodes):
        return 0
    written = _written_dim(site)
    # `in_axes=0` puts the dims of vmap in front, the only place that is known.
    return code - 1 - written if written is not None and code - 1 > written else None


def _written_dim(site: PinSite) -> int | None:
    """The dim that a call of `sbp.split` has as a number; None for another annotation."""
    match expression_at(site.span)[0]:
        case ast.Call(args=[_, ast.Constant(value=int(dim)), *_]) if type(dim) is int and dim >= 0:
            return dim
        case _:
            return None


BATCHED = "of the batched array"
"""Text behind the atom of a dim under `jax.vmap`, where sbp cannot tell which dim of the user it
is."""


def asked_text(site: PinSite, code: Code, seen: Code | None = None) -> str:
    """The atom that a pin asks, in the dims that the user sees where the pin is written.

    Arguments:
      site: the pin.
      code: the code that it asks on one mesh axis.
      seen: a split that it asks as it is written, where `code` is another one; None for `code`.
    """
    own = code if seen is None else seen
    behind = behind_vmap(site, own) if code > 0 else 0
    written = _written_dim(site) if behind is None and code == own else None
    if written is not None:
        return repr(decode(1 + written))
    return (
        f"{decode(code)!r} {BATCHED}"
        if behind is None or 0 < code <= behind
        else repr(decode(code - behind if code > 0 else code))
    )


# ---- names --------------------------------------------------------------------------------------


def _position(span: Span) -> tuple[str, Position]:
    """A file and a place in it, whichever function it belongs to."""
    return span.file, position_at(span)


class Names(Dataflow):
    """The values of a program, with the user's names of them."""

    @functools.cached_property
    def inputs(self) -> dict[Operand, int]:
        """For each input of the program, its number; also for an input as sbp pins its uneven
        split."""
        pinned = (
            (pin.input, n.outputs[0])
            for n in self.graph.nodes
            if n.op == annotate_p.name and (pin := n.params["pin"]) and pin.input >= 0
        )
        return {v: number for number, v in (*enumerate(self.graph.inputs), *pinned)}

    @functools.cached_property
    def made(self) -> frozenset[tuple[str, Position]]:
        """The places of all expressions of the user from which the program has operations."""
        return frozenset(
            map(_position, {span for node in self.graph.walk() for span in node.stack})
        )

    def is_other(self, name: str, node: Node, value: Operand, at: Span | None = None) -> bool:
        """Whether sbp is sure that a variable in a node's line holds another value than `value`.

        Arguments:
          name: the variable.
          node: the node.
          value: the value.
          at: the frame of the node that is the line; None for the innermost.
        """
        line, stack = at or node.span, node.stack
        return (
            isinstance(value, int)
            and line in stack
            and self._is_other(name, line, stack[stack.index(line) :], value)
        )

    def _is_other(self, name: str, at: Span, frames: Sequence[Span], value: int) -> bool:
        """Whether sbp is sure that a variable in an expression holds another value than `value`. It
        is not sure if the expression that makes the variable has no operations, because such an
        expression may return its argument, or if the variable is one element of a result.

        Arguments:
          name: the variable.
          at: the expression that reads it.
          frames: the user's frames from `at` outwards, `at` or an expression around it first.
          value: the value.
        """
        binding, maker = binding_of(name, at), self.maker(value)
        if binding is None:
            return False
        made_at, variable = binding.span, binding.name
        if made_at is None and len(frames) < 2:  # an argument of the program
            # sbp itself pins an argument that does not divide, at no line of the user.
            return (
                self.value(value).split("[")[0].split(".")[0] not in ("", name)
                if maker is None
                else maker.span is not None
            )
        if made_at is None:
            passed, frames = _argument(name, binding, frames[1]), frames[1:]
            if passed is None:
                return False
            made_at = span_of(passed, frames[0].file)
            variable = passed.id if isinstance(passed, ast.Name) else ""
        if variable:
            return self._is_other(variable, made_at, frames, value)
        mine = map(_position, maker.stack if maker is not None else ())
        return _position(made_at) in self.made.difference(mine)

    def value(self, operand: Operand) -> str:
        """The name of a value: the input's, or that of the variable to which its line assigns it;
        empty when it has none."""
        if operand in self.inputs and self.graph.input_names:
            return self.graph.input_names[self.inputs[operand]]
        maker = self.maker(operand)
        return "" if maker is None or maker.in_gradient else expression_at(maker.span)[1]

    def preimages(self, operand: Operand, code: Code) -> Iterator[tuple[Operand, Code]]:
        """A value with a code, then the value that it is made of by a cast, a transpose or another
        elementwise operator of one operand, with its code there, and so on."""
        yield operand, code
        maker = self.maker(operand)
        moves = maker is not None and maker.op == lax.transpose_p.name
        if maker and len(maker.inputs) == 1 and (moves or traits_of(maker.op).elementwise):
            dims = maker.params.get("permutation", range(code))
            yield from self.preimages(maker.inputs[0], 1 + dims[code - 1] if code > 0 else code)

    def operand(self, node: Node, number: int) -> str:
        """The name of an operand where it is read; empty when the user has none for it."""
        maker = self.maker(node.inputs[number])
        if node.in_gradient and maker is not None and maker.in_gradient:
            return "the cotangent"
        read = self.read(node, number)
        return "" if read is None else read.code

    def read(self, node: Node, number: int) -> SourceRead | None:
        """An operand as the user's line reads it; None when the line does not show it."""
        operand = node.inputs[number]
        maker, name = self.maker(operand), self.value(operand)
        if node.backward:
            return SourceRead(name) if name else None
        if maker is not None and maker.span == node.span:  # a value inside a library function
            return None
        parts = operand_expressions(node) or self._einsum_operands(node)
        if parts and node.span:
            read = self._read_part(parts, number, node)
            if read is None:
                return None
            if len(read.code) <= 40:
                return SourceRead(read.code) if operand in self.inputs else read
        if name or maker is None or not (maker.span and node.span):
            other = name.isidentifier() and self.is_other(name, node, operand)
            return SourceRead(name) if name and len(name) <= 40 and not other else None
        expression = expression_at(maker.span)[0]  # `x.sum(1)` of `x.sum(1).astype(int)`
        if expression is None or not contains(node.span, maker.span):
            return None
        read = read_of(expression, maker.span.file)
        return read if len(read.code) <= 40 else None

    def _read_part(self, parts: list[ast.expr], number: int, node: Node) -> SourceRead | None:
        """An operand as one of the expressions of a call: the one at its position, unless that is
        another value. `jnp.where(p, a, b)` has its operands in the order p, b, a.

        Arguments:
          parts: the expressions.
          number: of the operand.
          node: the node of the call.
        """
        assert node.span is not None
        part, value = parts[number], node.inputs[number]
        if not isinstance(part, ast.Name) or not self.is_other(part.id, node, value):
            return read_of(part, node.span.file)
        names = {p.id for p in parts if isinstance(p, ast.Name)}
        left = [name for name in names if not self.is_other(name, node, value)]
        return SourceRead(left[0]) if len(left) == 1 else None

    def _einsum_operands(self, node: Node) -> list[ast.expr]:
        """The operands of an einsum of two, in the order of the node, which may have swapped them.
        Empty when neither operand is known by its name."""
        call = expression_at(node.span)[0] if traits_of(node.op).contracts else None
        if node.span is None or not isinstance(call, ast.Call) or len(call.args) != 3:
            return []
        parts = call.args[1:]
        texts = [read_of(a, node.span.file).code for a in parts]
        names = [
            self.value(o) or (self.entering(o, node) if isinstance(o, int) else "")
            for o in node.inputs
        ]
        return (
            parts
            if names[0] == texts[0] or names[1] == texts[1]
            else parts[::-1]
            if names[0] == texts[1] or names[1] == texts[0]
            else []
        )

    def operand_names(self, node: Node) -> tuple[str, ...]:
        """The name of each operand of a node in a diagnosis. Each operand has one, and different
        values have different ones."""
        names = [self._word(node, number) for number in range(len(node.inputs))]
        values = Counter(name for name, _ in {*zip(names, node.inputs, strict=True)})
        return tuple(
            f"{name} (operand {i})" if values[name] > 1 else name for i, name in enumerate(names)
        )

    def _word(self, node: Node, number: int) -> str:
        """The name of an operand; without a name, the operation that makes it."""
        operand, name = node.inputs[number], self.operand(node, number)
        if isinstance(operand, Constant):
            is_array = operand.aval.shape or _jax.is_extended(operand.aval.dtype)
            return name or ("a constant" if is_array else str(np.asarray(operand.value)[()]))
        maker = self.maker(operand)
        if not name and maker is not None and maker.span == node.span:
            if traits_of(maker.op).unnamed:
                return self._word(maker, 0)  # the value before this step of the library
            if not maker.regions:
                return f"the result of its {maker.name}"
        return name or self.entering(operand, node) or f"operand {number}"

    def entering(self, value: int, reader: Node, *, alone: bool = False) -> str:
        """The name of a call's result that a node outside of the call reads, as `g` of
        `g = jax.grad(loss)(w)`.

        Arguments:
          value: the value.
          reader: the node that reads it.
          alone: whether the name must be that of one array, not of a tree of arrays.
        """
        maker = self.maker(value)
        if maker is None:
            return self.value(value)
        frames = zip(reversed(maker.stack), reversed(reader.stack), strict=False)
        outer = len(maker.stack) - sum(a == b for a, b in frames) - 1
        if outer < 1:
            return self.value(value)
        within = maker.stack[outer:]
        name = expression_at(within[0])[1]
        if not name or not alone:
            return name
        nodes = list(self.graph.walk())
        inside = {
            n.id for n in nodes if n.stack[-len(within) :] == within and n.scope == maker.scope
        }
        made = {o for n in nodes if n.id in inside for o in n.outputs}
        read = {o for n in nodes if n.id not in inside for o in n.inputs if o in made}
        return name if read == {value} else ""

    def site(self, site: PinSite) -> str:
        """The name of the pinned value."""
        if site.is_input:
            return self.graph.input_names[site.position]
        if site.source == "output":
            return f"output {site.position}"
        expression, name = expression_at(site.span)
        call = expression if isinstance(expression, ast.Call) else None
        if not name and expression is not None and site.span:
            # Whatever pins it, `sbp.split` or a layout: the first argument is the value.
            name = read_of(call.args[0] if call and call.args else expression, site.span.file).code
        name = name if name and len(name) <= 40 else "this value"
        is_cotangent = keyword_of(expression, "cotangent") and all(n.backward for n in site.nodes)
        return f"the cotangent of {name}" if is_cotangent else name


def _argument(name: str, binding: VariableBinding, caller: Span) -> ast.expr | None:
    """The argument that a call gives a parameter; None where the call does not show it.

    Arguments:
      name: the parameter.
      binding: the parameter as its function has it.
      caller: the call.
    """
    match expression_at(caller)[0]:
        case ast.Call(func=ast.Name(id=called), args=args, keywords=keywords) if (
            called == binding.function and not any(isinstance(a, ast.Starred) for a in args)
        ):
            named = next((k.value for k in keywords if k.arg == name), None)
            return args[binding.position] if 0 <= binding.position < len(args) else named
        case _:
            return None


def pinned_value(graph: Graph, site: PinSite) -> Operand:
    """The value that a pin stands on."""
    boundary = {"input": graph.inputs, "output": graph.outputs}.get(site.source)
    return site.nodes[0].outputs[0] if boundary is None else boundary[site.position]


def pinned_text(
    site: PinSite, axes: Sequence[str], codes: tuple[Code | None, ...] | None = None
) -> str:
    """The atoms that a pin asks, such as `data:S(0) tensor:B`.

    Arguments:
      site: the pin.
      axes: names of the mesh axes.
      codes: others that it would ask; None for its own.
    """
    seen = next((c for c in site.codes if c is not None and c > 0), None)
    return " ".join(
        f"{axis}:{asked_text(site, c, seen)}"
        for axis, c in zip(axes, site.codes if codes is None else codes, strict=True)
        if c is not None
    )


# ---- frames -------------------------------------------------------------------------------------
# Dims as the user's line has them. A function of a library may move dims before and after its own
# operation: `jnp.fft.fft(x, axis=1)` transforms the last dim of a transposed `x`.


def operand_code(names: Names, node: Node, number: int, code: Code) -> Code:
    """A code of an operand, of the value that the user's line reads.

    Arguments:
      names: the program with its names.
      node: the node.
      number: of the operand.
      code: the code in the dims of the node.
    """
    maker = names.maker(node.inputs[number])
    while code > 0 and maker is not None and _is_step(names.graph, maker, node):
        code = 1 + maker.params.get("permutation", range(code))[code - 1]
        maker = names.maker(maker.inputs[0])
    return code


def result_code(names: Names, node: Node, number: int, code: Code) -> Code:
    """A code of a result, of the value that the user's line makes.

    Arguments:
      names: the program with its names.
      node: the node.
      number: of the result.
      code: the code in the dims of the node.
    """
    value = node.outputs[number]
    while code > 0:
        readers = [n for n in names.readers[value] if n and value in n.inputs]
        if len(readers) != 1 or not _is_step(names.graph, readers[0], node):
            return code
        code = 1 + tuple(readers[0].params.get("permutation", range(code))).index(code - 1)
        value = readers[0].outputs[0]
    return code


def _is_step(graph: Graph, other: Node, node: Node) -> bool:
    """Whether a node is a step of the library around another node that keeps or moves all dims."""
    unnamed = other.span == node.span and traits_of(other.op).unnamed
    if not unnamed or not other.inputs or not other.outputs:
        return False
    ins, outs = (graph.aval(v).shape for v in (other.inputs[0], other.outputs[0]))
    return other.op == lax.transpose_p.name or ins == outs


def recomputed_lines(graph: Graph) -> str:
    """The lines that the backward pass of a program runs again."""
    spans = (users_span(n) for n in graph.nodes if n.is_recomputed and not n.is_barrier)
    lines = [str(line) for line in sorted({span.line for span in spans if span})]
    return f"line{'s' * (len(lines) > 1)} {listed(lines)}"
