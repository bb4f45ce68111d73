"""Tensors around a model's layers that end-to-end training changes, too: the embedding, the head and the norm before it.

They stay in 16 bits, so their new values take no more room, or are an embedding that is rounded to 8 bits afterwards. The
embedding's row of a token makes up for errors that the first layers make with this token, and the head reads hidden states that
hold the errors of all layers.
"""

import torch

from lowq_cli.calibrate.cuda_graph import adam
from lowq_cli.calibrate.learn import stored
from lowq_cli.hf.layers import DecoderLayers, Hidden


class Outside:
    """The trained tensors, in fp32. Reading the model with images, which fill rows of its first input, trains none of them.

    Args:
        kept: name in the source -> dtype of the tensors that may be trained. rate: Adam's learning rate of the embedding and
            the head, as a share of their root mean square; norm_rate: that of the norm. A rate of 0 trains none.
    """

    def __init__(self, blocks: DecoderLayers, kept: dict[str, torch.dtype], rate: float, norm_rate: float) -> None:
        self.blocks, self.kept = blocks, kept
        found = {} if blocks.pictures or not rate else blocks.around()
        self.names = {path: name for path, name in found.items() if name in kept}
        self.values: dict[str, torch.Tensor] = {}  # the model's parameter -> what is trained
        self.used: dict[str, torch.Tensor] = {}  # the same, rounded as the checkpoint will hold it, with a step's gradients
        self.embedding = blocks.embedding_path()
        groups = []
        for path, name in self.names.items():
            t = blocks.source.read(name).reshape(blocks.source.headers[name].shape).to(blocks.device, torch.float32)
            self.values[path] = t.requires_grad_()
            groups.append({"params": [t], "lr": rate * float(t.detach().square().mean().sqrt()) if t.dim() > 1 else norm_rate})
        self.optimizer = adam(groups, blocks.device) if groups else None

    def begin(self) -> None:
        """Round the tensors for one step, whose gradients `used` then collects."""
        self.used = {p: stored(t.detach(), self.kept[self.names[p]]).requires_grad_() for p, t in self.values.items()}

    def entering(self, ids: torch.Tensor, start: Hidden) -> Hidden:
        """The first layer's input; start: that of the original embedding."""
        table = self.used.get(self.embedding)
        return start if table is None else self.blocks.entering(ids, {self.embedding: table})

    def step(self) -> None:
        """Update the tensors by the gradients that `used` has collected."""
        if self.optimizer:
            for path, t in self.values.items():
                t.grad = self.used[path].grad
            self.optimizer.step()
            self.optimizer.zero_grad()

    def learnt(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> its new values."""
        return {name: self.values[p].detach().to(self.kept[name]) for p, name in self.names.items()}
