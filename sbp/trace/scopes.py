"""JAX's name stacks: the names of scopes and transformations around an equation."""

import re

REMATTED = "rematted_computation"
"""The part of a name stack that marks rematerialisation: JAX puts it around the forward operations
that a differentiated `checkpoint` repeats, `sbp.trace.build` around the whole call."""


def in_transpose(scope: str) -> bool:
    """Whether a name stack is that of a backward pass.

    >>> in_transpose("transpose(jvp(mlp))"), in_transpose("jvp(mlp)")
    (True, False)
    """
    return "transpose(" in scope


def in_recomputation(scope: str) -> bool:
    """Whether a name stack is that of a forward operation which a backward pass repeats.

    >>> in_recomputation("transpose(jvp(f))/rematted_computation/rematted_computation")
    True
    >>> in_recomputation("rematted_computation/rematted_computation/transpose(jvp(f))")
    False
    """
    last = scope.rpartition(REMATTED)[2]
    return in_transpose(scope) and scope.count(REMATTED) > 1 and not in_transpose(last)


_TRANSFORMS = re.compile(r"\b(transpose|jvp|vmap|jit)\(|\)")
_REGION_SCOPES = frozenset([REMATTED, "checkpoint", "while", "body", "cond", "scan", "closed_call"])


def scope_names(scope: str) -> list[str]:
    """The names that a user or a library gave to parts of a name stack.

    >>> scope_names("transpose(jvp(ffn))/while/body/expert_mlp")
    ['ffn', 'expert_mlp']
    """
    return [
        part
        for part in _TRANSFORMS.sub("", scope).split("/")
        if part and part not in _REGION_SCOPES
    ]


def scope_within(scope: str, outer: str) -> str:
    """The part of a name stack inside of an outer one.

    >>> scope_within("jvp(f)/while/mlp", "jvp(f)/while"), scope_within("f", "f")
    ('mlp', '')
    """
    is_inside = outer and (scope == outer or scope.startswith(f"{outer}/"))
    return scope[len(outer) + 1 :] if is_inside else scope
