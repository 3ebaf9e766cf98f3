"""SCAPE: an optimizer that sends a small part of the gradient per step, chosen by the owners of ZeRO's partitions.

Switched on by ``"optimizer": {"type": "SCAPE", "params": {...}}`` in ds_config.json; ``ds_scape.SCAPE`` and ``ds_scape.ScapeAdamS`` are
torch optimizers. torch is loaded when they are first used.
"""
from zipscape import __version__
from zipscape.activate import autoload as _autoload

_autoload()

__all__ = ["SCAPE", "ScapeAdamS", "__version__"]


def __getattr__(name):
    if name == "SCAPE":
        from ds_scape.optimizer.scape import SCAPE
        return SCAPE
    if name == "ScapeAdamS":
        from ds_scape.optimizer.scape_adams import ScapeAdamS
        return ScapeAdamS
    raise AttributeError(f"module 'ds_scape' has no attribute {name!r}")
