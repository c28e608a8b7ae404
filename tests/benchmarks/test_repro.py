"""The cases of `benchmarks.repro` plan without a TPU, and their choices do what their names say."""

import jax
import pytest

from benchmarks.repro import CASES


@pytest.mark.parametrize("name", CASES)
def test_choices_are_public_options_that_take_effect(name):
    case = CASES[name]
    sizes, axes = tuple(n for _, n in case.mesh), tuple(a for a, _ in case.mesh)
    mesh = jax.sharding.AbstractMesh(sizes, axes)
    sent: dict[str, set[str]] = {}
    for label, options in case.choices.items():
        program = case.plan(mesh, {"hardware": "tpu-v5e", **options}).program
        reductions = [
            step
            for planned in program.boxes()
            for step in planned.box.steps
            if step.kind in ("all_reduce", "reduce_scatter")
        ]
        wide = [step for step in reductions if step.wide]
        assert wide == (reductions if label == "sbp float32" else [])
        assert wide or label != "sbp float32"
        if "sbp bfloat16" in case.choices:
            rounded = [
                n for n, row in program.typing.rows.items() if "rounded_parts" in row.kernels
            ]
            assert len(rounded) == (label == "sbp bfloat16")
        sent[label] = {s.kind for operation, _ in program.kernels() for _, s in operation.sends}
    if "sbp rings" in sent:
        assert "permute" in sent["sbp rings"] and "permute" not in sent["sbp"]
