"""`Plan`: a plan as users see it. It runs, lowers, prices, explains, compares, is saved, and is
compared with a file in tests."""

import difflib
import functools
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from sbp import _jax
from sbp.api.call import (
    CallReader,
    CallSignature,
    argument_positions,
    quick_key,
    refuse_taken,
)
from sbp.api.emit import emit
from sbp.api.holding import Holding, with_padded
from sbp.api.tracing import Traced, Tracer, traced_call
from sbp.errors import (
    Diagnostic,
    SbpError,
    SbpTypeError,
    counted,
    listed,
    noting,
    refused,
    warn,
)
from sbp.explain.faults import explain
from sbp.explain.relaxations import (
    costly_annotations,
    gathered_matrices,
    memory_diagnostic,
    unchecked_regions,
)
from sbp.explain.why import why
from sbp.infer.check import refutation
from sbp.kinds import FLAG, Kind, instance_of, leaves_of, made_of, public, takes
from sbp.plan.certificate import certificate
from sbp.plan.fit import fit
from sbp.plan.program import Cost, Program
from sbp.plan.saved import SavedPlan, load_program, path_of, read_file, write_file
from sbp.report.answers import Comparison, Explanation, comparison, explanation
from sbp.report.facts import inputs, outputs, strategy
from sbp.report.flows import ProgramFlows
from sbp.report.rendering import counting_down
from sbp.report.report import Report
from sbp.run.arrays import Padded, Partial
from sbp.run.execute import Executable, JointRun

# ---- plans --------------------------------------------------------------------------------------


_PARTS = {"reader": CallReader, "signature": CallSignature, "program": Program, "traced": Traced}


