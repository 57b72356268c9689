"""Delayed scaling: the amax histories of a layer's three operands, and the scales that they give."""

from __future__ import annotations

import torch
from torch import nn

from te_plugin import numerics
from te_plugin.torch.options import options as options_of
from te_plugin.torch.quantize import QuantizedTensor, QuantizeOptions, quantize_2d, scale_from_amax

AMAX_COMPUTE = ("max", "most_recent")


class DelayedScaling(nn.Module):
    """Amax histories of the three operands of a layer (activation, weight, gradient) and the scales they give.

    In a step, `quantize` uses the scale set at its start and folds each amax into slot 0 of the history (a maximum, so that
    microbatches and activation recompute count once). `advance` ends a step: scales come from the history, which then rolls.
    An operand that was not quantised in a step keeps history and scale.
    Numbers (all FP32, on one device): history[3, length], scale[3], seen[3], which checkpoints hold, and fresh[3].

    They are plain tensors and no buffers: DistributedDataParallel would overwrite every rank's amaxes with those of rank 0 in
    each forward, and averaged models would average them. They follow the module to its device, stay FP32 and never lie on "meta".
    """

    OPERANDS = ("activation", "weight", "gradient")
    SAVED = ("history", "scale", "seen")

    def __init__(self, scaling: numerics.Scaling, history_len: int = 1024, amax_compute: str = "max", device=None):
        super().__init__()
        if history_len < 1:
            raise ValueError(f"history_len={history_len} must be at least 1")
        if amax_compute not in AMAX_COMPUTE:
            raise ValueError(f"amax_compute={amax_compute!r} is not one of {', '.join(AMAX_COMPUTE)}")
        self.scaling, self.amax_compute = scaling, amax_compute
        device = torch.get_default_device() if device is None else torch.device(device)
        device = torch.device("cpu") if device.type == "meta" else device  # nothing would fill them in later
        self.history = torch.zeros(3, history_len, dtype=torch.float32, device=device)
        self.scale = torch.ones(3, dtype=torch.float32, device=device)
        self.seen = torch.zeros(3, dtype=torch.float32, device=device)
        self.fresh = torch.ones(3, dtype=torch.float32, device=device)
        self._asked: dict[str, tuple[torch.Tensor, torch.cuda.Event]] = {}

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_asked": {}}

    def _apply(self, fn, recurse=True):
        """A model is moved, cast (to(torch.bfloat16)) or emptied (to_empty): the numbers go to its device as they are."""
        with torch.inference_mode(False):  # training will write to them
            for name in (*self.SAVED, "fresh"):
                number = getattr(self, name)
                device = fn(number).device
                if device.type != "meta":
                    setattr(self, name, number.to(device))
        self._asked.clear()
        return super()._apply(fn, recurse)

    def format(self, operand: int) -> numerics.Fp8Format:
        return self.scaling.format(self.OPERANDS[operand])

    def cast_of(self, operand: str, transpose: bool) -> tuple[QuantizeOptions, torch.Tensor]:
        """How an operand is quantised in this step: the options and the given scale, FP32[1]."""
        index = self.OPERANDS.index(operand)
        options = options_of(QuantizeOptions, self.format(index).name, "tensor", False, transpose, True)
        return options, self.scale[index:index + 1]

    def record(self, operand: str, amax: torch.Tensor) -> None:
        """Fold the amax of something quantised into the history."""
        index = self.OPERANDS.index(operand)
        self.history[index, 0].clamp_min_(amax)  # the larger one, and NaN if either is
        self.seen[index].fill_(1)

    def quantize(self, x: torch.Tensor, operand: str, transpose: bool = False, record: bool = True) -> QuantizedTensor:
        """Quantise x[R,C] with the scale of this step; record its amax unless the call is outside training."""
        options, scale = self.cast_of(operand, transpose)
        made = quantize_2d(x, options, scale)
        if record:
            self.record(operand, made.stats[0])
        return made

    @torch.no_grad()
    def advance(self, group=None) -> None:
        """End a step. `group`: process group over which the amaxes are reduced (maximum); every rank must call it."""
        if group is not None:
            packed = torch.cat([self.history[:, 0], self.seen])
            torch.distributed.all_reduce(packed, op=torch.distributed.ReduceOp.MAX, group=group)
            self.history[:, 0], self.seen[:] = packed[:3], packed[3:]
        amax = self.history.max(dim=1).values if self.amax_compute == "max" else self.history[:, 0]
        amax = amax.masked_fill(torch.isnan(self.history[:, 0]), 0.0)
        limit = [scale_from_amax(amax[i:i + 1], self.format(i)) for i in range(3)]
        ran = self.seen > 0
        # A step whose amax is 0, NaN or infinite says nothing about the next one: its scale is kept.
        usable = ran & (amax > 0) & torch.isfinite(amax)
        self.scale.copy_(torch.where(usable, torch.cat(limit), self.scale))
        newest = self.history[:, :1].masked_fill(~torch.isfinite(self.history[:, :1]), 0.0)
        rolled = torch.cat([torch.zeros_like(newest), newest, self.history[:, 1:-1]], dim=1)[:, :self.history.shape[1]]
        self.history.copy_(torch.where(ran[:, None], rolled, self.history))
        self.seen.zero_()

    @torch.no_grad()
    def calibrate(self, x: torch.Tensor, operand: str) -> None:
        """Give an operand the scale of these values and a history that holds nothing older.

        Only until there were values to learn from: a first tensor that is empty, all zero (a microbatch without a loss token) or
        not finite gives scale 1 for itself and leaves the operand `fresh`. That is told on the device, because a traced graph
        repeats this call at every step.
        """
        index = self.OPERANDS.index(operand)
        fresh = self.fresh[index:index + 1] > 0
        amax = x.detach().abs().max().float().reshape(1) if x.numel() else self.scale.new_zeros(1)
        amax = amax.masked_fill(~torch.isfinite(amax), 0.0)
        self.history[index].masked_fill_(fresh, 0.0)
        scale = self.scale[index:index + 1]
        scale.copy_(torch.where(fresh, scale_from_amax(amax, self.format(index)), scale))
        self.fresh[index:index + 1].masked_fill_(amax > 0, 0.0)

    def is_fresh(self, operand: str) -> bool:
        """Whether an operand still waits for values to calibrate with, as far as the host knows.

        A GPU is asked without waiting for it: the answer is there at a later call, and until then the operand counts as fresh.
        """
        index = self.OPERANDS.index(operand)
        if not self.fresh.is_cuda:
            return bool(self.fresh[index])
        if torch.cuda.is_current_stream_capturing():
            return True
        if operand in self._asked:
            answer, arrived = self._asked[operand]
            if not arrived.query():
                return True
            del self._asked[operand]
            if not answer.item():
                return False
        answer = torch.empty(1, dtype=torch.float32, pin_memory=True)
        answer.copy_(self.fresh[index:index + 1], non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(self.fresh.device))
        self._asked[operand] = answer, arrived
        return True

    def is_asked(self, operand: str) -> bool:
        """Whether a GPU was asked for an operand, so that `is_fresh` may know more now."""
        return operand in self._asked

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.SAVED:
            destination[prefix + name] = getattr(self, name) if keep_vars else getattr(self, name).detach()

    @torch.no_grad()
    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        """A plain checkpoint holds no FP8 state; that is legal, and the scales then start anew. Of a history of another length
        the newest entries that fit are taken. An operand that had met no values when it was saved is fresh again."""
        found = {name: state_dict[prefix + name] for name in self.SAVED if prefix + name in state_dict}
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key[len(prefix):] not in self.SAVED]
        for name, saved in found.items():
            own = getattr(self, name)
            if saved.shape[:1] != own.shape[:1] or saved.dim() != own.dim():
                error_msgs.append(f"{prefix}{name} has shape {tuple(saved.shape)}, {tuple(own.shape)} is needed")
                return
            if name == "history" and saved.shape != own.shape:
                length = min(saved.shape[1], own.shape[1])
                saved = torch.nn.functional.pad(saved[:, :length], (0, own.shape[1] - length))
            own.copy_(saved)  # which may be itself: distributed checkpoints are read into the state dict
        self._asked.clear()
        self.fresh.copy_((self.scale == 1) & ~self.history.any(1) if "scale" in found else torch.ones_like(self.fresh))
