"""How many tokens of a text visit each expert of a mixture: one pass through the original model, one layer in memory."""

import torch

from lowq_cli.calibrate import texts
from lowq_cli.calibrate.layer_walk import Layer
from lowq_cli.files.source import Source
from lowq_cli.hf.layers import DecoderLayers


class Visits:
    """Counts the visits of a model's experts. window: tokens per sequence. Raises the errors of `DecoderLayers`."""

    def __init__(self, source: Source, device: torch.device) -> None:
        self.blocks = DecoderLayers(source, device)
        self.window = texts.window_of(self.blocks.model)

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """The number of visits (windows, experts of all layers) of tokens (T,), which are cut into windows."""
        cut = texts.windows(ids, self.window)
        hidden, others = self.blocks.start(cut, texts.BATCH)
        counts = []
        for number in range(len(self.blocks)):
            spots = {n: s for n, s in self.blocks.linears(number).items() if s.cut.expert is not None}
            with self.blocks.layer(number) as module:
                layer = Layer(module, others[number], spots)
                for name in dict.fromkeys(s.module for s in spots.values()):
                    count = len(layer.experts([n for n, s in spots.items() if s.module == name]))
                    counts.append(torch.cat([_counted(layer.routed(name, x), len(x), count) for x in hidden]))
                hidden = [layer.run(x, layer.original) for x in hidden]
        return torch.cat(counts, 1)


def _counted(routed: torch.Tensor, windows: int, experts: int) -> torch.Tensor:
    """The number of visits (windows, experts), from the experts (tokens, k) that each token visits."""
    to = torch.zeros(windows, experts, dtype=torch.long, device=routed.device)
    return to.scatter_add_(1, (at := routed.reshape(windows, -1).long()), torch.ones_like(at)).cpu()
