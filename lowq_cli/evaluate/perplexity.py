"""Perplexity of a causal language model on a text, and how far its predictions are from another model's.

The text is cut into windows of `WINDOW` tokens without overlap; in each window every token but the first is predicted
from those before it. Losses are summed in fp64 from fp32 logits, whatever dtype the model computes in.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lowq_cli import console
from lowq_cli.cached_models import model_path
from lowq_cli.calibrate.texts import WINDOW, check_ids, read_utf8, tokenize, window_of, windows
from lowq_cli.engine.model_record import owned
from lowq_cli.engine.sampling import check_finite
from lowq_cli.evaluate.logits import device_of, logits_of, warm_reading
from lowq_cli.hf.activations import activations_of
from lowq_cli.models import CausalModel
from lowq_kernels.decode.kv import PLAIN
from lowq_packers.errors import UsageError

SAMPLE = Path(__file__).parents[1] / "demo" / "sample.txt"  # 56 kB that the bundled model has not seen
LOGITS_AT_ONCE = 1 << 26  # max. fp32 logits held at once on a CPU: 256 MB
# The share of a GPU's memory that they may take there, if that is more; with copies in other types it is about three times as
# much. An 8B with a vocabulary of 128,256 on an H200, whose host has to launch 32 layers for each pass: windows of 512 tokens
# take 24.9 ms one by one, 11.1 ms four and 10.9 ms eight at once.
GPU_SHARE = 1 / 64
Progress = Callable[[int, str], None]


@dataclass(frozen=True)
class Report:
    """The results of `evaluate`. `tokens` were read, `predicted` of them scored; kl is in nats per predicted token. act: the
    mode in which layers rounded activations, "none" if none did; set by `measure`.
    """

    ppl: float
    tokens: int
    predicted: int
    window: int
    base_ppl: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    act: str = "none"

    @property
    def ppl_increase_pct(self) -> float | None:
        """The increase of ppl over the reference model's, in percent."""
        return None if self.base_ppl is None else 100 * (self.ppl / self.base_ppl - 1)


