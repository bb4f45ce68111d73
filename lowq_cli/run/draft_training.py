"""`lowq draft train`: train a draft head for one model, on text that the model generated, half of it sampled, half greedy.

The model reads windows of the text as it does when it decodes, with its packed weights. The head reads the model's hidden
states and learns from its predictions. A killed run resumes: the text is in the user's cache, the training state is next to
the result, and the order of windows follows from the seed.

HEAD_STATE marks a folder whose head is not finished: it is written before any other file and removed after all of them.
HEAD_NOTES marks a finished head: it is written last, and such a folder is never written again.
"""

import json
import time
from collections.abc import Generator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from lowq_cli.calibrate import texts
from lowq_cli.engine.batch import Batch, Rectangle
from lowq_cli.engine.drafts.drafter_choice import speeds
from lowq_cli.engine.model_record import owned
from lowq_cli.engine.plan import Plan, plan_of
from lowq_cli.engine.state import static_state, tensors_of
from lowq_cli.engine.steps import AddNorm
from lowq_cli.files import folder, memo
from lowq_cli.files.source import CONFIG, HEAD_NOTES, HEAD_STATE
from lowq_cli.files.weight_files import SINGLE
from lowq_cli.run import own_text
from lowq_cli.run.draft_head import LATER, Learner, Sizes, loss_of, right
from lowq_cli.run.draft_speed import measure
from lowq_cli.run.draft_training_plan import Training, given_text, held_out
from lowq_cli.state import writing
from lowq_kernels.modules.joined import weight_of
from lowq_packers.atomic import sweep, unfinished, write_whole
from lowq_packers.errors import DamagedError, LowqError, UsageError, library_errors
from lowq_packers.regular import opened, read_text

RATE, WIDTH, WARM = 1e-3, 512, 100  # Adam's learning rate at WIDTH (inversely proportional to the width), and warm-up steps
MOST_RATE = 2e-3
MOMENTS = ("exp_avg", "exp_avg_sq")  # what Adam keeps of each weight
STATE = 4 * (1 + len(MOMENTS))  # bytes of the training state per weight
SAVE_S = 60.0  # seconds between two checkpoints of the training state


@dataclass(frozen=True)
class Step:
    """Progress: tokens generated or steps trained, and their total; loss and acceptance while it trains."""

    doing: str
    done: int
    total: int
    note: str = ""


@dataclass(frozen=True)
class Trained:
    """The result. params: weights of the head. guesses: tokens of its vocabulary. loss: at the end. accepted, accepted_drawn:
    for each j, the share of held-out positions whose guesses 1 .. j are all right, in greedy and in sampled text. length: mean
    tokens per step that follows from `accepted`. speed: tokens/s on `device`, its type, as `draft_speed.measure`.
    """

    out: str
    params: int
    guesses: int
    steps: int
    tokens: int
    seconds: float
    loss: float
    accepted: list[float]
    accepted_drawn: list[float]
    length: float
    device: str = ""
    speed: dict[str, float] = field(default_factory=dict)
    already_done: bool = False


def train(of: Training, model: Any, tokenizer: Any, save_s: float = SAVE_S) -> Generator[Step, None, Trained]:
    """Train and write the head. Ctrl-C or a kill loses at most `save_s` seconds of work.

    Raises BusyError where another process trains into the same folder, UsageError where that holds something else.
    """
    check_out(of)
    with ExitStack() as stack:
        with writing(of.out):
            of.out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(folder.held(of.out))
        stack.callback(_remove_empty, of.out)
        return (yield from _trained(of, model, tokenizer, save_s))


def check_out(of: Training) -> None:
    """Raise UsageError if the head cannot be written to its folder: a file is in its place, or other files are in it."""
    there = next(p for p in (of.out, *of.out.absolute().parents) if p.exists())
    if not there.is_dir():
        raise UsageError(f"--out {of.out}: {there} is a file; name a folder")
    if there != of.out or _made(of) is not None:
        return
    others = {*of.out.iterdir()} - unfinished(of.out / HEAD_STATE)
    if others and ((of.out / HEAD_NOTES).exists() or not (of.out / HEAD_STATE).exists()):
        raise UsageError(f"{of.out} is there already and holds something else; use another --out, or remove it")


