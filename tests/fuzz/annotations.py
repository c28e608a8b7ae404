"""Annotations inside a program, and the types asked of its arguments and results."""

import random
from dataclasses import replace

from tests.fuzz.draw import Draw, Op, Want, moves
from tests.fuzz.program import Info, Program

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


def _atoms(d: Draw, axes: tuple[str, ...]) -> str:
    """Keyword arguments of annotate."""
    chosen = d.rng.sample(axes, d.int(1, len(axes)))
    dims = d["a"].ndim
    return ", ".join(
        f"{x}=S({d.int(0, dims - 1)})" if dims and d.chance(0.7) else f"{x}=B"
        for x in sorted(chosen)
    )


def draw(axes: tuple[str, ...], rng: random.Random) -> Op:
    """An annotation on some of the mesh axes."""
    one = lambda d: ", ".join(
        repr(x) for x in sorted(d.rng.sample(axes, d.int(1, min(2, len(axes)))))
    )
    table: tuple[tuple[int, Op], ...] = (
        (
            5,
            Op(
                "sbp_split",
                "sbp.split({a}, {dim}, {axes})",
                {"a": replace(_ANY, low=1), "dim": lambda d: d.dim("a"), "axes": one},
                moves,
            ),
        ),
        (2, Op("sbp_replicate", "sbp.replicate({a}, {axes})", {"a": _ANY, "axes": one}, moves)),
        (
            2,
            Op(
                "sbp_annotate",
                "sbp.annotate({a}, {atoms})",
                {"a": _ANY, "atoms": lambda d: _atoms(d, axes)},
                moves,
            ),
        ),
        (
            2,
            Op(
                "sbp_annotate_all",
                "sbp.annotate({a}, {type})",
                {"a": _ANY, "type": lambda d: repr(type_text(d["a"], axes, d.rng, 0.2))},
                moves,
            ),
        ),
        (
            2,
            Op(
                "sbp_partial",
                "sbp.partial({a}, {axes}, op={monoid})",
                {"a": _ANY, "axes": one, "monoid": lambda d: repr(d.choice(monoids(d["a"])))},
                moves,
            ),
        ),
        (
            2,
            Op(
                "sbp_cotangent",
                "sbp.annotate({a}, cotangent={type})",
                {
                    "a": Want("f"),
                    "type": lambda d: repr(type_text(replace(d["a"], exact=False), axes, d.rng)),
                },
                moves,
            ),
        ),
    )
    return rng.choices([op for _, op in table], [w for w, _ in table])[0]


NAMES = (
    "sbp_split",
    "sbp_replicate",
    "sbp_annotate",
    "sbp_annotate_all",
    "sbp_partial",
    "sbp_cotangent",
)
"""Operations that a minimiser may leave out."""


def with_types(program: Program, rng: random.Random) -> Program:
    """The program with types asked of some arguments and results, and some arguments donated."""
    axes = program.axes
    inputs, outputs = program.inputs, program.outputs
    if rng.random() < 0.6:
        inputs = tuple(
            (
                v
                if rng.random() < 0.3 or v.info.kind == "r"
                else replace(
                    v, type=type_text(v.info, axes, rng, 0.1 if _parts(v.info) else 0, 0.15)
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


def _parts(info: Info) -> bool:
    """Whether an argument can be given in parts without rounding."""
    return info.exact and info.size > 0
