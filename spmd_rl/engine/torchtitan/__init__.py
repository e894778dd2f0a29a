"""TorchTitan as an engine: its decoder, its FSDP, TP, CP, PP and EP; packing, log-probs and the loop are ours.

TorchTitan itself is imported when an engine is made.
"""

from __future__ import annotations

from spmd_rl.engine.torchtitan.engine import TorchTitanEngine
from spmd_rl.engine.torchtitan.layout import LAYOUTS, Config, problems, process_layout, replica_width

__all__ = ["LAYOUTS", "Config", "TorchTitanEngine", "problems", "process_layout", "replica_width"]
