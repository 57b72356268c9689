"""One plan decides everything about a kernel launch.

A `Problem` states the static facts of a call, a `Target` the machine it is for. Every op registers its kernels; a kernel says
through `supports()` whether it can run a problem on a target, and through `buffers()` which scratch it needs. `plan()` picks one
kernel and records why every other one was rejected. The probe (`explain`) and the launch read the same `Plan`, so they cannot
disagree, and the caller allocates exactly what `Plan.buffers` says.

This file imports no framework and needs no GPU: planning for a machine that is not there is a supported use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from te_plugin import ffi

ARCHITECTURES = ("cpu", "sm90", "sm100", "gfx942", "gfx950")
FRAMEWORKS = ("torch", "jax")
FALLBACK_MODES = ("error", "warn", "allow")


class PlanError(ValueError):
    """No kernel can run what was asked. The message lists every kernel asked and its reason."""


class Problem(Protocol):
    """The static facts of a call: a frozen, hashable dataclass with the name of its op."""

    op: str


@dataclass(frozen=True)
class Target:
    """Where a kernel will run: device architecture, and the framework that calls it (None: any framework will do).

    local: the launch happens on this machine, so a kernel whose library is not built here is rejected. Planning for a machine
    that is not there leaves it False.
    """

    arch: str
    framework: str | None = None
    local: bool = False

    def __post_init__(self):
        if self.arch not in ARCHITECTURES:
            raise PlanError(f"unknown target {self.arch!r}; known targets: {', '.join(ARCHITECTURES)}")
        if self.framework is not None and self.framework not in FRAMEWORKS:
            raise PlanError(f"unknown framework {self.framework!r}; known frameworks: {', '.join(FRAMEWORKS)}")

    @property
    def is_gpu(self) -> bool:
        return self.arch != "cpu"


@dataclass(frozen=True)
class Supported:
    """The kernel can run the problem. `note` is what a reader of `explain` should know (for example: emulated)."""

    note: str = ""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class Unsupported:
    """The kernel cannot run the problem, for one stated reason."""

    reason: str

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True)
class BufferSpec:
    """Scratch memory that the chosen kernel needs. Layout is the kernel's decision; the caller only allocates.

    stage: "forward" or "backward". shape and strides are in elements; strides may hold 0 (broadcast in the kernel's own
    addressing, never in the allocation). zeroed: the caller must fill it with zeros before the launch.
    """

    name: str
    stage: str
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    zeroed: bool = False

    @property
    def nbytes(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count * DTYPE_BYTES[self.dtype]


DTYPE_BYTES = {"fp64": 8, "fp32": 4, "int64": 8, "int32": 4, "bf16": 2, "fp16": 2, "e4m3": 1, "e5m2": 1,
               "e4m3_fnuz": 1, "e5m2_fnuz": 1, "uint8": 1}


@dataclass(frozen=True)
class Kernel:
    """A kernel is data: where it lives, what it can run, what it needs.

    entry_points maps a stage ("forward", "backward", ...) to the function exported by the compiled library `library` ("cpu",
    "sm90"); for a kernel that exists in one framework only, `library` is None and the framework's layer knows the name.
    helpers: (library, function) pairs that a kernel calls beside its own code; without them it is not taken either.
    attributes(problem) are the static scalars passed after the tensors.
    own_scratch(problem): an upper bound, in bytes, of what the library behind a kernel asks for at its launch, beside `buffers`.
    composite: written in framework maths, last in the order, and a fallback on a GPU.
    measured: where several measured kernels of an op can run a problem on a GPU, a Tuner may say which is faster.
    """

    name: str
    op: str
    supports: Callable[[Any, Target], Supported | Unsupported]
    library: str | None = None
    entry_points: Mapping[str, str] = field(default_factory=dict)
    helpers: tuple[tuple[str, str], ...] = ()
    buffers: Callable[[Any], tuple[BufferSpec, ...]] = lambda problem: ()
    attributes: Callable[[Any], tuple[int | float, ...]] = lambda problem: ()
    own_scratch: Callable[[Any], int] = lambda problem: 0
    composite: bool = False
    measured: bool = False
    describe_layout: Callable[[Any], str] = lambda problem: ""


@dataclass(frozen=True)
class Choice:
    """A Tuner's answer. seconds: of every kernel it measured; None when it could not, and `reason` then says why.

    provisional: the answer holds for this call only, because a later one may be able to measure.
    """

    kernel: str
    seconds: Mapping[str, float] | None
    reason: str = ""
    provisional: bool = False


class Tuner(Protocol):
    """Chooses between kernels that can all run a problem, by measuring. A framework's layer provides it (set_tuner)."""

    def choose(self, problem: Problem, plans: tuple[Plan, ...]) -> Choice | None:
        """plans: one for every able kernel, in their order. None: not this tuner's business (another framework's target)."""
        ...


