"""What an equation of a jaxpr runs: the bodies of a loop, the branches of a choice, a function."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from sbp import _jax

Form = Literal["counted loop", "open loop", "choice", "function", "fold", "region", "platform", ""]
"""How an equation runs its bodies: `scan`, `while`, `cond`; a function, also one with derivatives
of its own; `reduce` with a function; `shard_map`; the index of a platform; nothing, as other
operations."""


class Bodies(NamedTuple):
    """What an equation runs.

    Attributes:
      form: how it runs its bodies.
      jaxprs: the bodies; of an open loop the condition first.
      counts: how many operands are constants and carries of a counted loop; constants of the
        condition and of the body of an open loop; none for other forms.
    """

    form: Form
    jaxprs: Sequence[Any] = ()
    counts: tuple[int, int] = (0, 0)


def bodies_of(eqn: Any, platform: str) -> Bodies:
    """What an equation runs.

    Arguments:
      eqn: the equation.
      platform: the platform that it runs on. Of branches for several platforms there is one left.
    """
    params = eqn.params
    match eqn.primitive.name:
        case "scan":
            return Bodies("counted loop", [params["jaxpr"]], _jax.scan_counts(params))
        case "while":
            counts = params["cond_nconsts"], params["body_nconsts"]
            return Bodies("open loop", [params["cond_jaxpr"], params["body_jaxpr"]], counts)
        case "cond" if params.get("branches_platforms"):
            pairs = zip(params["branches"], params["branches_platforms"], strict=True)
            return Bodies("choice", [next(b for b, p in pairs if p is None or platform in p)])
        case "cond":
            return Bodies("choice", params["branches"])
        case "jit":
            return Bodies("function", [params["jaxpr"]])
        case "custom_jvp_call" | "custom_vjp_call" | "checkpoint":
            return Bodies("function", [params.get("call_jaxpr", params.get("jaxpr"))])
        case "reduce":
            return Bodies("fold", [params["jaxpr"]])
        case "shard_map":
            return Bodies("region", [params["jaxpr"]])
        case "platform_index":
            return Bodies("platform")
        case _:
            return Bodies("")
