"""`sbp.assert_plan_unchanged`: a test of the user's that a plan is what it was."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sbp.api.plan import Plan
from sbp.errors import SbpError
from sbp.kinds import FLAG, Kind, instance_of, takes
from sbp.report.facts import inputs, outputs, strategy
from sbp.report.flows import program_flows

UPDATE = "SBP_UPDATE_PLANS"
"""The environment variable that, set to 1, writes the files anew."""

_HEAD = "sbp plan, for assert_plan_unchanged; form 1"


def _is_path(x: Any) -> bool:
    try:
        return isinstance(x, str | os.PathLike) and b"\0" not in os.fsencode(x)
    except ValueError:  # of a lone surrogate
        return False


_PATH = Kind("the path of a file", _is_path)


@takes(
    "sbp.assert_plan_unchanged", plan=instance_of(Plan, "sbp.jit(..).plan"), file=_PATH, update=FLAG
)
def assert_plan_unchanged(
    plan: Plan, file: str | os.PathLike[str], *, update: bool = False
) -> None:
    """Compares a plan with the one that a file tells of, for tests: an edit that makes a step send
    more is seen where it is made.

    The file has, as text, the mesh, the strategy of each mesh axis, the bytes that one device sends
    and holds, the types of inputs and outputs, and the collectives with the code that they are for.
    It has no line numbers and no times. The environment variable `SBP_UPDATE_PLANS=1`
    writes it, as `update` does.

    Arguments:
      plan: the plan.
      file: the file, to be kept with the tests.
      update: write the file in place of the comparison.

    Raises:
      AssertionError: where they differ, with the lines that do; and where the file is missing.
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
    path, text = Path(file), "\n".join(_lines(plan)) + "\n"
    if update or os.environ.get(UPDATE) == "1":
        try:
            path.write_text(text, "utf-8")
        except OSError as error:
            raise _bad(f"cannot write {path}: {error.strerror}") from None
        return
    how = f"run the test once with {UPDATE}=1, look at the file, and keep it"
    try:
        kept = path.read_text("utf-8")
    except FileNotFoundError:
        raise AssertionError(f"{path} is missing: {how}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(f"cannot read {path}: {error}") from None
    if not kept.startswith(_HEAD):
        raise _bad(f"{path} is not a file of assert_plan_unchanged: {how}")
    if kept != text:
        said = difflib.unified_diff(
            kept.splitlines(), text.splitlines(), str(path), "this plan", lineterm="", n=1
        )
        raise AssertionError(
            "\n".join(["the plan has changed:", *said, f"Where that is meant, {how}"])
        )


def _lines(plan: Plan) -> Iterator[str]:
    """The plan as the file tells it."""
    program = plan.program
    yield _HEAD
    yield f"mesh {program.mesh}"
    for axis, text in strategy(program).items():
        yield f"strategy of {axis}: {text}"
    yield f"sent: {program.cost.bytes_per_device:,.0f} bytes per device"
    yield f"peak memory: {program.cost.peak_memory_bytes:,.0f} bytes per device"
    for kind, tensors in (
        ("input", inputs(program)),
        ("output", outputs(program, plan.report().output_names)),
    ):
        for tensor in tensors:
            yield f"{kind} {tensor.name}: {tensor.shape} {tensor.type!r}"
    flows = program_flows(program)
    places = [(f"{stop.phase} `{stop.text}`", stop.sends) for stop in flows.stops]
    for place, found in (*places, ("returned", flows.results.sends)):
        for one in found:
            yield (
                f"{place}: {one.kind} on {one.axes}, {one.change}, {one.runs} runs,"
                f" {one.bytes:,.0f} bytes"
            )


def _bad(message: str) -> SbpError:
    return SbpError(message, code="saved-plan")
