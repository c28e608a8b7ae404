"""What `sbp.jit` returns: a function that plans its calls and runs the plans."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from sbp import _jax, _jax_call
from sbp.api.call import CallSignature, JitOptions, Parameters, function_name, quick_key
from sbp.api.holding import plain
from sbp.api.plan import Plan
from sbp.api.planner import Planner
from sbp.api.tracing import Traced, shapes_of, traced_call
from sbp.errors import (
    Diagnostic,
    Edit,
    Label,
    OptionEdit,
    SbpError,
    SbpInternalError,
    SbpWarning,
    SourceEdit,
    Span,
    noting,
    users_stacklevel,
    warn,
)
from sbp.explain.change import Change, more_text, tried
from sbp.explain.faults import LIMITS
from sbp.kinds import FUNCTION, Kind, instance_of, made_of, shown
from sbp.machine.mesh import mesh_spec
from sbp.plan.program import Program
from sbp.pytrees import leaves_of
from sbp.report.pages import diagnostics_of
from sbp.report.report import Report
from sbp.slips import Correction, correcting, renamed
from sbp.source.editing import argument_span, constants_in, items_of
from sbp.types import Split

# ---- helps for slips ----------------------------------------------------------------------------
# Helps for errors before a program is typed: a misspelt name, a dim that a tensor does not have,
# entries of `in_types` and `out_types` in another order. Each help has been tried: the call was
# planned with it.


Attempt = Callable[[JitOptions], Program]
"""Plans the call with other options."""


def diagnosed(error: SbpError, options: JitOptions, attempt: Attempt) -> tuple[Diagnostic, ...]:
    """The diagnostics of an error. That of a slip has helps.

    Arguments:
      error: the error.
      options: of `sbp.jit`.
      attempt: plans the call with other options.
    """
    found = diagnostics_of(error)
    if len(found) != 1 or not (error.slip or error.option) or found[0].helps:
        return found
    changes = _changes(error, options)
    tries = tried(
        changes,
        plans=LIMITS.plans,
        helps=LIMITS.helps,
        plan=functools.partial(_planned, attempt),
    )
    # The labels of a swap say that entries look swapped, which only a plan shows.
    plain = (one for one in changes if not any(label.text for label in one.labels))
    likely = next((one for one, _ in tries.accepted), next(plain, None))
    changed = likely.labels if likely is not None else ()
    labels = found[0].labels or changed or _option_label(error, options)
    if error.call is not None and changed:
        labels = (*changed, *(dataclasses.replace(label, primary=False) for label in labels))
    notes, left = found[0].notes, tries.untried
    if left:
        notes += (f"{more_text(left, 'change')} {'were' if left > 1 else 'was'} not tried",)
    helps = tuple(one.help(program) for one, program in tries.accepted)
    return (dataclasses.replace(found[0], labels=labels, notes=notes, helps=helps),)


def _planned(attempt: Attempt, changed: tuple[JitOptions, Correction | None]) -> Program | None:
    """The plan of the call after a change; None where there is none. Its warnings are about a
    program that the user has not written, so they are dropped."""
    options, correction = changed
    with contextlib.ExitStack() as stack:
        stack.enter_context(noting())
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        if correction is not None:
            stack.enter_context(correcting(correction))
        try:
            return attempt(options)
        except SbpInternalError:
            raise
        except Exception:  # the user's function, which may raise anything with another value
            return None


def _changes(error: SbpError, options: JitOptions) -> list[Change]:
    """The changes to try, the likeliest first. Of many swaps, some come last, so that what is
    misspelt is tried, too."""
    if error.call is not None:
        return list(_entries(error, options, error.call))
    if not error.option:
        return list(_corrected(error, options))
    swaps, renamed = list(_swaps(error.option, options)), list(_renamed(error, options))
    first = max(0, LIMITS.plans - len(renamed))
    return [*swaps[:first], *renamed, *swaps[first:]]


def _corrected(error: SbpError, options: JitOptions) -> Iterator[Change]:
    """The call that has a slip with each likely value."""
    at, slip = error.span or _jax.raising_span(error), error.slip
    if at is None or slip is None:
        return
    written = _written(slip.wrong)
    for right in slip.likely:
        edits = constants_in(at, written, _written(right))
        if edits:
            yield _change(
                text=f"write {shown(_written(right))} for {shown(written)} at line {at.line}",
                edits=edits,
                options=options,
                correction=Correction(at, slip.wrong, right),
            )


def _entries(error: SbpError, options: JitOptions, call: Span) -> Iterator[Change]:
    """The `in_types` of a hand-written region with each likely entry.

    Arguments:
      error: the error about them.
      options: of `sbp.jit`.
      call: the call that made the region.
    """
    wrong, likely = (error.slip.wrong, error.slip.likely) if error.slip else ((), ())
    parts = items_of(call, "in_types", len(wrong))
    for right in likely:
        changed = next(i for i, entry in enumerate(right) if entry is not wrong[i])
        source = next((k for k, other in enumerate(wrong) if other is right[changed]), None)
        written = parts[source][1] if parts and source is not None else f'"{right[changed]}"'
        edits: tuple[Edit, ...] = (
            OptionEdit(option="in_types", value=right, function="sbp.manual"),
        )
        labels: tuple[Label, ...] = ()
        if parts:
            edits = (SourceEdit(span=parts[changed][0], replacement=written),)
            labels = (Label(span=parts[changed][0], text="", primary=True),)
        yield _change(
            text=f"write {written} for entry {changed} of in_types at line {call.line}",
            edits=edits,
            options=options,
            correction=Correction(call, wrong, right),
            labels=labels,
        )


def _change(
    text: str,
    edits: tuple[Edit, ...],
    options: JitOptions,
    correction: Correction | None = None,
    labels: tuple[Label, ...] = (),
) -> Change:
    """A change of the options, or of a call by `correction`."""
    return Change(text=text, edits=edits, labels=labels, make=lambda: (options, correction))


def _written(value: Any) -> Any:
    """A value as the source has it: the dim of a split."""
    return value.dim if isinstance(value, Split) else value


def _swaps(option: str, options: JitOptions) -> Iterator[Change]:
    """An option with two of its entries swapped."""
    entries = getattr(options, option)
    if type(entries) not in (tuple, list):
        return
    parts = items_of(options.at, option, len(entries))
    for i, k in itertools.combinations(range(len(entries)), 2):
        if entries[i] is entries[k] or _equal(entries[i], entries[k]):
            continue
        swapped = list(entries)
        swapped[i], swapped[k] = swapped[k], swapped[i]
        labels: tuple[Label, ...] = ()
        edits: tuple[Edit, ...] = (OptionEdit(option=option, value=type(entries)(swapped)),)
        if parts:
            (a, a_text), (b, b_text) = parts[i], parts[k]
            text = f"entries {i} and {k} of {option} look swapped"
            labels = (Label(span=a, text=text, primary=True),)
            labels += (Label(span=b, text="the other one"),)
            edits = (
                SourceEdit(span=a, replacement=b_text),
                SourceEdit(span=b, replacement=a_text),
            )
        yield _change(
            text=f"swap entries {i} and {k} of {option}",
            edits=edits,
            options=dataclasses.replace(options, **{option: type(entries)(swapped)}),
            labels=labels,
        )


def _equal(a: Any, b: Any) -> bool:
    """Whether two entries are the same types. Entries may hold arrays or functions."""
    return repr(a) == repr(b)


def _renamed(error: SbpError, options: JitOptions) -> Iterator[Change]:
    """An option with a key, a type text or an axis of it replaced by each likely one."""
    if error.slip is None:
        return
    option, wrong = error.option, error.slip.wrong
    for right in error.slip.likely:
        value = _replaced(getattr(options, option), wrong, right)
        if _equal(value, getattr(options, option)):
            continue
        part = argument_span(options.at, option)
        written = constants_in(part, _written(wrong), _written(right)) if part else ()
        edits: tuple[Edit, ...] = written or (OptionEdit(option=option, value=value),)
        labels = tuple(Label(span=e.span, text="", primary=not n) for n, e in enumerate(written))
        yield _change(
            text=f"write {shown(_written(right))} for {shown(_written(wrong))} in {option}",
            edits=edits,
            options=dataclasses.replace(options, **{option: value}),
            labels=labels,
        )


def _replaced(entry: Any, wrong: Any, right: Any) -> Any:
    """An entry of an option with another value for a key of a dict, or for a type text or the name
    in it."""
    match entry:
        case dict():
            return {
                (right if k == wrong else k): _replaced(v, wrong, right) for k, v in entry.items()
            }
        case list():
            return [_replaced(v, wrong, right) for v in entry]
        case tuple() if type(entry) is tuple:
            return tuple(_replaced(v, wrong, right) for v in entry)
        case str() if isinstance(wrong, str):
            return renamed(entry, wrong, right)
        case PartitionSpec():
            return PartitionSpec(
                *(
                    tuple(right if a == wrong else a for a in part)
                    if isinstance(part, tuple)
                    else right
                    if part == wrong
                    else part
                    for part in entry
                )
            )
        case str():
            return entry.replace(repr(wrong), repr(right))
        case _:
            return entry


def _option_label(error: SbpError, options: JitOptions) -> tuple[Label, ...]:
    """The place of the option that an error is about."""
    part = argument_span(options.at, error.option)
    return (Label(span=part, text="", primary=True),) if part else ()


# ---- plans of a function ------------------------------------------------------------------------
# The plans of one function, by call signature.


MOST_PLANS = 256
"""Plans of one function that are kept. Beyond that number the plan that was not used for longest is
dropped, with one `many-plans` warning."""


@dataclass(slots=True)
class _Entry:
    """A plan, with the number of its last use."""

    plan: Plan
    used: int


class PlanCache:
    """The plans of one function that were used last.

    Arguments:
      name: the function's name, for the warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._plans: dict[Any, _Entry] = {}
        self._quick: dict[Any, _Entry] = {}
        self._uses = itertools.count()
        self._warned = False

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Any) -> Plan | None:
        """The plan of a call signature's key."""
        return self._used(self._plans.get(key))

    def key_for(self, key: Any) -> Any:
        """The call's own key, or the key of an existing plan that takes the arguments as they are
        placed already."""
        if key in self._plans:
            return key
        return next((k for k, e in self._plans.items() if _serves(k, e.plan, key)), key)

    def quick(self, key: Any) -> Plan | None:
        """The plan of a key from `quick_key`."""
        return self._used(self._quick.get(key))

    def add(self, key: Any, plan: Plan) -> None:
        """Keeps a plan. The plan that was not used for longest may be dropped."""
        while len(self._plans) >= MOST_PLANS:
            oldest = min(self._plans, key=lambda k: self._plans[k].used)
            dropped = self._plans.pop(oldest)
            self._quick = {k: e for k, e in self._quick.items() if e is not dropped}
            if not self._warned:
                self._warned = True
                warn(
                    "many-plans",
                    f"{self._name} was called with more than {MOST_PLANS} signatures",
                    "and drops the plan that was not used for longest; pad shapes to fewer sizes,"
                    " or pass what changes as an array",
                )
        self._plans[key] = _Entry(plan, next(self._uses))

    def add_quick(self, quick: Any, key: Any) -> None:
        """Lets a second key lead to the plan of a call signature's key."""
        if len(self._quick) >= MOST_PLANS:
            self._quick.clear()  # they come back with the next calls
        self._quick[quick] = self._plans[key]

    def clear(self) -> None:
        """Drops all plans with their compiled programs."""
        self._plans.clear()
        self._quick.clear()

    def _used(self, entry: _Entry | None) -> Plan | None:
        if entry is None:
            return None
        entry.used = next(self._uses)
        return entry.plan


