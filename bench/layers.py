"""Prints the packages in layers, and the import cycles among packages and modules.

    python bench/layers.py [FOLDER]

A package here is a folder of modules, or a single module at the top level. Its layer is the length
of the longest chain of imports below it; packages that import each other share a layer. A cycle is
a set of modules that import each other, directly or through others. Every import counts, also
inside functions and for type checking only.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

Graph = Mapping[str, set[str]]


def module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, modules: Iterable[str]) -> Iterator[str]:
    """Yield those of `modules` that this module imports."""
    known = set(modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in known or node.module in known:
                    yield full if full in known else node.module


def module_graph(package: Path) -> dict[str, set[str]]:
    paths = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    return {
        name: {other for other in imported(ast.parse(path.read_text()), paths) if other != name}
        for name, path in paths.items()
    }


def package_of(module: str, folders: Iterable[str]) -> str:
    return module if module in folders or module.count(".") == 1 else module.rpartition(".")[0]


def package_graph(modules: Graph, root: Path) -> dict[str, set[str]]:
    folders = {module_name(path, root) for path in root.rglob("__init__.py")}
    # The root package and its entry point belong to no layer.
    outside = {root.name, f"{root.name}.__main__"}
    packages: dict[str, set[str]] = {}
    for module, others in modules.items():
        if module not in outside:
            package = package_of(module, folders)
            targets = {package_of(other, folders) for other in others - outside}
            packages.setdefault(package, set()).update(targets - {package})
    return packages


def cycles(graph: Graph) -> list[list[str]]:
    """Return strongly connected components of more than one node (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def layers(graph: Graph) -> dict[str, int]:
    """Return each package's layer, from 0 at the bottom."""
    group = {package: "+".join(cycle) for cycle in cycles(graph) for package in cycle}
    below: dict[str, set[str]] = {}
    for package, others in graph.items():
        mine = group.get(package, package)
        below.setdefault(mine, set()).update({group.get(each, each) for each in others} - {mine})
    height: dict[str, int] = {}

    def visit(node: str) -> int:
        if node not in height:
            height[node] = 1 + max((visit(other) for other in below[node]), default=-1)
        return height[node]

    return {package: visit(group.get(package, package)) for package in graph}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("kvstore"), help="folder of the root package"
    )
    root: Path = parser.parse_args().folder.resolve()
    modules = module_graph(root)
    packages = package_graph(modules, root)
    layer_of = layers(packages)
    for layer in range(max(layer_of.values()), -1, -1):
        names = sorted(name.partition(".")[2] for name in packages if layer_of[name] == layer)
        print(f"{layer:3}  {', '.join(names)}")
    imports = sum(map(len, packages.values()))
    print(f"{len(packages)} packages in {max(layer_of.values()) + 1} layers, {imports} imports")
    for kind, graph in (("packages", packages), ("modules", modules)):
        found = cycles(graph)
        print(
            f"{len(found)} cycles of {kind}",
            *(" <-> ".join(cycle) for cycle in found),
            sep="\n  ",
        )


if __name__ == "__main__":
    main()
