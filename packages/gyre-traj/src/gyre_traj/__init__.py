"""Exact call records, trajectory trees, bounded selection, fair weights and packed batches for agent RL.

Names are imported when first used, so that importing the package costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gyre_traj.admission import Admission, admit, check_outcome
    from gyre_traj.advantage import group_advantages
    from gyre_traj.errors import TrajError
    from gyre_traj.forest import unique_tokens
    from gyre_traj.intake import Ending, Outcome
    from gyre_traj.log import Log, LogWriter, read_log
    from gyre_traj.loss_config import LossConfig
    from gyre_traj.metrics import mean_metrics, merge_metrics
    from gyre_traj.node import Node
    from gyre_traj.packed import Packed, PackedArrays, PackedRow, TargetRun
    from gyre_traj.packer import Packer
    from gyre_traj.packing import pack_forests, pack_rows
    from gyre_traj.paths import Segment
    from gyre_traj.records import (
        Attempt,
        Call,
        Delivered,
        Header,
        Record,
        Span,
        pack_ids,
        pack_logprobs,
        unpack_ids,
        unpack_logprobs,
    )
    from gyre_traj.roles import DEFAULT_PRIORITY, RolePriority, load_priority
    from gyre_traj.rows import Row
    from gyre_traj.selection import Selection, Trajectory, select
    from gyre_traj.tree import Tree
    from gyre_traj.weights import Aggregation, Counting, Weighted, target_weights, weigh

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_PRIORITY",
    "Admission",
    "Aggregation",
    "Attempt",
    "Call",
    "Counting",
    "Delivered",
    "Ending",
    "Header",
    "Log",
    "LogWriter",
    "LossConfig",
    "Node",
    "Outcome",
    "Packed",
    "PackedArrays",
    "PackedRow",
    "Packer",
    "Record",
    "RolePriority",
    "Row",
    "Segment",
    "Selection",
    "Span",
    "TargetRun",
    "TrajError",
    "Trajectory",
    "Tree",
    "Weighted",
    "admit",
    "check_outcome",
    "group_advantages",
    "load_priority",
    "mean_metrics",
    "merge_metrics",
    "pack_forests",
    "pack_ids",
    "pack_logprobs",
    "pack_rows",
    "read_log",
    "select",
    "target_weights",
    "unique_tokens",
    "unpack_ids",
    "unpack_logprobs",
    "weigh",
]

_HOMES = {
    "admission": ("Admission", "admit", "check_outcome"),
    "advantage": ("group_advantages",),
    "errors": ("TrajError",),
    "forest": ("unique_tokens",),
    "intake": ("Ending", "Outcome"),
    "log": ("Log", "LogWriter", "read_log"),
    "loss_config": ("LossConfig",),
    "metrics": ("mean_metrics", "merge_metrics"),
    "node": ("Node",),
    "packed": ("Packed", "PackedArrays", "PackedRow", "TargetRun"),
    "packer": ("Packer",),
    "packing": ("pack_forests", "pack_rows"),
    "paths": ("Segment",),
    "records": (
        *("Attempt", "Call", "Delivered", "Header", "Record", "Span"),
        *("pack_ids", "pack_logprobs", "unpack_ids", "unpack_logprobs"),
    ),
    "roles": ("DEFAULT_PRIORITY", "RolePriority", "load_priority"),
    "rows": ("Row",),
    "selection": ("Selection", "Trajectory", "select"),
    "tree": ("Tree",),
    "weights": ("Aggregation", "Counting", "Weighted", "target_weights", "weigh"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
