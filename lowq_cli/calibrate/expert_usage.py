"""How often each expert of a mixture is visited by a text: one pass through the original model, a layer at a time in memory."""

import torch

from lowq_cli.calibrate import texts
from lowq_cli.calibrate.layer_walk import Layer
from lowq_cli.files.source import Source
from lowq_cli.hf.layers import DecoderLayers


class Visits:
    """Counts the visits of a model's experts. window: tokens that are read together. Raises as `DecoderLayers`."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self.blocks = DecoderLayers(source, device)
        self.window = texts.window_of(self.blocks.model)

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """(windows, experts of all layers) visits of tokens (T,), cut into windows."""
        cut = texts.windows(ids, self.window)
        hidden, others = self.blocks.start(cut, texts.BATCH)
        found = []
        for number in range(len(self.blocks)):
            spots = {n: s for n, s in self.blocks.linears(number).items() if s.cut.expert is not None}
            with self.blocks.layer(number) as module:
                layer = Layer(module, others[number], spots)
                for name in dict.fromkeys(s.module for s in spots.values()):
                    count = len(layer.experts([n for n, s in spots.items() if s.module == name]))
                    found.append(torch.cat([_counted(layer.routed(name, x), len(x), count) for x in hidden]))
                hidden = [layer.run(x, layer.original) for x in hidden]
        return torch.cat(found, 1)


def _counted(routed: torch.Tensor, windows: int, experts: int) -> torch.Tensor:
    """(windows, experts) of the experts (tokens, k) that each token visits."""
    to = torch.zeros(windows, experts, dtype=torch.long, device=routed.device)
    return to.scatter_add_(1, (at := routed.reshape(windows, -1).long()), torch.ones_like(at)).cpu()
