"""vLLM inside the rank against transformers with the same weights, in float32, and what it must leave alone.

A process holds one engine: each model is one fork of a process that has imported vLLM; the containment is shown in fresh ones.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import random
import signal
import sys
import tempfile
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from spmd_rl.batch import Prompts, Sampling
from spmd_rl.collectives import barrier
from spmd_rl.config import OptimizerConfig, RolloutConfig, TimeoutConfig
from spmd_rl.engine.base import EngineModel
from spmd_rl.engine.fsdp import FSDPConfig
from spmd_rl.launch import detect_launch
from spmd_rl.mesh import Role, close_world, open_store, split_world
from spmd_rl.placed import WeightStream, shard_prompts
from spmd_rl.roles.generation import Request, RolloutModel
from spmd_rl.roles.server_adapter import ServerAdapter
from spmd_rl.roles.training_worker import TrainingWorker, TrainingWorkerConfig
from spmd_rl.roles.vllm_rollout import VLLMRollout
from tests.forks import VLLM, fork_ranks
from tests.helpers import forward_log_probs, randomize, wide_model
from tests.launch import spmd

pytestmark = pytest.mark.spmd
STOPS = (2, 7, 13, 21, 40, 66)  # many, so that rows end at many lengths
PROBE = ((5, 9, 33, 4, 60, 61, 7, 90), (3, 44, 12, 80, 2, 5))
CONFIG = RolloutConfig(dtype="float32", max_model_len=128, max_batch_rows=8)
MODELS = [("llama", True), ("llama", False), ("qwen3", True), ("qwen3", False), ("qwen2", True), ("qwen2", False)]
LAYOUTS = {"one": (1, 1), "two": (2, 1), "tp2": (2, 2), "two_of_tp2": (4, 2)}  # name: (ranks, lanes of a replica)


def start(width: int = 1):
    """(world, mesh of the rollout) of all ranks of this launch."""
    launch, timeouts = detect_launch(), TimeoutConfig(collective=120, phase=120)
    ranks = tuple(range(launch.world_size))
    roles = {"actor": Role(ranks, len(ranks)), "rollout": Role(ranks, len(ranks) // width)}
    world = split_world(roles, launch, open_store(launch, timeouts), "cpu", timeouts)
    return world, world.meshes["rollout"]


def prompts_of(count: int, seed: int = 3, vocabulary: int = 97) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (3 + 5 * i % 23,), generator=g).tolist() for i in range(count)]


def sampling(temperature: float = 1.0, max_tokens: int = 16, stops=STOPS, n: int = 1) -> Sampling:
    return Sampling(temperature, n, 0, max_tokens, stops)


def requests_of(prompts: list[list[int]], max_tokens: int = 16, min_tokens: int = 0) -> list[Request]:
    return [Request(ids, 1000 + i, min_tokens, max_tokens) for i, ids in enumerate(prompts)]


def greedy(model, ids: list[int], max_tokens: int, stops=STOPS) -> list[int]:
    prompt = torch.tensor([ids])
    how = {"do_sample": False, "max_new_tokens": max_tokens, "eos_token_id": list(stops), "pad_token_id": 0}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)[0, len(ids) :].tolist()


def check_greedy(backend, model):
    """The tokens of transformers' generate, and its log-probs at temperature 1."""
    prompts = prompts_of(12)
    replies = backend.complete(requests_of(prompts), sampling(0.0))
    assert [reply.ids for reply in replies] == [greedy(model, ids, 16) for ids in prompts]
    assert len({tuple(reply.ids) for reply in replies}) > 6
    for ids, reply in zip(prompts, replies):
        assert reply.stopped == (reply.ids[-1] in STOPS)
        check_log_probs(model, ids, reply, 1.0)


def check_log_probs(model, prompt, reply, temperature):
    whole = prompt + reply.ids
    expected = forward_log_probs(model, whole, temperature)[len(prompt) - 1 : -1].gather(1, torch.tensor(reply.ids)[:, None])[:, 0]
    assert len(reply.log_probs) == len(reply.ids)
    torch.testing.assert_close(torch.tensor(reply.log_probs), expected, atol=1e-4, rtol=0)


