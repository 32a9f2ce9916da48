"""The machine that a benchmark ran on."""

from __future__ import annotations

import os
import platform
from typing import Any

import jax


def describe_device() -> dict[str, Any]:
    """Return the machine and the device that JAX computes on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
