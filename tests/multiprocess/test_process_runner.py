"""The runner stops processes that hang, labels each line with its process, and counts a test once
for all processes."""

import io
import sys

from tests.multiprocess.run import together, verdicts

WAIT = [sys.executable, "-c", "import signal; print('waiting', flush=True); signal.pause()"]
FAIL = [sys.executable, "-c", "print('[Gloo] noise'); print('no such mesh'); exit(3)"]
PASS = [sys.executable, "-c", "import os; print(os.environ['MINE'])"]


def test_all_processes_end_well():
    out = io.StringIO()
    ended = together([PASS, PASS], [{"MINE": "a"}, {"MINE": "b"}], seconds=60, out=out)
    assert ended.ok and ended.codes == [0, 0] and ended.said == [["a"], ["b"]]
    assert sorted(out.getvalue().splitlines()) == ["[0] a", "[1] b"] and not ended.why


def test_the_others_are_killed_after_one_has_failed():
    ended = together([WAIT, FAIL], [{}, {}], seconds=600, grace=0.0)
    assert not ended.ok and ended.codes == [None, 3]
    assert ended.said[1] == ["no such mesh"] and ended.why == "process 1 had failed"


def test_all_are_killed_when_the_time_is_over():
    ended = together([WAIT, WAIT], [{}, {}], seconds=0.0)
    assert ended.codes == [None, None] and ended.why == "0 seconds were over"


def test_a_test_passes_where_it_passes_in_all_processes(tmp_path):
    case = lambda name, inside="": f'<testcase classname="m" name="{name}">{inside}</testcase>'
    first, second = tmp_path / "0.xml", tmp_path / "1.xml"
    everywhere = case("good") + case("skip", "<skipped/>")
    first.write_text(f"<r>{everywhere}{case('bad')}{case('late')}</r>")
    second.write_text(f"<r>{everywhere}{case('bad', '<failure/>')}</r>")
    found = verdicts([first, second])
    assert found == {"m::bad": "failed", "m::good": "passed", "m::late": "error"} | {
        "m::skip": "skipped"
    }
    killed = verdicts([first, tmp_path / "killed.xml"])
    assert killed.pop("killed") == "error" and killed.pop("m::skip") == "skipped"
    assert killed == {"m::bad": "passed", "m::good": "passed", "m::late": "passed"}
