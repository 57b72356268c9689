"""The machine code of the GEMM kernels, without a GPU: tensor-core instructions where they belong, no spills in the main loop.

Compiles the GEMM files to cubins (device code only) and reads the disassembly. The main loop is the smallest loop around the
tensor-core instructions of a kernel.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc" / "sm90"
FILES = ("gemm_dense", "gemm_dense_block", "gemm_grouped", "gemm_wgrad")
# Operands as in gemm.cuh: the number in the mangled name, the instruction expected, and its count for a 64-row wave.
INSTRUCTION = {
    0: "QGMMA.64x128x32.F32.E4M3.E4M3",
    1: "QGMMA.64x128x32.F32.E5M2.E4M3",
    2: "HGMMA.64x128x16.F32.BF16",
    3: "HGMMA.64x128x16.F32.BF16",
    4: "HGMMA.64x128x16.F32.BF16",
}
KERNEL = re.compile(r"gemm_kernelILNS_8OperandsE(\d)ELNS_4ModeE(\d)ELNS_7ScalingE(\d)ELi(\d)E")


def tool(name: str) -> str | None:
    if found := shutil.which(name):
        return found
    try:
        import triton
    except ImportError:
        return None
    beside = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return str(beside) if beside.is_file() else None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed"),
    pytest.mark.skipif(
        tool("cuobjdump") is None, reason="cuobjdump is not installed (CUDA toolkit, or the triton package)"
    ),
]


def compile_and_disassemble(name: str, folder: Path) -> str:
    cubin = folder / f"{name}.cubin"
    compiled = subprocess.run(
        [
            "nvcc",
            "-cubin",
            "-O3",
            "-std=c++17",
            "-gencode=arch=compute_90a,code=sm_90a",
            str(SOURCES / f"{name}.cu"),
            "-o",
            str(cubin),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    # ptxas says so when it makes asynchronous products wait for each other; the kernel is then correct and half as fast.
    assert "are serialized" not in compiled.stderr, compiled.stderr
    return subprocess.run([tool("cuobjdump"), "-sass", str(cubin)], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> dict[tuple[int, ...], list[tuple[int, str]]]:
    """(operands, mode, scaling, waves) -> [(address, instruction)]."""
    folder = tmp_path_factory.mktemp("sass")
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda name: compile_and_disassemble(name, folder), FILES))
    found, current = {}, None
    for line in "\n".join(texts).splitlines():
        if "Function :" in line:
            match = KERNEL.search(line)
            current = found.setdefault(tuple(int(g) for g in match.groups()), []) if match else None
        elif current is not None and (match := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", line)):
            current.append((int(match[1], 16), match[2]))
    return found


def opcode(text: str) -> str:
    words = text.split()
    return words[1] if words[0].startswith("@") else words[0]


def main_loop(code: list[tuple[int, str]]) -> list[str]:
    products = [address for address, text in code if "GMMA" in opcode(text)]
    loops = []
    for address, text in code:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if target and (start := int(target[1], 16)) < address and any(start <= p <= address for p in products):
            loops.append((address - start, start, address))
    _, start, end = min(loops)
    return [text for address, text in code if start <= address <= end]


def test_every_kernel_of_the_list_exists(kernels):
    assert len(kernels) == 28 and all(waves in (1, 2) for *_, waves in kernels)


def test_tensor_core_instructions(kernels):
    for (operands, _, _, waves), code in kernels.items():
        products = [text for _, text in code if "GMMA" in opcode(text)]
        assert (
            len(products) % (4 * waves) == 0
            and products
            and all(opcode(text).startswith(INSTRUCTION[operands]) for text in products)
        )
        assert not any(opcode(text).startswith("HMMA") for _, text in code)
        loop = main_loop(code)
        wide = [text for text in loop if opcode(text).startswith(("MEMBAR.ALL.GPU", "MEMBAR.ALL.SYS", "CCTL.IVALL"))]
        assert not wide, "a fence of the whole GPU in every stage"


def test_main_loops_stay_in_registers(kernels):
    for key, code in kernels.items():
        spills = [text for text in main_loop(code) if re.match(r"(LDL|STL)", opcode(text))]
        assert not spills, f"kernel {key}: {spills[:3]}"


def test_loads_go_through_the_copy_engine_and_multicast(kernels):
    for key, code in kernels.items():
        loads = [opcode(text) for _, text in code if opcode(text).startswith("UTMALDG.")]
        assert any("MULTICAST" in load for load in loads) and any("MULTICAST" not in load for load in loads), key


def test_registers_move_to_the_computing_warps(kernels):
    for code in kernels.values():
        text = "\n".join(text for _, text in code)
        assert "USETMAXREG.TRY_ALLOC" in text and "USETMAXREG.DEALLOC" in text