def check_update(backend, model, seed):
    """Other weights, and everything sampled or scored is theirs."""
    backend.update_weights(randomize(model, seed).named_parameters())
    check_greedy(backend, model)
    for temperature in (1.0, 0.7):
        prompts = prompts_of(10, seed)
        for ids, reply in zip(prompts, backend.complete(requests_of(prompts), sampling(temperature))):
            check_log_probs(model, ids, reply, temperature)
    rows = [*PROBE, prompts_of(5)[4] * 4, [7, 8]]
    for row, found in zip(rows, backend.score(rows), strict=True):
        expected = forward_log_probs(model, row)[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)


def check_limits(backend, model):
    """Several stop ids, min and max tokens, n samples, and that a draw depends on its seed alone."""
    prompts = prompts_of(10)
    free = backend.complete(requests_of(prompts, 24), sampling(max_tokens=24, stops=()))
    assert {len(reply.ids) for reply in free} == {24} and not any(reply.stopped for reply in free)
    assert any(set(STOPS) & set(reply.ids) for reply in free)
    for reply, cut in zip(free, backend.complete(requests_of(prompts, 24), sampling(max_tokens=24))):
        end = next((i + 1 for i, token in enumerate(reply.ids) if token in STOPS), 24)
        assert cut.ids == reply.ids[:end] and cut.stopped == (end < 24 or reply.ids[-1] in STOPS)
    late = backend.complete(requests_of(prompts, 24, 10), sampling(max_tokens=24))
    for ids, reply in zip(prompts, late):
        assert len(reply.ids) >= 10 and not set(STOPS) & set(reply.ids[:9])
        first = forward_log_probs(model, ids)[-1]
        first[list(STOPS)] = -math.inf
        assert reply.log_probs[0] == pytest.approx(float(first.log_softmax(-1)[reply.ids[0]]), abs=1e-4)
    assert any(len(reply.ids) < 24 for reply in late)

    wanted = [Request(ids, 50 + s, 0, 12) for ids in prompts for s in range(3)]
    drawn = [reply.ids for reply in backend.complete(wanted, sampling(stops=()))]
    assert all(len({tuple(ids) for ids in drawn[i : i + 3]}) == 3 for i in range(0, len(drawn), 3))
    some = list(range(29, 0, -4))
    assert [reply.ids for reply in backend.complete([wanted[i] for i in some], sampling(stops=()))] == [drawn[i] for i in some]
    assert backend.complete([wanted[4]], sampling(stops=()))[0].ids == drawn[4]
    assert backend.complete([], sampling()) == []


def check_interruption(backend, model):
    """A deadline leaves what is there; a reply may be continued, and what follows is as before."""
    prompts = prompts_of(12)  # more than are decoded together
    whole = backend.complete(requests_of(prompts, 30), sampling(max_tokens=30, stops=()))
    calls = count()
    partial = backend.complete(requests_of(prompts, 30), sampling(max_tokens=30, stops=()), lambda: next(calls) >= 6)
    assert next(calls) < 12 and 0 < max(len(reply.ids) for reply in partial) < 10 and partial[-1].ids == []
    for reply, full in zip(partial, whole):
        assert not reply.stopped and reply.ids == full.ids[: len(reply.ids)] and len(reply.log_probs) == len(reply.ids)
    unlimited = backend.complete(requests_of(prompts, 30), sampling(max_tokens=30, stops=()), lambda: False)
    assert [reply.ids for reply in unlimited] == [reply.ids for reply in whole]

    more = [Request(p + r.ids, 1000 + i + len(r.ids), 0, 30 - len(r.ids)) for i, (p, r) in enumerate(zip(prompts, partial))]
    for request, reply in zip(more, backend.complete(more, sampling(max_tokens=30, stops=()))):
        assert len(reply.ids) == request.max_tokens
        check_log_probs(model, request.ids, reply, 1.0)


