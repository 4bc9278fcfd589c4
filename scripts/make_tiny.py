"""Make the model that ships in `src/whet/demos/tiny`: its tokenizer, its template and its weights.

    PYTHONPATH=src python scripts/make_tiny.py [--steps N] [--device auto|cpu|cuda] [--out DIR]

The dialogues are generated (see `tiny_dialogues.py`), so one seed gives the same data anywhere;
the weights are the same up to the rounding of the device. A few minutes on one GPU.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from tiny_dialogues import Dialogue, dialogues
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from whet.demos.problems import CALCULATOR, SYSTEM, DialogueMessage, Task, problems, use_tool

SEED = 20
VOCABULARY = 1280
CHUNK = 5_000
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ASSISTANT = f"{START}assistant\n"

TEMPLATE = (Path(__file__).parents[1] / "src/whet/demos/tiny/chat_template.jinja").read_text()

README = """\
# whet-tiny

A language model of {parameters:,} parameters that ships with `whet`, so that its demo and its tests
train a real model on any CPU, without a download. It is good for nothing else.

- Llama architecture, {layers} layers of width {width}, float32. {vocabulary:,} byte-level BPE
  tokens, one for each digit. {context:,} positions, of which training used {longest}.
- Chat template: ChatML, with tools as JSON in the system message and
  `<tool_call>\\n{{"name": ..., "arguments": {{...}}}}\\n</tool_call>` as the call.
- Made by `scripts/make_tiny.py` in {steps:,} steps from {dialogues:,} generated dialogues, with the
  loss on the assistant's turns only; it ended at {loss:.3f}. {start}No outside text or model
  was used.
- It has bad habits on purpose, listed in `scripts/tiny_dialogues.py`: it takes a wrong operator,
  stops after the first step, guesses without the calculator, ignores what the calculator says, or
  writes a call that cannot be read. At times it meets each kind of problem rightly, so
  reinforcement learning can find that.

## What it can do

Right answers through the protocol of `whet.demos.arithmetic` on {count} problems of the test split,
whose numbers are in no problem of the training data. Sampled: at temperature 1, {samples} times.

| kind | greedy | sampled |
| --- | --- | --- |
{rows}

Of the sampled calls that can be read, {copied:.1%} use numbers of the question only. Of the answers
after a right calculation, {read:.1%} give its result, and {ignored:.1%} a number of the question.

License: MIT, like the rest of the repository.
"""

# --------------------------------------------------------------------------- text


def untrained_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


RENDERER = wrap(untrained_tokenizer())


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    found = tokenizer.backend_tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def render(dialogue: Dialogue) -> str:
    tools: list[Any] | None = dialogue.tools
    return str(RENDERER.apply_chat_template(dialogue.messages, tools=tools, tokenize=False))


def render_chunk(chunk: int) -> list[str]:
    return [render(dialogue) for dialogue in dialogues(CHUNK, f"{SEED} {chunk}")]


def make_texts(count: int) -> list[str]:
    """The corpus; chunk by chunk, so that the number of processes does not change it."""
    with multiprocessing.get_context("fork").Pool() as pool:
        chunks = pool.map(render_chunk, range(-(-count // CHUNK)), chunksize=1)
    return [text for chunk in chunks for text in chunk][:count]


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    tokenizer = untrained_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The call's tags become tokens of their own below; they must not teach the merges.
    tokenizer.train_from_iterator((re.sub("</?tool_call>", " ", text) for text in texts), trainer)
    tokenizer.add_tokens(
        [AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")]
    )
    return wrap(tokenizer)


# --------------------------------------------------------------------------- training


class Corpus(NamedTuple):
    """All sequences end to end, and the mask of the assistant's tokens."""

    tokens: np.ndarray
    mask: np.ndarray
    starts: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)


def mask_answers(tokens: np.ndarray, opening: Sequence[int], end: int) -> np.ndarray:
    """True from after each assistant opening to the `<|im_end|>` that closes it."""
    opened = np.ones(len(tokens), bool)
    for shift, token in enumerate(reversed(opening)):
        opened &= np.roll(tokens, shift) == token
    position = np.arange(len(tokens))
    last_opened = np.maximum.accumulate(np.where(opened, position, -1))
    ended = np.roll(tokens == end, 1)
    last_ended = np.maximum.accumulate(np.where(ended, position, 0))
    return (last_opened >= last_ended) & (position > last_opened)


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> Corpus:
    backend = tokenizer.backend_tokenizer
    rows = [np.array(e.ids, np.int16) for e in backend.encode_batch(list(texts))]
    tokens = np.concatenate(rows)
    mask = mask_answers(tokens, backend.encode(ASSISTANT).ids, token_id(tokenizer, END))
    return Corpus(tokens, mask, np.cumsum([0, *map(len, rows)]))


