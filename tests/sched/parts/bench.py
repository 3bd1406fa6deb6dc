"""A scheduler on the real bus and the clients of a test."""

import asyncio

import msgspec

from gyre_sched import protocol as p
from gyre_sched.service import Service
from gyre_transport.bus import Client, Subscriber

DEADLINE = 60.0


class Bench:
    """A scheduler and the clients of a test; `seen` are its publications in order."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.seen: list[p.Publication] = []
        self.changed = asyncio.Condition()
        self.client = Client(service.address, p.Reply)
        self.subscriber = Subscriber(service.events_address, p.Publication)
        self.backlog = p.Backlog(
            waiting=0,
            open_batch=None,
            micro_steps_left=0,
            batches_closed=0,
            executions_trained=0,
            executions_excluded=0,
        )

    async def send(self, request):
        return await self.client.call(request, deadline=DEADLINE)

    async def listen(self) -> None:
        while True:
            message = await self.subscriber.receive()
            async with self.changed:
                self.seen.append(message)
                self.changed.notify_all()

    async def until(self, test, since=0):
        """Wait until a publication after the first `since` passes `test`; returns it."""
        async with asyncio.timeout(DEADLINE), self.changed:
            await self.changed.wait_for(lambda: any(map(test, self.seen[since:])))
            return next(m for m in self.seen[since:] if test(m))

    async def event(self, kind, cell=None, **numbers):
        return await self.until(
            lambda m: (
                isinstance(m, p.Event) and (m.kind, m.cell) == (kind, cell) and numbers.items() <= m.numbers.items()
            )
        )

    async def routed(self, *engines, since=0):
        """Wait for routes with exactly these (engine, version)."""
        return await self.until(
            lambda m: isinstance(m, p.Routes) and {(e.engine, e.version) for e in m.engines} == set(engines), since
        )

    async def tell(self, **changes):
        self.backlog = msgspec.structs.replace(self.backlog, **changes)
        await self.send(self.backlog)

    async def granted(self, burst, executions):
        async with asyncio.timeout(DEADLINE):
            while True:
                reply = await self.send(p.OpenBurst(burst=burst, executions=executions))
                if isinstance(reply, p.Granted):
                    return reply
                async with self.changed:  # refusals have a reason that a later publication ends
                    await self.changed.wait()

    async def terminate(self, *executions):
        for execution in executions:
            await self.send(p.Started(execution=str(execution)))
            await self.send(p.Terminated(execution=str(execution)))

    async def role(self, cell, role):
        return await self.event("role", cell, to=role)
