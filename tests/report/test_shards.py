"""The picture of where a tensor lives shows what each device of the plan has."""

import math
import re
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

import sbp
from sbp.report.facts import Tensor
from sbp.report.parts import NAMESPACE, Board, Facts, Ink, Page, Picture
from sbp.report.rendering import page_html, page_lines
from sbp.report.report import Shown
from sbp.report.shards import (
    MOST_BLOCKS,
    MOST_PANELS,
    TensorShards,
    shard_picture,
    shards_of,
    telling_tensor,
)
from sbp.types import Split, Unreduced, parse
from tests.cases import GRID as MESH, shape as array

CASES = (
    ((16,), "a:S(0)", {"a": 4}),
    ((5,), "a:S(0)", {"a": 4}),
    ((9,), "a:S(0) b:S(0)", {"a": 2, "b": 3}),
    ((7, 10), "a:S(1) b:S(0)", {"a": 4, "b": 3}),
    ((8, 16), "b:P(max)", {"a": 2, "b": 3}),
    ((4, 6, 8), "a:S(0) b:P c:P", {"a": 2, "b": 2, "c": 3}),
    ((4, 6, 8, 10), "a:S(0) b:S(3) c:S(2)", {"a": 2, "b": 2, "c": 3}),
    ((2,) * 8, "a:S(0) b:S(7)", {"a": 2, "b": 2}),
    ((), "a:P", {"a": 2, "b": 4}),
    ((), "B", {"a": 1}),
    ((0, 8), "a:S(1)", {"a": 4}),
)


def shards_of_type(shape, text, mesh):
    tensor = Tensor(name="x", shape="f32", global_shape=shape, type=parse(text))
    return TensorShards(tensor, tuple(mesh.items()))


def elements_by_hand(shape, type_, mesh):
    """The numbers of the elements of each device, and its place on the axes that are partial: an
    array of all numbers, padded and cut axis by axis."""
    parts = {(): np.arange(math.prod(shape)).reshape(shape)}
    for axis, n in mesh.items():
        atom, cut = type_.get(axis), {}
        for place, part in parts.items():
            pieces = [part] * n
            if isinstance(atom, Split):
                width = [
                    (0, -part.shape[atom.dim] % n if d == atom.dim else 0) for d in range(part.ndim)
                ]
                pieces = np.split(np.pad(part, width, constant_values=-1), n, axis=atom.dim)
            cut |= {(*place, i): piece for i, piece in enumerate(pieces)}
        parts = cut
    partial = [i for i, a in enumerate(mesh) if isinstance(type_.get(a), Unreduced)]
    return [
        (frozenset(part[part >= 0].tolist()), tuple(place[i] for i in partial))
        for place, part in sorted(parts.items())
    ]


def elements_shown(found):
    """The same of the shards, by device."""
    numbers = np.arange(math.prod(found.tensor.global_shape)).reshape(found.tensor.global_shape)
    return {
        device: (frozenset(numbers[tuple(slice(*e) for e in s.extents)].flat), s.summand)
        for s in found.shards
        for device in s.devices
    }


@pytest.mark.parametrize(("shape", "text", "mesh"), CASES)
def test_each_device_has_the_elements_that_are_cut_by_hand(shape, text, mesh):
    found = shards_of_type(shape, text, mesh)
    shown, by_hand = elements_shown(found), elements_by_hand(shape, parse(text), mesh)
    assert sorted(shown) == list(range(math.prod(mesh.values())))
    assert [shown[device][0] for device in sorted(shown)] == [numbers for numbers, _ in by_hand]
    assert all(
        (shown[device][1] == shown[other][1]) == (place == elsewhere)
        for device, (_, place) in enumerate(by_hand)
        for other, (_, elsewhere) in enumerate(by_hand)
    )
    assert found.summands == len({place for _, place in by_hand})


def test_even_shards_are_those_of_jax():
    mesh = sbp.make_mesh((2, 2, 2), ("a", "b", "c"))
    where = jax.NamedSharding(mesh, jax.P("b", None, ("a", "c"))).devices_indices_map((4, 3, 8))
    found = shards_of_type((4, 3, 8), "a:S(2) b:S(0) c:S(2)", mesh.shape)
    for shard, device in ((s, d) for s in found.shards for d in s.devices):
        indices = where[mesh.devices.flat[device]]
        assert shard.extents == tuple(map(lambda i, n: i.indices(n)[:2], indices, (4, 3, 8)))


@pytest.fixture(scope="module")
def report():
    def step(params, x):
        h = jax.nn.relu(x @ params["w"])
        y = h @ params["out"]
        return sbp.annotate(y, "model:P(sum)")

    types = ({"w": "model:S(1)", "out": "model:S(0)"}, "data:S(0)")
    made = sbp.jit(step, MESH, in_types=types, out_types="data:S(0) model:P(sum)")
    return made.plan({"w": array(6, 16), "out": array(16, 8)}, array(8, 6)).report()


