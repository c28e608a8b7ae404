"""Programs that carry their expected diagnostics as comments.

`# error: CODE: TEXT` (or `# warning: ..`) stands on the line of a primary label and is part of the
title, `# and: TEXT` on the line of a secondary label. Each diagnostic needs its comment, and each
comment its diagnostic.
"""

import inspect
import re

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

import sbp
from sbp.errors import Diagnostic
from sbp.limits import Policy
from tests.edits import check_helps, is_policy

MESH = AbstractMesh((8,), ("tensor",))
MESH_2D = AbstractMesh((2, 4), ("data", "tensor"))


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


SQUARE = shape(1024, 1024)


def diagnose(
    fn, *args, boxing: Policy = "explicit", in_types=None, mesh=MESH
) -> tuple[Diagnostic, ...]:
    """The diagnostics of a program, matched with what its source expects."""
    options = {"in_types": in_types, "boxing": boxing}
    found = sbp.jit(fn, mesh, in_types=in_types, boxing=boxing).check(*args).diagnostics
    check_helps(fn, mesh, options, args, found)
    lines, start = inspect.getsourcelines(fn)
    errors: list[tuple[int, str, str]] = []
    seconds: list[tuple[int, str]] = []
    for number, line in enumerate(lines, start):
        errors += [
            (number, code, text.strip())
            for code, text in re.findall(
                r"# (?:error|warning): ([\w-]+): (.*?)(?=# |$)", line.rstrip()
            )
        ]
        seconds += [
            (number, text.strip()) for text in re.findall(r"# and: (.*?)(?=# |$)", line.rstrip())
        ]
    for d in found:
        assert d.primary is not None, d.text()
        match = next(
            (e for e in errors if e[:2] == (d.primary.span.line, d.code) and e[2] in d.title), None
        )
        assert match is not None, f"not expected:\n{d.text()}"
        errors.remove(match)
        for label in d.labels:
            if not label.primary:
                one = next(
                    (s for s in seconds if s[0] == label.span.line and s[1] in label.text), None
                )
                assert one is not None, f"not expected: {label}"
                seconds.remove(one)
        check_wording(d)
    assert not errors, f"no diagnostic for {errors}"
    assert not seconds, f"no label for {seconds}"
    return found


def check_wording(d: Diagnostic) -> None:
    """The rules of style that a machine can check."""
    assert not d.title.endswith(".")
    assert not re.search(r"illegal|failed|expected|actual", d.text())
    assert len(d.helps) <= 3
    by_policy = [any(is_policy(e) for e in h.edits) for h in d.helps]
    assert by_policy == sorted(by_policy)
    assert sum(label.primary for label in d.labels) == 1
    if d.severity == "error":
        assert d.helps, d.text()


def rows(d: Diagnostic) -> list[str]:
    return [f"{' '.join(r.inputs)} -> {' '.join(r.outputs)}: {r.remark}" for r in d.rows]
