"""Shardings, devices and kinds of memory that a program asks for in JAX's own words.

A `NamedSharding` that the user asks for is a pin of the value, as `sbp.annotate` makes one. So are
those of `with_sharding_constraint`, `reshard`, `device_put`, `out_sharding=`, and a `jax.jit`
inside. `sbp.infer.pins` finds their types on the mesh.

JAX adds shardings of its own, which are no pins: the transpose of a constraint on the cotangent,
and a `reshard` of a constant to no mesh axis. Devices and layouts have no effect. A kind of memory
has none if JAX drops it; JAX writes the other kinds into the types of the results. sbp gives one
warning for each of the user's lines that asks for something without effect.
"""

import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import PartitionSpec

from sbp import _jax
from sbp.annotations import Pin
from sbp.errors import Span, warn
from sbp.trace import scopes
from sbp.trace.graph import SAME, Graph, Node
from sbp.types import NdSbp

PLACING = frozenset(
    {
        "device_put",
        "sharding_constraint",
        "reshard",
        "with_memory_space_constraint",
        "pvary",
        "pcast",
    }
)
"""Primitives that return their operands in another sharding or memory."""

_CALLS = {
    "sharding_constraint": "with_sharding_constraint",
    "jit": "in_shardings or out_shardings of jax.jit",
}
"""The call that a user writes, for primitives with another name."""

CONSTRAINTS = frozenset({"with_sharding_constraint", "reshard", "device_put"})
"""Functions of JAX that return their first argument in another sharding."""

Pins = tuple[Pin | None, ...]


class Places:
    """Reads the places that equations ask for, and collects what has no effect, for warnings."""

    def __init__(self) -> None:
        self._ignored: dict[tuple[str, Span | None], tuple[str, str]] = {}

    def pins(self, eqn: Any, span: Span | None, scope: str, *, manual: bool) -> tuple[Pins, Pins]:
        """The pins of an equation: for each operand, and for each result.

        Arguments:
          eqn: the equation.
          span: the user's line.
          scope: JAX's name stack with those of the calls around it.
          manual: whether it is in the body of a hand-written region, which has no pins.
        """
        if (asked := _jax.compute_type_of(eqn)) is not None:
            self._ignore(
                "ignored-constraint",
                span,
                f'compute_on("{asked}")',
                "sbp runs an operation in the memory of its operands; move these to host memory"
                " with jax.device_put(x, jax.memory.Space.Host)",
            )
        call = _call_of(eqn)

        def pin(place: Any, var: Any) -> Pin | None:
            """The pin of one operand or result; None where the user asks for none."""
            if place is None or not _is_users(eqn, place, scope):
                return None
            sharding = sharding_of(place)
            if (memory := memory_of(place)) is not None and not _jax.in_host(var.aval):
                self._ignore(
                    "ignored-memory",
                    span,
                    f"{call} to {memory} memory",
                    "JAX leaves the value in device memory; copy it with jax.device_put(x,"
                    " jax.memory.Space.Host)",
                )
            if isinstance(place, Format):
                self._ignore("ignored-constraint", span, f"the layout of {call}", _PLACE)
            if not manual and sharding is not None:
                return Pin(NdSbp(), complete=True, sharding=sharding, asked_by=call)
            if isinstance(place, jax.sharding.Sharding | jax.Device | Format):
                self._ignore("ignored-constraint", span, call, _MANUAL if manual else _PLACE)
            return None

        operands, results = places_of(eqn)
        return (
            tuple(map(pin, operands, eqn.invars)),
            tuple(map(pin, results, eqn.outvars)),
        )

    def _ignore(self, code: str, span: Span | None, what: str, why: str) -> None:
        self._ignored.setdefault((code, span), (what, why))

    def warn(self) -> None:
        """Gives a warning for each line that asks for what has no effect."""
        for (code, span), (what, why) in self._ignored.items():
            warn(code, what, f"has no effect: {why}", span=span)


_PLACE = (
    "sbp chooses the device and the memory layout of every value; pin this one with sbp.annotate"
    " or a NamedSharding"
)