@made_of("Plan", **{k: instance_of(c, "`plan` of an sbp.jit function") for k, c in _PARTS.items()})
class Plan:
    """A plan of a function for one call signature.

    Attributes:
      program: the instructions, with types and cost.
      results: what the function returns.
      noted: the warnings that were given while the plan was made, for its report.
      used: the number of its last use, for the cache of plans.

    Arguments:
      reader: the function with its mesh and options.
      signature: the call signature.
      program: the instructions.
      traced: the traced program with the structure of its results.
    """

    def __init__(
        self, reader: CallReader, signature: CallSignature, program: Program, traced: Traced
    ) -> None:
        self.program = program  # the first attribute, since pickle is to refuse it
        self._reader, self._signature, self.results = reader, signature, traced.results
        self._names, self._donated = signature.names, signature.donated
        self._diagnostics: tuple[Diagnostic, ...] | None = None
        self.noted: tuple[Diagnostic, ...] = ()
        self._quick: tuple[Any, ...] | None = None
        self.used, self._moved = 0, False
        self._settings = {_jax.SETTINGS: _jax.Settings.current()}

    @functools.cached_property
    def _executable(self) -> Executable:
        options = self._reader.options
        with _jax.holding(self._settings):
            return Executable(
                self.program,
                self._reader.mesh,
                self._reader.name,
                in_kinds=[leaf.memory for leaf in self._signature.leaves],
                returned=[(leaf.spec, leaf.memory) for leaf in self.results.leaves],
                donate_argnums=self._donated,
                keep_unused=options.keep_unused,
                compiler_options=options.compiler_options,
            )

    @functools.cached_property
    def holding(self) -> Holding:
        """How its arguments and results are held between calls."""
        return Holding(
            executable=self._executable,
            signature=self._signature,
            returned=self.results,
        )

    @functools.cached_property
    def _joint(self) -> JointRun | None:
        """What its runs need where there are several processes."""
        return (
            JointRun(self._executable, self._names, [leaf.type for leaf in self._signature.leaves])
            if jax.process_count() > 1
            else None
        )

    @property
    def cost(self) -> Cost:
        """Bytes sent, modelled seconds and peak memory of one call."""
        return self.program.cost

    @property
    def in_types(self) -> Any:
        """The types of the arguments, in the structure (args, kwargs) of the call."""
        return self._signature.like(self.program.input_types)

    @property
    def out_types(self) -> Any:
        """The types of what the function returns."""
        return self.results.like(self.program.output_types)

    @property
    def in_shardings(self) -> Any:
        """`NamedSharding`s of the positional arguments on the user's mesh, in their structure, with
        their kinds of memory. Arrays with these shardings are not moved when the plan runs. What is
        held as `sbp.Padded` is a `Padded` here, too, with the sharding of its parts."""
        shardings = with_padded(self.holding.inputs, self.holding.users_shardings)
        return self._signature.like(shardings)[0]

    @property
    def out_shardings(self) -> Any:
        """`NamedSharding`s of what the function returns, on the user's mesh, as in
        `in_shardings`."""
        return self.results.like(with_padded(self.holding.outputs, self._executable.out_shardings))

    @public
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the plan on arguments of the signature that it was made for.

        Raises:
          SbpError: `bad-argument` for other shapes, dtypes or static arguments; `abstract-mesh` for
            a plan on an abstract mesh.
        """
        flat, tree = leaves_of((args, kwargs), "the arguments")
        if any(isinstance(x, _jax.Tracer) for x in flat):
            raise refused(
                "a plan does not run inside another transformation (jit, grad or vmap); call the"
                " sbp.jit function there, or put sbp.jit around the transformation",
                TypeError,
            )
        quick = quick_key(flat, tree, self._reader.mesh, self._reader.options)
        if quick is not None and quick == self._quick:
            return self._run(flat)
        signature, leaves = self._read(args, kwargs)
        self._signature.check(signature)
        if self.holding.is_direct(leaves):
            self._quick = quick
        return self._run(leaves)

    def _read(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CallSignature, list[Any]]:
        """The signature of a call, and its flat arguments.

        Raises:
          SbpError: `bad-argument` for a call with other arguments than the plan's.
        """
        own, given = self._signature.arguments, self._reader.arguments(args, kwargs)
        if given != own:
            raise refused(
                f"the plan takes the arguments ({', '.join(own)}); this call has"
                f" ({', '.join(given)})",
                TypeError,
            )
        return self._reader.read(args, kwargs)

    @takes("Plan.place", skip=1)
    def place(self, *args: Any) -> tuple[Any, ...]:
        """Arguments on the mesh, where the plan takes them. Nothing is sent between processes.

        Arguments:
          *args: the positional arguments of a call. Where there are several processes, an array is
            the whole, equal in all of them, or the part of this process: the elements that its own
            devices hold, blocks in ascending order. The shape tells which it is.

        Returns:
          The arguments with global arrays, and with `sbp.Padded` for what is held padded. Numbers
          and `sbp.Partial` are returned as they are.

        Raises:
          SbpError: `bad-argument` for an array of neither shape, another dtype, another number of
            arguments, or other static arguments; `abstract-mesh` for a plan on an abstract mesh.

        >>> import numpy as np
        >>> import sbp
        >>> f = sbp.jit(lambda x: x + 1, sbp.make_mesh((1,), ("data",)), in_types="data:S(0)")
        >>> plan = f.plan(jax.ShapeDtypeStruct((8,), "float32"))
        >>> (x,) = plan.place(np.zeros(8, "float32"))
        >>> x.sharding == plan.in_shardings[0]
        True
        """
        self._refuse_abstract_mesh()
        signature, leaves = self._read(args, {})
        static = argument_positions(
            self._reader.options.parameters.static[0], len(args), "static_argnums"
        )
        self._signature.check_structure(signature)
        arrays = [x.parts if isinstance(x, Padded) else x for x in leaves]
        refuse_taken(arrays, self._names, ())
        placed = [self.holding.placed(x, i) for i, x in enumerate(leaves)]
        held = iter(jax.tree.unflatten(signature.tree, placed)[0])
        return tuple(x if i in static else next(held) for i, x in enumerate(args))

    def lower(self) -> Any:
        """The `jax.stages.Lowered` of the plan's program, for `.compile()` and its HLO. What it
        compiles to is called as the function is, without static arguments. On an abstract mesh it
        has `.as_text()` and does not compile."""
        return _jax.with_structures(self._executable.lower(), *self.holding.structures())

    @takes("Plan.report", skip=1, refine=FLAG)
    def report(self, *, refine: bool = False) -> Report:
        """The type report of the plan.

        Under boxing "auto", the report warns of annotations without which the plan is at least 10 %
        cheaper. To find them, sbp chooses the types again without each annotation. In a large
        program the report leaves annotations out and says how many.

        Arguments:
          refine: True checks up to 20 annotations, whatever the size of the program. A bar shows
            how many choices of types are left; the plans of costly annotations come after it.

        >>> import sbp
        >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
        >>> f = sbp.jit(lambda x: (x * x).sum(), mesh, in_types=("data:S(0)",))
        >>> f.plan(jax.ShapeDtypeStruct((8,), "float32")).report().diagnostics
        ()
        """
        if self._diagnostics is None or refine:
            costly = ()
            if self.program.request.boxing == "auto":
                with counting_down("choices of types", shown=refine) as solving:
                    costly = costly_annotations(self.program, refine=refine, solving=solving)
            self._diagnostics = (
                *costly,
                *gathered_matrices(self.program),
                *unchecked_regions(self.program),
            )
            self.program.request.caches.clear()
        return Report(
            program=self.program,
            diagnostics=(*self.noted, *self._diagnostics),
            title=self._reader.name,
            output_names=self.results.names,
        )

    @takes("Plan.why", skip=1, refine=FLAG)
    def why(self, name: str | int, *, refine: bool = False) -> Explanation:
        """Why a value has its type: where the type comes from, the price of other types, and the
        reasons of the value's conversions.

        The price of a type is that of the plan of the program with the value annotated to it. In a
        large program these plans take minutes: the first answer makes few of them or none, and says
        how many types it did not try.

        Arguments:
          name: a variable, an input such as "params['w']", an output, a line ("ffn.py:12", 12), or
              "gradient of line 12".
          refine: True plans up to 28 other types, whatever the size of the program, and shows the
              progress.

        Returns:
          An answer that shows itself in the terminal and in notebooks; its `why` has the figures.

        Raises:
          SbpError: `bad-argument` when nothing has that name, with the nearest names.

        >>> import sbp
        >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
        >>> f = sbp.jit(lambda x: (x * x).sum(), mesh, in_types=("data:S(0)",))
        >>> found = f.plan(jax.ShapeDtypeStruct((8,), "float32")).why("result").why
        >>> found.type, [(c.steps[0].kind, c.bytes_per_device) for c in found.conversions]
        (B, [('all_reduce', 4.0)])
        """
        with counting_down("plans", shown=refine) as planning:
            found = why(self.program, name, self.results.names, refine=refine, planning=planning)
        self.program.request.caches.clear()
        return explanation(found, self.program.mesh)

    @takes("Plan.diff", skip=1, other=Kind("another plan", lambda x: isinstance(x, Plan)))
    def diff(self, other: "Plan") -> Comparison:
        """The differences between this plan and another plan of the same or a similar function:
        costs, types of inputs, outputs and values, conversions, and which settings differ.

        Arguments:
          other: a plan under another policy, mesh or hardware, or with other annotations. Values
            are matched by name and by the text of their line.

        Returns:
          A comparison that shows itself in the terminal and in notebooks; its `difference` has the
          figures.

        Raises:
          SbpError: `bad-argument` when `other` is no plan.

        >>> import sbp
        >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> this, other = (sbp.jit(lambda x: x @ x, mesh, in_types=(t,)).plan(x)
        ...     for t in ("data:S(0)", "data:S(1)"))
        >>> [value.name for value in this.diff(other).difference.inputs]
        ['x']
        """
        return comparison(
            (self._reader.name, other._reader.name),
            (self.program, other.program),
            (self.results.names, other.results.names),
        )

    @takes("Plan.save", skip=1)
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file, from which `sbp.jit(.., plan=path)` runs it without planning.

        The file is JSON: what the plan was made for (program, mesh, hardware, options, versions of
        sbp and JAX), the types of its values, and its text.

        Arguments:
          path: the file; one that exists is replaced.

        Raises:
          SbpError: `bad-argument` where the file cannot be written.
        """
        write_file(path, SavedPlan.of(self.program).dumps())

    def export(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as an artifact of `jax.export`, which runs where sbp is not installed.

        The file is for the platform of the mesh, and for as many devices. It takes the arguments of
        the function without static ones, and donates none. Give it arrays that lie as the plan
        takes them: `exported.in_shardings_jax(mesh)` has their shardings, for a mesh of the same
        axes, of type Auto. The package `flatbuffers` writes and reads such files.

        Arguments:
          path: the file; one that exists is replaced.

        Raises:
          SbpError: `bad-argument` where JAX cannot export the program, such as one with a callback,
            or with arguments or results in classes that `jax.export` does not know, and where the
            file cannot be written.

        >>> import sbp, tempfile
        >>> f = sbp.jit(lambda x: 2 * x, sbp.make_mesh((1,), ("data",)))
        >>> plan = f.plan(jax.ShapeDtypeStruct((2,), "float32"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plan.export(f"{folder}/double")
        ...     exported = jax.export.deserialize(Path(folder, "double").read_bytes())
        >>> exported.call(jax.numpy.ones(2)).tolist()
        [2.0, 2.0]
        """
        executable, platform = self._executable, self.program.mesh.hardware.platform
        platforms = (platform,) if isinstance(self._reader.mesh, AbstractMesh) else None
        ins, outs = self.holding.structures()
        args, kwargs = jax.tree.unflatten(ins, executable.shapes)

        def program(*args: Any, **kwargs: Any) -> Any:
            return jax.tree.unflatten(outs, executable.inner_jit(*jax.tree.leaves((args, kwargs))))

        program.__name__ = self._reader.name
        jitted = jax.jit(program, out_shardings=self.out_shardings)
        try:
            with _jax.without_context_mesh():
                exported = jax.export.export(jitted, platforms=platforms)(*args, **kwargs)
            data = bytes(exported.serialize())
        # JAX says what it cannot export, such as a callback or an unknown class.
        except (ValueError, TypeError, NotImplementedError, ImportError) as error:
            own = next((k.__name__ for k in (Partial, Padded) if k.__name__ in str(error)), None)
            advice = "return whole arrays, or write the plan with plan.source(path)"
            why = f"jax.export does not know sbp.{own}; {advice}" if own else str(error)
            raise refused(f"plan.export: {why}", error) from error
        write_file(path, data)

    def source(self, path: str | os.PathLike[str] | None = None) -> str:
        """The plan as a Python file that imports `jax` and nothing of sbp.

        The file has one function for the body of `jax.shard_map`, for each body of a loop or a
        branch, and for each kernel of several operations. A comment behind a line has the type of
        its value and the user's line; for a collective also the bytes that a device sends, and the
        operation that needs the result. The file is for one platform, that of the mesh. It makes
        its mesh with `jax.make_mesh`. For an `sbp.Partial` or `sbp.Padded`, it has the array of its
        parts.

        Arguments:
          path: the file to write; one that exists is replaced. Large arrays that the function
            closes over are in a file beside it, which ends in `.npz`.

        Returns:
          The text of the file.

        Raises:
          SbpError: `bad-argument` for an operation that has no source, such as a callback or a
            kernel in Pallas, for an array in host memory, and for a file name that does not end in
            .py. You get it also if JAX has other settings now than when the plan was made, and if
            the file cannot be written.

        >>> import sbp
        >>> f = sbp.jit(lambda x: 2 * x, sbp.make_mesh((1,), ("data",)))
        >>> text = f.plan(jax.ShapeDtypeStruct((2,), "float32")).source()
        >>> [line for line in text.splitlines() if " = 2.0 * x" in line]
        ['    mul = 2.0 * x  # B, at <doctest sbp.api.plan.Plan.source[1]>:1']
        """
        if _jax.trace_key(self._reader.mesh) != self._signature.key[-1]:
            raise SbpError(
                "plan.source runs under the settings of JAX that the plan was made under, such as"
                " jax.enable_x64; call it there"
            )
        if path is not None and not str(path).endswith(".py"):
            raise refused(f"the name of the file must end in .py, got {path!r}", ValueError)
        text, arrays = emit(self.holding)
        if path is not None:
            if arrays:
                data: Any = io.BytesIO()
                np.savez(data, **arrays)
                write_file(Path(path).with_suffix(".npz"), data.getvalue())
            write_file(path, text)
        return text

    def certificate(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan's claims as JSON, which `tools/certify.py` checks without sbp.

        Arguments:
          path: the file; one that exists is replaced.

        Raises:
          SbpError: `bad-argument` if the file cannot be written.

        >>> import json, sbp, tempfile
        >>> f = sbp.jit(lambda x: (x * x).sum(), jax.sharding.AbstractMesh((2,), ("data",)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     f.plan(jax.ShapeDtypeStruct((8,), "float32")).certificate(f"{folder}/sum.json")
        ...     json.loads(Path(folder, "sum.json").read_text())["arguments"]
        [['x', 'B']]
        """
        write_file(path, certificate(self.program, self.results.names))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Plan":
        return self

    def __repr__(self) -> str:
        return str(self.program)

    def _run(self, leaves: Sequence[Any]) -> Any:
        """Runs on flat arguments. An argument with another sharding than `in_shardings` is moved;
        the first such call gives a warning. Of several processes, all run the plan.

        Raises:
          SbpError: `abstract-mesh` for a plan on an abstract mesh; `bad-argument` for a shape in
            place of an array, for a deleted array, and for a donated one that is passed twice; with
            several processes `processes-differ` where they run different plans, and `bad-argument`
            for a NumPy array that is pinned split.
        """
        self._refuse_abstract_mesh()
        flat, whole, moved_before = self.holding.taken(leaves)
        refuse_taken(flat, self._names, self._donated)
        if self._joint is not None:
            flat = self._joint.arguments(flat, whole)
        try:
            outs = self._executable(flat)
        except ValueError:
            moved = self._move(flat, moved_before)
            if moved is None:  # JAX complains of something else
                raise
            outs = self._executable(moved)
        else:
            self._warn_moved(moved_before)
        return jax.tree.unflatten(self.results.tree, self.holding.results(outs))

    def _inlined(self, flat: Sequence[Any]) -> list[Any]:
        """The flat results for flat arrays, inside a transformation of JAX."""
        if _jax.is_staged(flat):
            with _jax.without_context_mesh():
                return list(self._executable.inner_jit(*flat))
        return jax.tree.leaves(self._run(flat))

    def _refuse_abstract_mesh(self) -> None:
        if isinstance(self._reader.mesh, AbstractMesh):
            raise SbpError(
                "a plan on an AbstractMesh can be lowered, not run; make a jax.sharding.Mesh over"
                " devices",
                code="abstract-mesh",
            )

    def _move(self, flat: list[Any], names: Sequence[str]) -> list[Any] | None:
        """The arguments, moved to where the plan takes them; None where all of them are there.

        Arguments:
          flat: the arguments.
          names: of arguments that were moved before.
        """
        moved = [
            self._executable.placed(i, x) if isinstance(x, jax.Array) else x
            for i, x in enumerate(flat)
        ]
        each = list(zip(self._names, flat, moved, strict=True))
        if all(x is there for _, x, there in each):
            return None
        others = (name for name, x, there in each if there is not x and x.committed)
        self._warn_moved(list(dict.fromkeys((*names, *others))))
        return moved

    def _warn_moved(self, names: Sequence[str]) -> None:
        """Gives one warning for the arguments that were moved."""
        if names and not self._moved:
            self._moved = True
            warn(
                "input-moved",
                "sbp",
                f"moved {counted(len(names), 'input')} ({listed(names)}) from other devices or"
                " another layout, and does so again in each call with such arrays; put long-lived"
                " arrays in plan.in_shardings once, with jax.device_put(x, sharding)",
            )


def make_plan(reader: CallReader, signature: CallSignature, tracer: Tracer | None = None) -> Plan:
    """The plan for a call, with the warnings that were given on the way.

    Arguments:
      reader: the function with its mesh and options.
      signature: the call.
      tracer: makes the graph; None for `sbp.trace.build.trace`.

    Raises:
      SbpTypeError: where the program has no typing; its diagnostics say why.
    """
    with noting() as noted:
        traced = traced_call(reader, signature, tracer)
        request, limit = traced.request, traced.request.memory_limit
        if reader.options.plan is not None:
            program = load_program(reader.options.plan, request)
        else:
            program, least = fit(request)
            if program is None:
                raise SbpTypeError(
                    explain(request)
                    if least is None or limit is None
                    else (memory_diagnostic(least, limit),),
                    functools.partial(refutation, request),
                )
        request.caches.clear()  # the plan may live long, and does not need them
        plan = Plan(reader, signature, program, traced)
    plan.noted = tuple(noted)
    return plan


# ---- plans in tests -----------------------------------------------------------------------------


UPDATE = "SBP_UPDATE_PLANS"
"""The environment variable that, set to 1, writes the files anew."""

_HEAD = "sbp plan, for assert_plan_unchanged; form 1"


@takes(
    "sbp.assert_plan_unchanged",
    plan=instance_of(Plan, "sbp.jit(..).plan"),
    update=FLAG,
)
def assert_plan_unchanged(
    plan: Plan, file: str | os.PathLike[str], *, update: bool = False
) -> None:
    """Compares a plan with the plan in a file. In a test, it shows the edit that makes a step send
    more.

    The file is text. It has the mesh, the strategy of each mesh axis, the bytes that one device
    sends and holds, the types of inputs and outputs, and the collectives with the code that they
    are for. It has no line numbers and no times. The environment variable `SBP_UPDATE_PLANS=1`
    writes it, as `update` does.

    Arguments:
      plan: the plan.
      file: the file, to be kept with the tests.
      update: write the file in place of the comparison.

    Raises:
      AssertionError: if the plans differ, with the lines that differ; and if the file is missing.
      SbpError: `saved-plan` for a file that is not one of these, or cannot be read or written.

    >>> import jax, sbp, tempfile
    >>> mesh = jax.sharding.AbstractMesh((2,), ("data",))
    >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
    >>> this, other = (sbp.jit(lambda x: x @ x, mesh, in_types=(t,)).plan(x)
    ...     for t in ("data:S(0)", "data:S(1)"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sbp.assert_plan_unchanged(this, f"{folder}/plan.txt", update=True)
    ...     sbp.assert_plan_unchanged(this, f"{folder}/plan.txt")
    ...     try:
    ...         sbp.assert_plan_unchanged(other, f"{folder}/plan.txt")
    ...     except AssertionError as error:
    ...         print([line for line in str(error).splitlines() if line.startswith("-input")])
    ['-input x: f32[8,8] data:S(0)']
    """
    path, text = path_of(file, "file"), "\n".join(_lines(plan)) + "\n"
    if update or os.environ.get(UPDATE) == "1":
        return write_file(path, text)
    how = f"run the test once with {UPDATE}=1, look at the file, and keep it"
    if not os.path.exists(path):
        raise AssertionError(f"{path} is missing: {how}")
    kept = read_file(path, how)
    if not kept.startswith(_HEAD):
        raise SbpError(f"{path} is not a file of assert_plan_unchanged: {how}", code="saved-plan")
    if kept != text:
        said = difflib.unified_diff(
            kept.splitlines(), text.splitlines(), path, "this plan", lineterm="", n=1
        )
        raise AssertionError(
            "\n".join(["the plan has changed:", *said, f"Where that is meant, {how}"])
        )


def _lines(plan: Plan) -> list[str]:
    """The lines of the file for a plan."""
    program, flows = plan.program, ProgramFlows(plan.program)
    ends = ("input", inputs(program)), ("output", outputs(program, plan.report().output_names))
    places = [(f"{stop.phase} `{stop.text}`", stop.sends) for stop in flows.stops]
    return [
        _HEAD,
        f"mesh {program.mesh}",
        *(f"strategy of {axis}: {text}" for axis, text in strategy(program).items()),
        f"sent: {program.cost.bytes_per_device:,.0f} bytes per device",
        f"peak memory: {program.cost.peak_memory_bytes:,.0f} bytes per device",
        *(f"{kind} {t.name}: {t.shape} {t.type!r}" for kind, tensors in ends for t in tensors),
        *(
            f"{place}: {one.kind} on {one.axes}, {one.change}, {one.runs} runs,"
            f" {one.bytes:,.0f} bytes"
            for place, found in (*places, ("returned", flows.results.sends))
            for one in found
        ),
    ]
