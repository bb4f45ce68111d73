"""The decoder for other families on a GPU: transformers' own forward over a static cache, recorded as a CUDA graph.

Recording is checked before it is trusted: two recorded steps must give what two steps give that are not (a model that
takes its position from the host would repeat itself). A model that fails, and prompts of different lengths, go to the
eager decoder, with the reason.
"""

import inspect
from collections.abc import Callable

import torch

from lowq_cli.engine.graph import Captured, bucket, capture, keep
from lowq_cli.engine.hf_eager import HfEagerDecoder, piece
from lowq_cli.engine.sampling import Sampler, Sampling
from lowq_cli.engine.stream import nothing
from lowq_cli.models import CausalModel
from lowq_kernels.decode import ops
from lowq_kernels.decode.kv import PLAIN

CHECKED_STEPS = 2
AGREE = 2e-2  # relative difference of 16-bit logits between a recorded and a plain step; a stuck position gives about 1


class HfGraphDecoder:
    """transformers' forward with a static cache, one CUDA graph per text.

    Args:
        model: a causal transformers model.
        reason: why the native decoder was not taken.
        graphs: record the step; without, every step is launched from Python.
    """

    name = "hf_graph"
    kv = PLAIN

    def __init__(self, model: CausalModel, reason: str = "", graphs: bool = True) -> None:
        self.model, self.why, self.reason, self.device = model, reason, reason, model.device
        self.ahead = self.device.type == "cuda"
        self.graphs = graphs and self.ahead
        self.ops = ops(self.device.type)
        self.accepts = set(inspect.signature(model.forward).parameters)
        self.eager: HfEagerDecoder | None = None
        self.failed = ""

    @torch.inference_mode()
    def start(
        self, prompts: list[list[int]], sampling: Sampling, room: int, between: Callable[[], None] = nothing
    ) -> torch.Tensor:
        """Read the prompts; the first new token of each, (B,) int64 on the device."""
        fallback = self._cannot(prompts)
        if not fallback:
            try:
                return self._start(prompts, sampling, room, between)
            except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as e:
                if isinstance(e, torch.OutOfMemoryError):
                    raise
                fallback = f"its step cannot be recorded: {str(e).splitlines()[0] if str(e) else type(e).__name__}"
                self.failed = fallback
        self.eager = HfEagerDecoder(self.model, f"{self.why}; {fallback}" if self.why else fallback)
        self.name, self.reason = self.eager.name, self.eager.reason
        first = self.eager.start(prompts, sampling, room, between)
        self.sampler = self.eager.sampler
        return first

    def _cannot(self, prompts: list[list[int]]) -> str:
        if self.failed:
            return self.failed
        if "past_key_values" not in self.accepts:
            return "its cache is not one of keys and values"
        return "prompts of different lengths" if len({len(p) for p in prompts}) > 1 else ""

    def _start(self, prompts: list[list[int]], sampling: Sampling, room: int, between: Callable[[], None]) -> torch.Tensor:
        from lowq_cli.hf.cache import static_cache

        ids = torch.tensor(prompts)
        B, T = ids.shape
        self.eager, self.name, self.reason = None, "hf_graph", self.why
        self.cache = static_cache(self.model, bucket(T + room))
        step, there, position = piece(self.model, B), ids.to(self.device), torch.arange(T, device=self.device).expand(B, T)
        for i in range(0, T, step):
            between()
            logits = self._forward(there[:, i : i + step], position[:, i : i + step])
        self.logits = logits.clone()
        self.sampler = Sampler(self.ops.choose, B, logits.shape[1], self.device)
        self.token, self.pos = self.sampler.token, self.sampler.pos
        self.sampler.start(sampling, ids, torch.ones_like(ids, dtype=torch.bool))
        self.sampler.choose(logits, advance=0)
        self.run = self._record() if self.graphs and room > CHECKED_STEPS else None
        return self.token

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        """The next token of each sequence, (B,) int64 on the device."""
        if self.eager is not None:
            return self.eager.step()
        if self.run is None:
            self._step()
        else:
            self.run.replay()
        return self.token

    def _forward(self, ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids": ids, "past_key_values": self.cache, "use_cache": True}
        if "position_ids" in self.accepts:
            inputs["position_ids"] = position
        if "logits_to_keep" in self.accepts:
            inputs["logits_to_keep"] = 1
        return self.model(**inputs).logits[:, -1]

    def _step(self) -> None:
        self.logits.copy_(self._forward(self.token[:, None], self.pos[:, None].long()))
        self.sampler.choose(self.logits, advance=1)

    def _record(self) -> Captured:
        """The step as a graph that was seen to follow the text. Raises RuntimeError where it does not."""
        from lowq_cli.hf.cache import state_of

        back = keep([self.logits, *self.sampler.state, *state_of(self.cache)])
        for _ in range(CHECKED_STEPS):
            self._step()
        wanted = self.logits.float().clone()
        back()
        run = capture(self._step)
        back()
        for _ in range(CHECKED_STEPS):
            run.replay()
        off = ((self.logits.float() - wanted).norm() / wanted.norm()).item()
        back()
        if not off <= AGREE:
            raise RuntimeError(f"recorded, it differs from its own forward by {off:.1e}")
        return run
