"""The functions in the source of a plan. They are written from the trace of what the plan runs, and
JAX traces each expression in them to the operation that it stands for."""

import ast
import builtins
import functools
import inspect
import itertools
import keyword
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbp import _jax
from sbp.annotations import annotate_p
from sbp.errors import bytes_text
from sbp.explain.names import Names
from sbp.infer.space import Codes, to_type
from sbp.plan.ir import Apply, Box, Instruction, Loop
from sbp.plan.program import Program, place, reader_text
from sbp.run.interpret import Tracing, scan_in_place
from sbp.signatures.expressions import (
    LITERAL_ELEMENTS,
    MODULES,
    expressions,
    no_source,
    scalar_text,
    text_of,
    traces_to,
    tuple_text,
)
from sbp.source.reader import users_span
from sbp.trace.equations import Bodies, RepeatedBlock, bodies_of, in_blocks, is_literal
from sbp.trace.graph import Node

INLINE = 3
"""If an instruction has at most so many operations, they are written where it runs. Otherwise they
are a function."""

WIDTH = 160
"""Columns of a line with its comment. The comment of a longer line stands above the line."""

NESTED = 80
"""Columns of the longest expression that is written where its value is read."""

_NUMBERED = "sbp_instruction_"

_WORDS = re.compile(r'"[^"]*"|#.*|\.?\w+=?|\W')
"""The parts of a function's text. One part is a name, a text in quotes, a comment, an attribute
with its dot, or a keyword with its equals sign."""


def free_name(wanted: str, taken: set[str]) -> str:
    """A name that is not taken.

    >>> free_name("p['w']", {"p_w"})
    'p_w_2'
    """
    words = "".join(c if f"_{c}".isidentifier() else " " for c in wanted).split() or ["x"]
    name = "_".join(words).strip("_") or "x"
    name = f"x_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name
    numbered = (f"{name}_{n}" for n in itertools.count(2))
    return next(n for n in itertools.chain([name], numbered) if n not in taken)


class _FunctionNames:
    """The names in one function.

    Arguments:
      module: the names of the module.
      is_block: whether the function is for several parts of the program; its names have no numbers.
    """

    def __init__(self, module: set[str], *, is_block: bool) -> None:
        self.is_block = is_block
        self.values: dict[Any, Any] = {}  # of a variable: its name or expression, or a literal
        self.hints: dict[Any, str] = {}
        self.nested: set[Any] = set()  # variables that may be written where they are read
        self.module, self.taken = module, {"s"}  # `s` is the parameter of the lambdas

    def name(self, var: Any, otherwise: str) -> str:
        """The name of a new variable."""
        if type(var).__name__ == "DropVar":
            return "_"
        wanted = self.hints.get(var) or otherwise
        if self.is_block:
            words = "".join(c if c.isalnum() else " " for c in wanted).split()
            wanted = "_".join(word for word in words if not word.isdigit())
        found = free_name(wanted, self.taken | self.module)
        self.taken.add(found)
        self.values[var] = found
        return found


