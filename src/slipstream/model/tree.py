"""Between a tree of parameters and flat HF names. No JAX here: leaves are whatever they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import MappingError


def flatten(params: Mapping[str, Any]) -> dict[str, Any]:
    """`{"model": {"layers": [{"mlp": w}]}}` becomes `{"model.layers.0.mlp": w}`, in the tree's own order."""
    return dict(_leaves(params, ""))


def unflatten(named: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`. Parts numbered from 0 to n - 1 become a list; a gap among them is a `MappingError`."""
    root: dict[str, Any] = {}
    for name, leaf in named.items():
        *parents, last = name.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise MappingError(f"{name!r} lies below {parent!r}, which is a tensor itself")
        node[last] = leaf
    return _listed(root, "")


def _leaves(node: Any, at: str) -> list[tuple[str, Any]]:
    if isinstance(node, Mapping):
        items = [(str(key), child) for key, child in node.items()]
    elif isinstance(node, (list, tuple)):
        items = [(str(index), child) for index, child in enumerate(node)]
    else:
        return [(at, node)]
    return [leaf for key, child in items for leaf in _leaves(child, f"{at}.{key}" if at else key)]


def _listed(node: Any, at: str) -> Any:
    if not isinstance(node, dict):
        return node
    children = {key: _listed(child, f"{at}.{key}" if at else key) for key, child in node.items()}
    if not children or not all(key.isdigit() for key in children):
        return children
    missing = [i for i in range(len(children)) if str(i) not in children]
    if missing:
        raise MappingError(f"{at!r} has {len(children)} numbered entries but lacks number {missing[0]}")
    return [children[str(i)] for i in range(len(children))]
