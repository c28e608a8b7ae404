"""Traits: what an operator is, beside its rows. Costs, memory, reports and checks ask for them.

Traits are part of a primitive's rule, so a new primitive is described in one place. The default of
each trait is the answer for an unknown operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Shape = Sequence[int]
"""The sizes of the dims of an array."""

Carries = Literal["", "arranged", "copied", "rounded", "negated"]
"""What an operator with one operand does to its elements; all of them are in the result.

* `arranged`: the same elements in another shape or order;
* `copied`: each element unchanged, in its place;
* `rounded`: each element in its place, perhaps with fewer bits;
* `negated`: each element in its place, with the opposite sign.
"""

Fusion = Literal["partly", "free", "inlined"]
"""How XLA compiles an operator that is not a product, for the cost model.

* `partly`: fused with its neighbours; a fraction of its traffic reaches memory;
* `free`: fused into its consumers nearly always; nearly none of its traffic reaches memory;
* `inlined`: as `free`, and each consumer computes the result, which is never stored.
"""

Scaling = Literal["", "together", "each", "ratio", "power", "root", "compared", "never"]
"""How the results of a function f change when its operands are multiplied by a constant c.

* `together`: f(c x, c y) = c f(x, y), for all operands that are not indices;
* `each`: f(c x, y) = f(x, c y) = c f(x, y), for the first two operands;
* `ratio`: f(c x, y) = c f(x, y) and f(x, c y) = f(x, y) / c;
* `power`: f(c x) = c**y f(x), where y is the parameter `y`, or 2 without one;
* `root`: f(c**2 x) = c f(x);
* `compared`: f(c x, c y) = f(x, y) for c > 0;
* `never`: f(c x) = f(x) for c > 0.
"""

Generates = Literal["", "counter", "draws"]
"""Whether a result's elements depend on their own index.

* `counter`: each is computed from its index; a shard starts at its offset;
* `draws`: each is drawn from a stream of random numbers.
"""

Flops = Callable[[dict[str, Any], Sequence[Shape], Sequence[Shape]], float]
"""Gives the number of floating-point operations of an equation, from its parameters and the local
shapes of its operands and results."""

Sides = Callable[[dict[str, Any], Sequence[Shape]], tuple[int, int]]
"""Gives the rows and columns of a product of matrices, from its parameters and the local shapes of
its operands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What an operator is.

    Arguments:
      moves: every element of a result is an element of an operand; which one depends on the
          parameters and on operands that are B.
      carries: what an operator with one operand does to its elements.
      regroups: the result has each element of the operand once, in an order and a shape that the
          parameters give. JAX does not compare symbolic numbers of elements.
      elementwise: the operator reads operands of the result's shape element by element, and the
          primitive itself runs on shards.
      pointwise: by the primitive's definition, each index of a dim that a row splits is computed in
          the same way and without the others. Elementwise operators are pointwise.
      monotone: one letter for each operand: `+` where the function rises in the operand on its
          whole domain, `-` where it falls, `.` where it does neither; empty for other functions.
      linear_map: the operator is linear in one operand; the other operands give the coefficients.
      contracts: the operator sums products of its first two operands over a dim.
      reduces: the monoid by which the operator joins elements of its operand, such as `sum`.
      scatters: the monoid by which the operator joins updates to its first operand.
      scales: how the results change when operands are multiplied by a constant.
      indices: positions of the operands that are indices or select among other operands.
      multiplies: computes products of its first two operands, or sums of such products, where a
          user writes a product.
      orderless: the result does not depend on the order of the elements along the dim that the
          operator reduces, searches or sorts.
      generates: whether the result's elements depend on their own index.
      effect: the program runs the operator for its effect on the outside, not for its results.
      opaque: the operator calls a host function, which may compute anything.
      fusion: how XLA compiles the operator.
      costly: of an elementwise operator: XLA computes the result once and stores it, rather than
          again in each product or reduction that reads it, where it is computed from the result of
          another such operator.
      flops: gives the number of floating-point operations; None where only memory traffic is
          priced.
      sides: for a product, gives the elements of the free dims of each operand; None elsewhere.
      whole: the operator takes whole matrices or lines; only the dims before theirs split.
      unnamed: reports call the result by the name of the operand.
      adapts: JAX inserts the operator to fit an operand to its reader; what the user wrote is the
          operator's operand.
      numpy: the same function in NumPy, for constants.
    """

    moves: bool = False
    carries: Carries = ""
    regroups: bool = False
    elementwise: bool = False
    pointwise: bool = False
    monotone: str = ""
    linear_map: bool = False
    contracts: bool = False
    reduces: str = ""
    scatters: str = ""
    scales: Scaling = ""
    indices: range = range(0)
    multiplies: bool = False
    orderless: bool = False
    generates: Generates = ""
    effect: bool = False
    opaque: bool = False
    fusion: Fusion = "partly"
    costly: bool = False
    flops: Flops | None = None
    sides: Sides | None = None
    whole: bool = False
    unnamed: bool = False
    adapts: bool = False
    numpy: Callable[..., Any] | None = None


RANKS = {
    "argmax": "finds an index within each shard alone",
    "argmin": "finds an index within each shard alone",
    "cumlogsumexp": "runs over each shard alone",
    "cummax": "runs over each shard alone",
    "cummin": "runs over each shard alone",
    "cumprod": "runs over each shard alone",
    "cumsum": "runs over each shard alone",
    "sort": "sorts each shard alone",
    "top_k": "picks from each shard alone",
}
"""Operations that rank or add up the elements along a dim, and what they do to a split one."""

KEEPS_INDICES = {"add", "broadcast_in_dim", "convert_element_type", "lt", "reshape", "select_n"}
"""Operations through which the index of a device is still an index; JAX adds the length of the dim
to a negative one."""

BITCAST = "bitcast_convert_type"
"""The operator that reads the bits of an array as another dtype."""
