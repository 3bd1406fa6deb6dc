"""A policy, a clock and what came out: for tests that take one decision at a time."""

import msgspec

from gyre_sched import protocol as p
from gyre_sched.actions import Answer, Call, Publish, Received, Record, Refuse, Returned, Tick
from gyre_sched.config import SchedConfig
from gyre_sched.leases import Leases
from gyre_sched.policy import Policy
from gyre_sched.protocol import Role


class Desk:
    """A policy, a clock and what came out."""

    def __init__(self, *, cells=2, capacity=4, per_burst=2, steps=4, proxies=("proxy",), **settings):
        self.policy = Policy(SchedConfig(cells=cells, **settings), per_burst=per_burst, steps=steps)
        self.at = 0.0
        self.leases = Leases(cells, self.policy.config.lease, 0.0)
        self.capacity = capacity
        self.calls: dict[int, Call] = {}
        self.records: list[Record] = []
        self.routes: p.Routes | None = None
        self.backlog = p.Backlog(
            waiting=0, open_batch=None, micro_steps_left=0, batches_closed=0, executions_trained=0,
            executions_excluded=0,
        )  # fmt: skip
        for cell in range(cells):
            self.hello(cell)
        for proxy in proxies:
            self.send(p.ProxyHello(proxy=proxy, url="http://proxy"))
        self.tell()

    def take(self, event):
        reply = None
        for action in self.policy.step(event):
            match action:
                case Record():
                    self.records.append(action)
                case Call():
                    self.calls[action.cell] = action
                case Publish(routes):
                    self.routes = routes
                case Answer(reply):
                    pass
                case Refuse(reason):
                    raise AssertionError(reason)
        return reply

    def send(self, request):
        event = Received(self.at, request)
        self.leases.hear(event)
        return self.take(event)

    def hello(self, cell, version=0):
        return self.send(
            p.CellHello(
                cell=cell, agent=f"agent-{cell}", engine=f"cell-{cell}", engine_url=f"http://{cell}",
                capacity=self.capacity, version=version,
            )
        )  # fmt: skip

    def state(self, cell, **fields):
        return self.send(p.CellState(**{"cell": cell, "engine_alive": True, "trainer_alive": True, **fields}))

    def tell(self, **changes):
        self.backlog = msgspec.structs.replace(self.backlog, **changes)
        return self.send(self.backlog)

    def tick(self, seconds=0.0, beats=True):
        """Time passes; agents are heard."""
        self.at += seconds
        if beats:
            self.take(Tick(self.at))
        else:
            for event in self.leases.tick(self.at):
                self.take(event)

    def burst(self, index=0, executions=8):
        return self.send(p.OpenBurst(burst=index, executions=executions))

    def end(self, count):
        f = self.policy.state.count.terminated
        for i in range(f, f + count):
            self.send(p.Terminated(execution=str(i)))

    def drained(self, cell, proxy="proxy", epoch=None):
        epoch = self.policy.state.epoch if epoch is None else epoch
        self.send(p.Drained(proxy=proxy, engine=f"cell-{cell}", epoch=epoch, moved=0))

    def done(self, cell, version=None, failed=None):
        call = self.calls.pop(cell)
        version = getattr(call.request, "version", 0) if version is None else version
        reply = p.Failed(detail=failed) if failed else p.Done(seconds=1.0, version=version)
        self.take(Returned(self.at, cell, call.call, reply))

    def train(self, cell):
        self.drained(cell)
        self.done(cell)
        assert self.role(cell) is Role.TRAINING

    def role(self, cell):
        return self.policy.state.cells[cell].role

    def kinds(self, kind):
        return [r for r in self.records if r.kind == kind]


def trained(**settings):
    """Both cells in training, the burst over, its data trained."""
    desk = Desk(**settings)
    desk.burst()
    desk.end(8)
    desk.tell(waiting=8, batches_ready=2)
    desk.train(0)
    desk.train(1)
    return desk
