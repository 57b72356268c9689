"""AdamW on FP32 master weights, with FP32 gradient sums over microbatches and ranks.

Plain parameters (single, ddp): gradients of every microbatch are added to `param.main_grad`, an FP32 view of one flat buffer;
the buffer is summed over data-parallel ranks once a step. FSDP2 parameters are FP32 shards already: they are their own master
weights and FSDP2 sums their FP32 gradients. Either way the optimizer sees one FP32 gradient per FP32 weight.

The caller scales the loss by 1 / (label tokens of the whole step over all ranks), so sums are token means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from te_plugin.training.distributed import World

_REDUCE_CHUNK = 1 << 26  # elements of one all-reduce


@dataclass
class _Weight:
    """One weight: the parameter that computes, and its FP32 master (the same tensor when it is FP32 already)."""

    name: str
    parameter: nn.Parameter
    master: torch.Tensor

    @property
    def split_over_tp(self) -> bool:
        return bool(getattr(self.parameter, "tensor_model_parallel", False))


# A norm that a linear layer holds, and the name it has as a module of its own: checkpoints, sums over weights and the weights'
# fingerprint are the same for both forms.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight", ""),
    "mlp.linear_fc1.layer_norm_weight": ("pre_mlp_layernorm.weight", "mlp."),
}


def stored_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) as a model has them whose norms are modules of their own, in the order of such a model."""
    found: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        part = next((part for part in _FUSED_NORMS if name.endswith("." + part)), None)
        if part is None:
            found.append((name, parameter))
            continue
        layer = name.removesuffix(part)
        alone, stands_before = _FUSED_NORMS[part]
        place = next((i for i, (other, _) in enumerate(found) if other.startswith(layer + stands_before)), len(found))
        found.insert(place, (layer + alone, parameter))
    return found


class MasterAdamW:
    """Decay applies to matrices only (norm weights and biases have none). Learning rate is given at each step."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        clip_grad: float,
    ):
        self.world, self.clip_grad = world, clip_grad
        self.weights: list[_Weight] = []
        for name, parameter in stored_parameters(model):
            if not parameter.requires_grad:
                continue
            if isinstance(parameter, DTensor) and parameter.dtype != torch.float32:
                raise TypeError(
                    f"sharded parameter {name} is {parameter.dtype}: master weights are FP32, shard the FP32 model"
                )
            master = parameter.detach() if parameter.dtype == torch.float32 else parameter.detach().float()
            self.weights.append(_Weight(name, parameter, master))
        if not self.weights:
            raise ValueError("the model has no trainable parameter")
        self._sharded = isinstance(self.weights[0].parameter, DTensor)
        if not self._sharded:
            self._make_main_grads()
        matrices = [w.master for w in self.weights if w.master.ndim >= 2]
        vectors = [w.master for w in self.weights if w.master.ndim < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=0.0, betas=(beta1, beta2), eps=eps, fused=True
        )
        for weight in self.weights:  # made now, so that a checkpoint can be loaded before the first step
            self.adam.state[weight.master] = {
                "step": torch.zeros((), dtype=torch.float32, device=world.device),
                "exp_avg": torch.zeros_like(weight.master),
                "exp_avg_sq": torch.zeros_like(weight.master),
            }

    def _make_main_grads(self) -> None:
        total = sum(w.parameter.numel() for w in self.weights)
        self._flat_grad = torch.zeros(total, dtype=torch.float32, device=self.world.device)
        start = 0
        for weight in self.weights:
            parameter, count = weight.parameter, weight.parameter.numel()
            parameter.main_grad = self._flat_grad[start : start + count].view(parameter.shape)
            parameter.grad_added_to_main_grad = False
            parameter.register_post_accumulate_grad_hook(_accumulate)
            start += count

    def zero_grad(self) -> None:
        if self._sharded:
            for weight in self.weights:
                weight.parameter.grad = None
        else:
            self._flat_grad.zero_()

    def reduce_gradients(self) -> None:
        """Sum the step's gradients over data-parallel ranks (FSDP2 has done it in backward)."""
        if self.world.tp_size > 1:
            for weight in self.weights:  # each rank saw its part of the tokens only
                if getattr(weight.parameter, "sequence_parallel", False):
                    self.world.sum_tp(weight.parameter.main_grad)
        if not self._sharded and self.world.dp_size > 1:
            for chunk in self._flat_grad.split(_REDUCE_CHUNK):
                self.world.sum_dp(chunk)

    def gradient_norm(self) -> float:
        """L2 norm of the whole model's gradient; every weight counts once, however it is split."""
        split, whole = [], []
        for weight, gradient in zip(self.weights, self._local_gradients(), strict=True):
            (split if weight.split_over_tp else whole).append(gradient)
        squares = torch.stack([_sum_of_squares(split, self.world.device), _sum_of_squares(whole, self.world.device)])
        if self._sharded:
            self.world.sum_dp(squares)
        if self.world.tp_size > 1:
            squares[0] = self.world.sum_tp(squares[:1].clone())[0]
        return math.sqrt(float(squares.sum()))

    def step(self, lr: float, norm: float) -> None:
        """Clip to the global norm, update the masters, copy them to the parameters that compute."""
        if self.clip_grad > 0 and norm > self.clip_grad:
            factor = self.clip_grad / (norm + 1e-6)
            if self._sharded:
                torch._foreach_mul_(self._local_gradients(), factor)
            else:
                self._flat_grad.mul_(factor)
        for group in self.adam.param_groups:
            group["lr"] = lr
        for weight in self.weights:
            weight.master.grad = weight.parameter.grad if self._sharded else weight.parameter.main_grad
        self.adam.step()
        for weight in self.weights:
            weight.master.grad = None
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Make the parameters equal the masters (rounded to their dtype): after a step, and after loading a checkpoint."""
        for weight in self.weights:
            if weight.parameter.dtype != weight.master.dtype:
                weight.parameter.copy_(weight.master)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything a checkpoint must hold, by name; loading writes into these tensors in place."""
        found = {}
        for weight in self.weights:
            state = self.adam.state[weight.master]
            found[f"model/{weight.name}"] = weight.master
            found[f"exp_avg/{weight.name}"] = state["exp_avg"]
            found[f"exp_avg_sq/{weight.name}"] = state["exp_avg_sq"]
        return found

    @property
    def steps_done(self) -> int:
        return int(self.adam.state[self.weights[0].master]["step"])

    def set_steps_done(self, steps: int) -> None:
        for weight in self.weights:
            self.adam.state[weight.master]["step"].fill_(steps)

    def _local_gradients(self) -> list[torch.Tensor]:
        if not self._sharded:
            return [w.parameter.main_grad for w in self.weights]
        for weight in self.weights:
            if weight.parameter.grad is None:
                weight.parameter.grad = torch.zeros_like(weight.parameter)
        return [w.parameter.grad.to_local() for w in self.weights]


