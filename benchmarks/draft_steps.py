"""us of a target step, and of one guess of a head (1 row: layer, output head, argmax), each in a CUDA graph."""
import json, sys, time
import torch
from lowq_cli.engine import heads, ready
from lowq_cli.engine.batch import Batch
from lowq_cli.engine.graph import capture
from lowq_cli.engine.plan import plan_of
from lowq_cli.engine.state import static_state
model, _ = ready.ready(sys.argv[1], "cuda")
plan = plan_of(model)
head = heads.load(sys.argv[2], model)
dev = torch.device("cuda")

def timed(f, n=200):
    g = capture(f)
    for _ in range(20): g.replay()
    torch.cuda.synchronize(); t = time.perf_counter()
    for _ in range(n): g.replay()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - t) / n

with torch.inference_mode():
    for B in (1, 4, 8, 16):
        st, hs = static_state(plan, B, 512, "16"), static_state(head, B, 512, "16")
        pos = torch.full((B,), 200, dtype=torch.int32, device=dev)
        tok = torch.full((B,), 5, dtype=torch.int64, device=dev)
        places = torch.arange(1, B + 1, device=dev)
        ta, ha = plan.angles(512, dev), head.angles(512, dev)
        x = torch.randn(B, plan.model.hidden, device=dev, dtype=plan.dtype)
        plan.tap(())
        def step():
            b = Batch(plan.ops, tok, B, pos, ta, places)
            return plan.logits(plan.hidden(plan.embed(tok), b, st)).argmax(-1)
        def tapped():
            b = Batch(plan.ops, tok, B, pos, ta, places); taps = []
            y = plan.logits(plan.hidden(plan.embed(tok), b, st, taps)).argmax(-1)
            return head.entering(taps)
        def guess(K):
            def run():
                t, h = tok, x.clone()
                for _ in range(K):
                    b = Batch(head.ops, t, B, pos, ha, places)
                    y, h = head.guess(t, h, b, hs)
                    t = head.ids(head.logits(y).argmax(-1))
                return t
            return run
        row = {"B": B, "target_us": timed(step)}
        plan.tap(head.layers)
        row["tapped_us"] = timed(tapped)
        row |= {f"guess{k}_us": timed(guess(k)) for k in (1, 2, 4)}
        print(json.dumps(row), flush=True)
