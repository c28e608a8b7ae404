"""What `make peer` reports as an error, on outcomes written by hand."""

from xml.etree import ElementTree

from tests.peer.run import Outcome, Reason, faults, outcome, reasons

PASSED = Outcome(name="m.C.testA", kind="passed", text="", calls=1, differ=False)
FAILED = Outcome(name="m.C.testA", kind="failed", text="boom", calls=1, differ=False)
WRONG = Outcome(name="m.C.testA", kind="failed", text="3 of 4 elements", calls=1, differ=True)
LISTED = Reason(tests="m.C.test*", why="no such device")


def found(o: Outcome, *listed: Reason, plain: Outcome = PASSED, whole: bool = True) -> list[str]:
    return faults("free", {o.name: o}, {plain.name: plain}, listed, whole)


def test_a_failure_needs_a_reason():
    assert "no reason names it: boom" in found(FAILED)[0]
    assert "with plain jax.jit too" in found(FAILED, plain=FAILED)[0] and not found(FAILED, LISTED)
    assert not found(PASSED)


def test_a_reason_needs_a_failure():
    assert "passes, but reasons.toml" in found(PASSED, LISTED)[0]
    assert "names no test" in found(PASSED, Reason(tests="m.D.*", why=""))[0]
    assert not found(PASSED, Reason(tests="m.D.*", why=""), whole=False)
    assert not found(PASSED, Reason(tests="m.C.testA", why="", modes=("pins",)))


def test_a_reason_about_plain_jax_is_checked():
    both = Reason(tests="m.C.testA", why="newer JAX", plain=True)
    assert not found(FAILED, both, plain=FAILED)
    assert "plain jax.jit fails too; it passes" in found(FAILED, both)[0]


def test_a_wrong_value_has_no_excuse():
    assert "a wrong value: 3 of 4 elements" in found(WRONG, LISTED)[0]
    assert not found(WRONG, LISTED, plain=WRONG)


def test_outcomes_are_read_from_pytest():
    case = ElementTree.fromstring(
        """<testcase classname="tests.peer.jax_tests.nn_test.C" name="testA"><properties>
        <property name="calls" value="3"/><property name="values" value="differ"/></properties>
        <failure message="AssertionError:&#10;Not  equal">at</failure></testcase>"""
    )
    want = Outcome(
        name="nn_test.C.testA",
        kind="failed",
        text="AssertionError: Not equal",
        calls=3,
        differ=True,
    )
    assert outcome(case) == want


def test_every_reason_says_why():
    assert all(r.why and r.tests for r in reasons())