class SourceWriter(Tracing):
    """Writes the functions of a plan.

    Arguments:
      program: the plan.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.mesh = program, program.mesh
        self.user = Names(program.graph)
        imported = "functools", "Path", "NamedSharding", "AxisType", "ARRAYS", "ARGUMENTS"
        own = "given", "mesh", "run", "arrays", "outs", "named", "shardings", "scan_in_place"
        self.module = {*MODULES, *dir(builtins), *imported, *own}
        self.functions: dict[Any, str] = {}  # by their text without names of values
        self.scopes: list[_FunctionNames] = []  # of the functions being written, inside out
        self.instructions, self.texts = list[Instruction](), list[str]()
        self.arrays, self.numbers = dict[str, Any](), dict[int, int]()
        self.loop: Loop | None = None
        self.chosen: dict[Any, tuple[bool, int, bool]] = {}
        self.blocks: dict[Any, str] = {}  # the names of their functions, by their keys
        self.in_place = False  # whether the next scan is in place
        self.place_of = functools.cache(place)

    def called(self, instruction: Instruction, run: Callable[..., Any], args: list[Any]) -> Any:
        """Runs an instruction as a function of its own, whose name is its number."""

        def numbered(*args: Any) -> Any:
            return run(*args)

        numbered.__name__ = f"{_NUMBERED}{len(self.instructions)}"
        self.instructions.append(instruction)
        return jax.jit(numbered)(*args)

    def scan(self, *args: Any, **options: Any) -> Any:
        """A scan in place as a `lax.scan`, inside of a function whose name marks it."""
        _, turn, *rest = args

        def scan(carry: Any, slices: Any) -> Any:
            return jax.lax.scan(turn, carry, slices, **options)

        scan.__name__ = scan_in_place.__name__
        return jax.jit(scan)(*rest)

    def function(
        self,
        closed: Any,
        wanted: str,
        doc: str = "",
        names: Sequence[str] = (),
        split: Sequence[int] = (),
    ) -> str:
        """The name of the function of a jaxpr. Equal functions are written once.

        Arguments:
          closed: the jaxpr.
          wanted: a name for it.
          doc: its docstring.
          names: names for its arguments.
          split: for the body of a scan: how many arguments are constants, and how many carries.
        """
        jaxpr, consts = _jax.open_jaxpr(closed)
        name = free_name(wanted, self.module.union(*(s.taken for s in self.scopes)))
        self.module.add(name)
        is_main = not self.scopes
        scope = _FunctionNames(self.module, is_block=isinstance(closed, RepeatedBlock))
        scope.taken |= {"carry", "slices"} if split else set()
        self.scopes.append(scope)
        scope.values |= {v: self.constant(x) for v, x in zip(jaxpr.constvars, consts, strict=True)}
        given = names if len(names) == len(jaxpr.invars) else [""] * len(jaxpr.invars)
        ins = [scope.name(v, g or "x") for v, g in zip(jaxpr.invars, given, strict=True)]
        lines, head = list[str](), ins
        if split:
            constants, carries = split
            parts = ins[constants : constants + carries], ins[constants + carries :]
            head = [*ins[:constants], "carry", "slices"]
            lines = [
                f"{tuple_text(part)} = {of}"
                for part, of in zip(parts, ("carry", "slices"), strict=True)
                if part
            ]
        lines += self.body(jaxpr, scope)
        outs = [self.read(v, scope) for v in jaxpr.outvars]
        if split:
            outs = [tuple_text(outs[: split[1]]), tuple_text(outs[split[1] :])]
        lines.append(f"return {tuple_text(outs) if is_main else ', '.join(outs)}")
        self.scopes.pop()
        body = "\n    ".join([f"({', '.join(head)}):", *([f'"""{doc}"""'] if doc else []), *lines])
        order = dict[str, int]()  # equal functions may have other names for their values
        key = tuple(
            order.setdefault(w, len(order)) if w in scope.taken else w for w in _WORDS.findall(body)
        )
        known = self.functions.setdefault(key, name)
        if known == name:
            self.texts.append(f"def {name}{body}")
        else:  # the same function was written before
            self.module.remove(name)
        return known

    def constant(self, value: Any) -> str:
        """An array that the program closes over, as an expression."""
        if _jax.is_extended(value.dtype):
            return (
                f"jax.random.wrap_key_data({self.constant(_jax.words(value))},"
                f" impl={str(jax.random.key_impl(value))!r})"
            )
        host = np.asarray(value)
        if (
            0 < host.size <= LITERAL_ELEMENTS
            and host.dtype.kind in "biuf"
            and np.isfinite(host).all()
        ):
            return text_of(host) if host.ndim else scalar_text(host, host, plain=False)
        name = f"a{self.numbers.setdefault(id(value), len(self.numbers))}"
        text, dtype = f'ARRAYS["{name}"]', host.dtype
        if dtype.kind not in "biufc":  # files of NumPy do not have this dtype
            host, text = host.view(f"u{dtype.itemsize}"), f"{text}.view(jnp.{dtype.name})"
        self.arrays[name] = host
        return text

    def read(self, atom: Any, scope: _FunctionNames, *, plain: bool = False) -> str:
        """An operand as an expression; a number may be written without its dtype if `plain`."""
        value = self.value(atom, scope)
        if not is_literal(value):
            return value
        if np.ndim(value.val):
            return self.constant(value.val)
        return scalar_text(value.val, value.aval, plain=plain)

    def body(self, jaxpr: Any, scope: _FunctionNames) -> Iterator[str]:
        """The lines of the equations of a jaxpr whose results are read."""
        live, kept = {v for v in jaxpr.outvars if not is_literal(v)}, list[Any]()
        for eqn in reversed(jaxpr.eqns):
            if eqn.effects or not live.isdisjoint(eqn.outvars):
                kept.append(eqn)
                live.update(v for v in eqn.invars if not is_literal(v))
        items = in_blocks(kept[::-1], jaxpr.outvars, self.place)
        scope.nested |= self.nested(jaxpr, items)
        for item in items:
            yield from (self.block if isinstance(item, RepeatedBlock) else self.equation)(
                item, scope
            )

    def place(self, eqn: Any) -> tuple[str, Sequence[Any]] | None:
        """The comment on an equation, and the user's calls that it, or the first equation of a
        block, stands in."""
        while isinstance(eqn, RepeatedBlock):
            eqn = eqn.eqns[0]
        if (instruction := self.instruction(eqn)) is None:
            return None
        node = instruction.reader if isinstance(instruction, Box) else instruction.node
        return self.comment(instruction), _calls(node) if node is not None else []

    def nested(self, jaxpr: Any, eqns: Sequence[Any]) -> set[Any]:
        """The variables of a jaxpr that may be written where they are read: one operation of the
        same line of the user reads them, once."""
        reads = Counter(
            v
            for v in (*jaxpr.outvars, *(v for eqn in eqns for v in eqn.invars))
            if not is_literal(v)
        )
        lines = {v: self.line(eqn) for eqn in eqns for v in eqn.outvars}
        return {
            v
            for eqn in eqns
            if (line := self.line(eqn)) is not None
            for number, v in enumerate(eqn.invars)
            if not is_literal(v) and reads[v] == 1 == self.inner_reads(eqn, number)
            if lines.get(v) == line
        }

    def line(self, eqn: Any) -> Any:
        """The line of the user that an equation is written for; one value for all operations that
        are no instructions. None for an equation that may not be part of a longer expression."""
        if isinstance(eqn, RepeatedBlock):
            return None
        form = bodies_of(eqn, self.mesh.hardware.platform).form
        instruction = self.instruction(eqn)
        if not isinstance(instruction, Apply):
            return None if form else ""
        is_short = len(_jax.open_jaxpr(eqn.params["jaxpr"])[0].eqns) <= INLINE
        return self.line_of(instruction.node) if is_short and not instruction.bytes_sent else None

    def inner_reads(self, eqn: Any, number: int) -> int:
        """How often an equation reads an operand."""
        if self.instruction(eqn) is None:
            return 1
        jaxpr, _ = _jax.open_jaxpr(eqn.params["jaxpr"])
        return sum(
            v is jaxpr.invars[number]
            for v in (*jaxpr.outvars, *(v for e in jaxpr.eqns for v in e.invars))
        )

    def instruction(self, eqn: Any) -> Instruction | None:
        """The instruction that an equation runs."""
        name = eqn.params.get("name", "")
        number = name.removeprefix(_NUMBERED) if isinstance(name, str) else name
        return self.instructions[int(number)] if number != name else None

    # ---- one equation ---------------------------------------------------------------------------

    def equation(self, eqn: Any, scope: _FunctionNames) -> Iterator[str]:
        """The lines of an equation."""
        inner = bodies_of(eqn, self.mesh.hardware.platform)
        number: Any = self.value(eqn.invars[0], scope) if eqn.invars else None
        if inner.form == "platform":  # the file is for one platform
            scope.values[eqn.outvars[0]] = "0"
        elif inner.form == "choice" and len(inner.jaxprs) == 1:
            yield from self.inline(eqn.replace(invars=eqn.invars[1:]), inner.jaxprs[0], scope)
        elif eqn.params.get("name") == scan_in_place.__name__:
            self.in_place = True
            yield from self.inline(eqn, inner.jaxprs[0], scope)
        elif inner.form == "function":
            yield from self.call(
                eqn, inner.jaxprs[0], eqn.params.get("name", eqn.primitive.name), scope
            )
        elif _is_number(number) and _is_equal_in_numpy(eqn):
            value, (out,) = np.asarray(number.val).astype(eqn.params["new_dtype"]), eqn.outvars
            scope.values[out] = scalar_text(value, out.aval, plain=False)
        else:
            expression, alone = self.region(eqn, inner, scope) or self.operation(eqn, scope)
            if alone and scope.nested.issuperset(eqn.outvars) and len(expression) <= NESTED:
                scope.values[eqn.outvars[0]] = f"({expression})"
                return
            outs = [scope.name(v, "t") for v in eqn.outvars]
            left = ", ".join(outs) if alone or len(outs) != 1 else f"({outs[0]},)"
            if inner.form == "counted loop":
                carries = inner.counts[1]
                left = f"{tuple_text(outs[:carries])}, {tuple_text(outs[carries:])}"
            yield f"{left} = {expression}" if outs else expression

    def operation(self, eqn: Any, scope: _FunctionNames) -> tuple[str, bool]:
        """An operation as an expression that JAX traces to it, and whether the value of the
        expression is an array, not a tuple of arrays.

        Raises:
          SbpError: `bad-argument` for an operation that has none.
        """
        name, now = eqn.primitive.name, _jax.Settings.current().threefry_partitionable
        if name.startswith("random_") and eqn.ctx.threefry_partitionable != now:
            raise no_source(f"the operation {name} under another jax.threefry_partitionable")
        values = [self.value(v, scope) for v in eqn.invars]
        places = [v if _is_number(v) else f"_{n}" for n, v in enumerate(values)]
        pairs = [*zip(eqn.invars, places, strict=True)]
        avals = [v.aval for v, p in pairs if isinstance(p, str)]

        def operands(plain: bool, tried: bool) -> list[str]:
            return [
                p if tried and isinstance(p, str) else self.read(v, scope, plain=plain)
                for v, p in pairs
            ]

        key = (name, str(eqn.params), str(operands(False, True)), str(avals))
        if key not in self.chosen:
            ways = (
                (plain, number, alone)
                for plain in (True, False)
                for number, text in enumerate(expressions(eqn, operands(plain, True)))
                if (alone := traces_to(text, places, avals, eqn, self.mesh.axes)) is not None
            )
            if (found := next(ways, None)) is None:
                raise no_source(f"the operation {name}")
            self.chosen[key] = found
        plain, number, alone = self.chosen[key]
        written, form = operands(plain, False), [*expressions(eqn, operands(plain, True))][number]
        of_numpy = [w.startswith(("np.", "ARRAYS[")) for w in written]
        if not form.startswith(("jax.", "jnp.", "lax.")) and all(
            n or is_literal(p) for n, p in zip(of_numpy, places, strict=True)
        ):  # NumPy would run the method or the operator
            written = [_as_array(w) if n else w for w, n in zip(written, of_numpy, strict=True)]
        text = [*expressions(eqn, written)][number]
        if any(w.startswith("(") for w in written):
            needed = ast.unparse(ast.parse(text))  # leaves out parentheses
            text = needed if '"' in needed else needed.replace("'", '"')
        return text, alone

    def value(self, atom: Any, scope: _FunctionNames) -> Any:
        """The expression or the literal that a variable stands for."""
        return atom if is_literal(atom) else scope.values[atom]

    # ---- calls ----------------------------------------------------------------------------------

    def call(self, eqn: Any, closed: Any, name: str, scope: _FunctionNames) -> Iterator[str]:
        """The lines of a call: its operations where they are few, else a call of a function."""
        instruction = self.instruction(eqn)
        self.hint(eqn, scope)
        if len(_jax.open_jaxpr(closed)[0].eqns) <= INLINE or isinstance(instruction, Loop):
            outer, self.loop = self.loop, instruction if isinstance(instruction, Loop) else None
            lines = [*self.inline(eqn, closed, scope)]
            self.loop = outer
        else:
            own, doc = (name, "") if instruction is None else self.title(instruction)

            def write(names: list[str]) -> str:
                # Equal conversions of any value are one function.
                return self.function(
                    closed, own, doc, ["x"] if isinstance(instruction, Box) else names
                )

            lines = [self.call_line(eqn, scope, write)]
        comment = self.comment(instruction) if instruction is not None else ""
        if not comment or any("# " in line for line in lines):
            yield from lines
        elif len(lines) == 1 and len(lines[0]) + len(comment) < WIDTH - 3:
            yield f"{lines[0]}  # {comment}"
        elif lines:
            yield from (f"# {comment}", *lines)

    def hint(self, item: Any, scope: _FunctionNames) -> None:
        """Gives the results of instructions the names that the user has for them."""
        if isinstance(item, RepeatedBlock):
            for eqn in item.eqns:
                self.hint(eqn, scope)
        elif instruction := self.instruction(item):
            for var, register in zip(item.outvars, instruction.outs, strict=True):
                scope.hints[var] = self.user.value(register.value) or _short_name(instruction)

    def block(self, block: RepeatedBlock, scope: _FunctionNames) -> Iterator[str]:
        """The line of a call of a block, whose function is written for the first of these calls."""
        self.hint(block, scope)

        def write(names: list[str]) -> str:
            if block.key not in self.blocks:
                ends = (self.place(end) for end in (block.eqns[0], block.eqns[-1]))
                own = _user_function(*(end[1] if end else [False] for end in ends)) or "block"
                self.blocks[block.key] = self.function(block, own, names=names)
            return self.blocks[block.key]

        yield self.call_line(block, scope, write)

    def call_line(self, item: Any, scope: _FunctionNames, write: Callable[[list[str]], str]) -> str:
        """A call of a function with the operands of an equation or a block. `write` takes names for
        the arguments, and gives that of the function."""
        ins = [self.read(v, scope) for v in item.invars]
        names = [x if x.isidentifier() else "" for x in ins]
        function = write(names)
        outs = ", ".join(scope.name(v, "t") for v in item.outvars)
        return f"{outs} = " * bool(outs) + f"{function}({', '.join(map(_as_array, ins))})"

    def inline(self, eqn: Any, closed: Any, scope: _FunctionNames) -> Iterator[str]:
        """The lines of the operations of a call."""
        jaxpr, consts = _jax.open_jaxpr(closed)
        scope.values |= {v: self.constant(x) for v, x in zip(jaxpr.constvars, consts, strict=True)}
        scope.values |= {
            inner: self.value(outer, scope)
            for inner, outer in zip(jaxpr.invars, eqn.invars, strict=True)
        }
        for inner, outer in zip(jaxpr.outvars, eqn.outvars, strict=True):
            if not is_literal(inner) and outer in scope.hints:
                scope.hints.setdefault(inner, scope.hints[outer])
            if outer in scope.nested and not is_literal(inner):
                scope.nested.add(inner)
        yield from self.body(jaxpr, scope)
        scope.values |= {
            outer: self.value(inner, scope)
            for inner, outer in zip(jaxpr.outvars, eqn.outvars, strict=True)
        }

    def type(self, codes: Codes) -> str:
        return repr(to_type(codes, self.mesh))

    def comment(self, instruction: Instruction) -> str:
        """What an instruction does: its types and the user's line; what a conversion sends, and for
        which operation."""
        if isinstance(instruction, Box):
            ends, sent = (instruction.source, instruction.target), instruction.bytes_sent
            types, reader = " -> ".join(self.type(r.codes) for r in ends), instruction.reader
            needed = reader_text(reader, self.line_of(reader)) if reader else "the result"
            where = f"for {needed}"
        else:
            types = ", ".join(dict.fromkeys(self.type(r.codes) for r in instruction.outs))
            sent = instruction.bytes_sent if isinstance(instruction, Apply) else 0.0
            where = self.line_of(instruction.node)
        return f"{types}{f', {bytes_text(sent)} sent' if sent else ''}, {where}"

    def line_of(self, node: Node) -> str:
        """The user's line of a node, as a phrase."""
        span, before = users_span(node), "gradient of" if node.backward else "at"
        return f"{before} {self.place_of(span)}" if span else "in generated code"

    def title(self, instruction: Instruction) -> tuple[str, str]:
        """A name and a docstring for the function of an instruction."""
        if isinstance(instruction, Box):
            kinds = [*dict.fromkeys(s.kind for s in instruction.steps)]
            return "_".join(kinds), f"Changes how a value is held: {', '.join(kinds)}."
        assert isinstance(instruction, Apply)
        return instruction.node.op, f"{instruction.node.op} on the shards of one device."

    # ---- loops and branches ---------------------------------------------------------------------

    def part(
        self, closed: Any, number: int, wanted: str, given: Sequence[str], split: Sequence[int] = ()
    ) -> str:
        """The name of the function of a body of the loop or branch that is being written.

        Arguments:
          closed: the jaxpr of the body.
          number: the index of the body in the loop.
          wanted: a name for it, if the user's function has none.
          given: what the arguments of the function come from, as expressions.
          split: as in `function`.
        """
        names = [x if x.isidentifier() else "" for x in given]
        if self.loop is not None and number < len(self.loop.blocks):
            block = self.loop.blocks[number]
            own = [self.user.value(r.value) for r in block.inputs]
            names = (
                [a or b for a, b in zip(own, names, strict=True)] if len(names) == len(own) else own
            )
            calls = [_calls(i.node) for i in block.instructions if isinstance(i, Apply)]
            wanted = (_user_function(calls[0], calls[-1]) if calls else "") or wanted
        return self.function(closed, wanted, names=names, split=split)

    def region(self, eqn: Any, inner: Bodies, scope: _FunctionNames) -> tuple[str, bool] | None:
        """A loop, a branch or the `shard_map` as an expression, and whether its value is an array;
        None for other operations."""
        ins = [self.read(v, scope) for v in eqn.invars]
        match inner.form:
            case "counted loop":
                return self.counted_loop(eqn, inner, ins), False
            case "open loop":
                return self.open_loop(eqn, inner, ins), False
            case "choice":
                branches = ", ".join(
                    _one_result(eqn, f"{self.part(body, n, 'branch', [])}(*s)", "*s")
                    for n, body in enumerate(inner.jaxprs)
                )
                return f"lax.switch({', '.join([ins[0], f'[{branches}]', *ins[1:]])})", False
            case "fold":
                count, combine = len(ins) // 2, self.function(inner.jaxprs[0], "combine")
                both = _one_result(eqn, f"{combine}(*a, *b)", "a, b")
                return (
                    f"lax.reduce({tuple_text(ins[:count])}, {tuple_text(ins[count:])}, {both},"
                    f" {text_of(eqn.params['dimensions'])})"
                ), False
            case "region":
                return self.sharded(eqn.params, inner, ins), True
            case _:
                return None

    def counted_loop(self, eqn: Any, inner: Bodies, ins: list[str]) -> str:
        """A scan."""
        constants, carries = inner.counts
        in_place, self.in_place = self.in_place, False
        turn = self.part(inner.jaxprs[0], 0, "turn", ins, inner.counts)
        if constants:
            turn = f"functools.partial({', '.join([turn, *map(_as_array, ins[:constants])])})"
        parts = [turn, *map(tuple_text, (ins[constants:][:carries], ins[constants + carries :]))]
        params, function = eqn.params, "lax.scan"
        if in_place:
            function = self.helper(scan_in_place)
            parts.append(
                tuple_text(
                    [text_of((v.aval.shape[1:], v.aval.dtype)) for v in eqn.outvars[carries:]]
                )
            )
        unroll = f", unroll={params['unroll']}" if params["unroll"] != 1 else ""
        return (
            f"{function}({', '.join(parts)}, length={params['length']}"
            f"{', reverse=True' * params['reverse']}{unroll})"
        )

    def helper(self, function: Callable[..., Any]) -> str:
        """The name of a function of sbp that the file has a copy of, without types."""
        tree = ast.parse(inspect.getsource(function))
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                node.annotation = None
            elif isinstance(node, ast.FunctionDef):
                node.returns = None
        if (text := ast.unparse(tree)) not in self.texts:
            self.texts.insert(0, text)
        return function.__name__

    def open_loop(self, eqn: Any, inner: Bodies, ins: list[str]) -> str:
        """A `lax.while_loop`."""
        m, n = inner.counts
        ins = [*map(_as_array, ins[: m + n]), *ins[m + n :]]
        constants, wanted = (ins[:m], ins[m : m + n]), ("test", "turn")
        test, turn = (
            f"{self.part(body, k, wanted[k], [])}({', '.join([*constants[k], '*s'])})"
            for k, body in enumerate(inner.jaxprs)
        )
        turn, state = _one_result(eqn, turn, "s"), tuple_text(ins[m + n :])
        return f"lax.while_loop(lambda s: {test}, {turn}, {state})"

    def sharded(self, params: Mapping[str, Any], inner: Bodies, ins: list[str]) -> str:
        """The `jax.shard_map` of the plan."""
        names, specs = self.program.graph.input_names, params["out_specs"]
        body = self.function(inner.jaxprs[0], "on_each_device", names=names)
        given = {
            "mesh": "mesh",
            "in_specs": text_of(params["in_specs"]),
            "out_specs": text_of(specs if len(specs) != 1 else specs[0]),
            "check_vma": "False",
        }
        lines = "".join(f"        {k}={v},\n" for k, v in given.items())
        return f"jax.shard_map(\n        {body},\n{lines}    )({', '.join(ins)})"