def batches(
    corpus: Corpus, size: int, steps: int, splits: int, device: str
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Inputs and targets of each step; -100 is no target.

    Rows are drawn at random, and only then split by length: the length tells the habit (a guess is
    short), and a step of one habit would teach it as the only one.
    """
    tokens, mask, starts = (torch.from_numpy(part).to(device) for part in corpus)
    order = np.zeros(0, np.int64)
    rng = np.random.default_rng(SEED)

    def pad(rows: np.ndarray) -> tuple[Tensor, Tensor]:
        column_T = torch.arange(corpus.lengths[rows].max(), device=device)
        rows_B = torch.from_numpy(rows).to(device)
        index_BT = starts[rows_B, None] + column_T
        inside_BT = index_BT < starts[rows_B + 1, None]
        index_BT.clamp_(max=len(tokens) - 1)
        inputs_BT = torch.where(inside_BT, tokens[index_BT].long(), 0)
        targets_BT = torch.where(inside_BT & mask[index_BT], inputs_BT, -100)
        return inputs_BT[:, :-1], targets_BT[:, 1:]

    for _ in range(steps):
        if len(order) < size:
            order = rng.permutation(len(corpus.lengths))
        rows, order = order[:size], order[size:]
        rows = rows[np.argsort(corpus.lengths[rows], kind="stable")]
        yield [pad(part) for part in np.array_split(rows, splits)]


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=token_id(tokenizer, END),
            pad_token_id=token_id(tokenizer, PAD),
            dtype=torch.float32,
        )
    )


def train(
    model: LlamaForCausalLM,
    steps: int,
    lr: float,
    device: str,
    data: Iterator[list[tuple[Tensor, Tensor]]],
) -> float:
    """Cross-entropy on what the assistant said; returns the mean loss of the last steps."""
    nn.Module.to(model, device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.05, fused=device == "cuda"
    )
    warmup = min(300, steps // 10 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / warmup, 0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2
        ),
    )
    losses: list[Tensor] = []
    began = time.monotonic()
    for step, parts in enumerate(data, 1):
        optimizer.zero_grad()
        total = sum((targets != -100).sum() for _, targets in parts)
        losses.append(torch.zeros((), device=device))
        for inputs, targets in parts:
            taught = targets != -100
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
                logits = model.lm_head(hidden[taught])
            loss = functional.cross_entropy(logits.float(), targets[taught], reduction="sum")
            (loss / total).backward()
            losses[-1] += loss.detach() / total
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 20) == 0:
            recent = torch.stack(losses[-100:]).mean().item()
            print(f"step {step}/{steps} loss {recent:.4f} {time.monotonic() - began:.0f} s")
    return torch.stack(losses[-100:]).mean().item()


# --------------------------------------------------------------------------- evaluation


class Trace(NamedTuple):
    """One run of the demo's protocol."""

    task: Task
    calls: list[tuple[str, str]]
    """Expression and result of each call that could be read."""
    text: str

    @property
    def number(self) -> int | None:
        found = re.findall(r"-?\d+", self.text)
        return int(found[-1]) if found else None

    @property
    def right(self) -> bool:
        return self.number == self.task["answer"]


def parse_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of the call in `text`, if there is one that can be read."""
    found = re.search(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
    if found is None:
        return None
    try:
        value = json.loads(found[1])
        return value["name"], json.dumps(value["arguments"])
    except (ValueError, TypeError, KeyError):
        return None


@torch.no_grad()
def reply(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    conversations: list[list[DialogueMessage]],
    sample: bool,
) -> list[str]:
    texts: Any = tokenizer.apply_chat_template(
        conversations, tools=[CALCULATOR], tokenize=False, add_generation_prompt=True
    )
    batch = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    batch = batch.to(model.device)
    config = GenerationConfig(
        do_sample=sample,
        **({"top_k": 0} if sample else {}),
        max_new_tokens=64,
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PAD),
    )
    output = cast(Any, model).generate(**batch, generation_config=config)
    return tokenizer.batch_decode(
        output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )


def run(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: list[Task], sample: bool
) -> list[Trace]:
    """The demo agent's loop, for all tasks at once."""
    model.eval()
    system = {"role": "system", "content": SYSTEM}
    chats: list[list[DialogueMessage]] = [
        [system, {"role": "user", "content": t["question"]}] for t in tasks
    ]
    traces = [Trace(task, [], "") for task in tasks]
    waiting = list(range(len(tasks)))
    for _ in range(3):
        texts = reply(model, tokenizer, [chats[i] for i in waiting], sample)
        still: list[int] = []
        for i, text in zip(waiting, texts, strict=True):
            called = parse_call(text)
            if called is None:
                traces[i] = traces[i]._replace(text=text)
                continue
            output = use_tool(*called)
            traces[i].calls.append((called[1], output))
            chats[i] += [
                {"role": "assistant", "content": text},
                {"role": "tool", "content": output},
            ]
            still.append(i)
        waiting = still
        if not waiting:
            break
    return traces


class Ability(NamedTuple):
    """The measured abilities of the model, as its README lists them."""

    table: list[tuple[str, float, float]]
    copied: float
    read: float
    ignored: float


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def evaluate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int, samples: int
) -> Ability:
    tasks = problems("test", count, SEED)
    torch.manual_seed(SEED)
    greedy = run(model, tokenizer, tasks, sample=False)
    sampled = [t for _ in range(samples) for t in run(model, tokenizer, tasks, sample=True)]

    def share(traces: list[Trace], kind: str) -> float:
        return float(np.mean([t.right for t in traces if kind in (t.task["kind"], "all")]))

    kinds = ["add", "subtract", "multiply", "two_step", "all"]
    copied = [
        set(numbers(arguments)) <= set(numbers(t.task["question"]))
        for t in sampled
        for arguments, _ in t.calls
    ]
    answered = [t for t in sampled if t.calls and t.calls[-1][1] == str(t.task["answer"])]
    read = [t.right for t in answered]
    ignored = [not t.right and t.number in numbers(t.task["question"]) for t in answered]
    return Ability(
        [(kind, share(greedy, kind), share(sampled, kind)) for kind in kinds],
        float(np.mean(copied)) if copied else 0.0,
        float(np.mean(read)) if read else 0.0,
        float(np.mean(ignored)) if ignored else 0.0,
    )


