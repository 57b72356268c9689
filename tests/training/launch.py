"""Runs a function in N joined processes and returns what each one returned."""

import os
import socket
import traceback

import torch.multiprocessing as mp


def _entry(rank, size, port, backend, function, arguments, queue):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    os.environ.pop("WANDB_SERVICE", None)
    import torch.distributed as dist

    try:
        dist.init_process_group(backend)  # one group for every run inside `function`
        queue.put((rank, function(*arguments), None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))


def run_ranks(size, function, *arguments, backend="gloo", timeout=240):
    """[function(*arguments) of rank 0, rank 1, ...]; the first traceback of any rank fails the test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_entry, args=(r, size, port, backend, function, arguments, queue)) for r in range(size)
    ]
    for process in processes:
        process.start()
    results = {}
    try:
        for _ in range(size):
            rank, value, error = queue.get(timeout=timeout)
            if error:
                raise AssertionError(f"rank {rank}:\n{error}")
            results[rank] = value
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    return [results[r] for r in range(size)]
