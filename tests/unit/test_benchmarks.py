"""What the benchmarks compute from what they measured."""

from __future__ import annotations

import pytest

from benchmarks import grpo_step, rollout, weight_sync


def test_rollout_arguments():
    args = rollout.parse([])
    assert (args.dtype, args.prompts, args.tokens, args.contenders) == ("float32", 64, 128, ["vllm", "bare_vllm", "hf"])
    assert rollout.parse(["--siblings", "8"]).tokens == 16
    assert rollout.parse(["--siblings", "8", "--tokens", "4"]).tokens == 4
    with pytest.raises(SystemExit):
        rollout.parse(["--rounds", "0"])


def test_rollout_requests_share_prompts_among_siblings_only():
    job = rollout.Job("vllm", "", "float32", prompts=2, siblings=3, prompt_tokens=5, tokens=1, block_size=32)
    requests = job.requests()
    assert len(requests) == job.rows == 6
    assert [ids == requests[0][0] for ids, _ in requests] == [True] * 3 + [False] * 3
    assert len({seed for _, seed in requests}) == 6


def test_rollout_ratio_is_paired():
    """A round that was disturbed for both does not move the ratio."""
    ours, bare = [{"cpu": s} for s in (2.0, 20.0, 4.0)], [{"cpu": s} for s in (3.0, 30.0, 2.0)]
    assert rollout.paired_ratio(ours, bare) == 1.5


def test_weight_sync_summary():
    def figures(wall, cpu=1.0, proof=0.0):
        return {"wall": wall, "cpu": cpu, "proof wall": proof, "proof cpu": 0.0}

    turn = {"copy": figures(1.0), "gather": figures(2.0), "reload": figures(3.0), "update": figures(9.0)}
    turn["update sharded"] = figures(5.0, cpu=0.5, proof=1.0)
    found = weight_sync.summarise([turn], 10, "update sharded")
    assert (found["update"], found["proof"], found["load"], found["bytes_per_second"]) == (5.0, 1.0, 4.0, 2.0)
    assert (found["ratio_vs_copy"], found["ratio_vs_copy_load"]) == (0.2, 0.25)
    assert (found["ratio_vs_gather_plus_reload"], found["ratio_vs_gather_plus_reload_load"]) == (1.0, 1.25)
    assert weight_sync.summarise([turn], 10, "update sharded", "cpu")["ratio_vs_gather_plus_reload"] == 4.0


def test_weight_sync_alone_has_no_gather():
    part = {"wall": 2.0, "cpu": 2.0, "proof wall": 0.0, "proof cpu": 0.0}
    found = weight_sync.summarise([{"copy": part, "reload": part, "update": part}], 8, "update")
    assert "gather" not in found and found["ratio_vs_gather_plus_reload"] == 1.0


def test_grpo_step_report_names_the_further_backend():
    def side(rate):
        return {"samples_per_second": rate, "cpu/step": 2.0, "rss_gb_per_rank": 1.0}

    results = {"fp32": {"vllm": side(3.0), "hf": side(2.0), "trl": side(1.0)}}
    line = grpo_step.report(results, ["vllm", "hf"])
    assert (line["ratio_vs_trl"], line["ratio_vs_trl_hf"]) == ({"fp32": 3.0}, {"fp32": 2.0})
    assert line["dtypes_hf"]["fp32"] == side(2.0)
    alone = grpo_step.report({"fp32": {"hf": side(2.0)}}, ["hf"])
    assert alone == {"dtypes_hf": {"fp32": side(2.0)}}
