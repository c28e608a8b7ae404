"""The order of helps."""

from sbp.errors import Help
from sbp.explain.helps import RankedHelp, choose


def accepted(number, kind, bytes_, seconds=1.0):
    help_ = Help(
        text=f"{kind} {number}",
        edits=(),
        bytes_per_device=bytes_,
        peak_memory_bytes=None,
        clears_all_errors=True,
    )
    return RankedHelp(help_, kind, seconds)


def order(*found):
    return [f.help.text for f in choose(found, 3)]


def test_another_split_that_is_no_dearer_than_a_conversion_comes_first():
    split, conversion = accepted(1, "pin", 8.0), accepted(0, "conversion", 8.0)
    assert order(conversion, split) == ["pin 1", "conversion 0"]
    assert order(conversion, accepted(1, "pin", 9.0)) == ["conversion 0", "pin 1"]


def test_a_pin_whose_split_a_conversion_takes_back_comes_before_the_conversion():
    conversion = accepted(0, "conversion", 8.0)
    assert order(conversion, accepted(1, "other pin", 8.0)) == ["other pin 1", "conversion 0"]
    # A cheaper plan is another one: a weight that is B sends nothing, and takes more memory.
    assert order(conversion, accepted(1, "other pin", 0.0)) == ["conversion 0", "other pin 1"]
    slower = accepted(1, "other pin", 8.0, seconds=2.0)
    assert order(conversion, slower) == ["conversion 0", "other pin 1"]


def test_one_help_of_each_place_is_shown():
    found = [accepted(n, "conversion", float(n)) for n in range(3)]
    assert order(*found, accepted(3, "policy", 0.0), accepted(4, "drop", 5.0)) == [
        "conversion 0",
        "drop 4",
        "policy 3",
    ]
