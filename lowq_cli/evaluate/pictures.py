"""Perplexity of texts that follow images, and the distance of these predictions from another model's."""

import math
from pathlib import Path
from typing import Any

import torch

from lowq_cli.calibrate.texts import picture_pairs
from lowq_cli.engine.model_record import owned
from lowq_cli.evaluate.perplexity import Progress, Report
from lowq_cli.hf.activations import activations_of
from lowq_packers.errors import NotFoundError, UsageError


def pairs(folder: Path) -> list[tuple[Path, str]]:
    """The images of a folder that have a text file (a.txt for a.png), with the texts. Raises NotFoundError, UsageError."""
    if not folder.is_dir():
        raise NotFoundError(f"there is no folder {folder} of pictures")
    files = picture_pairs(folder)
    if not files:
        raise UsageError(f"{folder} has no picture with a text file of the same name: a.png with a.txt")
    return files


@torch.inference_mode()
def measure_pictures(
    model: str | Path, folder: str | Path, against: str | Path | None, device: str = "auto", progress: Progress | None = None
) -> Report:
    """The results of `perplexity.measure` for the tokens of each text, which follows its image.

    Raises the same errors, and UnsupportedError for a model that takes no images.
    """
    from lowq_cli.engine.open_model import ready

    examples = pairs(Path(folder))
    loaded = [ready(str(name), device) for name in (model, against) if name is not None]
    sums, tokens, predicted, longest = {"nll": 0.0, "base": 0.0, "kl": 0.0, "agree": 0.0}, 0, 0, 0
    for i, (file, text) in enumerate(examples):
        results = [_log_probabilities(one, tokenizer, file, text) for one, tokenizer in loaded]
        for one, _ in loaded:
            owned(one).check_files()
        (log_p, target), (log_ref, other) = results[0], results[-1]
        if not torch.equal(target, other) or log_p.shape != log_ref.shape:
            raise UsageError("the models' tokenizers split a text after a picture differently")
        sums["nll"] -= float(log_p.gather(1, target[:, None]).double().sum())
        sums["base"] -= float(log_ref.gather(1, target[:, None]).double().sum())
        sums["kl"] += float((log_ref.exp() * (log_ref - log_p)).sum(1).double().sum())
        sums["agree"] += float((log_p.argmax(1) == log_ref.argmax(1)).sum())
        predicted, longest, tokens = predicted + len(target), max(longest, len(target)), tokens + len(target)
        if progress:
            progress(100 * (i + 1) // len(examples), file.name)
    ppl, base = (math.exp(min(sums[k] / predicted, 700.0)) for k in ("nll", "base"))
    act = activations_of(loaded[0][0])
    if against is None:
        return Report(ppl, tokens, predicted, longest, act=act)
    compared = base, max(sums["kl"] / predicted, 0.0), sums["agree"] / predicted
    return Report(ppl, tokens, predicted, longest, *compared, act)


def _log_probabilities(model: Any, tokenizer: Any, file: Path, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (n, V) in fp32 for each token of the text after the image, and the tokens (n,)."""
    from lowq_cli.engine.decoders import decoder_of
    from lowq_cli.engine.prompts import check_length, encode
    from lowq_cli.engine.vision import check_decoder, sight_of

    decoder: Any = decoder_of(model)
    check_decoder(decoder)
    picture = sight_of(model).picture(file)
    ids = encode(tokenizer, text, False, (model, [picture]))
    check_length(model, len(ids))
    shown = sight_of(model).shown(ids, [picture])
    first = shown.spans[-1][1]
    if first >= len(ids):
        raise UsageError(f"the text of {file} is empty")
    logits = decoder.logits(torch.tensor([ids], device=model.device), [shown])[0, first - 1 : -1]
    return logits.float().log_softmax(-1).cpu(), torch.tensor(ids[first:])
