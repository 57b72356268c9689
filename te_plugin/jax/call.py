"""The one call path from JAX to a compiled kernel: it obeys a plan and decides nothing.

An exported function becomes an XLA FFI target once, under a name that says library, function and number of scalars. Scratch of
`plan.buffers` is passed as extra outputs that nobody reads, so XLA allocates it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from te_plugin import ffi
from te_plugin.jax import launches
from te_plugin.jax.sharding import vary_over, varying_axes
from te_plugin.plan import Plan, PlanError, Target

DTYPE_NAME = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
JAX_DTYPE = {
    "fp64": jnp.float64,
    "fp32": jnp.float32,
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
    "int32": jnp.int32,
    "int64": jnp.int64,
    "uint8": jnp.uint8,
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "e4m3_fnuz": jnp.float8_e4m3fnuz,
    "e5m2_fnuz": jnp.float8_e5m2fnuz,
}


@jax.custom_jvp
def first_derivative_only(x):
    """x. Put around what a derivative rule quantises: its derivative is asked for where the rule itself is differentiated, and
    quantisation would pass as a constant there, so a second derivative would be 0 without a word.
    """
    return x


@first_derivative_only.defjvp
def _no_second_derivative(primals, tangents):
    raise NotImplementedError(
        "second derivatives were asked for, and there are none through FP8 products; compute in precision='bf16' where they are "
        "needed"
    )


def dtype_name(x) -> str:
    name = DTYPE_NAME.get(jnp.dtype(x.dtype).name)
    if name is None:
        raise ValueError(f"dtype {x.dtype} is not one of {', '.join(DTYPE_NAME)}")
    return name


@functools.cache
def target_of_backend(platform: str | None = None) -> Target:
    """The target of JAX's default backend, or of a named platform."""
    platform = jax.default_backend() if platform is None else platform
    if platform == "cpu":
        return Target("cpu", "jax", local=True)
    if platform in ("gpu", "cuda"):
        capability = jax.devices(platform)[0].compute_capability
        arch = {"9.0": "sm90", "10.0": "sm100"}.get(str(capability))
        if arch is None:
            raise PlanError(f"the GPU has compute capability {capability}; supported: 9.0 (sm90), 10.0 (sm100)")
        return Target(arch, "jax", local=True)
    raise PlanError(f"JAX runs on {platform}; kernels exist for cpu and gpu")


@functools.cache
def _register(library: str, function: str, scalars: int) -> str:
    import jax_tvm_ffi

    name = f"te_plugin.{library}.{function}.{scalars}"
    spec = ["args", "rets", *(f"attrs.s{i:02d}" for i in range(scalars))]
    if library == "cpu":
        jax_tvm_ffi.register_ffi_target(name, ffi.function(library, function), arg_spec=spec, platform="cpu")
    else:
        jax_tvm_ffi.register_ffi_target(
            name, ffi.function(library, function), arg_spec=spec, platform="gpu", allow_cuda_graph=True
        )
    return name


def shape_of(shape, dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), JAX_DTYPE[dtype])


def call_function(
    library: str, function: str, outputs: list[jax.ShapeDtypeStruct], inputs: list, scalars: tuple = ()
) -> list:
    """Call an exported function: inputs, then outputs, then scalars. Under vmap it runs once per element."""
    name = _register(library, function, len(scalars))
    attributes = {f"s{i:02d}": np.float64(s) if isinstance(s, float) else np.int64(s) for i, s in enumerate(scalars)}
    results = jax.ffi.ffi_call(name, outputs, vmap_method="sequential")(*inputs, **attributes)
    # To JAX a foreign result is the same on every device; it varies over the axes that an input varies over.
    axes = varying_axes(*inputs)
    return [vary_over(axes, result) for result in results] if axes else results


def launch(plan: Plan, stage: str, outputs: list[jax.ShapeDtypeStruct], inputs: list, scalars: tuple = ()) -> list:
    """Run one entry point of the planned kernel; returns the outputs, scratch left out."""
    scratch = plan.buffers_of(stage)
    if any(spec.zeroed for spec in scratch):
        raise PlanError(
            f"{plan.problem.op}: kernel {plan.kernel.name} wants zeroed scratch, which an XLA output is not; "
            f"let the kernel clear it"
        )
    everything = [*outputs, *(shape_of(spec.shape, spec.dtype) for spec in scratch)]
    kernel = plan.kernel
    launches.record(plan, stage)
    return call_function(kernel.library, kernel.entry_points[stage], everything, inputs, scalars)[: len(outputs)]
