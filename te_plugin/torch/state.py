"""What an FP8 linear layer remembers between calls: the quantised weight of this step, and where delayed scaling stands."""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from te_plugin import numerics
from te_plugin.ops.checks import check_flags
from te_plugin.ops.linear_checks import check_pow2
from te_plugin.torch.call import is_direct, target_of, version_of
from te_plugin.torch.delayed_scaling import DelayedScaling
from te_plugin.torch.options import options as options_of
from te_plugin.torch.quantize import QuantizedTensor, QuantizeOptions, quantize_operand


class LinearState(nn.Module):
    """Per-layer state of one FP8 linear: the weight cache and, with delayed scaling, its histories.

    The cache holds the quantised weight until the weight changes. A change is seen by the tensor and its storage, its version
    counter, the steps of torch optimizers (FSDP2 gathers the new weight into the same tensor, past the counter) and the turns
    between train() and eval() (averaged weights are swapped in through .data); who else writes behind the counter calls
    `new_step()`.
    """

    def __init__(self, precision: str, *, weight_cache: bool = True, keep_transpose: bool = True, pow2_scale: bool = False,
                 history_len: int = 1024, amax_compute: str = "max", device=None):
        super().__init__()
        kind = numerics.scaling(precision)
        if kind is None:
            raise ValueError(f"precision {precision!r} needs no FP8 state")
        check_flags(weight_cache=weight_cache, keep_transpose=keep_transpose, pow2_scale=pow2_scale)
        check_pow2(precision, pow2_scale)
        if not kind.delayed and (history_len, amax_compute) != (1024, "max"):
            raise ValueError(f"history_len={history_len}, amax_compute={amax_compute!r}: precision {precision} has no amax "
                             f"history; leave them out, or use fp8_delayed")
        self.precision, self.kind = precision, kind
        self.weight_cache, self.keep_transpose, self.pow2_scale = weight_cache, keep_transpose, pow2_scale
        self.delayed = DelayedScaling(kind, history_len, amax_compute, device) if kind.delayed else None
        self._cached: QuantizedTensor | None = None
        self._cached_for: _Mark | None = None
        self._cached_is_noted = False
        # The weight that the step of delayed scaling began with; (): that step is over; None: none has begun.
        self._advanced_for: _Mark | tuple | None = None
        self._explicit_steps = False
        # Whether a training forward ran in this step, and whether there was none between two changes of the weight before it.
        self._trained = self._only_evaluated = False
        # As far as the host knows: a traced graph calibrates on the device alone (`fresh`), and `advance` asks there.
        self._uncalibrated = set(DelayedScaling.OPERANDS) if kind.delayed else set()
        # Whether the last training forward needed the transposed weight; None before the first one.
        self.keeps_transpose: bool | None = None
        self.weight_casts = 0
        self.last_stats: dict[str, torch.Tensor] = {}

    def extra_repr(self) -> str:
        return f"{self.precision}, weight_cache={self.weight_cache}, keep_transpose={self.keep_transpose}"

    def __getstate__(self) -> dict:
        """A copy of the layer has a weight of its own, so what is known of this one's stays here."""
        ended = None if self._advanced_for is None else ()
        return {**self.__dict__, "_cached": None, "_cached_for": None, "_advanced_for": ended, "_explicit_steps": False,
                "_trained": False}

    def train(self, mode: bool = True):
        if mode != self.training:
            self.drop_weight()
        return super().train(mode)

    def new_step(self) -> None:
        """The weight may have changed: quantise it again at its next use, and end the step of delayed scaling there."""
        self.drop_weight()
        if self._advanced_for is not None:
            self._advanced_for = ()

    def advance(self, group=None) -> None:
        """End an optimizer step (delayed scaling moves on, cached weights are dropped). Used once, it is expected every step."""
        self._explicit_steps = True
        self.new_step()
        if self.delayed is not None:
            for operand in tuple(self._uncalibrated):
                self._settle(operand)  # a graph is then traced anew without the calibration, and with the fused casts
            self.delayed.advance(group)

    def begin(self, weight: torch.Tensor) -> None:
        """Called at the start of each forward: a changed weight ends the step, unless steps are ended by `advance`.

        Without gradients too: the forward that activation recompute repeats must see the scales that the repetition sees.
        """
        if self.delayed is None or torch.compiler.is_compiling():
            return
        if self.delayed.scale.device != weight.device:  # a weight that was loaded elsewhere
            target_of(weight.device)  # PlanError for "meta", where no kernel runs
            self.delayed.to(weight.device)
        if self._explicit_steps:
            return
        begun = self._advanced_for
        if isinstance(begun, _Mark) and begun.is_step_of(weight):
            return
        if begun is not None:
            self.delayed.advance()
        if isinstance(begun, _Mark):
            self._only_evaluated, self._trained = not self._trained, False
        self._advanced_for = _Mark(weight)

    def needs_values(self, operand: str) -> bool:
        """Whether the next quantisation of an operand must see its values first (a history that has not begun)."""
        if operand in self._uncalibrated and not torch.compiler.is_compiling() and self.delayed.is_asked(operand):
            self._settle(operand)
        return operand in self._uncalibrated

    def _settle(self, operand: str) -> None:
        """Calibrate an operand no more, once its history is known to have begun."""
        if not self.delayed.is_fresh(operand):
            self._uncalibrated.discard(operand)

    def cast_of(self, operand: str, transpose: bool) -> tuple[QuantizeOptions, torch.Tensor | None]:
        """How an operand is quantised now, for a kernel that also makes it: options, and the given scale (fp8_delayed)."""
        if self.delayed is not None:
            return self.delayed.cast_of(operand, transpose)
        return operand_options(self.kind, operand, self.pow2_scale, transpose), None

    def records(self, grad_enabled: bool, needed: bool) -> bool:
        """Whether the amaxes of a forward count. needed: some gradient of the layer is.

        Those of training do, also in a frozen layer behind frozen ones, which needs no gradient. Of evaluations only those of a
        layer whose weight changes though it never trains (an average of another's weights): no other forward moves its scales.
        """
        trains = needed or (grad_enabled and self.training)
        # Once a step: a module's attributes cost microseconds to set.
        if trains and not torch.compiler.is_compiling() and (self._only_evaluated or not self._trained):
            self._trained, self._only_evaluated = True, False
        return trains or self._only_evaluated

    def note(self, operand: str, made: QuantizedTensor, record: bool) -> None:
        """Keep the statistics of an operand that such a kernel made."""
        if record and self.delayed is not None:
            self.delayed.record(operand, made.stats[0])
        if record and not torch.compiler.is_compiling():
            self.last_stats[operand] = made.stats

    def quantize(self, x: torch.Tensor, operand: str, transpose: bool, record: bool,
                 used: torch.Tensor | None = None) -> QuantizedTensor:
        """Quantise one operand (activation, weight or gradient) as this layer's scaling says: x[R,C], or experts' weights
        [E,N,K]. used: as in quantize_2d."""
        if operand in self._uncalibrated:
            # A history starts from what is there. Scale 1 would flush the gradients of the first step to zero (a mean over
            # tokens makes them far smaller than E5M2's smallest value), and after a plain checkpoint was loaded the scale
            # of the random weights would clip the loaded ones.
            self.delayed.calibrate(x, operand)
            if is_direct(x):
                self._settle(operand)
        options, scale = self.cast_of(operand, transpose)
        made = quantize_operand(x, options, scale, used)
        self.note(operand, made, record)
        return made

    def quantized_weight(self, weight: torch.Tensor, transpose: bool, record: bool) -> QuantizedTensor:
        """The weight in FP8, quantised once a step. transpose: its transposed copy is needed (and kept) too."""
        if not self.weight_cache or torch.compiler.is_compiling():
            self._count()
            return self.quantize(weight.detach(), "weight", transpose, record)
        if record:
            self.keeps_transpose = transpose
        if self._lacks(weight, transpose):
            # A training forward without gradients is one that recompute repeats with them: cast once for both.
            both = transpose or (self.training and bool(self.keeps_transpose))
            with _outside_inference_mode(weight):
                made = self.quantize(weight.detach(), "weight", both, record)
            self.keep_weight(weight, made, record)
        elif record and not self._cached_is_noted:  # an evaluation made it, or refresh_weights
            self.note("weight", self._cached, True)
            self._cached_is_noted = True
        return self._cached

    def is_stale(self, weight: torch.Tensor) -> bool:
        """Whether the next training forward would quantise the weight, as far as the last one tells."""
        return self._lacks(weight, bool(self.keeps_transpose))

    def _lacks(self, weight: torch.Tensor, transpose: bool) -> bool:
        cached = self._cached
        return cached is None or not self._cached_for.is_of(weight) or (transpose and cached.data_t is None)

    def keep_weight(self, weight: torch.Tensor, made: QuantizedTensor, noted: bool = False) -> None:
        """Cache a weight that was just quantised. noted: its amax is in the history already; else its first use puts it there."""
        self._count()
        self._cached, self._cached_for, self._cached_is_noted = made, _Mark(weight), noted

    def drop_weight(self) -> None:
        """Forget the quantised weight."""
        self._cached = self._cached_for = None

    def _count(self) -> None:
        if not torch.compiler.is_compiling():
            self.weight_casts += 1

    def _load_from_state_dict(self, state_dict, prefix, *args):
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.new_step()
        if self.delayed is not None:
            # A step that was saved before it was ended is ended now; without saved scales none has begun.
            self._advanced_for = () if prefix + "delayed.scale" in state_dict else None
            self._uncalibrated = set(DelayedScaling.OPERANDS)  # until `fresh`, which is loaded next, says otherwise