@dataclass(frozen=True)
class Plan:
    """The decision for one problem on one target: the kernel, its scratch, and why the others were not taken.

    provisional: nothing could be measured at this moment, so the plan is made again at the next call.
    """

    problem: Any
    target: Target
    kernel: Kernel
    buffers: tuple[BufferSpec, ...]
    attributes: tuple[int | float, ...]
    note: str
    rejected: tuple[tuple[str, str], ...]
    is_fallback: bool
    provisional: bool = False

    def buffers_of(self, stage: str) -> tuple[BufferSpec, ...]:
        return tuple(spec for spec in self.buffers if spec.stage == stage)

    @property
    def scratch_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.buffers) + self.kernel.own_scratch(self.problem)

    def explain(self) -> str:
        """A few lines for people: the choice, the scratch, every rejected kernel with its reason."""
        lines = [f"{self.problem.op}: {self.kernel.name} on {self.target.arch}" + (f" ({self.note})" if self.note else "")]
        if layout := self.kernel.describe_layout(self.problem):
            lines.append(f"  layout {layout}")
        for spec in self.buffers:
            lines.append(f"  scratch {spec.stage}/{spec.name} {list(spec.shape)} {spec.dtype} strides {spec.strides} "
                         f"{spec.nbytes} bytes{' zeroed' if spec.zeroed else ''}")
        if own := self.kernel.own_scratch(self.problem):
            lines.append(f"  scratch of its library, at most {own} bytes")
        lines += [f"  rejected {name}: {reason}" for name, reason in self.rejected]
        return "\n".join(lines)


_FALLBACK_REFUSED = "framework maths is a fallback on a GPU and fallback=error"
_registry: dict[str, list[Kernel]] = {}
_tuner: Tuner | None = None
_caches: list[Callable[[], None]] = []


def set_tuner(tuner: Tuner | None) -> Tuner | None:
    """Let kernel="auto" measure (None: take the first able kernel in the order). Returns the tuner before; a new one
    forgets all plans."""
    global _tuner
    before, _tuner = _tuner, tuner
    if before is not tuner:
        forget_plans()
    return before


def forget_plans() -> None:
    """Empty every cache made by `remember`: the kernels, or the way to choose between them, have changed."""
    for clear in _caches:
        clear()


class _OnlyNow(Exception):
    """Carries a provisional plan past a cache, which keeps results but no exceptions."""

    def __init__(self, plan: Plan):
        self.plan = plan


def remember(make: Callable[..., Plan]) -> Callable[..., Plan]:
    """functools.lru_cache for a function that makes plans: provisional ones are not kept, and forget_plans() empties it."""

    @functools.lru_cache(maxsize=4096)
    def kept(*arguments):
        made = make(*arguments)
        if made.provisional:
            raise _OnlyNow(made)
        return made

    @functools.wraps(make)
    def ask(*arguments):
        try:
            return kept(*arguments)
        except _OnlyNow as now:
            return now.plan

    _caches.append(kept.cache_clear)
    return ask


def remember_unmeasured(make: Callable[..., Any]) -> Callable[..., Any]:
    """remember for an op without measured kernels, whose plans are never provisional: the bare cache, with no call around it."""
    kept = functools.lru_cache(maxsize=4096)(make)
    _caches.append(kept.cache_clear)
    return kept


def register(kernel: Kernel) -> Kernel:
    """Add a kernel to its op, behind those registered before it; composite kernels stay last. Names are unique per op."""
    kernels = _registry.setdefault(kernel.op, [])
    if any(other.name == kernel.name for other in kernels):
        raise ValueError(f"kernel {kernel.name!r} of op {kernel.op!r} is registered already")
    kernels.append(kernel)
    kernels.sort(key=lambda k: k.composite)
    forget_plans()
    return kernel


def unregister(op: str, name: str) -> None:
    """Take a kernel out again (kernels that a test or a sabotaged run brought along)."""
    _registry[op] = [kernel for kernel in _registry.get(op, ()) if kernel.name != name]
    forget_plans()


def registered(op: str) -> tuple[Kernel, ...]:
    """Every kernel of an op, in the order in which `auto` asks them."""
    import te_plugin.ops  # noqa: F401  (registers the kernels)

    return tuple(_registry.get(op, ()))


def ops() -> tuple[str, ...]:
    import te_plugin.ops  # noqa: F401

    return tuple(op for op, kernels in _registry.items() if kernels)


def plan(problem: Problem, target: Target | str = "auto", kernel: str = "auto", fallback: str = "error") -> Plan:
    """Choose the kernel for a problem.

    target: a Target, an architecture name, or "auto" (this machine: sm90 when a Hopper GPU is visible, else cpu).
    kernel: "auto" asks every kernel in order, and where several `measured` ones can run it, the Tuner if there is one; a name
    asks that one alone, and its reason is the error.
    fallback: what a composite kernel on a GPU means: "error" refuses, "warn" warns once a problem, "allow" takes it.
    Raises PlanError when nothing can run it; the message lists what was asked and why not.
    """
    if fallback not in FALLBACK_MODES:
        raise PlanError(f"fallback={fallback!r} is not one of {', '.join(FALLBACK_MODES)}")
    if target == "auto":
        target = detect_target()
    elif isinstance(target, str):
        target = Target(target)
    return plan_cached(problem, target, kernel, fallback)


