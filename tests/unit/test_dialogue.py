"""Two turns with the calculator: real environment processes and the real tokenizer; the model's words are scripted."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from spmd_rl.batch import Prompts, Sampling
from spmd_rl.config import EnvironmentConfig
from spmd_rl.data import chat_tokens, observation_tokens
from spmd_rl.environments import products
from spmd_rl.metrics import Mean
from spmd_rl.models import resolve_model
from spmd_rl.roles.dialogue import EnvironmentDialogue
from spmd_rl.roles.generation import Generator, Reply, RolloutBackend

MESH = SimpleNamespace(lane=0, width=1, lane_group=None)


class Scripted(RolloutBackend):
    """Says the next of its texts at every call, for every request; without an end where the text lacks it."""

    max_model_len = 512

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts, self.seen = tokenizer, list(texts), []

    def complete(self, requests, sampling, expired):
        self.seen += [r.ids for r in requests]
        ids = self.tokenizer(self.texts.pop(0), add_special_tokens=False)["input_ids"][: requests[0].max_tokens]
        return [Reply(list(ids), [-0.5] * len(ids), ids[-1] in sampling.stop_token_ids) for _ in requests]

    def score(self, rows): ...
    def update_weights(self, named): ...
    def sleep(self): ...
    def wake_up(self, what): ...
    def shutdown(self): ...
    def memory(self): ...


class Moody:
    """Fails on the rows that say so."""

    def reset(self, row):
        self.row = row
        return [{"role": "user", "content": row["says"]}] if "says" in row else None

    def step(self, text):
        if "raises" in self.row:
            raise ValueError("no mood")
        return "go on", 1.5, False


pytestmark = pytest.mark.network  # the tokenizer, where it is not cached


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve_model("smollm2-135m-instruct"))


def run(tokenizer, texts, rows, max_tokens=64, n=1, **config):
    config = EnvironmentConfig(**{"name": "calculator", "role": "user", **config})
    stop = tokenizer.eos_token_id
    dialogue = EnvironmentDialogue(
        config, MESH, {"train": rows}, 200, lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        observation_tokens(tokenizer, config.role, {}, [stop]), lambda chat: chat_tokens(tokenizer, {}, chat),
    )  # fmt: skip
    ids = [torch.tensor(chat_tokens(tokenizer, {}, row["messages"])) for row in rows]
    index = torch.arange(len(rows))
    prompts = Prompts(
        input_ids=torch.nn.utils.rnn.pad_sequence(ids, batch_first=True), lengths=torch.tensor([len(i) for i in ids]),
        uid=index, row=index, data_source=0 * index, batch_size=[len(rows)],
    )  # fmt: skip
    backend = Scripted(tokenizer, texts)
    try:
        batch = Generator(backend, 0, 0, dialogue).generate(prompts, Sampling(1.0, n, 0, max_tokens, (stop,)), 0, 3)
    finally:
        dialogue.close()
    return batch, dialogue.take(), backend


def test_a_call_its_value_and_the_answer(tokenizer):
    said = ["<calc>11*3</calc><|im_end|>", "It is 33.<|im_end|>"]
    batch, stats, backend = run(tokenizer, said, products("val")[:1], n=2)
    row = products("val")[0]
    chat = [
        *row["messages"], {"role": "assistant", "content": "<calc>11*3</calc>"}, {"role": "user", "content": "33"},
        {"role": "assistant", "content": "It is 33."},
    ]  # fmt: skip
    whole = tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n")
    for b in range(2):
        length = int(batch.lengths[b])
        assert tokenizer.decode(batch.input_ids[b, :length]) == whole
        chosen = batch.response_mask[b, :length]
        assert tokenizer.decode(batch.input_ids[b, :length][chosen]) == "".join(said)
        assert batch.policy_version[b, :length][chosen].unique().tolist() == [3]
        observed = ~chosen & (torch.arange(length) >= batch.prompt_lengths[b])
        assert (
            tokenizer.decode(batch.input_ids[b, :length][observed]) == "\n<|im_start|>user\n33<|im_end|>\n<|im_start|>assistant\n"
        )
        assert batch.rollout_log_probs[b, :length][observed].unique().tolist() == [0.0]
    assert not batch.truncated.any()
    assert stats["environment/turns_mean"] == Mean(4, 2)
    prompt = int(batch.prompt_lengths[0])
    assert backend.seen[2] == batch.input_ids[0, : len(backend.seen[2])].tolist() and len(backend.seen[2]) > prompt


def test_turn_and_token_limits_truncate(tokenizer):
    call = "<calc>1+1</calc><|im_end|>"
    batch, _, _ = run(tokenizer, [call, call], products("val")[:1], max_turns=2)
    assert batch.truncated.tolist() == [True]
    assert bool(batch.response_mask[0, int(batch.lengths[0]) - 1])  # no observation follows the last turn
    batch, _, _ = run(tokenizer, [call], products("val")[:1], max_tokens=12)
    assert batch.truncated.tolist() == [True]
    assert int(batch.lengths[0] - batch.prompt_lengths[0]) <= 12


def test_a_failing_episode_fails_alone_and_is_counted(tokenizer, capfd):
    good = {"messages": [{"role": "user", "content": "hi"}], "row_number": 1}
    rows = [good, {**good, "raises": 1, "row_number": 2}, {**good, "says": "another prompt", "row_number": 3}]
    rows.append({**good, "says": "word " * 300, "row_number": 4})
    batch, stats, _ = run(tokenizer, ["a<|im_end|>", "b<|im_end|>"], rows, name=f"{__name__}:Moody", max_turns=2, workers=3)
    failed = batch.token_rewards.isnan().any(1)
    assert failed.tolist() == [False, True, False, True]
    assert batch.token_rewards[0].nan_to_num().sum() == pytest.approx(3.0)
    assert "another prompt" in tokenizer.decode(batch.input_ids[2, : int(batch.prompt_lengths[2])])
    assert {kind: s.value for kind, s in stats.items() if "failed" in kind and s.value} == {
        "environment/failed/exception": 1, "environment/failed/long_prompt": 1,
    }  # fmt: skip
    assert "data row 2" in capfd.readouterr().err and math.isfinite(float(batch.rollout_log_probs.sum()))
