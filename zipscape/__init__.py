"""Ground floor of ZipScape, below ds_zipccl and ds_scape: activation, handshake, errors, progress.

Kept import-light: `import torch` loads this package in every process of an environment that has ZipScape installed.
"""

__version__ = "0.1.0"