def check_prefix_cache(backend, model):
    """Siblings share whole blocks of their prompt; an update empties the cache."""
    ids = prompts_of(20, 4)[4] * 4
    assert len(ids) >= 70

    def cached() -> tuple[float, float]:
        backend.take_counts()
        backend.complete([Request(ids, 1, 0, 2)], sampling())
        return backend.take_counts()["rollout/prefix_cache_hit_rate"]

    assert cached() == (0, len(ids)) and cached() == (len(ids) // 32 * 32, len(ids))
    backend.update_weights(model.named_parameters())
    assert cached() == (0, len(ids))
    backend.complete([Request(ids, seed, 0, 2) for seed in range(4)], sampling())
    hits, total = backend.take_counts()["rollout/prefix_cache_hit_rate"]
    assert total == 4 * len(ids) and hits >= 3 * 64


def one_model(folder: Path) -> None:
    """Body of a fork; FOLDER/what.json: whether to make all checks."""
    everything = json.loads((folder / "what.json").read_text())
    world, mesh = start()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    backend = VLLMRollout(CONFIG, RolloutModel(str(folder / "model"), (2,)), mesh)
    for seed in (1, 2):
        check_update(backend, model, seed)
    if everything:
        check_limits(backend, model)
        check_interruption(backend, model)
        check_prefix_cache(backend, model)
    backend.shutdown()
    close_world(world)


@pytest.mark.parametrize(("kind", "tied"), MODELS)
def test_an_updated_engine_is_transformers(kind, tied, tmp_path):
    wide_model(kind, tied, tmp_path / "model")
    (tmp_path / "what.json").write_text(json.dumps((kind, tied) == ("llama", False)))
    fork_ranks("tests.spmd.test_vllm:one_model", tmp_path, 1, preload=VLLM)


def expected_of(model) -> list[list[float]]:
    rows = ((row, forward_log_probs(model, list(row))) for row in PROBE)
    return [found[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist() for row, found in rows]


def prompts_batch(prompts: list[list[int]], first: int = 100) -> Prompts:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
    uid = first + torch.arange(len(prompts))
    lengths = torch.tensor([len(p) for p in prompts])
    return Prompts(input_ids=ids, lengths=lengths, uid=uid, row=uid, data_source=0 * uid, batch_size=[len(prompts)])


def one_layout(folder: Path) -> None:
    """Body of a fork; FOLDER/what.json: lanes of a replica. Leaves rowsRANK.json: what `found` below holds."""
    width = json.loads((folder / "what.json").read_text())
    world, mesh = start(width)
    model = randomize(AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32), 1)
    rollout_model = RolloutModel(str(folder / "model"), (2,), probe=PROBE)
    adapter = ServerAdapter(replace(CONFIG, tensor_parallel_size=width), rollout_model, 7, mesh)
    for version in (4, 5):
        randomize(model, version)
        adapter.update_weights(WeightStream(mesh, model.named_parameters(), lambda: expected_of(model), version), version)
        check_greedy(adapter.backend, model)
    found = []
    for batch in (prompts_batch(prompts_of(5)), prompts_batch(prompts_of(6)[5:], 105)):  # the second leaves a replica without work
        local = adapter.generate(shard_prompts(batch, mesh), sampling(0.9, n=3), step=2).local
        assert ((local.policy_version == 5) == local.response_mask).all()
        for b, (uid, first, end) in enumerate(zip(local.uid.tolist(), local.prompt_lengths.tolist(), local.lengths.tolist())):
            assert bool(local.truncated[b]) == (end - first == 16 and int(local.input_ids[b, end - 1]) not in STOPS)
            ids, log_probs = local.input_ids[b, :end].tolist(), local.rollout_log_probs[b, first:end].tolist()
            found.append([uid, int(local.sample[b]), len(local), ids, log_probs])
    (folder / f"rows{world.rank}.json").write_text(json.dumps(found))
    assert adapter.take()["rollout/probe_diff_max"].value < 1e-4
    adapter.shutdown()
    close_world(world)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """Name -> the rows of each rank, of one launch each."""
    found = {}
    for name, (ranks, width) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(name)
        wide_model("qwen3", True, folder / "model")
        (folder / "what.json").write_text(json.dumps(width))
        fork_ranks("tests.spmd.test_vllm:one_layout", folder, ranks, preload=VLLM)
        found[name] = [json.loads((folder / f"rows{rank}.json").read_text()) for rank in range(ranks)]
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_samples_on_every_layout(layouts, name):
    """Each once, with all lanes of a replica alike."""
    ranks, width = LAYOUTS[name]
    for rank, rows in enumerate(layouts[name]):
        assert rows == layouts[name][rank - rank % width]
    rows = [row for rows in layouts[name][::width] for row in rows]
    samples = {(uid, sample): (ids, log_probs) for uid, sample, _, ids, log_probs in rows}
    assert len(rows) == len(samples) == 18
    assert {row[2] for row in rows} == ({6, 9, 3} if ranks > width else {15, 3})
    expected = {(row[0], row[1]): row[3:] for row in layouts["one"][0]}
    assert samples.keys() == expected.keys()
    for key, (ids, log_probs) in samples.items():
        assert ids == expected[key][0], key
        assert log_probs == pytest.approx(expected[key][1], abs=1e-4)


MOVING = ("os.environ", "tempfile._name_sequence")
WATCHED = (torch, torch.cuda, torch.accelerator, torch.Tensor, torch.nn.functional, dist, tempfile, os, random, np.random)


def listening() -> set[str]:
    """Addresses of this process's sockets that others could connect to: all but those of the loopback device."""
    mine = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}

    def table(kind: str, inode: int):
        rows = (row.split() for row in Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:])
        return [row for row in rows if f"socket:[{row[inode]}]" in mine]

    addresses = {row[1] for kind in ("tcp", "tcp6") for row in table(kind, 9) if row[3] == "0A"}
    return {a for a in addresses if not a.startswith("0100007F")} | {row[7] for row in table("unix", 6) if len(row) > 7}


