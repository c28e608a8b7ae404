"""The certificate of a typing: all constraints are evaluated on it, without the chooser and without
costs.

The certificate evaluates each constraint on each mesh axis, and each decision and each conversion
over all mesh axes. It reads the same decisions, options and edges as the chooser (`infer.flow`,
`infer.typing`). `plan.verify` checks the plan without these.
"""

from __future__ import annotations

from typing import Any

from sbp.errors import SbpInternalError
from sbp.infer.constraints import Constraint, System, Variable, constraints_of
from sbp.infer.flow import End
from sbp.infer.request import Request
from sbp.infer.rows import NdRow
from sbp.infer.space import INFINITE, Code, detour
from sbp.infer.typing import Options, Typing
from sbp.types import MONOIDS


def certify(typing: Typing, systems: tuple[System, ...] | None = None) -> None:
    """Evaluates every constraint on a typing: each node has one of its rows, each conversion is
    allowed, each pinned value has its type.

    Arguments:
      typing: the types.
      systems: the constraints of their program, by mesh axis, where several typings of it are
        certified; None to write them down.

    Raises:
      SbpInternalError: names the first constraint that the typing breaks.
    """
    request = typing.graph_request
    systems = constraints_of(request) if systems is None else systems
    assert all(s.request is request for s in systems), "constraints of another request"
    states = [
        [_state_of(v, typing, system.position) for v in system.variables] for system in systems
    ]
    for system, have in zip(systems, states, strict=True):
        for constraint in system.constraints:
            _certify_constraint(system, constraint, have)
    _certify_options(typing, request)
    if systems:
        _certify_boxing(typing, systems, states)


def _certify_constraint(
    system: System, constraint: Constraint, have: list[tuple[Code, ...] | None]
) -> None:
    """Checks one constraint on one mesh axis.

    Arguments:
      system: the constraints of the axis.
      constraint: one of them.
      have: the state of each variable.

    Raises:
      SbpInternalError: when the states break it.
    """
    for end in constraint.fixed:
        if _code(have, end) != constraint.code:
            raise _violation(system, constraint, f"it is {_code(have, end)}")
    convert = constraint.convert
    if convert is None or convert.unless:
        return
    source, target = _code(have, convert.source), _code(have, convert.target)
    aval = system.request.graph.avals[convert.value]
    if (
        source is None
        or target is None
        or not system.conversions.allows(source, target, aval, convert.rules)
    ):
        raise _violation(system, constraint, f"made as code {source}, read as code {target}")


def _certify_options(typing: Typing, request: Request) -> None:
    """Checks that each decision has one of its options over all mesh axes. The options of an inner
    axis depend on the shapes that the outer axes leave.

    Raises:
      SbpInternalError: names the first decision with another row or type.
    """
    options = Options(request)
    for decision in request.flow.decisions:
        choice = typing.choice(decision)
        if options.has(decision, choice):
            continue
        node = decision.node
        what = f"{decision.kind} {decision.position + 1}" if node is None else node.op
        where = f" at {node.span}" if node and node.span else ""
        if isinstance(choice, NdRow):
            given = f"a row that it does not have: {choice.ins} -> {choice.outs}"
        else:
            given = f"a type that it does not have: {choice}"
        raise SbpInternalError(f"the chosen typing gives {what}{where} {given}")


def _certify_boxing(
    typing: Typing, systems: tuple[System, ...], states: list[list[tuple[Code, ...] | None]]
) -> None:
    """Checks each conversion over all mesh axes together: a step may split or join a dim on one
    axis only while no inner axis splits the same dim.

    Arguments:
      typing: the typing.
      systems: its constraints, by mesh axis.
      states: for each system the state of each variable.

    Raises:
      SbpInternalError: names the first conversion that has no path.
    """
    spaces = typing.request.spaces
    seen: dict[tuple[Any, ...], bool] = {}
    conversions = ([c for c in s.constraints if c.convert is not None] for s in systems)
    for parallel in zip(*conversions, strict=True):
        first = parallel[0].convert
        assert first is not None
        if first.rules.unlimited or first.unless:
            continue
        source, target = [0] * len(typing.mesh.sizes), [0] * len(typing.mesh.sizes)
        for constraint, system, have in zip(parallel, systems, states, strict=True):
            assert constraint.convert is not None
            source[system.position] = _code(have, constraint.convert.source) or 0
            target[system.position] = _code(have, constraint.convert.target) or 0
        aval = typing.graph.avals[first.value]
        key = (aval.shape, tuple(source), tuple(target), first.rules)
        if source != target and key not in seen:
            codes = (*source, *target)
            monoids = frozenset(MONOIDS[-1 - c] for c in codes if c < 0)
            monoids = detour(aval.dtype, monoids) if first.rules.bans else monoids
            forced = frozenset((i, c - 1) for t in key[1:3] for i, c in enumerate(t) if c > 0)
            space = spaces.of(aval, monoids, forced)
            seconds = space.seconds(first.rules)
            seen[key] = bool(seconds[space.index[key[1]], space.index[key[2]]] < INFINITE)
        if not seen.get(key, True):
            raise _violation(systems[0], parallel[0], f"made as {source}, read as {target}")


def _state_of(variable: Variable, typing: Typing, position: int) -> tuple[Code, ...] | None:
    """The state of a variable on one mesh axis under a typing; None when the variable has no such
    state."""
    choice = typing.choice(variable.decision)
    if isinstance(choice, NdRow):
        codes = tuple(t[position] for t in (*choice.ins, *choice.outs))
        return codes if codes in variable.states else None
    return next((s for s in variable.states if s[0] == choice[position]), None)


def _code(states: list[tuple[Code, ...] | None], end: End) -> Code | None:
    state = states[end.variable]
    return None if state is None else state[end.column]


def _violation(system: System, constraint: Constraint, found: str) -> SbpInternalError:
    span = constraint.because.span
    where = f" at {span}" if span else ""
    return SbpInternalError(
        f"the chosen typing breaks {constraint.name} on {system.mesh_axis}:"
        f" {constraint.because.text}{where}; {found}"
    )
