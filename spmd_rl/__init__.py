"""RL post-training of LLMs as one batch job: every role lives in a single torchrun program."""

import os

# Read while torch is imported: large tensors on the host come in huge pages, and not with a page fault for each 4 KiB
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

__version__ = "0.3.1"