def surroundings(folder: Path) -> dict:
    """What is not vLLM's business, by name."""
    patched = {f"{owner.__name__}.{name}": value for owner in WATCHED for name, value in vars(owner).items()}
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_text() for child in children]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        **{name: value for name, value in patched.items() if name not in MOVING},
        "torch's draws": torch.get_rng_state().tolist(),
        "numpy's draws": str(np.random.get_state()),
        "python's draws": random.getstate(),
        "environment": dict(os.environ),
        "threads of torch": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "frozen objects": gc.get_freeze_count(),
        "signals": [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)],
        "exception hook": sys.excepthook,
        "root logger": (list(logging.getLogger().handlers), logging.getLogger().level),
        "default group": dist.group.WORLD,
        "child processes": [line for line in commands if "resource_tracker" not in line],  # Python's own, ends with its parent
        "shared memory": sorted(line for line in maps if "/dev/shm" in line and "(deleted)" not in line),
        "temporary files": sorted(str(path) for path in (folder / "tmp").rglob("*")),
        "sockets": listening(),
    }


def check_surroundings(before: dict, folder: Path, where: str):
    after = surroundings(folder)
    assert not (changed := [name for name in before if after.get(name) is not before[name] and after.get(name) != before[name]]), (
        where,
        [(name, str(before[name])[:500], str(after.get(name))[:500]) for name in changed],
    )


@spmd(world_size=2, timeout=150)
def test_what_is_not_its_own_stays_as_it_was(folder):
    """Two lanes, in processes that had not imported vLLM: after the start, at work, and after the end."""
    (folder / "tmp").mkdir(exist_ok=True)
    os.environ.update(TMPDIR=str(folder / "tmp"), LOCAL_WORLD_SIZE="2", LD_PRELOAD="")
    tempfile.tempdir = str(folder / "tmp")
    world, mesh = start(2)
    if world.rank == 0:
        wide_model("llama", True, folder / "model")
    barrier(world.control, "model")
    model = randomize(AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32), 1)
    assert not [name for name in sys.modules if name.startswith("vllm")]
    torch.manual_seed(11), np.random.seed(12), random.seed(13)
    greedy(model, [5, 6], 2)
    before = surroundings(folder)
    backend = VLLMRollout(replace(CONFIG, tensor_parallel_size=2), RolloutModel(str(folder / "model"), (2,)), mesh)
    barrier(world.control, "started")
    check_surroundings(before, folder, "after the start")
    backend.update_weights(model.named_parameters())
    backend.complete(requests_of(prompts_of(3)), sampling())
    backend.score(PROBE)
    check_surroundings(before, folder, "after work")
    assert torch.initial_seed() == 11
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    backend.complete(requests_of(prompts_of(3)), sampling())
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    backend.shutdown()
    check_surroundings(before, folder, "after the end")
    total = torch.tensor([world.rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3
    close_world(world)


ROWS = "model.layers.0.mlp.down_proj.weight"
GATE, UP = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))


