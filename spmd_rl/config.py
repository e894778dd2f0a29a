"""The common configuration: dataclasses and tables of names. Imports no torch.

A name in a table below may always be replaced by `package.module:attribute` of the user's own. To add one of ours:
write the function in the module of its family, add a row here, and a sentence in docs/extending.md.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass, field
from typing import Any

REGISTRY = "spmd_rl.engine.registry:EngineRegistry"
ROLLOUTS = {"vllm": "spmd_rl.roles.vllm_rollout:VLLMRollout", "hf": "spmd_rl.roles.hf_rollout:HFRollout"}
ADVANTAGES = {
    "grpo": "spmd_rl.advantages:grpo",
    "rloo": "spmd_rl.advantages:rloo",
    "reinforce_plus_plus": "spmd_rl.advantages:reinforce_plus_plus",
    "gae": "spmd_rl.advantages:gae",
}
POLICY_LOSSES = {"ppo": "spmd_rl.losses:ppo_term", "gspo": "spmd_rl.losses:gspo_term"}
REWARDS = {
    "exact": "spmd_rl.rewards:exact",
    "environment": "spmd_rl.rewards:environment",
    "numeric": "spmd_rl.rewards:numeric",
    "regex": "spmd_rl.rewards:regex",
    "math_verify": "spmd_rl.rewards:math_verify",
    "overlap": "spmd_rl.rewards:overlap",
    "reasoning_gym": "spmd_rl.rewards:reasoning_gym",
}
ENVIRONMENTS = {"calculator": "spmd_rl.environments:Calculator"}
DATASETS = {
    "letters": "spmd_rl.data:letters",
    "arithmetic": "spmd_rl.data:arithmetic",
    "calculator": "spmd_rl.environments:products",
    "reasoning_gym": "spmd_rl.data:reasoning_gym",
}
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
CORRECTIONS = ("auto", "off", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask")
SCHEDULES = ("constant", "linear", "cosine")
DTYPES = ("float32", "bfloat16")
AGREEMENT = {"float32": 1e-3, "bfloat16": 0.15}  # nats: mean |log-prob difference| allowed between two ways to compute it
MAX_ERROR = 0.2  # of Ziegler et al. 2019: how far off its target the controller of the KL coefficient sees
ROLES = ("actor", "rollout", "ref", "critic")


class ConfigError(ValueError):
    """The user's configuration is wrong; the message holds every problem, one a line."""


@dataclass
class ModelConfig:
    """`path`: a folder in Hugging Face layout, a hub id, or the name of an embedded model (see spmd_rl/models.py)."""

    path: str = "smollm2-135m-instruct"
    trust_remote_code: bool = False


@dataclass
class DataConfig:
    """`train`, `val`: a file (.jsonl, .parquet, .csv), a saved `datasets` folder, a name in DATASETS or `module:function`."""

    train: str = "arithmetic"
    val: str | None = None
    train_kwargs: dict[str, Any] = field(default_factory=dict)
    val_kwargs: dict[str, Any] = field(default_factory=dict)
    prompts_per_step: int = 16
    max_prompt_tokens: int = 512
    over_long: str = "error"  # error | drop | truncate (keeps the end of the prompt)
    shuffle: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardConfig:
    """A weighted sum of functions. `functions` maps a name in REWARDS or `module:function` to its weight."""

    functions: dict[str, float] = field(default_factory=lambda: {"numeric": 1.0})
    kwargs: dict[str, Any] = field(default_factory=dict)  # name -> keyword arguments bound to that function
    workers: int = 2  # worker processes on each rank that scores
    timeout_s: float = 10.0  # for one call on one sample
    on_error: str = "drop"  # drop (mask the sample out and count it) | raise
    overlong_buffer: int = 0  # tokens before max_response_tokens over which a linear penalty grows (DAPO); 0 = off
    overlong_factor: float = 1.0


@dataclass
class EngineConfig:
    """What every training engine understands; a backend's own dataclass extends it."""

    backend: str = "fsdp"
    dtype: str = "auto"  # compute dtype: auto (bfloat16 on cuda, float32 on cpu) | float32 | bfloat16; master weights are float32
    max_tokens_per_micro_batch: int = 4096
    shared_prompt: bool = True
    activation_checkpointing: bool = False
    offload: bool = False  # parameters and optimizer live on the host between passes
    logprob_chunk: int = 256  # response tokens whose logits exist at one time
    matmul_precision: str = "highest"  # torch.set_float32_matmul_precision: highest | high | medium


@dataclass
class OptimizerConfig:
    learning_rate: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad_norm: float = 1.0  # global L2 norm; 0 = no clipping
    schedule: str = "constant"
    warmup_steps: int = 0  # update k of the warm-up uses (k + 1) / (warmup_steps + 1): no update is void
    min_lr_ratio: float = 0.0
    total_steps: int | None = None  # optimizer steps of the whole run; None: those of the trainer


@dataclass
class CheckpointConfig:
    """What a role saves and loads."""

    optimizer: bool = True


@dataclass
class RolloutConfig:
    """The last five are vLLM's."""

    backend: str = "vllm"
    n: int = 8  # samples of each prompt: the group
    temperature: float = 1.0
    top_p: float = 1.0  # only 1 and 0: a truncated distribution is not the one that the trainer's log-probs are of
    top_k: int = 0
    max_response_tokens: int = 64
    min_response_tokens: int = 0
    stop_token_ids: list[int] = field(default_factory=list)  # besides the model's own end-of-sequence ids
    dtype: str = "auto"  # auto: the engine's
    max_batch_rows: int = 64  # sequences decoded together on a replica
    max_logprob_diff: float | None = None  # abort over it, nats; None: 1e-3 on cpu in float32, else off; 0: off
    max_step_tokens: int = 0  # tokens that a sample may grow by in one step; 0: to its end
    max_step_seconds: float = 0.0  # a deadline of generation, not reproducible; 0: none
    tensor_parallel_size: int = 1  # ranks of a replica
    max_model_len: int | None = None  # tokens of prompt and response; None: what data and rollout allow
    kv_cache_gb: float | None = None  # a rank; None: cpu: what max_batch_rows of the longest sequences need, cuda: what is left
    gpu_memory_utilization: float = 0.6  # cuda: fraction of the device for weights and cache while generating
    block_size: int = 32  # tokens of a cache block; siblings share whole blocks of their prompt


