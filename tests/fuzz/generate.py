"""Seeded generation of well-typed programs: values are drawn from tables of operations until there
are equations enough.

>>> generate(0) == generate(0)
True
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz import ops_contract, ops_control, ops_elementwise, ops_reduce, ops_shape
from tests.fuzz.draw import (
    MAX_ELEMENTS,
    MAX_RANK,
    Body,
    Draw,
    Op,
    Skip,
    Want,
    data_of,
    draw_op,
    fresh_info,
    moves,
    settled,
    suits,
)
from tests.fuzz.program import (
    FLOATS,
    INTEGERS,
    Block,
    Info,
    Input,
    Output,
    Program,
    Step,
    block_lines,
    fill,
    namespace,
    pruned,
    reads,
)
from tests.hardware import SENDS_FREELY
from tests.same import equations_in

MESHES: tuple[tuple[int, ...], ...] = (
    (1,),
    (2,),
    (4,),
    (8,),
    (8,),
    (2, 4),
    (2, 4),
    (4, 2),
    (4, 2),
    (2, 2, 2),
)
EQUATIONS = (20, 60)
MAX_DEPTH = 2
LOUD = 8.0  # smooth values of a larger magnitude are scaled down


@dataclass(slots=True, eq=False)
class State:
    """What all scopes of one program share."""

    rng: random.Random
    axes: tuple[str, ...]
    inputs: list[Input] = field(default_factory=list)
    count: int = 0
    primitives: set[str] = field(default_factory=set)
    names: dict[str, Any] = field(default_factory=namespace)

    def name(self) -> str:
        """A new name."""
        self.count += 1
        return f"v{self.count - 1}"

    def new_input(self, info: Info) -> str:
        """A new argument."""
        name = self.name()
        self.inputs.append(Input(name, info, data_of(info, self.count)))
        return name


@dataclass(slots=True, eq=False)
class Scope:
    """A function being generated: the values it may read, and its lines so far.

    One that is `closed` reads no differentiated value but its parameters, which the caller stops:
    no gradient passes a while loop.
    """

    state: State
    depth: int = 0
    gradient: bool = False
    outer: list[tuple[str, Info]] = field(default_factory=list)
    own: list[tuple[str, Info]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    equations: int = 0
    closed: bool = False

    def pick(self, want: Want, draw: Draw) -> tuple[str, Info]:
        """A value that suits, lately made ones preferred; else a new argument."""
        rng = self.state.rng
        shape = want.shape(draw) if want.shape else None
        dtype = want.dtype(draw) if want.dtype else None
        if shape is not None and int(np.prod(shape, dtype=int)) > MAX_ELEMENTS:
            raise Skip
        found = [v for v in self.own if suits(want, v[1], shape, dtype, self.gradient)]
        if not found or rng.random() < 0.1:
            found += [v for v in self.outer if suits(want, v[1], shape, dtype, self.gradient)]
        room = len(self.state.inputs) < 10 and not self.closed
        if found and not (room and rng.random() < 0.1):
            return rng.choice(found[-6:] if rng.random() < 0.7 else found)
        if self.closed or (not room and rng.random() < 0.8):
            raise Skip
        info = fresh_info(want, rng, shape, dtype, not self.depth)
        if not suits(want, info, shape, dtype, self.gradient):
            raise Skip
        name = self.state.new_input(info)
        self.outer.append((name, info))
        return name, info

    def add(self, op: Op) -> bool:
        """Draws an operation and appends its line; False where it does not come about."""
        draw = Draw(self.state.rng, self)
        try:
            text, args = draw_op(op, draw)
        except Skip:
            return False
        step = Step(op.name, ("v",), text, args, (), tuple(draw.blocks.items()))
        # The trace gives shapes, and JAX's own word on whether the operation is well-typed.
        avals = dict([*self.outer, *self.own])
        used = [n for n in avals if n in reads(step)]
        source = "\n".join(block_lines(Block(", ".join(used), "", (step,), ("v",), "{0}"), "op"))
        scratch = dict(self.state.names)
        exec(compile(source, "<operation>", "exec"), scratch)
        try:
            jaxpr, result = jax.make_jaxpr(scratch["op"], return_shape=True)(
                *(struct(avals[n]) for n in used)
            )
        # Operations are drawn with any operands. Where JAX takes them not, or has no rule for them
        # (NotImplementedError), there is no program to compare, and another operation is drawn.
        except (TypeError, ValueError, NotImplementedError, ZeroDivisionError, IndexError):
            return False
        outs = [described(a) for a in jaxpr.out_avals]
        if not outs or any(
            o is None or o.size > 2 * MAX_ELEMENTS or o.ndim > MAX_RANK for o in outs
        ):
            return False
        shaped = [o for o in outs if o is not None]
        spoiled = any(i.spoiled for i in draw.infos.values()) or op.name == "spoil"
        infos = tuple(
            settled(o, k, spoiled) for o, k in zip(shaped, op.law(draw, shaped), strict=True)
        )
        targets = tuple(self.state.name() for _ in infos)
        self.steps.append(
            replace(step, targets=targets, infos=infos, several=isinstance(result, tuple | list))
        )
        self.own += zip(targets, infos, strict=True)
        found = [equation.primitive.name for equation in equations_in(jaxpr)]
        self.equations += min(len(found), 5)  # a random number alone would be a program
        self.state.primitives |= set(found)
        for target, info in zip(targets, infos, strict=True):
            if info.kind in "fc" and not info.exact and info.bound > LOUD:
                self.quieten(target, info)
        return True

    def quieten(self, name: str, info: Info) -> None:
        """Scales a value by a power of two, so that magnitudes stay near 1."""
        exponent = int(np.ceil(np.log2(min(info.bound, 1e30))))
        made, target = replace(info, bound=1.0), self.state.name()
        text = f"{{a}} * {2.0**-exponent!r}"
        self.steps.append(Step("quieten", (target,), text, (("a", name),), (made,)))
        self.own = [v for v in self.own if v[0] != name] + [(target, made)]
        self.equations += 1

    def show_keys(self) -> None:
        """Turns keys that nothing reads into numbers, which can be returned."""
        read = set().union(*(reads(step) for step in self.steps))
        for name, info in [
            v for v in self.own if v[1].kind == "r" and v[0] not in read and not v[1].shape
        ]:
            target = self.state.name()
            made = Info((*info.shape, 2), "uint32", True, 2.0**32)
            self.steps.append(
                Step("key_data", (target,), "jax.random.key_data({k})", (("k", name),), (made,))
            )

    def grow(self, equations: int, ops: Sequence[Op]) -> None:
        """Adds operations until there are `equations`."""
        rng, tries = self.state.rng, 0
        while self.equations < equations and tries < 200:
            tries += 1
            table = ANNOTATIONS if rng.random() < 0.12 else ops
            self.add(rng.choices(table, [op.weight for op in table])[0])

    def block(self, want: Body, draw: Draw) -> tuple[Block, list[Info]]:
        """A function of its own: parameters, some operations, and results of the wanted shapes."""
        if self.depth >= MAX_DEPTH:
            raise Skip
        rng = self.state.rng
        params = [(self.state.name(), i) for i in list(want.params(draw))]
        closed = self.closed or draw.closed
        outer = [v for v in (*self.outer, *self.own) if not draw.closed or v[1].kind not in "fc"]
        gradient = (self.gradient and not draw.closed) or want.gradient
        inner = Scope(self.state, self.depth + 1, gradient, outer, list(params), closed=closed)
        inner.grow(rng.randint(3, 9), INNER)
        wanted = want.results(draw)
        if wanted is None:
            values = [v for v in inner.own if v[1].kind != "r" and v not in params] or params[:1]
            outputs = rng.sample(values, min(len(values), rng.randint(1, 2)))
            if not outputs:
                raise Skip
        else:
            outputs = [inner.fit(w, params, i) for i, w in enumerate(wanted)]
        if not closed:  # arguments made inside
            known = {n for n, _ in [*self.outer, *self.own]}
            self.outer += [(v.name, v.info) for v in self.state.inputs if v.name not in known]
        names = [n for n, _ in params]
        slots = {str(i): n for i, n in enumerate(names)}
        takes = fill(want.takes(draw), slots) if want.takes else ", ".join(names)
        unpack = fill(want.unpack(draw), slots) if want.unpack else ""
        draw.params["outs"] = len(outputs)
        returns = (
            want.returns(draw)
            if want.returns
            else ", ".join(f"{{{i}}}" for i in range(len(outputs))) + ","
        )
        block = Block(
            takes, unpack, tuple(inner.steps), tuple(n for n, _ in outputs), returns, tuple(params)
        )
        return block, [i for _, i in outputs]

    def fit(self, wanted: Info, params: list[tuple[str, Info]], number: int) -> tuple[str, Info]:
        """A value of the wanted shape and dtype, made from what the block computed; floats bounded
        by 1."""
        made = self.own[len(params) :]
        same = [v for v in made if (v[1].shape, v[1].dtype) == (wanted.shape, wanted.dtype)]
        base = next(
            (n for n, i in params if (i.shape, i.dtype) == (wanted.shape, wanted.dtype)), None
        )
        zeros = f"jnp.zeros({wanted.shape}, jnp.{wanted.dtype})"
        args: list[tuple[str, str]] = [("p", base)] if base else []
        start = "{p}" if base else zeros
        rng = self.state.rng
        if same:
            args.append(("a", rng.choice(same[-3:])[0]))
            mixed = "{a}"
        else:
            pool = [
                v
                for v in made
                if v[1].kind in "fib"
                and v[1].size
                and (wanted.kind == "f" or (v[1].exact and v[1].kind != "f"))
            ]
            if pool:
                args.append(("a", rng.choice(pool[-3:])[0]))
            total = (
                "jnp.any({a} != 0)"
                if wanted.kind == "b"
                else "jnp.mean({a})"
                if wanted.kind == "f"
                else "jnp.sum({a})"
            )
            mixed = f"{total}.astype(jnp.{wanted.dtype})" if pool else start
        match wanted.kind:
            case "f":
                text = f"jnp.tanh({start} * 0.5 + {mixed}).astype(jnp.{wanted.dtype})"
            case "b":
                text = f"{start} ^ {mixed}"
            case _:
                text = f"({start} + {mixed}).astype(jnp.{wanted.dtype})"
        target = self.state.name()
        self.steps.append(Step("fit", (target,), text, tuple(args), (wanted,)))
        return target, wanted


def struct(info: Info) -> jax.ShapeDtypeStruct:
    """The abstract value of an info."""
    dtype = jax.random.key(0).dtype if info.dtype == "key" else np.dtype(info.dtype)
    return jax.ShapeDtypeStruct(info.shape, dtype, weak_type=info.weak)


def described(aval: Any) -> Info | None:
    """The info of an abstract value; None for dtypes that programs do without."""
    name = "key" if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) else str(aval.dtype)
    return (
        Info(tuple(aval.shape), name, weak=bool(getattr(aval, "weak_type", False)))
        if name in (*FLOATS, *INTEGERS, "bool", "complex64", "key")
        else None
    )


def generate(seed: int, policy: str | None = None, mesh: tuple[int, ...] | None = None) -> Program:
    """The program of a seed; `policy` and `mesh` override what the seed would choose."""
    return generated(seed, policy, mesh)[0]


def generated(
    seed: int, policy: str | None = None, mesh: tuple[int, ...] | None = None
) -> tuple[Program, frozenset[str]]:
    """The program of a seed, with the primitives of its forward pass."""
    rng = random.Random(f"sbp-{seed}")
    own = rng.choice(MESHES)
    mesh = mesh or own
    axes = ("x", "y", "z")[: len(mesh)]
    gradients = rng.random() < 0.4
    state = State(rng, axes)
    scope = Scope(state, gradient=gradients)
    for want in (
        Want("f", 1, 3, empty=True),
        Want("e", 1, 3),
        rng.choice((Want("i", 1, 2), Want("f", 2, 3), Want("b", 1, 2))),
    ):
        info = fresh_info(want, rng, None, None, True)
        scope.own.append((state.new_input(info), info))
    low, high = EQUATIONS
    scope.grow(rng.randint(low, high) // (2 if gradients else 1), ALL)
    scope.show_keys()
    made = [
        (t, i)
        for s in scope.steps
        for t, i in zip(s.targets, s.infos, strict=True)
        if i.kind != "r"
    ]
    read = set().union(*(reads(step) for step in scope.steps))
    unread = [v for v in made if v[0] not in read]
    outputs = (
        made[-1:] + rng.sample(unread, min(len(unread), 8)) + rng.sample(made, min(len(made), 1))
    )
    if gradients:
        outputs += [v for v in made if v[1].kind == "f"][-2:]
    program = Program(
        seed=seed,
        inputs=tuple(state.inputs),
        steps=tuple(scope.steps),
        outputs=tuple(Output(n, i) for n, i in list(dict.fromkeys(outputs)) or [scope.own[0]]),
        mesh=mesh,
        boxing=policy or rng.choices(("auto", "reduce", "explicit"), (0.76, 0.12, 0.12))[0],
        gradients=gradients,
    )
    program = with_types(pruned(program), rng)
    if rng.random() < 0.5:
        program = replace(program, hardware=SENDS_FREELY)
    return replace(program, padded=rng.random() < 0.3), frozenset(state.primitives)


# ---- tables --------------------------------------------------------------------------------------
# All operations, and those for the bodies of functions.


ALL: tuple[Op, ...] = (
    *ops_elementwise.OPS,
    *ops_reduce.OPS,
    *ops_shape.OPS,
    *ops_shape.INDEXING,
    *ops_contract.OPS,
    *ops_reduce.RANDOM,
    *ops_control.OPS,
)
"""The tables, one after the other: a seed makes the same program while their order is the same."""

INNER: tuple[Op, ...] = tuple(
    op for op in ALL if op.name not in ("eigenvalues", "singular_values", "random_gamma")
)
"""The operations inside of bodies. The slow ones are left out, since JAX may compile a body many
times."""

assert len({op.name for op in ALL}) == len(ALL), "two operations of one name"


# ---- annotations ---------------------------------------------------------------------------------
# Annotations inside a program, and the types asked of its arguments and results.


_ANY = Want("fuibc", empty=True)


def monoids(info: Info) -> tuple[str, ...]:
    """The monoids that a value may be partial under."""
    return {
        "f": ("sum", "sum", "max", "min"),
        "i": ("sum", "max", "or"),
        "b": ("and", "or"),
        "c": ("sum",),
    }.get(info.kind, ())


def type_text(
    info: Info, axes: tuple[str, ...], rng: random.Random, partial: float = 0.0, free: float = 0.0
) -> str:
    """A type as text: on each axis a split, P, B or `?`."""
    parts: list[str] = []
    monoid = rng.choice(monoids(info)) if monoids(info) and rng.random() < partial else None
    for axis in axes:
        x = rng.random()
        if monoid and x < 0.6:
            parts.append(f"{axis}:P({monoid})")
        elif info.ndim and x < 0.7:
            parts.append(f"{axis}:S({rng.randrange(info.ndim)})")
        elif x < 0.7 + free:
            parts.append(f"{axis}:?")
        else:
            parts.append(f"{axis}:B")
    return " ".join(parts)


def _atoms(d: Draw) -> str:
    """Keyword arguments of annotate."""
    axes, dims = d.scope.state.axes, d["a"].ndim
    chosen = d.rng.sample(axes, d.int(1, len(axes)))
    return ", ".join(
        f"{x}=S({d.int(0, dims - 1)})" if dims and d.chance(0.7) else f"{x}=B"
        for x in sorted(chosen)
    )


def _axes(d: Draw) -> str:
    """One or two of the mesh axes."""
    axes = d.scope.state.axes
    return ", ".join(map(repr, sorted(d.rng.sample(axes, d.int(1, min(2, len(axes)))))))


ANNOTATIONS: tuple[Op, ...] = (
    Op(
        "sbp_split",
        "sbp.split({a}, {dim}, {axes})",
        {"a": replace(_ANY, low=1), "dim": lambda d: d.dim("a"), "axes": _axes},
        moves,
        weight=5,
    ),
    Op("sbp_replicate", "sbp.replicate({a}, {axes})", {"a": _ANY, "axes": _axes}, moves, weight=2),
    Op("sbp_annotate", "sbp.annotate({a}, {atoms})", {"a": _ANY, "atoms": _atoms}, moves, weight=2),
    Op(
        "sbp_annotate_all",
        "sbp.annotate({a}, {type})",
        {
            "a": _ANY,
            "type": lambda d: repr(type_text(d["a"], d.scope.state.axes, d.rng, 0.2)),
        },
        moves,
        weight=2,
    ),
    Op(
        "sbp_partial",
        "sbp.partial({a}, {axes}, op={monoid})",
        {"a": _ANY, "axes": _axes, "monoid": lambda d: repr(d.choice(monoids(d["a"])))},
        moves,
        weight=2,
    ),
    Op(
        "sbp_cotangent",
        "sbp.annotate({a}, cotangent={type})",
        {
            "a": Want("f"),
            "type": lambda d: repr(
                type_text(replace(d["a"], exact=False), d.scope.state.axes, d.rng)
            ),
        },
        moves,
        weight=2,
    ),
)
"""Annotations on some of the mesh axes."""

NAMES = tuple(op.name for op in ANNOTATIONS)
"""Operations that a minimiser may leave out."""


def with_types(program: Program, rng: random.Random) -> Program:
    """The program with types asked of some arguments and results, and some arguments donated."""
    # Partial only what can be given in parts without rounding.
    axes = program.axes
    inputs, outputs = program.inputs, program.outputs
    if rng.random() < 0.6:
        inputs = tuple(
            (
                v
                if rng.random() < 0.3 or v.info.kind == "r"
                else replace(
                    v,
                    type=type_text(
                        v.info, axes, rng, 0.1 * (v.info.exact and v.info.size > 0), 0.15
                    ),
                )
            )
            for v in inputs
        )
    if rng.random() < 0.4:
        outputs = tuple(
            o if rng.random() < 0.3 else replace(o, type=type_text(o.info, axes, rng, 0.3, 0.15))
            for o in outputs
        )
    donate = (
        tuple(v.name for v in inputs if rng.random() < 0.5 and ":P" not in (v.type or ""))
        if rng.random() < 0.15
        else ()
    )
    return replace(program, inputs=inputs, outputs=outputs, donate=donate)
