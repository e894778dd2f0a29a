"""Megatron-Core as an engine: tensor, sequence, pipeline, context and expert parallelism, and the distributed optimizer."""
