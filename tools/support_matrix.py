"""Write the support matrix from docs/support.toml into README.md and docs/support.md; `--check` only compares."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU = {"tested": "tested", "ran": "ran", "stand-in": "against a stand-in", "no": "not run", "": "–"}
GPU = {"H200": "ran on H200", "no": "not run", "": "–"}
BLOCK = re.compile(r"(<!-- support matrix -->\n).*?(<!-- end of support matrix -->)", flags=re.DOTALL)


def table(rows: list[dict[str, str]]) -> str:
    lines = ["| | | CPU | GPU | notes |", "|---|---|---|---|---|"]
    area = ""
    for row in rows:
        cells = ("" if row["area"] == area else row["area"], row["what"], CPU[row["cpu"]], GPU[row["gpu"]], row["note"])
        lines.append(f"| {' | '.join(cells)} |")
        area = row["area"]
    return "\n".join(lines) + "\n"


def main() -> None:
    rows = tomllib.loads((ROOT / "docs/support.toml").read_text())["row"]
    stale = []
    for name, shown in (("README.md", [row for row in rows if row.get("readme")]), ("docs/support.md", rows)):
        page = ROOT / name
        text = page.read_text()
        if not BLOCK.search(text):
            sys.exit(
                f"{name} has no place for the support matrix: <!-- support matrix --> … <!-- end of support matrix -->"
            )
        fresh = BLOCK.sub(lambda match, shown=shown: match[1] + table(shown) + match[2], text)
        if fresh != text:
            stale.append(name)
            if "--check" not in sys.argv:
                page.write_text(fresh)
    if stale and "--check" in sys.argv:
        sys.exit(
            f"{' and '.join(stale)}: the support matrix is not that of docs/support.toml; run tools/support_matrix.py"
        )


if __name__ == "__main__":
    main()
