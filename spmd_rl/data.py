"""Where prompts come from. Which prompts a step trains on is a pure function of (seed, step): resume needs no state.

To add a data set: a function that returns rows, here or in your own module, named in `data.train` (ours have a row in
config.DATASETS). A row is a dict with `prompt` (a text) or `messages` (a chat: list of {role, content}), and, where
the reward compares with one, `answer` (a text or a number); `data_source` names its part in the metrics, and further
columns reach the reward as they are.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import inspect
import json
import math
import random
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from spmd_rl.batch import Prompts
from spmd_rl.config import DATASETS, DataConfig, closest, resolve

MAX_LISTED = 5  # bad rows named in one error
SUFFIXES = (".jsonl", ".parquet", ".csv")
OTHER_ROLE = {"tool": "user", "user": "tool"}
ASKED, SAID, SEEN = "ASKED0SENTINEL", "SAID0SENTINEL", "SEEN0SENTINEL"  # contents that no template changes


def load_rows(name: str, kwargs: dict[str, Any], table: dict[str, str] = DATASETS) -> list[dict]:
    """The checked rows of a .jsonl, .parquet or .csv file, of a saved `datasets` folder, or of a function: a name in
    `table` or `module:function`, called with `kwargs`. Each row gets `row_number`, from 0, unless it has one.

    Raises ValueError that lists the first bad rows with their column, what is wrong and the fix."""
    path = Path(name)
    if name in table or (":" in name and not path.exists()):
        source = _function_rows(name, kwargs, table)
    elif not path.exists():
        known = f"{closest(name, table)}; known names: {', '.join(table)}"
        raise ValueError(f"data '{name}': no such file or folder under {Path.cwd()}, and no such name{known}")
    elif kwargs:
        raise ValueError(f"data '{name}': a file takes no keyword arguments, got {kwargs} - remove them")
    elif path.is_dir():
        source = _folder_rows(path)
    elif path.suffix in SUFFIXES:
        source = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows, ".csv": _csv_rows}[path.suffix](path)
    else:
        raise ValueError(f"data '{name}': unknown kind of file '{path.suffix}' - convert to {', '.join(SUFFIXES)}")
    rows, bad = [], []
    for place, row in source:
        problem = _row_problem(row)
        rows.append(row)
        if problem is not None:
            bad.append(f"{place}, {problem}")
    _raise_bad(name, bad, len(rows))
    if not rows:
        raise ValueError(f"data '{name}': has no rows")
    unanswered = [n for n, row in enumerate(rows) if row.get("answer") is None]
    if 0 < len(unanswered) < len(rows):
        what = "column 'answer': missing, while other rows have one - fill it in, or remove the column everywhere"
        _raise_bad(name, [f"row {n}, {what}" for n in unanswered], len(rows))
    return [{"row_number": n, **row} for n, row in enumerate(rows)]


def _raise_bad(name: str, bad: list[str], total: int) -> None:
    if bad:
        more = [f"... and {len(bad) - MAX_LISTED} more"] if len(bad) > MAX_LISTED else []
        lines = "\n  ".join([*bad[:MAX_LISTED], *more])
        raise ValueError(f"data '{name}': {len(bad)} bad of {total} rows (rows count from 0, lines from 1)\n  {lines}")


def _row_problem(row: Any) -> str | None:
    """`column 'x': what is wrong - the fix`, or None for a good row. A reader gives a ValueError for a broken one."""
    if isinstance(row, ValueError):
        return str(row)
    if not isinstance(row, dict):
        return f"is a {type(row).__name__} - write a mapping with `prompt` or `messages`"
    prompt, messages, answer, source = (row.get(key) for key in ("prompt", "messages", "answer", "data_source"))
    if (prompt is None) == (messages is None):
        columns = ", ".join(map(str, row)) or "none"
        return f"column 'prompt': need exactly one of `prompt` and `messages` (columns: {columns}) - rename or remove"
    if prompt is not None and not isinstance(prompt, str):
        return f"column 'prompt': is {prompt!r:.60}, not a text - write a text, or put a chat in `messages`"
    if prompt is not None and not prompt.strip():
        return "column 'prompt': is empty - write the question or remove the row"
    if messages is not None and not _is_chat(messages):
        return f"column 'messages': is {messages!r:.60} - write a list of {{role: text, content: text}}"
    number = isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)
    text = isinstance(answer, str) and answer.strip()
    if answer is not None and not text and not number:
        return f"column 'answer': is {answer!r:.60} - write a text or a finite number"
    if source is not None and not isinstance(source, str):
        return f"column 'data_source': is {source!r:.60} - write a text"
    return None


def _is_chat(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(isinstance(m, dict) for m in messages)
        and all(isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages)
    )


def _package(name: str, extra: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{error} - pip install 'spmd_rl[{extra}]'") from error


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        for n, (number, line) in enumerate(lines):
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:  # not JSON, or not UTF-8
                row = ValueError(f"is not JSON: {error} - write one JSON object a line")
            yield f"row {n} (line {number})", row


def _csv_rows(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(2**31 - 1)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        for n, row in enumerate(reader):
            over = len(row.get(None, []))
            problem = ValueError(f"has {over} more cells than the header - quote texts that hold a comma")
            yield f"row {n} (ends on line {reader.line_num})", problem if over else row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import parquet

    rows = parquet.read_table(path).to_pylist()
    return ((f"row {n}", row) for n, row in enumerate(rows))


def _folder_rows(path: Path) -> Iterator[tuple[str, Any]]:
    datasets = _package("datasets", "hf-datasets")
    try:
        saved = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise ValueError(f"data '{path}': not a folder of Dataset.save_to_disk, nor a file {SUFFIXES}") from error
    splits = sorted(saved) if isinstance(saved, datasets.DatasetDict) else []
    if splits:
        raise ValueError(f"data '{path}': holds the splits {', '.join(splits)} - name one, such as {path / splits[0]}")
    return ((f"row {n}", row) for n, row in enumerate(saved))


def _function_rows(name: str, kwargs: dict[str, Any], table: dict[str, str]) -> Iterator[tuple[str, Any]]:
    function = resolve(name, table)
    try:
        inspect.signature(function).bind(**kwargs)
    except TypeError as error:
        raise ValueError(f"data '{name}': {function!r} cannot be called with {kwargs}: {error}") from error
    return ((f"row {n}", row) for n, row in enumerate(function(**kwargs)))


class PromptSource:
    """Tokenised prompts and their order, whole and equal on every rank. Local, no collective.

    `rows`: the rows kept, which `Prompts.row` indexes. `sources`: the names which `Prompts.data_source` indexes.
    `dropped`, `truncated`: prompts over `data.max_prompt_tokens`. `fingerprint`: hash of the kept rows.

    `tokenizer` has Hugging Face's `apply_chat_template` and `__call__`. Raises ValueError for bad rows."""

    def __init__(self, config: DataConfig, name: str, kwargs: dict[str, Any], tokenizer: Any, seed: int):
        self.name, self.seed, self.shuffle, self.max_tokens = name, seed, config.shuffle, config.max_prompt_tokens
        rows = load_rows(name, kwargs)
        ids = tokenize(rows, name, tokenizer, config.chat_template_kwargs)
        over = {n for n, prompt in enumerate(ids) if len(prompt) > self.max_tokens}
        if config.over_long not in ("error", "drop", "truncate"):
            raise ValueError(f"data.over_long: unknown '{config.over_long}' - set error, drop or truncate")
        if config.over_long == "error":
            fix = f"over data.max_prompt_tokens={self.max_tokens} - raise it, or set data.over_long to drop or truncate"
            bad = [f"row {rows[n]['row_number']}, prompt: is {len(ids[n])} tokens, {fix}" for n in sorted(over)]
            _raise_bad(name, bad, len(rows))
        self.dropped = len(over) if config.over_long == "drop" else 0
        self.truncated = len(over) if config.over_long == "truncate" else 0
        kept = [n for n in range(len(rows)) if not (self.dropped and n in over)]
        if not kept:
            raise ValueError(f"data '{name}': every row is over data.max_prompt_tokens={self.max_tokens} - raise it")
        default = name if ":" in name else Path(name).stem
        self.rows = [{**rows[n], "data_source": rows[n].get("data_source") or default} for n in kept]
        self.sources = sorted({row["data_source"] for row in self.rows})
        self.fingerprint = fingerprint(self.rows)
        self._ids = [torch.tensor(ids[n][-self.max_tokens :]) for n in kept]

    def __len__(self) -> int:
        return len(self.rows)

    def describe(self) -> str:
        """One line for the log: how many prompts, how long, what was dropped or cut, and the data sources."""
        lengths = [len(prompt) for prompt in self._ids]
        counts = Counter(row["data_source"] for row in self.rows)
        return (
            f"data '{self.name}': {len(self)} prompts of {min(lengths)} to {max(lengths)} tokens; over"
            f" {self.max_tokens} tokens: {self.dropped} dropped, {self.truncated} truncated; "
            + ", ".join(f"{source}: {counts[source]}" for source in self.sources)
        )

    def prompts(self, first: int, count: int) -> Prompts:
        """Prompt occurrences from number `first` on, all of them on every caller. Each is number `occurrence % len` of its
        epoch's order, so an epoch visits each row once, and its `uid` is the occurrence."""
        if count == 0:
            return self.prompts(first, 1)[:0]
        occurrences = range(first, first + count)
        orders = {epoch: self._order(epoch) for epoch in {i // len(self) for i in occurrences}}
        rows = [orders[i // len(self)][i % len(self)] for i in occurrences]
        return self._batch(rows, list(occurrences))

    def probe(self, count: int = 2, tokens: int = 12) -> tuple[tuple[int, ...], ...]:
        """The beginnings of the first prompts: short rows of real text to compare two models on."""
        return tuple(tuple(ids[:tokens].tolist()) for ids in self._ids[:count])

    def validation(self) -> Prompts:
        """Every row once, in order; `uid` is the row."""
        rows = list(range(len(self)))
        return self._batch(rows, rows)

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self)))
        digest = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        return torch.randperm(len(self), generator=generator).tolist()

    def _batch(self, rows: list[int], uid: list[int]) -> Prompts:
        ids = [self._ids[row] for row in rows]
        return Prompts(
            input_ids=torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
            lengths=torch.tensor([len(prompt) for prompt in ids]),
            uid=torch.tensor(uid),
            row=torch.tensor(rows),
            data_source=torch.tensor([self.sources.index(self.rows[row]["data_source"]) for row in rows]),
            batch_size=[len(rows)],
        )


def tokenize(rows: list[dict], name: str, tokenizer: Any, template_kwargs: dict[str, Any]) -> list[list[int]]:
    """Token ids of each row's chat, rendered by the tokenizer's template up to where the assistant speaks."""
    texts, bad = [], []
    for row in rows:
        chat = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        place = f"row {row['row_number']}, column 'messages'"
        if chat[-1]["role"] == "assistant":
            bad.append(f"{place}: ends with the assistant's turn - move that text to `answer`")
            continue
        try:
            text = chat_text(tokenizer, template_kwargs, chat)
        except TemplateError as error:
            bad.append(f"{place}: refused by the model's chat template: {error} - change the roles")
            continue
        texts.append(text)
        if not text:
            bad.append(f"{place}: the model's chat template renders it to nothing - change the template")
    _raise_bad(name, bad, len(rows))
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def observation_tokens(
    tokenizer: Any, role: str, template_kwargs: dict[str, Any], eos_ids: Iterable[int]
) -> Callable[[str], list[int]]:
    """The function from an observation to the token ids that follow the assistant's end-of-turn token, up to where the
    assistant speaks again: the rest of its turn, and the observation in a message of `role`, as the chat template has them.

    They are what rendering the message adds to a chat. What lies between the question and the assistant's words may depend on
    what follows (an empty thought, say): those tokens exist already, and are kept as they are.
    Raises ValueError for a template that refuses or drops such a message, or changes what comes before it."""
    said = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}]

    def wrong(what: str) -> ValueError:
        return ValueError(f"environment.role={role}: the model's chat template {what} - set environment.role={OTHER_ROLE[role]}")

    def render(*following: dict[str, str]) -> tuple[str, str]:
        """The chat up to the end of the question, and after the assistant's words."""
        options = {"tokenize": False, "add_generation_prompt": bool(following), **template_kwargs}
        try:
            text = tokenizer.apply_chat_template([*said, *following], **options)
        except (TemplateError, TypeError) as error:
            raise wrong(f"refuses an observation in a message of this role: {error}") from error
        asked, spoke = text.find(ASKED), text.find(SAID)
        if not 0 <= asked < spoke:
            raise wrong("leaves out the turns before the observation")
        return text[: asked + len(ASKED)], text[spoke + len(SAID) :]

    question, end = render()
    stops = {tokenizer.decode([stop_id]): stop_id for stop_id in eos_ids}
    found = [(end.index(stop), -len(stop), stop) for stop in stops if stop and stop in end]
    if not found:
        raise ValueError(
            f"environment.role={role}: the model's chat template ends the assistant's turn with {end!r}, without any of"
            f" {list(stops)}, which end a response - add its end-of-turn token to rollout.stop_token_ids"
        )
    where, _, stop = min(found)
    turn_end = end[: where + len(stop)]

    def rest(observation: str) -> tuple[str, str]:
        before, after = render({"role": role, "content": observation})
        if not after.startswith(turn_end):
            raise wrong(f"ends the assistant's turn with {turn_end!r} only where no observation follows")
        return before, after[len(turn_end) :]

    def tokens(observation: str) -> list[int]:
        text = rest(observation)[1]
        ids = tokenizer(stop + text, add_special_tokens=False)["input_ids"]  # some tokenizers treat a text's start specially
        return ids[1:] if ids[0] == stops[stop] else tokenizer(text, add_special_tokens=False)["input_ids"]

    before, added = rest(SEEN)
    if before != question:
        raise wrong("changes what precedes the assistant's turn when an observation follows")
    if SEEN not in added:
        raise wrong("leaves out messages of this role")
    return tokens


