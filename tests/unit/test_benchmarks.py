"""What the benchmarks compute from what they measured."""

from __future__ import annotations

import pytest
import torch

from benchmarks import grpo_step, placement, placement_weights, rollout, weight_sync
from benchmarks.placement import Span


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


def test_placement_arguments():
    args = placement.parse([])
    assert (args.parts, args.rollout, args.actors, args.buckets_mb) == (["overlap", "weights"], "vllm", [1, 2], [64])
    for wrong in (["--steps", "2"], ["--prompt-tokens", "9"]):
        with pytest.raises(SystemExit):
            placement.parse(wrong)


def test_placement_counts_a_second_once():
    """The innermost span has it, and a span that crosses the window counts inside only."""
    spans = [Span("transfer", 1, 5), Span("wait", 2, 3), Span("forward", 3, 4), Span("train_own", 6, 12), Span("forward", 7, 11)]
    found = placement.seconds_by_kind(spans, 0, 10)
    assert found == {"other_own": 2, "transfer": 2, "wait": 1, "forward": 4, "train_own": 1}
    assert sum(found.values()) == 10
    assert placement.seconds_by_kind(spans, 20, 21)["other_own"] == 1


def test_placement_waits_until_the_last_rank_has_come():
    early = [Span("", 1, 5.5, "g", 0), Span("", 6, 7, "g", 1), Span("train_own", 0, 8)]
    late = [Span("", 5, 5.5, "g", 0), Span("", 6.5, 7, "g", 1), Span("", 6.5, 9, "other", 1)]
    early, late = placement.with_waits([early, late])
    assert early == [Span("wait", 1, 5), Span("wait", 6, 6.5), Span("train_own", 0, 8)]
    assert [span.end - span.start for span in late] == [0, 0, 0]


def test_placement_recorder_numbers_collectives_by_group():
    recorder = placement.Recorder()
    for group in ("a", "b", "a"):
        with recorder.span("", group):
            pass
    assert recorder.around("work", lambda x, y: x + y)(1, y=2) == 3
    assert [(s.kind, s.group, s.turn) for s in recorder.spans] == [("", "a", 0), ("", "b", 0), ("", "a", 1), ("work", "", 0)]
    assert all(one.start <= one.end for one in recorder.spans)


def test_placement_step():
    """Rank 0 trains for 6 s of 10 and waits 3; rank 1 generates for 8. What is left of each is its overhead."""
    window = {"start": 0.0, "end": 10.0, "time/step": 10.0}
    actor = {
        "steps": [window | {"time/train": 6.0, "time/generate": 0.0}],
        "spans": [
            ("train_own", 0, 6, "", 0),
            ("forward_backward", 0.5, 5, "", 0),
            ("optimizer", 5, 6, "", 0),
            ("", 6, 9.5, "g", 0),
        ],
    }
    rollout = {
        "steps": [window | {"time/train": 0.0, "time/generate": 8.0}],
        "spans": [("generate", 0, 8, "", 0), ("", 9, 9.5, "g", 0), ("transfer", 8, 9, "", 0)],
    }
    found = placement.step_figures([actor, rollout], 0)
    assert (found["generate"], found["train"], found["step"]) == (8, 6, 10)
    assert (found["step_over_max"], found["step_over_sum"], found["balance"]) == (10 / 8, 10 / 14, 8 / 6)
    assert (found["actor/wait"], found["actor/train_own"], found["actor/other_own"]) == (3, 0.5, 1)
    assert (found["actor/overhead"], found["rollout/overhead"], found["overhead"]) == (0.15, 0.1, 0.15)


def test_placement_transfer():
    turns = [{"broadcast": 1.0, "broadcast_each": 2.0, "stream": s} for s in (4.0, 2.0, 1.0)]
    sizes = {"bytes": 8, "bucket_bytes": 4, "actor_rise_bytes": 0, "rollout_rise_bytes": 6}
    found = placement_weights.transfer_figures(turns, sizes)
    assert (found["ratio_vs_broadcast"], found["ratio_vs_broadcast_each"], found["stream"]) == (0.5, 1.0, 2.0)
    assert (found["stream_bytes_per_second"], found["broadcast_bytes_per_second"]) == (4, 8)
    assert (found["actor_rise_buckets"], found["rollout_rise_buckets"]) == (0.0, 1.5)


def test_placement_largest_bucket(monkeypatch):
    """A large tensor is a bucket of its own."""
    monkeypatch.setattr(placement_weights.placed, "BUCKET_BYTES", 8)
    counts = [("a", 1), ("b", 5), ("c", 1)]
    assert placement_weights.largest_bucket(counts, torch.float32) == 20
    assert placement_weights.largest_bucket(counts, torch.bfloat16) == 10
    assert placement_weights.medians([{"x": 1.0}, {"x": 3.0, "y": 2.0}]) == {"x": 2.0, "y": 1.0}


def test_placement_memory_rise():
    """Memory that is freed before the end still counts."""
    risen, found = placement_weights.memory_rise(lambda: len(bytearray(b"x") * (64 << 20)))
    assert found == 64 << 20
    assert 60 << 20 < risen < 80 << 20
