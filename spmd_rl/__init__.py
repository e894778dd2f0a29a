"""RL post-training of LLMs as one batch job: every role lives in a single torchrun program."""

import os

# torch reads it at its first allocation, thus before it is imported: large tensors on the host come in huge pages, and not with
# a page fault for each 4 KiB, which costs a tenth of a training step
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

__version__ = "0.3.0"
