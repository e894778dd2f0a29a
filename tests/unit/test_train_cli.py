from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spmd_rl.launch import detect_launch
from spmd_rl.train import compose_config, main, shared_problems
from spmd_rl.validation import validate

ROOT = Path(__file__).parents[2]
WRONG = {  # override -> what is said of it
    "trainer.total_step=3": "trainer.total_step: unknown key (did you mean 'total_steps'?)",
    "rollout.n=many": "rollout.n: ",
    "algorithm.advantage=grop": "algorithm.advantage: 'grop' is unknown (did you mean 'grpo'?)",
    "optimizer.schedule=cosin": "optimizer.schedule: 'cosin' is unknown (did you mean 'cosine'?)",
    "placement.actor=7": "placement.actor: ranks 7 do not exist",
    "placement.rollout=8": "placement.rollout: ranks 8 do not exist",
    "engine.max_tokens_per_micro_batch=1": "engine.max_tokens_per_micro_batch: 1 ",
}


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A plain `python -m`, in a folder of its own: no launcher's variables, and nothing written beside the tests."""
    for name in [*os.environ]:
        if name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") or name.startswith(("SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(text)
    return folder


def test_help_names_groups_choices_and_keys(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "algorithm: dapo, dr_grpo, grpo" in shown and "logger: console, tensorboard, wandb" in shown
    assert all(key in shown for key in ("--config-dir", "--cfg", "total_steps: 10", "max_tokens_per_micro_batch:", "shard_size:"))


@pytest.mark.parametrize("arguments", [[], ["--config-name", "tiny", "algorithm=ppo", "rollout.n=3", "data.train_kwargs.seed=5"]])
def test_a_printed_configuration_composes_to_itself(arguments, capsys, tmp_path):
    assert main([*arguments, "--cfg", "job"]) == 0
    folder = write(tmp_path / "mine", "printed", capsys.readouterr().out)
    assert main(["--config-dir", str(folder), "--config-name", "printed", "--cfg", "job"]) == 0
    assert capsys.readouterr().out == (folder / "printed.yaml").read_text()
    name, overrides = ("tiny", arguments[2:]) if arguments else ("train", [])
    assert compose_config("printed", folder, []) == compose_config(name, None, overrides)


def test_a_users_file_starts_from_ours_and_brings_its_own_groups(tmp_path, capsys):
    folder = write(tmp_path / "mine", "math", "defaults: [tiny, override algorithm: soft, _self_]\nrollout: {n: 5}\n")
    write(folder / "algorithm", "soft", "advantage: rloo\nclip_ratio: 0.3\n")
    config, problems = compose_config("math", folder, ["engine=fsdp", "trainer.seed=4"])
    assert (problems, validate(config, 2)) == ([], [])
    assert (config.rollout.n, config.algorithm.advantage, config.algorithm.clip_ratio, config.trainer.seed) == (5, "rloo", 0.3, 4)
    assert (config.model.path, config.reward.functions) == ("tiny", {"overlap": 1.0})
    assert main(["--config-dir", str(folder), "--config-name", "math", "--help"]) == 0
    assert "soft" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["algorithm=grop", "engine=fdsp"], ["algorithm: 'grop' is unknown (did you mean 'grpo'?)", "rloo", "engine: 'fdsp'"]),
        (["rollout=3"], ["rollout: '3' is unknown - set one of hf"]),
        (["algorithn=grpo"], ["algorithn: unknown key (did you mean 'algorithm'?)"]),
        (["+extra=1"], ["extra: unknown key"]),
        (["trainer.total_steps"], ["config: ", "trainer.total_steps", "--help"]),
        (["placement.rollout=0,2"], ["config: ", "placement.rollout=0,2", "quote the value"]),
        (["--config-name", "nope"], ["config: ", "'nope'", "--help"]),
        (["--config-dir", "nowhere"], ["config: ", "nowhere"]),
    ],
)
def test_what_cannot_be_composed_is_explained(arguments, fragments, capsys, tmp_path):
    assert main([*arguments, f"trainer.run_dir={tmp_path}/run"]) == 2
    shown = capsys.readouterr()
    assert all(fragment in shown.err for fragment in fragments) and shown.out == "", shown
    assert json.loads((tmp_path / "run" / "status.json").read_text())["code"] == 2


def test_auto_takes_what_the_machine_has(monkeypatch):
    def found(*overrides: str) -> tuple[str, str, str]:
        config, problems = compose_config("tiny", None, list(overrides))
        assert problems == []
        return config.trainer.device, config.engine.dtype, config.rollout.dtype

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert found() == ("cpu", "float32", "float32")
    assert found("engine.dtype=bfloat16") == ("cpu", "bfloat16", "bfloat16")
    assert found("engine.dtype=bfloat16", "rollout.dtype=float32") == ("cpu", "bfloat16", "float32")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert found() == ("cuda", "bfloat16", "bfloat16")
    assert found("trainer.device=cpu") == ("cpu", "float32", "float32")