def _outside_inference_mode(weight: torch.Tensor):
    """For a copy of a weight that outlives the call: training saves it for its backward, and refuses inference tensors."""
    if torch.is_inference_mode_enabled() and not weight.is_inference():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


def operand_options(kind: numerics.Scaling, operand: str, pow2: bool, transpose: bool) -> QuantizeOptions:
    """How a scaling quantises one operand of a linear layer."""
    return options_of(QuantizeOptions, kind.format(operand).name, getattr(kind, operand), pow2, transpose)


_optimizer_steps = 0


def _count_step(*_) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


def _changes(weight: torch.Tensor) -> tuple[int, int]:
    return version_of(weight), _optimizer_steps


class _Mark:
    """Which weight something was made of, and in which state. Tensor and storage are held weakly: an id or an address alone is
    given to the next tensor once the first is gone.
    """

    def __init__(self, weight: torch.Tensor):
        self.tensor, self.storage = weakref.ref(weight), StorageWeakRef(weight.untyped_storage())
        self.address, self.changes = weight.data_ptr(), _changes(weight)

    def is_step_of(self, weight: torch.Tensor) -> bool:
        """Wherever its values lie: FSDP2 gathers a weight to another place for each microbatch."""
        return self.tensor() is weight and self.changes == _changes(weight)

    def is_of(self, weight: torch.Tensor) -> bool:
        return (self.is_step_of(weight) and self.address == weight.data_ptr()
                and self.storage.cdata == weight.untyped_storage()._cdata)


def states(model: nn.Module):
    """Every LinearState of a model, with its name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LinearState)]


def advance_scaling(model: nn.Module, group=None) -> None:
    """End an optimizer step for every FP8 layer of a model: drop cached weights, move delayed scaling on.

    group: process group over which amaxes are reduced; all its ranks must call this together.
    """
    for _, state in states(model):
        state.advance(group)
