"""Counts the rooms of the package, the floors they stand on, and the circles among its modules.

    python bench/layers.py [FOLDER]

A room is a folder of modules, or a module that stands alone at the top of the package. Its floor
is the length of the longest chain of imports below it; rooms that import each other share one. A
circle is a set of modules that import each other, directly or through others. Every import counts:
also one inside a function, and one for type checking only.
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
    """Which of `modules` this one imports."""
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


def room_of(module: str, folders: Iterable[str]) -> str:
    return module if module in folders or module.count(".") == 1 else module.rpartition(".")[0]


def room_graph(modules: Graph, package: Path) -> dict[str, set[str]]:
    folders = {module_name(path, package) for path in package.rglob("__init__.py")}
    # The package itself and its entry point say nothing about what lies where.
    outside = {package.name, f"{package.name}.__main__"}
    rooms: dict[str, set[str]] = {}
    for module, others in modules.items():
        if module not in outside:
            room = room_of(module, folders)
            targets = {room_of(other, folders) for other in others - outside}
            rooms.setdefault(room, set()).update(targets - {room})
    return rooms


def circles(graph: Graph) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan, 1972)."""
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


def floors(graph: Graph) -> dict[str, int]:
    """Each room's floor, from 0 at the bottom."""
    group = {room: "+".join(circle) for circle in circles(graph) for room in circle}
    below: dict[str, set[str]] = {}
    for room, others in graph.items():
        mine = group.get(room, room)
        below.setdefault(mine, set()).update({group.get(each, each) for each in others} - {mine})
    height: dict[str, int] = {}

    def visit(node: str) -> int:
        if node not in height:
            height[node] = 1 + max((visit(other) for other in below[node]), default=-1)
        return height[node]

    return {room: visit(group.get(room, room)) for room in graph}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("kvstore"))
    package: Path = parser.parse_args().folder.resolve()
    modules = module_graph(package)
    rooms = room_graph(modules, package)
    level = floors(rooms)
    for floor in range(max(level.values()), -1, -1):
        names = sorted(room.partition(".")[2] for room in rooms if level[room] == floor)
        print(f"{floor:3}  {', '.join(names)}")
    arrows = sum(map(len, rooms.values()))
    print(f"{len(rooms)} rooms on {max(level.values()) + 1} floors, {arrows} arrows")
    for name, graph in (("rooms", rooms), ("modules", modules)):
        found = circles(graph)
        print(
            f"{len(found)} circles of {name}",
            *(" <-> ".join(circle) for circle in found),
            sep="\n  ",
        )


if __name__ == "__main__":
    main()
