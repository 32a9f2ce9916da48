"""A hook of mkdocs: append every command of `slipstream`, with its arguments and options, to reference/cli.md."""

from __future__ import annotations

from typing import Any

import typer.main


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri != "reference/cli.md":
        return markdown
    from slipstream.cli.main import app

    return markdown + "\n".join(_describe(typer.main.get_command(app), "slipstream"))


def _describe(command: Any, path: str) -> list[str]:
    if hasattr(command, "commands"):
        return [line for name, child in command.commands.items() for line in _describe(child, f"{path} {name}")]
    arguments = [p.name.upper() for p in command.params if p.param_type_name == "argument"]
    lines = [f"## {path}", "", command.help or "", "", "```text", " ".join([path, "[OPTIONS]", *arguments]), "```", ""]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden and p.help]
    if options:
        lines += ["| option | |", "|---|---|"]
        lines += [f"| `{', '.join(o.opts)}` | {' '.join(o.help.split()).replace('|', '/')} |" for o in options]
    return [*lines, ""]
