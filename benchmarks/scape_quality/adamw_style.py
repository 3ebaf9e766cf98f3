"""A question, not the product: SCAPE's catch-up step divided by AdamW's denominator in place of AdamS's."""
import torch

from benchmarks.scape_quality.workers import BETAS, Scape
from ds_scape.kernels import impl_reference

EPS = 1e-8


class AdamWStyle(Scape):
    """The owner also keeps ``second`` [n], the moving average of the mean gradient's square: after a steps with the square u^2/a each,
    v = B*v + (1-B)*u^2/a, B = b2^a, and D = sqrt(v / (1 - b2^step)) + eps. Always AdamW's eps. The momentum is not corrected for its start
    at zero, since the learning rate rises from zero too. In plain torch."""

    def __init__(self, slots, copies, initial, workers, params, rounds_residual=False):
        super().__init__(slots, copies, initial, workers, params, rounds_residual)
        self.second = torch.zeros_like(initial)
        ages = torch.arange(self.flat.max_age + 1, dtype=torch.float64, device="cpu")
        self._second_kept = (BETAS[1] ** ages).to(initial)

    def _owner_step(self, mean, index, step, lr, out) -> None:
        flat, at = self.flat, slice(None) if index is None else impl_reference.places(index)
        weight, momentum, second = (tensor[at] for tensor in (flat.weight, flat.momentum, self.second))
        age = impl_reference.ages(flat.last_sync[at], step - 1) + 1
        if flat.decay_products is not None:
            weight = weight * flat.decay_products[age.clamp(max=flat.decay.numel() - 1)]
        counted = age.clamp(max=flat.max_age)
        kept, taken, moved, gradient_moved = (table[counted] for table in flat.age_tables)
        left, gradient = self._second_kept[counted], mean / counted
        second = left * second + (1 - left) * mean * gradient
        divisor = (second / (1 - BETAS[1] ** step)).sqrt_().add_(EPS)
        flat.weight[at] = weight - lr * (moved * momentum + gradient_moved * gradient) / divisor
        flat.momentum[at], self.second[at] = kept * momentum + taken * gradient, second
        flat.last_sync[at] = impl_reference.stamp(step, flat.last_sync.dtype)
        out.copy_(flat.weight[at])

    def state(self) -> dict:
        return super().state() | {"second": self.second}

    def load(self, saved: dict) -> None:
        super().load(saved)
        self.second.copy_(saved["second"])