def _remove_empty(out: Path) -> None:
    with suppress(OSError):  # it is not empty, except after an error or Ctrl-C before the first file
        out.rmdir()


def _trained(of: Training, model: Any, tokenizer: Any, save_s: float) -> Generator[Step, None, Trained]:
    began = time.monotonic()
    if (trained := _made(of)) is not None:
        with suppress(OSError):  # a read-only folder; elsewhere a run that was killed after HEAD_NOTES left the state
            (of.out / HEAD_STATE).unlink()
        return trained
    sweep(of.out / HEAD_STATE)
    check_out(of)
    state = of.out / HEAD_STATE
    kept = state.stat().st_blocks * 512 if state.exists() else 0
    folder.check_room(2 * STATE * of.of.params - kept, of.out)  # a new state is whole before the last one is removed
    plain, greedy = yield from training_windows(of, model, tokenizer)
    ids = _counted(torch.cat([plain, greedy]).flatten(), of.of)
    teacher = Teacher(plan_of(model), of.of, ids, of.windows, plain.shape[1])
    held = held_out(len(plain) + len(greedy)) // 2
    learnt = torch.cat([plain[:-held], greedy[:-held]])
    learner = Learner(of.of, _first(plan_of(model), of.of, ids), of.device, of.seed)
    loss = yield from _learn(of, learner, teacher, learnt, save_s)
    accepted, drawn = (judged(learner, teacher, part[-held:]) for part in (greedy, plain))
    owned(model).check_files()
    length = 1 + sum(accepted)
    result = Trained(
        str(of.out), of.of.params, of.of.guesses, of.steps, of.tokens, time.monotonic() - began, loss, accepted, drawn, length
    )
    _write_head(of, learner, ids)
    yield Step("time", 0, 1)
    result = replace(result, device=of.device.type, speed=measure(model, tokenizer, str(of.out), greedy[-held:]))
    yield Step("time", 1, 1)
    _finish(of, result)
    return result


def training_windows(of: Training, model: Any, tokenizer: Any) -> Generator[Step, None, tuple[torch.Tensor, torch.Tensor]]:
    """Windows (n, L) of sampled text, and of greedy text; for a given text, its two halves."""
    if of.own is None:
        ids = given_text(of.text).windows(tokenizer, of.tokens, model).long()
        half = len(ids) // 2
        return ids[:half], ids[half:]
    window, parts = texts.window_of(model), []
    for number, writing_ in enumerate((own_text.write(of.own, None), own_text.continued(of.own, None))):
        while True:
            try:
                step = next(writing_)
            except StopIteration as e:
                text = e.value
                break
            yield Step("write", number * of.own.tokens + step.tokens, 2 * of.own.tokens)
        ids = text if isinstance(text, torch.Tensor) else text.ids
        parts.append(texts.windows(ids.long(), window))
    return parts[0], parts[1]


def _counted(ids: torch.Tensor, of: Sizes) -> torch.Tensor:
    """The tokens (Vd,) of the head's vocabulary, sorted by id: the most frequent in the text; ties go to lower ids."""
    if of.guesses == of.vocab:
        return torch.arange(of.vocab)
    counts = torch.bincount(ids, minlength=of.vocab)
    return counts.argsort(descending=True, stable=True)[: of.guesses].sort().values


