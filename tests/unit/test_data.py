from __future__ import annotations

import csv
import json
import re
import sys

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spmd_rl.config import DataConfig
from spmd_rl.data import SPLIT_SEED, PromptSource, load_rows, observation_tokens, tokenize
from spmd_rl.models import SMOLLM2, resolve_model

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}{{ start | default('>') }}{% endif %}"
)
GOOD = [{"prompt": "a", "answer": "1"}, {"prompt": "b, c", "answer": "2"}, {"prompt": "d", "answer": "3"}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, id = code point."""
    core = Tokenizer(models.WordLevel({chr(i): i for i in range(1, 128)} | {"?": 63}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE)


def write(path, rows) -> str:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        datasets = pytest.importorskip("datasets")
        dataset = datasets.Dataset.from_list(rows)
        dataset.to_parquet(str(path)) if path.suffix else dataset.save_to_disk(str(path))
    return str(path)


def source(tokenizer, rows, tmp_path, seed=0, **settings) -> PromptSource:
    return PromptSource(DataConfig(**settings), write(tmp_path / "rows.jsonl", rows), {}, tokenizer, seed)


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet", "d.csv", "folder"])
def test_formats_agree(tmp_path, name):
    rows = load_rows(write(tmp_path / name, GOOD), {})
    assert rows == [{"row_number": n, **row} for n, row in enumerate(GOOD)]


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet", "d.csv", "folder"])
def test_bad_rows_in_each_format(tmp_path, name):
    rows = [{**row, "prompt": " " if n else row["prompt"]} for n, row in enumerate(GOOD)]
    path = write(tmp_path / name, rows)
    with pytest.raises(ValueError) as error:
        load_rows(path, {})
    first, *lines = str(error.value).splitlines()
    assert path in first and "2 bad of 3 rows" in first
    where = {"d.jsonl": r" \(line 2\)", "d.csv": r" \(ends on line 3\)"}.get(name, "")
    assert re.fullmatch(f"  row 1{where}, column 'prompt': is empty - write the question or remove the row", lines[0])
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"prompt": ', "is not JSON"),
        ('{"prompt": "\ud800"}'.encode("utf-8", "surrogatepass"), "is not JSON"),
        ("[1]", "is a list - write a mapping"),
        ('{"question": "a"}', "exactly one of `prompt` and `messages` (columns: question)"),
        ('{"prompt": "a", "messages": []}', "exactly one"),
        ('{"prompt": [{"role": "user", "content": "a"}]}', "column 'prompt': is [{'role': 'user'"),
        ('{"messages": []}', "column 'messages': is []"),
        ('{"messages": [{"role": "user"}]}', "column 'messages'"),
        ('{"messages": [{"role": "user", "content": ["image"]}]}', "column 'messages'"),
        ('{"prompt": "a", "answer": [1]}', "column 'answer': is [1]"),
        ('{"prompt": "a", "answer": NaN}', "column 'answer': is nan"),
        ('{"prompt": "a", "answer": true}', "column 'answer': is True"),
        ('{"prompt": "a", "answer": ""}', "column 'answer': is ''"),
        ('{"prompt": "a", "data_source": 3}', "column 'data_source': is 3"),
    ],
)
def test_bad_row(tmp_path, row, words):
    line = row if isinstance(row, bytes) else row.encode()
    (tmp_path / "d.jsonl").write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")
    with pytest.raises(ValueError) as error:
        load_rows(str(tmp_path / "d.jsonl"), {})
    assert "  row 1 (line 3), " in str(error.value) and words in str(error.value) and " - " in str(error.value)


def test_bad_rows_are_listed_up_to_five(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"prompt": n} for n in range(7)])
    with pytest.raises(ValueError, match="7 bad of 7 rows") as error:
        load_rows(path, {})
    assert str(error.value).count("column 'prompt'") == 5 and "... and 2 more" in str(error.value)


def test_some_answers_missing(tmp_path):
    with pytest.raises(ValueError, match="row 1, column 'answer': missing"):
        load_rows(write(tmp_path / "d.jsonl", [GOOD[0], {"prompt": "b"}]), {})
    assert len(load_rows(write(tmp_path / "d.jsonl", [{"prompt": "b"}]), {})) == 1


def test_csv_row_with_too_many_cells(tmp_path):
    (tmp_path / "d.csv").write_text("prompt,answer\nadd 1, 2,3\n")
    with pytest.raises(ValueError, match="row 0 .ends on line 2., has 1 more cells"):
        load_rows(str(tmp_path / "d.csv"), {})


def test_wrong_names(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'arithmetic'"):
        load_rows("arithmetics", {})
    with pytest.raises(ValueError, match="cannot be called with {'splt': 'val'}: got an unexpected"):
        load_rows("arithmetic", {"splt": "val"})
    with pytest.raises(ValueError, match="takes no keyword arguments"):
        load_rows(write(tmp_path / "d.jsonl", GOOD), {"split": "val"})
    (tmp_path / "d.txt").write_text("a")
    with pytest.raises(ValueError, match="unknown kind of file '.txt'"):
        load_rows(str(tmp_path / "d.txt"), {})
    (tmp_path / "d.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no rows"):
        load_rows(str(tmp_path / "d.jsonl"), {})
    with pytest.raises(ValueError, match="not a folder of Dataset.save_to_disk"):
        load_rows(str(tmp_path), {})


def test_folder_of_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(GOOD))
    splits.save_to_disk(str(tmp_path / "d"))
    with pytest.raises(ValueError, match="holds the splits train - name one, such as .*d/train"):
        load_rows(str(tmp_path / "d"), {})
    assert len(load_rows(str(tmp_path / "d" / "train"), {})) == 3


def test_user_function(tmp_path, monkeypatch):
    (tmp_path / "my_data.py").write_text("def rows(n):\n    return ({'prompt': str(i)} for i in range(n))\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert [row["prompt"] for row in load_rows("my_data:rows", {"n": 2})] == ["0", "1"]


def test_prompts_fields(tokenizer, tmp_path):
    rows = [
        {"prompt": "ab", "data_source": "x"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}]},
    ]
    prompts = source(tokenizer, rows, tmp_path, chat_template_kwargs={"start": "!"}).validation()
    texts = ["<ab>!", "<s><c>!"]
    assert prompts.input_ids.tolist() == [[*map(ord, texts[0]), 0, 0], [*map(ord, texts[1])]]
    assert prompts.lengths.tolist() == [5, 7] and prompts.uid.tolist() == prompts.row.tolist() == [0, 1]
    assert prompts.data_source.tolist() == [1, 0]  # of the sorted names "rows", "x"
    assert all(t.dtype == torch.int64 for t in (prompts.input_ids, prompts.lengths, prompts.uid, prompts.data_source))


@pytest.mark.parametrize("count", [1, 3, 7, 10, 23])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_visits_each_row_once(tokenizer, tmp_path, count, shuffle):
    rows = [{"prompt": str(n)} for n in range(10)]
    data = source(tokenizer, rows, tmp_path, shuffle=shuffle)
    steps = [data.prompts(step * count, count) for step in range(-(-30 // count))]
    order = torch.cat([p.row for p in steps])[:30].view(3, 10)
    assert torch.cat([p.uid for p in steps]).tolist() == list(range(len(steps) * count))
    assert torch.equal(order.sort(dim=1).values, torch.arange(10).expand(3, 10))
    assert torch.equal(order[0], torch.arange(10)) is (not shuffle)
    assert torch.equal(order[0], order[1]) is (not shuffle)


def test_prompts_is_pure_and_resume_needs_no_state(tokenizer, tmp_path):
    rows = [{"prompt": str(n)} for n in range(50)]
    first, second, other = (source(tokenizer, rows, tmp_path, seed=seed) for seed in (3, 3, 4))
    run = [first.prompts(8 * step, 8) for step in range(9)]
    resumed = second.prompts(64, 8)
    torch.rand(3)
    assert torch.equal(resumed.input_ids, run[8].input_ids) and torch.equal(resumed.uid, run[8].uid)
    assert torch.equal(first.prompts(16, 8).row, run[2].row)
    assert not torch.equal(other.prompts(64, 8).row, resumed.row)


def test_prompts_come_in_any_number_from_any_occurrence(tokenizer, tmp_path):
    """A step that goes on with groups of the one before draws fewer, also none."""
    data = source(tokenizer, [{"prompt": "x" * (n + 1)} for n in range(6)], tmp_path)
    whole = data.prompts(0, 17)
    pieces = [data.prompts(first, count) for first, count in ((0, 5), (5, 0), (5, 1), (6, 8), (14, 3))]
    for name in ("uid", "row", "data_source", "lengths"):
        assert torch.equal(torch.cat([getattr(p, name) for p in pieces]), getattr(whole, name))
    none = pieces[1]
    assert len(none) == 0 and none.input_ids.dtype == torch.int64 and none.input_ids.ndim == 2


def test_order_is_the_same_in_every_version(tokenizer, tmp_path):
    rows = [{"prompt": str(n)} for n in range(8)]
    assert source(tokenizer, rows, tmp_path).prompts(0, 8).row.tolist() == [3, 0, 1, 2, 7, 4, 5, 6]


def test_fingerprint(tokenizer, tmp_path):
    prints = [
        source(tokenizer, rows, tmp_path).fingerprint
        for rows in (GOOD, GOOD, GOOD[::-1], GOOD[:2], [{**GOOD[0], "answer": "9"}, *GOOD[1:]])
    ]
    assert prints[0] == prints[1] and len(set(prints)) == 4


LONG = [{"prompt": "abc"}, {"prompt": "abcdefgh"}, {"prompt": "abcdefghi"}]  # 6, 11 and 12 tokens


def test_over_long_error(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"row 1, prompt: is 11 tokens, over data.max_prompt_tokens=8 - raise it"):
        source(tokenizer, LONG, tmp_path, max_prompt_tokens=8)
    assert len(source(tokenizer, LONG, tmp_path, max_prompt_tokens=12)) == 3


def test_over_long_drop(tokenizer, tmp_path):
    data = source(tokenizer, [LONG[1], LONG[0], LONG[2]], tmp_path, max_prompt_tokens=8, over_long="drop")
    assert (len(data), data.dropped, data.truncated) == (1, 2, 0)
    assert data.rows[0]["prompt"] == "abc" and data.rows[0]["row_number"] == 1
    assert "1 prompts of 6 to 6 tokens; over 8 tokens: 2 dropped, 0 truncated" in data.describe()
    with pytest.raises(ValueError, match="every row is over data.max_prompt_tokens=3"):
        source(tokenizer, LONG, tmp_path, max_prompt_tokens=3, over_long="drop")


def test_over_long_truncate_keeps_the_end(tokenizer, tmp_path):
    data = source(tokenizer, LONG, tmp_path, max_prompt_tokens=8, over_long="truncate")
    assert (len(data), data.dropped, data.truncated) == (3, 0, 2)
    assert "".join(map(chr, data.validation().input_ids[2].tolist())) == "<abcdefghi>>"[-8:]
    assert "0 dropped, 2 truncated" in data.describe()


def test_over_long_unknown(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="data.over_long: unknown 'cut'"):
        source(tokenizer, GOOD, tmp_path, over_long="cut")


def test_chats_that_cannot_be_prompts(tokenizer, tmp_path):
    chats = [[{"role": "user", "content": "a"}, {"role": role, "content": "b"}] for role in ("assistant", "tool")]
    with pytest.raises(ValueError) as error:
        source(tokenizer, [{"messages": chat} for chat in chats], tmp_path)
    assert "row 0, column 'messages': ends with the assistant's turn" in str(error.value)
    assert "row 1, column 'messages': refused by the model's chat template: no tools" in str(error.value)


CHATML = "<{{ m.role }}>\n{{ m.content | trim }}<eos>\n"
SPEAK = "{% if add_generation_prompt %}<assistant>\n{% endif %}"
STRIPS = "{% for m in messages %}" + CHATML + "{% endfor %}" + SPEAK
THINKS = (  # a tool's message is part of a user's turn; the last turn of the assistant gets an empty thought
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<user>{% endif %}{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<eos>\n{% endif %}"
    "{% elif m.role == 'assistant' %}<assistant>\n{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<eos>\n"
    "{% else %}" + CHATML + "{% endif %}{% endfor %}" + SPEAK
)
NO_TOOLS = STRIPS.replace("<{{", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}<{{")
CLOSES = STRIPS + "{% if not add_generation_prompt %}<pad>{% endif %}"
TURNS = ["Let me see: <calc>1 + 2</calc>", "And more."]
OBSERVATIONS = ["3", "", " 4.5\n\nlines ", "<tool> {'a': 1}"]


@pytest.fixture(scope="module")
def tiny():
    return AutoTokenizer.from_pretrained(resolve_model("tiny"))


def assert_rendered_as_the_template_does(tokenizer, role: str, observation: str, **template_kwargs) -> None:
    """Prompt, sampled and observation ids of two turns are the template's own rendering of the whole chat."""
    tokens = observation_tokens(tokenizer, role, template_kwargs, [tokenizer.eos_token_id])
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "What is 1 + 2?"}]
    (ids,) = tokenize([{"messages": chat, "row_number": 0}], "d", tokenizer, template_kwargs)
    for text in TURNS:
        ids = [*ids, *tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id, *tokens(observation)]
        chat = [*chat, {"role": "assistant", "content": text}, {"role": role, "content": observation}]
    whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **template_kwargs)
    assert tokenizer.decode(ids) == whole
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]


