"""`python scripts/docs/packages.py` draws docs/packages.svg: the packages of agentrl, and the imports between them.

Bands are the layers of the import contract in pyproject.toml. An arrow that other arrows imply is left out.
"""

import ast
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/packages.svg"
WIDTH, BOX, HEIGHT, ROW, GAP = 1000, 116, 30, 52, 20
COLUMNS = {
    "cli": 3, "demo": 4.4, "tiny": 6, "compat": 0.2, "check": 1.2, "cluster": 3.4, "viewer": 5.2, "run": 2.4, "config": 1.4,
    "rollout": 3.2, "adapters": 5, "gateway": 2, "observability": 4.2, "buffer": 6, "data": 5.6, "train": 0.4, "engine": 1.6,
    "algorithms": 0, "envs": 3.5, "rm_hub": 3.5, "chat": 2.4, "tools": 4.6, "sandbox": 4.8, "serving": 1.8, "numerics": 1,
}  # fmt: skip
"""The place of each package from left to right, 0 to 6, so that no arrow passes behind a box."""
COLORS = ("#8c510a", "#b2182b", "#7b3294", "#c51b7d", "#2166ac", "#35978f", "#1b7837", "#5e4fa2", "#b35806", "#4d4d4d")
Graph = Mapping[str, set[str]]


def packages() -> set[str]:
    """Return the names of the packages in agentrl/."""
    return {path.parent.name for path in ROOT.glob("agentrl/*/__init__.py")}


def imports() -> dict[str, set[str]]:
    """Return the packages that each package imports, including imports in functions and for type checkers."""
    found: dict[str, set[str]] = {name: set() for name in packages()}
    for name, used in found.items():
        for path in (ROOT / "agentrl" / name).rglob("*.py"):
            used |= {word for word in _imported(path) if word in found and word != name}
    return found


def _imported(path: Path) -> Iterable[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "agentrl":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agentrl."):
            yield str(node.module).split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("agentrl."))


def reachable(graph: Graph, start: str) -> set[str]:
    """Return all packages that `start` needs, directly or through others."""
    return graph[start].union(*(reachable(graph, name) for name in graph[start]))


def reduced(graph: Graph) -> dict[str, set[str]]:
    """Return the graph without arrows that other arrows imply."""
    behind = {name: reachable(graph, name) for name in graph}
    return {name: {to for to in used if not any(to in behind[via] for via in used)} for name, used in graph.items()}


def layers() -> list[list[str]]:
    """Return the layers of the import contract, the highest first, without layers that have no package."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    lines = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    known = packages()
    named = [[name for name in line.split(" : ") if name in known] for line in lines]
    return [line for line in named if line]


def rows(layer: list[str], graph: Graph) -> list[list[str]]:
    """Split a layer into rows: each package is above the packages of this layer that it imports."""

    def height(name: str) -> int:
        return 1 + max((height(to) for to in graph[name] if to in layer), default=-1)

    heights = {name: height(name) for name in layer}
    return [[name for name in layer if heights[name] == at] for at in sorted(set(heights.values()), reverse=True)]


def places(bands: list[list[list[str]]]) -> dict[str, tuple[float, float]]:
    """Return the middle of each box. Raises KeyError: a package has no place in COLUMNS."""
    at: dict[str, tuple[float, float]] = {}
    top = GAP
    for band in bands:
        for row in band:
            at |= {name: (WIDTH / 7 * (COLUMNS[name] + 0.5), top + ROW / 2) for name in row}
            top += ROW
        top += GAP
    return at


def drawing() -> str:
    """Return the picture as SVG."""
    full = imports()
    graph, bands = reduced(full), [rows(layer, full) for layer in layers()]
    at, top = places(bands), GAP
    parts = []
    for band in bands:
        high = ROW * len(band)
        parts.append(f'<rect x="4" y="{top}" width="{WIDTH - 8}" height="{high}" rx="6" fill="#f2f4f7"/>')
        top += high + GAP
    for index, name in enumerate(name for band in bands for row in band for name in row):
        parts += [_arrow(at[name], at[to], COLORS[index % len(COLORS)]) for to in sorted(graph[name])]
    parts += [_box(name, *at[name]) for name in sorted(at)]
    style = "text{font:14px sans-serif;text-anchor:middle;fill:#1c1e21}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}"><style>{style}</style>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{top}" fill="#fff"/>', *parts, "</svg>", ""])


def _arrow(start: tuple[float, float], end: tuple[float, float], color: str) -> str:
    (x, y), (to_x, to_y) = (start[0], start[1] + HEIGHT / 2), (end[0], end[1] - HEIGHT / 2)
    bend = (to_y - y) / 2
    curve = f"M{x:.0f},{y:.0f} C{x:.0f},{y + bend:.0f} {to_x:.0f},{to_y - bend:.0f} {to_x:.0f},{to_y - 4:.0f}"
    head = f"M{to_x - 4:.0f},{to_y - 7:.0f} l4,7 l4,-7 z"
    return f'<path d="{curve}" fill="none" stroke="{color}" stroke-width="1.4" opacity=".75"/><path d="{head}" fill="{color}"/>'


def _box(name: str, x: float, y: float) -> str:
    place = f'x="{x - BOX / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{BOX}" height="{HEIGHT}"'
    return f'<rect {place} rx="4" fill="#fff" stroke="#57606a"/><text x="{x:.0f}" y="{y + 5:.0f}">{name}</text>'


if __name__ == "__main__":
    PICTURE.write_text(drawing(), encoding="utf-8")
    print(PICTURE)