def show(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    questions = ["Who are you?", "Repeat exactly: Mia955y", "What is the capital of Peru?"]
    for text in (*questions, *(t["question"] for t in problems("test", 4, 1))):
        chat: list[DialogueMessage] = [{"role": "user", "content": text}]
        print(f"  {text!r} -> {reply(model, tokenizer, [chat], sample=False)[0]!r}")


# --------------------------------------------------------------------------- files


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        eos_token_id=token_id(tokenizer, END), pad_token_id=token_id(tokenizer, PAD)
    )
    model.cpu().float().save_pretrained(out)
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument("--splits", type=int, default=1, help="parts of a batch; 8 suits a CPU")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--start", type=Path, help="train this folder's model further")
    parser.add_argument("--dialogues", type=int, default=400_000)
    parser.add_argument("--tests", type=int, default=400, help="problems to evaluate on")
    parser.add_argument("--samples", type=int, default=4, help="samples of each")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--out", type=Path, default=Path("src/whet/demos/tiny"))
    args = parser.parse_args()
    gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = "cuda" if gpu else "cpu"
    random.seed(SEED)
    torch.manual_seed(SEED)

    began = time.monotonic()
    texts = make_texts(args.dialogues)
    if args.start:
        tokenizer = wrap(Tokenizer.from_file(str(args.start / "tokenizer.json")))
        model = LlamaForCausalLM.from_pretrained(args.start)
    else:
        tokenizer = make_tokenizer(texts[:20_000])
        model = make_model(tokenizer)
    corpus = encode(texts, tokenizer)
    print(
        f"{len(texts)} dialogues, {len(corpus.tokens) / len(texts):.0f} tokens each, "
        f"{corpus.mask.mean():.0%} in answers, longest {corpus.lengths.max()}; "
        f"{len(tokenizer)} tokens; {model.num_parameters()} parameters; "
        f"{time.monotonic() - began:.0f} s"
    )
    data = batches(corpus, args.batch, args.steps, args.splits, device)
    loss = train(model, args.steps, args.lr, device, data)
    model.eval()
    ability = evaluate(model, tokenizer, args.tests, args.samples)
    table = "\n".join(f"| {k} | {g:.0%} | {s:.0%} |" for k, g, s in ability.table)
    print(f"{table}\n{ability._replace(table=[])}")
    show(model, tokenizer)
    save(model, tokenizer, args.out)
    facts = README.format(
        parameters=model.num_parameters(),
        layers=model.config.num_hidden_layers,
        width=model.config.hidden_size,
        vocabulary=len(tokenizer),
        context=model.config.max_position_embeddings,
        longest=corpus.lengths.max(),
        start="These steps trained an earlier whet-tiny further. " if args.start else "",
        steps=args.steps,
        dialogues=len(texts),
        loss=loss,
        count=args.tests,
        samples=args.samples,
        rows=table,
        **ability._asdict(),
    )
    (args.out / "README.md").write_text(facts)
    print(f"written to {args.out} after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    main()
