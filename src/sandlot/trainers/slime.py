"""slime: `--custom-generate-function-path sandlot.trainers.slime.generate`, and rows for offline use."""

from __future__ import annotations

from typing import Any

from sandlot.trainers import slime_hook
from sandlot.trainers.base import Exporter
from sandlot.trainers.slime_family import rows, write
from sandlot.trainers.slime_hook import keep_group, reward_post_process

__all__ = ["EXPORTER", "FLAVOR", "generate", "keep_group", "reward_post_process"]

FLAVOR = slime_hook.Flavor("slime", "sglang_router_ip", "sglang_router_port", "sglang", "slime.rollout.sglang_rollout")


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """One episode: the rows it became, sharing a `rollout_id`; for evaluation one sample."""
    return await slime_hook.generate(FLAVOR, args, sample, sampling_params, evaluation=evaluation)


EXPORTER = Exporter("slime Samples, JSON lines or (.pt) debug rollout data", rows, write_rows=write)
