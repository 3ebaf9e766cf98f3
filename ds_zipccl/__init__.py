"""ZipCCL: collectives that are losslessly compressed, for DeepSpeed training on links that are too slow.

Switched on by a ``"zipccl"`` section in ds_config.json. Importing this package only makes sure that the section is
noticed where the torch entry point is not active (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``).
"""
from zipscape import __version__
from zipscape.activate import autoload as _autoload

_autoload()

__all__ = ["__version__"]
