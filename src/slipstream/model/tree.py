"""Convert between a tree of parameters and flat HF names. Leaves can be of any type; JAX is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import MappingError


def flatten(params: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten `{"model": {"layers": [{"mlp": w}]}}` to `{"model.layers.0.mlp": w}`, in the order of the tree."""
    return dict(_leaves(params, ""))


def unflatten(named: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `flatten`. Parts numbered from 0 to n - 1 become a list; a gap raises `MappingError`."""
    root: dict[str, Any] = {}
    for name, leaf in named.items():
        *parents, last = name.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise MappingError(f"{name!r} is below {parent!r}, which is a tensor")
        node[last] = leaf
    return _with_lists(root, "")


def _leaves(node: Any, prefix: str) -> list[tuple[str, Any]]:
    if isinstance(node, Mapping):
        items = [(str(key), child) for key, child in node.items()]
    elif isinstance(node, (list, tuple)):
        items = [(str(index), child) for index, child in enumerate(node)]
    else:
        return [(prefix, node)]
    return [leaf for key, child in items for leaf in _leaves(child, f"{prefix}.{key}" if prefix else key)]


def _with_lists(node: Any, prefix: str) -> Any:
    if not isinstance(node, dict):
        return node
    children = {key: _with_lists(child, f"{prefix}.{key}" if prefix else key) for key, child in node.items()}
    if not children or not all(key.isdigit() for key in children):
        return children
    missing = [i for i in range(len(children)) if str(i) not in children]
    if missing:
        raise MappingError(f"{prefix!r} has {len(children)} numbered entries but lacks number {missing[0]}")
    return [children[str(i)] for i in range(len(children))]
