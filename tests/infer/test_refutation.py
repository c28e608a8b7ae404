"""The core of a program without a typing, which another SMT solver refutes."""

import copy

import jax
import jax.numpy as jnp
import pytest

import sbp
from tests.cases import GRID, shape


def columns_twice(x, w_in, w_out):
    w_in, w_out = sbp.split(w_in, 1, "model"), sbp.split(w_out, 1, "model")
    return jax.nn.relu(x @ w_in) @ w_out


def reduced_too_late(x, w):
    y = sbp.split(x, 1, "model") @ sbp.split(w, 0, "model")
    return jnp.tanh(y)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (columns_twice, [(64, 32), (32, 64), (64, 32)]),
        (reduced_too_late, [(64, 32), (32, 64)]),
    ],
)
def test_another_solver_refutes_the_core(function, shapes):
    cvc5 = pytest.importorskip("cvc5", reason="the environment of the newest JAX has no cvc5")
    with pytest.raises(sbp.SbpTypeError) as caught:
        sbp.jit(function, GRID, boxing="explicit").plan(*(shape(*s) for s in shapes))
    lines = caught.value.smt2().splitlines()
    with pytest.raises(sbp.SbpError, match="no text for an SMT solver"):
        copy.copy(caught.value).smt2()
    named = [line for line in lines if ":named" in line]

    def answer(without):
        solver, symbols = cvc5.Solver(), None
        symbols = cvc5.SymbolManager(solver)
        parser = cvc5.InputParser(solver, symbols)
        text = "\n".join(line for line in lines if line != without and "get-unsat" not in line)
        parser.setStringInput(cvc5.InputLanguage.SMT_LIB_2_6, text, "core")
        found = []
        while not (command := parser.nextCommand()).isNull():
            found.append(command.invoke(solver, symbols))
        return found[-1].strip()

    assert len(named) >= 3 and answer(None) == "unsat"
    assert {answer(line) for line in named} == {"sat"}
