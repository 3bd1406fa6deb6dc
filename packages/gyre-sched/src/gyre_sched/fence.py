"""Which orders a cell obeys: those of the latest scheduler it knows, given to its present registration, while it was
heard by the scheduler less than a lease ago.

A cell that was not heard for a lease counts as lost at the scheduler; by then it has fenced itself, because its
patience began when it sent what was acknowledged last, and the scheduler's when that arrived. An order that was on its
way meanwhile comes too late for ever: the next registration is another one.

Pure: time (seconds of a clock that never goes back) comes with every call.
"""

from __future__ import annotations

from gyre_sched.protocol import EnterRollout, EnterTraining, Refresh, Registered


class Fence:
    """The agent's side of a lease."""

    def __init__(self, lease: float) -> None:
        """lease: seconds."""
        self._lease = lease
        self._heard: float | None = None  # when the message was sent that the scheduler acknowledged last
        self.term = 0
        self.registration = 0

    def registered(self, reply: Registered, sent: float) -> bool:
        """Take a new registration that was asked for at `sent`; False when a later scheduler is known already."""
        if reply.term < self.term:
            return False
        self.term, self.registration, self._heard = reply.term, reply.registration, sent
        return True

    def acknowledged(self, sent: float) -> None:
        """What was sent at `sent` was heard."""
        if self._heard is not None:
            self._heard = max(self._heard, sent)

    def lapse(self) -> None:
        """The scheduler does not know the registration: obey nobody until there is a new one."""
        self._heard = None

    def holds(self, now: float) -> bool:
        """Whether orders are obeyed. What did not hold once never does again: it takes a new registration."""
        if self._heard is not None and now - self._heard > self._lease:
            self._heard = None
        return self._heard is not None

    def refusal(self, order: EnterTraining | EnterRollout | Refresh, now: float) -> str | None:
        """Why `order` is not obeyed; None: it is, and from now on only schedulers of its term or later."""
        if order.term < self.term:
            return f"it is of term {order.term}, a scheduler of term {self.term} gives the orders"
        if not self.holds(now):
            return f"nothing was heard from the scheduler for {self._lease:g} s"
        if order.registration != self.registration:
            return f"it is for registration {order.registration}, this is {self.registration}"
        self.term = order.term
        return None
