"""The collector's thresholds are as they were once nobody plans any more."""

import gc
import threading

import pytest

from sbp.trace.collector import YOUNG, collecting_less


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 11, 12)
    yield (700, 11, 12)
    gc.set_threshold(*before)


def test_what_was_comes_back_after_an_error_inside(thresholds):
    with pytest.raises(ZeroDivisionError), collecting_less(), collecting_less():
        assert gc.get_threshold() == (YOUNG, 11, 12)
        _ = 1 / 0
    assert gc.get_threshold() == thresholds


def test_the_last_thread_that_leaves_puts_it_back(thresholds):
    entered, leave = threading.Event(), threading.Event()

    @collecting_less()
    def plan():
        entered.set()
        leave.wait(10)

    with collecting_less():
        other = threading.Thread(target=plan)
        other.start()
        assert entered.wait(10)
    assert gc.get_threshold() == (YOUNG, 11, 12)  # the other is still inside
    leave.set()
    other.join()
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("own", [(0, 10, 10), (200_000, 10, 10)])
def test_a_collector_that_is_off_or_comes_less_often_stays_as_it_is(own, thresholds):
    gc.set_threshold(*own)
    with collecting_less():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own