def _accumulate(parameter: nn.Parameter) -> None:
    """After a microbatch's backward: add its gradient to main_grad once, unless the layer's own GEMM already did."""
    if parameter.grad_added_to_main_grad:
        parameter.grad_added_to_main_grad = False
    else:
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def _sum_of_squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    tensors = [t for t in tensors if t.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(tensors)).double()
    return (norms * norms).sum()


def learning_rate(tokens: int, *, peak: float, total_tokens: int, warmup_tokens: int, min_ratio: float) -> float:
    """Linear warm-up, then cosine to peak * min_ratio. `tokens`: tokens seen at the end of the step that uses this rate."""
    if tokens < warmup_tokens:
        return peak * tokens / warmup_tokens
    span = max(total_tokens - warmup_tokens, 1)
    done = min(max(tokens - warmup_tokens, 0) / span, 1.0)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def fingerprint(optimizer: MasterAdamW, world: World) -> str:
    """16 hexadecimal digits over the weights rounded to BF16: equal for every way of sharding and every precision."""
    import hashlib

    sums = []
    for weight in optimizer.weights:
        local = weight.master.to_local() if isinstance(weight.master, DTensor) else weight.master
        bits = local.to(torch.bfloat16).contiguous().view(torch.int16).to(torch.int64)
        sums.append(torch.stack([bits.sum(), (bits * (bits >> 4)).sum()]))
    total = torch.stack(sums)
    if isinstance(optimizer.weights[0].master, DTensor):
        world.sum_dp(total)
    if world.tp_size > 1:
        split = torch.tensor([w.split_over_tp for w in optimizer.weights], device=total.device)
        total = torch.where(split[:, None], world.sum_tp(total.clone()), total)
    text = ";".join(f"{w.name}:{a}:{b}" for w, (a, b) in zip(optimizer.weights, total.tolist(), strict=True))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
