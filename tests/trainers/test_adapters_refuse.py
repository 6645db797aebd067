"""What no adapter takes: every row is looked at before any trainer's own rules."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sandlot.trainers import TRAINERS, Export, TrainerDataError
from sandlot.trainers.base import checked
from support.rows import make_row

ROW = replace(make_row("a", turns=[(3, 2), (2, 3)]), advantage=0.5, loss_weight=0.2)


def changed(name: str, place: int, value: Any) -> Any:
    array = getattr(ROW, name).copy()
    array[place] = value
    return replace(ROW, **{name: array})


BAD = [
    (replace(ROW, loss_mask=ROW.loss_mask[:-1]), "10 tokens and 9 loss_mask"),
    (replace(ROW, logprobs=ROW.logprobs[:-1]), "10 tokens and 9 logprobs"),
    (replace(ROW, weight_versions=ROW.weight_versions[:-1]), "10 tokens and 9 weight_versions"),
    (replace(ROW, loss_mask=np.zeros(10, dtype=np.uint8)), "nothing in it is trained"),
    (changed("loss_mask", 4, 3), "other than 0 and 1"),
    (changed("loss_mask", 0, 1), "token of its prompt is trained"),
    (replace(ROW, prompt_length=0), "no prompt"),
    (changed("loss_mask", 9, 0), "does not end on a sampled token"),
    (changed("logprobs", 3, np.nan), "not finite"),
    (changed("logprobs", 3, 0.5), "above 0"),
    (changed("logprobs", 5, -0.5), "where nothing was sampled"),
    (changed("tokens", 5, -1), "negative token id"),
    (replace(ROW, weight_versions=("",) * 10), "versions do not cover"),
    (replace(ROW, status="aborted"), "its status is 'aborted'"),
    (replace(ROW, reward=None), "ungraded, which is not reward 0"),
    (replace(ROW, reward=float("nan")), "no number in"),
    (replace(ROW, reward=2.0), "no number in"),
    (replace(ROW, loss_weight=0.0), "loss weight"),
    (replace(ROW, advantage=None), "give credit first"),
    (replace(ROW, advantage=float("inf")), "advantage is inf"),
]


@pytest.mark.parametrize(("row", "why"), BAD, ids=[why for _, why in BAD])
def test_a_row_that_would_train_wrongly_is_refused(row: Any, why: str) -> None:
    checked([ROW], credit=True)
    with pytest.raises(TrainerDataError, match=why):
        checked([row], credit=True)


@pytest.mark.parametrize("name", [n for n in TRAINERS.names() if n not in ("parquet", "jsonl", "atif", "sft")])
@pytest.mark.parametrize(("row", "why"), [BAD[7], BAD[8], BAD[14]], ids=["tail", "nan", "ungraded"])
def test_every_trainers_adapter_looks(name: str, row: Any, why: str) -> None:
    assert list(TRAINERS.get(name).rows(Export.of([ROW])))
    with pytest.raises(TrainerDataError, match=why):
        list(TRAINERS.get(name).rows(Export.of([row])))


@pytest.mark.parametrize("name", TRAINERS.names())
def test_unknown_options_are_refused(name: str, tmp_path: Any) -> None:
    if name in ("parquet", "jsonl"):
        return
    with pytest.raises(TrainerDataError, match="no option 'nonsense'"):
        TRAINERS.get(name).write(tmp_path / "x", Export.of([ROW], options={"nonsense": "1"}))


def test_rows_of_an_episode_come_together_whatever_their_order() -> None:
    rows = [make_row("a", index=1), make_row("b"), make_row("a")]
    assert [(s.episode_id, s.index) for s in checked(rows, credit=False)] == [("a", 0), ("a", 1), ("b", 0)]
