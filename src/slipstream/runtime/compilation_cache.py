"""JAX's cache of compiled programs on disk: a process that is restarted finds those of its predecessor."""

from __future__ import annotations

import os
from pathlib import Path


def enable_compilation_cache() -> None:
    """Enable JAX's persistent compilation cache, unless the user has configured it."""
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "slipstream" / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
