"""Print how large the parts of the package are: advice for whoever adds to them. `make sizes`.

The largest of each kind, and the median and the 90th percentile of functions. Nothing fails: a
limit that is met exactly shapes code for the limit, not for its reader.
"""

from __future__ import annotations

import ast
import statistics
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "lockstep"
LARGEST = 5


def main() -> None:
    functions, classes, files, folders = [], [], [], Counter[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(PACKAGE))
        files.append((len(text.splitlines()), name))
        folders[str(path.parent.relative_to(PACKAGE))] += 1
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                kind = classes if isinstance(node, ast.ClassDef) else functions
                kind.append((lines, f"{name}: {node.name}"))
    sizes = sorted(lines for lines, _ in functions)
    print(f"{len(files)} files, {sum(lines for lines, _ in files)} lines")
    print(
        f"functions: median {statistics.median(sizes):g} lines, 90% at most"
        f" {sizes[int(0.9 * len(sizes))]}"
    )
    for kind, found in (("functions", functions), ("classes", classes), ("files", files)):
        print(f"largest {kind}, in lines")
        for lines, name in sorted(found, reverse=True)[:LARGEST]:
            print(f"  {lines:>5}  {name}")
    print("largest folders, in files")
    for folder, count in folders.most_common(LARGEST):
        print(f"  {count:>5}  {folder}")


if __name__ == "__main__":
    main()