_MANUAL = "the types of a hand-written region decide which shard each device has"


def _is_users(eqn: Any, place: Any, scope: str) -> bool:
    """Whether the user asks for a place, and not JAX.

    Equations of a backward pass carry the line of the forward one. Only the rule of a `custom_vjp`
    runs the user's own code there.
    """
    name, info = eqn.primitive.name, eqn.source_info
    if scopes.in_transpose(scope) and not scopes.in_recomputation(scope):
        return _in_backward_rule(info) and (name in _CALLS or _names_axes(place))
    if name in ("device_put", "with_memory_space_constraint") or name in _CALLS:
        return True
    return (
        _names_axes(place) or _called_by_user(info, name)
        if name == "reshard"
        else _names_axes(place) and _asked_of_creator(eqn)
    )


def _in_backward_rule(source_info: Any) -> bool:
    """Whether the rule of a `custom_vjp` made an equation of a backward pass. An equation of a
    library's rule has the traceback of the call in the forward pass."""
    below = _jax.below_user(source_info.traceback)
    is_called = any(code.co_filename.endswith("custom_derivatives.py") for code in below)
    return is_called or _jax.in_users_rule(source_info)


def _called_by_user(source_info: Any, function: str) -> bool:
    """Whether the user's own code called a function of JAX, which then made the equation."""
    below = _jax.below_user(source_info.traceback)
    return bool(below) and below[-1].co_name == function


@functools.cache
def _takes_sharding(function: str) -> bool:
    """Whether a function of JAX, such as `numpy.lax_numpy.zeros`, has a parameter for the sharding
    of its result."""
    module, _, name = function.rpartition(".")
    found = getattr(sys.modules.get(f"jax._src.{module}"), name, None)
    try:
        parameters = inspect.signature(found).parameters if callable(found) else ()
    except ValueError:  # no signature that Python can read
        return False
    return not {"out_sharding", "sharding", "device"}.isdisjoint(parameters)


def _asked_of_creator(eqn: Any) -> bool:
    """Whether the user called a function of JAX that takes a sharding for its result, and which
    made the equation: not where the sharding follows from that of another array."""
    made_by = _jax.library_of(eqn.source_info.traceback)
    return "out_sharding" in eqn.params or bool(made_by and _takes_sharding(made_by[-1]))


def _names_axes(place: Any) -> bool:
    """Whether a sharding names a mesh axis."""
    sharding = sharding_of(place)
    if sharding is None:
        return False
    spec: PartitionSpec = sharding.spec
    nothing = (None, PartitionSpec.UNCONSTRAINED, ())
    return bool(spec.unreduced) or any(entry not in nothing for entry in spec.partitions)


def _call_of(eqn: Any) -> str:
    """What the user wrote to get an equation that names a place."""
    name = eqn.primitive.name
    made_by = [
        function
        for function in _jax.library_of(eqn.source_info.traceback)
        # JAX runs it between a method of a traced array and the function behind the method.
        if function != "numpy.array_methods._forward_method_to_aval"
    ]
    if made_by and made_by[-1].startswith("numpy."):  # such as `jnp.asarray`
        given = "out_sharding" if "out_sharding" in eqn.params else "device"
        return f"{given}= of {made_by[-1].rsplit('.', 1)[-1].lstrip('_')}"
    if name == "device_put" and not _called_by_user(eqn.source_info, name):
        return "the offload of a checkpoint policy"
    return _CALLS.get(name, name if name in PLACING else f"out_sharding= of {name}")


# ---- what equations name -------------------------------------------------------------------------

_PLACES = {
    "sharding_constraint": "sharding",
    "reshard": "dst_sharding",
    "device_put": "devices",
    "with_memory_space_constraint": "memory_space",
}
"""Primitives that say where a value lies, each with the parameter that says so."""