def _serves(key: Any, plan: Plan, call: Any) -> bool:
    """Whether a call is the one that a plan was made for, except that free arguments are on the
    mesh now: their pinned types are the types that the plan chose."""
    (mesh, mine), (its_mesh, its) = key, call
    same = mesh == its_mesh and (*mine[:4], *mine[5:]) == (*its[:4], *its[5:])
    return same and all(
        a == b or (a.type is None and b == replace(a, type=t))
        for a, b, t in zip(mine[4], its[4], plan.program.input_types, strict=True)
    )


# ---- jit ----------------------------------------------------------------------------------------


MESH = Kind(
    "a jax.sharding.Mesh, an AbstractMesh or None",
    lambda x: x is None or isinstance(x, Mesh | AbstractMesh),
)


@made_of("Jitted", fn=FUNCTION, mesh=MESH, options=instance_of(JitOptions, "sbp.jit"))
class Jitted:
    """The result of `sbp.jit`: a function with the methods `check`, `plan`, `trace`, `lower`,
    `eval_shape` and `clear_cache`.

    Arguments:
      fn: the user's function.
      mesh: the user's mesh; None for that of the context at each call.
      options: the other arguments of `sbp.jit`.

    Raises:
      SbpError: `unknown-axis`, `unknown-option` or `type-syntax` for options that do not fit the
        mesh; `bad-argument` for static and donated arguments that `jax.jit` refuses.
    """

    def __init__(
        self, fn: Callable[..., Any], mesh: Mesh | AbstractMesh | None, options: JitOptions
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self.options = options
        self._parameters = Parameters.of(
            fn,
            (options.static_argnums, options.static_argnames),
            (options.donate_argnums, options.donate_argnames),
        )
        self._mesh = mesh
        self._planners: dict[Mesh | AbstractMesh, Planner] = {}
        self._plans = PlanCache(self.name)
        if mesh is not None:
            mesh_spec(mesh, options.hardware)  # refuses what is no mesh, and may have no hash
            self._on(mesh)

    @property
    def name(self) -> str:
        """The function's name, for reports."""
        return function_name(self._fn)

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The user's mesh: the argument of `sbp.jit`, or the mesh of the context.

        Raises:
          SbpError: `bad-argument` where there is none.
        """
        mesh = _jax_call.context_mesh() if self._mesh is None else self._mesh
        if mesh is None:
            raise SbpError(
                f"{self.name} has no mesh; pass mesh= to sbp.jit, or call it under"
                " jax.set_mesh(mesh)"
            )
        return mesh

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As an attribute of an object, the function is a method."""
        return self if instance is None else JittedMethod(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plan. The first call with new shapes, dtypes or static arguments makes it.

        Raises:
          SbpTypeError: where the program has no typing.
        """
        flat, tree = leaves_of((args, kwargs), "the arguments")
        if _jax_call.transforming() or any(isinstance(leaf, _jax.Tracer) for leaf in flat):
            warnings.warn(
                f"nested-jit: {self.name} was called inside another transformation (jit, grad,"
                " vmap or another sbp.jit) and runs as the plain function",
                SbpWarning,
                stacklevel=users_stacklevel(),
            )
            args, kwargs = plain((args, kwargs))
            return self._fn(*args, **kwargs)
        if _jax_call.jit_is_disabled():
            args, kwargs = plain((args, kwargs))
            return self._fn(*args, **kwargs)
        mesh = self.mesh
        quick = quick_key(flat, tree, mesh)
        if quick is not None:
            plan = self._plans.quick(quick)
            if plan is not None:
                return plan.run(flat)
        planner = self._on(mesh)
        signature, leaves = planner.reader.read(args, kwargs)
        key = self._plans.key_for((mesh, signature.key))
        plan = self._plan_of(planner, signature, key)
        if quick is not None and plan.holding.is_direct(leaves):
            self._plans.add_quick(quick, key)
        return plan.run(leaves)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """The first stage: the program as a graph, and the request that its plan is made from."""
        reader = self._on(self.mesh).reader
        return traced_call(reader, reader.read(args, kwargs)[0])

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments or `jax.ShapeDtypeStruct`s.

        Raises:
          SbpTypeError: where the program has no typing; its diagnostics say why.
        """
        planner = self._on(self.mesh)
        return self._plan_of(planner, planner.reader.read(args, kwargs)[0])

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The `jax.stages.Lowered` of the plan for arguments or `jax.ShapeDtypeStruct`s.

        Raises:
          SbpTypeError: where the program has no typing; its diagnostics say why.
        """
        return self.plan(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes, dtypes and weak types of what the function returns, as `jax.ShapeDtypeStruct`s.
        The function is traced and not planned."""
        reader = self._on(self.mesh).reader
        return shapes_of(reader, reader.read(args, kwargs)[0])

    def clear_cache(self) -> None:
        """Drops all plans, with their compiled programs."""
        self._plans.clear()

    def check(self, *args: Any, **kwargs: Any) -> Report:
        """The report on a program. Errors of sbp are in `report.diagnostics` and are not raised.

        Shapes may have symbolic sizes (`jax.export.symbolic_shape`). The program is then typed at
        one choice of sizes, and `report.sizes`, a `sbp.sizes.conditions.Decided`, says for which
        sizes that typing holds. The report on a program without a typing has no `sizes`.
        """
        mesh = None
        try:
            mesh = self.mesh
            planner = self._on(mesh)
            return planner.report(args, kwargs, functools.partial(self._plan_of, planner))
        except SbpError as error:
            if mesh is None:
                found = diagnostics_of(error)
            else:
                attempt = functools.partial(self._attempt, mesh, args, kwargs)
                found = diagnosed(error, self.options, attempt)
            return Report(program=None, diagnostics=found, title=self.name)

    def _attempt(
        self,
        mesh: Mesh | AbstractMesh,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: JitOptions,
    ) -> Program:
        """The plan of a call with other options, which nothing keeps."""
        planner = Planner(self._fn, self._parameters, mesh, options)
        return planner.plan(planner.reader.read(args, kwargs)[0]).program

    def _on(self, mesh: Mesh | AbstractMesh) -> Planner:
        planner = self._planners.get(mesh)
        if planner is None:
            planner = Planner(self._fn, self._parameters, mesh, self.options)
            self._planners[mesh] = planner
        return planner

    def _plan_of(self, planner: Planner, signature: CallSignature, key: Any = None) -> Plan:
        key = key or (planner.reader.mesh, signature.key)
        plan = self._plans.get(key)
        if plan is None:
            plan = planner.plan(signature)
            self._plans.add(key, plan)
        return plan


class JittedMethod:
    """An `sbp.jit` function as the method of an object, which is its first argument in calls and in
    all methods.

    Arguments:
      function: the function.
      instance: the object.
    """

    def __init__(self, function: Jitted, instance: Any) -> None:
        functools.update_wrapper(self, function, updated=())
        self.__func__, self.__self__ = function, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plan; see `Jitted.__call__`."""
        return self.__func__(self.__self__, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """See `Jitted.trace`."""
        return self.__func__.trace(self.__self__, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """See `Jitted.plan`."""
        return self.__func__.plan(self.__self__, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """See `Jitted.lower`."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """See `Jitted.eval_shape`."""
        return self.__func__.eval_shape(self.__self__, *args, **kwargs)

    def check(self, *args: Any, **kwargs: Any) -> Report:
        """See `Jitted.check`."""
        return self.__func__.check(self.__self__, *args, **kwargs)

    def clear_cache(self) -> None:
        """See `Jitted.clear_cache`."""
        self.__func__.clear_cache()
