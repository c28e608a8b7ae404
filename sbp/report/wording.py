"""The words for figures, types, source lines and reasons of conversions in every report."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sbp.annotations import annotate_p
from sbp.errors import Span, bytes_text
from sbp.explain.change import boxing_text
from sbp.explain.origins import ConversionNeed, ConversionReason
from sbp.explain.subjects import SourcePlace, ValueName
from sbp.explain.why import Refusal
from sbp.infer.space import Code, decode
from sbp.plan.program import Program, place
from sbp.source.reader import expression_text, shorten, source_text, users_span
from sbp.trace.graph import WHILE_TRIPS, Node, trips_are_assumed

SEGMENT_LIMIT = 44
"""Longest piece of source, in characters, that a sentence quotes."""


def without_number(name: str) -> str:
    """The name of a scope or of a key with a star for the number of a layer.

    >>> without_number("block_12"), without_number("3"), without_number("conv2d")
    ('block_*', '*', 'conv2d')
    """
    head, line, number = name.rpartition("_")
    return f"{head}{line}*" if number.isdigit() else name


def without_numbers(name: str) -> str:
    """The name of a leaf of a tree with a star for the number of each layer. The first number of a
    result or of an argument without a name is a position, and stays.

    >>> without_numbers("params['blocks'][3]['w2']"), without_numbers("p['layer_0'].w")
    ("params['blocks'][*]['w2']", "p['layer_*'].w")
    >>> without_numbers("[0]['blocks'][3]"), without_numbers("result[1]")
    ("[0]['blocks'][*]", 'result[1]')
    """
    head, *keys = name.split("[")
    kept = 1 if head in ("", "result", "args") else 0
    return "[".join([head, *keys[:kept], *map(_without_number, keys[kept:])])


def _without_number(key: str) -> str:
    """The same of a key, with the bracket behind it and what follows."""
    inside, end, after = key.partition("]")
    quote = inside[:1] if inside[:1] in ("'", '"') else ""
    return f"{quote}{without_number(inside.strip(quote))}{quote}{end}{after}"


def common_name(names: Sequence[str]) -> str:
    """One name for leaves whose names `without_numbers` are the same: with a star for each number
    in which they differ.

    Arguments:
      names: at least one.

    >>> common_name(["state[0].mu[1]", "state[0].mu[2]"]), common_name(["w[3]"])
    ('state[0].mu[*]', 'w[3]')
    """
    columns = zip(*(name.split("[") for name in (without_numbers(names[0]), *names)), strict=True)
    return "[".join(first if len({first, *rest}) == 1 else star for star, first, *rest in columns)


def signed_text(value: float, text: Callable[[float], str]) -> str:
    """A difference with its sign.

    >>> signed_text(-512, bytes_text)
    '-512.0 B'
    """
    return f"{'-' if value < 0 else '+'}{text(abs(value))}"


def size_text(facts: Iterable[Any]) -> str:
    """The bytes that several facts have on one device, together."""
    return bytes_text(sum(fact.bytes_per_device for fact in facts))


def place_text(at: SourcePlace) -> str:
    """A place in a sentence. For a gradient it is the forward line."""
    before = "in the gradient of" if at.gradient else "recomputed at" if at.recomputed else "at"
    return "in generated code" if at.span is None else f"{before} {place(at.span)}"


def place_cell(at: SourcePlace | None) -> str:
    """A place in a table; empty for none."""
    if at is None or at.span is None:
        return "" if at is None else "in generated code"
    before = "gradient of " if at.gradient else "recomputed " if at.recomputed else ""
    return before + place(at.span)


def quote(span: Span) -> str:
    """The expression at a span in backticks with a leading blank, shortened; empty where there is
    no source."""
    return f" `{text}`" if (text := span_text(span)) else ""


def span_text(span: Span) -> str:
    """The expression at a span, shortened, without backticks of its own."""
    return shorten(expression_text(span).replace("`", "'"), SEGMENT_LIMIT)


def trips_text(program: Program) -> str:
    """That the trips of a `while` loop are assumed; empty for a program without one."""
    if any(map(trips_are_assumed, program.graph.walk())):
        return f"sbp does not know the trip count of a while loop, and assumes {WHILE_TRIPS}"
    return ""


def node_text(node: Node, beside: Node | None = None) -> str:
    """A node in a sentence: its operation, the user's expression and line; for a gradient the
    forward line.

    Arguments:
      node: the node.
      beside: a node that the sentence has named before; the same expression is not quoted twice.
    """
    if node.op == annotate_p.name:
        span = node.span
        return (
            "a type of in_types or out_types"
            if span is None
            else f"the annotation{quote(span)} at {place(span)}"
        )
    at = SourcePlace.of(node)
    return (
        f"{node.name} in generated code"
        if at.span is None
        else f"{node.name} there"
        if beside is not None and (at.span, at.gradient) == (users_span(beside), beside.in_gradient)
        else f"{node.name}{quote(at.span)} {place_text(at)}"
    )


# ---- conversions in the report ------------------------------------------------------------------


def maker_text(reason: ConversionReason) -> str:
    """The maker of the value, for the report."""
    return str(reason.value) if reason.maker is None else node_text(reason.maker)


def need_text(reason: ConversionReason) -> str:
    """The reader of the converted value and its reason, for the report. Results of the program
    have no reader."""
    need = reason.need
    templates = _REPORTED if need.is_read or need.node is None else _REPORTED_LEFT
    return _sentence(templates, need, beside=reason.maker)


# ---- conversions in the answer to a question ----------------------------------------------------


def full_maker_text(reason: ConversionReason) -> str:
    """The maker of the value with its row, for `plan.why`."""
    has_row = reason.row and reason.maker is not None and reason.maker.op != annotate_p.name
    return maker_text(reason) + (f" ({reason.row})" if has_row else "")


def full_need_text(need: ConversionNeed, output_names: Sequence[str]) -> str:
    """The reader of the converted value, and why it does not take the value as it was made.

    Arguments:
      need: the need for the conversion.
      output_names: names of the program's results.
    """
    templates = _RETURNED if need.node is None else _READ if need.is_read else _LEFT
    return _sentence(templates, need, output_names)


def deferred_text(need: ConversionNeed, output_names: Sequence[str]) -> str:
    """The start of a sentence about the program with the conversion elsewhere.

    Arguments:
      need: the need for the conversion.
      output_names: names of the program's results.
    """
    return _sentence(_DEFERRED, need, output_names)


_REPORTED = {
    "conversion": "on the way to another type",
    "pin": "pinned by{pinned}",
    "given pin": "pinned by in_types or out_types",
    "no signature": "needed by {node}, which has no signature",
    "rounding": "needed by {node}, which has no row for {before}",
    "not linear": "needed by {node}, which has no row for {before}",
    "partners": "needed by {node}, which takes {after} here",
    "choice": "needed by {node}, which takes {after} here",
    "": "needed by {node}, which takes {after}",
}
"""Why a reader needs a conversion, in the report. Here and below, by the kind of the need; the last
line is that of all others."""

_REPORTED_LEFT = {"": "returned by the body of {op} {place}"}
"""The same for a value that the body of a region returns."""

_PREDICATE = "it is the predicate of {node}, and every device needs the same predicate"

_READ = {
    "pin": "pinned as {after} by `{source}` {place}",
    "given pin": "pinned as {after} by in_types or out_types",
    "predicate": _PREDICATE,
    "carry": "carried as {after} by {node}",
    "body": "taken into the body as {after} by {node}",
    "no signature": "needed by {node}, which has no signature and takes all operands B",
    "rounding": "needed by {node}: a cast to {dtype} would round each part, so the sum comes first"
    "{allowing}",
    "not linear": "needed by {node}, which has no row for {before}: it is not linear in this"
    " operand",
    "partners": "needed by {node}, which takes {before} only beside {partners}",
    "choice": "needed by {node}, which also takes {before}",
    "": "needed by {node}, whose row takes {after}{row}",
}
"""The same in the answer to a question, for a value that a node reads."""

_LEFT = {
    "predicate": _PREDICATE,
    "carry": "carried as {after} over all trips of {node}{blocking}",
    "": "returned as {after} by the body of {node}",
}
"""The same for a value that the body of a region returns."""

_RETURNED = {
    "conversion": "on the way to another type that is read",
    "pinned output": "returned as `{output}`, which is pinned as {after}",
    "donated output": "returned as `{output}`, which replaces input {donor} in the next call and"
    " has its type",
    "whole output": "returned as `{output}`: an output is partial only if its type says so",
    "": "returned as `{output}`, whose type is left free",
}
"""The same for a result of the program, and for what only another conversion reads."""

_DEFERRED = {
    "pin": "Without that pin",
    "given pin": "Without that pin",
    "carry": "Carried as {before}",
    "body": "{taken} as {before}",
    "row": "The next-best plan in which it takes another type",
    "partners": "Reduced one operation later, after {node}",
    "choice": "Reduced one operation later, after {node}",
    "": "`{output}` returned as {before}",
}


def _sentence(
    templates: Mapping[str, str],
    need: ConversionNeed,
    output_names: Sequence[str] = (),
    beside: Node | None = None,
) -> str:
    """The sentence of a need; `beside` is as for `node_text`."""
    node, before = need.node, repr(decode(need.change.before))
    pinned = node.span if node is not None and need.kind == "pin" else None
    allowing = f" (reduce_dtype=jnp.{need.allowing} allows it to come after)"
    blocking = ": each trip reads it in {}, which has no row for {}"
    of_node: dict[str, Any] = (
        {}
        if node is None
        else {
            "node": node_text(node, beside),
            "op": node.op,
            "place": place_text(SourcePlace.of(node)),
            "source": source_text(node.span),
            "dtype": node.params.get("new_dtype"),
        }
    )
    kind = "given pin" if need.kind == "pin" and pinned is None else need.kind
    return templates.get(kind, templates[""]).format(
        before=before,
        after=repr(decode(need.change.after)),
        pinned=f"{quote(pinned)} at {place(pinned)}" if pinned else "",
        allowing=allowing if need.allowing else "",
        blocking=blocking.format(node_text(need.blocker), before) if need.blocker else "",
        partners=_partners(*need.partners) if need.partners else "",
        row=f" ({need.row})" if need.row else "",
        output=output_name(output_names, need.number),
        donor=need.donor,
        taken="Taken into the body" if need.is_read else "Returned",
        **of_node,
    )


def _partners(
    names: Sequence[ValueName], atoms: Sequence[Code], rows: Sequence[Sequence[Code]]
) -> str:
    """The atoms that rows take beside the partial value, and the atoms that are there
    (`sbp.explain.origins.PartnerRows`)."""

    def named(codes: Sequence[Code], between: str) -> str:
        return ", ".join(
            f"{name}{between}{decode(code)!r}" for name, code in zip(names, codes, strict=True)
        )

    taken = sorted({named(row, " ") for row in rows})
    more = [f"{len(taken) - 3} more"] if len(taken) > 3 else []
    return f"{' or '.join([*taken[:3], *more])}, and {named(atoms, ' is ')}"


def refusal_text(found: Refusal) -> str:
    """Why a changed program has no plan."""
    if isinstance(found, str):
        return _REFUSALS[found]
    request, fault = found
    axis = f"on `{fault.mesh_axis}`" + (f" under {boxing_text(request)}" if fault.policy else "")
    if not fault.sink:
        return f"no row reaches it {axis}"
    arrives = " or ".join(dict.fromkeys(repr(decode(c)) for c in fault.made[0])) or "nothing"
    node = fault.sink[0].node
    reader = "the result of the program" if node is None else node_text(node)
    return f"{reader} does not take {arrives} {axis}"


_REFUSALS = {
    "joint": "no types fit on all mesh axes together",
    "memory": "no plan fits in memory_limit",
    "elsewhere": "no row takes this type",
}


def output_name(output_names: Sequence[str], number: int) -> str:
    """The name of a result of the program."""
    return output_names[number] if 0 <= number < len(output_names) else f"result[{number}]"
