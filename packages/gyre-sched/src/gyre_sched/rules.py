"""The rules, as pure functions of the state: who may move when, what counts as trained, what a burst waits for."""

from __future__ import annotations

from gyre_sched.cell import MOVING, Cell
from gyre_sched.config import SchedConfig
from gyre_sched.protocol import Role
from gyre_sched.state import State

_FRESH = 10.0  # seconds a burst asked for counts as still wanted; a waiting runner asks every half second


def water_allows(state: State, cell: Cell) -> bool:
    """The water level: w <= C_R - C_e, what stays routable covers all unfinished executions."""
    return state.water <= state.capacity - cell.capacity


def settled(state: State, at: float, config: SchedConfig) -> str | None:
    """Why all data of the bursts granted so far counts as trained; None while it does not."""
    backlog = state.backlog
    if state.water or backlog is None:
        return None
    if backlog.version > state.version:
        return None  # trained, but the weights it made are not published yet
    if backlog.batches_ready or backlog.micro_steps_left:
        return None
    if backlog.open_batch is None:
        if not state.granted:
            return "nothing dispatched"
        if backlog.batches_closed >= state.due:
            return "every batch closed"
        if backlog.executions_trained + backlog.executions_excluded >= state.fates_due:
            return "every execution trained or excluded"
    if state.granted and at - state.quiet_since >= config.settle_timeout:
        return f"the feed was quiet for {config.settle_timeout:g} s"
    return None


def has_data(state: State, cell: Cell, config: SchedConfig) -> bool:
    """Whether `cell` would find something to train on. The core also closes a batch that has no work left, and trains
    again what was closed after the checkpoint it was restored from."""
    backlog = state.backlog
    if backlog is None:
        return False
    if config.schedule == "async":
        return True  # its trainers wait for data in training
    if cell.index == 0 and backlog.version > state.version and state.core.trainer_alive:
        return True
    if backlog.micro_steps_left or backlog.waiting or backlog.batches_ready:
        return True
    return cell.index == 0 and backlog.open_batch is not None


def next_to_train(state: State, at: float, config: SchedConfig) -> Cell | None:
    """The cell that leaves rollout now: the core first, then satellites in order, one at a time; None if none may."""
    if state.stopping is not None or state.halted or any(state.by_role[r] for r in MOVING):
        return None
    if not state.by_role[Role.ROLLOUT] or state.backlog is None:
        return None
    if config.schedule == "colocate" and state.water:
        return None
    core = state.core
    if core.role is Role.ROLLOUT:
        cell = core
    elif core.role is Role.TRAINING:
        able = next((i for i in state.routing if state.cells[i].may_train(config)), None)
        if able is None:
            return None
        cell = state.cells[able]
    else:
        return None
    if cell.pending or not cell.may_train(config) or at - cell.since < config.dwell:
        return None
    if not water_allows(state, cell) or not has_data(state, cell, config):
        return None
    if config.schedule != "async" and (settled(state, at, config) or core_stays(state, at, config)):
        return None
    return cell


def staleness(state: State, per_burst: int) -> int:
    """Versions that the last batch of a burst granted now will be behind when it is trained: what is still to be
    trained before the burst, and the batches of the burst before the last one."""
    return state.behind + per_burst - 1


def staleness_bound(config: SchedConfig, per_burst: int) -> int:
    """Versions that a batch may be behind: `max_staleness`, or what the schedule brings by itself."""
    if config.max_staleness is not None:
        return config.max_staleness
    if config.schedule == "async":
        return 2 * per_burst - 1  # a burst is sampled while the one before is trained
    return per_burst - 1 + (config.stay_behind if config.schedule == "elastic" and config.core_stays else 0)


def core_stays(state: State, at: float, config: SchedConfig) -> bool:
    """After a burst the core trains on only if another batch is ready and the capacity of the other cells covers the
    executions about to be dispatched. At most `stay_behind` batches may be untrained: it bounds the staleness."""
    wanted, backlog = state.wanted, state.backlog
    if config.schedule != "elastic" or not config.core_stays or state.water or backlog is None:
        return False
    if wanted is None or at - wanted.at > _FRESH:
        return False
    if state.core.role is not Role.TRAINING or not backlog.batches_ready:
        return False
    if state.behind > config.stay_behind or staleness(state, state.per_burst) > state.staleness_bound:
        return False
    others = state.having(Role.ROLLOUT, Role.TRAINING, Role.LEAVING, Role.REFRESHING)
    return wanted.executions <= sum(c.capacity for c in others if c.index)


