"""How arguments and results are held between calls: `Partial`, `Padded`, and plain arrays."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from sbp.api.boundary import Leaf, Leaves, shape_of
from sbp.api.call import CallSignature
from sbp.errors import refused
from sbp.run.arrays import (
    Padded,
    Padding,
    Partial,
    held_padded,
    of_process,
    padded_parts,
    padding_of,
    part_sizes,
    same_layout,
    with_parts,
)
from sbp.run.execute import Executable, place_array
from sbp.types import NdSbp


@dataclass(frozen=True, kw_only=True, eq=False)
class Holding:
    """The arguments and results of one plan.

    Arguments:
      executable: the plan, as it runs on the user's mesh.
      signature: the call that it was made for.
      returned: what it returns.
    """

    executable: Executable
    signature: CallSignature
    returned: Leaves

    @functools.cached_property
    def inputs(self) -> dict[int, Padded]:
        """The arguments that are held padded, without their parts."""
        types, leaves = self.executable.program.input_types, self.signature.leaves
        return {
            i: held_padded(leaves[i].aval.shape, types[i], self.executable.program.mesh.axes)
            for i in sorted(self.executable.program.request.demand.padded_inputs)
        }

    @functools.cached_property
    def outputs(self) -> dict[int, Padded]:
        """The results that are held padded, without their parts."""
        types, leaves = self.executable.program.output_types, self.returned.leaves
        return {
            o: held_padded(leaves[o].aval.shape, types[o], self.executable.program.mesh.axes)
            for o in sorted(self.executable.program.request.demand.padded_outputs)
        }

    @functools.cached_property
    def users_shardings(self) -> list[NamedSharding]:
        """The shardings of the flat arguments, on the user's mesh."""
        return [
            NamedSharding(self.executable.mesh, s.spec, memory_kind=s.memory_kind)
            for s in self.executable.in_shardings
        ]

    def is_direct(self, leaves: Sequence[Any]) -> bool:
        """Whether the leaves of arguments, as JAX flattens them, are what the program takes."""
        return not any(
            isinstance(x, Partial) or (isinstance(x, Padded) and not self._is_here(x, i))
            for i, x in enumerate(leaves)
        )

    def _is_here(self, x: Padded, position: int) -> bool:
        """Whether the parts of an argument are what the program takes."""
        return isinstance(x.parts, jax.ShapeDtypeStruct) or (
            position in self.inputs and same_layout(x, self.inputs[position])
        )

    def taken(self, leaves: Sequence[Any]) -> tuple[list[Any], frozenset[int], tuple[str, ...]]:
        """Arguments as arrays that the program takes. A `Padded` in another layout, and an array
        for what is held padded, are converted.

        Returns:
          The arrays, where NumPy arrays are not placed on devices yet; the positions of arguments
          that are one value in all processes; and the names of arguments that were in another
          layout.
        """
        flat, whole, moved = list[Any](), set[int](), list[str]()
        for i, x in enumerate(leaves):
            array: Any = x
            source = x.parts if isinstance(x, Padded) else x
            if isinstance(x, Partial):  # on a mesh axis of size 1, the one part is the value
                shape = self.executable.shapes[i].shape
                array = x.parts if x.parts.shape == shape else x.parts.reshape(shape)
            elif isinstance(x, Padded) and self._is_here(x, i):
                array = source
                whole.add(i)
            # An array of the padded shape comes from a `Padded`, whose leaf it is.
            elif isinstance(x, Padded) or (
                i in self.inputs
                and not isinstance(x, jax.ShapeDtypeStruct)
                and tuple(np.shape(x)) != self.executable.shapes[i].shape
            ):
                if isinstance(source, jax.Array) and source.committed:
                    moved.append(self.signature.leaves[i].name)
                if isinstance(x, Padded | jax.Array):
                    whole.add(i)
                if isinstance(x, Padded):
                    array = x.full() if isinstance(source, jax.Array) else np.asarray(x)
                if i in self.inputs and isinstance(array, jax.Array):
                    array = padded_parts(
                        array, padding_of(self.inputs[i]), self.executable.in_shardings[i]
                    )
                elif i in self.inputs:  # it is placed with the other NumPy arrays
                    array = padding_of(self.inputs[i]).pad(np.asarray(array))
            flat.append(array)
        return flat, frozenset(whole), tuple(moved)

    def placed(self, x: Any, position: int) -> Any:
        """A flat argument on the mesh, where the program takes it; a number of Python and a
        `Partial` as they are.

        Arguments:
          x: what is no array on the mesh yet is the whole, or this process's part.
          position: its position among the flat arguments.

        Raises:
          SbpError: `bad-argument` for an argument of another shape or dtype.
        """
        leaf, program = self.signature.leaves[position], self.executable.program
        aval, name = leaf.aval, f"input {leaf.name}"
        sharding, held = self.users_shardings[position], self.inputs.get(position)
        is_here = isinstance(x, Padded) and self._is_here(x, position)
        if isinstance(x, Padded):
            x = x.parts if is_here else x.full()
        if isinstance(x, Partial) or not (np.ndim(x) or isinstance(x, jax.Array)):
            return x  # a number of Python keeps its weak type
        if shape_of(x, name).dtype != aval.dtype:
            raise refused(
                f"{name} is {shape_of(x, name).dtype}, but the plan takes {aval.dtype}; convert it",
                TypeError,
            )
        padding = Padding.of(aval.shape, program.input_types[position], program.mesh.axes)
        if is_here or tuple(np.shape(x)) == padding.padded_shape == aval.shape:
            parts = place_array(x, sharding)
        else:
            parts = of_process(x, padding, sharding, name)
        return with_parts(held, parts) if held is not None else parts

    def results(self, outs: Sequence[Any]) -> list[Any]:
        """The flat results as the user gets them."""
        found = with_padded(self.outputs, outs)
        for position, (out, leaf) in enumerate(zip(outs, self.returned.leaves, strict=True)):
            if leaf.partial is not None:
                sizes = part_sizes(leaf.partial, self.executable.mesh)
                shape = (*sizes, *out.shape[sum(n > 1 for n in sizes) :])
                found[position] = Partial(
                    out.reshape(shape) if 1 in sizes else out,
                    leaf.partial,
                    self.executable.program.output_sum(position),
                )
        return found

    def structures(self) -> tuple[Any, Any]:
        """The structures of (args, kwargs) and of the results, with the arrays of the compiled
        program as their leaves. A `Partial` over a mesh axis of size 1 is a leaf there: the program
        has no dim for its one part."""
        ins = [self._node(leaf, None) for leaf in self.signature.leaves]
        outs = [
            self._node(leaf, self.executable.program.output_sum(o))
            for o, leaf in enumerate(self.returned.leaves)
        ]
        return (
            jax.tree.structure(self.signature.tree.unflatten(with_padded(self.inputs, ins))),
            jax.tree.structure(self.returned.tree.unflatten(with_padded(self.outputs, outs))),
        )

    def _node(self, leaf: Leaf, reduce_dtype: str | None) -> Any:
        """What stands in the structure of a call for an argument or result that is not padded."""
        sizes = part_sizes(leaf.partial or NdSbp(), self.executable.mesh)
        known = leaf.partial, reduce_dtype, (*sizes, *leaf.aval.shape)
        return Partial.tree_unflatten(known, (0,)) if leaf.partial and 1 not in sizes else 0


def with_padded(held: Mapping[int, Padded], leaves: Sequence[Any]) -> list[Any]:
    """The leaves of arguments or results, such as arrays or shardings; in the positions of what is
    held padded, a `Padded` of them, which is a node of the structure."""
    return [with_parts(held[i], x) if i in held else x for i, x in enumerate(leaves)]


def plain(tree: Any) -> Any:
    """Arguments with plain arrays in place of `Padded` and `Partial`, for the plain function."""

    def is_held(x: Any) -> bool:
        return isinstance(x, Padded | Partial)

    if not any(map(is_held, jax.tree.leaves(tree, is_leaf=is_held))):
        return tree

    return jax.tree.map(
        lambda x: (
            x.full() if isinstance(x, Padded) else x.reduce() if isinstance(x, Partial) else x
        ),
        tree,
        is_leaf=is_held,
    )
