"""For every broken program, sbp names the right line and a minimal reason, and each help does what
its text says. Golden files hold the texts and the HTML."""

import functools
import re
from pathlib import Path

import pytest

from sbp.report.report import Report
from sbp.source.reader import source_text
from tests.edits import is_policy
from tests.gallery.broken import GALLERY, Broken, expectations
from tests.gallery.repair import load, pinned_inputs, pins_of, repaired, without_pins
from tests.report.golden import assert_golden

FOLDER = Path(__file__).parent / "golden"

load()


@functools.cache
def report_of(name: str) -> tuple[Broken, Report]:
    """A program and its report, which is made once."""
    return GALLERY[name], GALLERY[name].check()


everything = pytest.mark.parametrize("name", list(GALLERY))


def test_the_gallery_is_large_and_of_distinct_causes():
    assert len(GALLERY) >= 30
    assert len({b.cause for b in GALLERY.values()}) == len(GALLERY)


@everything
def test_it_says_what_the_source_expects(name):
    """Each diagnostic has its line, and each expected line its diagnostic."""
    entry, report = report_of(name)
    primary, secondary = expectations(entry)
    assert report.diagnostics
    for d in report.diagnostics:
        if d.primary is None:
            code, title = entry.unlabelled or ("", "")
            assert code == d.code and title in d.title, d.text()
            continue
        place = (d.primary.span.line, d.code)
        match = [e for e in primary if e[:2] == place and e[2] in d.title]
        assert match, f"not expected:\n{d.text()}"
        primary.remove(match[0])
        for label in d.labels:
            if not label.primary:
                found = [s for s in secondary if s[0] == label.span.line and s[1] in label.text]
                assert found, f"not expected: {label}"
                secondary.remove(found[0])
    assert (primary, secondary) == ([], [])


@everything
def test_wording(name):
    """The rules of style that a machine can check."""
    entry, report = report_of(name)
    for d in report.diagnostics:
        said = "\n".join(
            (
                d.title,
                d.rule,
                *(label.text for label in d.labels),
                *d.notes,
                *(h.text for h in d.helps),
            )
        )
        assert (
            not re.search(r"illegal|failed|expected|actual\b|invalid", said)
            or d.code == "type-syntax"
        ), said
        assert not d.title.endswith(".")
        assert d.title[0] in "`'\"" or d.title[0].islower() or d.title.startswith(("S(", "P("))
        assert len(d.helps) <= 3 and len({h.text for h in d.helps}) == len(d.helps)
        by_policy = [any(is_policy(e) for e in h.edits) for h in d.helps]
        assert by_policy == sorted(by_policy)
        assert not d.labels or sum(label.primary for label in d.labels) == 1
        assert bool(d.helps) != bool(entry.no_help), (
            f"helps {d.helps}, and none expected because: {entry.no_help or '-'}"
        )


@everything
def test_the_core_is_minimal(name):
    """The pins that are named have no typing even when there are no others, and have one when any
    of them goes, too."""
    entry, report = report_of(name)
    for d in report.diagnostics:
        if d.code not in ("no-signature", "annotation-conflict", "no-typing"):
            continue
        pins, inputs = pins_of(entry), pinned_inputs(entry)
        told = {(label.span.line, source_text(label.span, limit=10_000)) for label in d.labels}
        said = "\n".join((*(label.text for label in d.labels), *d.notes))
        named = {p for p in pins if p in told}
        named_inputs = {i for i in inputs if re.search(rf"^(input )?{i} is pinned", said, re.M)}
        assert named or named_inputs, f"no pin is named:\n{d.text()}"
        several = len(named) > 1 and d.primary is not None and "does not take" in d.primary.text
        for part in (
            [{p} for p in named] if several else [named]
        ):  # operands that do not fit the row each for itself, or not together
            core = without_pins(entry, pins - part, inputs - named_inputs)
            assert not core.check().ok, f"no fault of {part} {named_inputs} alone"
            for gone, gone_inputs in [
                *(({p}, set()) for p in part),
                *((set(), {i}) for i in named_inputs),
            ]:
                less = without_pins(entry, pins - part | gone, inputs - named_inputs | gone_inputs)
                assert less.check().ok, f"still without {gone} {gone_inputs}:\n{less.check()}"


@everything
def test_helps_do_what_they_say(name):
    """Followed to the word in the source, each help gives a plan that sends the bytes it quotes."""
    entry, report = report_of(name)
    for d in report.diagnostics:
        for h in d.helps:
            after = repaired(entry, h)
            if len(report.diagnostics) == 1 or h.clears_all_errors:
                cost = after.jitted().plan(*after.args).cost
                assert cost.bytes_per_device == h.bytes_per_device, h.text
                # A region is read without the rest of the plan.
                memory = None if d.code == "manual-types" else cost.peak_memory_bytes
                assert memory == h.peak_memory_bytes, h.text
            else:
                again = after.check()
                assert len(again.diagnostics) == len(report.diagnostics) - 1, f"{h.text}\n{again}"


def masked(text: str) -> str:
    """The text without line numbers of installed libraries, without modelled times, which follow
    from the hardware table, and without memory, which differs between releases of JAX."""
    text = re.sub(r"(optax/[\w/]+\.py:)\d+", r"\1#", text)
    text = re.sub(r"\d[\d.]*(?= (B|[KMG]iB) memory per device)", "#", text)
    return re.sub(r"\d[\d.]*(?= (ms|us)\b|% slower)", "#", text)


@everything
@pytest.mark.parametrize("kind", ["txt", "html"])
def test_golden(name, kind):
    entry, made = report_of(name)
    report = Report(
        program=None, diagnostics=made.diagnostics, title=entry.name
    )  # the plans of doubtful programs are not the matter
    text = masked(report.text(110) + "\n" if kind == "txt" else report.html())
    assert_golden(f"{name}.{kind}", text, FOLDER)


def test_every_golden_file_has_a_program():
    assert {p.stem for p in FOLDER.iterdir()} == set(GALLERY)