@torch.inference_mode()
def evaluate(
    model: CausalModel,
    ids: torch.Tensor,
    reference: CausalModel | None = None,
    window: int = WINDOW,
    max_tokens: int | None = None,
    progress: Progress | None = None,
    kv: str = PLAIN,
    most_logits: int | None = None,
) -> Report:
    """Perplexity of `model` on token ids (T,); with `reference` also its perplexity, the KL divergence and the agreement.

    Args:
        model, reference: called as model(input_ids=(B, window)).logits (B, window, vocabulary); any device each.
        ids: (T,) token ids of the text.
        window: tokens per window; no overlap.
        max_tokens: read only this many tokens.
        progress: called with (percent done, note).
        kv: the kind of `model`'s KV cache, from which attention reads (`decode.kv.KINDS`).
        most_logits: max. fp32 logits in memory; None: `logits_at_once`.
    Returns:
        kl: mean over predicted tokens of sum p_ref ln(p_ref / p_model); top1_agreement: share of predicted tokens
        for which both models have the same likeliest token.
    Raises:
        UsageError: too short a text, tokens that the model lacks, or vocabularies of different size.
        DamagedError: logits that are not finite numbers, or weights that were written over meanwhile.
    """
    cut = windows(ids, window, max_tokens)
    device = device_of(model)
    vocabulary = _vocabulary(model)
    check_ids((int(cut.min()), int(cut.max())), vocabulary)
    most = logits_at_once(device) if most_logits is None else most_logits
    batch = max(1, most // (cut.shape[1] * vocabulary * (1 if reference is None else 4)))
    for m in (model, reference):
        if m is not None:
            warm_reading(m, min(batch, len(cut)) * cut.shape[1], kv if m is model else PLAIN)
    nll = base_nll = kl = agree = 0.0
    for start in range(0, cut.shape[0], batch):
        part = cut[start : start + batch]
        log_p = _log_probabilities(model, part, device, kv)
        target = part[:, 1:].reshape(-1, 1).to(device)
        nll -= float(log_p.gather(1, target).double().sum())
        if reference is not None:
            log_ref = _log_probabilities(reference, part, device)
            if log_ref.shape != log_p.shape:
                raise UsageError(f"the models' vocabularies differ: {log_p.shape[1]} and {log_ref.shape[1]} tokens")
            base_nll -= float(log_ref.gather(1, target).double().sum())
            agree += float((log_p.argmax(1) == log_ref.argmax(1)).sum())
            kl += float(log_ref.exp().mul_(log_ref.sub(log_p)).sum(1).double().sum())
        if progress:
            done = min(start + batch, cut.shape[0])
            progress(100 * done // cut.shape[0], f"perplexity so far {_exp(nll / (done * (cut.shape[1] - 1))):.2f}")
    predicted = cut.shape[0] * (cut.shape[1] - 1)
    report = Report(_exp(nll / predicted), cut.numel(), predicted, cut.shape[1])
    if reference is None:
        return report
    compared = (_exp(base_nll / predicted), max(kl / predicted, 0.0), agree / predicted)
    return replace(report, base_ppl=compared[0], kl=compared[1], top1_agreement=compared[2])


def logits_at_once(device: torch.device) -> int:
    """The max. number of fp32 logits to hold at once on a device: the same on every run, whatever else is in its memory."""
    if device.type != "cuda":
        return LOGITS_AT_ONCE
    return max(LOGITS_AT_ONCE, int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory) // 4)


def read_text(path: Path | str | None) -> str:
    """The text file's contents (UTF-8), or the bundled sample for None. Raises NotFoundError, or UsageError if empty."""
    file = SAMPLE if path is None else Path(path)
    text = read_utf8(file, "text")
    if not text.strip():
        raise UsageError(f"the text {file} is empty")
    return text


def measure(
    model: str | Path,
    text: str,
    against: str | Path | None = None,
    device: str = "auto",
    max_tokens: int | None = None,
    progress: Progress | None = None,
    act: str | None = None,
    kv: str = PLAIN,
) -> Report:
    """`evaluate` on a text, of models loaded by name.

    Args:
        model, against: lowq checkpoints, Hugging Face folders or hub ids; `against` fills base_ppl, kl, top1_agreement.
        progress: called with (percent done, note).
        act: how `model` rounds activations, see `eight_bits.apply_act`.
        kv: see `evaluate`.
    Raises:
        NotFoundError, DamagedError, UnsupportedError: as `lowq.load`. UsageError: too short a text, other vocabulary.
    """
    from lowq_cli.engine.open_model import ready

    loaded, tokenizer = ready(model, device)
    if act is not None:
        from lowq_cli.evaluate.eight_bits import apply_act

        apply_act(loaded, tokenizer, act, console.say)
    reference = ready(against, device)[0] if against else None
    window = min(window_of(m) for m in (loaded, reference) if m is not None)
    report = evaluate(loaded, tokenize(tokenizer, text), reference, window, max_tokens, progress, kv)
    return replace(report, act=activations_of(loaded))


def measure_modes(
    model: str | Path, text: str, device: str = "auto", max_tokens: int | None = None, progress: Progress | None = None
) -> dict[str, Report]:
    """Activation mode -> `evaluate` on a text, for every mode that the model's layers support. Arguments: see `measure`."""
    from lowq_cli.engine.open_model import ready
    from lowq_cli.hf.activations import modes, set_activations

    loaded, tokenizer = ready(model, device)
    ids = tokenize(tokenizer, text)
    reports: dict[str, Report] = {}
    for act in modes(loaded):
        set_activations(loaded, act)
        reports[act] = replace(evaluate(loaded, ids, None, window_of(loaded), max_tokens, progress), act=act)
    return reports


def perplexity(
    model: str | Path, text: str, against: str | Path | None = None, device: str = "auto", max_tokens: int | None = None
) -> dict[str, float | int | None]:
    """How well a model predicts a text, in windows of 512 tokens, as `lowq eval` measures it.

    Args:
        model, against: checkpoints, model folders, hub ids or names of `lowq ls`; `model` is compared with `against`,
            usually the original.
        text: the text itself, not the name of a file.
        max_tokens: read at most this many tokens of it.
    Returns:
        ppl, tokens (read), predicted (tokens), window, act (how the model rounds activations: none, int8 or fp8), and of the
        comparison base_ppl, kl (nats per token), top1_agreement, which are None without `against`.
    Raises:
        UsageError: fewer than two tokens, the name of a file, another vocabulary. NotFoundError, DamagedError,
            UnsupportedError: as `load`.
    """
    if isinstance(text, Path) or os.path.isfile(text):
        raise UsageError(f"text is the name of a file, {text}; give what it holds: pathlib.Path(...).read_text()")
    reference = None if against is None else model_path(against)
    return vars(measure(model_path(model), text, reference, device, max_tokens)).copy()


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _vocabulary(model: CausalModel) -> int:
    config = getattr(model, "config", None)
    config = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    return getattr(config, "vocab_size", 1 << 15)


def _log_probabilities(model: CausalModel, part: torch.Tensor, device: torch.device, kv: str = PLAIN) -> torch.Tensor:
    """(predicted tokens, vocabulary) fp32 log-probabilities of the next token, on `device`."""
    logits = logits_of(model, part, kv)[:, :-1].flatten(0, 1)
    owned(model).check_files()  # before the logits, which a file that was written over may have made infinite
    check_finite(logits)
    return torch.log_softmax(logits.to(device).float(), dim=-1)