def returning(state: State, at: float, config: SchedConfig) -> list[Cell]:
    """Training cells that go back to rollout now. They do not go earlier: their engines would take weights that the
    open batch is about to replace, and by the water rule the routable engines cover the work."""
    if state.water or state.stopping is not None or config.schedule == "async":
        return []
    training = state.having(Role.TRAINING)
    if not training or not readable(state):
        return []
    if settled(state, at, config):
        return training
    return [c for c in training if c.index] if core_stays(state, at, config) else []


def replace_obstacle(state: State, burst: int, *, ended: bool) -> str | None:
    """Why an execution of `burst` cannot be replaced; None if it can.

    ended: its end was counted before, so that the replacement raises the water level: what stays routable must cover
    it, or the cells that left for training would not have been allowed to.
    """
    last = state.burst
    if state.stopping is not None:
        return "the run is shutting down"
    if state.halted:
        return state.halted
    if last is None or last.index != burst:
        return f"burst {burst} is not the one granted last" + (f", {last.index} is" if last else "")
    if last.settled:
        return f"the data of burst {burst} counts as trained"
    if not ended:
        return None
    if not state.capacity:
        return "no engine is routable"
    away = state.having(*MOVING, Role.TRAINING, Role.LEAVING, Role.REFRESHING)
    if away and state.water + 1 > state.capacity:
        return f"{len(away)} cells left rollout, and the others host {state.capacity} executions, which are all in use"
    return None


def readable(state: State) -> bool:
    """Whether the current weights can be taken: their snapshot lives in the core's trainer."""
    return state.core.trainer_alive


def recalled(state: State, at: float, config: SchedConfig) -> Cell | None:
    """The healthy floor: with work but no engine for `floor_grace`, the training cell that would return first."""
    if state.bare_since is None or at - state.bare_since < config.floor_grace:
        return None
    if state.by_role[Role.LEAVING] or state.by_role[Role.REFRESHING] or not state.by_role[Role.TRAINING]:
        return None
    return state.cells[max(state.by_role[Role.TRAINING])]


def wanted_version(state: State) -> int:
    """Oldest weights an engine may join the routes with: those of the open burst, the current ones between bursts."""
    return state.burst.version if state.water and state.burst else state.version


def outdated(state: State, at: float, config: SchedConfig) -> list[Cell]:
    """Cells in rollout whose engines take the current weights now."""
    if state.stopping is not None or not readable(state):
        return []
    if state.water:
        due = config.refresh_in_rollout or config.admission == "continuous"
    else:
        due = config.schedule == "async" or bool(settled(state, at, config)) or core_stays(state, at, config)
    if not due or state.routing.all_at(state.version):
        return []
    return [c for c in state.having(Role.ROLLOUT) if c.version != state.version and not c.pending]


def grant_obstacle(state: State, at: float, config: SchedConfig, *, per_burst: int, steps: int) -> str | None:
    """Why no burst can be granted now; None if it can."""
    if state.stopping is not None:
        return f"shutting down: {state.stopping or 'asked to'}"
    if state.halted:
        return state.halted
    continuous = config.admission == "continuous"
    if state.water and not continuous:
        return f"burst {state.burst.index if state.burst else '?'} has {state.water} unfinished executions"
    if state.queued:
        return f"{state.queued} executions wait for a free place"
    backlog = state.backlog
    if backlog is None:
        return "the feed was not heard yet"
    if (state.due if state.granted else backlog.batches_closed) + per_burst > steps:
        return f"all {steps} steps have their executions"
    late = staleness(state, per_burst)
    if config.schedule == "async":
        if late > state.staleness_bound:
            return f"{state.behind} batches are not trained: the burst would be {late} versions behind"
        if backlog.version > state.version:
            return f"version {backlog.version} is not published yet"
    stays = core_stays(state, at, config)
    if config.schedule != "async" and not stays and settled(state, at, config) is None:
        return "data of the last burst is not trained yet"
    roles = [Role.STARTING, *MOVING, Role.LEAVING]
    if not (continuous and state.water):
        roles.append(Role.REFRESHING)
    if config.schedule != "async":
        roles.append(Role.TRAINING)
    if busy := state.first(*roles, but=0 if stays else None):
        return f"cell {busy.index} is {busy.role}"
    if config.schedule == "async" and (early := [c for c in state.having(Role.ROLLOUT) if c.may_train(config)]):
        return f"cell {early[0].index} does not train yet"
    if mending := [c for c in state.having(Role.FAILED) if c.mending(at, config)]:
        return f"cell {mending[0].index} has failed and may come back"
    if not state.capacity:
        return "no engine is routable"
    if not (continuous and state.water) and not state.routing.all_at(state.version):
        return f"engines are not at version {state.version} yet"
    return None
