"""prime-rl: training samples per branch, inside the trace of their episode as `verifiers` environments give it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sandlot.train.turns import token_advantages
from sandlot.trainers.base import Export, Exporter, Row, TrainerDataError, checked
from sandlot.trajectory.sample import Sample

PER_TOKEN = ("mask", "logprobs", "temperatures", "advantages")


def training_sample(s: Sample, *, env_name: str, temperature: float) -> Row:
    """One `TrainingSample`; every list has the length of the tokens. `rl_weights` carries the loss weight."""
    mask = s.loss_mask == 1
    return {
        "token_ids": s.tokens.tolist(),
        "mask": mask.tolist(),
        "logprobs": s.logprobs.astype(float).tolist(),
        "temperatures": [temperature] * len(mask),
        "env_name": env_name,
        "advantages": token_advantages(s).astype(float).tolist(),
        "rl_weights": np.where(mask, s.loss_weight, 0.0).tolist(),
        "ref_logprobs": None,
        "mm_kwargs": None,
        "routed_experts": None,
        "mm_token_type_ids": None,
    }


def traces(samples: Sequence[Sample], *, env_name: str = "sandlot", temperature: float = 1.0) -> list[Row]:
    """One trace per episode: its reward, and a training sample per branch row."""
    found: dict[str, Row] = {}
    for s in checked(samples, credit=True):
        trace = found.setdefault(
            s.episode_id,
            {
                "id": s.episode_id,
                "group": s.group_id,
                "env_name": env_name,
                "ok": True,
                "rewards": {"solved": s.reward},
                "reward": s.reward,
                "samples": [],
            },
        )
        trace["samples"].append(training_sample(s, env_name=env_name, temperature=temperature))
    rows = list(found.values())
    validate(rows)
    return rows


def validate(rows: Sequence[Row]) -> None:
    """Refuse what prime-rl would train wrongly."""
    for trace in rows:
        if trace["ok"] is not True or trace["reward"] is None:
            raise TrainerDataError(f"trace {trace['id']!r} has no reward or is not ok; such episodes are left out")
        for number, sample in enumerate(trace["samples"]):
            where = f"sample {number} of trace {trace['id']!r}"
            count = len(sample["token_ids"])
            for name in (*PER_TOKEN, "rl_weights"):
                if len(sample[name]) != count:
                    raise TrainerDataError(f"{where}: {len(sample[name])} {name} for {count} tokens")
            credit = zip(sample["mask"], sample["advantages"], sample["rl_weights"], strict=True)
            if any((advantage or weight) and not trained for trained, advantage, weight in credit):
                raise TrainerDataError(f"{where} has credit where nothing was sampled")
            if min(sample["temperatures"]) <= 0:
                raise TrainerDataError(f"{where} was sampled at temperature 0: its logprobs have no meaning")


def _rows(export: Export) -> list[Row]:
    name = export.options.get("env_name", "sandlot")
    return traces(export.samples, env_name=name, temperature=export.temperature)


EXPORTER = Exporter(
    "prime-rl training samples, a trace per episode", _rows, options={"env_name": "name of the environment"}
)
