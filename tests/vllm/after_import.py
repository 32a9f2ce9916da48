"""Changes a module of vLLM right after it is imported. Importing it here would load all of vLLM into every process.

Copied beside a `sitecustomize.py` that uses it, which runs in every Python process of an engine or a server."""

from __future__ import annotations

import importlib.util
import sys


class Finder:
    def __init__(self, name, patch) -> None:
        self.name, self.patch = name, patch

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self.patch(module)

        spec.loader.exec_module = exec_module
        return spec


def after_import(name, patch) -> None:
    if name in sys.modules:
        patch(sys.modules[name])
    else:
        sys.meta_path.insert(0, Finder(name, patch))
