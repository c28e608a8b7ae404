"""How a source file calls `sbp` and its functions."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass

from sbp.source.text import file_text, parsed_file

ANNOTATIONS = frozenset({"annotate", "split", "replicate", "shard", "partial"})
"""Functions of sbp that pin their first argument."""


LIBRARIES = frozenset({"jax", "functools", "equinox", "flax", "optax", "chex", "haiku", "builtins"})
"""Modules with functions that call their arguments, such as `jax.tree.map`."""


@dataclass(frozen=True, slots=True)
class SbpNames:
    """The names that a file has for `sbp` and its functions.

    Arguments:
      module: the name of the package, `sbp` or an alias; empty when the file does not import it.
      functions: by name in the file, the function of sbp that it imports.
      others: by name in the file, the module that the name is imported from; empty for a name that
          the file defines.
    """

    module: str
    functions: dict[str, str]
    others: dict[str, str]

    def function(self, func: ast.expr) -> str:
        """The function of sbp that an expression names; empty when it names another one.

        A notebook cell may use names that another cell imports. In a cell, `sbp.split` and `split`
        count as sbp's, unless the cell defines these names.
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

    def of_library(self, func: ast.expr) -> bool:
        """Whether an expression names a function of `LIBRARIES`."""
        root = func
        while isinstance(root, ast.Attribute | ast.Call):
            root = root.value if isinstance(root, ast.Attribute) else root.func
        name = root.id if isinstance(root, ast.Name) else ""
        home = self.others.get(name, {"map": "builtins"}.get(name, name))
        return home.partition(".")[0] in LIBRARIES


def names_of_sbp(file: str) -> SbpNames:
    """The names that a file has for `sbp` and its functions."""
    return _names(file_text(file), file)


@functools.lru_cache(maxsize=64)
def _names(text: str, file: str) -> SbpNames:  # the text is part of the key: files change
    module, functions, others = "", dict[str, str](), dict[str, str]()
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
                        others[name] = alias.name
            case ast.ImportFrom(module=whence, names=names):
                for alias in names:
                    if whence == "sbp" or (whence or "").startswith("sbp."):
                        functions[alias.asname or alias.name] = alias.name
                    else:
                        others[alias.asname or alias.name] = whence or ""
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if outside:
                    others[name] = ""
            case _:
                pass
    return SbpNames(module, functions, others)