@dataclass
class AlgorithmConfig:
    advantage: str = "grpo"
    normalize_std: bool = True  # grpo: divide by the group's standard deviation; False is Dr.GRPO
    gamma: float = 1.0
    lam: float = 0.95
    policy_loss: str = "ppo"
    clip_ratio: float = 0.2
    clip_ratio_high: float | None = None  # None: clip_ratio
    dual_clip: float | None = None
    aggregation: str = "token-mean"
    aggregation_length: int | None = None  # the constant of seq-mean-token-sum-norm
    kl_coef: float = 0.0  # of the KL to the reference; with kl_target its first value
    kl_type: str = "auto"  # k1 | k2 | k3; auto: k3 in the loss, k1 in the reward
    kl_in_reward: bool = False  # the KL is subtracted from each token's reward, instead of added to the loss
    kl_target: float | None = None  # nats a sample to which kl_coef is steered; None: it stays as it is
    kl_horizon: float = 10000.0  # samples over which it follows: each changes it by at most 0.2 / kl_horizon of itself
    entropy_coef: float = 0.0
    entropy_metric: bool = False
    value_clip: float | None = 0.2
    rollout_correction: str = "auto"  # CORRECTIONS; auto: token-truncate in bfloat16 and where steps are limited
    rollout_correction_cap: float = 2.0
    epochs: int = 1
    num_mini_batches: int = 1


@dataclass
class EnvironmentConfig:
    """Episodes of several turns. `name`: in ENVIRONMENTS, or `module:attribute` of your own; None: one turn, no environment."""

    name: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    role: str = "tool"  # tool | user: whose message an observation is in the chat template
    max_turns: int = 8  # assistant turns of an episode
    timeout_s: float = 30.0  # for one reset or step
    workers: int = 64  # processes of a replica, one a live episode


@dataclass
class RefConfig:
    engine: Any = None  # a section like `engine`; None: the actor's


@dataclass
class CriticConfig:
    path: str | None = None  # as model.path; None: the actor's base model
    engine: Any = None  # a section like `engine`; None: the actor's
    warmup_steps: int = 0  # of the trainer, the first ones: only the critic trains
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class PlacementConfig:
    """Ranks of each role: `all`, a range `0-3`, a list `0,2,5`, or the name of the role whose ranks it shares."""

    actor: str = "all"
    rollout: str = "actor"
    ref: str = "actor"
    critic: str = "actor"


@dataclass
class TrainerConfig:
    total_steps: int = 10
    seed: int = 0
    device: str = "auto"  # auto | cpu | cuda
    lookahead: int = 0  # 1: the samples of a step are drawn while the step before trains, by weights one version older
    run_dir: str = "outputs/run"
    save_every: int = 0  # 0: only after the last step, and not at all when keep is 0
    keep: int = 2  # complete checkpoints kept
    resume: str = "auto"  # auto | never | the path of a step folder
    eval_every: int = 0
    val_before: bool = False
    val_n: int = 1  # samples a validation prompt; 1 is greedy
    val_temperature: float = 1.0  # used when val_n > 1
    export_hf: bool = False  # after the last step, write a Hugging Face folder
    sample_rows: int = 4  # rows of the sample table a step
    min_free_gb: float = 0.25  # of device memory, around each phase; below it the run stops and shows who holds what


@dataclass
class LoggerConfig:
    console: bool = True
    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = "spmd_rl"
    wandb_mode: str = "offline"


@dataclass
class TimeoutConfig:
    collective: float = 600.0  # seconds that ranks wait for each other inside one collective
    phase: float = 7200.0  # seconds that a cell waits for another cell


@dataclass
class DebugConfig:
    ledger: bool = False  # compare the names of collectives on every rank before each one
    ledger_timeout: float = 300.0  # seconds that a rank waits there for another; one cell may lag another by minutes


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    engine: Any = field(default_factory=EngineConfig)  # the dataclass that the backend's registry row names
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)


def engine_of(config: Config, role: str) -> EngineConfig:
    """The engine section of a training role: its own, or the actor's."""
    own = {"ref": config.ref.engine, "critic": config.critic.engine}.get(role)
    return config.engine if own is None else own


def closest(name: str, names) -> str:
    """` (did you mean 'x'?)` where something in `names` is near to `name`, else nothing."""
    match = difflib.get_close_matches(str(name), [str(n) for n in names], n=1, cutoff=0.5)
    return f" (did you mean '{match[0]}'?)" if match else ""


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def resolve(name: str, table: dict[str, str]) -> Any:
    """The object behind a short name in `table`, or behind `package.module:attribute`.

    Raises ValueError for a name that is neither, and for a module or attribute that does not exist."""
    path = table.get(name, name)
    module, _, attribute = path.partition(":")
    if not attribute:
        raise ValueError(f"unknown name '{name}'{closest(name, table)}; known: {', '.join(table)}, or module:attribute")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            raise ValueError(f"no module '{module}' for '{name}'") from error
        raise
    if attribute not in vars(found):
        raise ValueError(f"module '{module}' has no '{attribute}'{closest(attribute, vars(found))}")
    return vars(found)[attribute]