def _first(plan: Plan, of: Sizes, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Initial values of a head: the model's last norm and output rows, and `fc` passing on the last of its features."""
    H = of.hidden
    fc = torch.zeros(H, 3 * H)
    fc[:, 2 * H :] = torch.eye(H)
    tensors = {"fc.weight": fc, "lm_head.weight": weight_of(plan.head, torch.float32)[ids.to(plan.device)]}
    norm = next((step.norm for step in reversed(plan.steps) if isinstance(step, AddNorm)), None)
    if norm is not None and norm.weight is not None:
        tensors["norm.weight"] = norm.weight.float()
    return {n: t.float().cpu() for n, t in tensors.items()}


class Teacher:
    """The model in its decode configuration: returns hidden states and predictions for windows of text."""

    def __init__(self, plan: Plan, of: Sizes, ids: torch.Tensor, side: int, window: int) -> None:
        self.plan, self.of, self.side, self.window = plan, of, side, window
        self.ids = ids.to(plan.device)
        self.whole = of.guesses == of.vocab
        self.state = static_state(plan, side, window, "16")
        self.angles = plan.angles(window, plan.device)
        self.mask = plan.embed(torch.tensor([of.mask], device=plan.device))[0].clone()

    def __call__(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """For windows (B, L) on the device: embeddings of the token after each row's, features, logits of `ids`, top tokens.

        Shapes (B, L - 1, H), (B, L - J, 3 H), (B, L - 1, Vd), (B, L - 1).
        """
        read = self._read(ids)
        return tuple(t.clone() for t in read)  # type: ignore[return-value]  # autograd cannot save inference tensors

    @torch.inference_mode()
    def _read(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        plan, (B, L) = self.plan, ids.shape
        for t in tensors_of(self.state):
            t.zero_()
        plan.tap(self.of.taps)
        there = Rectangle(slice(0, B), 0, L, [L] * B, self.side)
        flat = ids.reshape(-1)
        places = torch.arange(1, B + 1, device=plan.device)
        pos = torch.zeros(B, dtype=torch.int32, device=plan.device)
        batch = Batch(plan.ops, flat, 0, pos, self.angles, places, rectangle=there, tile=plan.tile)
        taps: list[torch.Tensor] = []
        embedded = plan.embed(flat)
        y = plan.hidden(embedded.clone(), batch, self.state, taps).reshape(B, L, -1)[:, 1:]
        logits = plan.capped(plan.logits(y.flatten(0, 1))).reshape(B, L - 1, -1)
        best = logits.argmax(-1)
        logits = logits if self.whole else logits[..., self.ids]
        features = torch.cat([t.reshape(B, L, -1) for t in taps], -1)[:, : L - self.of.in_a_row]
        return embedded.reshape(B, L, -1)[:, 1:], features, logits, best


def _autocast(device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else nullcontext()


def _learn(
    of: Training, learner: Learner, teacher: Teacher, windows: torch.Tensor, save_s: float
) -> Generator[Step, None, float]:
    """Run all remaining steps; return the mean loss per guess over the last hundred."""
    rate = min(MOST_RATE, RATE * WIDTH / of.of.hidden)
    adam = torch.optim.AdamW(learner.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    (done, losses), saved, each = _resumed(of, learner, adam), time.monotonic(), max(1, len(windows) // of.windows)
    weight, warm = sum(LATER**j for j in range(of.of.in_a_row)), min(WARM, max(1, of.steps // 10))
    for step in range(done, of.steps):
        number, place = divmod(step, each)
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(of.seed * 1000 + number))
        ids = windows[order[place * of.windows : (place + 1) * of.windows]].to(of.device)
        for group in adam.param_groups:
            group["lr"] = rate * min((step + 1) / warm, 0.02 + 0.98 * (1 - step / of.steps))
        embeddings, features, targets, _ = teacher(ids)
        with _autocast(of.device):
            loss = loss_of(_guesses(learner, teacher, embeddings, features), targets) / weight
        adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        adam.step()
        losses = [*losses[-99:], loss.detach()]
        if step % 10 == 0 or step + 1 == of.steps:
            yield Step("learn", step + 1, of.steps, f"loss {float(torch.stack(losses).mean()):.3f}")
            if time.monotonic() - saved > save_s:
                _save(of, learner, adam, step + 1, losses)
                saved = time.monotonic()
    if not (of.out / HEAD_STATE).exists():  # a short training: the head's files need the mark
        _save(of, learner, adam, of.steps, losses)
    return float(torch.stack(losses).mean())


def _guesses(learner: Learner, teacher: Teacher, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return learner(*(x if x.is_cuda else x.float() for x in inputs), learner.of.in_a_row, teacher.mask)


@torch.no_grad()
def judged(learner: Learner, teacher: Teacher, windows: torch.Tensor) -> list[float]:
    """For each j, the share of positions in held-out windows whose guesses 1 .. j are all the model's top tokens."""
    shares = []
    for some in windows.split(teacher.side):
        embeddings, features, _, best = teacher(some.to(teacher.plan.device))
        with _autocast(teacher.plan.device):
            logits = _guesses(learner, teacher, embeddings, features)
        shares.append(right(logits, best, teacher.ids) * len(some))
    return (torch.stack(shares).sum(0) / len(windows)).tolist()


def _facts(of: Training) -> str:
    facts = [2, of.inputs, asdict(of.of), of.tokens, of.seed, of.steps, of.windows, of.device.type]
    return memo.key(facts)


def _save(of: Training, learner: Learner, adam: Any, step: int, losses: list[torch.Tensor]) -> None:
    held = {f"w/{n}": p.detach() for n, p in learner.weights.items()} | {"losses": torch.stack(losses)}
    for n, p in learner.weights.items():
        held |= {f"{k}/{n}": adam.state[p][k] for k in MOMENTS}
    with writing(of.out / HEAD_STATE):
        write_whole(
            of.out / HEAD_STATE,
            save({n: t.contiguous().cpu() for n, t in held.items()}, {"run": _facts(of), "step": str(step)}),
        )


def _resumed(of: Training, learner: Learner, adam: Any) -> tuple[int, list[torch.Tensor]]:
    """The number of steps that an earlier run of the same command did and its last losses, after restoring its state."""
    from safetensors import safe_open

    path = of.out / HEAD_STATE
    if not path.exists():
        return 0, []
    expected = {f"{k}/{n}": (p.shape, p.dtype) for n, p in learner.weights.items() for k in ("w", *MOMENTS)}
    with library_errors(DamagedError, f"{path} cannot be read; remove it to train from the beginning"), opened(path) as name:
        with safe_open(name, framework="pt") as file:
            notes = file.metadata() or {}
        if notes.get("run") != _facts(of):
            return 0, []
        held, step = load_file(name, device=str(of.device)), int(notes["step"])
        losses = [*held.pop("losses")]
    if {n: (t.shape, t.dtype) for n, t in held.items()} != expected or not 0 < step <= of.steps or not losses:
        raise DamagedError(f"{path} does not hold the state of this training; remove it to train from the beginning")
    for n, p in learner.weights.items():
        p.data.copy_(held[f"w/{n}"])
        adam.state[p] = {k: held[f"{k}/{n}"].clone() for k in MOMENTS} | {"step": torch.tensor(float(step))}
    return step, losses


def _write_head(of: Training, learner: Learner, ids: torch.Tensor) -> None:
    """Write the head in the format of published EAGLE-3 heads."""
    tensors = {n: t.to(torch.bfloat16).cpu().contiguous() for n, t in learner.tensors().items()}
    if of.of.guesses != of.of.vocab:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(of.of.vocab, dtype=torch.bool).index_fill(0, ids, True)
    with writing(of.out):
        write_whole(of.out / SINGLE, save(tensors, {"format": "pt"}))
        write_whole(of.out / CONFIG, json.dumps(of.of.config(), indent=2).encode())


def _finish(of: Training, result: Trained) -> None:
    """Record the head's source and the result in its folder, which is finished then."""
    with writing(of.out):
        notes = {"run": _facts(of), "model": of.model, "text": of.text, "seed": of.seed, **asdict(result)}
        write_whole(of.out / HEAD_NOTES, json.dumps(notes, indent=2).encode())
        (of.out / HEAD_STATE).unlink(missing_ok=True)


def _made(of: Training) -> Trained | None:
    """The complete result of an earlier run of the same command, or None."""
    with suppress(LowqError, OSError, ValueError, KeyError, TypeError):
        notes = json.loads(read_text(of.out / HEAD_NOTES))
        if notes.pop("run") == _facts(of) and (of.out / SINGLE).is_file():
            names = Trained.__dataclass_fields__  # an older lowq did not measure the speed
            notes["speed"] = speeds(notes)
            return Trained(**{n: notes[n] for n in names if n in notes and n != "already_done"}, already_done=True)
    return None
