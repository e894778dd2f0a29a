"""The peer of grpo_step.py: TRL's GRPOTrainer on the same work. Runs in an environment of its own, under torchrun.

Reads one JSON object from the command line (`Work` of grpo_step.py, and `model`, `out`, `prompts`) and writes one line a
step to `out`: seconds a phase, mean over the ranks; peak resident memory, maximum over the ranks.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[list[dict]], **columns) -> list[float]:
    """As `reward` of grpo_step.py: siblings all but never agree on it, so that no group is without an advantage."""
    return [len(chat[0]["content"]) / 100 for chat in completions]


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class StepTimes(TrainerCallback):
    """Wall and CPU seconds of the parts of each optimizer step."""

    def __init__(self, out: Path):
        self.file = out.open("w")
        self.spent: dict[str, float] = defaultdict(float)

    def timed(self, function, phase: str):
        """`function`, whose seconds are added to `phase`."""

        def wrapped(*args, **kwargs):
            start = now()
            result = function(*args, **kwargs)
            self.add(phase, start)
            return result

        return wrapped

    def add(self, phase: str, start: tuple[float, float]) -> None:
        for kind, begin, end in zip(("time", "cpu"), start, now()):
            self.spent[f"{kind}/{phase}"] += end - begin

    def on_step_begin(self, *args, **kwargs) -> None:
        self.spent.clear()
        self.start = now()

    def on_pre_optimizer_step(self, *args, **kwargs) -> None:
        self.optimizer = now()

    def on_optimizer_step(self, *args, **kwargs) -> None:
        self.add("optimizer", self.optimizer)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.add("step", self.start)
        for kind in ("time", "cpu"):
            s = self.spent
            # `_prepare_inputs` generates and scores once an optimizer step; what is left of training_step is the update
            s[f"{kind}/train"] = s[f"{kind}/training_step"] - s[f"{kind}/prepare"]
            s[f"{kind}/reward"] = s[f"{kind}/prepare"] - s[f"{kind}/generate"]
        names = sorted(self.spent)
        means = torch.tensor([self.spent[name] for name in names], dtype=torch.float64)
        peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, dtype=torch.float64)
        dist.all_reduce(means)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            record = dict(zip(names, (means / dist.get_world_size()).tolist()))
            self.file.write(json.dumps({"step": state.global_step, **record, "memory/rss_gb": peak.item()}) + "\n")
            self.file.flush()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if dist.get_rank() == 0 and "completions/mean_length" in logs:
            keep = {"tokens": logs["completions/mean_length"], "reward": logs["reward"]}
            self.file.write(json.dumps({"log": state.global_step, **keep}) + "\n")
            self.file.flush()


def main() -> None:
    work = json.loads(sys.argv[1])
    torch.set_num_threads(work["threads"])
    torch.set_float32_matmul_precision(work["matmul_precision"])
    half = work["dtype"] == "bfloat16"
    rows, micro, ranks = work["prompts_per_step"] * work["group"], work["rows_per_micro_batch"], work["ranks"]
    config = GRPOConfig(
        output_dir=str(Path(work["out"]).parent),
        use_cpu=True,
        bf16=half,
        fp16=False,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // (micro * ranks),
        num_generations=work["group"],
        max_completion_length=work["max_tokens"],
        generation_kwargs={"min_new_tokens": work["min_tokens"]} if work["min_tokens"] else None,
        max_steps=work["steps"],
        learning_rate=work["learning_rate"],
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        ddp_find_unused_parameters=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.bfloat16 if half else torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": chat} for chat in work["prompts"]]),
        processing_class=AutoTokenizer.from_pretrained(work["model"]),
    )
    times = StepTimes(Path(work["out"]) if dist.get_rank() == 0 else Path("/dev/null"))
    trainer._generate = times.timed(trainer._generate, "generate")
    trainer._prepare_inputs = times.timed(trainer._prepare_inputs, "prepare")
    trainer.training_step = times.timed(trainer.training_step, "training_step")
    trainer.add_callback(times)
    trainer.train()
    dist.barrier()  # without it gloo aborts now and then
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