@pytest.mark.parametrize("name", ["params['w']", "params['out']", "x", "result", "h", "y"])
def test_inputs_outputs_and_values_have_the_types_of_the_plan(report, name):
    found = shards_of(report.program, name, report.output_names)
    block = report.program.block
    sources = dict(zip(report.program.graph.input_names, block.inputs, strict=True))
    sources |= dict(zip(report.output_names, block.outputs, strict=True))
    if name in sources:
        assert [(c > 0, c < 0) for c in sources[name].codes] == [
            (isinstance(found.tensor.type.get(a), Split), a in found.partial_axes)
            for a in MESH.shape
        ]
    shards = elements_shown(found)
    by_hand = elements_by_hand(found.tensor.global_shape, found.tensor.type, dict(MESH.shape))
    assert [shards[d][0] for d in range(8)] == [numbers for numbers, _ in by_hand]
    assert repr(found.tensor.type) in report.where(name).text(400)


def drawn(svg):
    root = ElementTree.fromstring(svg)
    return root, [t.text or "" for t in root.iter(f"{{{NAMESPACE}}}text")]


def test_a_partial_tensor_is_a_sum_of_devices(report):
    shown = report.where("result")
    _, words = drawn(shown.svg()[0])
    assert "0 + 1 + .. + 3" in words and "4 + 5 + .. + 7" in words
    assert "P(sum), over model: each element is the sum of 4 parts" in shown.text(400)
    assert "3 of 4" in shown.text(400)


def test_blocks_are_drawn_in_proportion_and_inside_the_picture():
    for shape, text, mesh in CASES:
        root, _ = drawn(shard_picture(shards_of_type(shape, text, mesh)).svg)
        assert all(
            float(box.attrib[at]) + float(box.attrib[length]) <= float(root.attrib[length])
            for box in root.iter(f"{{{NAMESPACE}}}rect")
            for at, length in (("x", "width"), ("y", "height"))
        )
    picture = shard_picture(shards_of_type((5,), "a:S(0)", {"a": 4}))
    widths = [float(b.attrib["width"]) for b in drawn(picture.svg)[0].iter(f"{{{NAMESPACE}}}rect")]
    assert np.allclose(np.array(widths) / widths[0], [1, 1, 0.5])
    assert "1 device has no element of it: 3" in picture.caption


def test_a_large_mesh_is_folded_and_counted():
    mesh = {"a": 8, "b": 16, "c": 8, "d": 8}
    picture = shard_picture(shards_of_type((64,) * 4, "a:S(0) b:S(1) c:S(2) d:S(3)", mesh))
    _, words = drawn(picture.svg)
    assert f"and {64 - MOST_PANELS} such drawings more" in words
    assert f"+ {16 - MOST_BLOCKS} more" in words
    text = Shown(page=Page(parts=(picture,))).text()
    assert "and 8176 more shards" in text and len(picture.svg) < 200_000


def test_a_text_of_40_columns_is_readable(report):
    assert not [
        (name, width)
        for name in ("x", "result")
        for width in (40, 80, 200)
        if max(map(len, report.where(name).lines(width))) > width
    ]


def test_the_report_draws_the_tensor_that_most_axes_split(report):
    telling = telling_tensor(report.program)
    assert telling is not None and (telling.tensor.name, repr(telling.tensor.type)) == (
        "y",
        "model:P(sum)",
    )
    assert shard_picture(telling).svg in report.full().svg()


# ---- drawings ------------------------------------------------------------------------------------
# Drawings are sound XML whatever their words are; reports have the same facts in words.


WORDS = '<b title="x">&amp;\x00\x1b[31m \u202eright to left\u202c 漢字 ]]>'


def drawing() -> Board:
    board = Board(120, 40)
    board.rect((0, 0), (60, 20), Ink(color="#3b82f6"), title=WORDS)
    board.line([(60, 10), (100, 10), (100, 40)], Ink(dashed=True), arrow=True, title=WORDS)
    board.area([(0, 40), (10, 20), (20, 40)], Ink(color="#f59e0b", width=0), title=WORDS)
    board.text((30, 14), WORDS, Ink(bold=True), anchor="middle")
    return board


def test_a_drawing_is_sound_xml_whatever_its_words_are():
    root = ElementTree.fromstring(drawing().svg(WORDS))
    assert (root.get("width"), root.get("height")) == ("120", "40")
    shown = re.sub("[\x00\x1b\u202e\u202c]", "\ufffd", WORDS)
    texts = [[t.text for t in root.iter(f"{{{NAMESPACE}}}{k}")] for k in ("title", "text")]
    assert (*texts, root.get("aria-label")) == ([shown] * 3, [shown], shown)


def test_an_arrow_ends_where_its_line_ends():
    root = ElementTree.fromstring(drawing().svg("arrow"))
    arrow = root.findall(f"{{{NAMESPACE}}}polygon")[0].get("points")
    assert arrow is not None and arrow.split()[0] == "100,40"


def test_terminals_and_those_who_cannot_see_get_the_facts_in_words():
    picture = Picture(
        caption="a `box`", svg=drawing().svg("box"), instead=(Facts(pairs=(("a", "b"),)),)
    )
    page = Page(parts=(picture,))
    assert [line.plain for line in page_lines(page, 80)] == ["a `box`", "a  b"]
    shown = page_html(page)
    assert 'alt="a box"' in shown and "in words" in shown and ">b</dd>" in shown
    assert "\x1b" not in shown