def places_of(eqn: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The shardings, devices and kinds of memory that an equation asks for, as objects of JAX: for
    each operand and for each result; None where it asks for none.

    >>> closed, _ = _jax.make_jaxpr(lambda x: jax.device_put(x, jax.memory.Space.Host), [1.0])
    >>> [memory_of(place) for place in places_of(closed.jaxpr.eqns[0])[1]]
    ['host']
    """
    params, nothing = eqn.params, (None,) * len(eqn.invars)
    if eqn.primitive.name in _PLACES:
        given = params.get(_PLACES[eqn.primitive.name])
        return nothing, given if isinstance(given, tuple) else (given,) * len(eqn.outvars)
    out = params.get("out_sharding", params.get("sharding"))
    return (
        tuple(map(_sharding, params.get("in_shardings", nothing))),
        tuple(map(_sharding, params.get("out_shardings", (out,) * len(eqn.outvars)))),
    )


def _sharding(place: Any) -> Any:
    return place if isinstance(place, jax.sharding.Sharding) else None


def sharding_of(place: Any) -> Any:
    """The `NamedSharding` that a place is or names; None for a device, a kind of memory, or another
    sharding."""
    sharding = place.sharding if isinstance(place, Format) else place
    return sharding if isinstance(sharding, jax.sharding.NamedSharding) else None


def memory_of(place: Any) -> str | None:
    """The kind of memory that a place names, such as `pinned_host`; None for a device's own.

    >>> memory_of(jax.memory.Space.Device)
    """
    match place:
        case Format():
            return memory_of(place.sharding)
        case jax.sharding.Sharding():
            kind = place.memory_kind
            return kind if kind is not None and "host" in kind else None
        case jax.memory.Space.Host:
            return "host"
        case _:
            return None


# ---- transfers ----------------------------------------------------------------------------------
# Copies of values between device memory and host memory. JAX's types say in which memory a value
# lies (`float32<host>[8]`), and its primitives say in which memory their results lie. A graph
# keeps both: a value in host memory is one whose aval says so, and each copy is a node of its own.


HOST = "pinned_host"
"""JAX's name of the host memory that devices copy from and to. Values that lie there have another
type in JAX."""

TRANSFER = "device_put"
"""The operator that copies a value from one memory to the other."""


def computes_in_host(node: Node, avals: Sequence[Any]) -> bool:
    """Whether a node computes in host memory.

    Arguments:
      node: the node.
      avals: of its operands and results.
    """
    return node.op not in (TRANSFER, *SAME) and any(map(_jax.in_host, avals))


def transfer_fields(host: bool, eqn: Any = None, position: int = 0) -> dict[str, Any]:
    """The operator, the primitive and the parameters of a node that copies one value.

    Arguments:
      host: whether the copy goes to host memory.
      eqn: the equation that asks for the copy; None for none.
      position: of the value among the operands of that equation.
    """
    primitive, params = _jax.transfer(host)
    if eqn is not None and eqn.primitive is primitive:
        asked = eqn.params.get("copy_semantics", ())
        params = params | {"copy_semantics": (asked[position],)} if asked else params
    return {"op": TRANSFER, "primitive": primitive, "params": params}


def returned_in(graph: Graph, hosts: Sequence[bool]) -> Graph:
    """The graph with its results in the memory that the user asked for.

    Arguments:
      graph: a program; new values are entered in its table of avals.
      hosts: for each result, whether it lies in host memory.
    """
    pairs = [*zip(graph.outputs, hosts, strict=True)]
    moved = dict.fromkeys(o for o, host in pairs if host != _jax.in_host(graph.aval(o)))
    made = {
        o: graph.new_value(
            _jax.empty_aval(a.shape, a.dtype, bool(a.weak_type), not _jax.in_host(a))
        )
        for o in moved
        for a in [graph.aval(o)]
    }
    numbers = itertools.count(1 + max((n.id for n in graph.walk()), default=-1))
    copies = (
        Node(
            id=next(numbers),
            inputs=(o,),
            outputs=(v,),
            **transfer_fields(_jax.in_host(graph.avals[v])),
        )
        for o, v in made.items()
    )
    return dataclasses.replace(
        graph,
        nodes=(*graph.nodes, *copies),
        outputs=tuple(o if host == _jax.in_host(graph.aval(o)) else made[o] for o, host in pairs),
    )
