"""What an operator is, beside its rows: the facts that costs, memory, reports and checks ask for.

Traits stand with the rule of a primitive, so that a new primitive is described in one place. Every
default is the answer for an operator of which nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Shape = Sequence[int]

Carries = Literal["", "arranged", "copied", "rounded", "negated"]
"""What a one-operand operator does to the elements of its operand, all of which it keeps.

* `arranged`: the same elements in another shape or order;
* `copied`: each element as it is, in its place;
* `rounded`: each element in its place, perhaps in fewer bits;
* `negated`: each element in its place, with the other sign.
"""

Fusion = Literal["partly", "free", "inlined"]
"""What XLA makes of an operator that is no product, for the cost model.

* `partly`: fused with its neighbours; a share of its traffic reaches memory;
* `free`: fused into its consumers nearly always; nearly none of its traffic reaches memory;
* `inlined`: `free`, and its result is computed inside each consumer rather than stored.
"""

Scaling = Literal["", "together", "each", "ratio", "power", "root", "compared", "never"]
"""How the results of f scale with its operands (its degree as a homogeneous function).

* `together`: f(c x, c y) = c f(x, y), degree 1 in all operands that are not indices;
* `each`: f(c x, y) = f(x, c y) = c f(x, y), degree 1 in each of the first two operands;
* `ratio`: f(c x, y) = c f(x, y) and f(x, c y) = f(x, y) / c;
* `power`: f(c x) = c**y f(x), with y the parameter of that name, or 2;
* `root`: f(c**2 x) = c f(x);
* `compared`: f(c x, c y) = f(x, y) for c > 0;
* `never`: f(c x) = f(x) for c > 0.
"""

Generates = Literal["", "counter", "draws"]
"""Whether elements depend on their own index: `counter` computes them from the index, and its
shards start at their offset; `draws` draws them from a stream."""

Flops = Callable[[dict[str, Any], Sequence[Shape], Sequence[Shape]], float]
"""Floating-point operations of an equation, from its parameters and the (local) shapes of its
operands and results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What an operator is.

    Arguments:
      moves: every element of a result is an element of some operand, and which one it is follows
          from the parameters and from operands that are B.
      carries: what a one-operand operator does to the elements of its operand.
      elementwise: operands of the results' shape are read element by element, and the primitive
          itself runs on shards.
      pointwise: each index of a dim that its rows split is computed alike and alone, by the
          primitive's definition; elementwise operators are pointwise.
      monotone: for each operand, `+` where the function rises in it on its whole domain, `-` where
          it falls, `.` where it does neither; empty for other functions.
      linear_map: linear in one operand, by factors that the other operands give.
      contracts: sums products of its first two operands over a dim.
      reduces: the monoid by which it joins elements of its operand, such as `sum`.
      scatters: the monoid by which it joins updates to its first operand.
      scales: its degree as a homogeneous function.
      indices: positions of operands that say where elements are, or which to choose.
      multiplies: computes products of its first two operands, or sums of such products, as user
          code writes them.
      orderless: chooses or joins candidates along a dim in whatever order they come.
      generates: whether elements depend on their own index.
      effect: runs for what it does outside the program, not for its results.
      opaque: calls a host function, which may compute anything.
      fusion: what XLA makes of it.
      flops: its floating-point operations; None where its memory traffic is its cost.
      unnamed: reports call its result by the name of its operand.
      adapts: JAX inserts it to fit an operand to its reader; the user's operand is the one before.
      numpy: the same function in NumPy, on constants.
    """

    moves: bool = False
    carries: Carries = ""
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
    flops: Flops | None = None
    unnamed: bool = False
    adapts: bool = False
    numpy: Callable[..., Any] | None = None
