"""Exact call records, trajectory trees, bounded selection, fair weights and packed batches for agent RL."""

from gyre_traj.admission import Admission, admit, check_outcome
from gyre_traj.advantage import group_advantages
from gyre_traj.errors import TrajError
from gyre_traj.intake import Ending, Outcome
from gyre_traj.log import Log, LogWriter, read_log
from gyre_traj.packing import Packed, PackedArrays, Row, pack_forests, pack_rows
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
    "Outcome",
    "Packed",
    "PackedArrays",
    "Record",
    "RolePriority",
    "Row",
    "Selection",
    "Span",
    "TrajError",
    "Trajectory",
    "Tree",
    "Weighted",
    "admit",
    "check_outcome",
    "group_advantages",
    "load_priority",
    "pack_forests",
    "pack_ids",
    "pack_logprobs",
    "pack_rows",
    "read_log",
    "select",
    "target_weights",
    "unpack_ids",
    "unpack_logprobs",
    "weigh",
]
