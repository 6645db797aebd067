"""Samples in the form each trainer wants: one file per trainer, found by name. Outside packages add their own."""

from sandlot.registry import Registry
from sandlot.trainers.base import Export, Exporter, TrainerDataError

TRAINERS = Registry(
    "sandlot.trainers",
    {
        "parquet": "sandlot.trainers.files:PARQUET",
        "jsonl": "sandlot.trainers.files:JSONL",
        "slime": "sandlot.trainers.slime:EXPORTER",
        "vime": "sandlot.trainers.vime:EXPORTER",
        "verl": "sandlot.trainers.verl:EXPORTER",
        "skyrl": "sandlot.trainers.skyrl:EXPORTER",
        "areal": "sandlot.trainers.areal:EXPORTER",
        "tinker": "sandlot.trainers.tinker:EXPORTER",
        "prime-rl": "sandlot.trainers.prime_rl:EXPORTER",
        "openenv": "sandlot.trainers.openenv:EXPORTER",
        "trl": "sandlot.trainers.trl:EXPORTER",
        "atif": "sandlot.trainers.atif:EXPORTER",
        "sft": "sandlot.trainers.sft:EXPORTER",
    },
)
"""Exporters by name (`sandlot.trainers.base.Exporter`)."""

__all__ = ["TRAINERS", "Export", "Exporter", "TrainerDataError"]
