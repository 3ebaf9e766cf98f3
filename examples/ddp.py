"""Trains a small GPT with torch's DistributedDataParallel; an ordinary script without DeepSpeed.

    torchrun --nproc_per_node 2 ddp.py                      # gloo, or NCCL where there are GPUs
    torchrun --nproc_per_node 2 ddp.py --backend zipccl     # gradients are compressed; at 2 ranks every bit is the same

BF16 weights, so the gradients that DDP all-reduces are BF16. Prints the losses (rank 0's own), what was sent and a hash of the weights.
"""
import byte_text
import torch
import torch_run
from gpt import GPT
from torch.nn.parallel import DistributedDataParallel


def main():
    args = torch_run.parse_args("Train a small GPT with DDP.")
    device = torch_run.init(args.backend)
    model = DistributedDataParallel(GPT(byte_text.VOCAB_SIZE, args.dim, args.layers, num_heads=4).to(device, torch.bfloat16))
    torch_run.train(model, args, device)
    torch_run.end(args.backend, model.parameters())


if __name__ == "__main__":
    main()
