"""``ds_scape.ScapeAdamS``: the dense AdamS rule as a torch optimizer, for any ZeRO stage. Not the AdamS of the package pytorch_optimizer,
which is Adam with stable weight decay; hence the name."""
import torch

from ds_scape.config import AdamSParams, GroupParams, parse
from ds_scape.kernels import loader
from ds_scape.optimizer.refusals import check_last_group
from ds_scape.update.adams import dense_step
from zipscape.errors import ConfigError, describe

#: What a parameter group may set for itself.
GROUP_KEYS = (*GroupParams.model_fields, "bias_correction")


class ScapeAdamS(torch.optim.Optimizer):
    """Dense AdamS. params: as for every torch optimizer; groups may set lr, betas, eps, weight_decay, bias_correction.

    bias_correction: false is the published formula (first step 0.447 lr at beta2 = 0.95), true the authors' code (first step 4.47 lr).
    State per parameter: ``step`` (int) and ``exp_avg`` (the parameter's shape and dtype). Raises ConfigError for wrong settings.
    """

    def __init__(self, params, **settings):
        self.params = parse(settings, AdamSParams, where="the parameters given to ScapeAdamS")
        super().__init__(params, {key: getattr(self.params, key) for key in GROUP_KEYS})

    def add_param_group(self, param_group) -> None:
        own = {key: param_group[key] for key in GROUP_KEYS if key in param_group}
        merged = parse({**self.params.model_dump(), **own}, AdamSParams, where="a parameter group given to ScapeAdamS")
        param_group.update({key: getattr(merged, key) for key in own})
        super().add_param_group(param_group)
        check_last_group(self)

    def _kernels(self, device_type: str):
        return loader.choose(self.params.kernels, device_type)

    @torch.no_grad()
    def step(self, closure=None):
        """One step for every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise ConfigError(describe("ScapeAdamS does not take sparse gradients", todo="set sparse=False on the embedding"))
                state = self.state[p]
                if not state:
                    state["step"], state["exp_avg"] = 0, torch.zeros_like(p)
                state["step"] += 1
                dense_step(p, state["exp_avg"], p.grad, lr=group["lr"], betas=group["betas"], eps=group["eps"],
                           weight_decay=group["weight_decay"], bias_correction_step=state["step"] if group["bias_correction"] else 0,
                           kernels=self._kernels(p.device.type))
        return loss

    def state_dict(self) -> dict:
        """torch's, and an ``exp_avg_sq`` of zeros that takes no room: DeepSpeed's ds_to_universal asks for Adam's names."""
        saved = super().state_dict()
        # Without touching this optimizer's own dictionaries, which torch hands out as they are.
        saved["state"] = {key: {**state, "exp_avg_sq": state["exp_avg"].new_zeros(1).expand(state["exp_avg"].shape)}
                          if "exp_avg" in state else state for key, state in saved["state"].items()}
        return saved

    def load_state_dict(self, state_dict) -> None:
        """torch's, without what state_dict() put in."""
        state = {key: {name: value for name, value in s.items() if name != "exp_avg_sq"} for key, s in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state})
