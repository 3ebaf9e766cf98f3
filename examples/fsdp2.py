"""Trains a small GPT with FSDP2 (fully_shard); an ordinary script without DeepSpeed.

    torchrun --nproc_per_node 2 fsdp2.py                      # gloo, or NCCL where there are GPUs
    torchrun --nproc_per_node 2 fsdp2.py --backend zipccl     # gathers and gradients are compressed; at 2 ranks every bit is the same

FP32 master weights, gathered and their gradients reduced in BF16. Prints the losses (rank 0's own), what was sent, a hash of the weights.
"""
import byte_text
import torch
import torch.distributed as dist
import torch_run
from gpt import GPT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard(model, device):
    """Every block and the rest, over all ranks."""
    settings = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
                "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def main():
    args = torch_run.parse_args("Train a small GPT with FSDP2.")
    device = torch_run.init(args.backend)
    model = shard(GPT(byte_text.VOCAB_SIZE, args.dim, args.layers, num_heads=4).to(device), device)
    torch_run.train(model, args, device)
    torch_run.end(args.backend, [parameter.full_tensor() for parameter in model.parameters()])


if __name__ == "__main__":
    main()