def chat_text(tokenizer: Any, template_kwargs: dict[str, Any], messages: list[dict]) -> str:
    """A chat, rendered by the tokenizer's template up to where the assistant speaks."""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template_kwargs)


def chat_tokens(tokenizer: Any, template_kwargs: dict[str, Any], messages: list[dict]) -> list[int]:
    """Token ids of `chat_text`."""
    return tokenizer(chat_text(tokenizer, template_kwargs, messages), add_special_tokens=False)["input_ids"]


def fingerprint(rows: list[dict]) -> str:
    """A hash of the prompts, answers and data sources, in order: what a resumed run must find unchanged."""
    digest = hashlib.sha256()
    for row in rows:
        content = [row.get(key) for key in ("prompt", "messages", "answer", "data_source")]
        digest.update(json.dumps(content, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()[:16]


def letters(seed: int = 0, size: int = 256, alphabet: str = "abcdefgh", length: int = 3) -> list[dict]:
    """Write letters of the prompt: with the reward `overlap`, a two-layer model of random weights goes from 0.06 to
    about 0.4 in 20 GRPO steps of 16x8 samples of 8 characters (AdamW, learning rate 3e-3)."""
    draw = random.Random(seed)
    prompts = ("".join(draw.sample(alphabet, length)) for _ in range(size))
    return [{"prompt": prompt, "answer": prompt} for prompt in prompts]


PHRASINGS = ("What is {a} + {b}?", "What is {a} plus {b}?", "Calculate {a} + {b}.", "Add {a} and {b}.")
UNSEEN_PHRASING = "What is the sum of {a} and {b}?"
NUM_HELD_OUT = 12  # of the 45 unordered pairs
SPLIT_SEED = 15  # holds out every number, two doubles, and sums of 10 on average, as among all pairs


def arithmetic(split: str = "train", seed: int = SPLIT_SEED, size: int | None = None) -> list[dict]:
    """Sums of two numbers in 1..9. Of the 45 unordered pairs, 12 are held out: `train` never asks them in either order,
    and `val` asks only them, also in one phrasing that `train` lacks. `seed` picks the held-out pairs and has to be the
    same for both splits; `size` keeps that many rows, the same ones each time."""
    if split not in ("train", "val"):
        raise ValueError(f"arithmetic: unknown split '{split}' - set train or val")
    pairs = [(a, b) for a in range(1, 10) for b in range(a, 10)]
    held_out = set(sorted(pairs, key=lambda pair: _hash(seed, pair))[:NUM_HELD_OUT])
    phrasings = PHRASINGS if split == "train" else (*PHRASINGS, UNSEEN_PHRASING)
    rows = [
        {
            "prompt": phrasing.format(a=a, b=b),
            "answer": str(a + b),
            "data_source": "unseen phrasing" if phrasing == UNSEEN_PHRASING else "seen phrasing",
        }
        for a in range(1, 10)
        for b in range(1, 10)
        if ((min(a, b), max(a, b)) in held_out) == (split == "val")
        for phrasing in phrasings
    ]
    return rows if size is None else sorted(rows, key=lambda row: _hash(seed, row["prompt"]))[:size]


def _hash(*names: Any) -> bytes:
    return hashlib.blake2b(repr(names).encode()).digest()


def reasoning_gym(task: str, size: int = 500, seed: int = 0, **kwargs: Any) -> list[dict]:
    """Rows of a task of the package reasoning-gym, `kwargs` being the task's own settings; score them with the reward
    `reasoning_gym`, which reads `entry`. Raises ImportError that names the extra to install."""
    gym = _package("reasoning_gym", "tasks")
    entries = gym.create_dataset(task, size=size, seed=seed, **kwargs)
    return [{"prompt": entry["question"], "answer": entry["answer"], "data_source": task, "entry": entry} for entry in entries]
