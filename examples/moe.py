"""Trains a small GPT with a mixture of experts in every block (DeepSpeed's MoE layer); an ordinary DeepSpeed script.

    torchrun --nproc_per_node 2 moe.py                          # tokens travel to their experts and back compressed
    ZIPSCAPE_DISABLE=1 torchrun --nproc_per_node 2 moe.py       # the same natively; at 2 ranks every bit is the same

The experts are spread over groups of --ep-size ranks (default: all), so a step exchanges tokens four times a block: there and back, in
forward and backward. Prints the losses (rank 0's own, without the gates' share) and a hash of each rank's weights.
"""
import argparse
import functools
import hashlib
import os
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed workspace

import byte_text
import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from gpt import GPT, Block, swiglu
from leave import leave
from torch import nn
from torch.nn.functional import cross_entropy

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "moe_zipccl.json"
GATES_SHARE = 0.01          # of the loss: keeps the gates from sending every token to the same expert


def parse_args():
    parser = argparse.ArgumentParser(description="Train a small GPT with a mixture of experts.")
    parser.add_argument("--config", default=str(CONFIG), help="DeepSpeed's configuration (default configs/moe_zipccl.json)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default 20)")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--experts", type=int, default=4, help="in every block, over all ranks of an expert-parallel group (default 4)")
    parser.add_argument("--ep-size", type=int, help="ranks of an expert-parallel group (default: all ranks)")
    parser.add_argument("--top-k", type=int, default=1, choices=(1, 2), help="experts a token goes to (default 1)")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return parser.parse_args()


class Expert(nn.Module):
    """A block's MLP by itself, for tokens [..., dim]."""

    def __init__(self, gate_up, down):
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x):
        return swiglu(x, self.gate_up, self.down)


class MoEBlock(Block):
    """A block that sends each token to top_k of num_experts MLPs, wherever in the group they are."""

    def __init__(self, dim, num_heads, num_experts, ep_size, top_k):
        super().__init__(dim, num_heads)
        expert = Expert(self.gate_up, self.down)
        del self.gate_up, self.down
        self.experts = MoE(dim, expert, num_experts, ep_size, k=top_k)

    def mlp(self, x):
        output, self.gate_loss, _ = self.experts(x)
        return output


def weights_hash(model):
    """Of this rank's weights: the experts are its own."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def main():
    args = parse_args()
    deepspeed.init_distributed(verbose=False)
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    ep_size = args.ep_size or dist.get_world_size()
    block = functools.partial(MoEBlock, num_experts=args.experts, ep_size=ep_size, top_k=args.top_k)
    model = GPT(byte_text.VOCAB_SIZE, args.dim, args.layers, num_heads=4, block=block)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=args.config)

    text, _ = byte_text.load(None, 1, args.seq_len)
    generator = torch.Generator().manual_seed(dist.get_rank())              # every rank reads other places
    for step in range(1, args.steps + 1):
        for _ in range(engine.gradient_accumulation_steps()):
            x, y = byte_text.batch(text, engine.train_micro_batch_size_per_gpu(), args.seq_len, generator, engine.device)
            loss = cross_entropy(engine(x).float().flatten(0, 1), y.flatten())
            engine.backward(loss + GATES_SHARE * sum(b.gate_loss for b in model.blocks) / args.layers)
            engine.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f} = {loss.item().hex()}", flush=True)
    hashes = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, weights_hash(model))
    if dist.get_rank() == 0:
        print("weights", *hashes, flush=True)
    leave(dist)


if __name__ == "__main__":
    main()
