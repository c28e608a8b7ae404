"""Wrong uses of the public API are refused by an error of sbp that says what to change."""

from collections import Counter

import jax
import pytest

from sbp.errors import bytes_text
from tests.fuzz.misuse import Use, judge, misuses
from tests.fuzz.uses import uses
from tests.slices import sliced

pytestmark = pytest.mark.laws

EVERY = [m for use in uses() for m in misuses(use)]


@pytest.fixture(autouse=True)
def _whole_tracebacks():
    """JAX leaves its own frames out of tracebacks; who raised is read from them."""
    before = jax.config.jax_traceback_filtering  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


@pytest.mark.parametrize("use", uses(), ids=lambda use: use.name)
def test_wrong_uses_are_refused(use: Use):
    wrong = []
    for misuse in sliced(misuses(use), 1 / 6):
        outcome = judge(misuse)
        if outcome.failed:
            wrong.append(f"{misuse}: {outcome.verdict}\n{outcome.detail}")
    assert not wrong, f"{len(wrong)} of {use.name}\n" + "\n".join(wrong[:3])


@pytest.mark.parametrize("use", uses(), ids=lambda use: use.name)
def test_the_right_use_is_right(use: Use):
    use.call(*use.args, **use.kwargs)


def test_there_are_thousands():
    assert len(EVERY) > 10_000
    assert len({str(m) for m in EVERY}) == len(EVERY)


def users_function(x: int) -> int:
    return x + 1


def test_who_raises_is_read_from_the_traceback():
    theirs = Counter(judge(m).verdict for m in misuses(Use("theirs", users_function, (1,))))
    assert theirs["user"] and theirs["raw"] == 7  # a wrong number of arguments is not the body's
    ours = Counter(judge(m).verdict for m in misuses(Use("unchecked", bytes_text, (1,))))
    assert ours["raw"] > 20
