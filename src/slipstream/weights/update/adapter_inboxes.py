"""Where updates arrive that bring adapters: inboxes with other layouts than the base model's."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.types import Offer, Parameter, TensorSpec
from slipstream.weights import adapters
from slipstream.weights.transports.host.tcp import ListenConfig
from slipstream.weights.update.transfer import Inbox


class AdapterInboxes:
    """One inbox for each kind of adapters, kept from update to update. An update of the base model together with adapters has
    one of its own, which is not used again."""

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        parameters: Sequence[Parameter],
        dtype: str,
        engine: str,
        listen: ListenConfig | None = None,
    ) -> None:
        """`tensors` and `parameters` are the base model's."""
        self._tensors, self._parameters = tensors, parameters
        self._dtype, self._engine, self._listen = dtype, engine, listen
        self._kept: dict[tuple[tuple[int, tuple[str, ...]], ...], Inbox] = {}
        """By rank and targets of the adapters."""
        self._passing: list[Inbox] = []

    def choose(self, offer: Offer) -> Inbox:
        """Return the inbox with the layout of an update that brings adapters."""
        key = tuple((lora.rank, lora.targets) for lora in offer.adapters)
        if offer.only_adapters and key in self._kept:
            return self._kept[key]
        _, parameters = adapters.layout(self._tensors, self._parameters, offer.adapters, offer.only_adapters)
        inbox = Inbox(parameters, self._dtype, self._engine, self._listen)
        if offer.only_adapters:
            self._kept[key] = inbox
        else:
            self._passing.append(inbox)
        return inbox

    def close_passing(self) -> None:
        """Close the inboxes that are not used again. What they received lives on."""
        for inbox in self._passing:
            inbox.close()
        self._passing = []

    def all(self) -> list[Inbox]:
        return [*self._kept.values(), *self._passing]

    def close(self) -> None:
        for inbox in self.all():
            inbox.close()
