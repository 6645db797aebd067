"""Run with TRL's own interpreter: a few steps of the real `AsyncGRPOTrainer` on a tiny model, fed by our worker.

The logprobs of the rows are the model's own, so the trainer must find a ratio of 1 for every token: it would not if
one of ids, mask or logprobs were shifted. FlashAttention 3 needs a GPU; a plain attention over the same segments takes
its place. Prints the trainer's log as JSON. `python trl_step.py DIRECTORY`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl.experimental.async_grpo import packing
from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))

from sandlot.engine import SamplingParams
from sandlot.rollout.outcome import EpisodeResult
from sandlot.trainers.live import Done
from sandlot.trainers.trl_worker import RolloutWorker, WorkerConfig
from support.rows import make_row

VOCABULARY = 64


class PlainAttention:
    """What the FlashAttention kernel computes, segment by segment."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *_: Any, softmax_scale: float, **__: Any
    ) -> Any:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = torch.empty_like(q)
        for (a, b), (c, d) in zip(zip(cu_q, cu_q[1:]), zip(cu_k, cu_k[1:]), strict=True):  # noqa: B905, RUF007
            scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * softmax_scale
            place = torch.arange(int(d - c)) - (int(d - c) - int(b - a))
            hidden = place[None] > torch.arange(int(b - a))[:, None]
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[a:b] = torch.einsum("hqk,khd->qhd", weights, v[c:d])
        return out


class MadeUp:
    """Episodes of random tokens with the true logprobs of the model; even ones are solved, in one to three rows."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        self.tasks = {"t": SimpleNamespace(id="t", statement="Fix it.")}
        self.sampling = SamplingParams()
        self.model = model
        self.count = 0
        self.version = "0"

    async def episode(self, task: Any) -> Done:
        self.count += 1
        name, reward = f"e{self.count}", float(self.count % 2)
        rows = [
            self.scored(make_row(name, index=k, reward=reward, version=self.version, turns=[(4, 3), (2, 4)]))
            for k in range(1 + self.count % 3)
        ]
        await asyncio.sleep(0)
        return Done(EpisodeResult(name, task.id, "tiny", reward), tuple(rows))

    def scored(self, row: Any) -> Any:
        tokens = row.tokens % VOCABULARY
        with torch.no_grad():
            logits = self.model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].float()
        scores = logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0]
        logprobs = np.concatenate([[0.0], scores.numpy()])
        return replace(row, tokens=tokens, logprobs=np.where(row.loss_mask == 1, logprobs, 0).astype(np.float32))

    async def announce(self, weight_version: str) -> None:
        self.version = weight_version

    @asynccontextmanager
    async def open(self) -> AsyncIterator[MadeUp]:
        yield self


class NoTransfer:
    """There is no inference server whose weights would have to follow."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None:
        for _ in iterator:
            pass

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def main(directory: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    packing._flash_attn = lambda: PlainAttention
    torch.cuda.get_device_name = lambda device: "none"  # the trainer only looks up its peak speed
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    words = {f"w{k}": k for k in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "w0")), eos_token="w1", pad_token="w0"
    )
    tokenizer.save_pretrained(directory)
    worker = RolloutWorker(MadeUp(model).open, WorkerConfig(generations=4, groups=1, queue_size=32))
    trainer = AsyncGRPOTrainer(
        model=str(directory),
        args=AsyncGRPOConfig(
            output_dir=str(directory / "out"),
            max_steps=3,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=1,
            learning_rate=1e-6,
            token_budget=256,
            logging_steps=1,
            dtype="float32",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
        ),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "x"}]] * 8}),
        rollout_worker=worker,
        weight_transfer=NoTransfer(),
    )
    trainer.train()
    print("LOG " + json.dumps({"steps": trainer.state.global_step, "log": trainer.state.log_history}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
