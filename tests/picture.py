"""The picture of the house in docs/how-it-works.md, and the import graph that it shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import grimp


def imports_by_folder() -> dict[str, frozenset[str]]:
    """For each folder or module at the top of `sbp`, the others that it imports; `sbp` itself
    stands for the public names."""
    graph = grimp.build_graph("sbp", cache_dir=None)
    found: dict[str, set[str]] = defaultdict(set)
    for name in graph.modules:
        importer = _top(name)
        found[importer] |= set(map(_top, graph.find_modules_directly_imported_by(name)))
        found[importer] -= {importer}
    return {importer: frozenset(imported) for importer, imported in found.items()}


def _top(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def arrows(imports: Mapping[str, frozenset[str]]) -> set[tuple[str, str]]:
    """The imports that no path of other imports implies (the transitive reduction)."""

    def below(name: str) -> frozenset[str]:
        return imports[name].union(*(below(n) for n in imports[name]))

    return {
        (importer, imported)
        for importer in imports
        for imported in imports[importer]
        if not any(imported in below(other) for other in imports[importer] - {imported})
    }


def pictured(page: str) -> set[tuple[str, str]]:
    """The arrows of the picture in a page."""
    picture = page.split("```mermaid\n", 1)[1].split("```", 1)[0]
    lines = [line.split(" --> ") for line in picture.splitlines() if "-->" in line]
    return {(importer.strip(), imported.strip()) for importer, imported in lines}
