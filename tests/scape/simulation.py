"""W workers of SCAPE in one process, written out from docs/scape.md worker by worker and coordinate by coordinate: boolean masks, sorting,
whole-buffer arithmetic. Shares no code with ds_scape, rounds the same way, and so must give the same bits."""
import math

import numpy
import torch


def root(x):
    """Correctly rounded, which torch's own is not on a CPU."""
    return torch.from_numpy(numpy.sqrt(x.cpu().numpy())).to(x.device)


class Owner:
    def __init__(self, weight):
        self.w = weight.clone()
        self.m, self.q = torch.zeros_like(weight), torch.zeros_like(weight)
        self.age = torch.zeros(weight.numel(), dtype=torch.int64)
        self.decay = torch.ones(weight.numel(), dtype=torch.float64)


def sum_of_squares(gradient):
    """In the order that ds_scape/kernels/ops.py says."""
    lanes = min(1 << 19, 1 << (max(1, gradient.numel()) - 1).bit_length())
    rows = torch.nn.functional.pad(gradient.double() ** 2, (0, -gradient.numel() % lanes)).view(-1, lanes)
    sums = sum(rows, torch.zeros(lanes, dtype=torch.float64, device=rows.device))
    while len(sums) > 1:
        sums = sums[:len(sums) // 2] + sums[len(sums) // 2:]
    return sums[0]


class Simulation:
    """buffers: one flat tensor per group (model dtype, padded); slots[f]: (offset, numel, num_dims) of its tensors; groups[f]: lr,
    betas, eps, weight_decay, density, max_age."""

    def __init__(self, buffers, slots, groups, world_size, *, state_dtype=torch.float32, wire=torch.bfloat16, warmup=0, catch_up=True,
                 statistic="residual"):
        self.W, self.slots, self.groups, self.wire, self.warmup = world_size, slots, groups, wire, warmup
        self.catch_up, self.statistic, self.t = catch_up, statistic, 0
        self.dtype = state_dtype
        self.copies = [[b.clone() for b in buffers] for _ in range(world_size)]
        self.residual = [[torch.zeros(b.numel(), dtype=state_dtype) for b in buffers] for _ in range(world_size)]
        self.part = [b.numel() // world_size for b in buffers]
        self.owners = [[Owner(part) for part in b.to(state_dtype).split(p)] for b, p in zip(buffers, self.part, strict=True)]
        self.mask = [torch.ones(b.numel(), dtype=torch.bool) for b in buffers]
        self.dense = True

    def step(self, gradients, *, max_norm=0.0, loss_scale=1.0):
        """gradients[worker][f]. Returns (applied, norm)."""
        squares = [float(sum(sum_of_squares(g) for g in own)) for own in gradients]
        if not all(math.isfinite(s) for s in squares):
            return False, math.nan
        norm = math.sqrt(math.fsum(squares) / self.W / loss_scale ** 2)
        clip = max_norm / norm if 0 < max_norm < norm else 1.0
        self.t += 1
        next_masks = []
        for f, group in enumerate(self.groups):
            fresh = [g[f].to(self.dtype) * (clip / loss_scale) for g in gradients]
            for worker in range(self.W):
                self.residual[worker][f] += fresh[worker]
            pieces = [self._owner_turn(f, group, o, fresh[o].split(self.part[f])[o]) for o in range(self.W)]
            mask = self.mask[f]
            for worker in range(self.W):
                r = self.residual[worker][f]
                r -= torch.where(mask, r.to(self.wire).to(self.dtype), 0)
            for copies in self.copies:
                weights = torch.cat([owner.w for owner in self.owners[f]])
                copies[f] = torch.where(mask, weights.to(copies[f].dtype), copies[f])
            next_masks.append(torch.cat([self._rank_coordinates(f, group, o, pieces[o]) for o in range(self.W)]))
        self.dense = self.t + 1 <= max(1, self.warmup)
        self.mask = [torch.ones_like(m) if self.dense else m for m in next_masks]
        return True, norm

    def _owner_turn(self, f, group, o, own_gradient):
        (b1, b2), lr, eps = group["betas"], group["lr"], group["eps"]
        owner, cut = self.owners[f][o], slice(o * self.part[f], (o + 1) * self.part[f])
        early = (b1 * owner.m + (1 - b1) * self.residual[o][f][cut]).abs()
        owner.q = b2 * owner.q + (1 - b2) * (own_gradient * own_gradient)
        sent = [self.residual[worker][f][cut].to(self.wire).to(self.dtype) for worker in range(self.W)]
        mean = sent[0]
        for other in sent[1:]:
            mean = mean + other
        mean = mean / self.W
        owner.age += 1
        owner.decay *= 1 - lr * group["weight_decay"]
        mask = self.mask[f][cut]
        ages = owner.age.clamp(max=group["max_age"]) if self.catch_up else torch.ones_like(owner.age)
        per_age = [(0.0,) * 4] * (int(ages.max()) + 1 if ages.numel() else 1)
        for a in set(ages.tolist()):
            left = b1 ** a
            moved = b1 * (1 - left) / (1 - b1) if a > 1 else b1
            per_age[a] = (left, 1 - left, moved, a - moved if a > 1 else 1 - b1)
        kept, taken, moved, rest = torch.tensor(per_age, dtype=torch.float64).to(self.dtype)[ages].unbind(1)
        a = ages.to(self.dtype)
        gbar = mean / a
        d = root(b2 * (owner.m * owner.m) + (1 - b2) * (mean * mean / a)) + eps
        w = owner.w * owner.decay.to(self.dtype) - lr * ((moved * owner.m + rest * gbar) / d)
        owner.w = torch.where(mask, w, owner.w)
        owner.m = torch.where(mask, kept * owner.m + taken * gbar, owner.m)
        owner.age[mask], owner.decay[mask] = 0, 1.0
        return early

    def _rank_coordinates(self, f, group, o, early):
        owner, start = self.owners[f][o], o * self.part[f]
        if self.statistic == "first_moment":
            score = early
        else:
            score = self.residual[o][f][start:start + self.part[f]].abs() / (root(owner.q) + 1e-9)
        score, overdue = score.tolist(), (owner.age >= group["max_age"]).tolist()
        chosen = torch.zeros(self.part[f], dtype=torch.bool)
        if all(numel == 0 or dims <= 1 or group["density"] == 1 for _, numel, dims in self.slots[f]):
            return torch.ones_like(chosen)              # everything, padding too
        for offset, numel, dims in self.slots[f]:
            lo, hi = max(offset - start, 0), min(offset + numel - start, self.part[f])
            if hi <= lo:
                continue
            k = hi - lo if dims <= 1 else min(hi - lo, max(1, math.floor(group["density"] * (hi - lo) + 0.5)))
            order = sorted(range(lo, hi), key=lambda i: (not overdue[i], -score[i], i))
            chosen[torch.tensor(order[:k])] = True
        return chosen
