"""JAX's call path to the sm90 GEMM without a GPU: planned for sm90, argument checks of csrc/sm90/gemm.cu, products by XLA."""

import jax
import jax.numpy as jnp

from te_plugin.jax import gemm
from te_plugin.jax.quantize import dequantize
from te_plugin.ops.gemm.kernels import SCALE_KIND
from te_plugin.plan import Target

calls: list = []


def run(chosen, a, scale_a, b, scale_b):
    problem = chosen.problem
    calls.append(problem)
    (m, k), (n, _) = a.shape, b.shape
    up = lambda size: -(-size // 128)  # noqa: E731
    shapes = {"tensor": lambda r: (1,), "row": lambda r: (r,), "block_1x128": lambda r: (r, up(k)),
              "block_128x128": lambda r: (up(r), up(k))}  # fmt: skip
    assert (problem.m, problem.n, problem.k) == (m, n, k) and b.shape == (n, k) and k % 16 == 0
    assert scale_a.shape == shapes[problem.scale_a](m) and scale_b.shape == shapes[problem.scale_b](n)
    assert a.dtype == {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}[problem.dtype_a] and b.dtype == jnp.float8_e4m3fn
    assert chosen.kernel.name == "sm90" and chosen.attributes[2:] == (SCALE_KIND[problem.scale_a, problem.scale_b], 0)
    left, right = dequantize(a, scale_a, problem.scale_a), dequantize(b, scale_b, problem.scale_b)
    dtype = {"bf16": jnp.bfloat16, "fp32": jnp.float32}[problem.out_dtype]
    return jax.lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32).astype(dtype)


def install() -> None:
    gemm.target_of_backend = lambda: Target("sm90", "jax")
    gemm._run = run
