"""ZipCCL: collectives that are losslessly compressed, for training on links that are too slow.

Two ways in: a ``"zipccl"`` section in DeepSpeed's ds_config.json (no line of code), or torch.distributed's backend ``"zipccl"``
(DDP, FSDP2 and everything else on torch process groups; no DeepSpeed). Importing this package only makes sure that both are known
where the torch entry point is not active (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``).
"""
from zipscape import __version__
from zipscape.activate import autoload as _autoload

_autoload()

__all__ = ["__version__", "configure", "statistics"]


def configure(**fields) -> None:
    """Settings of the torch backend "zipccl": the fields of the "zipccl" section, in place of the variable ZIPCCL_CONFIG. Before
    init_process_group, alike on every rank. Raises ConfigError."""
    from ds_zipccl.backend import torch_session
    torch_session.configure(**fields)


def statistics() -> dict[str, dict]:
    """{collective: counters} of what the process's zipccl groups did so far; the last ones' where none exist now. Bytes are those this
    rank sends."""
    from ds_zipccl.backend import torch_session
    return torch_session.statistics()
