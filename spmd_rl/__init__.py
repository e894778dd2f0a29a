"""RL post-training of LLMs as one batch job: every role lives in a single torchrun program."""

__version__ = "0.3.0"