@remember
def plan_cached(problem, target: Target, kernel: str, fallback: str) -> Plan:
    candidates = registered(problem.op)
    if kernel != "auto":
        named = [k for k in candidates if k.name == kernel]
        if not named:
            raise PlanError(f"{problem.op}: no kernel is named {kernel!r}; known kernels: "
                            f"{', '.join(k.name for k in candidates) or 'none'}")
        verdict = _verdict(named[0], problem, target)
        if not verdict:
            raise PlanError(f"{problem.op}: kernel {kernel!r} cannot run this on {target.arch}: {verdict.reason}. "
                            f"Asked: {problem}. Use kernel=auto, or change what the reason names.")
        return _build(problem, target, named[0], verdict, rejected=())
    able, refused = [], {}
    for candidate in candidates:
        answer = _verdict(candidate, problem, target)
        if not answer:
            refused[candidate.name] = answer.reason
        elif candidate.composite and target.is_gpu and fallback == "error" and not able:
            refused[candidate.name] = _FALLBACK_REFUSED
        else:
            able.append((candidate, answer))
    if not able:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in refused.items()) or "\n  (no kernel is registered)"
        allow = ", or set fallback=allow to accept framework maths" if _FALLBACK_REFUSED in refused.values() else ""
        raise PlanError(f"{problem.op}: no kernel can run this on {target.arch}. Asked: {problem}. Kernels:{reasons}\n"
                        f"Change what a reason names{allow}.")
    (chosen, verdict), provisional, slower = able[0], False, {}
    rivals = [pair for pair in able if pair[0].measured] if chosen.measured and target.is_gpu else []
    if len(rivals) > 1:
        chosen, verdict, slower, provisional = _between(problem, target, rivals)
    reasons = {kernel.name: f"{chosen.name} comes first" for kernel, _ in able} | refused | slower
    rejected = tuple((kernel.name, reasons[kernel.name]) for kernel in candidates if kernel is not chosen)
    made = _build(problem, target, chosen, verdict, rejected, provisional)
    if made.is_fallback and fallback == "warn":
        import warnings

        warnings.warn(f"{problem.op}: falling back to {chosen.name} on {target.arch}", stacklevel=4)
    return made


def _between(problem, target: Target, rivals: list) -> tuple[Kernel, Supported, dict[str, str], bool]:
    """Of several able and measured kernels: the one to take, its verdict, why each other one is not taken, and whether this
    holds for one call only."""
    first, verdict = rivals[0]
    if not target.local or _tuner is None:
        names = " and ".join(kernel.name for kernel, _ in rivals)
        note = f"run.tune=true measures {names} on the GPU and takes the faster"
        return first, Supported(_joined(verdict.note, note)), {}, False
    plans = tuple(_build(problem, target, kernel, answer, ()) for kernel, answer in rivals)
    choice = _tuner.choose(problem, plans)
    if choice is None:
        return first, verdict, {}, False
    chosen, verdict = next(pair for pair in rivals if pair[0].name == choice.kernel)
    others = [kernel.name for kernel, _ in rivals if kernel is not chosen]
    if choice.seconds is None:
        reasons = {name: f"{chosen.name} comes first; not measured: {choice.reason}" for name in others}
        return chosen, Supported(_joined(verdict.note, f"not measured: {choice.reason}")), reasons, choice.provisional
    milliseconds = {name: f"{seconds * 1e3:.3f} ms" for name, seconds in choice.seconds.items()}
    reasons = {name: f"{name}: {milliseconds[name]}, {chosen.name} took {milliseconds[chosen.name]}" for name in others}
    for name in others:
        if choice.seconds[name] < choice.seconds[chosen.name]:
            reasons[name] += " and comes first, which so small a difference does not change"
    return chosen, Supported(_joined(verdict.note, f"measured: {milliseconds[chosen.name]}")), reasons, choice.provisional


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _verdict(kernel: Kernel, problem, target: Target) -> Supported | Unsupported:
    answer = kernel.supports(problem, target)
    if answer and target.local:
        own = [(kernel.library, name) for name in kernel.entry_points.values()] if kernel.library else []
        missing = [(library, name) for library, name in (*own, *kernel.helpers) if not ffi.exports(library, name)]
        if missing:
            library = missing[0][0]
            names = ", ".join(name for of, name in missing if of == library)
            return Unsupported(f"library {library!r} on this machine does not export {names}; "
                               f"build it (make {library})")
    return answer


def _build(problem, target, kernel, verdict, rejected, provisional: bool = False) -> Plan:
    return Plan(problem=problem, target=target, kernel=kernel, buffers=kernel.buffers(problem),
                attributes=kernel.attributes(problem), note=verdict.note, rejected=tuple(rejected),
                is_fallback=kernel.composite and target.is_gpu, provisional=provisional)


def detect_target() -> Target:
    """The architecture of this machine's first GPU if a framework that is already imported sees one, else cpu."""
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        arch = {9: "sm90", 10: "sm100"}.get(major)
        if arch is None:
            raise PlanError(f"the GPU has compute capability {major}.{minor}; supported: 9.0 (sm90), 10.0 (sm100)")
        return Target(arch, framework="torch", local=True)
    return Target("cpu", local=True)
