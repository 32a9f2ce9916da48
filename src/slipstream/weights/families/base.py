"""What a family says about one tensor: its name, its whole shape, and how tensor parallelism may split it."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.types import TensorSpec


@dataclass(frozen=True, slots=True)
class FamilyTensor:
    """`FamilyTensor("model.layers.0.self_attn.k_proj.weight", (256, 1024), split_dim=0, units=4)`: rows belong to 4 heads
    and are split between heads, never inside one."""

    name: str
    shape: tuple[int, ...]
    split_dim: int | None = None
    """Dimension that tensor parallelism splits; None is held whole by every rank."""
    units: int = 1
    """Indivisible groups along `split_dim`: attention heads, or single rows."""

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.shape)

    def split(self, tp: int) -> int | None:
        """The dimension that `tp` ranks split; None when the units cannot be shared out evenly, and all hold the whole."""
        return self.split_dim if tp > 1 and self.units % tp == 0 else None