def _is_number(atom: Any) -> bool:
    """Whether an operand is a literal without dims; one with dims is read like a variable."""
    return is_literal(atom) and not np.ndim(atom.val)


def _as_array(text: str) -> str:
    """An expression as an array of JAX; a name stands for one."""
    return text if text.isidentifier() else f"jnp.asarray({text})"


def _is_equal_in_numpy(eqn: Any) -> bool:
    """Whether an equation is a cast that NumPy computes as XLA does."""
    if not {"new_dtype", "weak_type"} <= eqn.params.keys():  # a bitcast has the first alone
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    # XLA clips floats that an integer cannot hold.
    return not jnp.issubdtype(old, np.inexact) or jnp.issubdtype(new, np.inexact)


def _one_result(eqn: Any, call: str, parameters: str) -> str:
    """A function that returns a tuple, also of one result."""
    return f"lambda {parameters}: {f'({call},)' if len(eqn.outvars) == 1 else call}"


def _calls(node: Node) -> list[Any]:
    """Whether a node is of the backward pass, and the user's calls that it is in, inner last."""
    return [node.backward, *reversed(node.stack)]


def _user_function(first: Sequence[Any], last: Sequence[Any]) -> str:
    """The innermost function of the user that two operations come from, by their `_calls`."""
    shared = {span.function for span in last[1:] if span.function.isidentifier()}
    own = next((s.function for s in reversed(first[1:]) if s.function in shared), "")
    return f"{own}_gradient" if own and first[0] and last[0] else own


def _short_name(instruction: Instruction) -> str:
    """A name for the result of an instruction that the user has not named."""
    node = instruction.maker if isinstance(instruction, Box) else instruction.node
    return "x" if node is None or node.op == annotate_p.name else node.op
