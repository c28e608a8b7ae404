"""What the benchmarks read from the text of compiled programs."""

import pytest

from benchmarks.hlo.schedule import CHIPS, step_time
from benchmarks.hlo.traffic import collectives

PROGRAM = """\
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (u32[], f32[8,4])) -> (u32[], f32[8,4]) {
  %p = (u32[], f32[8,4]) parameter(0)
  %i = u32[] get-tuple-element(%p), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %one = u32[] constant(1)
  %next = u32[] add(%i, %one)
  %work = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%add, CYCLES{"estimated_cycles":"10"}
  %r = f32[8,4]{1,0} all-reduce(%work), replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (u32[], f32[8,4]) tuple(%next, %r)
}

%cond (p: (u32[], f32[8,4])) -> pred[] {
  %p = (u32[], f32[8,4]) parameter(0)
  %i = u32[] get-tuple-element(%p), index=0
  BOUND
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %zero = u32[] constant(0)
  %init = (u32[], f32[8,4]) tuple(%zero, %x)
  %loop = (u32[], f32[8,4]) while(%init), condition=%cond, body=%bodyTRIPS
  %out = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  ROOT %last = f32[8,4]{1,0} fusion(%out), kind=kLoop, calls=%add, CYCLES{"estimated_cycles":"5"}
}
""".replace("CYCLES", "backend_config=")

BOUNDS = {
    "signed": ("%bound = s32[] constant(7)", ""),
    "unsigned": ("%bound = u32[] constant(7)", ""),
    "laid out": ("%bound = u32[]{:T(128)} constant(7)", ""),
    "known": (
        "%bound = u32[] get-tuple-element(%p), index=0",
        ', backend_config={"known_trip_count":{"n":"7"}}',
    ),
}


@pytest.mark.parametrize("kind", BOUNDS)
def test_a_loop_counts_once_per_trip(kind):
    bound, trips = BOUNDS[kind]
    text = PROGRAM.replace("BOUND", bound).replace("TRIPS", trips)
    (found,) = collectives(text, 2)
    assert (found.executions, found.bytes_per_device) == (7, 7 * 8 * 4 * 4)
    step = step_time(text, 2)
    assert (step.cycles, step.unknown) == (7 * 10 + 5, ())
    v5e = CHIPS["v5e"]
    assert step.exposed == pytest.approx(7 * (v5e.latency + 8 * 4 * 4 / v5e.bandwidth))
    assert step.bytes_per_device == 7 * 8 * 4 * 4


def test_a_loop_without_a_bound_is_named():
    bound = "%bound = u32[] get-tuple-element(%p), index=0"
    text = PROGRAM.replace("BOUND", bound).replace("TRIPS", "")
    assert step_time(text, 2).unknown == ("trips of loop",)
    assert [c.executions for c in collectives(text, 2)] == [1]


def test_cycles_that_the_compiler_does_not_know_are_named():
    text = PROGRAM.replace("BOUND", BOUNDS["unsigned"][0]).replace("TRIPS", "")
    text = text.replace('"estimated_cycles":"5"', f'"estimated_cycles":"{2**62}"')
    assert step_time(text, 2).unknown == ("cycles of last",)


def test_cycles_of_products_are_those_of_fusions_that_hold_one():
    """Seven turns of a fusion of ten cycles; an operation of five beside it holds none."""
    text = PROGRAM.replace("BOUND", BOUNDS["unsigned"][0]).replace("TRIPS", "")
    text = text.replace("fusion(%out), kind=kLoop, calls=%add", "copy(%out)")
    assert step_time(text, 2).products == 0
    product = "  %m = f32[] convolution(%a, %b), dim_labels=b_io->bf\n  ROOT %sum"
    assert step_time(text.replace("  ROOT %sum", product), 2).products == 7 * 10


def test_a_turn_of_a_collective_matmul_makes_several_steps():
    """Four permutes in the body are two steps each way."""
    condition = "windowed_dot_general_cond_ag.1"
    body = "windowed_dot_general_body_ag.1"
    permutes = "\n".join(
        f"  %permute.{k} = f32[8,4]{{1,0}} collective-permute(%x), source_target_pairs=PAIRS"
        for k in range(4)
    )
    permutes = permutes.replace("PAIRS", "{{0,1},{1,0}}")
    reduce = next(line for line in PROGRAM.splitlines() if " all-reduce(" in line)
    text = PROGRAM.replace("BOUND", "%bound = s32[] constant(8)").replace("TRIPS", "")
    text = text.replace("%cond", f"%{condition}").replace("%body", f"%{body}")
    text = text.replace(reduce, permutes + "\n  %r = f32[8,4]{1,0} copy(%permute.3)")
    assert [c.executions for c in collectives(text, 2)] == [4] * 4


ASYNCHRONOUS = """\
HloModule jit_step, is_scheduled=true

%SCATTERED (p: f32[8,4]) -> f32[4,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %whole = f32[8,4]{1,0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
  ROOT %own = f32[4,4]{1,0} slice(%whole), slice={[0:4], [0:4]}
}

ENTRY %main (x: f32[8,4], y: f32[1048576]) -> f32[4,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %y = f32[1048576]{0} parameter(1)
  %start = (f32[1048576], f32[2097152]) all-gather-start(%y), replica_groups={{0,1}}, dimensions={0}
  %work = f32[8,4]{1,0} fusion(%x), kind=kLoop, calls=%add, CYCLES{"estimated_cycles":"HIDDEN"}
  %done = f32[2097152]{0} all-gather-done(%start)
  ROOT %last = f32[4,4]{1,0} fusion(%work), calls=%SCATTERED, CYCLES{"estimated_cycles":"9"}
}
""".replace("CYCLES", "backend_config=").replace("SCATTERED", "all-reduce-scatter.1")


@pytest.mark.parametrize("hidden", [1000, 10_000, 10_000_000])
def test_a_collective_runs_beside_what_is_scheduled_until_its_done(hidden):
    """Of the all-gather counts what the work beside it leaves; the reduce-scatter in a fusion
    counts wholly, and once."""
    v5e = CHIPS["v5e"]
    gathered = v5e.latency + 4 * 2**20 / v5e.bandwidth
    scattered = v5e.latency + 8 * 4 * 4 / 2 / v5e.bandwidth
    step = step_time(ASYNCHRONOUS.replace("HIDDEN", str(hidden)), 2)
    assert step.cycles == hidden + 9
    left = max(0.0, gathered - hidden / v5e.hertz)
    assert step.exposed == pytest.approx(left + scattered)
    assert step.exposed_by_kind == pytest.approx(
        {"asynchronous all-gather": left, "synchronous reduce-scatter": scattered}
    )
    assert step.bytes_per_device == 4 * 2**20 + 8 * 4 * 4 / 2
    assert step.seconds == step.compute + step.exposed