@pytest.mark.network
@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("role", ["tool", "user"])
def test_observations_of_smollm2(role, observation):
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(SMOLLM2))
    assert_rendered_as_the_template_does(tokenizer, role, observation)
    ids = observation_tokens(tokenizer, role, {}, (0, 2))("3")
    assert tokenizer.decode(ids) == f"\n<|im_start|>{role}\n3<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize(
    ("template", "role"),
    [(STRIPS, "tool"), (STRIPS, "user"), (THINKS, "tool"), (THINKS, "user"), (NO_TOOLS, "user"), (CLOSES, "tool")],
)
def test_observations_are_rendered_as_the_template_does(tiny, monkeypatch, template, role, observation):
    monkeypatch.setattr(tiny, "chat_template", template)
    assert_rendered_as_the_template_does(tiny, role, observation)


def test_observation_in_a_user_turn_of_its_own(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "chat_template", THINKS.replace("<user>", "<{{ name }}>"))
    ids = observation_tokens(tiny, "tool", {"name": "person"}, [tiny.pad_token_id, tiny.eos_token_id])("3")
    assert tiny.decode(ids) == "\n<person>\n<tool_response>\n3\n</tool_response><eos>\n<assistant>\n"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (NO_TOOLS, "refuses an observation in a message of this role: no tools"),
        (STRIPS.replace("m.content", "(m.content if m.role != 'tool' else m.content + m.call_id)"),
         "refuses an observation in a message of this role: 'dict object' has no attribute 'call_id'"),
        (STRIPS.replace("in messages", "in messages if m.role != 'tool'"), "leaves out messages of this role"),
        (STRIPS.replace("in messages", "in messages[-2:]"), "leaves out the turns before"),
        ("{{ messages | length }} turns\n" + STRIPS, "changes what precedes the assistant's turn"),
        (STRIPS.replace("<eos>", "{{ '<eos>' if loop.last else '<unk>' }}"), "ends the assistant's turn with '<eos>' only where"),
    ],
)  # fmt: skip
def test_templates_that_cannot_say_an_observation(tiny, monkeypatch, template, words):
    monkeypatch.setattr(tiny, "chat_template", template)
    with pytest.raises(
        ValueError, match="environment.role=tool: the model's chat template .* - set environment.role=user"
    ) as error:
        observation_tokens(tiny, "tool", {}, [tiny.eos_token_id])
    assert words in str(error.value)