def permuted(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(0) if name == ROWS else tensor


TAMPERED = {  # what becomes of the pairs: (exception, what its text names)
    "drop a part of a fused tensor": (lambda named: [p for p in named if "0.self_attn.q_proj" not in p[0]], ValueError, "q_proj"),
    "drop": (lambda named: [p for p in named if p[0] != ROWS], ValueError, "mlp.down_proj.weight"),
    "drop the last norm": (lambda named: [p for p in named if p[0] != "model.norm.weight"], ValueError, "model.norm.weight"),
    "rename": (lambda named: [(n.replace("0.mlp.up", "0.mlp.over"), t) for n, t in named], ValueError, "mlp.over_proj"),
    "shape": (lambda named: [(n, t[:-32] if n == ROWS else t) for n, t in named], ValueError, ROWS),
    "transpose": (lambda named: [(n, t.T if n == ROWS else t) for n, t in named], ValueError, ROWS),
    "swap": (lambda named: [({GATE: UP, UP: GATE}.get(n, n), t) for n, t in named], RuntimeError, "probe"),
    "permute": (lambda named: [(n, permuted(n, t)) for n, t in named], RuntimeError, "probe"),
    "stale": (lambda named: [(n, 0.9 * t if n == "lm_head.weight" else t) for n, t in named], RuntimeError, "probe"),
}


def proofs(folder: Path) -> None:
    """Body of a fork: streams of a sharded actor to a replica on each of 2 ranks, whole and tampered with."""
    world, mesh = start()
    model = EngineModel(str(folder / "model"), "language_model", False)
    engine = FSDPConfig(dtype="float32", shard_size=len(mesh.ranks))
    actor = TrainingWorker(
        TrainingWorkerConfig("actor", model, engine, OptimizerConfig(), "old_log_probs", probe=PROBE), world.meshes["actor"]
    )
    adapter = ServerAdapter(CONFIG, RolloutModel(str(folder / "model"), (2,), probe=PROBE), 7, mesh)

    def update(version: int, change=lambda named: named) -> None:
        stream = actor.weights(version).to(mesh)
        adapter.update_weights(replace(stream, named=change([(n, t.clone()) for n, t in stream.named])), version)

    def whole(version: int) -> None:
        update(version)
        stats = adapter.take()
        assert 0 < stats["rollout/probe_diff_max"].value < 1e-4 and stats["rollout/probe_diff_mean"].total < 1e-5
        assert adapter.version == version

    whole(1)
    assert len(actor.weights(0).expected()) == len(PROBE)
    found, cases = {}, json.loads((folder / "what.json").read_text())
    for name, (change, error, text) in ((name, TAMPERED[name]) for name in cases):
        try:
            update(5, change)
            found[name] = "passed"
        except Exception as raised:
            named = isinstance(raised, error) and text in str(raised) and (error is ValueError or "version 5" in str(raised))
            found[name] = None if named else f"{type(raised).__name__}: {raised}"
        assert adapter.version < 5, name
        if error is RuntimeError:  # a loader that raised may be left half way
            whole(2)
    wrong = {name: what for name, what in found.items() if what}
    for change in (
        ()
        if wrong or len(cases) == 1
        else (lambda n, t: t * (1 + 1e-6) if n == ROWS else t, lambda n, t: t.clone() if n != GATE else t + 0.1)
    ):
        with pytest.raises(RuntimeError, match=r"version 6: rank 1 was handed other tensors than rank 0"):
            update(6, lambda named, change=change: [(n, change(n, t) if world.rank else t) for n, t in named])
        whole(3)
    assert not wrong, wrong
    adapter.shutdown()
    close_world(world)


def prove(folder: Path, cases: list[str], ranks: int) -> None:
    wide_model("llama", False, folder / "model")
    (folder / "what.json").write_text(json.dumps(cases))
    fork_ranks("tests.spmd.test_vllm:proofs", folder, ranks, preload=VLLM)


@pytest.mark.parametrize("case", [name for name, (_, error, _) in TAMPERED.items() if error is ValueError])
def test_a_stream_that_does_not_fit_is_refused(case, tmp_path):
    prove(tmp_path, [case], 1)


def test_a_stream_that_was_tampered_with_is_refused(tmp_path):
    prove(tmp_path, [name for name, (_, error, _) in TAMPERED.items() if error is RuntimeError], 2)
