"""Packing of small stream messages: unpacking restores the original sequence."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.gateway import channels
from slipstream.gateway import slipstream_pb2 as pb


def message(call: int, size: int) -> pb.FromEngine:
    return pb.FromEngine(call=call, error=pb.Error(message="x" * size))


@given(
    st.lists(
        st.sampled_from([0, 10, channels.PACKED_BYTES // 2, channels.PACKED_BYTES, 2 * channels.PACKED_BYTES]),
        max_size=9,
    )
)
def test_all_arrive_once_and_in_order_and_large_ones_alone(sizes: list[int]) -> None:
    sent = [message(call, size) for call, size in enumerate(sizes)]
    alone = [pb.FromEngine.FromString(m.SerializeToString()) for m in sent]
    carriers = list(channels.packed(sent))
    received = [
        part
        for carrier in carriers
        for part in channels.unpacked(pb.FromEngine.FromString(carrier.SerializeToString()))
    ]
    assert [(m.call, m.error.message) for m in received] == [(m.call, m.error.message) for m in alone]
    for carrier in carriers:
        assert not carrier.also or sum(m.ByteSize() for m in carrier.also) <= channels.PACKED_BYTES
        assert all(not part.also for part in carrier.also)


def test_what_waits_in_a_queue_is_one_message() -> None:
    async def run() -> None:
        queue: asyncio.Queue[pb.FromEngine] = asyncio.Queue()
        stream = channels.drain(queue)
        for call in range(5):
            queue.put_nowait(message(call, 1))
        first = await asyncio.wait_for(anext(stream), 5)
        assert [part.call for part in channels.unpacked(first)] == [0, 1, 2, 3, 4]
        queue.put_nowait(message(5, 1))
        second = await asyncio.wait_for(anext(stream), 5)
        assert [part.call for part in channels.unpacked(second)] == [5]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)

    asyncio.run(run())