def test_a_template_without_the_end_of_a_response(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "chat_template", STRIPS)
    with pytest.raises(ValueError, match=r"role=tool: .* ends the assistant's turn with '<eos>.n', without any of \['<pad>'\]"):
        observation_tokens(tiny, "tool", {}, [tiny.pad_token_id])


def pairs(rows) -> set[frozenset[int]]:
    return {frozenset(int(n) for n in re.findall(r"\d", row["prompt"])) for row in rows}


@pytest.mark.parametrize("seed", [SPLIT_SEED, 0, 1])
def test_arithmetic_split(seed):
    train, val = (load_rows("arithmetic", {"split": split, "seed": seed}) for split in ("train", "val"))
    assert not pairs(train) & pairs(val)
    assert len(pairs(train) | pairs(val)) == 45 and len(pairs(val)) == 12
    assert len(val) >= 100
    kinds = [{re.sub(r"\d", "N", row["prompt"]) for row in rows} for rows in (train, val)]
    assert len(kinds[0]) == 4 and kinds[0] < kinds[1] and len(kinds[1]) == 5
    unseen = {row["prompt"] for row in val if row["data_source"] == "unseen phrasing"}
    assert {re.sub(r"\d", "N", prompt) for prompt in unseen} == kinds[1] - kinds[0]
    assert all(int(r["answer"]) == sum(map(int, re.findall(r"\d", r["prompt"]))) for r in [*train, *val])
    assert len({row["prompt"] for row in train}) == len(train)


def test_arithmetic_is_the_same_in_every_process():
    prompts = [row["prompt"] for row in load_rows("arithmetic", {"split": "val", "size": 3})]
    assert prompts == ["Calculate 4 + 9.", "What is 6 plus 9?", "What is the sum of 7 and 7?"]


def test_letters():
    rows = load_rows("letters", {"seed": 1, "size": 4})
    assert rows == load_rows("letters", {"seed": 1, "size": 4}) != load_rows("letters", {"seed": 2, "size": 4})
    assert all(len(set(row["prompt"])) == 3 and row["answer"] == row["prompt"] for row in rows)


def test_reasoning_gym_rows():
    pytest.importorskip("reasoning_gym")
    rows = load_rows("reasoning_gym", {"task": "leg_counting", "size": 2})
    assert rows[0]["prompt"] == rows[0]["entry"]["question"] and rows[0]["data_source"] == "leg_counting"


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"spmd_rl\[tasks\]"):
        load_rows("reasoning_gym", {"task": "leg_counting"})
