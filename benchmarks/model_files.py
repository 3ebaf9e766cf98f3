"""Real weights and gradients for `ds_zipccl bench codec`: the demo's GPT, trained in plain torch on the standard library's sources.

    python benchmarks/model_files.py FOLDER [--steps 300]
    ds_zipccl bench codec --file FOLDER/weights.pt --gradients FOLDER/gradients.pt

Mixed precision as in training: BF16 parameters and gradients, fp32 master weights in the optimizer. gradients.pt holds the last step's.
"""
import argparse
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import byte_text
from gpt import GPT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(1)
    model = GPT(byte_text.VOCAB_SIZE, args.dim, args.layers, 4).to(torch.bfloat16)
    parameters = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    text, generator = byte_text.load(None, 8, 128)[0], torch.Generator().manual_seed(1)
    for step in range(1, args.steps + 1):
        x, y = byte_text.batch(text, 8, 128, generator, "cpu")
        model.zero_grad()
        loss = cross_entropy(model(x).float().flatten(0, 1), y.flatten())
        loss.backward()
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        for master, parameter in zip(masters, parameters, strict=True):
            parameter.data.copy_(master.detach())
        if step % 50 == 0 or step == args.steps:
            print(f"step {step}/{args.steps} loss {loss.item():.4f}", flush=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.save({name: p.detach() for name, p in model.named_parameters()}, args.folder / "weights.pt")
    torch.save({name: p.grad for name, p in model.named_parameters()}, args.folder / "gradients.pt")


if __name__ == "__main__":
    main()
