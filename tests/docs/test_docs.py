"""README and documentation: every code block runs or parses, every command and option exists, every link resolves."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

import slipstream

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
EXECUTED = ("README.md", "docs/quickstart.md")
"""Pages whose Python blocks run, in order, in one process. On other pages they are parsed."""

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        content = page.read_text()
        for match in FENCE.finditer(content):
            indent, language, text = match.groups()
            text = "\n".join(line.removeprefix(indent) for line in text.splitlines())
            found.append(Block(page, content.count("\n", 0, match.start()) + 1, language, text))
    return found


def blocks_of(*languages: str) -> list[pytest.param]:
    return [pytest.param(block, id=block.name) for block in blocks() if block.language in languages]


def test_every_block_names_a_language_that_is_checked_here():
    checked = {"python", "bash", "toml", "json", "text", "mermaid"}
    assert not [f"{b.name}: {b.language!r}" for b in blocks() if b.language not in checked]


PARSERS = {"python": ast.parse, "toml": tomllib.loads, "json": json.loads}


@pytest.mark.parametrize("block", blocks_of(*PARSERS))
def test_blocks_parse(block):
    assert PARSERS[block.language](block.text) is not None


@pytest.mark.parametrize("page", EXECUTED)
def test_python_blocks_run_as_they_stand(page, tmp_path):
    code = "\n".join(b.text for b in blocks() if b.page == ROOT / page and b.language == "python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("block", blocks_of("python"))
def test_imported_names_exist(block):
    """Names of this package that a block imports or takes from `slipstream.`; other packages may not be installed."""
    lines = []
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slipstream"):
            lines.append(ast.unparse(node))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "slipstream":
            assert hasattr(slipstream, node.attr), f"slipstream has no {node.attr}"
    for line in lines:
        exec(line, {})


@pytest.mark.parametrize("block", blocks_of("bash"))
def test_commands_exist_with_their_options(block):
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for words in slipstream_commands(block.text):
        check_command(words)
    for path in re.findall(r"\bpython ((?:benchmarks|examples|tools)/\S+\.py)", block.text):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"^\s*make ([a-z-]+)", block.text, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), f"make {target}"


def slipstream_commands(text: str) -> list[list[str]]:
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        for command in re.split(r"\||&&|;|\$\(", line.partition(" # ")[0]):
            if command.split()[:1] == ["slipstream"]:
                found.append(command.split()[1:])  # noqa: PERF401
    return found


def check_command(words: list[str]) -> None:
    import typer.main

    from slipstream.cli.main import app

    command = typer.main.get_command(app)
    words = [word.rstrip("&") for word in words]
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        assert words[0] in command.commands, f"slipstream {words[0]} is no command"
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
    for word in words:
        if word == "--":
            break
        if word.startswith("--") and word != "--help":
            assert word.partition("=")[0] in known, f"{word} is no option of slipstream {command.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target} does not exist"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked.read_text()), f"{target}: no such heading"


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_files_that_the_documentation_names_exist():
    """`weights/plan.py` in backticks is a module, `tests/gpu` or `benchmarks/loop.py` a path of the repository."""
    missing = []
    for page in PAGES:
        for path in re.findall(
            r"`((?:[\w-]+/)+[\w.-]+\.(?:py|md|toml|json|sh|proto))(?:::?[\w.]+)?`", page.read_text()
        ):
            known = (ROOT, ROOT / "src/slipstream", ROOT / "src/slipstream/engines/embedded", page.parent)
            if not any((base / path).exists() for base in known):
                missing.append(f"{page.relative_to(ROOT)}: {path}")
    assert not missing, "\n".join(missing)


def test_every_hop_of_the_architecture_page_exists():
    """Rows such as `| 3 | [weights/plan.py](…) `make_plan` | … |` name a module and a function or method in it."""
    page = (ROOT / "docs/architecture.md").read_text()
    hops = re.findall(r"^\| *(\d+) *\| *`([\w/]+\.py)` *\| *`([\w.]+)` *\|", page, flags=re.MULTILINE)
    lives = [[]]
    for number, path, name in hops:
        if number == "1":
            lives.append([])
        lives[-1].append((path, name))
    weight, prompt = lives[1:]
    assert 3 <= len(weight) <= 10 and 3 <= len(prompt) <= 10
    for path, name in weight + prompt:
        tree = ast.parse((ROOT / "src/slipstream" / path).read_text())
        assert name in definitions(tree), f"{path} has no {name}"


def definitions(tree: ast.Module) -> set[str]:
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            found |= {f"{node.name}.{child.name}" for child in node.body if isinstance(child, functions)}
    return found


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
