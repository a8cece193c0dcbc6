"""What do several processes cost? Two over one, bytes per step against the least, and memory of a sharded run.

    python bench/distributed.py                  # gloo, this machine's CPU: 1, 2 and 4 processes
    python bench/distributed.py --device cuda    # one NCCL process on one GPU, against no group at all

A run of one process without a group is the yardstick. Times are the best of several rounds of steps; where more
processes run than there are free cores, those of the processor say what a process has to do. Bytes are those
that a process sends where collectives are rings: (R - 1) / R of what is reduced, and of what is gathered. The least is
one vector of the parameters' size in float32, all-reduced: 8 (R - 1) / R bytes for each parameter. Memory is the
largest set of tensors that a process holds between steps, by the state that it keeps, against the arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH, DEPTH, INPUTS, EXAMPLES, BATCH = 512, 4, 256, 16384, 2048


def model() -> nn.Module:
    """A network whose computing dominates: a million parameters, and two thousand examples a step."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(INPUTS, WIDTH), nn.Tanh()]
    for _ in range(DEPTH - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def held(training: Any) -> int:
    """Bytes of the state between steps: rows of the parameters, gradient, memory, optimizer, average, noise."""
    state = training.state
    tensors = [*state.parameters.values(), state.gradient]
    found = [state.learner.memory, state.learner.average, state.probe, state.optimizer.state_dict()["state"]]
    while found:
        part = found.pop()
        if isinstance(part, torch.Tensor):
            tensors.append(part)
        elif isinstance(part, dict):
            found += part.values()
    unique = {(t.untyped_storage().data_ptr(), t.storage_offset()): t for t in tensors}
    return sum(t.numel() * t.element_size() for t in unique.values())


def work(kind: str, method: str, steps: int, rounds: int, device: str, noise: str) -> None:
    """One process: prints its measurements as JSON."""
    import vestige
    from vestige.processes.distributed_setup import processes

    grouped = kind != "alone"
    if grouped:
        backend = "nccl" if device == "cuda" else "gloo"
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.distributed.init_process_group(backend)
    torch.set_num_threads(1)
    made = model().to(device)
    if kind == "sharded":
        from torch.distributed.fsdp import fully_shard

        for layer in made:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(made)
    random = torch.Generator().manual_seed(1)
    data = torch.randn(EXAMPLES, INPUTS, generator=random), torch.randint(10, (EXAMPLES,), generator=random)
    training = vestige.train(
        made, nn.functional.cross_entropy, data, method=method, noise_multiplier=1.0, delta=1e-6, lr=0.01,
        sample_rate=BATCH / EXAMPLES, steps=steps * rounds + 8, noise=noise,
    )  # fmt: skip
    records, times, processor = iter(training), [], []
    for _ in range(8):  # FO-DP-SGD's window is full
        next(records)
    group = processes(device)
    sent = getattr(group, "sent", 0)
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        begin, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            next(records)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / steps)
        processor.append((time.process_time() - busy) / steps)
    parameters = training.layout.size
    found = {
        "kind": kind,
        "method": method,
        "noise": noise,
        "processes": group.size,
        "parameters": parameters,
        "milliseconds": 1000 * min(times),
        "processor milliseconds": 1000 * min(processor),
        "sent per step and parameter": (getattr(group, "sent", 0) - sent) / (steps * rounds * parameters),
        "state in copies of the parameters": held(training) / (4 * parameters),
        "largest resident MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if device == "cuda":
        found["largest on the GPU MiB"] = torch.cuda.max_memory_allocated() / 2**20
    every: list[Any] = [found]
    if grouped:
        every = [None] * group.size
        torch.distributed.all_gather_object(every, found)
    if group.rank == 0:
        fullest = max(each["state in copies of the parameters"] for each in every)
        print(json.dumps({**found, "state in copies of the parameters": fullest}))
    if grouped:
        torch.distributed.destroy_process_group()


def launched(kind: str, size: int, arguments: argparse.Namespace, noise: str) -> dict[str, Any]:
    """The measurements of so many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, __file__, "--kind", kind, "--method", arguments.method, "--noise", noise]
    command += ["--steps", str(arguments.steps), "--rounds", str(arguments.rounds), "--device", arguments.device]
    started = []
    for rank in range(size):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        if kind != "alone":
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=900)[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{kind} with {size} processes failed")
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


def expected_state(kind: str, size: int, method: str) -> float:
    """Copies of the parameters between steps: the parameters, the gradient and what the method keeps."""
    import vestige

    copies = vestige.make_method(method).copies(BATCH / EXAMPLES, 100) or 0.0
    return (2.0 + copies) / (size if kind == "sharded" else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["alone", "replicated", "sharded"], help="measure one process (internal)")
    parser.add_argument("--method", default="fo-dp-sgd")
    parser.add_argument("--noise", default="lattice")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="also write the rows to this file, as JSON")
    arguments = parser.parse_args()
    if arguments.kind:
        work(arguments.kind, arguments.method, arguments.steps, arguments.rounds, arguments.device, arguments.noise)
        return
    sizes = (1,) if arguments.device == "cuda" else (1, 2, 4)
    cases = [("alone", 1, "lattice")]
    cases += [(kind, size, "lattice") for kind in ("replicated", "sharded") for size in sizes]
    cases += [("replicated", size, "float32") for size in sizes if size > 1]
    rows = []
    print(f"{arguments.method}: {EXAMPLES} examples, {BATCH} a step\n")
    print("| run | processes | noise | ms a step | over one | CPU ms a process | over one ", end="")
    print("| bytes sent a parameter (least) | state, copies (arithmetic) |")
    print("|---|---|---|---|---|---|---|---|---|")
    for kind, size, noise in cases:
        found = launched(kind, size, arguments, noise)
        rows.append(found)
        least = 8 * (size - 1) / size
        ratio = found["milliseconds"] / rows[0]["milliseconds"]
        busy = found["processor milliseconds"]
        print(
            f"| {kind} | {size} | {noise} | {found['milliseconds']:.1f} | {ratio:.2f} | {busy:.1f} | "
            f"{busy / rows[0]['processor milliseconds']:.2f} | "
            f"{found['sent per step and parameter']:.2f} ({least:.2f}) | "
            f"{found['state in copies of the parameters']:.2f} ({expected_state(kind, size, arguments.method):.2f}) |",
            flush=True,
        )
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
