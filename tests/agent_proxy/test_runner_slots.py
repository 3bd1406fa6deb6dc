"""Places of harnesses: never more held than there are, first come, first served, none lost."""

from __future__ import annotations

import asyncio
import random

from gyre_agent_proxy.runner.slots import Slots


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_places_are_taken_in_order_and_their_number_changes() -> None:
    slots, entered, go = Slots(), [], asyncio.Event()

    async def one(i: int) -> None:
        async with slots:
            entered.append(i)
            await go.wait()

    tasks = [asyncio.create_task(one(i)) for i in range(5)]
    await settle()
    assert entered == []
    slots.resize(2)
    await settle()
    assert entered == [0, 1]
    slots.resize(1)  # takes none away
    calm = asyncio.create_task(slots.nobody_waits())
    await settle()
    assert entered == [0, 1]
    assert not calm.done()
    slots.resize(4)
    await settle()
    assert entered == [0, 1, 2, 3]
    tasks[4].cancel()
    await asyncio.gather(tasks[4], return_exceptions=True)
    await calm
    go.set()
    await asyncio.gather(*tasks[:4])


async def test_no_place_is_lost_whoever_is_cancelled_when() -> None:
    dice = random.Random(5)
    for _ in range(200):
        slots, alive, most = Slots(2), 0, 0

        async def one(slots: Slots = slots) -> None:
            nonlocal alive, most
            async with slots:
                alive += 1
                most = max(most, alive)
                try:
                    await asyncio.sleep(0)
                finally:
                    alive -= 1

        tasks = [asyncio.create_task(one()) for _ in range(8)]
        for task in dice.sample(tasks, 4):
            for _ in range(dice.randrange(3)):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert most <= 2
        await asyncio.wait_for(slots.nobody_waits(), 10)
        async with asyncio.timeout(10), slots, slots:
            pass