def test_auto_of_the_rollout_follows_its_dtype(monkeypatch):
    """Whether rollout and trainer can agree to the bit, and what is done where they cannot."""

    def found(*overrides: str) -> tuple[float, str, int]:
        config, problems = compose_config("tiny", None, list(overrides))
        assert problems == [] and validate(config, 1) == []
        return config.rollout.max_logprob_diff, config.algorithm.rollout_correction, config.rollout.max_model_len

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert found() == (1e-3, "off", 32 + 8)
    assert found("rollout.dtype=bfloat16") == (0, "token-truncate", 40)
    assert found("engine.dtype=bfloat16", "rollout.dtype=float32") == (0, "off", 40)
    assert found("rollout.min_response_tokens=2") == (0, "off", 40)
    given = ["rollout.max_logprob_diff=0.5", "algorithm.rollout_correction=sequence-mask", "rollout.max_model_len=100"]
    assert found("rollout.dtype=bfloat16", *given) == (0.5, "sequence-mask", 100)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert found("rollout=hf") == (0, "token-truncate", 40)
    assert found("rollout=hf", "engine.dtype=float32") == (0, "off", 40)


def test_what_srun_lacks_ends_with_one_message(monkeypatch, capsys):
    tasks = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"}
    for name, value in tasks.items():
        monkeypatch.setenv(name, value)
    for rank in range(3):
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        assert main([]) == 2
    assert capsys.readouterr().err.count("3 tasks on 2 nodes") == 1


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([None, None, None], []),
        (["a"] * 3, ["a"]),
        ([None, "a", "a"], ["rank 1: a"]),
        (["b", None, "a"], ["rank 0: b", "rank 2: a"]),
    ],
)
def test_what_ranks_lack_is_told_once_on_every_rank(found, expected):
    store = torch.distributed.HashStore()

    def told(rank):
        return shared_problems(found[rank], replace(detect_launch({}), rank=rank, world_size=3), store)

    with ThreadPoolExecutor(3) as ranks:
        assert list(ranks.map(told, range(3))) == [expected] * 3


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("launcher", "code"), [([], 2), pytest.param(TORCHRUN, 1, marks=pytest.mark.spmd)], ids=["python", "torchrun"]
)
def test_every_problem_is_printed_once(launcher, code, tmp_path):
    """Also where rank 0 comes last. torchrun answers 1 whatever its processes answered: there the status file holds the 2."""
    command = [sys.executable, *launcher, "-m", "spmd_rl.train", "--config-name", "tiny", *WRONG, f"trainer.run_dir={tmp_path}/run"]
    (tmp_path / "sitecustomize.py").write_text("import os, time\ntime.sleep(5 * (os.environ.get('RANK') == '0'))")
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, timeout=200)
    shown, status = done.stdout, json.loads((tmp_path / "run" / "status.json").read_text())
    print(shown)
    assert done.returncode == code
    assert {line: shown.count(line) for line in WRONG.values()} == dict.fromkeys(WRONG.values(), 1)
    assert (status["code"], status["state"]) == (2, "configuration")
    assert all(any(p.startswith(line) for p in status["problems"]) for line in WRONG.values())
    ours, _, summary = shown.partition(status["problems"][-1])
    assert f"{'torchrun' if launcher else 'python'}, rank 0 of {2 if launcher else 1} on" in ours
    assert "Traceback" not in ours and ("exitcode  : 2" in summary) == bool(launcher)


def test_a_mapping_given_whole_is_yaml_and_replaces():
    """Also names with a colon, as docs/extending.md shows them."""
    config, problems = compose_config(
        "tiny", None, ["reward.functions={my_rewards:brevity: 1.0}", "reward.kwargs={my_rewards:brevity: {limit: 12}}"]
    )
    assert not problems
    assert config.reward.functions == {"my_rewards:brevity": 1.0}
    assert config.reward.kwargs == {"my_rewards:brevity": {"limit": 12}}
    assert compose_config("tiny", None, ["reward.functions={exact:1,numeric:0.5}"])[0].reward.functions == {
        "exact": 1,
        "numeric": 0.5,
    }
    assert compose_config("tiny", None, [])[0].reward.functions == {"overlap": 1.0}
    part, problems = compose_config("quickstart", None, ["data.val_kwargs.size=12"])
    assert not problems and part.data.val_kwargs == {"split": "val", "size": 12}


def test_own_data_takes_nothing_from_ours():
    config, problems = compose_config("train", None, ["data.train=train.jsonl"])
    assert not problems
    assert (config.data.train_kwargs, config.data.val, config.data.val_kwargs) == ({}, None, {})


def test_a_run_folder_that_cannot_be_made_is_a_problem_of_the_configuration(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("spmd_rl.train.detect_launch", lambda: detect_launch({}))
    assert main(["--config-name", "tiny", f"trainer.run_dir={tmp_path}/file/run"]) == 2
    assert "trainer.run_dir: cannot be made" in capsys.readouterr().err
