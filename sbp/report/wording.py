"""The words for figures, types and source lines in every report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sbp.annotations import annotate_p
from sbp.errors import Span
from sbp.errors import bytes_text as bytes_text
from sbp.explain.places import SourcePlace
from sbp.infer.space import Code, decode
from sbp.plan.text import place
from sbp.source.annotations import annotation_span
from sbp.source.reader import expression_text, shortened
from sbp.trace.graph import Node

SEGMENT_LIMIT = 44
"""Longest piece of source, in characters, that a sentence quotes."""


def seconds_text(seconds: float) -> str:
    """A modelled time with three significant digits.

    >>> seconds_text(0.00123), seconds_text(2.5)
    ('1.23 ms', '2.5 s')
    """
    for unit in ("s", "ms", "us"):
        if seconds >= 1:
            return f"{seconds:.3g} {unit}"
        seconds *= 1e3
    return f"{seconds:.3g} ns"


def counted(count: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "input"), counted(3, "input")
    ('1 input', '3 inputs')
    """
    return f"{count} {noun}" + ("" if count == 1 else "s")


def listed(names: Iterable[str], limit: int = 3) -> str:
    """Names with commas; those past the limit are counted.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    shown = list(dict.fromkeys(names))
    rest = len(shown) - limit
    return ", ".join(shown[:limit]) + (f" and {rest} more" if rest > 0 else "")


def branches_text(shown: float, called: float) -> str:
    """A sentence where places add up to more than a call sends: branches of conditionals do. Empty
    elsewhere.

    Arguments:
      shown: bytes at all places.
      called: bytes of a call.

    >>> branches_text(8.0, 8.0), branches_text(2048.0, 1024.0)
    ('', 'All branches of conditionals are here; a call runs one of each, and sends 1.0 KiB.')
    """
    if shown <= called * (1 + 1e-6):
        return ""
    return (
        "All branches of conditionals are here; a call runs one of each, and sends"
        f" {bytes_text(called)}."
    )


def without_number(name: str) -> str:
    """The name of a scope or of a key with a star for the number of a layer.

    >>> without_number("block_12"), without_number("3"), without_number("conv2d")
    ('block_*', '*', 'conv2d')
    """
    head, line, number = name.rpartition("_")
    return f"{head}{line}*" if number.isdigit() else name


POSITIONED = ("", "result", "args")
"""What stands before the position of a result, or of an argument without a name."""


def without_numbers(name: str) -> str:
    """The name of a leaf of a tree with a star for the number of each layer. The first number of a
    result or of an argument without a name is a position, and stays.

    >>> without_numbers("params['blocks'][3]['w2']"), without_numbers("p['layer_0'].w")
    ("params['blocks'][*]['w2']", "p['layer_*'].w")
    >>> without_numbers("[0]['blocks'][3]"), without_numbers("result[1]")
    ("[0]['blocks'][*]", 'result[1]')
    """
    found = name.split("[")
    for at, part in enumerate(found):
        if at == 0 or (at == 1 and found[0] in POSITIONED):
            continue
        key, end, after = part.partition("]")
        quote = key[:1] if key[:1] in ("'", '"') else ""
        found[at] = f"{quote}{without_number(key.strip(quote))}{quote}{end}{after}"
    return "[".join(found)


def common_name(names: Sequence[str]) -> str:
    """One name for leaves whose names `without_numbers` are the same: with a star for each number
    in which they differ.

    Arguments:
      names: at least one.

    >>> common_name(["state[0].mu[1]", "state[0].mu[2]"]), common_name(["w[3]"])
    ('state[0].mu[*]', 'w[3]')
    """
    starred = without_numbers(names[0]).split("[")
    columns = zip(starred, *(name.split("[") for name in names), strict=True)
    return "[".join(first if len({first, *rest}) == 1 else star for star, first, *rest in columns)


def times_text(name: str, count: int) -> str:
    """A name, and how many there are of it where there are several.

    >>> times_text("w", 1), times_text("blocks[*]", 3)
    ('w', 'blocks[*] (3)')
    """
    return name if count == 1 else f"{name} ({count})"


def signed(value: float, text: Callable[[float], str]) -> str:
    """A difference with its sign.

    >>> signed(-0.5, seconds_text)
    '-500 ms'
    """
    return f"{'-' if value < 0 else '+'}{text(abs(value))}"


def atoms_text(codes: Sequence[Code]) -> str:
    """Codes as atoms.

    >>> atoms_text([0, 2, -1])
    'B, S(1), P(sum)'
    """
    return ", ".join(repr(decode(c)) for c in codes)


def place_text(at: SourcePlace) -> str:
    """A place in a sentence. For a gradient it is the forward line."""
    if at.span is None:
        return "in generated code"
    return f"{_pass(at, 'in the gradient of', 'recomputed at') or 'at'} {place(at.span)}"


def place_cell(at: SourcePlace | None) -> str:
    """A place in a table; empty for none."""
    if at is None:
        return ""
    if at.span is None:
        return "in generated code"
    return f"{_pass(at, 'gradient of ', 'recomputed ')}{place(at.span)}"


def _pass(at: SourcePlace, gradient: str, recomputed: str) -> str:
    return gradient if at.gradient else recomputed if at.recomputed else ""


def quoted(span: Span) -> str:
    """The expression at a span in backticks with a leading blank, shortened; empty where there is
    no source."""
    text = span_text(span)
    return f" `{text}`" if text else ""


def span_text(span: Span) -> str:
    """The expression at a span, shortened, without backticks of its own."""
    return shortened(expression_text(span).replace("`", "'"), SEGMENT_LIMIT)


def node_text(node: Node, beside: Node | None = None) -> str:
    """A node in a sentence: its operation, the user's expression and line; for a gradient the
    forward line.

    Arguments:
      node: the node.
      beside: a node that the sentence has named before; the same expression is not quoted twice.
    """
    if node.op == annotate_p.name:
        span = annotation_span(node)
        return "an annotation" if span is None else f"the annotation{quoted(span)} at {place(span)}"
    if node.span is None:
        return f"{node.name} in generated code"
    if beside is not None and (node.span, node.backward) == (beside.span, beside.backward):
        return f"{node.name} there"
    return f"{node.name}{quoted(node.span)} {place_text(SourcePlace.of(node))}"
