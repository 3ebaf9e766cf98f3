"""``ds_scape.SCAPE``: the torch optimizer. Alone it trains one process; under DeepSpeed's ZeRO 1 and 2 the seam (zero_adapter.py) attaches
a flow over all ranks to it."""
import logging

import torch
import torch.distributed as dist

from ds_scape.config import GroupParams, parse
from ds_scape.optimizer.flow import Flow, StepResult
from ds_scape.optimizer.passage import host_zeros, passage_for
from ds_scape.optimizer.refusals import check_last_group
from ds_scape.optimizer.state import FlatState, sync_steps
from ds_scape.sync.partition import TensorSlot, flat_layout
from ds_scape.sync.transport import Transport
from zipscape.errors import ConfigError, describe

log = logging.getLogger("ds_scape")
GROUP_KEYS = (*GroupParams.model_fields, "density")
#: Names of the state as saved; the first two are Adam's, because DeepSpeed's tools look for them. exp_avg_sq holds q (docs/scape.md).
STATE = {"exp_avg": "momentum", "exp_avg_sq": "square", "last_sync": "stored_last_sync"}
#: More of it where no ZeRO keeps master weights and residuals.
OWN_STATE = {"residual": "stored_residual", "master": "weight"}


class SCAPE(torch.optim.Optimizer):
    """Sparse synchronisation of AdamS: per step only the most urgent coordinates of every tensor are sent and changed.

    params: as for every torch optimizer; groups may set lr, betas, eps, weight_decay and density (or sparsity). Keyword arguments:
    ds_scape.config.ScapeParams. Raises ConfigError for wrong ones. At more than one process it needs DeepSpeed with ZeRO stage 1 or 2.
    """

    def __init__(self, params, **settings):
        self.params = parse(settings, where="the parameters given to SCAPE")
        super().__init__(params, {key: getattr(self.params, key) for key in GROUP_KEYS})
        self.last_result: StepResult | None = None
        self._flow: Flow | None = None
        self._attached = False

    def add_param_group(self, param_group) -> None:
        """Adds a group before the first step. Raises ConfigError for wrong settings, or afterwards."""
        if getattr(self, "_flow", None) is not None:
            raise ConfigError(describe("a parameter group cannot be added to SCAPE after its first step",
                                       todo="give all groups at the start"))
        own = {key: param_group[key] for key in (*GROUP_KEYS, "sparsity") if key in param_group}
        common = {key: getattr(self.params, key) for key in ("max_age", *GROUP_KEYS)}
        if "sparsity" in own:
            common.pop("density")
        merged = parse({**common, **own}, where="a parameter group given to SCAPE")
        param_group.pop("sparsity", None)
        param_group.update({key: getattr(merged, key) for key in own if key != "sparsity"}, density=merged.density)
        super().add_param_group(param_group)
        check_last_group(self)

    def attach(self, flow: Flow) -> None:
        """Hands over to a flow whose i-th buffer is the i-th parameter of all groups; step() is then the host's affair."""
        self._flow, self._attached = flow, True
        self.publish_state()

    @property
    def flow(self) -> Flow:
        """The flow of a single process, made at its first use."""
        if self._flow is None:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                raise ConfigError(describe("SCAPE was stepped in a run of several processes without DeepSpeed's ZeRO",
                                           expected="ZeRO stage 1 or 2",
                                           todo='use deepspeed.initialize with "zero_optimization": {"stage": 1}'))
            self._flow = self._single_process_flow()
            self.publish_state()
        return self._flow

    @torch.no_grad()
    def step(self, closure=None):
        """One step from the parameters' .grad; a parameter without one counts as having had a zero gradient. Gradients that are not finite
        skip the step (``last_result.applied`` is False). Without any gradient nothing happens."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._attached:
            raise ConfigError(describe("SCAPE's step is done by the ZeRO optimizer around it", todo="call engine.step()"))
        params = list(self._parameters())
        if all(p.grad is None for p in params):
            return loss
        if self._flow is not None and [id(p) for p in params] != self._trained:
            raise ConfigError(describe("parameters were frozen or unfrozen after SCAPE's first step",
                                       todo="set requires_grad before it; lr = 0 in a group of its own stops a group later"))
        if any(p.grad is not None and p.grad.is_sparse for p in params):
            raise ConfigError(describe("SCAPE does not take sparse gradients", todo="set sparse=False on the embedding"))
        fresh = [torch.zeros_like(flat.copies) if p.grad is None else p.grad.reshape(-1)
                 for p, flat in zip(params, self.flow.flats, strict=True)]
        self.last_result = self.flow.step(fresh)
        if not self.last_result.applied:
            log.warning("step skipped: the gradients are not finite")
        for p, flat in zip(params, self.flow.flats, strict=True):
            if not p.is_contiguous():
                p.copy_(flat.copies.view(p.shape))
        self.publish_state()
        return loss

    # --- state -------------------------------------------------------------------------------------------------------------------------
    def _parameters(self):
        return (p for group in self.param_groups for p in group["params"] if p.requires_grad)

    def _single_process_flow(self) -> Flow:
        params = list(self._parameters())
        if len({p.device for p in params}) > 1:
            raise ConfigError(describe("SCAPE needs all parameters on one device", got=sorted({str(p.device) for p in params})))
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32
        flats, passage = [], passage_for(self.params.offload, params[0].device, sum(p.numel() for p in params))
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.requires_grad):
                copies = p.detach().contiguous().view(-1)
                weight = copies.to(dtype)           # the same storage where the dtype is: then the copies are the master
                layout = flat_layout([TensorSlot(0, p.numel(), p.dim())], p.numel(), 1, group["density"])
                momentum, square = torch.zeros_like(weight), torch.zeros_like(weight)
                last_sync = sync_steps(weight, self.params, group["density"], passage)
                residual = torch.zeros_like(weight) if passage is None else host_zeros(p.numel(), dtype, p.device,
                                                                                       self.params.offload.pin_memory)
                flats.append(FlatState(layout, copies, residual, weight, momentum, square, last_sync, group, self.params, passage))
        self._trained = [id(p) for p in params]
        return Flow(flats, self.params, Transport())

    def _named(self, flat: FlatState) -> dict:
        names = STATE if self._attached else {**STATE, **OWN_STATE}
        return {name: getattr(flat, field) for name, field in names.items()}

    def publish_state(self) -> None:
        """The state as torch keeps it: the flow's own tensors, by parameter."""
        for p, flat in zip(self._parameters(), self._flow.flats, strict=True):
            self.state[p].update(self._named(flat), step=self._flow.num_steps)

    def publish_ages(self) -> None:
        """What of the state stays in host memory under offload."""
        for p, flat in zip(self._parameters(), self._flow.flats, strict=True):
            if flat.stored_last_sync.device != flat.weight.device:
                self.state[p]["last_sync"] = flat.stored_last_sync

    def adopt_state(self) -> int:
        """Takes m and q back from where the host put them, into ``state`` by parameter; returns the step found there."""
        steps = [0]
        for p, flat in zip(self._parameters(), self._flow.flats, strict=True):
            flat.momentum.copy_(self.state[p]["exp_avg"])
            flat.square.copy_(self.state[p]["exp_avg_sq"])
            steps.append(int(self.state[p].get("step", 0)))
        return max(steps)

    def state_dict(self) -> dict:
        """torch's, and under "scape" what belongs to no single parameter: the step, the next mask, the decay products. Under offload only
        this method, not ``state`` itself, shows whole residuals."""
        saved = super().state_dict()
        if self._flow is not None:
            self._flow.settle()
            saved["scape"] = self._flow.state_dict()
        return saved

    def load_state_dict(self, state_dict) -> None:
        """Copies a saved state into the present one, every dtype as saved (torch would cast all to the parameter's). All ranks together.
        The present densities stay. Raises ConfigError for another optimizer's state."""
        if state_dict["state"] and "scape" not in state_dict:
            raise ConfigError(describe("this is no state of SCAPE", got=f"a state with {sorted(next(iter(state_dict['state'].values())))}",
                                       todo="load it with load_optimizer_states=False"))
        densities = [group["density"] for group in self.param_groups]
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for group, density in zip(self.param_groups, densities, strict=True):
            group["density"] = density
        if "scape" not in state_dict:
            return
        flow = self.flow
        flow.settle()
        ids = [i for group, now in zip(state_dict["param_groups"], self.param_groups, strict=True)
               for i, p in zip(group["params"], now["params"], strict=True) if p.requires_grad]
        index = 0
        for group in self.param_groups:             # torch has put new dictionaries in place
            for _ in (p for p in group["params"] if p.requires_grad):
                flat = flow.flats[index]
                flat.group = group
                for name, tensor in self._named(flat).items():
                    tensor.copy_(state_dict["state"][ids[index]][name])
                flat.copies.copy_(flat.weight) if not self._attached else None
                index += 1
        flow.load_state_dict(state_dict["scape"])
        self.publish_state()
