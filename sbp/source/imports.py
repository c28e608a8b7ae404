"""How a source file calls `sbp` and its functions."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass

from sbp.source.text import file_text, parsed_file

ANNOTATIONS = frozenset({"annotate", "split", "replicate", "shard", "partial"})
"""Functions of sbp that pin their first argument."""


@dataclass(frozen=True, slots=True)
class SbpNames:
    """What a file calls things of sbp.

    Arguments:
      module: the name of the package, `sbp` or an alias; empty when the file does not import it.
      functions: by the file's own name, the function of sbp that it imports.
      others: names that the file defines, or imports from elsewhere.
    """

    module: str
    functions: dict[str, str]
    others: frozenset[str]

    def function(self, func: ast.expr) -> str:
        """The function of sbp that an expression names; empty when it names another one.

        A notebook cell may use what another cell imports: there `sbp.split` and `split` have their
        usual meaning, unless the cell defines them otherwise.
        """
        match func:
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                return name if module in (self.module or "sbp", "sbp") else ""
            case ast.Name(id=name) if name in self.functions:
                return self.functions[name]
            case ast.Name(id=name) if name in ANNOTATIONS and name not in self.others:
                return name
            case _:
                return ""

    def imported_elsewhere(self, func: ast.expr) -> bool:
        """Whether an expression names a function that the file takes from another module or from
        the builtins, such as `jax.tree.map`."""
        root = func
        while isinstance(root, ast.Attribute | ast.Call):
            root = root.value if isinstance(root, ast.Attribute) else root.func
        name = root.id if isinstance(root, ast.Name) else ""
        return name in ("map", "jax", "functools") or (
            name in self.others and name not in self.functions and name != self.module
        )


def names_of_sbp(file: str) -> SbpNames:
    """What a file calls things of sbp."""
    return _names(file_text(file), file)


@functools.lru_cache(maxsize=64)
def _names(text: str, file: str) -> SbpNames:  # the text is part of the key: files change
    module, functions, others = "", dict[str, str](), set[str]()
    source = parsed_file(file)
    for node in ast.walk(source.tree) if source.tree else ():
        outside = not any(
            isinstance(p, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            for p in source.around(node)
        )
        match node:
            case ast.Import(names=names):
                for alias in names:
                    name = alias.asname or alias.name.split(".")[0]
                    if alias.name == "sbp" and outside:
                        module = name
                    elif alias.name != "sbp":
                        others.add(name)
            case ast.ImportFrom(module=whence, names=names):
                for alias in names:
                    if whence == "sbp" or (whence or "").startswith("sbp."):
                        functions[alias.asname or alias.name] = alias.name
                    else:
                        others.add(alias.asname or alias.name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if outside:
                    others.add(name)
            case _:
                pass
    return SbpNames(module, functions, frozenset(others))
