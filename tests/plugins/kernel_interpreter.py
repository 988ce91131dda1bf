"""Runs the kernels under Triton's interpreter in a process of its own.

Triton decides at import whether it interprets, so the tests keep one child process with TRITON_INTERPRET=1 and
send it calls: a JSON line each way, tensors in safetensors files. The child fills every buffer it allocates with
NaN or the largest integer, so an output or workspace element that a kernel fails to write shows up.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


class KernelInterpreter:
    """A child process that interprets kernels; closed by `close`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._calls = 0
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        )

    def run(
        self,
        op_type: str,
        tensors: Mapping[str, Tensor | None],
        attributes: Mapping[str, int | float],
        sm: int = 90,
        **options: int,
    ) -> dict[str, Tensor]:
        """Outputs of an op's kernels; what the child raised is raised here as RuntimeError.

        `options` are the constants of `child_options`, e.g. a smaller workspace.
        """
        self._calls += 1
        base = Path(self._folder.name) / str(self._calls)
        present = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
        save_file(present, f"{base}.in")
        request = {
            "op": op_type,
            "attributes": dict(attributes),
            "sm": sm,
            "base": str(base),
            "options": options,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return load_file(f"{base}.out")

    def close(self) -> None:
        """End the child."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._folder.cleanup()


def child_options(options: Mapping[str, int]) -> None:
    """Shrink limits that a released shape alone would reach, e.g. the indexer's workspace."""
    for name, value in options.items():
        if name == "indexer_workspace_bytes":
            from engram_trt.plugins.indexer import launch

            launch.WORKSPACE_BYTES = value
        else:
            raise ValueError(f"no option {name}")


def gather_shards(tensors: dict[str, Tensor], attributes: dict[str, int]) -> dict[str, Tensor]:
    """`EngramGather` from shards at addresses; the table is cut into shards of `shard_rows`."""
    from engram_trt.plugins.engram_gather.launch import plan_shards
    from engram_trt.plugins.kernels.launcher import execute

    ids, rows, scales = tensors["engram_ids"], tensors["engram_rows"], tensors["engram_scales"]
    shards = [[part.clone() for part in table.split(attributes["shard_rows"])] for table in (rows, scales)]
    output = torch.full((ids.numel(), rows.shape[1]), float("nan"))
    plan = plan_shards(ids.numel(), rows.shape[0], attributes["shard_rows"], rows.shape[1], "float32")
    named = {
        "engram_ids": ids,
        "row_addresses": torch.tensor([shard.data_ptr() for shard in shards[0]]),
        "scale_addresses": torch.tensor([shard.data_ptr() for shard in shards[1]]),
        "embeddings": output,
    }
    execute(plan, named, torch.device("cpu"), interpret=True)
    return {"embeddings": output}


def gather_sparse_table(tensors: dict[str, Tensor], attributes: dict[str, int]) -> dict[str, Tensor]:
    """`EngramGather` from a table of released size: address space in which only the rows asked for are memory."""
    from engram_trt.plugins.engram_gather.launch import plan_shards
    from engram_trt.plugins.kernels.launcher import execute

    ids, table_rows = tensors["engram_ids"], attributes["table_rows"]
    spaces: list[Tensor] = []
    for name in ("engram_rows", "engram_scales"):
        values = tensors[name]
        size = table_rows * values.shape[1]
        with tempfile.TemporaryFile() as file:
            file.truncate(size)  # a hole: it takes no space until written
            whole = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.int8)
        spaces.append(whole)  # mapped as long as it is referred to
        for row, value in zip(ids.tolist(), values, strict=True):
            whole[row * values.shape[1] : (row + 1) * values.shape[1]] = value
    output = torch.full((ids.numel(), tensors["engram_rows"].shape[1]), float("nan"))
    plan = plan_shards(ids.numel(), table_rows, table_rows, output.shape[1], "float32")
    named = {
        "engram_ids": ids,
        "row_addresses": torch.tensor([spaces[0].data_ptr()]),
        "scale_addresses": torch.tensor([spaces[1].data_ptr()]),
        "embeddings": output,
    }
    execute(plan, named, torch.device("cpu"), interpret=True)
    return {"embeddings": output}


SPECIAL_CALLS = {"EngramGather from shards": gather_shards, "EngramGather, sparse table": gather_sparse_table}
"""Calls that need device addresses, which the parent cannot know."""


def answer_call(request: dict[str, Any]) -> None:
    """Serve one call in the child."""
    from engram_trt.plugins.kernels.launcher import launch_interpreted

    # A file gives no alignment; the copies have the allocator's.
    loaded = load_file(f"{request['base']}.in")
    tensors: dict[str, Tensor | None] = {name: tensor.clone() for name, tensor in loaded.items()}
    child_options(request["options"])
    if request["op"] in SPECIAL_CALLS:
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        results = SPECIAL_CALLS[request["op"]](present, request["attributes"])
    else:
        results = launch_interpreted(request["op"], tensors, request["attributes"], sm=request["sm"])
    save_file({name: tensor.contiguous() for name, tensor in results.items()}, f"{request['base']}.out")


def main() -> None:
    """Serve calls from standard input until it closes."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for line in sys.stdin:
        try:
            answer_call(json.loads(line))
            answer: dict[str, str] = {}
        except Exception as error:  # noqa: BLE001 - handed to the parent, which raises it
            import traceback

            answer = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()[-3000:]}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
